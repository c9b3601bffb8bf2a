"""A whole run in one process and in virtual time: production master and peers, trainers of a few
numbers, faults from a seed. The same seed gives the same history.

    Swarm
     ├── MasterService   production; its journal in memory, which survives its crashes
     ├── PeerService ... production, each on a virtual host of a ``MemoryWorld``
     │    └── SimTrainer a numpy vector that drifts; obeys the hook's protocol
     └── Witness         sees every root, every contribution, every commit, and objects

What the witness checks, after every event that can break it:

    parity      all members have the same root at the same fragment and version
    history     versions are committed one after the other, each once
    divisor     a committed mean is that of exactly the contributors its record names
    promotion   a promoted spare was in sync: it moved no state
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import numpy as np
import trio
from attrs import define, field
from blake3 import blake3
from numpy.typing import NDArray

from ..membership.coordinator import Coordinator
from ..membership.journal import JournalRecord, RoundCommitted, RunCreated, TermStarted
from ..membership.replica import Deed, TellMaster
from ..membership.spec import RunSpec
from ..protocol.addresses import Address
from ..protocol.arena import LOSS_SLOT, STEP_SLOT, TOKENS_SLOT, Arena, arena_bytes
from ..protocol.errors import EvictedError, HoldfastError
from ..protocol.memory import MemoryNetwork, MemoryWorld
from ..protocol.messages import (
    Applied,
    ArenaOpened,
    Commit,
    Contributor,
    ContributorRun,
    Finished,
    FragmentHead,
    FragmentSize,
    InitialPosted,
    Layout,
    Load,
    Message,
    Posted,
    PostInitial,
    Rejected,
    Role,
    RoundEnded,
    RoundOpened,
    SetContributing,
    Synced,
    TensorSpec,
)
from ..protocol.network import Party
from .master import MasterService
from .parts import PeerConfig
from .peer import PeerService
from .store import GrantRow, Store
from .trainer_port import TrainerEvents

RUN_ID = "5" * 32
MASTER_ID = "f" * 32
MASTER_ADDRESS = Address("master", 29700)
RESTART_S = 1.0
CONTRIBUTIONS_KEPT_MAX = 4_096  # of (round, peer); older ones cannot be committed any more

Delta = Callable[[str, int, int], NDArray[np.float32]]  # (peer, round, count) -> pseudo-gradient


class ViolationError(AssertionError):
    """The run broke a promise."""


def small_layout(counts: Sequence[int] = (5, 3), counters: int = 1) -> Layout:
    """A layout of some vectors and counters."""
    tensors = [
        TensorSpec(f"layer{i}.weight", (count,), "float32", "parameter")
        for i, count in enumerate(counts)
    ]
    if counters:
        tensors.append(TensorSpec("steps", (counters,), "int64", "counter"))
    return Layout(tuple(tensors))


@define
class Witness:
    """Sees what happens at every peer and at the journal; raises ViolationError."""

    roots: dict[tuple[int, int], tuple[bytes, str]] = field(factory=dict)
    commits: list[Commit] = field(factory=list)
    versions: dict[int, int] = field(factory=dict)
    contributions: dict[tuple[int, str], NDArray[np.float32]] = field(factory=dict)
    events: int = 0
    trace: blake3 = field(factory=blake3)
    coarse: bool = False  # a lossy codec is in use: means are right to a few steps of int8

    excused: set[str] = field(factory=set)  # peers whose copy a test has damaged

    def note(self, *what: object) -> None:
        self.events += 1
        self.trace.update(repr((round(trio.current_time(), 6), *what)).encode())

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

    def saw_contribution(self, peer: str, round_id: int, values: NDArray[np.float32]) -> None:
        self.contributions[(round_id, peer)] = values.copy()
        while len(self.contributions) > CONTRIBUTIONS_KEPT_MAX:
            del self.contributions[next(iter(self.contributions))]

    def saw_mean(
        self, peer: str, commit: Commit, mean: NDArray[np.float32], chunk_elements: int
    ) -> None:
        """The divisor is the weight that went in, and what went in is what the record names.

        Chunk by chunk: after a repair they have different contributors.
        """
        self.note("mean", peer, commit.round)
        everybody = b"\xff" * (len(commit.contributors) // 8 + 1)
        start = 0
        for run in commit.manifest or (ContributorRun(everybody, len(mean) // chunk_elements + 1),):
            end = min(len(mean), start + run.chunk_count * chunk_elements)
            bits = int.from_bytes(run.contributors, "little")
            present = [c for at, c in enumerate(commit.contributors) if bits >> at & 1]
            self._check_part(peer, commit, present, slice(start, end), mean[start:end])
            start = end
        if start < len(mean):
            raise ViolationError(f"round {commit.round}: the manifest ends at {start}")

    def _check_part(
        self,
        peer: str,
        commit: Commit,
        present: Sequence[Contributor],
        part: slice,
        mean: NDArray[np.float32],
    ) -> None:
        posted = [
            self.contributions[commit.round, c.peer][part].astype(np.float64) for c in present
        ]
        total = sum(c.weight for c in present)
        expected = np.zeros(mean.shape, np.float64)
        for contributor, values in zip(present, posted, strict=True):
            expected += values * (contributor.weight / total * contributor.scale)
        largest = max((float(np.max(np.abs(values), initial=0.0)) for values in posted), default=0)
        if not np.allclose(mean, expected, rtol=1e-5, atol=largest / 50 if self.coarse else 1e-6):
            names = [c.peer[:8] for c in present]
            raise ViolationError(
                f"round {commit.round} at {peer[:8]}: the mean of {part} is not that of {names}"
            )


class SimTrainer:
    """A ``TrainerPort`` without a process: its parameters drift by a seeded amount per step."""

    def __init__(
        self, peer: str, layout: Layout, witness: Witness, *, step_s: float, delta: Delta | None
    ) -> None:
        self.peer = peer
        self.layout = layout
        self.witness = witness
        self.step_s = step_s
        self.delta = delta
        self.finished = False
        self.poison: Callable[[int], float] | None = None  # round -> value put into its delta
        self.tokens_per_step = 64
        self._rng = np.random.default_rng(int(peer[:8], 16))
        self._send, self._receive = trio.open_memory_channel[Message](1_000)
        self._events: TrainerEvents | None = None
        self._life = trio.CancelScope()
        self._shared: Arena | None = None
        self._posted: Arena | None = None

    # ------------------------------------------------------------ TrainerPort

    async def run(self, events: TrainerEvents) -> None:
        self._events = events
        while not self.finished:
            self._send, self._receive = trio.open_memory_channel[Message](1_000)
            with trio.CancelScope() as self._life:
                events.trainer_came(self.layout)
                await self._train()
            if not self.finished:
                events.trainer_went("crashed")
                await trio.sleep(RESTART_S)
        await trio.sleep_forever()

    def crash(self) -> None:
        self._life.cancel()

    def open_arenas(self, sizes: Sequence[FragmentSize]) -> tuple[Arena, Arena]:
        self._shared = Arena(bytearray(arena_bytes(sizes)), sizes)
        self._posted = Arena(bytearray(arena_bytes(sizes)), sizes)
        return self._shared, self._posted

    def tell(self, message: Message) -> None:
        try:
            self._send.send_nowait(message)
        except (trio.WouldBlock, trio.BrokenResourceError):
            self._life.cancel()

    # ------------------------------------------------------------ the loop of a training script

    async def _train(self) -> None:
        self._step = self._tokens = self._tokens_base = 0
        self._hold, self._contributing, self._loaded = 0, True, False
        self._open: dict[int, RoundOpened] = {}
        self._in_flight: set[int] = set()
        while not self.finished:
            await self._boundary()
            if self.finished:
                return
            await trio.sleep(self.step_s)
            self._step += 1
            self._tokens += self.tokens_per_step
            assert self._posted is not None
            self._posted.slots[STEP_SLOT] = self._step
            self._posted.slots[TOKENS_SLOT] = self._tokens
            self._posted.slots[LOSS_SLOT] = np.float64(1.0 / (1 + self._step)).view(np.uint64)

    async def _boundary(self) -> None:
        while not self.finished:
            try:
                self._handle(self._receive.receive_nowait())
                continue
            except trio.WouldBlock:
                pass
            self._post_due()
            waiting = (
                not self._loaded
                or not self._contributing
                or bool(self._in_flight)
                or self._step >= self._hold
            )
            if not waiting:
                return
            self._handle(await self._receive.receive())

    def _post_due(self) -> None:
        if not (self._loaded and self._contributing) or self._in_flight:
            return
        for opened in list(self._open.values()):
            if opened.at_step > self._step:
                continue
            assert self._posted is not None
            assert self._events is not None
            values = self._posted.values(opened.fragment)
            if self.delta is not None:
                values[:] = self.delta(self.peer, opened.round, len(values))
            else:
                values[:] = self._rng.standard_normal(len(values)).astype(np.float32)
            if self.poison is not None:
                values[:1] += np.float32(self.poison(opened.round))
            self._posted.counters(opened.fragment)[:] = self._step
            self.witness.saw_contribution(self.peer, opened.round, values)
            self._in_flight.add(opened.round)
            del self._open[opened.round]
            tokens = self._tokens - self._tokens_base
            self._events.trainer_said(
                Posted(opened.round, opened.fragment, opened.version, tokens, self._step)
            )

    def _handle(self, message: Message) -> None:
        match message:
            case PostInitial():
                assert self._posted is not None
                assert self._events is not None
                for fragment in range(len(self._posted.sizes)):
                    values = self._posted.values(fragment)
                    values[:] = np.arange(len(values), dtype=np.float32)
                    self._posted.counters(fragment)[:] = 0
                self._events.trainer_said(InitialPosted())
            case Load():
                self._loaded, self.finished = True, message.finished
                self._step = message.step
                self._hold = message.hold_step
                self._in_flight.clear()
            case SetContributing():
                self._contributing = message.contributing
            case RoundOpened():
                self._open[message.round] = message
                self._hold = message.hold_step
            case RoundEnded():
                self._open.pop(message.round, None)
                self._in_flight.discard(message.round)
                self._hold = message.hold_step
                if message.committed:
                    self._step = max(self._step, message.step)
                    if message.contributed:
                        self._tokens_base = self._tokens
            case Finished():
                self.finished = True
            case Rejected():
                self._life.cancel()
            case ArenaOpened():
                pass


class WitnessedStore(Store):
    """A journal in memory that the witness reads along."""

    def __init__(self, witness: Witness) -> None:
        super().__init__(":memory:", now=lambda: 0.0)
        self._witness = witness

    def append(self, record: JournalRecord) -> None:
        self._witness.saw_record(record)
        super().append(record)


class WitnessedPeer(PeerService):
    """A peer whose every applied and fetched version the witness sees."""

    witness: Witness
    apply_s: float = 0.0  # how long an outer step takes; virtual time sees no computing

    def _perform(self, todo: list[Deed]) -> None:
        for deed in todo:
            if isinstance(deed, TellMaster) and isinstance(deed.message, Applied | Synced):
                self.witness.saw_root(self.config.me, deed.message.head)
        super()._perform(todo)

    async def _apply(self, commit: Commit) -> None:
        result, order = self.reducer.result(commit.round), self.replica.rounds[commit.round].order
        assert order is not None
        if result.manifest != commit.manifest:
            raise ViolationError(f"round {commit.round}: {self.config.me[:8]} has another manifest")
        self.witness.saw_mean(self.config.me, commit, result.values, order.plan.chunk_elements)
        await trio.sleep(self.apply_s)
        await super()._apply(commit)


@define(eq=False)
class SimPeer:
    """One virtual machine: survives its daemon's deaths, as a machine does."""

    name: str
    peer: str
    network: MemoryNetwork
    trainer: SimTrainer
    service: WitnessedPeer
    scope: trio.CancelScope = field(factory=trio.CancelScope)
    alive: bool = True
    ended: HoldfastError | None = None
    lives: int = 1


