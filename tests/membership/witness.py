"""A witness: checks every effect of the master and every message that reaches it.

It keeps its own books from what it sees; it looks into the master only where a rule is about what
the master knows (how many members there are, who has voted).
"""

from __future__ import annotations

import hashlib
from collections import Counter
from typing import TYPE_CHECKING

import attrs

from holdfast.membership.manifest import is_everywhere
from holdfast.membership.master.rounds.accusations import ACCUSERS_MIN
from holdfast.membership.master.state.journal import (
    JournalRecord,
    PlaceTaken,
    RootKnown,
    RoundCommitted,
    RoundNumbered,
    RoundOrdered,
    RunFounded,
    RunHistory,
    RunRewound,
    VersionAdopted,
)
from holdfast.protocol.messages import (
    Commit,
    Donate,
    Flush,
    FragmentHead,
    Held,
    Message,
    Open,
    Ready,
    Reduce,
    Reduced,
    ReduceFailed,
    Release,
    Repair,
    Synced,
    SyncFailed,
    SyncFragment,
    View,
    Welcome,
)

if TYPE_CHECKING:
    from tests.membership.model import ModelPeer, World


def hashed(*parts: object) -> bytes:
    return hashlib.blake2b(repr(parts).encode(), digest_size=32).digest()


class Witness:
    """Checks every effect and every delivered message; raises an error for a broken promise."""

    def __init__(self) -> None:
        self.orders: dict[tuple[int, int], Reduce] = {}  # by round and attempt
        self.sessions: dict[tuple[int, int], set[str]] = {}  # contributors that have stayed since
        self.reported: dict[tuple[int, int], dict[str, bytes]] = {}
        self.failed: dict[tuple[int, int], set[str]] = {}
        self.bad: dict[int, dict[str, set[str]]] = {}  # by round: whose update who called bad
        self.weights: dict[tuple[int, str], int] = {}  # by round and peer, as delivered
        self.numbers: list[int] = []
        self.committed: dict[int, Commit] = {}
        self.versions: dict[int, int] = {}
        self.roots: dict[tuple[int, int], bytes] = {}
        self.view = 0
        self.pinned: set[tuple[str, FragmentHead, str]] = set()  # donor, head, receiver
        self.moved_s: dict[tuple[int, int], float] = {}  # when an attempt last got on
        self.running: dict[int, Reduce] = {}  # by fragment: the reduction that runs
        self.receiving: set[tuple[int, int, str]] = set()  # round, attempt, who gets its result
        self.flushed: dict[tuple[int, int], dict[str, bytes]] = {}  # who said what they hold
        self.owners: dict[int, list[str]] = {}  # by round: who owns which chunk now
        self.journaled: dict[int, Reduce] = {}  # by round: what the journal knows of it
        self.repairs: set[tuple[int, int]] = set()
        self.undecided: dict[str, tuple[Reduced, ...]] = {}  # as the peer's last Hello said
        self.true: set[tuple[int, int, bytes]] = set()  # every version that the run ever had
        self.truth: dict[int, bytes] = {}  # by fragment: the root that honest arithmetic gives

    def gone(self, peer: str) -> None:
        """Note that the master knows that this connection has ended."""
        for peers in self.sessions.values():
            peers.discard(peer)
        for answers in (*self.reported.values(), *self.flushed.values()):
            answers.pop(peer, None)
        for number, who in list(self.weights):
            if who == peer:
                del self.weights[number, who]
        self.pinned = {entry for entry in self.pinned if peer not in (entry[0], entry[2])}
        self.receiving = {entry for entry in self.receiving if entry[2] != peer}

    def master_died(self) -> None:
        self.orders.clear()
        self.sessions.clear()
        self.weights.clear()
        self.pinned.clear()
        self.moved_s.clear()
        self.running.clear()
        # Repairs since the order die with it: the next master counts on from the order's attempt.
        self.flushed.clear()
        self.repairs.clear()
        self.bad.clear()
        self.receiving.clear()

    def journal_cut(self, history: RunHistory) -> None:
        """Note the loss of the journal's end: the rest is the run's state until more is known."""
        self.versions = dict(enumerate(history.versions))
        self.roots = {
            (fragment, version): root
            for fragment, roots in enumerate(history.roots)
            for version, root in roots.items()
        }
        self._back_to_the_truth()

    def _back_to_the_truth(self) -> None:
        """Note that the run is at other versions, whose right contents were seen before."""
        for fragment, version in self.versions.items():
            known = self.roots.get((fragment, version))
            seen = [root for f, v, root in self.true if (f, v) == (fragment, version)]
            assert known is None or known in seen, "the run goes on from what it never was"
            self.truth[fragment] = known or seen[-1]

    def _rewound(self, record: RunRewound, world: World) -> None:
        here = [peer for peer in world.peers if peer.connected]
        wanted = [(head.version, head.root) for head in record.heads]
        holders = [peer for peer in here if peer.state == wanted]
        assert holders, "nobody holds it"  # one is enough: whoever copies from it checks the roots
        assert len(here) >= world.spec.membership.min_members, "too few are here"
        newest = [(v, self.roots.get((f, v))) for f, v in sorted(self.versions.items())]
        assert not any(peer.state == newest for peer in here), "somebody holds the newest state"
        for head in record.heads:
            self.versions[head.fragment] = head.version
        for fragment, version in [k for k in self.roots if k[1] > self.versions[k[0]]]:
            del self.roots[fragment, version]
        self._back_to_the_truth()

    def aborted(self, number: int) -> None:
        self.running = {f: order for f, order in self.running.items() if order.round != number}

    def _adopted(self, head: FragmentHead, world: World) -> None:
        held = [(peer, peer.state[head.fragment]) for peer in world.peers if peer.state]
        claims: Counter[tuple[int, bytes] | None] = Counter(
            state
            for peer, state in held
            if peer.connected and state is not None and state[0] > self.versions[head.fragment]
        )
        electorate = world.master.succession.electorate
        # Of what only one member holds nobody can say whether it is as it was.
        all_differ = all(claims[state] < 2 for peer, state in held if peer.peer in electorate)
        known = (head.fragment, head.version, head.root) in self.true
        assert known or all_differ, "adopted what the run never was"
        self.true.add((head.fragment, head.version, head.root))
        for peer, state in held:
            if state == (head.version, head.root):
                peer.corrupt.discard(head.fragment)
        self.versions[head.fragment] = head.version
        self.roots[head.fragment, head.version] = head.root
        self.truth[head.fragment] = head.root

    def delivered(self, peer: str, message: Message, now_s: float) -> None:
        match message:
            case Ready():
                self.weights.setdefault((message.round, peer), message.weight)
            case Reduced():
                key = (message.round, message.attempt)
                if peer in self.sessions.get(key, set()):
                    self.reported[key][peer] = message.digest
                    self.failed[key].discard(peer)  # what it had lost was given to it
                    self.moved_s[key] = now_s
            case Held():
                key = (message.round, message.attempt)
                if key in self.flushed:
                    self.flushed[key][peer] = message.results
            case ReduceFailed():
                self._failed(peer, message)
            case Synced() | SyncFailed():
                self.pinned = {entry for entry in self.pinned if entry[2] != peer}

    def _failed(self, peer: str, message: ReduceFailed) -> None:
        key = (message.round, message.attempt)
        latest = max((k for k in self.orders if k[0] == message.round), default=None)
        if key != latest or peer not in self.sessions[key] or message.round in self.committed:
            return
        self.failed[key].add(peer)
        peers = [c.peer for c in self.orders[key].contributors]
        named = [p for p in message.accused if p in peers and p != peer]
        if message.bad and (len(peers) == 2 or 2 * len(named) <= len(peers) - 1):
            for accused in named:
                self.bad.setdefault(message.round, {}).setdefault(accused, set()).add(peer)

    def recorded(self, record: JournalRecord, world: World) -> None:
        match record:
            case RoundNumbered():
                assert record.round > max(self.numbers, default=0), "a round number was reused"
                self.numbers.append(record.round)
            case RoundOrdered():
                self.journaled[record.order.round] = record.order
            case RoundCommitted():
                self._commit(record.commit, world)
            case RootKnown():
                self._root(record.head)
                self._true_root(record.head, world)
            case RunFounded():
                assert not self.roots, "founded twice"
                for head in record.heads:
                    self._root(head)
                    self.truth[head.fragment] = head.root
                    self.true.add((head.fragment, head.version, head.root))
            case RunRewound():
                self._rewound(record, world)
            case VersionAdopted():
                self._adopted(record.head, world)
            case PlaceTaken():
                self._promoted(world.by_id[record.peer])

    def _root(self, head: FragmentHead) -> None:
        known = self.roots.setdefault((head.fragment, head.version), head.root)
        assert known == head.root, "a version has two roots"

    def _true_root(self, head: FragmentHead, world: World) -> None:
        """Check that one damaged peer alone does not decide the run's state."""
        if head.version != self.versions.get(head.fragment, 0):
            return
        if head.root == self.truth[head.fragment]:
            return
        votes = world.master.state_sync.votes.by_peer(head.fragment, head.version)
        assert len(votes) > 1 or len(world.master.scheduler.contributors()) < 2, "one decided alone"
        self.true.add((head.fragment, head.version, head.root))
        self.truth[head.fragment] = head.root  # from now on this is what the run goes by

    def _promoted(self, peer: ModelPeer) -> None:
        for fragment, held in enumerate(peer.state):
            version = self.versions.get(fragment, 0)
            if fragment not in peer.corrupt:
                assert held == (version, self.roots.get((fragment, version))), "not in sync"

    def _commit(self, commit: Commit, world: World) -> None:
        key = (commit.round, commit.attempt)
        assert commit.round not in self.committed, "one round, two commits"
        assert commit.version == self.versions.get(commit.fragment, 0), "not the next version"
        order = self.orders[key]
        assert commit.contributors == order.contributors, "other contributors than were reduced"
        assert key == max(k for k in self.orders if k[0] == commit.round), "an old attempt"
        stayed = self.sessions[key] - self.failed[key]
        reported = self.reported[key]
        assert stayed <= set(reported), "somebody who is alive has not reported"
        agreeing = [peer for peer in stayed if reported[peer] == commit.digest]
        assert 2 * len(agreeing) > len(stayed) or not stayed, "no majority"
        assert any(digest == commit.digest for digest in reported.values()), "nobody holds it"
        honest = {peer for peer in reported if commit.round not in world.by_id[peer].lied}
        assert len({reported[peer] for peer in honest}) <= 1, "honest peers hold unlike results"
        peers = [contributor.peer for contributor in commit.contributors]
        for peer in honest & stayed:
            assert is_everywhere(commit.manifest, peers.index(peer)), "a survivor was left out"
        first = self.orders[min(k for k in self.orders if k[0] == commit.round)]
        needed = world.master.scheduler.round_table.quorum(len(first.contributors))
        assert len(stayed) >= needed, "committed below the quorum"
        called = self.bad.get(commit.round, {})
        refused = {peer for peer, accusers in called.items() if len(accusers) >= ACCUSERS_MIN}
        assert not set(peers) & refused, "a refused update was added"
        self.committed[commit.round] = commit
        self.versions[commit.fragment] = commit.version + 1
        self.truth[commit.fragment] = hashed(self.truth[commit.fragment], commit.digest)
        self.true.add((commit.fragment, commit.version + 1, self.truth[commit.fragment]))
        del self.running[commit.fragment]

    def sent(self, peer: str, message: Message, now_s: float) -> None:
        match message:
            case Welcome():
                held = {(r.round, r.digest) for r in self.undecided.get(peer, ())}
                for commit in message.committed:
                    assert (commit.round, commit.digest) in held, "it holds another result"
                for number in message.going_on:
                    self._goes_on(number, peer, now_s)
            case View():
                self._view(message)
            case Open():
                assert message.round == self.numbers[-1], "opened before its number was journaled"
            case Commit():
                assert self.committed.get(message.round) == message, "sent before it was journaled"
            case Reduce():
                self._order(message, now_s)
            case Flush():
                latest = max(k for k in self.orders if k[0] == message.round)
                self.moved_s[latest] = now_s
                self.flushed.setdefault((message.round, message.attempt), {})
            case Repair():
                self._repair(message, now_s)
            case Donate():
                self.pinned.add((peer, message.head, message.receiver))
            case Release():
                self.pinned = {
                    entry
                    for entry in self.pinned
                    if (entry[0], entry[1].fragment, entry[1].version, entry[2])
                    != (peer, message.fragment, message.version, message.receiver)
                }
            case SyncFragment():
                order = self.running.get(message.head.fragment)
                if order is not None:
                    key = (order.round, order.attempt, peer)
                    assert key in self.receiving, "a transfer beside a reduction without it"
                for donor in message.donors:
                    assert (donor, message.head, peer) in self.pinned, "no pin before the transfer"

    def _view(self, message: View) -> None:
        assert message.number >= self.view, "view numbers go back"
        self.view = message.number

    def _order(self, message: Reduce, now_s: float) -> None:
        key = (message.round, message.attempt)
        if key in self.orders:
            assert self.orders[key] == message
            return
        assert message.view == self.view, "an order under a view that nobody has"
        for contributor in message.contributors:
            weight = self.weights.get((message.round, contributor.peer))
            assert weight == contributor.weight, "a weight that its owner did not report"
        self.orders[key] = message
        self.sessions[key] = {contributor.peer for contributor in message.contributors}
        self.reported[key], self.failed[key] = {}, set()
        self.moved_s[key] = now_s
        self.running[message.fragment] = message
        self.receiving.update((*key, receiver) for receiver in message.receivers)
        self.owners[message.round] = [
            run.peer for run in message.plan.owners for _ in range(run.chunk_count)
        ]

    def _goes_on(self, number: int, peer: str, now_s: float) -> None:
        """Note that a member of a reduction returns to it after the master's restart."""
        order = self.journaled[number]
        key = (number, order.attempt)
        under_way = {(r.round, r.attempt) for r in self.undecided[peer]}
        assert key in under_way, "it does not have that attempt"
        if key not in self.orders:
            self.orders[key], self.sessions[key] = order, set()
            self.reported[key], self.failed[key] = {}, set()
            self.running[order.fragment] = order
            self.owners[number] = [
                run.peer for run in order.plan.owners for _ in range(run.chunk_count)
            ]
        for each in order.contributors:
            self.weights[number, each.peer] = each.weight
            if each.peer == peer:
                self.sessions[key].add(peer)
        self.receiving.add((*key, peer))
        self.moved_s[key] = now_s

    def _repair(self, message: Repair, now_s: float) -> None:
        key = (message.round, message.attempt)
        if key in self.repairs:
            return
        self.repairs.add(key)
        before = max(k for k in self.orders if k[0] == message.round)
        assert message.attempt > before[1], "a repair under an old number"
        stayed = self.sessions[before] - set(message.lost)
        owners = self.owners[message.round]
        held = self.flushed.get(key)
        if held is None:  # all who stay have reported: only listeners are served
            assert stayed - self.failed[before] <= set(self.reported[before]), "no flush before"
        else:
            assert stayed <= set(held), "somebody has not shut out the lost yet"
            held = {peer: bits for peer, bits in held.items() if peer not in message.lost}
        given: set[int] = set()
        for a in message.assignments:
            assert a.owner in (stayed if a.from_scratch else {*stayed, *(held or ())}), (
                "no such heir"
            )
            for chunk in range(a.first_chunk, a.first_chunk + a.chunk_count):
                assert chunk not in given, "two owners for a chunk"
                assert owners[chunk] in message.lost, "a chunk was taken from a survivor"
                given.add(chunk)
                if held is not None:
                    having = {p for p in held if held[p][chunk // 8] >> chunk % 8 & 1}
                    assert a.from_scratch == (not having), (
                        "not what is held decides who makes a chunk"
                    )
                    assert a.from_scratch or a.owner in having, (
                        "it is to spread what it does not hold"
                    )
                owners[chunk] = a.owner
        assert not set(owners) & set(message.lost), "a chunk without a living owner"
        order = attrs.evolve(self.orders[before], attempt=message.attempt)
        self.orders[key], self.sessions[key] = order, set(stayed)
        self.reported[key] = {} if held is not None else dict(self.reported[before])
        self.failed[key] = set() if held is not None else set(self.failed[before])
        self.moved_s[key] = now_s
        self.running[order.fragment] = order
        self.receiving.update((*key, p) for *old, p in list(self.receiving) if (*old,) == before)
