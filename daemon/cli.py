"""The ``holdfast`` command: parsing, help and the last line of every error.

Commands do their work elsewhere; what they raise as ``UserError`` becomes one line, a hint and an
exit status here. There is no traceback for what a person can mend.
"""

from __future__ import annotations

import functools
import json
import logging
import math
import os
import socket
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ParamSpec

import click
import trio

from .. import __version__
from ..protocol.addresses import Address
from ..protocol.errors import UserError
from .bench_allreduce import allreduce
from .bench_lanes import lanes
from .exit_codes import ExitCode
from .places import Control, find_control, locked, master_state, peer_state
from .simulate import simulate
from .tasks import told_error

P = ParamSpec("P")

HTTP_S = 10.0  # a local daemon answers at once or not at all
MASTER_PORT = 29700
NAME_CHARS_MAX = 64  # of a peer; tables and logs stay readable
HOURS_MAX = 87_600.0  # of an invite: ten years
ENVIRONMENT_PREFIX = "HOLDFAST_"
# Set by the daemon for its trainer, or read elsewhere; everything else must be an option's.
OTHER_VARIABLES = {"HOLDFAST_SOCKET", "HOLDFAST_MEMBER", "HOLDFAST_HOME"}


def fails_plainly(function: Callable[P, None]) -> Callable[P, None]:
    """Turn errors that a person can mend into a line, a hint and an exit status."""

    @functools.wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> None:
        error: BaseException | None
        try:
            function(*args, **kwargs)
            return
        except click.ClickException as wrong_use:
            wrong_use.show()
            sys.exit(wrong_use.exit_code)
        except UserError as raised:
            error = raised
        except (click.Abort, KeyboardInterrupt):  # Ctrl+C before a daemon listens for signals
            click.echo("holdfast: stopped", err=True)
            sys.exit(ExitCode.INTERRUPTED)
        except BaseExceptionGroup as group:
            if group.split(KeyboardInterrupt)[1] is None:
                click.echo("holdfast: stopped", err=True)
                sys.exit(ExitCode.INTERRUPTED)
            error = told_error(group)
            if error is None:
                raise
        click.echo(f"holdfast: {error}", err=True)
        if isinstance(error, UserError):
            if error.hint:
                click.echo(f"  {error.hint}", err=True)
            sys.exit(error.exit_code)
        sys.exit(ExitCode.FAILED)

    return wrapped


def _parsed(text: str, default_port: int | None = None) -> Address:
    try:
        return Address.parse(text, default_port)
    except UserError as error:
        raise click.BadParameter(f"{error}: {error.hint}") from error


def _address(_context: click.Context, _parameter: click.Parameter, value: str) -> Address:
    return _parsed(value)


def _addresses(
    _context: click.Context, _parameter: click.Parameter, value: tuple[str, ...]
) -> tuple[Address, ...]:
    return tuple(_parsed(text) for text in value)


def _dialable(
    _context: click.Context, _parameter: click.Parameter, value: tuple[str, ...]
) -> tuple[Address, ...]:
    return tuple(_parsed(text, default_port=0) for text in value)


def _member_name(_context: click.Context, _parameter: click.Parameter, value: str) -> str:
    if not 1 <= len(value) <= NAME_CHARS_MAX or not value.isprintable():
        raise click.BadParameter(f"a name has 1 to {NAME_CHARS_MAX} printable characters")
    return value


def _site(_context: click.Context, _parameter: click.Parameter, value: str) -> str:
    from ..protocol.messages import SITE_CHARS_MAX

    if len(value) > SITE_CHARS_MAX or not value.isprintable():
        raise click.BadParameter(f"a site has up to {SITE_CHARS_MAX} printable characters")
    return value


class Amount(click.FloatRange):
    """A number from a range; infinity and "not a number" are in none."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"{value!r} is not a number.", param, ctx)
        return number


state_option = click.option(
    "--state",
    type=click.Path(file_okay=False, path_type=Path),
    help="The daemon's state directory (default: the only one that runs here).",
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


class Commands(click.Group):
    """Checks the environment's variables before any command runs."""

    def invoke(self, context: click.Context) -> object:
        refuse_unknown_variables(os.environ, self)
        return super().invoke(context)


