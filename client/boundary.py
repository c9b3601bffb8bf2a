"""The rounds of one trainer: which it posts, waits for and applies, at which step boundary.

This is a pure state machine: it has no tensors, no clock and no connection. ``Run`` counts steps in
it, ``Orders`` hands it the daemon's messages, ``StepBoundary`` does what its methods return.

Normally a trainer posts exactly at a round's step. It is *ahead* of a round only if it passed the
step limit while the master was away, or has loaded a later step.
"""

from __future__ import annotations

from attrs import define, frozen

from ..protocol import messages as m


@define
class OpenRound:
    """An open round of a fragment; a fragment has at most one.

    Attributes:
      offer: the number of the daemon's offer of it.
      posted_tokens: tokens trained when the fragment was posted; None: not posted yet.
      posted_step: the step at which it was posted; steps that the run skips later are added.
      posted_own_step: likewise, in the trainer's own steps.
      announced: the daemon got ``Posted``; before that, the data may be on its way from a GPU.
      first_due_step: the step at which the round was due first, but nothing was trained to post.
      posted_samples: samples trained when the fragment was posted.
    """

    number: int
    at_step: int
    offer: int = 0
    posted_tokens: int | None = None
    posted_step: int = 0
    posted_own_step: int = 0
    announced: bool = False
    first_due_step: int | None = None
    posted_samples: int = 0


@frozen
class EndedRound:
    """The outcome of a round for this trainer.

    Attributes:
      posted: this trainer posted the fragment for the round, and has loaded no other state since.
      contributed: the round was committed with this trainer's contribution.
    """

    posted: bool
    contributed: bool


class StepTimes:
    """The mean duration of the steps between two measurements: the master finds slow trainers.

    Attributes:
      step_s: seconds of a step, without waiting; 0: not known yet.
    """

    def __init__(self) -> None:
        self.step_s = 0.0
        self._last: tuple[float, int] | None = None  # seconds spent stepping, own steps

    def measure(self, step: int, stepping_s: float) -> None:
        """Measure at one of the trainer's own steps, by a clock that stops while it waits."""
        if self._last is not None and step > self._last[1]:
            self.step_s = max(0.0, stepping_s - self._last[0]) / (step - self._last[1])
        self._last = (stepping_s, step)


