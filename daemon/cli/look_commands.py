"""Commands that show a run (peers, rounds, events), and those about what is on this machine: logs,
dashboard, forget.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import time
import webbrowser
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import click

from ...membership.shared.event_kind import EventKind
from ...protocol.errors import UserError
from ..process.exit_codes import ExitCode
from ..process.log_ring import LINES_KEPT_MAX
from ..process.paths import (
    IDENTITY_FILE,
    PEER_ENTRY,
    DaemonAddress,
    data_home,
    find_control,
    locked,
)
from .daemon_client import Json, call, polled
from .options import json_option, state_option, tell

if TYPE_CHECKING:
    from ..metrics_store import PastEvent

ROUNDS_SHOWN = 20
EVENTS_SHOWN = 40
EVENTS_SEEN = 100  # at each poll of --follow
LINES_DEFAULT = 100
DISPLAYS = ("DISPLAY", "WAYLAND_DISPLAY")  # variables of a desktop's terminal


@click.command()
@state_option
@click.option("--gone", is_flag=True, help="List departed peers instead, with the reason.")
@json_option
def peers(state: Path | None, gone: bool, as_json: bool) -> None:
    """List the run's members: activity, speed, and what they wait for (at the master).

    \b
    Examples:
      holdfast peers
      holdfast peers --gone
    """
    import msgspec

    from .run_client import format_pending, status_of_master
    from .run_tables import show_peers

    status = status_of_master(find_control(state, "master"))
    rows = status.departed[::-1] if gone else status.members
    if as_json:
        answer = {"peers": rows, "pending": status.pending}
        click.echo(json.dumps(msgspec.to_builtins(answer), indent=2))
        return
    show_peers(rows, gone=gone)
    for row in () if gone else status.pending:
        tell(format_pending(row))


@click.command()
@state_option
@click.option("--limit", type=click.IntRange(1), default=ROUNDS_SHOWN, help="Number of rounds.")
@json_option
def rounds(state: Path | None, limit: int, as_json: bool) -> None:
    """List recent rounds, the newest first: contributors, duration of each phase (at the master).

    \b
    Examples:
      holdfast rounds
      holdfast rounds --limit 50 --json
    """
    import msgspec

    from .run_client import rounds_of
    from .run_tables import show_rounds

    rows = rounds_of(find_control(state, "master"), limit)
    if as_json:
        click.echo(json.dumps({"rounds": msgspec.to_builtins(rows)}, indent=2))
    else:
        show_rounds(rows)


@click.command()
@state_option
@click.option(
    "--kind",
    "kinds",
    multiple=True,
    type=click.Choice([kind.value for kind in EventKind]),
    help="Only events of this kind; repeatable.",
)
@click.option(
    "--text", default="", show_default=False, help="Only events whose text contains this."
)
@click.option(
    "--peer",
    default="",
    show_default=False,
    help="Only events of this peer (name, or first digits of its id).",
)
@click.option(
    "--limit", type=click.IntRange(0), default=EVENTS_SHOWN, help="Number of past events."
)
@click.option("--follow", "-f", is_flag=True, help="Keep printing new events, until Ctrl+C.")
@json_option
def events(
    state: Path | None,
    kinds: tuple[str, ...],
    text: str,
    peer: str,
    limit: int,
    follow: bool,
    as_json: bool,
) -> None:
    """List the run's events, the newest last (at the master).

    With --follow, --json prints one object per line. --follow continues after a restart of the
    master.

    \b
    Examples:
      holdfast events --kind leave --kind join
      holdfast events --follow --text "does not fit"
    """
    import msgspec

    from .run_client import events_of
    from .run_tables import format_event

    def see(control: DaemonAddress, count: int = limit) -> list[PastEvent]:
        return events_of(control, count, kinds=kinds, text=text, peer=peer)

    if not follow:
        rows = see(find_control(state, "master"))
        if as_json:
            click.echo(json.dumps({"events": msgspec.to_builtins(rows)}, indent=2))
        else:
            for row in rows:
                tell(format_event(row))
        return
    known: set[tuple[int, float]] | None = None  # ids begin again after a restart without history
    with contextlib.suppress(KeyboardInterrupt):
        for rows in polled(state, "master", lambda control: see(control, EVENTS_SEEN)):
            new = [row for row in rows if known is None or (row.id, row.at) not in known]
            for row in new[max(0, len(new) - limit) :] if known is None else new:
                tell(json.dumps(msgspec.to_builtins(row)) if as_json else format_event(row))
            known = {(row.id, row.at) for row in rows}


@click.command()
@state_option
@click.option(
    "-n",
    "--lines",
    type=click.IntRange(1, LINES_KEPT_MAX),
    default=LINES_DEFAULT,
    help="Number of past lines.",
)
@click.option("--follow", "-f", is_flag=True, help="Keep printing new lines, until Ctrl+C.")
@json_option
def logs(state: Path | None, lines: int, follow: bool, as_json: bool) -> None:
    """Print the newest lines of the peer on this machine: its notices, its training command's
    output.

    With --follow, --json prints one object per line.

    \b
    Examples:
      holdfast logs --follow
      holdfast logs -n 30
    """
    after = 0.0

    def see(control: DaemonAddress) -> Json:
        query: dict[str, str | int] = {"lines": lines, "after": repr(after)}
        return call(control, "logs", None, query=query)

    if as_json and not follow:
        click.echo(json.dumps(see(find_control(state, "peer")), indent=2))
        return
    with contextlib.suppress(KeyboardInterrupt):
        for seen in polled(state, "peer", see):
            for line in seen["lines"]:
                tell(json.dumps(line) if as_json else _format_line(line))
                after = line["at"]
            if not follow:
                return


def _format_line(line: dict[str, Any]) -> str:
    at = time.strftime("%H:%M:%S", time.localtime(line["at"]))
    return f"{at}  {line['source']:<7}  {line['text']}"


# ---------------------------------------------------------------- dashboard


@click.command()
@state_option
@click.option("--print", "only_print", is_flag=True, help="Print the address; open no browser.")
def dashboard(state: Path | None, only_print: bool) -> None:
    """Open the page of the master or peer on this machine, signed in.

    The address contains the token that allows the operator's actions: show it to nobody. Without a
    desktop, or over ssh, it is printed.

    \b
    Examples:
      holdfast dashboard
      holdfast dashboard --print
    """
    control = find_control(state, None)
    address = f"{control.url}/#token={control.token}"
    if not only_print and _has_desktop() and _open(address):
        tell(f"opened the page of the {control.kind} at {control.url} in your browser")
        return
    tell(address)
    if "SSH_CONNECTION" in os.environ:
        click.echo(_how_to_forward(control), err=True)


def _has_desktop() -> bool:
    """Return whether a browser would be seen by the person who types."""
    if "SSH_CONNECTION" in os.environ:
        return False
    return sys.platform == "darwin" or any(os.environ.get(name) for name in DISPLAYS)


def _open(address: str) -> bool:
    try:
        return webbrowser.open(address)
    except webbrowser.Error:
        return False


def _how_to_forward(control: DaemonAddress) -> str:
    """Return what makes the page's port reachable on the machine that ssh was started on."""
    own = urlsplit(control.url)
    here = (os.environ["SSH_CONNECTION"].split() + [""] * 3)[2] or "THIS-HOST"
    user = os.environ.get("USER") or "USER"
    return (
        "on the machine that you sit at, forward the port, then open that address there:\n"
        f"  ssh -N -L {own.port}:{own.hostname}:{own.port} {user}@{here}"
    )


