"""The effects of decisions, carried out one after the other in the order decided."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Awaitable, Callable

import trio

from ...membership.master.state.journal import JournalRecord
from ...membership.master.state.master_effects import (
    AnnounceEvent,
    DropPeer,
    Effect,
    Event,
    RecordDurably,
    SendMessage,
)
from ...protocol.messages import Refused
from .peer_sessions import PeerSession, PeerSessions

log = logging.getLogger("holdfast.master")


class EffectQueue:
    """Perform effects: records on disk before the messages that follow; none once superseded."""

    def __init__(
        self,
        sessions: PeerSessions,
        write: Callable[[JournalRecord], Awaitable[None]],
        superseded: trio.Event,
    ) -> None:
        self._sessions = sessions
        self._write = write
        self._superseded = superseded
        self._listeners: list[Callable[[Event], None]] = []
        # Each with the session that it is for. A trio.Event is set when its turn comes.
        self._queue: deque[tuple[Effect | trio.Event, PeerSession | None]] = deque()
        self._work = trio.Event()

    def subscribe(self, listener: Callable[[Event], None]) -> None:
        """Call this with every event once the records before it are on disk."""
        self._listeners.append(listener)

    def add(self, effects: list[Effect]) -> None:
        """Append effects for the sessions of now: a peer may be back on another one later."""
        for effect in effects:
            self._queue.append((effect, self._sessions.addressee(effect)))
        self._work.set()

    def clear(self) -> None:
        self._queue.clear()

    async def drained(self) -> None:
        reached = trio.Event()
        self._queue.append((reached, None))
        self._work.set()
        await reached.wait()

    async def run(self) -> None:
        while True:
            while self._queue and not self._superseded.is_set():
                effect, session = self._queue.popleft()
                match effect:
                    case RecordDurably(record=record):
                        await self._write(record)
                    case SendMessage(message=message) if session is not None:
                        self._sessions.send(session, message)
                    case DropPeer(code=code, reason=reason) if session is not None:
                        self._sessions.dismiss(session, Refused(code, reason))
                    case AnnounceEvent(event=event):
                        self._announce(event)
                    case trio.Event():
                        effect.set()
            self._work = trio.Event()
            await self._work.wait()

    def _announce(self, event: Event) -> None:
        kind = event.kind.value
        log.info("%s: %s", kind, event.text, extra={"kind": kind, "peer": event.peer})
        for listener in self._listeners:
            listener(event)
