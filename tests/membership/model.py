"""A run in miniature: the real master, model peers that do as the protocol says, and a witness.

State is a hash: a version's root is the hash of the version before it and the committed digest, so
two peers agree exactly if they went through the same history. Every message sits in a queue until
the test delivers it; connections, processes, trainers and the master die when the test says so, the
master also between a record and the messages after it.

A reduction's chunks are modelled, too: a chunk is made once, by its owner, of those contributors that
have sent it and are not shut out there, and whoever can reach the owner takes it from there. The
digest is that of all chunks' sets, so honest peers that end with unlike sets report unlike digests.
Links between peers live as long as both processes; who is cut off from the master still gives and
takes.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from attrs import Factory, define

from holdfast.membership.master.coordinator import Coordinator, Grant
from holdfast.membership.master.rounds.round import RoundPhase
from holdfast.membership.master.state.journal import (
    TERMS_SKIPPED,
    JournalRecord,
    PeerRevoked,
    RunCreated,
    RunFounded,
    RunHistory,
    TermStarted,
)
from holdfast.membership.master.state.master_effects import (
    AnnounceEvent,
    DropPeer,
    Effect,
    RecordDurably,
    SendMessage,
)
from holdfast.membership.master.status.invariants import check_invariants
from holdfast.membership.spec.spec import RunSpec
from holdfast.protocol.messages import (
    NO_DIGEST,
    VERSION_MAX,
    VERSION_MIN,
    Abort,
    Applied,
    Commit,
    ContributorRun,
    Diagnose,
    Diagnosis,
    Donate,
    Flush,
    FragmentHead,
    FragmentSize,
    Heartbeat,
    Held,
    Hello,
    Leaving,
    MadeDigest,
    Message,
    ModelLayout,
    NotReady,
    Open,
    Ready,
    Reduce,
    Reduced,
    ReduceFailed,
    Release,
    Repair,
    Role,
    SupplyWeights,
    Synced,
    SyncFailed,
    SyncFragment,
    TensorSpec,
    WeightsSupplied,
    Welcome,
)
from tests.membership.table import LINEAGE, RUN_ID
from tests.membership.witness import Witness, hashed
from tests.plain import describe

DEADLINE_S = 10.0
SIZE = FragmentSize(5 * 4_096, 0, 1)  # six chunks


def layout_of(fragments: int) -> ModelLayout:
    """Return the layout of a model with this number of fragments of this size."""
    values = TensorSpec("values", (fragments, SIZE.value_count), "float32", "buffer")
    return ModelLayout((values, TensorSpec("counters", (fragments,), "int64", "counter")))


CALM_ROUNDS = 120  # steps of half a second in which a run without faults must get on


Made = tuple[int, int]  # a chunk's result: the attempt that made it, and who is in it, as bits


@define
class Reducing:
    """A reduction at a peer."""

    order: Reduce
    attempt: int  # the order's, or the last repair's
    owners: list[str]  # by chunk
    since: list[int]  # by chunk: the attempt that made the owner so
    makers: list[str]  # by chunk: who adds up; another than the owner if that only spreads
    spread_to: dict[int, bytes] = Factory(dict)  # by chunk that is only spread: to whom
    shut: set[str] = Factory(set)
    chunks: dict[int, Made] = Factory(dict)  # results that are here
    lost: bool = False  # it has told the master of a loss and waits for a repair

    def bits(self) -> bytes:
        held = sum(1 << chunk for chunk in self.chunks)
        return held.to_bytes((len(self.owners) + 7) // 8, "little")

    def digest(self) -> bytes:
        sets = [self.chunks[chunk] for chunk in range(len(self.owners))]
        return hashed(self.order.round, self.order.attempt, sets)

    def manifest(self) -> tuple[ContributorRun, ...]:
        count = len(self.order.contributors)
        sets = [present for _made, present in self.chunks.values()]
        if all(present == (1 << count) - 1 for present in sets):
            return ()
        size = (count + 7) // 8
        return tuple(
            ContributorRun(self.chunks[chunk][1].to_bytes(size, "little"), 1)
            for chunk in range(len(self.owners))
        )


@define
class ModelPeer:
    """One peer; ``state`` holds (version, root) by fragment, None where it holds nothing."""

    peer: str
    grant: Grant
    incarnation: int = 1
    connected: bool = False
    frozen: bool = False
    trainer: bool = True
    leaving: bool = False
    corrupt: set[int] = Factory(set)  # fragments that were damaged and not healed yet
    lineage: bytes = b""
    branch: int = 0
    state: list[tuple[int, bytes] | None] = Factory(list)
    fragment_count: int = 1
    inbox: deque[Message] = Factory(deque)
    message_queue: deque[Message] = Factory(deque)
    opens: dict[int, Open] = Factory(dict)  # not answered yet
    orders: dict[int, Reduce] = Factory(dict)  # not finished yet
    reducing: dict[int, Reducing] = Factory(dict)  # finished ones, too, until the round is over
    lied: set[int] = Factory(set)  # rounds that it reported a wrong digest for
    results: dict[int, tuple[int, bytes]] = Factory(dict)  # by round: attempt, digest
    pending: dict[int, Commit] = Factory(dict)  # by round: decided, not applied
    fetching: dict[int, SyncFragment] = Factory(dict)
    pins: dict[tuple[int, int, str], bytes] = Factory(dict)

    # ------------------------------------------------------------ its connection

    def hello(self) -> Hello:
        heads = [
            FragmentHead(fragment, *held)
            for fragment, held in enumerate(self.state)
            if held is not None
        ]
        undecided = [
            Reduced(number, attempt, digest)
            for number, (attempt, digest) in sorted(self.results.items())
            if number not in self.pending
        ]
        undecided += [
            Reduced(number, running.attempt, NO_DIGEST)
            for number, running in sorted(self.reducing.items())
            if number in self.orders and number not in self.pending
        ]
        return Hello(
            version_min=VERSION_MIN,
            version_max=VERSION_MAX,
            run_id=RUN_ID,
            name=self.peer[0],
            addresses=(),
            incarnation=self.incarnation,
            layout=layout_of(self.fragment_count) if self.trainer else None,
            heads=tuple(heads),
            lineage=self.lineage,
            undecided=tuple(undecided),
        )

    def disconnect(self) -> None:
        self.connected = self.leaving = False
        self.inbox.clear()
        self.message_queue.clear()

    def restart(self, *, keep_state: bool) -> None:
        self.disconnect()
        self.incarnation += 1
        self.frozen = False
        for memory in (self.opens, self.orders, self.results, self.pending, self.pins):
            memory.clear()
        self.reducing.clear()
        if any(fragment in self.fetching for fragment in range(len(self.state))) or not keep_state:
            self.state, self.lineage = [], b""
        self.fetching.clear()

    # ------------------------------------------------------------ what it hears

    def handle(self, message: Message) -> None:
        match message:
            case Welcome():
                self._welcome(message)
            case SupplyWeights():
                if self.trainer and not self.lineage:
                    self.message_queue.append(founded_by(self))
            case Open():
                self._open(message)
            case Reduce():
                self._reduce(message)
            case Flush():
                self._flush(message)
            case Diagnose():
                self._diagnose(message)
            case Repair():
                self._repair(message)
            case Commit():
                self.pending[message.round] = message
                self.advance(message.fragment)
            case Abort():
                for memory in (self.opens, self.orders, self.results, self.reducing):
                    memory.pop(message.round, None)
            case SyncFragment():
                self._sync(message)
            case Donate():
                self._donate(message)
            case Release() if message.receiver == self.peer:  # the rounds have outrun its copy
                order = self.fetching.get(message.fragment)
                if order is not None and order.head.version == message.version:
                    del self.fetching[message.fragment]
            case Release():
                self.pins.pop((message.fragment, message.version, message.receiver), None)

    def _welcome(self, message: Welcome) -> None:
        told = {commit.round for commit in message.committed}
        if message.branch != self.branch:
            self.branch = message.branch
            self.pending.clear()
        self.opens.clear()
        going_on = set(message.going_on)
        for memory in (self.orders, self.reducing):
            for number in set(memory) - going_on:
                del memory[number]
        self.fetching.clear()
        self.results = {
            number: result
            for number, result in self.results.items()
            if number in told or number in self.pending or number in going_on
        }
        for number in sorted(going_on):
            running = self.reducing.get(number)
            if running is not None:
                running.lost = False  # it says again what it has said
            if number in self.results:
                attempt, digest = self.results[number]
                manifest = () if running is None else running.manifest()
                self.message_queue.append(Reduced(number, attempt, digest, manifest))
        if message.lineage != self.lineage:
            self.lineage, self.state = message.lineage, []
            self.results, self.pending = {}, {}
        if message.lineage and not self.state:
            self.state = [None] * len(message.heads)
        for commit in message.committed:
            self.handle(commit)

    def _open(self, message: Open) -> None:
        held = self.state[message.fragment]
        if held is None or held[0] not in (message.version, message.version - 1):
            self.message_queue.append(NotReady(message.round, "the fragment is not in sync here"))
        else:
            self.opens[message.round] = message

    def _reduce(self, message: Reduce) -> None:
        number = message.round
        for memory in (self.opens, self.results, self.reducing):
            memory.pop(number, None)
        if self.peer in message.receivers:
            owners = [run.peer for run in message.plan.owners for _ in range(run.chunk_count)]
            since = [message.attempt] * len(owners)
            self.orders[number] = message
            self.reducing[number] = Reducing(
                message, message.attempt, owners, since, makers=list(owners)
            )

    def _flush(self, message: Flush) -> None:
        running = self.reducing.get(message.round)
        if running is not None:
            running.shut.update(message.lost)
            self.message_queue.append(Held(message.round, message.attempt, running.bits()))

    def _diagnose(self, message: Diagnose) -> None:
        """Report what the peer lacks, and the digests of its reported result, right or wrong."""
        number, running = message.round, self.reducing.get(message.round)
        if running is None or running.attempt != message.attempt:
            self.message_queue.append(Diagnosis(number, message.attempt))
            return
        lacking = {o for at, o in enumerate(running.owners) if at not in running.chunks}
        unmade = {o for at, o in enumerate(running.makers) if at not in running.chunks}
        made = [
            MadeDigest(maker, hashed(self._made_by(maker, running), number in self.lied))
            for maker in sorted(set(running.makers) - unmade)
        ]
        results = tuple(sorted(lacking - {self.peer}))
        self.message_queue.append(Diagnosis(number, message.attempt, (), results, tuple(made)))

    @staticmethod
    def _made_by(maker: str, running: Reducing) -> list[Made]:
        return [running.chunks[at] for at, each in enumerate(running.makers) if each == maker]

    def _repair(self, message: Repair) -> None:
        number, running = message.round, self.reducing.get(message.round)
        if running is None or number in self.pending:
            return
        running.shut.update(message.lost)
        running.attempt, running.lost = message.attempt, False
        for a in message.assignments:
            for chunk in range(a.first_chunk, a.first_chunk + a.chunk_count):
                if a.from_scratch and chunk in running.chunks:
                    adding = [contributor.peer for contributor in running.order.contributors]
                    assert self.peer not in adding, "told to make anew what a survivor holds"
                    self.give_up(number, (), "it holds another result")
                    return
                running.owners[chunk], running.since[chunk] = a.owner, message.attempt
                if a.from_scratch:
                    running.makers[chunk] = a.owner
                    running.spread_to.pop(chunk, None)
                else:
                    running.spread_to[chunk] = a.lacking
        if number in self.results:
            digest = self.results[number][1]
            self.results[number] = (message.attempt, digest)
            self.message_queue.append(Reduced(number, message.attempt, digest, running.manifest()))

    def give_up(
        self, number: int, accused: tuple[str, ...], reason: str, bad: bool = False
    ) -> None:
        """End the reduction at this peer."""
        attempt = self.reducing[number].attempt
        for memory in (self.orders, self.results, self.reducing):
            memory.pop(number, None)
        self.message_queue.append(ReduceFailed(number, attempt, accused, bad, reason))

    def _sync(self, message: SyncFragment) -> None:
        fragment, head = message.head.fragment, message.head
        held = self.state[fragment]
        newer = held is not None and held[0] > head.version and not message.replaces_newer
        if held is not None and (newer or held == (head.version, head.root)):
            self.message_queue.append(Synced(FragmentHead(fragment, *held), 0))
            return
        self.fetching[fragment] = message
        self.state[fragment] = None

    def _donate(self, message: Donate) -> None:
        held = self.state[message.head.fragment]
        version = message.head.version
        assert held is not None, "asked to donate what it does not hold"
        # A version that it has not made yet is pinned as soon as it is: the commit came before.
        assert held[0] in (version, version - 1), f"to pin {version}, it is at {held[0]}"
        root = held[1] if held[0] == version else b""
        self.pins[message.head.fragment, version, message.receiver] = root

    # ------------------------------------------------------------ what it does

    def advance(self, fragment: int) -> None:
        """Apply committed results in order of versions, as far as they have arrived."""
        for number in sorted(self.pending):
            commit = self.pending[number]
            held = self.state[commit.fragment]
            if commit.fragment != fragment or fragment in self.fetching or held is None:
                continue
            if commit.version < held[0]:
                del self.pending[number]
                self.results.pop(number, None)
                continue
            result = self.results.get(number)
            if commit.version == held[0] and result and result[1] == commit.digest:
                del self.pending[number], self.results[number]
                self.reducing.pop(number, None)
                head = FragmentHead(fragment, held[0] + 1, hashed(held[1], commit.digest))
                self.state[fragment] = (head.version, head.root)
                for pinned, version, receiver in self.pins:
                    if (pinned, version) == (fragment, head.version):
                        self.pins[pinned, version, receiver] = head.root
                self.message_queue.append(Applied(number, head))
            elif number not in self.orders:
                del self.pending[number]
                self.results.pop(number, None)
                self.message_queue.append(
                    ReduceFailed(number, commit.attempt, (), False, "not here")
                )

    def train(self, number: int, weight: int = 10, norm: float = 1.0) -> None:
        """Answer an open round."""
        message = self.opens[number]
        held = self.state[message.fragment]
        if held is not None and held[0] == message.version - 1:
            return  # the commit that leads to it is still to be applied
        del self.opens[number]
        if held is None or held[0] != message.version or not self.trainer:
            self.message_queue.append(NotReady(number, "no trainer is attached"))
        else:
            self.message_queue.append(Ready(number, weight, norm, held[1], message.at_step))

    def reduce(self, number: int, others: Mapping[str, ModelPeer], *, wrong: bool = False) -> None:
        """Proceed as far as the other peers allow, and report a result, right or wrong."""
        running, order = self.reducing[number], self.orders[number]
        missing = {
            running.owners[chunk]
            for chunk in range(len(running.owners))
            if not self._obtain(number, chunk, others)
        }
        if missing:
            self._tell_loss(number, missing, others)
            return
        del self.orders[number]
        if wrong:
            self.lied.add(number)
        digest = hashed("wrong", self.peer, number) if wrong else running.digest()
        self.results[number] = (running.attempt, digest)
        if number in self.pending:
            self.advance(order.fragment)
        else:
            self.message_queue.append(Reduced(number, running.attempt, digest, running.manifest()))

    def _tell_loss(self, number: int, missing: set[str], others: Mapping[str, ModelPeer]) -> None:
        """Accuse the needed members that cannot be reached, once per attempt."""
        running = self.reducing[number]
        needed = missing - {self.peer}
        if self.peer in missing:
            needed |= {c.peer for c in running.order.contributors}
        gone = {p for p in needed - running.shut if not others[p].takes_part(running.order)}
        if gone and not running.lost:
            running.lost = True
            accused = tuple(sorted(gone))
            self.message_queue.append(ReduceFailed(number, running.attempt, accused, False, "lost"))

    def takes_part(self, order: Reduce) -> bool:
        """Return whether this process has the reduction, or may still receive its order."""
        running = self.reducing.get(order.round)
        if running is not None:
            return running.order.attempt == order.attempt
        return order in self.inbox

    def _obtain(self, number: int, chunk: int, others: Mapping[str, ModelPeer]) -> bool:
        """Get the chunk's result: add it up, or take it from its owner."""
        running = self.reducing[number]
        if chunk in running.chunks:
            return True
        name = running.owners[chunk]
        if name == self.peer:
            return self._make(number, chunk, others)
        owner = others[name]
        there = owner.reducing.get(number)
        if (
            there is None
            or owner.frozen
            or there.order.attempt != running.order.attempt
            or there.since[chunk] != running.since[chunk]
            or name in running.shut
            or self.peer in there.shut
        ):
            return False
        if chunk in there.spread_to:
            at = running.order.receivers.index(self.peer)
            lacking = there.spread_to[chunk]
            assert lacking[at // 8] >> at % 8 & 1, "nobody sends what we were said to have"
        elif not owner._make(number, chunk, others):
            return False
        running.chunks[chunk] = there.chunks[chunk]
        return True

    def _make(self, number: int, chunk: int, others: Mapping[str, ModelPeer]) -> bool:
        """Add up a chunk as its owner, if all contributions that can still come are there."""
        running = self.reducing[number]
        if chunk in running.chunks:
            return True
        if running.makers[chunk] != self.peer:
            return False
        present = 0
        for at, contributor in enumerate(running.order.contributors):
            if contributor.peer in running.shut:
                continue
            there = others[contributor.peer].reducing.get(number)
            if (
                there is None
                or others[contributor.peer].frozen
                or there.order.attempt != running.order.attempt
                or there.since[chunk] != running.since[chunk]
                or self.peer in there.shut
            ):
                return False
            present |= 1 << at
        running.chunks[chunk] = (running.since[chunk], present)
        return True

    def fetch(self, fragment: int, donors: Sequence[ModelPeer]) -> None:
        """Finish a transfer if a donor has the version pinned, give up if none will."""
        head = self.fetching[fragment].head
        pinned = [donor.pins.get((fragment, head.version, self.peer)) for donor in donors]
        if head.root in pinned:
            del self.fetching[fragment]
            self.state[fragment] = (head.version, head.root)
            self.corrupt.discard(fragment)
            self.advance(fragment)
            held = self.state[fragment]
            assert held is not None
            self.message_queue.append(Synced(FragmentHead(fragment, *held), 1))
        elif not any(donor.connected and donor.inbox for donor in donors):
            del self.fetching[fragment]
            bad = [d.peer for d, root in zip(donors, pinned, strict=True) if root]
            self.message_queue.append(
                SyncFailed(fragment, head.version, tuple(bad), "no donor has it")
            )


def founded_by(peer: ModelPeer) -> WeightsSupplied:
    """Make version 0 the peer's state."""
    heads = tuple(
        FragmentHead(fragment, 0, hashed("founded", peer.peer, fragment))
        for fragment in range(peer.fragment_count)
    )
    peer.lineage = LINEAGE
    peer.state = [(head.version, head.root) for head in heads]
    return WeightsSupplied(layout_of(len(heads)), (SIZE,) * len(heads), heads, LINEAGE)


class MasterDiedError(Exception):
    """Ends a call whose effects were carried out only in part."""


class World:
    """The whole run; each method is something that can happen."""

    def __init__(self, toml: str, fragments: int, grants: Sequence[Grant]) -> None:
        text = f"[diloco]\nfragments = {fragments}\nsync_every = 10\n{toml}"
        self.spec = RunSpec.parse(text)
        self.journal: list[JournalRecord] = [RunCreated(RUN_ID, text)]
        self.term = 1
        self.now_s = 50.0
        self.crash_after: int | None = None  # effects that are still carried out
        self.witness = Witness()
        self.peers = [ModelPeer(f"{i + 10:x}" * 32, grant) for i, grant in enumerate(grants)]
        for peer in self.peers:
            peer.fragment_count = fragments
        self.by_id = {peer.peer: peer for peer in self.peers}
        self.revoked: set[str] = set()
        self.heard_s: dict[str, float] = {}
        self.master = self._new_master()

    def _new_master(self) -> Coordinator:
        return Coordinator.restore(self.spec, RUN_ID, self.journal, self.term)

    # ------------------------------------------------------------ the master

    def call(self, function: Callable[..., list[Effect]], *arguments: object) -> None:
        """Call the master, carry out the effects, and check everything."""
        try:
            self._carry_out(function(*arguments, self.now_s))
        except MasterDiedError:
            self.restart_master()
            return
        check_invariants(self.master)
        self._check_waiting()

    def _carry_out(self, effects: list[Effect]) -> None:
        for effect in effects:
            if self.crash_after is not None:
                if self.crash_after == 0:
                    raise MasterDiedError
                self.crash_after -= 1
            match effect:
                case RecordDurably(record=record):
                    self.journal.append(record)
                    self.witness.recorded(record, self)
                    if isinstance(record, PeerRevoked):
                        self.revoked.add(record.peer)
                case SendMessage(peer=name, message=message):
                    self.witness.sent(name, message, self.now_s)
                    if self.by_id[name].connected:
                        self.by_id[name].inbox.append(message)
                case AnnounceEvent(event=event) if " was aborted: " in event.text:
                    self.witness.aborted(int(event.text.split()[1]))  # perhaps nobody is told
                case DropPeer(peer=name, previous=False):
                    self.by_id[name].disconnect()
                    self.witness.gone(name)

    def _check_waiting(self) -> None:
        """Check that no peer waits for a dead one longer than the deadline and its consequences."""
        limit_s = 1.2 * DEADLINE_S
        for round_ in self.master.scheduler.rounds.values():
            if round_.phase is RoundPhase.REDUCING:
                key = (round_.number, round_.running().number)
                assert key in self.witness.moved_s, "an attempt that nobody was told of"
                assert self.now_s <= self.witness.moved_s[key] + limit_s, "an attempt hangs"

    def cut_journal(self, count: int) -> None:
        """Kill the master; its journal loses its last records."""
        founded = next(
            (i for i, r in enumerate(self.journal) if isinstance(r, RunFounded)), len(self.journal)
        )
        del self.journal[max(founded + 1, len(self.journal) - count) :]
        history = RunHistory.replay(self.journal)
        self.revoked = set(history.revoked)
        self.witness.journal_cut(history)
        self.term += TERMS_SKIPPED
        self.journal.append(TermStarted(self.term, b"", True))
        self.restart_master()

    def restart_master(self) -> None:
        self.crash_after = None
        for peer in self.peers:
            peer.disconnect()
        self.witness.master_died()
        self.term += 1
        self.now_s += 500.0
        self.master = self._new_master()

    # ------------------------------------------------------------ peers

    def attach(self, peer: ModelPeer) -> None:
        """Connect, or connect again over a connection that the master believes in."""
        if peer.frozen:
            return
        peer.disconnect()
        peer.connected = True
        self.witness.gone(peer.peer)
        hello = peer.hello()
        self.witness.undecided[peer.peer] = hello.undecided
        self.call(self.master.attach, peer.peer, hello, peer.grant)

    def detach(self, peer: ModelPeer) -> None:
        if peer.connected:
            peer.disconnect()
            self.witness.gone(peer.peer)
            self.call(self.master.detach, peer.peer, "the connection broke")

    def restart_peer(self, peer: ModelPeer, *, keep_state: bool) -> None:
        was_connected = peer.connected
        peer.restart(keep_state=keep_state)
        self.witness.gone(peer.peer)
        if was_connected:
            self.call(self.master.detach, peer.peer, "its process ended")

    def flush(self, peer: ModelPeer, count: int = 1_000) -> None:
        """Deliver the peer's messages to the master."""
        while peer.message_queue and count and peer.connected and not peer.frozen:
            message = peer.message_queue.popleft()
            count -= 1
            if peer.peer in self.master.context.roster:
                self.witness.delivered(peer.peer, message, self.now_s)
            self.call(self.master.receive, peer.peer, message)

    def deliver(self, peer: ModelPeer, count: int = 1_000) -> None:
        while peer.inbox and count and peer.connected and not peer.frozen:
            peer.handle(peer.inbox.popleft())
            count -= 1

    def work(self, peer: ModelPeer) -> None:
        """Do everything that a healthy peer has to do now."""
        if not peer.connected or peer.frozen:
            return
        self.deliver(peer)
        for fragment in list(peer.fetching):
            donors = [self.by_id[name] for name in peer.fetching[fragment].donors]
            peer.fetch(fragment, donors)
        for number in list(peer.opens):
            peer.train(number)
        for number in list(peer.orders):
            peer.reduce(number, self.by_id)
        self.flush(peer)

    def wait(self, seconds: float) -> None:
        """Let time pass; live peers send heartbeats, the others are silent."""
        end_s = self.now_s + seconds
        while self.now_s < end_s:
            self.now_s = min(end_s, self.master.next_deadline_s(), self.now_s + DEADLINE_S / 2)
            term = self.term
            for peer in self.peers:
                if peer.connected and not peer.frozen:
                    self.call(self.master.receive, peer.peer, Heartbeat(0))
            self.call(self.master.tick)
            if self.term != term:
                return
            assert self.master.next_deadline_s() > self.now_s, "tick has left something undone"
            self._check_silence()

    def _check_silence(self) -> None:
        """Check by the test's own clock that no silent peer is still a member."""
        for peer in self.peers:
            if peer.connected and not peer.frozen:
                self.heard_s[peer.peer] = self.now_s
        for member in self.master.context.roster:
            heard_s = max(self.heard_s.get(member.peer, -math.inf), member.attached_s)
            assert self.now_s <= heard_s + 1.6 * DEADLINE_S, "a silent peer is still a member"

    # ------------------------------------------------------------ what must come to pass

    def can_get_on(self) -> bool:
        """Return whether the peers that may attach can continue the run at all."""
        history = self.master.context.history
        able = [peer for peer in self.peers if peer.peer not in self.revoked]
        contributors = [peer for peer in able if peer.grant.role is Role.CONTRIBUTOR]
        if history.finished or len(contributors) < self.spec.membership.min_members:
            return False
        if not history.founded:
            return any(peer.grant.founder for peer in able)
        return all(
            any(self._holds_newest(peer, fragment) for peer in able)
            for fragment in range(len(history.versions))
        )

    def _holds_newest(self, peer: ModelPeer, fragment: int) -> bool:
        history = self.master.context.history
        if fragment >= len(peer.state) or peer.lineage != history.lineage:
            return False
        if fragment in peer.corrupt:
            return False
        held = peer.state[fragment]
        known = history.root(fragment, history.versions[fragment])
        return (
            held is not None and held[0] == history.versions[fragment] and known in (b"", held[1])
        )

    def calm_down(self) -> None:
        """End all faults: all peers return, and the run must go on."""
        self.crash_after = None
        for peer in self.peers:
            peer.frozen, peer.trainer = False, True
        if self.master.context.history.paused:
            self.call(self.master.resume)
        if not self.can_get_on():
            return
        # One restart brings everybody in line with what the master knows of trainers and leaving.
        for peer in self.peers:
            if peer.connected:
                self.detach(peer)
        before = self.master.context.history.commit_count
        for _ in range(CALM_ROUNDS):
            for peer in self.peers:
                if not peer.connected and peer.peer not in self.revoked:
                    self.attach(peer)
                self.work(peer)
            history = self.master.context.history
            if history.finished or (history.commit_count >= before + 2 and self._all_in_sync()):
                return
            self.wait(0.5)
        status = describe(self.master, self.now_s)
        raise AssertionError(
            f"the run does not get on: {status['state']}, {status['why_waiting']}, "
            f"{[(m['name'], m['why']) for m in status['members']]}, {status['past_rounds'][-1:]}"
        )

    def _all_in_sync(self) -> bool:
        """Return whether all are members, and as many in sync as there is room for."""
        members = list(self.master.context.roster)
        allowed = [peer for peer in self.peers if peer.peer not in self.revoked]
        limits = self.spec.membership
        contributors = sum(peer.grant.role is Role.CONTRIBUTOR for peer in allowed)
        placed = min(contributors, limits.contributors or contributors)
        spares = len(allowed) - placed
        room = placed + (spares if limits.spares < 0 else min(spares, limits.spares))
        return len(members) == len(allowed) and sum(m.in_sync for m in members) >= room


def leaving() -> Leaving:
    return Leaving("Ctrl+C")
