"""Runs an async function in virtual time, the same way every time.

Nothing waits for the wall clock: when all tasks sleep, the clock jumps to the first that wakes. And
trio, which shuffles the tasks that could run, shuffles them by a seed. With ``memory_network`` for a
network, a whole run becomes a function of its seed.
"""

from __future__ import annotations

import heapq
import itertools
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
        self._alarms: list[tuple[float, int, Alarm]] = []  # a heap; some have rung or moved since
        self._numbers = itertools.count()

    def set_alarm(self, alarm: Alarm, at_s: float) -> None:
        heapq.heappush(self._alarms, (at_s, next(self._numbers), alarm))

    def start_clock(self) -> None:
        """Nothing to start."""

    def current_time(self) -> float:
        return self._now_s

    def deadline_to_sleep_time(self, deadline: float) -> float:
        """Asked when no task can run: how long to wait for ``deadline``, the next of all."""
        alarms = self._alarms
        while alarms and alarms[0][2].at_s != alarms[0][0]:
            heapq.heappop(alarms)
        if alarms:
            deadline = min(deadline, alarms[0][0])
        if deadline == math.inf:
            return math.inf
        if trio._core._run.GLOBAL_RUN_CONTEXT.runner.waiting_for_idle:
            return deadline - self._now_s  # ``wait_all_tasks_blocked`` comes first
        self._now_s = max(self._now_s, deadline)
        while alarms and alarms[0][0] <= self._now_s:
            at_s, _, alarm = heapq.heappop(alarms)
            if alarm.at_s == at_s:
                alarm.ring()
        return 0.0


class Alarm:
    """Wakes the task that waits for it, at a moment that others may bring forward. Virtual time only.

    It is a fraction of the work of a cancel scope with a deadline, and a simulated network does
    little else than wait until something arrives.

    Attributes:
      at_s: when it rings; ``inf``: never, unless somebody rings it.
    """

    __slots__ = ("_clock", "_task", "at_s")

    def __init__(self) -> None:
        self.at_s = math.inf
        self._task: trio.lowlevel.Task | None = None
        self._clock: VirtualClock | None = None

    async def wait(self, at_s: float) -> None:
        """Until it rings; one task at a time."""
        clock = trio.lowlevel.current_clock()
        assert isinstance(clock, VirtualClock)
        self._clock, self._task, self.at_s = clock, trio.lowlevel.current_task(), at_s
        if at_s < math.inf:
            clock.set_alarm(self, at_s)
        await trio.lowlevel.wait_task_rescheduled(self._abort)

    def _abort(self, _raise_cancel: object) -> trio.lowlevel.Abort:
        self._task, self.at_s = None, math.inf
        return trio.lowlevel.Abort.SUCCEEDED

    def bring_forward(self, at_s: float) -> None:
        """If somebody waits, then not longer than until this moment."""
        if self._task is not None and at_s < self.at_s:
            assert self._clock is not None
            self.at_s = at_s
            self._clock.set_alarm(self, at_s)

    def ring(self) -> None:
        """Wake whoever waits, now."""
        task, self._task, self.at_s = self._task, None, math.inf
        if task is not None:
            trio.lowlevel.reschedule(task)


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
