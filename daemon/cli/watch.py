"""``holdfast watch``: a run on one screen, or as lines without a terminal.

    watch_screen   polls, draws and waits for a key, every second
      draw         fits a snapshot to the screen: headline, members, rounds, events
    ChangeLines    turns snapshots into one line per change

Drawing is a function of a snapshot and a size; only ``watch_screen`` touches the terminal.
"""

from __future__ import annotations

import json
import select
import sys
import termios
import time
import tty
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from ...membership.master.status.records import MemberRow
from ..status_records import MasterStatus, PeerStatus
from .daemon_client import LOOK_S, Json, Poller
from .run_client import NewRows, Snapshot, Status
from .run_tables import (
    add,
    format_bytes,
    format_event,
    format_loss,
    format_retransmitted,
    format_round,
    member_cells,
)

HEAD_LINES = 3
ROUND_LINES_MAX = 5
# Headings of run_tables.MEMBER_CELLS, with the least width of each column.
WATCH_COLUMNS = {
    "name": 8,
    "role": 6,
    "sync": 4,
    "step": 5,
    "loss": 6,
    "tokens/s": None,
    "why": None,
}
MEMBERS_SHARE = 0.5  # of the lines below the headline, at most, if there is more to show

# ---------------------------------------------------------------- the screen


def watch_screen(poller: Poller[Snapshot]) -> None:
    """Draw the screen every second until q or Ctrl+C."""
    console = Console(highlight=False, markup=False, emoji=False)
    snapshot: Snapshot | None = None
    live = Live(console=console, screen=True, auto_refresh=False)
    with suppress(KeyboardInterrupt), _keys(), live:
        while True:
            snapshot = poller.look() or snapshot
            width, height = console.size
            away_s = 0.0
            if poller.away_since is not None:
                away_s = time.monotonic() - poller.away_since
            drawn = draw(poller.control.kind, snapshot, away_s, width, height)
            live.update(drawn, refresh=True)
            if _pressed(LOOK_S) in ("q", "Q", "\x03"):
                return


@contextmanager
def _keys() -> Iterator[None]:
    """Read keys one by one and unechoed; Ctrl+C still interrupts."""
    before = termios.tcgetattr(sys.stdin)
    try:
        tty.setcbreak(sys.stdin)
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def _pressed(wait_s: float) -> str:
    """Return the next key, or an empty string if none is pressed in time."""
    ready, _, _ = select.select([sys.stdin], [], [], wait_s)
    return sys.stdin.read(1) if ready else ""


def draw(
    kind: str, snapshot: Snapshot | None, away_s: float, width: int, height: int
) -> RenderableType:
    """Return a screen that fits the size."""
    foot = Text("q: end watching (the run goes on)", style="dim")
    if snapshot is None:
        return Group(_away(kind, away_s), foot)
    status = snapshot.status
    if isinstance(status, PeerStatus):
        lines = _peer(status, height)
    else:
        lines = _master(status, snapshot, width, height - 1)
    if away_s:
        lines[0] = _away(kind, away_s)
    return Group(*lines[: height - 1], foot)


def _away(kind: str, away_s: float) -> RenderableType:
    return _line(f"the {kind} has not answered for {away_s:.0f} s; retrying ...", "red")


def _line(text: str, style: str = "") -> Text:
    return Text(text, style=style, no_wrap=True, overflow="ellipsis")


