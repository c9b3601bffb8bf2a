"""The history of a run, which the journal's records add up to: state that survives the master's
death.

Lasting state changes only through records, in a live master as in one that restarts. Both apply the
same records to a ``RunHistory``, so there is no second path that could disagree. The daemon stores
the records.

    decision --> record --> RunHistory.apply --> effects that peers see
                    |
                 journal ---- after a restart ----> RunHistory.replay
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence

from attrs import Factory, define

from ....protocol.errors import LocalProtocolError
from ....protocol.messages import Commit, FragmentHead, FragmentSize, LeaseRange, ModelLayout
from ...shared.lease_ranges import RangeSet
from ...shared.manifest import contents_of
from .journal import (
    DataKnown,
    JournalRecord,
    LeasesReserved,
    MastersKnown,
    PeerAdmitted,
    PeerDemoted,
    PeerRevoked,
    PlaceTaken,
    PlaceVacated,
    RootKnown,
    RoundCommitted,
    RoundNumbered,
    RoundOrdered,
    RunCreated,
    RunFinished,
    RunFounded,
    RunPaused,
    RunRewound,
    SpecChanged,
    TermStarted,
    VersionAdopted,
)

# Versions per fragment whose root is kept. The run can go back this far if all members with newer
# versions are gone for good (see ``lineage``).
ROOTS_KEPT_MAX = 256
# A journal that was cut, or is a copy, may lack its last records. Its next master skips this many
# terms and rounds, to begin beyond all numbers that can have been used.
TERMS_SKIPPED = 1_000
ROUNDS_SKIPPED = 1_000_000
BRANCHES_PER_TERM = 1_000_000
ADMITTED_MAX = 4_096  # peers whose member number is kept; an older one gets a new number
REVOKED_MAX = 65_536  # the oldest are forgotten; their certificates have expired by then


@define
class MasterHistory:
    """The run's masters: the present term, and where they can be reached."""

    term: int = 0
    nonce: bytes = b""
    behind: bool = False  # see ``TermStarted``; until a round is opened
    addresses: tuple[str, ...] = ()

    def start_term(self, record: TermStarted) -> None:
        self.term = max(self.term, record.term)
        self.nonce = record.nonce
        self.behind |= record.behind


@define
class MemberHistory:
    """The peers that were ever members, as far as they are remembered, and contributors' places."""

    admitted: dict[str, PeerAdmitted] = Factory(dict)  # by peer, oldest first
    next_number: int = 1
    # ``next_number`` at the last commit; members with smaller numbers may still be applying it.
    number_at_commit: int = 1
    places: set[str] = Factory(set)  # peers that are contributors
    vacancies: int = 0  # places given up and not taken again
    revoked: dict[str, str] = Factory(dict)  # by peer: the reason
    demoted: set[str] = Factory(set)  # spares that take no place
    # By peer, the one that has contributed last last: commits with it, or infinity without a trial.
    served: dict[str, float] = Factory(dict)

    def name_of(self, peer: str) -> str:
        """Return a peer's name; empty if it is not known any more."""
        admitted = self.admitted.get(peer)
        return admitted.name if admitted else ""

    def is_out(self, peer: str) -> bool:
        """Return whether a peer may not enter."""
        return peer in self.revoked

    def able(self) -> list[PeerAdmitted]:
        """Return the known peers that may enter, the oldest first."""
        return [record for record in self.admitted.values() if not self.is_out(record.peer)]

    def admit(self, record: PeerAdmitted) -> None:
        self.admitted.pop(record.peer, None)
        self.admitted[record.peer] = record
        self.next_number = max(self.next_number, record.number + 1)
        if len(self.admitted) > ADMITTED_MAX:
            del self.admitted[next(iter(self.admitted))]

    def serve(self, commit: Commit) -> None:
        """Count a commit for its contributors; those of the run's first one have no trial."""
        first = 0.0 if self.served else math.inf
        for each in commit.contributors:
            self.served[each.peer] = self.served.pop(each.peer, first) + 1
        while len(self.served) > ADMITTED_MAX:
            del self.served[next(iter(self.served))]

    def take_place(self, peer: str) -> None:
        self.places.add(peer)
        self.vacancies = max(0, self.vacancies - 1)

    def vacate(self, peer: str) -> None:
        self.places.discard(peer)
        self.vacancies += 1

    def demote(self, record: PeerDemoted) -> None:
        if record.peer in self.places and not record.back:
            self.vacate(record.peer)
        self.demoted.discard(record.peer)
        if not record.back and len(self.demoted) < ADMITTED_MAX:
            self.demoted.add(record.peer)

    def revoke(self, record: PeerRevoked) -> None:
        if record.peer in self.places:
            self.vacate(record.peer)
        self.revoked[record.peer] = record.reason
        if len(self.revoked) > REVOKED_MAX:
            del self.revoked[next(iter(self.revoked))]


