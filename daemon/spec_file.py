"""Reading of ``run.toml`` by the master and by commands."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..membership.spec.spec import RunSpec
from ..membership.spec.spec_faults import SpecFault, find_faults
from ..protocol.errors import UserError
from ..protocol.text import decoded
from .process.exit_codes import ExitCode


def read_spec(path: Path) -> RunSpec:
    """Read and parse run.toml; raise a UserError that lists all errors with their lines."""
    text = read_text(path)
    errors, _warnings = find_faults(text)
    if errors:
        lines = format_faults(path, "error", errors)
        if len(lines) > 1:
            lines.insert(0, f"{path} has {len(errors)} errors")
        raise UserError(lines[0], exit_code=ExitCode.CONFIG, hint="\n  ".join(lines[1:]))
    return RunSpec.parse(text)


def format_faults(path: Path, kind: str, faults: Sequence[SpecFault]) -> list[str]:
    """Return a line for each error or warning (``kind``) in a run.toml."""
    lines = []
    for fault in faults:
        where = f"{path}:{fault.line}" if fault.line else str(path)
        named = f"{fault.key}: " if fault.key else ""
        lines.append(f"{where}: {kind}: {named}{fault.text}")
    return lines


def read_text(path: Path) -> str:
    """Return the text of run.toml; raise UserError if it cannot be read."""
    try:
        return decoded(path.read_bytes())
    except OSError as error:
        raise UserError(
            f"cannot read {path}: {error.strerror}",
            exit_code=ExitCode.CONFIG,
            hint="`holdfast init my-run` writes one, and a training script",
        ) from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text", exit_code=ExitCode.CONFIG) from error
