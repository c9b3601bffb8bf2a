"""The observer of a simulated run, which checks the invariants after every event that can violate
them.

parity      all members have the same root at the same fragment and version
history     versions are committed in order, each once, and applied only after the commit
divisor     a committed mean is that of exactly the contributors that its record names
promotion   a peer that gets a place is in sync, so its promotion moves no state
terms       no peer follows an older master after a newer one
the dead    a dead or stopped peer stays a member little longer than the deadline
honesty     no honest peer is accused of lying
leases      a commit's record spends what its contributors trained on, and nothing twice
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import product

import numpy as np
import trio
from attrs import define, field
from blake3 import blake3
from numpy.typing import NDArray

from ..membership.master.state.journal import JournalRecord, RoundCommitted, RunRewound
from ..membership.shared.manifest import contents_of
from ..protocol.messages import Commit, Contributor, ContributorRun, FragmentHead

CONTRIBUTIONS_KEPT_MAX = 4_096  # (round, peer) pairs; older rounds cannot be committed any more

Tell = Callable[[str], object]  # receives every event


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
    """Checks what trainers really trained on against what the journal says is spent.

    Attributes:
      posts: by round and peer, what the updates were trained on that the peer posted: a trainer
        that is restarted may post again.
      rounds: the commits of the present branch, oldest first.
      spent: positions in committed work.
    """

    posts: dict[tuple[int, str], list[frozenset[int]]] = field(factory=dict)
    rounds: list[SpentRound] = field(factory=list)
    spent: set[int] = field(factory=set)

    def saw_post(self, peer: str, round_id: int, positions: Iterable[int]) -> None:
        self.posts.setdefault((round_id, peer), []).append(frozenset(positions))

    def saw_commit(self, record: RoundCommitted) -> None:
        """Check that a commit spends what its contributors trained on, and no sample twice."""
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
                    f"samples {sorted(twice)[:5]} are in rounds {earlier.commit.round} and"
                    f" {commit.round}"
                )
        if trained - self.spent != spent:
            raise ViolationError(
                f"round {commit.round} spends {sorted(spent)[:5]} and trained on"
                f" {sorted(trained)[:5]}"
            )
        self.spent |= spent
        self.rounds.append(SpentRound(commit, frozenset(trained), spent))

    def _part(self, round_id: int, peer: str, spent: frozenset[int]) -> frozenset[int]:
        """Return what a contributor's update, the one that was taken, was trained on."""
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


