"""The journal's records, and the history that they add up to: state that survives the master's
death.

Lasting state changes only through records, in a live master as in one that restarts. Both apply the
same records to a ``RunHistory``, so there is no second path that could disagree. The daemon stores
the records.

    decision --> record --> RunHistory.apply --> effects that peers see
                    |
                 journal ---- after a restart ----> RunHistory.replay
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

import attrs
from attrs import Factory, define, frozen

from ....protocol.errors import LocalProtocolError
from ....protocol.messages import (
    Commit,
    FragmentHead,
    FragmentSize,
    LeaseRange,
    ModelLayout,
    Ready,
    Reduce,
)
from ...shared.manifest import contents_of
from .lease_history import LeaseHistory

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


class JournalRecord:
    """Base of all records."""

    __slots__ = ()


@frozen
class RunCreated(JournalRecord):
    """The first record of a run; written by the daemon."""

    run_id: str
    spec_toml: str


@frozen
class TermStarted(JournalRecord):
    """A master process took over; written by the daemon, before any peer may attach.

    Attributes:
      nonce: random; distinguishes masters that began the same term from copies of one journal.
      behind: the journal may lack its last records, because it was cut or is a copy. Until a round
        is opened, members may have newer versions than the journal (see ``succession``).
    """

    term: int
    nonce: bytes = b""
    behind: bool = False


@frozen
class SpecChanged(JournalRecord):
    """The operator gave the run another run.toml, or another number of rounds or epochs.

    A run that was finished goes on if the new spec has more of them than are committed.
    """

    spec_toml: str


@frozen
class MastersKnown(JournalRecord):
    """Addresses of the run's masters: this one's, and those of standby machines."""

    addresses: tuple[str, ...]


@frozen
class VersionAdopted(JournalRecord):
    """The run takes over a version that contributors hold and whose commit the journal has lost."""

    head: FragmentHead
    step: int


@frozen
class RunRewound(JournalRecord):
    """The run goes back to older versions: all members that held newer ones are gone.

    Attributes:
      heads: one for each fragment, the state after an earlier commit.
    """

    heads: tuple[FragmentHead, ...]


@frozen
class PeerAdmitted(JournalRecord):
    """A daemon process got a member number."""

    peer: str
    name: str
    number: int
    incarnation: int


@frozen
class PlaceTaken(JournalRecord):
    """The peer became a contributor."""

    peer: str


@frozen
class PlaceVacated(JournalRecord):
    """A contributor gave up its place, which is a vacancy until another peer takes it."""

    peer: str


@frozen
class RunFounded(JournalRecord):
    """The run has its first weights."""

    layout: ModelLayout
    sizes: tuple[FragmentSize, ...]
    lineage: bytes
    heads: tuple[FragmentHead, ...]


@frozen
class RoundNumbered(JournalRecord):
    """A round was opened. Its number is not used again, even if it is aborted."""

    round: int
    fragment: int = 0
    version: int = 0
    at_step: int = 0
    sync_every: int = 0  # of the schedule that it follows, as is ``moved``
    moved: int = 0


@frozen
class RoundOrdered(JournalRecord):
    """A reduction was ordered; the next master may go on with it (see ``adoption``).

    Attributes:
      ready: what the contributors had posted, in the order's order.
    """

    order: Reduce
    at_step: int
    ready: tuple[Ready, ...]


@frozen
class RoundCommitted(JournalRecord):
    """The result of a round is part of the run.

    Attributes:
      spent: leased positions whose samples are in it, and were in no committed round before.
    """

    commit: Commit
    spent: tuple[LeaseRange, ...] = ()


@frozen
class DataKnown(JournalRecord):
    """The first sampler told the length of the run's data set."""

    length: int


@frozen
class LeasesReserved(JournalRecord):
    """Positions below this one may have been leased; written for many leases at once."""

    stop: int


@frozen
class RootKnown(JournalRecord):
    """The members agree on the root of a version."""

    head: FragmentHead


@frozen
class PeerRevoked(JournalRecord):
    """The operator, or what checkers found, removed a peer for good; its place becomes a
    vacancy.
    """

    peer: str
    reason: str


@frozen
class RunPaused(JournalRecord):
    """The operator paused or resumed the opening of rounds."""

    paused: bool


@frozen
class RunFinished(JournalRecord):
    """All rounds are committed, ``round`` as the last one."""

    round: int


RECORDS: dict[str, type[JournalRecord]] = {
    name: kind
    for name, kind in list(globals().items())
    if isinstance(kind, type) and issubclass(kind, JournalRecord) and kind is not JournalRecord
}
"""All kinds of records, by the names under which the journal stores them."""


