"""State that all the master's rules share: the history, the roster, the effects of the present
call.

A rule changes lasting state only through ``record`` and sends only through ``send``. So the order
of its statements is the order of the effects, and a decision is recorded before any peer hears of
it.
"""

from __future__ import annotations

import math
from collections import deque

from ....protocol.messages import Message, Notice, RefusalCode
from ....protocol.text import escaped, plain
from ...shared.event_kind import EventKind
from ...spec.spec import RunSpec
from .history import RunHistory
from .journal import JournalRecord
from .master_effects import (
    EVENT_CHARS_MAX,
    AnnounceEvent,
    DropPeer,
    Effect,
    Event,
    RecordDurably,
    SendMessage,
)
from .roster import Detector, Member, Roster, waiting_in_line
from .round_schedule import RunTotals, due_step, moved_to

DEPARTED_MAX = 64  # former members that the status shows
LOT_BYTES = 32  # length of a master's ``lot``
EVENTS_MAX = 200  # events that the dashboard shows; the log has all of them
REASON_CHARS_MAX = 300  # of a peer's text that is passed on


class Context:
    """State shared by the rules of one master."""

    def __init__(
        self, spec: RunSpec, run_id: str, history: RunHistory, term: int, lot: bytes = b""
    ) -> None:
        self.spec = spec
        self.lot = lot  # random and secret; choices that no peer may predict are derived from it
        self.run_id = run_id
        self.history = history
        self.term = term
        self.roster = Roster(term)
        self.detector = Detector(spec.membership.deadline_s)
        self.events: deque[Event] = deque(maxlen=EVENTS_MAX)
        self.departed: deque[tuple[Member, str]] = deque(maxlen=DEPARTED_MAX)
        self.now_s = 0.0  # the time of the present call
        # The time of the last call after which all conclusions were drawn. What was due by then is
        # done; what is due later is not, even if ``now_s`` is past it.
        self.settled_s = -math.inf
        self.out: list[Effect] = []  # effects of the present call, in order
        self.change_count = 0  # grows whenever the status may have changed
        self.totals = RunTotals(history)
        schedule, sync_every = history.schedule, spec.diloco.sync_every
        self.moved = schedule.moved  # see ``round_schedule``
        if schedule.sync_every not in (0, sync_every):
            self.moved = moved_to(schedule.turns, schedule.sync_every, sync_every, schedule.moved)

    def due_step(self, fragment: int, turn: int) -> int:
        """Return the run's step at which a fragment is due for the ``turn``-th time, from 0."""
        sync_every, count = self.spec.diloco.sync_every, self.history.fragment_count
        return due_step(fragment, turn, sync_every, count, self.total_steps, self.moved)

    @property
    def total_steps(self) -> int:
        """The step at which the last round is due; 0 for a run without an end."""
        spec, history = self.spec, self.history
        undone_count = sum(history.schedule.turns) - history.commit_count
        count = spec.run.rounds and spec.run.rounds + undone_count + self.moved
        return count * spec.diloco.sync_every // spec.diloco.fragments

    def take_effects(self) -> list[Effect]:
        """Return the effects of the present call and forget them."""
        effects, self.out = self.out, []
        self.change_count += bool(effects)
        return effects

    def send(self, peer: str, message: Message) -> None:
        """Send a message to a member; do nothing for a peer that is not attached."""
        if peer in self.roster:
            self.out.append(SendMessage(peer, message))

    def send_all(self, message: Message) -> None:
        """Send a message to all members, by number."""
        for member in self.roster.by_number():
            self.send(member.peer, message)

    def tell(self, peer: str, text: str) -> None:
        """Send a peer a notice for the operator of its machine."""
        self.send(peer, Notice(plain(text)))

    def record(self, record: JournalRecord) -> None:
        """Change the history, and make the change durable before all later effects."""
        self.history.apply(record)
        self.out.append(RecordDurably(record))

    def drop(self, peer: str, code: RefusalCode, reason: str, *, previous: bool = False) -> None:
        """Refuse a peer and close its connection (see ``DropPeer``)."""
        self.out.append(DropPeer(peer, code, plain(reason), previous))

    def announce(self, kind: EventKind, peer: str | None, text: str) -> None:
        """Add an event to the log and the dashboard."""
        event = Event(kind, peer, plain(text, EVENT_CHARS_MAX), self.now_s)
        self.events.append(event)
        self.out.append(AnnounceEvent(event))

    def announce_peer(self, kind: EventKind, peer: str, text: str) -> None:
        """Announce something about a peer: its name and the text."""
        self.announce(kind, peer, f"{self.name(peer)} {text}")

    def in_line(self) -> set[str]:
        """Return the members that get no state while all places and spares are taken.

        The place of a member that wants to leave is as good as free: others may copy from it.
        """
        members, limits = self.history.members, self.spec.membership
        leaving = {m.peer for m in self.roster if m.draining}.intersection(members.places)
        return waiting_in_line(
            self.roster,
            members.places - leaving,
            members.vacancies + len(leaving),
            limits.contributors,
            limits.spares,
        )

    def name(self, peer: str) -> str:
        """Return a peer's label: its name and the first digits of its id."""
        member = self.roster.get(peer)
        if member is not None:
            return format_member(member)
        name = self.history.members.name_of(peer)
        return f"{name} ({peer[:8]})" if name else peer[:8]


def format_member(member: Member) -> str:
    """Return a member's label: its name and the first digits of its peer id."""
    return f"{member.name} ({member.peer[:8]})"


def quoted(text: str) -> str:
    """Return a peer's text without control characters, and short enough to pass on."""
    text = escaped(text)
    return text if len(text) <= REASON_CHARS_MAX else text[: REASON_CHARS_MAX - 1] + "…"