@define
class Witness:
    """An observer of every peer and of the journal, which raises ViolationError.

    Attributes:
      roots: by fragment and version, the first root seen and the peer that had it.
      versions: by fragment, the committed version.
      terms: by peer and incarnation, the newest master's term.
      contributions: by round and peer, the posted pseudo-gradients.
      trace: digest of all events with their times.
      coarse: a lossy codec is in use, so means are right to a few steps of int8.
      knows_contributions: False if contributions are not known, so that no mean is checked.
      checked: the mean that was found right last, with its commit and the ends of its chunks.
      excused: peers whose copy a test has damaged.
    """

    roots: dict[tuple[int, int], tuple[bytes, str]] = field(factory=dict)
    commits: list[Commit] = field(factory=list)
    recorded: set[int] = field(factory=set)  # rounds of the commits
    versions: dict[int, int] = field(factory=dict)
    terms: dict[tuple[str, int], int] = field(factory=dict)
    contributions: dict[tuple[int, str], list[NDArray[np.float32]]] = field(factory=dict)
    events: int = 0
    trace: blake3 = field(factory=blake3)
    coarse: bool = False
    knows_contributions: bool = True
    checked: tuple[Commit, Sequence[int], NDArray[np.float32]] | None = None
    excused: set[str] = field(factory=set)
    tell: Tell | None = None
    leases: LeaseWitness = field(factory=LeaseWitness)

    def note(self, *what: object) -> None:
        self.events += 1
        line = repr((round(trio.current_time(), 6), *what))
        self.trace.update(line.encode())
        if self.tell is not None:
            self.tell(line)

    def saw_root(self, peer: str, head: FragmentHead) -> None:
        self.note("root", peer, head)
        if peer in self.excused:
            return
        key = (head.fragment, head.version)
        known = self.roots.setdefault(key, (head.root, peer))
        if known[0] != head.root:
            raise ViolationError(
                f"version {head.version} of fragment {head.fragment} differs between "
                f"{known[1][:8]} and {peer[:8]}"
            )

    def saw_record(self, record: JournalRecord) -> None:
        self.note("record", record)
        if isinstance(record, RunRewound):
            self._rewind(record)
        if not isinstance(record, RoundCommitted):
            return
        commit = record.commit
        expected = self.versions.get(commit.fragment, 0)
        if commit.version != expected:
            raise ViolationError(
                f"round {commit.round} commits on version {commit.version}, not {expected}"
            )
        self.versions[commit.fragment] = expected + 1
        self.commits.append(commit)
        self.recorded.add(commit.round)
        self.leases.saw_commit(record)

    def _rewind(self, record: RunRewound) -> None:
        """Forget the versions after a rewind's target; the run will commit them again."""
        self.leases.saw_rewind(record)
        for head in record.heads:
            self.versions[head.fragment] = head.version
            for key in [k for k in self.roots if k[0] == head.fragment and k[1] > head.version]:
                del self.roots[key]

    def saw_term(self, peer: str, incarnation: int, term: int) -> None:
        """Record that a peer's daemon follows the master of a term."""
        known = self.terms.setdefault((peer, incarnation), term)
        if term < known:
            raise ViolationError(f"{peer[:8]} follows a master of term {term} after one of {known}")
        self.terms[peer, incarnation] = term

    def saw_contribution(self, peer: str, round_id: int, values: NDArray[np.float32]) -> None:
        """Record a contribution; after a restart a peer posts again for a round."""
        self.contributions.setdefault((round_id, peer), []).append(values.copy())
        while len(self.contributions) > CONTRIBUTIONS_KEPT_MAX:
            del self.contributions[next(iter(self.contributions))]

    def saw_mean(
        self, peer: str, commit: Commit, mean: NDArray[np.float32], ends: Sequence[int]
    ) -> None:
        """Check that a mean is that of the contributors that the commit's record names.

        The check goes chunk by chunk, because after a repair chunks have different contributors.

        Args:
          ends: 0, and where each chunk's values end.
        """
        self.note("mean", peer, commit.round)
        if commit.round not in self.recorded:
            raise ViolationError(f"{peer[:8]} applies round {commit.round}: no record of it")
        if not self.knows_contributions or self._is_checked(commit, mean, ends):
            return
        everybody = b"\xff" * (len(commit.contributors) // 8 + 1)
        start = chunk = 0
        for run in commit.manifest or (ContributorRun(everybody, len(ends) - 1),):
            chunk += run.chunk_count
            end = ends[min(chunk, len(ends) - 1)]
            bits = int.from_bytes(run.contributors, "little")
            present = [c for at, c in enumerate(commit.contributors) if bits >> at & 1]
            self._check_part(peer, commit, present, slice(start, end), mean[start:end])
            start = end
        if start < len(mean):
            raise ViolationError(f"round {commit.round}: the manifest ends at {start}")
        self.checked = commit, ends, mean.copy()

    def _is_checked(self, commit: Commit, mean: NDArray[np.float32], ends: Sequence[int]) -> bool:
        """Return whether another peer's mean, with the same values, was found right."""
        if self.checked is None or self.checked[:2] != (commit, ends):
            return False
        return np.array_equal(self.checked[2], mean)

    def _check_part(
        self,
        peer: str,
        commit: Commit,
        present: Sequence[Contributor],
        part: slice,
        mean: NDArray[np.float32],
    ) -> None:
        total = sum(c.weight for c in present)
        shares = [c.weight / total * c.scale for c in present]
        for choice in product(*(self.contributions[commit.round, c.peer] for c in present)):
            posted = [values[part].astype(np.float64) for values in choice]
            expected = np.zeros(mean.shape, np.float64)
            for values, share in zip(posted, shares, strict=True):
                expected += values * share
            largest = max((float(np.max(np.abs(v), initial=0.0)) for v in posted), default=0.0)
            margin = largest / 50 if self.coarse else 1e-6
            if np.allclose(mean, expected, rtol=1e-5, atol=margin):
                return
        names = [c.peer[:8] for c in present]
        raise ViolationError(
            f"round {commit.round} at {peer[:8]}: the mean of {part} is not that of {names}"
        )
