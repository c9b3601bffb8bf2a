"""What a state machine wants done: frozen records, carried out in order by the daemon.

The order is a promise. Everything after a ``RecordDurably`` may be seen by others only when that record is
durable, so a decision that somebody has heard of survives the master's death.
"""

from __future__ import annotations

import enum

from attrs import frozen

from ....protocol.messages import ContributorRun, FragmentSize, Message, Reduce, RefusalCode
from .journal import JournalRecord

EVENT_CHARS_MAX = 1_000  # longer texts (they quote peers) are cut here


class EventKind(enum.Enum):
    """What an event is about; the dashboard filters by it."""

    RUN = "run"  # founded, paused, finished
    JOIN = "join"  # somebody attached or was refused
    LEAVE = "leave"  # somebody left, died, was removed
    ROLE = "role"  # a place was taken or given up, a trainer came or went
    SYNC = "sync"  # copies: roots that differ, transfers that failed
    ROUND = "round"  # rounds that did not go by the book
    ROUTE = "route"  # how members that cannot dial each other reach each other
    BAD = "bad"  # somebody sent what must not be added


@frozen
class Event:
    """One line for the log and the dashboard."""

    kind: EventKind
    peer: str | None
    text: str
    at_s: float  # the master's clock, as given to the machine


@frozen
class SendMessage:
    """Put the message into the peer's outbox; a peer that is not connected is skipped."""

    peer: str
    message: Message


@frozen
class RecordDurably:
    """Make the record durable before any of the effects after it."""

    record: JournalRecord


@frozen
class DropPeer:
    """Send ``Refused`` and close.

    Attributes:
      previous: False: the peer's connection (in the effects of ``attach``: the newcomer). True, only
        in the effects of ``attach``: the connection that the peer had before this one.
    """

    peer: str
    code: RefusalCode
    reason: str
    previous: bool = False


@frozen
class AnnounceEvent:
    """Tell people: log it, show it."""

    event: Event


@frozen
class CheckProof:
    """Find out whether a proof is one, and say so by ``Coordinator.judged``.

    Attributes:
      attempt: under which the result was reported.
      chunk, owner: what is called wrong, and who made it.
      digest, manifest: of the result that the receivers agree on.
    """

    order: Reduce
    size: FragmentSize
    attempt: int
    chunk: int
    owner: str
    digest: bytes
    manifest: tuple[ContributorRun, ...]
    proof: bytes


@frozen
class StandDown:
    """Another master is obeyed: do nothing more, neither what is queued, and end the process."""

    reason: str


Effect = SendMessage | RecordDurably | DropPeer | AnnounceEvent | CheckProof | StandDown
