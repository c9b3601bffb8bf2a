"""A look at a training command before it is started: is it where it belongs, is there such a
program and script?

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

import click

from ...protocol.errors import UserError
from ..process.exit_codes import ExitCode

PYTHON = re.compile(r"(?:python|pypy)[0-9.]*t?(?:\.exe)?")
TAKES_VALUE = ("-W", "-X", "--check-hash-based-pycs")  # options of python that a word follows
NO_SCRIPT = re.compile(r"-|-[A-VYZa-z]*[cm].*")  # a program, a module or standard input is run


def check_command(command: Sequence[str]) -> None:
    """Raise UserError if a command's program or a python command's script does not exist."""
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
    if script is None or script.is_file() or (script / "__main__.py").is_file():
        return
    raise UserError(
        (
            f"{script} is a folder without a __main__.py"
            if script.is_dir()
            else f"there is no script {script}"
        ),
        exit_code=ExitCode.TRAINER,
        hint=(
            f"the training command `{shlex.join(command)}` runs in {Path.cwd()}; give the script's"
            " path from there"
        ),
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


def _fault(program: str) -> str:
    if not Path(program).exists() or os.sep not in program:
        return f"there is no program {program!r}"
    return f"{program} is not a program that can be run"


class TakesCommand(click.Command):
    """A command with another program's command line after ``--``, which tells options apart.

    Attributes:
      first: the word before the program's command line.
      missing: what is said if there is none.
    """

    first = "INVITE"
    missing = "the invite is missing: the string that the run's master prints"

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the arguments; raise UserError without an invite, or for a missing ``--``."""
        words = self._words(args)
        if "--" in args:
            if not words:
                after = shlex.join(args[args.index("--") :])
                raise UserError(
                    self.missing,
                    exit_code=ExitCode.USAGE,
                    hint=f"{ctx.command_path} {self.first} {after}",
                )
        elif len(words) > 1 and any(word.startswith("-") for word in args[words[1] + 1 :]):
            own = shlex.join(self.first if each == args[0] else each for each in args[: words[1]])
            raise UserError(
                "the training command has options, so `--` must stand before it",
                exit_code=ExitCode.USAGE,
                hint=f"{ctx.command_path} {own} -- {shlex.join(args[words[1] :])}",
            )
        return super().parse_args(ctx, args)

    def _words(self, args: Sequence[str]) -> list[int]:
        """Return the indices of the words before ``--`` that are no options, nor their values."""
        options = [each for each in self.params if isinstance(each, click.Option)]
        with_value = {name for each in options if not each.is_flag for name in each.opts}
        words = enumerate(args[: args.index("--")] if "--" in args else args)
        found = []
        for index, word in words:
            if word in with_value:
                next(words, None)
            elif not word.startswith("-"):
                found.append(index)
        return found