def refuse_unknown_variables(environment: Mapping[str, str], group: click.Group) -> None:
    """Raise UserError for a HOLDFAST_* variable that no option reads: it is a typing error."""
    known = OTHER_VARIABLES | {"HOLDFAST_LOG_LEVEL"} | _variables(ENVIRONMENT_PREFIX, group)
    for variable in environment:
        if variable.startswith(ENVIRONMENT_PREFIX) and variable not in known:
            raise UserError(
                f"unknown environment variable {variable}",
                exit_code=ExitCode.USAGE,
                hint="unset it; options are HOLDFAST_COMMAND_OPTION, e.g. HOLDFAST_JOIN_NAME",
            )


def _variables(prefix: str, group: click.Group) -> set[str]:
    """What click reads the options of a group's commands from."""
    found: set[str] = set()
    for name, command in group.commands.items():
        inner = f"{prefix}{name}_".upper().replace("-", "_")
        found.update(f"{inner}{parameter.name}".upper() for parameter in command.params)
        if isinstance(command, click.Group):
            found |= _variables(inner, command)
    return found


@click.group(
    cls=Commands,
    context_settings={"auto_envvar_prefix": "HOLDFAST", "help_option_names": ["-h", "--help"]},
)
@click.version_option(__version__, prog_name="holdfast")
@click.option(
    "--log-level",
    type=click.Choice(["debug", "info", "warning", "error"]),
    default="warning",
    show_default=True,
    help="How much to log to standard error.",
)
def commands(log_level: str) -> None:
    """Train one model together, on machines that may vanish at any time.

    \b
    On one machine:     holdfast master run.toml
    On every machine:   holdfast join INVITE -- python train.py
    See it work:        holdfast demo
    """
    logging.basicConfig(
        level=log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )


@commands.command()
@click.argument("run_toml", type=click.Path(path_type=Path))
@click.option(
    "--state",
    type=click.Path(file_okay=False, path_type=Path),
    help="Keep the run's journal and keys here.",
)
@click.option(
    "--listen",
    multiple=True,
    default=(f"0.0.0.0:{MASTER_PORT}",),
    show_default=True,
    callback=_addresses,
    help="Bind here; repeatable.",
)
@click.option(
    "--advertise",
    multiple=True,
    callback=_dialable,
    help="HOST[:PORT] that others dial, if it is not the bound one; repeatable.",
)
@click.option(
    "--http",
    default="127.0.0.1:29780",
    show_default=True,
    callback=_address,
    help="Status and control over HTTP.",
)
@click.option(
    "--invite/--no-invite", default=True, help="Print an invite for the run's first peers."
)
def master(
    run_toml: Path,
    state: Path | None,
    listen: tuple[Address, ...],
    advertise: tuple[Address, ...],
    http: Address,
    invite: bool,
) -> None:
    """Coordinate a run: admit peers, open rounds, commit them.

    The master carries no tensor bytes; any small machine does. Stopped and started again with the
    same state directory it goes on where it was.

    \b
    Examples:
      holdfast master run.toml
      holdfast master run.toml --advertise train.example.org:29700
    """
    from .run_master import Master, MasterOptions, read_spec

    spec = read_spec(run_toml)
    folder = state or master_state(spec.run.name)
    options = MasterOptions(run_toml, folder, listen, advertise, http, invite)
    with locked(folder):
        trio.run(Master(options, _tell).run)


