"""Reading of ``run.toml`` by the master and by commands."""

from __future__ import annotations

from pathlib import Path

from ..membership.spec.spec import RunSpec
from ..protocol.errors import UserError
from .exit_codes import ExitCode


def read_spec(path: Path) -> RunSpec:
    """Read and parse run.toml; raise UserError for any fault."""
    return RunSpec.parse(read_text(path))


def read_text(path: Path) -> str:
    """Return the text of run.toml; raise UserError if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(
            f"cannot read {path}: {error.strerror}",
            exit_code=ExitCode.CONFIG,
            hint="write a run.toml first; the README shows one",
        ) from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text", exit_code=ExitCode.CONFIG) from error
