"""Commands that look at a run: peers, rounds, events, watch."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import click
import msgspec

from ...membership.master.state.master_effects import EventKind
from ..metrics_store import PastEvent
from ..paths import DaemonAddress, find_control
from .daemon_client import (
    EVENTS_SEEN,
    LOOK_S,
    NewRows,
    Poller,
    RunSnapshot,
    events_of,
    format_pending,
    rounds_of,
    see_json,
    status_of_master,
)
from .options import json_option, state_option, tell

T = TypeVar("T")

ROUNDS_SHOWN = 20
EVENTS_SHOWN = 40


@click.command()
@state_option
@click.option("--gone", is_flag=True, help="Those who left, with the reason, instead.")
@json_option
def peers(state: Path | None, gone: bool, as_json: bool) -> None:
    """List the run's members: what they do, how fast, and why they wait (at the master).

    Then those who are in quarantine, and why; `holdfast clear` lets one back in.

    \b
    Examples:
      holdfast peers
      holdfast peers --gone
    """
    from .run_tables import show_peers, show_quarantined

    status = status_of_master(find_control(state, "master"))
    rows = status.departed[::-1] if gone else status.members
    if as_json:
        told = {"peers": rows, "quarantined": status.quarantined, "pending": status.pending}
        click.echo(json.dumps(msgspec.to_builtins(told), indent=2))
        return
    show_peers(rows, gone=gone)
    show_quarantined(status)
    for row in () if gone else status.pending:
        tell(format_pending(row))


@click.command()
@state_option
@click.option(
    "--limit", type=click.IntRange(1), default=ROUNDS_SHOWN, show_default=True, help="How many."
)
@json_option
def rounds(state: Path | None, limit: int, as_json: bool) -> None:
    """List the last rounds, the newest first: who took part, how long each phase took (at the master).

    \b
    Examples:
      holdfast rounds
      holdfast rounds --limit 50 --json
    """
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
    help="Only of this kind; repeatable.",
)
@click.option("--text", default="", help="Only those with this in their text.")
@click.option("--peer", default="", help="Only of this peer: its name, or how its id begins.")
@click.option(
    "--limit",
    type=click.IntRange(0),
    default=EVENTS_SHOWN,
    show_default=True,
    help="How many of what has happened so far.",
)
@click.option("--follow", "-f", is_flag=True, help="Go on with what happens next, until Ctrl+C.")
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
    """List what happened in the run, the newest last (at the master).

    With --follow, --json prints one object per line; a master that is started again is followed, too.

    \b
    Examples:
      holdfast events --kind leave --kind join
      holdfast events --follow --text "does not fit"
    """
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
    news, first = NewRows(), True
    for rows in _looks(Poller(state, "master", lambda control: see(control, EVENTS_SEEN))):
        new = news.of(rows)
        for row in new[max(0, len(new) - limit) :] if first else new:
            tell(json.dumps(msgspec.to_builtins(row)) if as_json else format_event(row))
        first = False


def _looks(poller: Poller[T]) -> Iterator[T]:
    """What is seen every second, whenever something is; ends with Ctrl+C."""
    with contextlib.suppress(KeyboardInterrupt):
        while True:
            if (seen := poller.look()) is not None:
                yield seen
            time.sleep(LOOK_S)


@click.command()
@state_option
@json_option
def watch(state: Path | None, as_json: bool) -> None:
    """Watch a run, live: how it goes, who is here and why they wait, rounds and events.

    At the master the whole run, at a peer what that one does. q or Ctrl+C ends it, not the run; a
    daemon that is started again is found again. Where the output is no terminal, a line is printed
    for every change instead; with --json the status, one object per line, whenever it changed (without
    what was: `holdfast events --follow --json` tells that).

    \b
    Examples:
      holdfast watch
      holdfast watch | tee run.log
    """
    from . import watch as watching

    if as_json:
        last = ""
        for status in _looks(Poller(state, None, see_json)):
            if (essence := watching.essence(status)) != last:
                tell(json.dumps(status))
            last = essence
        return
    poller = Poller(state, None, RunSnapshot())
    if sys.stdout.isatty() and sys.stdin.isatty():
        watching.watch_screen(poller)
    else:
        lines = watching.ChangeLines()
        for snapshot in _looks(poller):
            for line in lines.of(snapshot):
                tell(line)
