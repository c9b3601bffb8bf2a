"""What wakes tasks: a pulse those that wait for it, a loop those of an event loop, from threads."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable

import trio


class Pulse:
    """Like a ``trio.Event`` that is replaced each time it is set: it wakes no later ones."""

    def __init__(self) -> None:
        self._next = trio.Event()

    def notify_all(self) -> None:
        """Wake all tasks that wait now."""
        over, self._next = self._next, trio.Event()
        over.set()

    async def wait(self) -> None:
        await self._next.wait()


class Loop:
    """The event loop on which this object was made, for the threads of lanes."""

    def __init__(self) -> None:
        self._token = trio.lowlevel.current_trio_token()
        self._thread = threading.get_ident()
        self._clock_offset_s = trio.current_time() - time.perf_counter()

    def soon(self, function: Callable[[], object]) -> None:
        """Call a function on the event loop: at once if the caller runs there, else soon."""
        if threading.get_ident() == self._thread:
            function()
            return
        with contextlib.suppress(trio.RunFinishedError):  # the event loop has ended
            self._token.run_sync_soon(function)

    def now_s(self) -> float:
        """Return trio's time, in any thread: the clocks differ by a constant in real time."""
        if threading.get_ident() == self._thread:
            return trio.current_time()
        return time.perf_counter() + self._clock_offset_s
