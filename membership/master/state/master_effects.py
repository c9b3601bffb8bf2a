"""Effects of the master's rules: frozen records that the daemon carries out in order.

The order is a guarantee. Effects after a ``RecordDurably`` may be seen by peers only when that
record is durable, so a decision that a peer has heard of survives the master's death.
"""

from __future__ import annotations

from collections.abc import Callable

from attrs import frozen

from ....protocol.messages import Message, RefusalCode
from ...shared.event_kind import EventKind
from .journal import JournalRecord

EVENT_CHARS_MAX = 1_000  # longer texts (they quote peers) are cut here


@frozen
class Event:
    """One line for the log and the dashboard."""

    kind: EventKind
    peer: str | None
    text: str
    at_s: float  # ``now_s`` of the call


@frozen
class SendMessage:
    """Put the message into the peer's message queue; skip a peer that is not connected."""

    peer: str
    message: Message


@frozen
class RecordDurably:
    """Make the record durable before any of the effects after it."""

    record: JournalRecord


@frozen
class DropPeer:
    """Send ``Refused`` and close."""

    peer: str
    code: RefusalCode
    reason: str
    # Close the connection that the peer had before the one that attaches; only in the effects of
    # ``attach``. Otherwise the peer's connection (in ``attach``, the new one) is closed.
    previous: bool = False


@frozen
class AnnounceEvent:
    """Log an event and show it on the dashboard."""

    event: Event


@frozen
class StandDown:
    """End the process without carrying out queued effects: another master is obeyed."""

    reason: str


Effect = SendMessage | RecordDurably | DropPeer | AnnounceEvent | StandDown


Decision = Callable[[float], list[Effect]]  # with the clock of decisions; what follows from it
Decide = Callable[[Decision], None]  # has a decision made now and its effects carried out