class Swarm:
    """A run: one master, some peers, and the means to hurt them.

    Args:
      spec_toml: the run's ``run.toml``.
      seed: of everything random.
    """

    def __init__(
        self,
        nursery: trio.Nursery,
        spec_toml: str,
        *,
        seed: int = 0,
        layout: Layout | None = None,
        step_s: float = 0.05,
        delay_s: float = 0.01,
        jitter_s: float = 0.0,
        delta: Delta | None = None,
        bytes_per_s: float = 1e9,
        apply_s: float = 0.0,
    ) -> None:
        self.nursery = nursery
        self.spec = RunSpec.parse(spec_toml)
        self.rng = random.Random(seed)
        self.world = MemoryWorld(
            self.rng, delay_s=delay_s, jitter_s=jitter_s, bytes_per_s=bytes_per_s
        )
        codecs = {self.spec.reduce.codec_up, self.spec.reduce.codec_down}
        self.witness = Witness(coarse=codecs != {"fp32"})
        self.store = WitnessedStore(self.witness)
        self.store.append(RunCreated(RUN_ID, spec_toml))
        self.layout = layout or small_layout()
        self.step_s = step_s
        self.apply_s = apply_s
        self.delta = delta
        self.peers: dict[str, SimPeer] = {}
        self.left: set[str] = set()  # names of those that were asked to leave for good
        self.master: MasterService | None = None
        self._master_scope = trio.CancelScope()
        self._term = 0

    # ------------------------------------------------------------ the master

    async def start_master(self) -> None:
        """Start the master, or start it again from its journal."""
        self._term += 1
        self.store.append(TermStarted(self._term))
        coordinator = Coordinator.restore(self.spec, RUN_ID, self.store.records(), self._term)
        network = self.world.host("master", MASTER_ID, Party.MASTER)
        self.master = MasterService(coordinator, self.store, network, [MASTER_ADDRESS])
        self._master_scope = trio.CancelScope()
        await self.nursery.start(self._run_master, self.master, self._master_scope)

    async def _run_master(
        self,
        master: MasterService,
        scope: trio.CancelScope,
        *,
        task_status: trio.TaskStatus[object] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        with scope:
            await master.run(task_status=task_status)

    def crash_master(self) -> None:
        self.world.crash("master")
        self._master_scope.cancel()
        self.master = None

    # ------------------------------------------------------------ peers

    def add_peer(
        self,
        name: str,
        *,
        role: Role = Role.CONTRIBUTOR,
        founder: bool = True,
        site: str = "",
    ) -> SimPeer:
        """A new machine that has redeemed an invite."""
        peer = f"{len(self.peers) + 1:08x}" + f"{self.rng.getrandbits(96):024x}"
        self.store.admit(peer, GrantRow(role, founder, name))
        self.peers[name] = sim = self._boot(name, peer, 1, site)
        return sim

    def _boot(self, name: str, peer: str, lives: int, site: str) -> SimPeer:
        network = self.world.host(name, peer, Party.PEER)
        trainer = SimTrainer(peer, self.layout, self.witness, step_s=self.step_s, delta=self.delta)
        config = PeerConfig(
            me=peer,
            name=name,
            run_id=RUN_ID,
            masters=[MASTER_ADDRESS],
            bind=[Address(name, 29701)],
            incarnation=self.rng.getrandbits(60),
            patience_s=None,
            site=site,
        )
        service = WitnessedPeer(config, network, trainer)
        service.witness, service.apply_s = self.witness, self.apply_s
        sim = SimPeer(name, peer, network, trainer, service, lives=lives)
        self.nursery.start_soon(self._run_peer, sim)
        return sim

    async def _run_peer(self, sim: SimPeer) -> None:
        with sim.scope:
            try:
                await sim.service.run()
            except EvictedError as error:
                sim.ended = error
            if sim.alive:
                sim.alive = False
                self.world.crash(sim.name)  # the process ended: its connections close

    def crash(self, name: str) -> None:
        """The machine loses its power."""
        sim = self.peers[name]
        if sim.alive:
            sim.alive = False
            self.world.crash(name)
            sim.scope.cancel()

    def restart(self, name: str) -> SimPeer:
        """The machine comes back, with its identity and without its memory."""
        old = self.peers[name]
        self.peers[name] = sim = self._boot(name, old.peer, old.lives + 1, old.service.config.site)
        return sim

    def heal_all(self) -> None:
        names = [*sorted(self.peers), "master"]
        for index, one in enumerate(names):
            for other in names[index + 1 :]:
                self.world.heal(one, other)

    # ------------------------------------------------------------ waiting and checking

    def story(self) -> str:
        """Where everybody stands, for the report of a failing seed."""
        lines = [f"at {trio.current_time():.2f} s, {self.committed} committed"]
        if self.master is not None:
            status = self.master.coordinator.status(trio.current_time())
            lines.append(f"{status['state']}: {status['why_waiting']}")
            lines += [f"{m['name']} {m['role']}: {m['why']}" for m in status["members"]]
            lines += [f"{e['at_s']:.2f} {e['text']}" for e in status["events"][-12:]]
        for name, sim in sorted(self.peers.items()):
            replica = sim.service.replica
            held = [(f.version, f.fetching is not None) for f in replica.fragments]
            rounds = [(r.round, r.phase.value, r.attempt) for r in replica.rounds.values()]
            lines.append(
                f"{name} {'alive' if sim.alive else 'dead'} {replica.role.value} {held} {rounds}"
                f" {sim.ended or ''}"
            )
        return "\n  ".join(lines)

    async def until(self, condition: Callable[[], bool], *, within_s: float = 600.0) -> None:
        """Wait in virtual time until something is so; raises trio.TooSlowError."""
        with trio.fail_after(within_s):
            while not condition():
                await trio.sleep(0.01)

    @property
    def committed(self) -> int:
        return len(self.witness.commits)

    def in_sync(self, name: str) -> bool:
        """This peer holds every committed version."""
        sim = self.peers[name]
        held = {head.fragment: head.version for head in sim.service.replica.heads()}
        return (
            sim.alive
            and bool(held)
            and held
            == {f: self.witness.versions.get(f, 0) for f in range(self.spec.diloco.fragments)}
        )

    def survives_without(self, name: str) -> bool:
        """Whether anybody else holds the committed state: memory is all there is yet."""
        return any(
            self.in_sync(other) and other not in self.left for other in self.peers if other != name
        )

    def role(self, name: str) -> Role:
        return self.peers[name].service.replica.role

    async def come_to_rest(self, names: Sequence[str], *, within_s: float = 60.0) -> None:
        """Pause the run, then wait until no round is in flight and these hold all of it."""
        assert self.master is not None
        coordinator = self.master.coordinator
        self.master.decide(coordinator.pause)
        await self.until(lambda: not coordinator.conductor.rounds, within_s=within_s)
        await self.until(lambda: all(self.in_sync(name) for name in names), within_s=within_s)

    def check_final(self, names: Sequence[str]) -> None:
        """Every one of these holds the same bits at the committed versions."""
        for name in names:
            state = self.peers[name].service.state
            if state is None:
                raise ViolationError(f"{name} holds no state")
            for head in state.heads():
                self.witness.saw_root(self.peers[name].peer, head)
                if head.version != self.witness.versions.get(head.fragment, 0):
                    raise ViolationError(f"{name} is at version {head.version}")
