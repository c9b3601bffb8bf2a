"""``run.toml`` as a file: read by the commands that only look at it, and by the master."""

from __future__ import annotations

from pathlib import Path

from ..membership.spec.spec import RunSpec
from ..protocol.errors import UserError
from .exit_codes import ExitCode


def read_spec(path: Path) -> RunSpec:
    """Read run.toml; every way of failing is one sentence."""
    return RunSpec.parse(read_text(path))


def read_text(path: Path) -> str:
    """What is in run.toml; raises UserError."""
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
