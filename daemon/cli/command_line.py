"""The ``holdfast`` command group, and the handling of every command's errors.

No module of commands imports anything slow at module level: ``holdfast status`` must not wait for
what only ``holdfast export`` needs.

A ``UserError`` that a command raises becomes one line, a hint and an exit status. An error that the
user can fix never prints a traceback.
"""

from __future__ import annotations

import difflib
import functools
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import ParamSpec

import click

from ... import __version__
from ...protocol.errors import UserError
from ..process import logs
from ..process.exit_codes import ExitCode
from ..process.tasks import only_error
from . import ask_commands, look_commands, master_commands, run_commands
from .checkpoints.commands import checkpoint, export
from .config_commands import config, init
from .doctor_command import doctor
from .try_command import try_script

P = ParamSpec("P")

ENVIRONMENT_PREFIX = "HOLDFAST_"
# Set by the daemon for its trainer, or read elsewhere. Every other variable should belong to an
# option.
OTHER_VARIABLES = {
    "HOLDFAST_GPUS",
    "HOLDFAST_HOME",
    "HOLDFAST_MEMBER",
    "HOLDFAST_PASSPHRASE",
    "HOLDFAST_SOCKET",
    "HOLDFAST_STANDALONE",
    "HOLDFAST_STANDALONE_STEPS",
    "HOLDFAST_START",
}
MISSPELT = 0.93  # at this likeness to a known variable (difflib) an unknown one is a typing error


def fails_plainly(function: Callable[P, None]) -> Callable[P, None]:
    """Turn errors that the user can fix into a line, a hint and an exit status."""

    @functools.wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> None:
        error: BaseException | None
        stopped = UserError("stopped", exit_code=ExitCode.INTERRUPTED)
        try:
            function(*args, **kwargs)
            return
        except click.ClickException as wrong_use:
            wrong_use.show()
            sys.exit(wrong_use.exit_code)
        except UserError as raised:
            error = raised
        except (click.Abort, KeyboardInterrupt):  # Ctrl+C before a daemon listens for signals
            error = stopped
        except BaseExceptionGroup as group:
            error = stopped if group.split(KeyboardInterrupt)[1] is None else only_error(group)
            if error is None:
                raise
        click.echo(f"holdfast: {error}", err=True)
        if isinstance(error, UserError):
            if error.hint:
                click.echo(f"  {error.hint}", err=True)
            sys.exit(error.exit_code)
        sys.exit(ExitCode.FAILED)

    return wrapped


class Commands(click.Group):
    """The command group, which checks the environment variables before any command runs."""

    def invoke(self, context: click.Context) -> object:
        check_variables(os.environ, self)
        return super().invoke(context)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands under the headings of ``SECTIONS``."""
        width = max(map(len, self.commands))
        for title, section in SECTIONS.items():
            limit = formatter.width - 6 - width
            rows = [(each.name or "", each.get_short_help_str(limit)) for each in section]
            with formatter.section(title):
                formatter.write_dl([(f"{name:<{width}}", text) for name, text in rows])


def check_variables(environment: Mapping[str, str], group: click.Group) -> None:
    """Refuse misspelt HOLDFAST_* variables; warn of other unknown ones (Kubernetes sets some)."""
    own = {f"{ENVIRONMENT_PREFIX}{option.name}".upper() for option in group.params}
    known = OTHER_VARIABLES | own | _variables(ENVIRONMENT_PREFIX, group)
    given = {name for name in environment if name.startswith(ENVIRONMENT_PREFIX)}
    unknown = sorted(given - known)
    for variable in unknown:
        close = difflib.get_close_matches(variable, known, 1, MISSPELT)
        if close:
            raise UserError(
                f"unknown environment variable {variable}",
                exit_code=ExitCode.USAGE,
                hint=f"{close[0]} is one; correct the name, or unset the variable",
            )
    if unknown:
        click.echo(f"holdfast: ignores unknown variables: {', '.join(unknown)}", err=True)


def _variables(prefix: str, group: click.Group) -> set[str]:
    """Return the names of the variables from which click reads options of a group's commands."""
    found: set[str] = set()
    for name, command in group.commands.items():
        inner = f"{prefix}{name}_".upper().replace("-", "_")
        found.update(f"{inner}{parameter.name}".upper() for parameter in command.params)
        if isinstance(command, click.Group):
            found |= _variables(inner, command)
    return found


@click.group(
    cls=Commands,
    context_settings={
        "auto_envvar_prefix": "HOLDFAST",
        "help_option_names": ["-h", "--help"],
        "show_default": True,
    },
)
@click.version_option(__version__, prog_name="holdfast")
@click.option(
    "--log-level",
    type=click.Choice(["debug", "info", "warning", "error"]),
    default="warning",
    help="Least severity to log.",
)
@click.option(
    "--log-format",
    type=click.Choice(["text", "json"]),
    default="text",
    help="Plain lines, or one JSON object per line.",
)
@click.option(
    "--log-file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Log to this file, rotated at 16 MiB, instead of standard error.",
)
def commands(log_level: str, log_format: str, log_file: Path | None) -> None:
    """Train one model together, on machines that may vanish at any time.

    \b
    See it work:        holdfast demo
    On one machine:     holdfast master run.toml
    On every machine:   holdfast join INVITE -- python train.py
    """
    logs.configure(log_level, log_format, log_file)


SECTIONS: dict[str, tuple[click.Command, ...]] = {
    "Start": (
        run_commands.demo,
        try_script,
        init,
        config,
        master_commands.master,
        master_commands.standby,
        run_commands.join,
        run_commands.host,
        doctor,
    ),
    "Look": (
        ask_commands.status,
        look_commands.dashboard,
        look_commands.logs,
        look_commands.peers,
        look_commands.rounds,
        look_commands.events,
    ),
    "Machines": (
        ask_commands.invite,
        ask_commands.approve,
        ask_commands.kick,
        ask_commands.demote,
        ask_commands.leave,
        look_commands.forget,
        run_commands.relay,
    ),
    "Operate": (
        ask_commands.pause,
        ask_commands.resume,
        ask_commands.finish,
        ask_commands.backup,
    ),
    "Checkpoints": (checkpoint, export),
}
for section in SECTIONS.values():
    for command in section:
        commands.add_command(command)


@fails_plainly
def main() -> None:
    """Run the command line; the exit status is one of ``ExitCode``."""
    # The descriptor of a closed stream would else go to a socket or a journal.
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode))
    # click's standalone mode would exit with status 1 on Ctrl+C.
    sys.exit(commands.main(prog_name="holdfast", standalone_mode=False))