@define
class ScheduleHistory:
    """The rounds that were opened (see ``round_schedule``)."""

    turns: list[int] = Factory(list)  # rounds that each fragment has had; never reduced by a rewind
    opened_count: int = 0  # rounds opened, also those that were aborted
    sync_every: int = 0  # of the last round's schedule; 0: no round was opened yet
    moved: int = 0  # likewise
    last_round: int = 0  # the last one that was committed
    next_round: int = 1

    @property
    def uncommitted_count(self) -> int:
        """Return the number of rounds opened and not committed, those in progress included."""
        return max(0, self.opened_count - sum(self.turns))

    def open(self, record: RoundNumbered) -> None:
        self.next_round = max(self.next_round, record.round + 1)
        self.opened_count += 1
        self.sync_every, self.moved = record.sync_every, record.moved

    def skip(self, term: int) -> None:
        """Go beyond all rounds that can have been opened before this term."""
        # The second number holds even if the record of an earlier skip is lost, too.
        self.next_round = max(
            self.next_round + ROUNDS_SKIPPED, term // TERMS_SKIPPED * ROUNDS_SKIPPED
        )


@define
class RewindHistory:
    """How often the run went back to older versions."""

    count: int = 0
    # ``RunHistory.commit_count`` before the last rewind, and after it.
    last: tuple[int, int] = (0, 0)
    branch: int = 0  # changes whenever commits that a peer has heard of may be void

    def note(self, before: int, after: int) -> None:
        self.last = max(before, self.last[0]), after
        self.count += 1
        self.branch += 1


@define
class LeaseHistory:
    """The run's data: which positions are spent, and how far leases may have been given.

    Which peer holds which lease is not recorded: peers tell it to the next master. So a lease costs
    no record, and a commit's record names the ranges that its contributors trained on.
    """

    length: int = 0  # samples of the data set; 0: no sampler has told it yet
    spent: RangeSet = Factory(RangeSet)  # positions whose samples are in committed rounds
    reserved: int = 0  # no position from this one on was ever leased
    # What the last commits spent, oldest first; as long as the history's trail.
    trail: deque[tuple[LeaseRange, ...]] = Factory(deque)

    def know(self, length: int) -> None:
        """Take the length of the data set; raises LocalProtocolError if it is known already."""
        if self.length:
            raise LocalProtocolError("the length of the data set was recorded twice")
        self.length = length

    def spend(self, ranges: Iterable[LeaseRange]) -> None:
        """Note what a commit spends.

        Raises:
          LocalProtocolError: a position is spent already, or was never leased.
        """
        spent = RangeSet.of(ranges)
        if (spent & self.spent).count:
            raise LocalProtocolError(f"leases are spent twice: {list(spent & self.spent)}")
        if any(stop > self.reserved for _start, stop in spent):
            raise LocalProtocolError("a commit spends positions that were never leased")
        self.spent.update(spent)
        self.trail.append(spent.leases())

    def undo(self) -> None:
        """Forget what the last commit spent: the run goes back to the state before it."""
        if self.trail:
            self.spent.subtract(RangeSet.of(self.trail.pop()))

    @property
    def epoch(self) -> int:
        """The first epoch of which not every sample is in committed work."""
        return self.spent.prefix_stop() // self.length if self.length else 0

    def spent_in(self, epoch: int) -> int:
        """Return how many samples of an epoch are in committed work."""
        return self.spent.count_in(epoch * self.length, (epoch + 1) * self.length)


