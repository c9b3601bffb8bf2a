"""Changes of a run's spec: what differs between two, and another number of rounds or epochs."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import attrs

from ...protocol.errors import UserError
from .spec import SPEC_EXIT_CODE, TABLES, RunSpec
from .spec_faults import key_lines

_NUMBER = r"""(\b{key}["']?\s*=\s*)[+\d_xobXOBa-fA-F]+"""


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


def with_end(spec: RunSpec, *, rounds: int | None = None, epochs: int | None = None) -> RunSpec:
    """Return the spec with another number of rounds or epochs, its text changed in these places only.

    Args:
      rounds, epochs: None: as it is.

    Raises:
      UserError: a number is invalid, or it cannot be put into this text.
    """
    for table, key, count in (("run", "rounds", rounds), ("data", "epochs", epochs)):
        if count is not None:
            spec = _with_count(spec, table, key, count)
    return spec


def _with_count(spec: RunSpec, table: str, key: str, count: int) -> RunSpec:
    changed = RunSpec.parse(_text_with_count(spec.toml_text, table, key, count))
    wanted = attrs.evolve(spec, **{table: attrs.evolve(getattr(spec, table), **{key: count})})
    if attrs.evolve(changed, toml_text="") != attrs.evolve(wanted, toml_text=""):
        raise UserError(
            f"the number of {key} cannot be changed in this run.toml",
            exit_code=SPEC_EXIT_CODE,
            hint=f"write {key} = {count} into it, under [{table}], and start the master again",
        )
    return changed


def _text_with_count(toml_text: str, table: str, key: str, count: int) -> str:
    lines, numbers = toml_text.splitlines(), key_lines(toml_text)
    if f"{table}.{key}" in numbers:
        index = numbers[f"{table}.{key}"] - 1
        number = re.compile(_NUMBER.format(key=key))
        lines[index] = number.sub(rf"\g<1>{count}", lines[index], count=1)
    elif table in numbers:
        lines.insert(numbers[table], f"{key} = {count}")
    else:
        lines += ["", f"[{table}]", f"{key} = {count}"]
    return "\n".join(lines) + "\n"