def _master(
    status: MasterStatus, snapshot: Snapshot, width: int, height: int
) -> list[RenderableType]:
    members, events = status.members, snapshot.events
    left = max(0, height - HEAD_LINES)
    rounds = snapshot.rounds[: min(ROUND_LINES_MAX, left // 4)]
    # Members come first but leave room for rounds; events fill the rest.
    rest = (len(rounds) + 1 if rounds else 0) + min(len(events), left // 4) + 1
    shown = min(len(members), max(left - rest - 1, int(left * MEMBERS_SHARE) - 1))
    lines: list[RenderableType] = [*_headline(status)]
    lines.append(_members(members[:shown], len(members) - shown, width))
    used = shown + 1 + (1 if len(members) > shown else 0)
    if rounds:
        lines.append(_line("rounds", "dim"))
        lines += [_line(format_round(row)) for row in rounds]
        used += len(rounds) + 1
    if (room := left - used - 1) > 0 and events:
        lines.append(_line("events", "dim"))
        lines += [_line(format_event(row)) for row in events[-room:]]
    return lines


def _headline(status: MasterStatus) -> list[RenderableType]:
    counts, headline = status.counts, status.headline
    head = Text(no_wrap=True, overflow="ellipsis")
    head.append(status.name, "bold").append(f"  {status.state}  ")
    head.append(
        f"round {headline.rounds}"
        + (f"/{headline.rounds_wanted}" if headline.rounds_wanted else "")
    )
    head.append(f"  step {headline.step}  loss {format_loss(headline.loss)}")
    head.append(f"  {headline.tokens_per_s:.0f} tokens/s")
    if headline.epoch is not None and headline.epoch_share is not None:
        head.append(f"  epoch {headline.epoch} ({headline.epoch_share:.0%})")
    second = (
        f"{counts.live} live, {counts.participating} participating, "
        f"{counts.contributed} contributed; {status.aborted} aborted; "
        f"{format_bytes(headline.sent_bytes)} sent"
    )
    return [head, _line(second), _line(status.why_waiting, "yellow")]


def _members(members: Sequence[MemberRow], more: int, width: int) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim", width=width)
    for heading, least in WATCH_COLUMNS.items():
        ratio = 1 if heading == "why" else None
        table.add_column(heading, no_wrap=True, overflow="ellipsis", min_width=least, ratio=ratio)
    for member in members:
        add(table, *member_cells(member, WATCH_COLUMNS))
    if more:
        add(table, f"... and {more} more", *[""] * (len(WATCH_COLUMNS) - 1))
    return table


def _peer(status: PeerStatus, height: int) -> list[RenderableType]:
    sync = "in sync" if status.in_sync else "not in sync"
    lines: list[RenderableType] = [
        _line(f"{status.name} ({status.peer[:8]})  {status.role}, {sync}", "bold"),
        _line(
            f"{status.phase}  step {status.step}  loss {format_loss(status.loss)}  "
            f"{status.tokens_per_s:.0f} tokens/s"
        ),
        _line(status.why, "yellow"),
        _line(f"trainer: {status.trainer_state}"),
        *([_line(f"port of the router: {status.mapped_port}")] if status.mapped_port else []),
        _line(
            f"{format_bytes(status.bulk_sent_bytes)} sent "
            f"({format_retransmitted(status.bulk_sent_bytes, status.bulk_retransmitted_bytes)} "
            f"retransmitted), {format_bytes(status.bulk_received_bytes)} received, {len(status.links)} links"
        ),
    ]
    lines += [_line(f"! {text}") for text in status.notices[-max(0, height - len(lines)) :]]
    return lines


# ---------------------------------------------------------------- lines


class ChangeLines:
    """Snapshots turned into a line per change, for a file, a pipe or a log."""

    def __init__(self) -> None:
        self._events, self._rounds = NewRows(), NewRows()
        self._state = ""
        self._seen = False

    def of(self, snapshot: Snapshot) -> Iterator[str]:
        """Yield the lines for what changed since the last snapshot; the first yields no past events."""
        if (state := _format_state(snapshot.status)) != self._state:
            self._state = state
            yield f"{time.strftime('%H:%M:%S')}  {state}"
        events, rounds = self._events.of(snapshot.events), self._rounds.of(snapshot.rounds)
        if self._seen:
            yield from map(format_event, events)
            rows = reversed(rounds)
            yield from (f"{time.strftime('%H:%M:%S')}  {format_round(row)}" for row in rows)
        self._seen = True


def _format_state(status: Status) -> str:
    if isinstance(status, PeerStatus):
        sync = "in sync" if status.in_sync else "not in sync"
        why = f": {status.why}" if status.why else ""
        return f"{status.name}  {status.role}, {sync}, {status.phase}{why}"
    why = f": {status.why_waiting}" if status.why_waiting and not status.rounds else ""
    live = status.counts.live
    return f"{status.name}  {status.state}, {live} member{'' if live == 1 else 's'}{why}"


def essence(status: Json) -> str:
    """Return a status without clocks and ages as JSON, to tell whether something happened."""
    passing = {"now_s", "uptime_s", "attached_s", "silent_s", "open_s", "reduce_s", "took_s"}

    def without(value: object) -> object:
        if isinstance(value, dict):
            return {key: without(each) for key, each in value.items() if key not in passing}
        return [without(each) for each in value] if isinstance(value, list) else value

    return json.dumps(without(status))
