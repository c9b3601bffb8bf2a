"""Changes of a run's spec: what differs between two, and another number of rounds."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import attrs

from ...protocol.errors import UserError
from .spec import SPEC_EXIT_CODE, TABLES, RunSpec
from .spec_faults import key_lines

ROUNDS_KEY = "run.rounds"
_ROUNDS = re.compile(r"""(\brounds["']?\s*=\s*)[+\d_xobXOBa-fA-F]+""")


def changed_settings(before: RunSpec, after: RunSpec) -> list[str]:
    """Return a phrase for each setting that differs, such as "membership.grace_s from 5 to 10"."""
    return [
        f"{key} from {_shown(old)} to {_shown(new)}"
        for (key, old), (_key, new) in zip(_settings(before), _settings(after), strict=True)
        if old != new
    ]


def _settings(spec: RunSpec) -> Iterator[tuple[str, object]]:
    for table, kind in TABLES.items():
        for attribute in attrs.fields(kind):
            yield f"{table}.{attribute.name}", getattr(getattr(spec, table), attribute.name)


def _shown(value: object) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    return json.dumps(value, ensure_ascii=False, default=list)


def with_rounds(spec: RunSpec, rounds: int) -> RunSpec:
    """Return the spec with another number of rounds, its text changed in that place only.

    Raises:
      UserError: the number is invalid, or it cannot be put into this text.
    """
    changed = RunSpec.parse(_text_with_rounds(spec.toml_text, rounds))
    wanted = attrs.evolve(spec, run=attrs.evolve(spec.run, rounds=rounds))
    if attrs.evolve(changed, toml_text="") != attrs.evolve(wanted, toml_text=""):
        raise UserError(
            "the number of rounds cannot be changed in this run.toml",
            exit_code=SPEC_EXIT_CODE,
            hint=f"write rounds = {rounds} into it, and start the master again",
        )
    return changed


def _text_with_rounds(toml_text: str, rounds: int) -> str:
    lines, numbers = toml_text.splitlines(), key_lines(toml_text)
    if ROUNDS_KEY in numbers:
        index = numbers[ROUNDS_KEY] - 1
        lines[index] = _ROUNDS.sub(rf"\g<1>{rounds}", lines[index], count=1)
    elif "run" in numbers:
        lines.insert(numbers["run"], f"rounds = {rounds}")
    else:
        lines += ["", "[run]", f"rounds = {rounds}"]
    return "\n".join(lines) + "\n"
