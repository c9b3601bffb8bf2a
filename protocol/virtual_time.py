"""Runs an async function in virtual time, the same way every time.

Nothing waits for the wall clock: when all tasks sleep, the clock jumps to the first that wakes. And
trio, which shuffles the tasks that could run, shuffles them by a seed. With ``memory`` for a
network, a whole run becomes a function of its seed.
"""

from __future__ import annotations

import math
import random
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import trio

T = TypeVar("T")

VIRTUAL_SECONDS_MAX = 3_600.0  # a deadlock spends this hour at once and fails by name


class VirtualClock(trio.abc.Clock):
    """Time stands still while any task can run; then it is at once the next deadline's.

    trio's ``MockClock`` can do the same, by way of a wait for idleness: twice as many passes of the
    scheduler, each with a system call.
    """

    def __init__(self) -> None:
        self._now_s = 0.0

    def start_clock(self) -> None:
        """Nothing to start."""

    def current_time(self) -> float:
        return self._now_s

    def deadline_to_sleep_time(self, deadline: float) -> float:
        """Asked when no task can run: how long to wait for ``deadline``, the next of all."""
        if deadline == math.inf:
            return math.inf
        if trio._core._run.GLOBAL_RUN_CONTEXT.runner.waiting_for_idle:
            return deadline - self._now_s  # ``wait_all_tasks_blocked`` comes first
        self._now_s = max(self._now_s, deadline)
        return 0.0


def run_virtually(
    function: Callable[[], Awaitable[T]], *, seed: int, seconds_max: float = VIRTUAL_SECONDS_MAX
) -> T:
    """``trio.run`` in virtual time, deterministic.

    Raises:
      trio.TooSlowError: after ``seconds_max`` virtual seconds.
    """

    async def bounded() -> T:
        with trio.fail_after(seconds_max):
            return await function()

    with _scheduled_by(seed):
        return trio.run(bounded, clock=VirtualClock())


@contextmanager
def _scheduled_by(seed: int) -> Iterator[None]:
    # The switch that trio keeps for property tests; it has no public name.
    scheduler = trio._core._run
    before = scheduler._r, scheduler._ALLOW_DETERMINISTIC_SCHEDULING
    scheduler._r, scheduler._ALLOW_DETERMINISTIC_SCHEDULING = random.Random(seed), True  # type: ignore[misc]
    try:
        yield
    finally:
        scheduler._r, scheduler._ALLOW_DETERMINISTIC_SCHEDULING = before  # type: ignore[misc]