@define
class RunHistory:
    """The state that the records add up to. Changed only by ``apply``."""

    run_id: str = ""
    masters: MasterHistory = Factory(MasterHistory)
    members: MemberHistory = Factory(MemberHistory)
    schedule: ScheduleHistory = Factory(ScheduleHistory)
    rewinds: RewindHistory = Factory(RewindHistory)
    data: LeaseHistory = Factory(LeaseHistory)
    layout: ModelLayout | None = None  # None before the run is founded
    sizes: tuple[FragmentSize, ...] = ()
    lineage: bytes = b""
    versions: list[int] = Factory(list)  # committed version by fragment
    roots: list[dict[int, bytes]] = Factory(list)  # by fragment: version -> root, where known
    commits: dict[int, Commit] = Factory(dict)  # the last commit by fragment
    orders: dict[int, RoundOrdered] = Factory(dict)  # the last one since that commit, by fragment
    trail: deque[int] = Factory(deque)  # fragments of the last commits, oldest first
    commit_count: int = 0  # rounds whose results are in the present versions
    token_count: int = 0  # in committed rounds, of all fragments together
    step: int = 0  # the run's global step
    paused: bool = False
    finished: bool = False

    @classmethod
    def replay(cls, records: Iterable[JournalRecord]) -> RunHistory:
        """Return the history that these records add up to."""
        history = cls()
        for record in records:
            history.apply(record)
        return history

    @property
    def founded(self) -> bool:
        return self.layout is not None

    @property
    def fragment_count(self) -> int:
        return len(self.versions)

    def root(self, fragment: int, version: int) -> bytes:
        """Return the agreed root of a version; empty if there is none."""
        return self.roots[fragment].get(version, b"")

    def head(self, fragment: int) -> FragmentHead:
        """Return the committed version; its root is empty until the members agree on it."""
        version = self.versions[fragment]
        return FragmentHead(fragment, version, self.root(fragment, version))

    def heads(self) -> tuple[FragmentHead, ...]:
        """Return the committed versions of all fragments."""
        return tuple(self.head(fragment) for fragment in range(self.fragment_count))

    def apply(self, record: JournalRecord) -> None:
        """Apply a record.

        Raises:
          LocalProtocolError: the record cannot follow the ones before it. The journal is damaged or
            the master has a bug; going on would fork the run.
        """
        match record:
            case RunCreated():
                self.run_id = record.run_id
            case TermStarted():
                self.masters.start_term(record)
                if record.behind:
                    self.orders.clear()  # it may have been committed
                    self.rewinds.branch = record.term * BRANCHES_PER_TERM
                    self.schedule.skip(record.term)
            case SpecChanged():
                self.finished = False  # ``RunEnding`` finishes it again if nothing is left to do
            case MastersKnown():
                self.masters.addresses = record.addresses
            case VersionAdopted():
                self._adopt(record)
            case RunRewound():
                self._rewind(record.heads)
            case PeerAdmitted():
                self.members.admit(record)
            case PlaceTaken():
                self.members.take_place(record.peer)
            case PlaceVacated():
                self.members.vacate(record.peer)
            case RunFounded():
                self._found(record)
            case RoundNumbered():
                self.schedule.open(record)
                self.masters.behind = False
            case RoundOrdered():
                self.orders[record.order.fragment] = record
            case RoundCommitted():
                self._commit(record.commit)
                self.data.spend(record.spent)
            case DataKnown():
                self.data.know(record.length)
            case LeasesReserved():
                self.data.reserved = max(self.data.reserved, record.stop)
            case RootKnown():
                self._know_root(record.head)
            case PeerRevoked():
                self.members.revoke(record)
            case PeerDemoted():
                self.members.demote(record)
            case RunPaused():
                self.paused = record.paused
            case RunFinished():
                self.finished = True
            case _:
                raise LocalProtocolError(f"the journal knows no {type(record).__name__}")

    def earlier(self, versions: Sequence[int]) -> int | None:
        """Return how many commits ago the run had these versions; None if never or long ago."""
        if len(versions) != self.fragment_count:
            return None
        ahead = [ours - theirs for ours, theirs in zip(self.versions, versions, strict=True)]
        wrong = sum(difference != 0 for difference in ahead)
        for undone, fragment in enumerate(reversed(self.trail)):
            if not wrong:
                return undone
            wrong += (ahead[fragment] == 0) - (ahead[fragment] == 1)
            ahead[fragment] -= 1
        return None if wrong else len(self.trail)

    def _adopt(self, record: VersionAdopted) -> None:
        head = record.head
        if head.fragment >= self.fragment_count or head.version <= self.versions[head.fragment]:
            raise LocalProtocolError(
                f"version {head.version} of fragment {head.fragment} cannot be adopted"
            )
        self.orders.pop(head.fragment, None)
        gained = head.version - self.versions[head.fragment]
        self.versions[head.fragment] = head.version
        self.commits.pop(head.fragment, None)
        self.members.number_at_commit = self.members.next_number
        self.commit_count += gained
        self.schedule.turns[head.fragment] += gained
        self.step = max(self.step, record.step)
        self.trail.clear()  # the order of the lost commits is not known
        self.data.trail.clear()  # nor what they spent
        self._forget_roots(head.fragment)
        self.roots[head.fragment][head.version] = head.root

    def _rewind(self, heads: tuple[FragmentHead, ...]) -> None:
        undone = self.earlier([head.version for head in heads])
        if undone is None or any(
            self.root(head.fragment, head.version) != head.root for head in heads
        ):
            raise LocalProtocolError("the run never was where it is to be rewound to")
        self.orders.clear()
        for _ in range(undone):
            self.trail.pop()
            self.data.undo()
        for head in heads:
            if head.version == self.versions[head.fragment]:
                continue
            self.versions[head.fragment] = head.version
            # A peer that returns with such a result must not be told that it was committed.
            self.commits.pop(head.fragment, None)
            roots = self.roots[head.fragment]
            for version in [v for v in roots if v > head.version]:
                del roots[version]
        before, self.commit_count = self.commit_count, self.commit_count - undone
        self.rewinds.note(before, self.commit_count)

    def _forget_roots(self, fragment: int) -> None:
        roots = self.roots[fragment]
        for version in [v for v in roots if v <= self.versions[fragment] - ROOTS_KEPT_MAX]:
            del roots[version]

    def _found(self, record: RunFounded) -> None:
        if self.founded:
            raise LocalProtocolError("the run was founded twice")
        self.layout = record.layout
        self.sizes = record.sizes
        self.lineage = record.lineage
        self.versions = [head.version for head in record.heads]
        self.schedule.turns = [0] * len(record.heads)
        self.roots = [{head.version: head.root} for head in record.heads]
        self.trail = deque(maxlen=ROOTS_KEPT_MAX * len(record.heads))
        self.data.trail = deque(maxlen=self.trail.maxlen)

    def _commit(self, commit: Commit) -> None:
        if commit.fragment >= self.fragment_count:
            raise LocalProtocolError(f"a commit of fragment {commit.fragment}, which is unknown")
        if commit.version != self.versions[commit.fragment]:
            raise LocalProtocolError(
                f"round {commit.round} commits on version {commit.version} of fragment "
                f"{commit.fragment}, which is at version {self.versions[commit.fragment]}"
            )
        self.versions[commit.fragment] += 1
        self.commits[commit.fragment] = commit
        self.orders.pop(commit.fragment, None)
        self.commit_count += 1
        self.token_count += contents_of(commit).tokens
        self.schedule.turns[commit.fragment] += 1
        self.trail.append(commit.fragment)
        self.step = max(self.step, commit.at_step)
        self.schedule.last_round = commit.round
        self.members.number_at_commit = self.members.next_number
        self.members.serve(commit)
        self.schedule.next_round = max(self.schedule.next_round, commit.round + 1)
        self._forget_roots(commit.fragment)

    def _know_root(self, head: FragmentHead) -> None:
        known = self.root(head.fragment, head.version)
        if known not in (b"", head.root):
            raise LocalProtocolError(
                f"two roots for version {head.version} of fragment {head.fragment}"
            )
        self.roots[head.fragment][head.version] = head.root
