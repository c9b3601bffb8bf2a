"""To how many others a node sends bulk at once.

Each lane asks before every frame. A few destinations at a time get the uplink; when others wait, the
turn passes on frame by frame. Nobody waits for long: a destination that takes its bytes slowly keeps
its place while it does, and must not hold up those that are fast.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable

import trio
from attrs import define

from .event_loop import Loop

FLOWS_MAX = 4  # destinations at once: enough to keep an uplink busy while one of them pauses
TURN_WAIT_S = 0.05  # a lane that waited so long for its turn goes without it


@define(eq=False)
class _Waiter:
    peer: str
    notify: Callable[[], object]
    admitted: bool = False


class FanOutLimit:
    """See the top of this file. Made on the event loop; ``enter`` is followed by ``leave``."""

    def __init__(self) -> None:
        self._loop = Loop()
        self._lock = threading.Lock()  # for the two tables: lanes ask from threads
        self._flowing: Counter[str] = Counter()  # frames under way, by destination
        self._waiters: deque[_Waiter] = deque()

    async def enter(self, peer: str) -> None:
        """For a lane's task: wait for the turn to send ``peer`` one frame.

        Cancellation: safe; there is no turn then, and nothing to leave.
        """
        event = trio.Event()
        waiter = self._ask(peer, lambda: self._loop.soon(event.set))
        if waiter is None:
            return
        try:
            with trio.move_on_after(TURN_WAIT_S):
                await event.wait()
        except trio.Cancelled:
            self._go(waiter)
            self.leave(peer)
            raise
        self._go(waiter)

    def enter_in_thread(self, peer: str) -> None:
        """As ``enter``, for a lane's thread."""
        event = threading.Event()
        waiter = self._ask(peer, event.set)
        if waiter is not None:
            event.wait(TURN_WAIT_S)
            self._go(waiter)

    def leave(self, peer: str) -> None:
        """The frame was sent, or never will be; from any thread."""
        with self._lock:
            self._flowing[peer] -= 1
            if self._flowing[peer] == 0:
                del self._flowing[peer]
            self._admit()

    def _ask(self, peer: str, notify: Callable[[], object]) -> _Waiter | None:
        with self._lock:
            others_wait = any(waiter.peer != peer for waiter in self._waiters)
            if len(self._flowing) < FLOWS_MAX or (peer in self._flowing and not others_wait):
                self._flowing[peer] += 1
                return None
            waiter = _Waiter(peer, notify)
            self._waiters.append(waiter)
            return waiter

    def _go(self, waiter: _Waiter) -> None:
        """It is this waiter's turn, or it has waited long enough."""
        with self._lock:
            if not waiter.admitted:
                self._waiters.remove(waiter)
                self._flowing[waiter.peer] += 1

    def _admit(self) -> None:
        """Give free places to those who wait longest; a destination's lanes go together."""
        while self._waiters and len(self._flowing) < FLOWS_MAX:
            peer = self._waiters[0].peer
            together = [waiter for waiter in self._waiters if waiter.peer == peer]
            for waiter in together:
                self._waiters.remove(waiter)
                waiter.admitted = True
                self._flowing[peer] += 1
                waiter.notify()
