"""Rounds that a trainer was told of: when it posts, and where it waits for what.

Normally a trainer posts exactly at a round's step. It is *ahead* of a round only if it went on past
its hold while the master was away, or has loaded a later step.
"""

from __future__ import annotations

from collections.abc import Collection

from attrs import define

from ..protocol.messages import COUNT_MAX


@define
class OpenRound:
    """An opened round of a fragment; a fragment has one at a time."""

    number: int
    at_step: int
    posted_tokens: int | None = None  # tokens trained when it was posted; None: not posted yet
    posted_step: int = 0
    told: bool = False  # whether the daemon knows: what was posted may be on its way from a GPU
    due_step: int | None = None  # where it was due first, if there was nothing to post yet

    def too_early(self, step: int, tokens: int) -> bool:
        """Whether to train one more step first, since nothing was trained since the last post or
        load. Were all of them to post nothing, the round would be void and asked for again here."""
        if tokens:
            return False
        if self.due_step is None:
            self.due_step = step
        return self.due_step == step


def must_wait(
    rounds: Collection[OpenRound], step: int, step_limit: int, overlap_steps: int
) -> bool:
    """Whether there is nothing to do at this step but wait for the daemon."""
    ahead = False  # we are past the hold, and may take the steps that are ours all the same
    for opened in rounds:
        if opened.posted_tokens is None:
            ahead |= opened.at_step <= step
        elif overlap_steps == 0 or step >= opened.posted_step + overlap_steps:
            return True
        else:
            ahead |= opened.posted_step >= step_limit
    # A hold ends with the round that it waited for: one at that step, or at a later one.
    held = all(opened.at_step < step_limit for opened in rounds)
    return held and not ahead and step >= step_limit


def next_due_step(
    rounds: Collection[OpenRound], step: int, step_limit: int, overlap_steps: int
) -> int:
    """The first step at which something is to be done even if no message comes."""
    steps = [step_limit] if step_limit > step else []
    for opened in rounds:
        if opened.posted_tokens is None:
            steps.append(opened.at_step)
        else:
            steps.append(opened.posted_step + overlap_steps)
    return min(steps, default=COUNT_MAX)
