"""Commands that show a run: peers, rounds, events."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ...membership.shared.event_kind import EventKind
from ..process.paths import DaemonAddress, find_control
from .daemon_client import polled
from .options import json_option, state_option, tell

if TYPE_CHECKING:
    from ..metrics_store import PastEvent

ROUNDS_SHOWN = 20
EVENTS_SHOWN = 40
EVENTS_SEEN = 100  # at each poll of --follow


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