class BoundaryMachine:
    """Counts a trainer's steps and tokens, and decides what is due at a step.

    Args:
      by_steps: there is something to post as soon as a step was trained, even one of no tokens.
        Ranks of one trainer count tokens of their own, and must post at the same step.
      data_rank: of this process among those of the trainer.

    Attributes:
      step: the run's global step.
      skipped_count: steps of the run that this trainer did not train.
      tokens: tokens trained since the process started.
      samples: likewise, samples that ``run.sampler`` gave.
      draws: the trainer has such a sampler.
      contributing: False for a spare, which waits at its step boundary.
      loaded: the model holds the shared state; False: the trainer waits for ``Load``.
      finished: the run is over.
      leads: this peer evaluates and saves for the run.
      total_steps: the step at which the run's last round is due; 0: the run has no end.
    """

    def __init__(self, *, by_steps: bool = False, data_rank: int = 0) -> None:
        self._by_steps = by_steps
        self._data_rank = data_rank
        self.step = 0
        self.skipped_count = 0
        self.tokens = 0
        self.samples = 0
        self.draws = False
        self.contributing = True
        self.loaded = False
        self.finished = False
        self.leads = False
        self.total_steps = 0
        self._rounds: dict[int, OpenRound] = {}  # by fragment
        # By fragment, the tokens when it last contributed; else those at the load.
        self._contributed_tokens: dict[int, int] = {}
        self._loaded_tokens = 0
        self._loaded_samples = 0
        # Likewise, the own steps.
        self._contributed_steps: dict[int, int] = {}
        self._loaded_step = 0
        self._step_limit = m.COUNT_MAX
        # Train on to the step limit without posting or waiting for rounds.
        self._master_away = False

    @property
    def own_step(self) -> int:
        """The steps that this trainer trained itself."""
        return self.step - self.skipped_count

    @property
    def step_limit(self) -> int:
        """The step that this trainer may not pass; at least the one where it is."""
        return max(self.step, self._step_limit)

    @property
    def posted_fragments(self) -> list[int]:
        """The fragments of open rounds that are posted."""
        return [f for f, opened in self._rounds.items() if opened.posted_tokens is not None]

    # ------------------------------------------------------------ at a step boundary

    def next_to_post(self) -> int | None:
        """Return a fragment to post at this step, or None."""
        if self._master_away or not (self.loaded and self.contributing):
            return None
        for fragment, opened in self._rounds.items():
            due = opened.posted_tokens is None and opened.at_step <= self.step
            if due and self._has_trained(fragment, opened):
                return fragment
        return None

    def _has_trained(self, fragment: int, opened: OpenRound) -> bool:
        """Return whether there is anything to post, or one more step was trained to no effect.

        If every trainer posted nothing, the round would be void and opened again at the same step.
        """
        if self._by_steps:
            if self.own_step > self._contributed_steps.get(fragment, self._loaded_step):
                return True
        elif self.tokens > self._counted_tokens(fragment):
            return True
        if opened.first_due_step is None:
            opened.first_due_step = self.step
        return opened.first_due_step != self.step

    def post(self, fragment: int) -> None:
        """Record that the fragment was taken for its round at this step."""
        opened = self._rounds[fragment]
        opened.posted_tokens, opened.posted_step = self.tokens, self.step
        opened.posted_own_step, opened.posted_samples = self.own_step, self.samples

    def unannounced_fragments(self) -> list[int]:
        """Return the posted fragments of which the daemon does not know yet."""
        return [f for f in self.posted_fragments if not self._rounds[f].announced]

    def announce_post(self, fragment: int, version: int, step_s: float) -> m.Posted:
        """Record that a posted fragment is announced to the daemon, and return the message.

        Args:
          version: the fragment's, on which the posted data are based.
          step_s: seconds of a recent step.
        """
        opened = self._rounds[fragment]
        assert opened.posted_tokens is not None
        opened.announced = True
        tokens = opened.posted_tokens - self._counted_tokens(fragment)
        samples = m.RankSamples(self._data_rank, self._loaded_samples, opened.posted_samples)
        return m.Posted(
            opened.number,
            fragment,
            version,
            tokens,
            opened.posted_step,
            step_s,
            (samples,) if self.draws else (),
            offer=opened.offer,
        )

    def must_wait(self, overlap_steps: int) -> bool:
        """Return whether the trainer can only wait for the daemon at this step.

        Args:
          overlap_steps: steps that may be trained between a post and its round's end.
        """
        if not (self.loaded and self.contributing):
            return True
        if self._master_away:
            return self.step >= self._step_limit
        ahead = False  # past the step limit: the trainer may still take the steps up to its post
        for opened in self._rounds.values():
            if opened.posted_tokens is None:
                ahead |= opened.at_step <= self.step
            elif overlap_steps == 0 or self.step >= opened.posted_step + overlap_steps:
                return True
            else:
                ahead |= opened.posted_step >= self._step_limit
        # A round at the limit's step or later is the one that the limit waited for, and lifts it.
        limited = all(opened.at_step < self._step_limit for opened in self._rounds.values())
        return limited and not ahead and self.step >= self._step_limit

    def next_due_step(self, overlap_steps: int) -> int:
        """Return the first step at which something is due even if no message comes."""
        if self.finished:
            return m.COUNT_MAX
        if not self.contributing:
            return 0
        steps = [self._step_limit] if self._step_limit > self.step else []
        for opened in () if self._master_away else self._rounds.values():
            if opened.posted_tokens is None:
                steps.append(opened.at_step)
            else:
                steps.append(opened.posted_step + overlap_steps)
        return min(steps, default=m.COUNT_MAX)

    # ------------------------------------------------------------ the daemon's messages

    def open_round(self, message: m.RoundOpened) -> None:
        """Record an open round. If its offer is known, the others wait: post now."""
        self._limit(message.step_limit)
        known = self._rounds.get(message.fragment)
        if known is None or (known.number, known.offer) != (message.round, message.offer):
            opened = OpenRound(message.round, message.at_step, message.offer)
            self._rounds[message.fragment] = opened
        elif known.posted_tokens is None:
            known.at_step = min(known.at_step, self.step)

    def end_round(self, message: m.RoundEnded) -> EndedRound:
        """Forget a round that is over; after a commit, move on to the run's step.

        A round that was posted before a load counts as not posted: its delta is in no tensor.
        """
        if message.committed or not self._master_away:
            self._limit(message.step_limit)
        fragment, posted_tokens = message.fragment, None
        opened = self._rounds.get(fragment)
        if opened is not None and opened.number == message.round:
            posted_tokens = opened.posted_tokens
            del self._rounds[fragment]
        contributed = message.contributed and posted_tokens is not None
        if message.committed:
            self._catch_up(message.step)
            if contributed and posted_tokens is not None and opened is not None:
                self._contributed_tokens[fragment] = posted_tokens
                self._contributed_steps[fragment] = opened.posted_own_step
        return EndedRound(posted_tokens is not None, contributed)

    def extend_limit(self, step_limit: int) -> None:
        """Train on to this step limit without rounds, because the master is away."""
        self._step_limit, self._master_away = step_limit, True

    def move_to(self, step: int, step_limit: int) -> None:
        """Continue at the step of a state that is about to be loaded."""
        self._set_step(step)
        self._limit(step_limit)

    def load(self) -> None:
        """Record that the model was replaced by the shared state, and forget posted rounds."""
        self._loaded_tokens, self._loaded_samples = self.tokens, self.samples
        self._contributed_tokens.clear()
        self._loaded_step = self.own_step
        self._contributed_steps.clear()
        for fragment in self.posted_fragments:
            del self._rounds[fragment]
        self.loaded = True

    def _limit(self, step_limit: int) -> None:
        self._step_limit, self._master_away = step_limit, False

    def _catch_up(self, step: int) -> None:
        """Skip to the run's step if it is further. An overlap keeps its length in trained steps."""
        skipped = step - self.step
        if skipped > 0:
            self._set_step(step)
            for opened in self._rounds.values():
                if opened.announced:
                    opened.posted_step += skipped

    def _set_step(self, step: int) -> None:
        self.skipped_count += step - self.step
        self.step = step

    def _counted_tokens(self, fragment: int) -> int:
        """Return the tokens that are part of the fragment's shared state, or were dropped."""
        return self._contributed_tokens.get(fragment, self._loaded_tokens)
