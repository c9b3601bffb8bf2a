"""A whole run in one process and in virtual time: production master and peers, trainers of a few
numbers, faults from a seed. The same seed gives the same history.

    Swarm
     ├── MasterService   production; its journal in memory, which survives its crashes
     ├── PeerService ... production, each on a virtual host of a ``MemoryWorld``
     │    └── SimTrainer a numpy vector that drifts; obeys the hook's protocol
     └── Witness         sees every root, every contribution, every commit, and objects
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import trio
from attrs import define, field

from ...membership.coordinator import Coordinator
from ...membership.journal import JournalRecord, RunCreated, TermStarted
from ...membership.replica import Deed, TellMaster
from ...membership.spec import RunSpec
from ...protocol.addresses import Address
from ...protocol.errors import EvictedError, HoldfastError
from ...protocol.memory import MemoryNetwork, MemoryWorld
from ...protocol.messages import (
    Applied,
    Commit,
    Layout,
    Role,
    Synced,
)
from ...protocol.network import Party
from ..master import MasterService
from ..parts import PeerConfig
from ..peer import PeerService
from ..store import GrantRow, Store
from .trainer import Delta, SimTrainer, small_layout
from .witness import ViolationError, Witness

RUN_ID = "5" * 32
MASTER_ID = "f" * 32
MASTER_ADDRESS = Address("master", 29700)


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
