"""The event loop, as the threads of lanes see it."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable

import trio


class Loop:
    """The event loop that made this object."""

    def __init__(self) -> None:
        self._token = trio.lowlevel.current_trio_token()
        self._thread = threading.get_ident()
        self._clock_offset_s = trio.current_time() - time.perf_counter()

    def soon(self, function: Callable[[], object]) -> None:
        """Call it on the event loop: at once if we are there, else as soon as it comes round."""
        if threading.get_ident() == self._thread:
            function()
            return
        with contextlib.suppress(trio.RunFinishedError):  # whom it should tell is gone
            self._token.run_sync_soon(function)

    def now_s(self) -> float:
        """Trio's time for threads: their clock only differs by a constant. Not in virtual time."""
        return time.perf_counter() + self._clock_offset_s

    def time_s(self) -> float:
        """Trio's time, whoever asks."""
        if threading.get_ident() == self._thread:
            return trio.current_time()
        return self.now_s()
