"""The round clock of the elastic pace: a round is due when its fastest contributor reaches its
step.

    trained    fast   |----|----|----|----|          reaches the round's step: the round is due
               slow   |------------|--------->       posts at its last step boundary before that

No contributor waits for a slower one's steps. A late contributor is *nudged*: told to contribute,
at its next step boundary, what it has trained by then. For contributors about as fast as the
fastest it is soon enough to be nudged when the first one is there. A contributor whose steps take
much longer is nudged earlier, by its *lead time*: the duration of its step, or the time it needed
from nudge to ready if that was longer. When the round will be due is predicted from earlier rounds,
which come at a steady pace. A wrong prediction costs little: a contributor that posts early has its
other tokens in the next round; one that posts late is excluded, and has all of its tokens there.

All times are by the master's clock, except the duration of its steps, which a trainer reports
itself: a distant peer that needs long from nudge to ready must not be taken for a slow one, or it
would contribute less and less. A contributor that reports a wrong duration contributes less, or is
late.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Collection

from ..state.context import Context
from .round import Round
from .round_table import RoundTable

PACES_KEPT = 3  # rounds; the fastest is the run's pace, because pauses and waits make others longer
LEADS_KEPT = 8  # rounds; the longest lead time counts
LEAD_MARGIN = 1.25  # factor on the lead time: a step may take longer than the last ones
LEAD_STEPS_MIN = 2.0  # steps of the run; a contributor with shorter steps needs no lead time
LEAD_S_MAX = 3_600.0
MISSED_FACTOR = 2.0  # on a lead time that was too short; the one needed is not known
# Lower limits of the grace, even if the overlap leaves no slack:
GRACE_SHARE_MIN = 0.2  # of ``grace_s``
GRACE_STEPS_MIN = 2.0  # steps of the run


class RoundClock:
    """Predicts rounds, nudges contributors, and limits how long a quorum waits."""

    def __init__(self, context: Context, round_table: RoundTable) -> None:
        self.context = context
        self.round_table = round_table
        self._reached: tuple[int, float] | None = None  # the last round's step and its time
        self._paces_s: deque[float] = deque(maxlen=PACES_KEPT)  # seconds per step of the run
        # By peer, only of attached members.
        self._steps_s: dict[str, float] = {}
        self._leads_s: dict[str, deque[float]] = {}

    # ------------------------------------------------------------ facts

    def reached(self, round_: Round, step: int) -> None:
        """Note that the first contributor has reached the round's step, and is at ``step``.

        A contributor that is past the round's step has trained on while the master was away. Its
        rounds follow each other faster than it trains until they catch up, so they tell nothing of
        the pace.
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
        """Note that a contributor is ready, and how long after its nudge.

        Args:
          step_s: duration of its trainer's steps, as reported; 0 if not known.
        """
        if step_s > 0.0:
            self._steps_s[peer] = min(step_s, LEAD_S_MAX)
        if peer in round_.answers.nudged:
            self._note_lead(peer, self.context.now_s - round_.answers.nudged[peer])

    def missed(self, round_: Round, peer: str) -> None:
        """Note that a round closed without a contributor: a nudged one needs a longer lead."""
        if peer in round_.answers.nudged:
            waited_s = self.context.now_s - round_.answers.nudged[peer]
            self._note_lead(peer, MISSED_FACTOR * waited_s)

    def closed(self, round_: Round) -> None:
        """Note that a round has closed.

        If nobody reached its step, it was predicted too early: the fastest contributor has left,
        stands still, or began later than the others. The next round is not predicted but waits for
        the first one there. Otherwise those that predictions nudge would close every further round
        without the fastest.
        """
        if round_.answers.reached_s is None:
            self._reached = None

    def removed(self, peer: str) -> None:
        self._leads_s.pop(peer, None)
        self._steps_s.pop(peer, None)

    def _note_lead(self, peer: str, lead_s: float) -> None:
        leads_s = self._leads_s.setdefault(peer, deque(maxlen=LEADS_KEPT))
        leads_s.append(min(lead_s, LEAD_S_MAX))

    # ------------------------------------------------------------ questions

    @property
    def step_s(self) -> float:
        """Return seconds per step of the run, waits included; 0 if not known yet."""
        return min(self._paces_s, default=0.0)

    def lead_s(self, peer: str) -> float:
        """Return a contributor's lead time; 0 if it needs none."""
        step_s = self._steps_s.get(peer, 0.0)
        if step_s <= LEAD_STEPS_MIN * self.step_s:
            return 0.0
        return LEAD_MARGIN * max(step_s, *self._leads_s.get(peer, ()), 0.0)

    def due_s(self, round_: Round) -> float:
        """Return when the fastest will reach the round's step; infinity if not known."""
        if self._reached is None or not self._paces_s or round_.at_step <= self._reached[0]:
            return math.inf
        step, at_s = self._reached
        return at_s + (round_.at_step - step) * self.step_s

    def nudges(self, round_: Round, expected: Collection[str]) -> dict[str, float]:
        """Return the contributors that are late, or will be, and when to nudge each of them."""
        answers = round_.answers
        heard = answers.ready.keys() | answers.declined.keys() | answers.nudged.keys()
        late = [peer for peer in expected if peer not in heard]
        if answers.reached_s is not None:
            return dict.fromkeys(late, answers.reached_s)
        due_s = self.due_s(round_)
        if not late or due_s == math.inf:
            return {}
        fastest = min(expected, key=self.lead_s)  # is never nudged ahead: one must reach the step
        return {
            peer: max(round_.opened_s, due_s - lead_s)
            for peer in late
            if peer != fastest and (lead_s := self.lead_s(peer))
        }

    def limit_s(self, round_: Round) -> float:
        """Return when a round closes without late contributors; infinity if it has no quorum."""
        quorum_s, reached_s = round_.answers.quorum_s, round_.answers.reached_s
        if quorum_s is None:
            return math.inf
        if reached_s is None:
            reached_s = self.due_s(round_)
        if reached_s == math.inf:
            reached_s = quorum_s
        return max(quorum_s, reached_s) + self._grace_s()

    def _grace_s(self) -> float:
        """Return how long a quorum waits for late contributors.

        With overlap that is the time which the overlap leaves beside a reduction, so that no
        trainer waits. It is never less than a contributor of the run's pace needs: the others train
        on, so one that was left out of a round is some steps behind them at the next. Without
        overlap all trainers wait in any case, for as long as the operator allows.
        """
        spec = self.context.spec
        grace_s, overlap = spec.membership.grace_s, spec.diloco.overlap_steps
        if not overlap or not self.step_s:
            return grace_s
        reduction_s = statistics.median(self.round_table.reductions_s or (0.0,))
        slack_s = overlap * self.step_s - reduction_s
        return min(grace_s, max(slack_s, GRACE_STEPS_MIN * self.step_s, GRACE_SHARE_MIN * grace_s))
