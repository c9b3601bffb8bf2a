"""Runs an async function in virtual time, the same way every time.

Nothing waits for the wall clock: when all tasks sleep, the clock jumps to the first that wakes. And
trio, which shuffles the tasks that could run, shuffles them by a seed. With ``memory`` for a
network, a whole run becomes a function of its seed.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import trio
import trio.testing

T = TypeVar("T")

VIRTUAL_SECONDS_MAX = 3_600.0  # a deadlock spends this hour at once and fails by name


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
        return trio.run(bounded, clock=trio.testing.MockClock(autojump_threshold=0))


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
