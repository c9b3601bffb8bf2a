"""Deterministic execution of an async function in virtual time.

Nothing waits for the wall clock: when all tasks sleep, the clock jumps to the next deadline. trio
shuffles runnable tasks; here the order follows from a seed. With ``memory_network`` as the network,
a whole run becomes a function of its seed.
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

VIRTUAL_SECONDS_MAX = 3_600.0  # a deadlock reaches this limit at once and raises TooSlowError


class VirtualClock(trio.abc.Clock):
    """A clock that stops while any task can run, then jumps to the next deadline.

    trio's ``MockClock`` does the same by waiting for idleness, which costs twice as many passes of
    the scheduler, each with a system call.
    """

    def __init__(self) -> None:
        self._now_s = 0.0
        self._alarms: list[tuple[float, int, Alarm]] = []  # a heap; may hold outdated entries
        self._numbers = itertools.count()

    def set_alarm(self, alarm: Alarm, at_s: float) -> None:
        heapq.heappush(self._alarms, (at_s, next(self._numbers), alarm))

    def start_clock(self) -> None:
        """Do nothing: the clock needs no start."""

    def current_time(self) -> float:
        return self._now_s

    def deadline_to_sleep_time(self, deadline: float) -> float:
        """Jump to the next deadline or alarm; trio calls this when no task can run."""
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
    """A timer in virtual time for one waiting task, whose time can be brought forward.

    It costs a fraction of a cancel scope with a deadline, and most of a simulated network's work is
    waiting for arrivals.

    Attributes:
      at_s: time at which it wakes the task; ``inf``: only when ``ring`` is called.
    """

    __slots__ = ("_clock", "_task", "at_s")

    def __init__(self) -> None:
        self.at_s = math.inf
        self._task: trio.lowlevel.Task | None = None
        self._clock: VirtualClock | None = None

    async def wait(self, at_s: float) -> None:
        """Wait until the alarm rings; one task at a time."""
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
        """Let a waiting task wake at this time, if it would wake later."""
        if self._task is not None and at_s < self.at_s:
            assert self._clock is not None
            self.at_s = at_s
            self._clock.set_alarm(self, at_s)

    def ring(self) -> None:
        task, self._task, self.at_s = self._task, None, math.inf
        if task is not None:
            trio.lowlevel.reschedule(task)


def run_virtually(
    function: Callable[[], Awaitable[T]], *, seed: int, seconds_max: float = VIRTUAL_SECONDS_MAX
) -> T:
    """Run an async function with ``trio.run`` in virtual time, deterministically.

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
    # trio has this switch for property tests; it has no public name.
    scheduler = trio._core._run
    before = scheduler._r, scheduler._ALLOW_DETERMINISTIC_SCHEDULING
    scheduler._r, scheduler._ALLOW_DETERMINISTIC_SCHEDULING = random.Random(seed), True  # type: ignore[misc]
    try:
        yield
    finally:
        scheduler._r, scheduler._ALLOW_DETERMINISTIC_SCHEDULING = before  # type: ignore[misc]
