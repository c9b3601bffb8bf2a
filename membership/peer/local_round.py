"""One round as a peer sees it."""

from __future__ import annotations

import enum

from attrs import define

from ...protocol.messages import Commit, Open, Posted, Reduce, Reduced, ReduceFailed

# Rounds of a fragment that may be ordered after a committed one that still lacks frames. By then no
# peer sends that one any more: a broken link may have lost its frames, and a sender drops what a
# slow receiver has not got after fewer rounds than that.
OVERTAKEN_MAX = 8


class RoundState(enum.Enum):
    OPEN = "open"
    REDUCING = "reducing"
    REDUCED = "reduced"
    APPLYING = "applying"


@define
class LocalRound:
    """One round of one fragment at this peer.

    Attributes:
      version: of the fragment before the round.
      at_step: the step at which contributors post, by the master's ``Open`` or ``Commit``.
      order: the reduction that the master ordered last; ``attempt`` is its number.
      posted: the trainer's pseudo-gradient for the round.
      offered: the trainer was told that the round is open.
      told_step: the step at which the trainer was told to post.
      nudged: other peers wait for this one: the trainer posts what it has by now.
      digest: of the result held here, in REDUCED.
      reported: what the master was told of the attempt.
      stored: the result waits for a copy of the fragment.
    """

    round: int
    fragment: int
    version: int
    at_step: int
    phase: RoundState = RoundState.OPEN
    attempt: int = 0
    order: Reduce | None = None
    posted: Posted | None = None
    offered: bool = False
    told_step: int = 0
    nudged: bool = False
    digest: bytes = b""
    reported: Reduced | ReduceFailed | None = None
    commit: Commit | None = None
    stored: bool = False

    @property
    def unposted(self) -> bool:
        """The round is open and the trainer has not posted for it."""
        return self.phase is RoundState.OPEN and self.posted is None

    @property
    def undecided(self) -> bool:
        """A reduction was ordered and the peer has not heard how the round ended."""
        return self.phase in (RoundState.REDUCING, RoundState.REDUCED) and self.commit is None


def void_rounds(rounds: dict[int, LocalRound], new: Open | Reduce) -> list[LocalRound]:
    """Return the uncommitted rounds that a new round of their fragment ends."""
    return [
        each
        for each in rounds.values()
        if each.fragment == new.fragment and each.round < new.round and each.commit is None
    ]


def overtaken_rounds(
    rounds: dict[int, LocalRound], fragment: int
) -> list[tuple[LocalRound, Commit]]:
    """Return the committed rounds of a fragment whose results will not come any more."""
    numbers = sorted(each.round for each in rounds.values() if each.fragment == fragment)
    before = numbers[: 1 - OVERTAKEN_MAX]  # the round that is being ordered counts, too
    return [
        (rounds[number], commit)
        for number in before
        if rounds[number].phase is RoundState.REDUCING
        and (commit := rounds[number].commit) is not None
    ]


def committed_rounds(rounds: dict[int, LocalRound], fragment: int) -> list[LocalRound]:
    """Return the committed rounds of a fragment.

    Where there is no base to apply them to they are of no use: the next copy contains them.
    """
    return [each for each in rounds.values() if each.fragment == fragment and each.commit]
