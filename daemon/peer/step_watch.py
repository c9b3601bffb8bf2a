"""Whether a trainer hangs: looked at again and again, by what it writes into shared memory. Pure.

Any change is a sign of life, and so is waiting, if there is nothing that the trainer has not heard.
Time is added up look by look, and no more than ``LOOK_S_MAX`` each: if the daemon itself stood
still, or the whole machine slept, its trainer is not blamed.
"""

from __future__ import annotations

from attrs import define, frozen

FIRST_STEP_DEADLINES = 4.0  # for the first step, which compiles, fills caches, begins to load data
LOOK_S_MAX = 5.0


@frozen
class StepSample:
    """What there is to see of a trainer.

    Attributes:
      step, tokens: as it counts them; the tokens are its own process's.
      heard_count: messages that it has heard, while it waits for another one; else None.
      sent_count: messages that were sent to it.
    """

    step: int
    tokens: int
    heard_count: int | None
    sent_count: int


@define
class StepWatch:
    """One trainer's.

    Attributes:
      still_s: for how long nothing has moved.
    """

    still_s: float = 0.0
    _stepped: bool = False
    _last: StepSample | None = None
    _looked_s: float = 0.0

    def look(self, now_s: float, seen: StepSample, deadline_s: float) -> bool:
        """True: it has taken longer than it may."""
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
