"""A look at a training command before it is started: is there such a program, and such a script?

Nothing is run. What only the program itself can tell (a missing import) shows when it starts.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from ...protocol.errors import UserError
from ..exit_codes import ExitCode

PYTHON = re.compile(r"(?:python|pypy)[0-9.]*t?(?:\.exe)?")
TAKES_VALUE = ("-W", "-X", "--check-hash-based-pycs")  # options of python that a word follows
NO_SCRIPT = re.compile(r"-|-[A-VYZa-z]*[cm].*")  # a program, a module or standard input is run


def check_command(command: Sequence[str]) -> None:
    """Check that a command's program exists, and of a python command the script.

    Raises:
      UserError: one of them does not.
    """
    if not command:
        return
    program = command[0]
    if shutil.which(program) is None:
        raise UserError(
            f"{_fault(program)}; the training command is `{shlex.join(command)}`",
            exit_code=ExitCode.TRAINER,
            hint="give the program's full path, or for a Python script: -- "
            f"{shlex.quote(Path(sys.executable).name)} train.py",
        )
    script = script_of(command)
    if script is None or script.is_file() or (script.is_dir() and _is_package(script)):
        return
    raise UserError(
        f"{script} is a folder without a __main__.py"
        if script.is_dir()
        else f"there is no script {script}",
        exit_code=ExitCode.TRAINER,
        hint=f"the training command `{shlex.join(command)}` runs in {Path.cwd()}; give the script's path "
        "from there",
    )


def script_of(command: Sequence[str]) -> Path | None:
    """Return the script that a python command runs; None if it runs none, or another program."""
    if not PYTHON.fullmatch(Path(command[0]).name):
        return None
    words = iter(command[1:])
    for word in words:
        if word in TAKES_VALUE:
            next(words, None)
        elif NO_SCRIPT.fullmatch(word):
            return None
        elif not word.startswith("-"):
            return Path(word)
    return None


def _is_package(folder: Path) -> bool:
    return (folder / "__main__.py").is_file()


def _fault(program: str) -> str:
    if not Path(program).exists() or os.sep not in program:
        return f"there is no program {program!r}"
    return f"{program} is not a program that can be run"
