"""A limit on the number of peers that a node sends bulk bytes to at once.

Each lane asks before every frame. A few destinations at a time get the uplink; while other lanes
wait, the turn passes on frame by frame. No lane waits for long: a destination that takes its bytes
slowly keeps its place meanwhile, and must not hold up fast destinations.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable

import trio
from attrs import define

from .event_loop import Loop

FLOWS_MAX = 4  # destinations at once: enough to keep an uplink busy while one of them pauses
TURN_WAIT_S = 0.05  # a lane that has waited this long for its turn sends without it


@define(eq=False)
class _Waiter:
    peer: str
    notify: Callable[[], object]
    admitted: bool = False


class FanOutLimit:
    """See the top of this file. Made on the event loop; ``enter`` is followed by ``leave``."""

    def __init__(self) -> None:
        self._loop = Loop()
        self._lock = threading.Lock()  # for the two tables, since lanes ask from threads
        self._flowing: Counter[str] = Counter()  # frames under way, by destination
        self._waiters: deque[_Waiter] = deque()

    async def enter(self, peer: str) -> None:
        """Wait for the turn to send ``peer`` one frame, in a lane's task.

        Cancellation: safe; ``leave`` must not be called then.
        """
        if self._enter_now(peer):
            return
        event = trio.Event()
        waiter = self._wait_in_line(peer, lambda: self._loop.soon(event.set))
        try:
            with trio.move_on_after(TURN_WAIT_S):
                await event.wait()
        except trio.Cancelled:
            self._stop_waiting(waiter)
            self.leave(peer)
            raise
        self._stop_waiting(waiter)

    def enter_in_thread(self, peer: str) -> None:
        """Wait for the turn to send ``peer`` one frame, in a lane's thread."""
        if not self._enter_now(peer):
            event = threading.Event()
            waiter = self._wait_in_line(peer, event.set)
            event.wait(TURN_WAIT_S)
            self._stop_waiting(waiter)

    def leave(self, peer: str) -> None:
        """Pass the turn on: the frame was sent, or never will be. From any thread."""
        with self._lock:
            self._flowing[peer] -= 1
            if self._flowing[peer] == 0:
                del self._flowing[peer]
            self._admit()

    def _enter_now(self, peer: str) -> bool:
        """Count a frame that need not wait; returns False if it must."""
        with self._lock:
            if len(self._flowing) < FLOWS_MAX or (
                peer in self._flowing and all(waiter.peer == peer for waiter in self._waiters)
            ):
                self._flowing[peer] += 1
                return True
            return False

    def _wait_in_line(self, peer: str, notify: Callable[[], object]) -> _Waiter:
        waiter = _Waiter(peer, notify)
        with self._lock:
            self._waiters.append(waiter)
            self._admit()  # a place may have become free since ``_enter_now``
        return waiter

    def _stop_waiting(self, waiter: _Waiter) -> None:
        """Count the waiter's frame: it has its turn, or has waited long enough."""
        with self._lock:
            if not waiter.admitted:
                self._waiters.remove(waiter)
                self._flowing[waiter.peer] += 1

    def _admit(self) -> None:
        """Give free places to the lanes that wait longest; all lanes of a destination at once."""
        while self._waiters and len(self._flowing) < FLOWS_MAX:
            peer = self._waiters[0].peer
            together = [waiter for waiter in self._waiters if waiter.peer == peer]
            for waiter in together:
                self._waiters.remove(waiter)
                waiter.admitted = True
                self._flowing[peer] += 1
                waiter.notify()
