"""The observer of leases: what trainers really trained on, against what the journal says is spent."""

from __future__ import annotations

from collections.abc import Iterable

from attrs import define, field

from ..membership.manifest import contents_of
from ..membership.master.state.journal import RoundCommitted, RunRewound
from ..protocol.messages import Commit


class ViolationError(AssertionError):
    """A run violated an invariant."""


@define
class SpentRound:
    """A commit, and the positions that its contributors trained on."""

    commit: Commit
    trained: frozenset[int]
    spent: frozenset[int]


@define
class LeaseWitness:
    """Checks each commit's record.

    Attributes:
      posts: by round and peer, what the updates were trained on that the peer posted: a trainer that
        is restarted may post again.
      rounds: the commits of the present branch, oldest first.
      spent: positions in committed work.
    """

    posts: dict[tuple[int, str], list[frozenset[int]]] = field(factory=dict)
    rounds: list[SpentRound] = field(factory=list)
    spent: set[int] = field(factory=set)

    def saw_post(self, peer: str, round_id: int, positions: Iterable[int]) -> None:
        """Record what an update was trained on."""
        self.posts.setdefault((round_id, peer), []).append(frozenset(positions))

    def saw_commit(self, record: RoundCommitted) -> None:
        """Check that a commit spends what its contributors trained on, and no sample a second time."""
        commit = record.commit
        spent = frozenset(p for each in record.spent for p in range(each.start, each.stop))
        if twice := spent & self.spent:
            raise ViolationError(f"round {commit.round} spends {sorted(twice)[:5]} again")
        trained: set[int] = set()
        for added in contents_of(commit).added:
            part = self._part(commit.round, added.contributor.peer, spent)
            if twice := part & trained:
                raise ViolationError(
                    f"two updates of round {commit.round} have {sorted(twice)[:5]}"
                )
            trained |= part
        for earlier in self.rounds:
            if earlier.commit.fragment == commit.fragment and (twice := earlier.trained & trained):
                raise ViolationError(
                    f"samples {sorted(twice)[:5]} are in rounds {earlier.commit.round} and {commit.round}"
                )
        if trained - self.spent != spent:
            raise ViolationError(
                f"round {commit.round} spends {sorted(spent)[:5]} and trained on {sorted(trained)[:5]}"
            )
        self.spent |= spent
        self.rounds.append(SpentRound(commit, frozenset(trained), spent))

    def _part(self, round_id: int, peer: str, spent: frozenset[int]) -> frozenset[int]:
        """Return what a contributor's update was trained on; of several posts the one that was taken."""
        posts = self.posts.get((round_id, peer), [])
        fitting = [each for each in posts if each - self.spent <= spent]
        if posts and not fitting:
            lost = sorted(posts[-1] - self.spent - spent)
            raise ViolationError(
                f"round {round_id} holds {lost[:5]} of {peer[:8]} and spends them not"
            )
        return max(fitting, key=len, default=frozenset())

    def saw_rewind(self, record: RunRewound) -> None:
        """Forget the commits that are void."""
        for head in record.heads:
            for each in list(self.rounds):
                commit = each.commit
                if commit.fragment == head.fragment and commit.version >= head.version:
                    self.rounds.remove(each)
                    self.spent -= each.spent
