"""Detection of a trainer that hangs, from samples of what it writes into shared memory. Pure.

A sample that differs from the last one is a sign of life; so is waiting, once the trainer has read
all its messages. Each sample adds at most ``LOOK_S_MAX`` to the time without progress: if the
daemon or the whole machine stood still, the trainer is not blamed.
"""

from __future__ import annotations

from attrs import define, frozen

# Deadlines for the first step, which compiles, fills caches and starts loading data.
FIRST_STEP_DEADLINES = 4.0
LOOK_S_MAX = 5.0


@frozen
class StepSample:
    """A sample of a trainer's progress.

    Attributes:
      step, tokens: the trainer's counts; the tokens are those of its process.
      heard_count: messages that it has read, while it waits for another one; else None.
      sent_count: messages that were sent to it.
    """

    step: int
    tokens: int
    heard_count: int | None
    sent_count: int


@define
class StepWatch:
    """The watch over one trainer.

    Attributes:
      still_s: seconds without progress.
    """

    still_s: float = 0.0
    _stepped: bool = False
    _last: StepSample | None = None
    _looked_s: float = 0.0

    def look(self, now_s: float, seen: StepSample, deadline_s: float) -> bool:
        """Take a sample and return True if the trainer exceeds its deadline."""
        before, looked_s = self._last, self._looked_s
        self._last, self._looked_s = seen, now_s
        self._stepped |= seen.tokens > 0 or seen.heard_count is not None
        idle = seen.heard_count is not None and seen.heard_count >= seen.sent_count
        moved = before is None or (seen.step, seen.tokens, seen.heard_count) != (
            before.step,
            before.tokens,
            before.heard_count,
        )
        if idle or moved:
            self.still_s = 0.0
            return False
        self.still_s += min(now_s - looked_s, LOOK_S_MAX)
        return self.still_s > deadline_s * (1.0 if self._stepped else FIRST_STEP_DEADLINES)