# ---------------------------------------------------------------- forget


@click.command()
@click.argument("run", required=False)
def forget(run: str | None) -> None:
    """Remove what this machine keeps of RUN: its peer's key, checkpoints and unfinished copies.

    RUN is the run's id or its first digits, or a folder given as --state. Without RUN, list what is
    kept. The peer must have ended. To come back, this machine needs an invite and copies the state
    again.

    \b
    Examples:
      holdfast forget
      holdfast forget 5f9d2c1a
    """
    from .run_tables import format_bytes  # imports rich: slow

    kept = sorted(path.parent for path in data_home().glob(f"peers/*/{IDENTITY_FILE}"))
    if run is None:
        for folder in kept:
            tell(f"{folder.name[:8]}  {format_bytes(_size_bytes(folder))} in {folder}")
        if not kept:
            tell(
                "no peer has left anything here; of one with a --state DIR of its own give that"
                " folder"
            )
        return
    found = [folder for folder in kept if folder.name.startswith(run)]
    if not found and (Path(run) / IDENTITY_FILE).exists():
        found = [Path(run)]
    if len(found) != 1:
        raise UserError(
            f"several runs begin with {run}" if found else f"nothing is kept here of a run {run}",
            exit_code=ExitCode.USAGE,
            hint="`holdfast forget` lists the runs; of a peer with --state DIR give that folder",
        )
    (folder,) = found
    with locked(folder):
        if others := sorted(p.name for p in folder.iterdir() if not PEER_ENTRY.fullmatch(p.name)):
            raise UserError(
                f"{folder} also holds {', '.join(others)}, which no peer wrote",
                exit_code=ExitCode.CONFIG,
                hint="move these files elsewhere first",
            )
        size = format_bytes(_size_bytes(folder))
        shutil.rmtree(folder)
    tell(f"removed {size} in {folder}")


def _size_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
