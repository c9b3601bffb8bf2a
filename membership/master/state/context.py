"""What the master's rules share: the history, the roster, and the effects of the present call.

A rule changes lasting state only through ``record`` and speaks only through ``send``; so the order
of its statements is the order of the effects, and a decision is recorded before anybody hears it.
"""

from __future__ import annotations

import math
from collections import deque

from ....protocol.messages import Message, Notice, RefusalCode
from ....protocol.text import escaped, plain
from ...spec.spec import RunSpec
from .detector import Detector
from .journal import JournalRecord, RunHistory
from .master_effects import (
    EVENT_CHARS_MAX,
    AnnounceEvent,
    DropPeer,
    Effect,
    Event,
    EventKind,
    RecordDurably,
    SendMessage,
)
from .roster import Member, Roster, waiting_in_line
from .round_schedule import due_step
from .run_totals import RunTotals

DEPARTED_MAX = 64  # members that are gone, kept for people to see what became of them
LOT_BYTES = 32  # of a master's secret for what nobody may foresee
EVENTS_MAX = 200  # kept for the dashboard; the log has them all
REASON_CHARS_MAX = 300  # of a peer's words that we pass on


class Context:
    """One per master.

    Attributes:
      lot: random, and this master's secret: what nobody may foresee follows from it.
      now_s: the time of the present call.
      settled_s: the time of the last call after which everything that follows was done. What was
        due by then has been; what is due later still has to be, though ``now_s`` may be past it.
      out: effects of the present call, in order.
      change_count: grows whenever something may look different to people.
    """

    def __init__(
        self, spec: RunSpec, run_id: str, history: RunHistory, term: int, lot: bytes = b""
    ) -> None:
        self.spec = spec
        self.lot = lot
        self.run_id = run_id
        self.history = history
        self.term = term
        self.roster = Roster(term)
        self.detector = Detector(spec.membership.deadline_s)
        self.events: deque[Event] = deque(maxlen=EVENTS_MAX)
        self.departed: deque[tuple[Member, str]] = deque(maxlen=DEPARTED_MAX)
        self.now_s = 0.0
        self.settled_s = -math.inf
        self.out: list[Effect] = []
        self.change_count = 0
        self.totals = RunTotals(history)

    def due_step(self, fragment: int, turn: int) -> int:
        """The run's step at which this fragment is due for the ``turn``-th time, counted from 0."""
        spec = self.spec
        count = self.history.fragment_count
        return due_step(fragment, turn, spec.diloco.sync_every, count, spec.run.rounds)

    def take_effects(self) -> list[Effect]:
        effects, self.out = self.out, []
        self.change_count += bool(effects)
        return effects

    def send(self, peer: str, message: Message) -> None:
        """Send to a member; to anybody else there is no connection, and nothing happens."""
        if peer in self.roster:
            self.out.append(SendMessage(peer, message))

    def send_all(self, message: Message) -> None:
        for member in self.roster.by_number():
            self.send(member.peer, message)

    def tell(self, peer: str, text: str) -> None:
        """Something that the peer's person should read."""
        self.send(peer, Notice(plain(text)))

    def record(self, record: JournalRecord) -> None:
        self.history.apply(record)
        self.out.append(RecordDurably(record))

    def drop(self, peer: str, code: RefusalCode, reason: str, *, previous: bool = False) -> None:
        self.out.append(DropPeer(peer, code, plain(reason), previous))

    def announce(self, kind: EventKind, peer: str | None, text: str) -> None:
        event = Event(kind, peer, plain(text, EVENT_CHARS_MAX), self.now_s)
        self.events.append(event)
        self.out.append(AnnounceEvent(event))

    def in_line(self) -> set[str]:
        """Members that get no state while all places and spares are taken."""
        history, limits = self.history, self.spec.membership
        return waiting_in_line(
            self.roster, history.places, history.vacancies, limits.contributors, limits.spares
        )

    def name(self, peer: str) -> str:
        """How people know the peer: name and the first digits of its id."""
        member = self.roster.get(peer)
        if member is not None:
            return said(member)
        name = self.history.name_of(peer)
        return f"{name} ({peer[:8]})" if name else peer[:8]


def said(member: Member) -> str:
    return f"{member.name} ({member.peer[:8]})"


def quoted(text: str) -> str:
    """A peer's words, plain and short enough to pass on."""
    text = escaped(text)
    return text if len(text) <= REASON_CHARS_MAX else text[: REASON_CHARS_MAX - 1] + "…"