@commands.command()
@click.argument("invite")
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
@click.option(
    "--name",
    default=lambda: socket.gethostname()[:NAME_CHARS_MAX],
    show_default="this host's name",
    callback=_member_name,
    help="How others see this peer.",
)
@click.option(
    "--state",
    type=click.Path(file_okay=False, path_type=Path),
    help="Keep this peer's identity here.",
)
@click.option(
    "--listen",
    multiple=True,
    default=("0.0.0.0:0",),
    show_default=True,
    callback=_addresses,
    help="Bind here; port 0 takes a free one; repeatable.",
)
@click.option(
    "--advertise",
    multiple=True,
    callback=_dialable,
    help="HOST[:PORT] that others dial, if it is not the bound one; repeatable.",
)
@click.option(
    "--http",
    default="127.0.0.1:0",
    show_default=True,
    callback=_address,
    help="This peer's status over HTTP.",
)
@click.option(
    "--max-upload",
    type=Amount(min=0, min_open=True),
    help="Send at most so many megabytes a second to other peers.",
)
@click.option(
    "--max-download",
    type=Amount(min=0, min_open=True),
    help="Receive at most so many megabytes a second from other peers.",
)
@click.option(
    "--patience",
    type=Amount(min=0),
    default=120.0,
    show_default=True,
    help="Give up after so many seconds without a master; 0: never.",
)
@click.option(
    "--site",
    default="",
    show_default="told by addresses",
    callback=_site,
    help="Machines that name the same site share one line to the others.",
)
def join(
    invite: str,
    command: tuple[str, ...],
    name: str,
    state: Path | None,
    listen: tuple[Address, ...],
    advertise: tuple[Address, ...],
    http: Address,
    max_upload: float | None,
    max_download: float | None,
    patience: float,
    site: str,
) -> None:
    """Take part in a run with this machine.

    INVITE is the string that the run's owner gave you; the training COMMAND follows `--`. Without a
    command this peer keeps a copy of the state but trains nothing. Ctrl+C leaves in good order; a
    second Ctrl+C stops at once.

    \b
    Examples:
      holdfast join holdfast1.... -- python train.py
      holdfast join holdfast1.... --advertise home.example.org:29701 -- python train.py
    """
    from ..protocol.invite import Invite
    from .run_peer import Peer, PeerOptions

    ticket = Invite.decode(invite)
    options = PeerOptions(
        invite=ticket,
        command=command,
        name=name,
        state=state or peer_state(ticket.run_id),
        listen=listen,
        advertise=advertise,
        http=http,
        upload_bytes_per_s=None if max_upload is None else max_upload * 1e6,
        download_bytes_per_s=None if max_download is None else max_download * 1e6,
        patience_s=patience or None,
        site=site,
    )
    with locked(options.state):
        trio.run(Peer(options, _tell).run)


@commands.command()
@state_option
@click.option(
    "--role", type=click.Choice(["contributor", "spare"]), default="contributor", show_default=True
)
@click.option(
    "--uses",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="How many machines may use it.",
)
@click.option(
    "--hours",
    type=Amount(min=0, min_open=True, max=HOURS_MAX),
    default=24.0,
    show_default=True,
    help="How long it is good for.",
)
@click.option("--founder", is_flag=True, help="May give an empty run its first weights.")
@json_option
def invite(
    state: Path | None, role: str, uses: int, hours: float, founder: bool, as_json: bool
) -> None:
    """Make an invite: one string that lets a machine into the run.

    \b
    Examples:
      holdfast invite
      holdfast invite --role spare --uses 3 --hours 48
    """
    control = find_control(state, "master")
    body = {"role": role, "uses": uses, "hours": hours, "founder": founder}
    answer = call(control, "invite", body)
    click.echo(json.dumps(answer) if as_json else answer["invite"])


@commands.command()
@state_option
@click.option("--withdraw", metavar="ID", help="Let this one admit nobody any more.")
@json_option
def invites(state: Path | None, withdraw: str | None, as_json: bool) -> None:
    """List the run's invites, or withdraw one. Who came with it stays; `kick` removes a peer.

    \b
    Examples:
      holdfast invites
      holdfast invites --withdraw 3F9A20C1
    """
    from .show import show_invites

    control = find_control(state, "master")
    if withdraw is not None:
        answer = call(control, "withdraw", {"id": withdraw})
        click.echo(json.dumps(answer) if as_json else f"withdrew {withdraw}")
        return
    answer = call(control, "invites", None)
    if as_json:
        click.echo(json.dumps(answer, indent=2))
    else:
        show_invites(answer)


@commands.command()
@state_option
@json_option
def status(state: Path | None, as_json: bool) -> None:
    """Show what a master or a peer on this machine is doing, and why it waits.

    \b
    Examples:
      holdfast status
      holdfast status --json | jq .members
    """
    from .show import show_status

    control = find_control(state, None)
    answer = call(control, "status", None)
    if as_json:
        click.echo(json.dumps(answer, indent=2))
    else:
        show_status(control.kind, answer)