@define
class RunHistory:
    """The state that the records add up to. Changed only by ``apply``."""

    run_id: str = ""
    term: int = 0
    nonce: bytes = b""
    behind: bool = False  # see ``TermStarted``; until a round is opened
    masters: tuple[str, ...] = ()
    layout: ModelLayout | None = None  # None before the run is founded
    sizes: tuple[FragmentSize, ...] = ()
    lineage: bytes = b""
    versions: list[int] = Factory(list)  # committed version by fragment
    roots: list[dict[int, bytes]] = Factory(list)  # by fragment: version -> root, where known
    commits: dict[int, Commit] = Factory(dict)  # the last commit by fragment
    orders: dict[int, RoundOrdered] = Factory(dict)  # the last one since that commit, by fragment
    commit_count: int = 0  # rounds whose results are in the present versions
    token_count: int = 0  # in committed rounds, of all fragments together
    turns: list[int] = Factory(list)  # rounds that each fragment has had; never reduced by a rewind
    trail: deque[int] = Factory(deque)  # fragments of the last commits, oldest first
    rewind_count: int = 0
    rewound: tuple[int, int] = (0, 0)  # by the last rewind: ``commit_count`` from, and to
    opened_count: int = 0  # rounds opened, also those that were aborted
    sync_every: int = 0  # of the last round's schedule; 0: no round was opened yet
    moved: int = 0  # likewise
    branch: int = 0  # changes whenever commits that a peer has heard of may be void
    step: int = 0  # the run's global step
    last_round: int = 0
    next_round: int = 1
    next_number: int = 1
    # ``next_number`` at the last commit; members with smaller numbers may still be applying it.
    number_at_commit: int = 1
    admitted: dict[str, PeerAdmitted] = Factory(dict)  # by peer, oldest first
    places: set[str] = Factory(set)  # peers that are contributors
    vacancies: int = 0  # places given up and not taken again
    revoked: dict[str, str] = Factory(dict)  # by peer: the reason
    paused: bool = False
    finished: bool = False
    data: LeaseHistory = Factory(LeaseHistory)

    @classmethod
    def replay(cls, records: Iterable[JournalRecord]) -> RunHistory:
        """Return the history that these records add up to."""
        history = cls()
        for record in records:
            history.apply(record)
        return history

    @property
    def founded(self) -> bool:
        """Return whether the run has weights."""
        return self.layout is not None

    @property
    def fragment_count(self) -> int:
        return len(self.versions)

    @property
    def uncommitted_count(self) -> int:
        """Return the number of rounds that were opened and not committed, those in progress
        included.
        """
        return max(0, self.opened_count - sum(self.turns))

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
                self._start_term(record)
            case SpecChanged():
                self.finished = False  # ``Coordinator`` finishes it again if nothing is left to do
            case MastersKnown():
                self.masters = record.addresses
            case VersionAdopted():
                self._adopt(record)
            case RunRewound():
                self._rewind(record.heads)
            case PeerAdmitted():
                self._admit(record)
            case PlaceTaken():
                self.places.add(record.peer)
                self.vacancies = max(0, self.vacancies - 1)
            case PlaceVacated():
                self._vacate(record.peer)
            case RunFounded():
                self._found(record)
            case RoundNumbered():
                self.next_round = max(self.next_round, record.round + 1)
                self.opened_count += 1
                self.behind = False
                self.sync_every, self.moved = record.sync_every, record.moved
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
                if record.peer in self.places:
                    self._vacate(record.peer)
                self.revoked[record.peer] = record.reason
                if len(self.revoked) > REVOKED_MAX:
                    del self.revoked[next(iter(self.revoked))]
            case RunPaused():
                self.paused = record.paused
            case RunFinished():
                self.finished = True
            case _:
                raise LocalProtocolError(f"the journal knows no {type(record).__name__}")

    def name_of(self, peer: str) -> str:
        """Return a peer's name; empty if it is not known any more."""
        admitted = self.admitted.get(peer)
        return admitted.name if admitted else ""

    def is_out(self, peer: str) -> bool:
        """Return whether a peer may not enter."""
        return peer in self.revoked

    def _vacate(self, peer: str) -> None:
        self.places.discard(peer)
        self.vacancies += 1

    def _start_term(self, record: TermStarted) -> None:
        self.term = max(self.term, record.term)
        self.nonce = record.nonce
        if record.behind:
            self.behind = True
            self.orders.clear()  # it may have been committed
            self.branch = record.term * BRANCHES_PER_TERM
            # The second term holds even if the record of an earlier skip is lost, too.
            self.next_round = max(
                self.next_round + ROUNDS_SKIPPED, record.term // TERMS_SKIPPED * ROUNDS_SKIPPED
            )

    def earlier(self, versions: Sequence[int]) -> int | None:
        """Return how many commits ago the run had these versions; None if never, or too long
        ago.
        """
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
        self.number_at_commit = self.next_number
        self.commit_count += gained
        self.turns[head.fragment] += gained
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
        self.rewound = max(before, self.rewound[0]), self.commit_count
        self.rewind_count += 1
        self.branch += 1

    def _forget_roots(self, fragment: int) -> None:
        roots = self.roots[fragment]
        for version in [v for v in roots if v <= self.versions[fragment] - ROOTS_KEPT_MAX]:
            del roots[version]

    def _admit(self, record: PeerAdmitted) -> None:
        self.admitted.pop(record.peer, None)
        self.admitted[record.peer] = record
        self.next_number = max(self.next_number, record.number + 1)
        if len(self.admitted) > ADMITTED_MAX:
            del self.admitted[next(iter(self.admitted))]

    def _found(self, record: RunFounded) -> None:
        if self.founded:
            raise LocalProtocolError("the run was founded twice")
        self.layout = record.layout
        self.sizes = record.sizes
        self.lineage = record.lineage
        self.versions = [head.version for head in record.heads]
        self.turns = [0] * len(record.heads)
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
        self.turns[commit.fragment] += 1
        self.trail.append(commit.fragment)
        self.step = max(self.step, commit.at_step)
        self.last_round = commit.round
        self.number_at_commit = self.next_number
        self.next_round = max(self.next_round, commit.round + 1)
        self._forget_roots(commit.fragment)

    def _know_root(self, head: FragmentHead) -> None:
        known = self.root(head.fragment, head.version)
        if known not in (b"", head.root):
            raise LocalProtocolError(
                f"two roots for version {head.version} of fragment {head.fragment}"
            )
        self.roots[head.fragment][head.version] = head.root


for _record in RECORDS.values():
    attrs.resolve_types(_record)  # type: ignore[type-var]  # attrs classes all, their base is not
