"""The round clock of the elastic pace: a round is when the fastest contributor comes to its step.

    trained    fast   |----|----|----|----|          reaches the round's step: the round is now
               slow   |------------|--------->       posts at the last boundary before that

Nobody waits for a slower peer's steps. Who is late is *hurried*: told to contribute, at its next
boundary, what it has trained by then. For peers about as fast as the fastest that is soon enough
when the first one has come. Who needs much longer for a step than the run does is hurried earlier by
its *lead*, a step's time or what it needed from being hurried to being ready, if that was longer;
when the round will be is known from the rounds before, which come at a steady pace. A guess that is
wrong costs little: who posts early has its other tokens in the next round, who posts late is excluded,
and has all of them there.

All clocks are the master's own. Only how long its steps are a trainer says itself: a distant peer that
needs long from being hurried to being ready must not be taken for a slow one, or it would contribute
less and less. Who says something wrong contributes less, or is late.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Collection

from ..state.context import Context
from .round import Round
from .round_table import RoundTable

PACES_KEPT = 3  # rounds of which the fastest is the run's pace: a pause, or waiting, is none
LEADS_KEPT = 8  # rounds of which the longest is a peer's lead
LEAD_MARGIN = 1.25  # of the lead: a step is not always as long as the last ones were
LEAD_STEPS_MIN = 2.0  # steps of the run; who needs no longer is soon enough when the first has come
LEAD_S_MAX = 3_600.0
MISSED_FACTOR = 2.0  # a lead that was not enough, though nobody knows how long it had to be
# Of the grace, even if the overlap leaves no slack:
GRACE_SHARE_MIN = 0.2  # of ``grace_s``
GRACE_STEPS_MIN = 2.0  # steps of the run


class RoundClock:
    """When rounds will be, whom to hurry, and how long a quorum waits for the others."""

    def __init__(self, context: Context, round_table: RoundTable) -> None:
        self.context = context
        self.round_table = round_table
        self._reached: tuple[int, float] | None = None  # the last round's step, and when it was
        self._paces_s: deque[float] = deque(maxlen=PACES_KEPT)  # seconds per step of the run
        # By peer, attached members only.
        self._steps_s: dict[str, float] = {}
        self._leads_s: dict[str, deque[float]] = {}

    # ------------------------------------------------------------ facts

    def reached(self, round_: Round, step: int) -> None:
        """The first contributor has come to the round's step, and is at ``step``.

        Who is past it has trained on while the master was away. Its rounds come sooner than their
        steps are apart until it is caught up with, which says nothing about how fast anybody is.
        """
        now_s = self.context.now_s
        if step > round_.at_step:
            self._reached = None
            return
        if self._reached is not None and round_.at_step > self._reached[0]:
            step, at_s = self._reached
            self._paces_s.append((now_s - at_s) / (round_.at_step - step))
        self._reached = (round_.at_step, now_s)

    def answered(self, round_: Round, peer: str, step_s: float) -> None:
        """A contributor is ready; if it was hurried, so long after that.

        Args:
          step_s: of its trainer, as it says; 0: it does not know.
        """
        if step_s > 0.0:
            self._steps_s[peer] = min(step_s, LEAD_S_MAX)
        if peer in round_.nudged:
            self._note_lead(peer, self.context.now_s - round_.nudged[peer])

    def missed(self, round_: Round, peer: str) -> None:
        """A contributor was hurried, and the round went on without it."""
        if peer in round_.nudged:
            waited_s = self.context.now_s - round_.nudged[peer]
            self._note_lead(peer, MISSED_FACTOR * waited_s)

    def removed(self, peer: str) -> None:
        self._leads_s.pop(peer, None)
        self._steps_s.pop(peer, None)

    def _note_lead(self, peer: str, lead_s: float) -> None:
        leads_s = self._leads_s.setdefault(peer, deque(maxlen=LEADS_KEPT))
        leads_s.append(min(lead_s, LEAD_S_MAX))

    # ------------------------------------------------------------ questions

    @property
    def step_s(self) -> float:
        """Seconds per step of the run, with what every round waits for; 0: not known yet."""
        return min(self._paces_s, default=0.0)

    def lead_s(self, peer: str) -> float:
        """How long before a round this contributor is to be hurried; 0: it need not be."""
        step_s = self._steps_s.get(peer, 0.0)
        if step_s <= LEAD_STEPS_MIN * self.step_s:
            return 0.0
        return LEAD_MARGIN * max(step_s, *self._leads_s.get(peer, ()), 0.0)

    def due_s(self, round_: Round) -> float:
        """When the fastest will come to the round's step; infinite: not known."""
        if self._reached is None or not self._paces_s or round_.at_step <= self._reached[0]:
            return math.inf
        step, at_s = self._reached
        return at_s + (round_.at_step - step) * self.step_s

    def nudges(self, round_: Round, expected: Collection[str]) -> dict[str, float]:
        """Contributors that are late, or will be, and when to hurry each of them."""
        heard = round_.ready.keys() | round_.declined.keys() | round_.nudged.keys()
        late = [peer for peer in expected if peer not in heard]
        if round_.reached_s is not None:
            return dict.fromkeys(late, round_.reached_s)
        due_s = self.due_s(round_)
        if not late or due_s == math.inf:
            return {}
        fastest = min(expected, key=self.lead_s)  # is never hurried ahead: somebody must come
        return {
            peer: max(round_.opened_s, due_s - lead_s)
            for peer in late
            if peer != fastest and (lead_s := self.lead_s(peer))
        }

    def limit_s(self, round_: Round) -> float:
        """When a round with a quorum goes on without those who are late; infinite: no quorum."""
        if round_.quorum_s is None:
            return math.inf
        reached_s = self.due_s(round_) if round_.reached_s is None else round_.reached_s
        if reached_s == math.inf:
            reached_s = round_.quorum_s
        return max(round_.quorum_s, reached_s) + self._grace_s()

    def _grace_s(self) -> float:
        """What the overlap leaves beside a reduction: nobody has to wait for so long.

        Without overlap all wait in any case, and for as long as the owner wants. But it is never less
        than who is as fast as the run needs: with overlap the others train on, so somebody who was
        left out of one round is some steps behind them at the next.
        """
        spec = self.context.spec
        grace_s, overlap = spec.membership.grace_s, spec.diloco.overlap_steps
        if not overlap or not self.step_s:
            return grace_s
        reduction_s = statistics.median(self.round_table.reductions_s or (0.0,))
        slack_s = overlap * self.step_s - reduction_s
        return min(grace_s, max(slack_s, GRACE_STEPS_MIN * self.step_s, GRACE_SHARE_MIN * grace_s))