@commands.command()
@state_option
@json_option
def leave(state: Path | None, as_json: bool) -> None:
    """Let the peer on this machine leave in good order (as Ctrl+C in its terminal does).

    \b
    Example:
      holdfast leave
    """
    answer = call(find_control(state, "peer"), "leave", {})
    click.echo(json.dumps(answer) if as_json else "leaving after the round in flight")


@commands.command()
@state_option
@json_option
def retry(state: Path | None, as_json: bool) -> None:
    """Start the training command of the peer here again, after failures. Mend the cause first.

    \b
    Example:
      holdfast retry
    """
    answer = call(find_control(state, "peer"), "retry", {})
    click.echo(json.dumps(answer) if as_json else "starting the training command again")


@commands.command()
@click.argument("peer")
@state_option
@click.option("--reason", default="", help="Shown to the peer.")
@json_option
def kick(peer: str, state: Path | None, reason: str, as_json: bool) -> None:
    """Remove PEER (its name, or the first digits of its id) from the run, for good.

    \b
    Example:
      holdfast kick 3fa92c --reason "sends garbage"
    """
    answer = call(find_control(state, "master"), "kick", {"peer": peer, "reason": reason})
    click.echo(json.dumps(answer) if as_json else f"removed {answer['peer']}")


@commands.command()
@click.option(
    "--json",
    "json_path",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write the verdict here.",
)
@click.option(
    "--rounds", type=click.IntRange(6), default=24, show_default=True, help="Rounds to commit."
)
@click.option(
    "--keep",
    type=click.Path(file_okay=False, path_type=Path),
    help="Keep all logs and state in this folder.",
)
def demo(json_path: Path | None, rounds: int, keep: Path | None) -> None:
    """Train a small GPT on this machine with four peers, kill one, watch the run go on.

    A master, three contributors and a spare, each a process of its own. One contributor is killed
    in the middle of a reduction; the spare takes its place; later the killed one comes back.

    \b
    Examples:
      holdfast demo
      holdfast demo --json verdict.json
    """
    from .demo import run_demo

    sys.exit(run_demo(json_path, rounds, keep))


commands.add_command(simulate)


@commands.group()
def bench() -> None:
    """Measure what this machine can do."""


bench.add_command(allreduce)
bench.add_command(lanes)


@bench.command()
@click.option(
    "--json",
    "json_path",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write the measurements here, too.",
)
def codecs(json_path: Path | None) -> None:
    """Measure every codec: bits a value, speed on one core, signal-to-noise.

    \b
    Examples:
      holdfast bench codecs
      holdfast bench codecs --json codecs.json
    """
    from .bench import bench_codecs

    bench_codecs(json_path)


# ---------------------------------------------------------------- helpers


def _tell(line: str) -> None:
    click.echo(line)
    sys.stdout.flush()


def call(control: Control, name: str, body: Mapping[str, object] | None) -> dict[str, object]:
    """Ask a local daemon. ``body`` None reads, otherwise it acts."""
    import httpx  # a tenth of a second that only the commands which ask need

    try:
        if body is None:
            response = httpx.get(f"{control.url}/api/{name}", timeout=HTTP_S)
        else:
            response = httpx.post(
                f"{control.url}/api/{name}",
                json=dict(body),
                headers={"authorization": f"Bearer {control.token}"},
                timeout=HTTP_S,
            )
        answer = response.json()
    except (httpx.HTTPError, ValueError) as error:
        raise UserError(
            f"the {control.kind} at {control.url} does not answer: {error}",
            exit_code=ExitCode.UNREACHABLE,
        ) from error
    if response.status_code != 200:
        raise UserError(
            str(answer.get("error", response.text)),
            exit_code=int(answer.get("exit_code", ExitCode.FAILED)),
            hint=str(answer.get("hint", "")),
        )
    result: dict[str, object] = answer
    return result


@fails_plainly
def main() -> None:
    """Run the command line; the exit status is one of ``ExitCode``."""
    # Not click's standalone mode, which ends a Ctrl+C with status 1.
    sys.exit(commands.main(standalone_mode=False))
