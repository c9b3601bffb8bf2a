"""A whole run in one process and in virtual time, with fault injection. The same seed gives the
same run.

Swarm
 ├── MasterService   production code; its journal is in memory and survives crashes
 ├── PeerService ... production code, each on a virtual host of a ``MemoryWorld``
 │    └── SimTrainer a drifting numpy vector that follows the hook's protocol
 └── Witness         checks every root, contribution and commit
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path

import trio

from ..checkpoint.checkpoint_store import FolderStore
from ..daemon.master.journal.journal_base import GrantRow, JournalAwayError
from ..daemon.peer.peer_config import PeerConfig
from ..daemon.process.tasks import only_error
from ..membership.master.coordinator import Coordinator
from ..membership.master.state.journal import RunCreated, TermStarted
from ..membership.master.state.master_effects import Effect
from ..membership.spec.spec import TOPK_CODECS, RunSpec
from ..protocol.addresses import Address
from ..protocol.errors import EvictedError, UserError
from ..protocol.messages import ModelLayout, Role
from ..protocol.trust.authority import Party
from .drifting_trainer import RESTART_S, Delta, SimTrainer, small_layout
from .frozen_hosts import FrozenHosts, on_host
from .hosted_trainer import HostedTrainer
from .invariants import check_invariants
from .lying_peers import Corrupts
from .memory_network import MemoryWorld
from .scenario import MASTER, SPARE
from .witness import ViolationError, Witness
from .witnessed_services import (
    SimPeer,
    WitnessedMaster,
    WitnessedPeer,
    WitnessedStore,
    check_honesty,
    keeps_state,
    promoted,
)

RUN_ID = "5" * 32
MASTER_ID = "f" * 32
MASTER_ADDRESS = Address(MASTER, 29700)
DEAD_SLACK_S = 2.0  # beyond the deadline: delays of messages in flight, and a heartbeat


class Swarm:
    """A run of one master and some peers, and the methods that inject faults.

    Args:
      spec_toml: the text of ``run.toml``.
      seed: seed of all random choices.
      slowness: by peer name, the factor on its step time.
      strict: check the invariants after every decision of the master; not beside a hostile peer.
      disks: folder for the machines' checkpoints, which survive crashes; None: no checkpoints.
      disk_turn_s: duration of one turn of writing a checkpoint.
      samples: of the trainers' data set; 0: they have none.
      hosted: names of peers of two hosts, each with a further one called NAME+.
      host_harm_s: mean time between two faults of a further host.
    """

    def __init__(
        self,
        nursery: trio.Nursery,
        spec_toml: str,
        *,
        seed: int = 0,
        layout: ModelLayout | None = None,
        step_s: float = 0.05,
        slowness: Mapping[str, float] | None = None,
        delay_s: float = 0.01,
        jitter_s: float = 0.0,
        delta: Delta | None = None,
        bytes_per_s: float = 1e9,
        apply_s: float = 0.0,
        strict: bool = False,
        disks: Path | None = None,
        disk_turn_s: float = 0.0,
        samples: int = 0,
        hosted: Collection[str] = (),
        host_harm_s: float = math.inf,
    ) -> None:
        self.nursery = nursery
        self.spec = RunSpec.parse(spec_toml)
        self.seed = seed
        self.rng = random.Random(seed)
        self.world = MemoryWorld(
            self.rng, delay_s=delay_s, jitter_s=jitter_s, bytes_per_s=bytes_per_s
        )
        fragments = range(self.spec.diloco.fragments)
        codecs = {codec for each in fragments for codec in self.spec.reduce.codecs(each)}
        self.witness = Witness(
            coarse=codecs != {"fp32"},
            # With these codecs only a small part of a contribution arrives.
            knows_contributions=codecs.isdisjoint(TOPK_CODECS),
        )
        self.store = WitnessedStore(self.witness)
        self.store.append(RunCreated(RUN_ID, spec_toml))
        self.layout = layout or small_layout()
        self.step_s = step_s
        self.slowness = slowness or {}
        self.apply_s = apply_s
        self.delta = delta
        self.peers: dict[str, SimPeer] = {}
        self.left: set[str] = set()  # names of peers that were asked to leave permanently
        self.liars: dict[str, Corrupts] = {}  # by name; set before the peer is added
        self.hosted, self.host_harm_s = frozenset(hosted), host_harm_s
        self.twins: dict[str, SimPeer] = {}  # by the name of the peer whose identity they share
        self.newest_gone = False  # who alone held the newest state has left: the run may rewind
        self.standstill = FrozenHosts()
        self.at_peace = False
        self.restore_lines: list[Callable[[], None]] = []  # the changed ones, oldest first
        self.strict = strict
        self.disks = disks
        self.disk_turn_s = disk_turn_s
        self.samples = samples
        self.master_clock_ahead_s = 0.0
        self.master: WitnessedMaster | None = None
        self.master_hosts: tuple[str, ...] = (MASTER,)
        self.master_addresses = [MASTER_ADDRESS]
        self._master_scope = trio.CancelScope()
        self._term = 0
        # In ``_decisive_s`` time: the start of the master's uninterrupted attention, and, by
        # incarnation, the start of a peer's silence.
        self._attentive_s = 0.0
        self._mute: dict[tuple[str, int], float] = {}
        self._past_waited_s = 0.0  # of masters that crashed
        self._kicked: set[str] = set()
        self._changed = trio.lowlevel.ParkingLot()

    # ------------------------------------------------------------ the master

    async def start_master(self) -> None:
        """Start the master, or start it again from its journal."""
        self.store.append(TermStarted(self._term + 1, self.rng.randbytes(16)))
        self._term += 1
        lot = f"{self.seed} {self._term}".encode()
        coordinator = Coordinator.restore(self.spec, RUN_ID, self.store.records(), self._term, lot)
        network = self.world.host(MASTER, MASTER_ID, Party.MASTER)
        self.master = WitnessedMaster(
            coordinator,
            self.store,
            network,
            [MASTER_ADDRESS],
            clock=lambda: trio.current_time() + self.master_clock_ahead_s,
        )
        self.master.witness, self.master.watch = self.witness, self._watch
        self._master_scope = trio.CancelScope()
        self._attentive_s = self._decisive_s()
        with on_host(MASTER):
            await self.nursery.start(self._run_master, self.master, self._master_scope)

    async def _run_master(
        self,
        master: WitnessedMaster,
        scope: trio.CancelScope,
        *,
        task_status: trio.TaskStatus[object] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        try:
            with scope:
                await master.run(task_status=task_status)
        except BaseExceptionGroup as group:
            error = only_error(group)
            if not isinstance(error, UserError):
                raise
            await self._master_ended(error)

    async def _master_ended(self, _error: UserError) -> None:
        """Restart a master that ended by itself, as a service manager would."""
        self.crash_master()
        await trio.sleep(RESTART_S)
        await self.return_master(MASTER)

    async def return_master(self, _host: str) -> None:
        """Start a master again that has crashed, unless it runs already."""
        while self.master is None:
            try:
                await self.start_master()
            except JournalAwayError:  # the disk is full
                await trio.sleep(RESTART_S)

    @property
    def coordinator(self) -> Coordinator:
        assert self.master is not None
        return self.master.coordinator

    def master_runs(self, _host: str) -> bool:
        return self.master is not None

    @property
    def leading(self) -> str | None:
        """The host of the master that leads the run."""
        return MASTER if self.master is not None else None

    def crash_master(self, _host: str = MASTER) -> None:
        self.go_on(MASTER)
        self.world.crash(MASTER)
        self._master_scope.cancel()
        self._past_waited_s += self.master.waited_s if self.master is not None else 0.0
        self.master = None

    def _decisive_s(self) -> float:
        """Time in which decisions were not waiting for a disk."""
        waited_s = self.master.waited_s if self.master is not None else 0.0
        return trio.current_time() - self._past_waited_s - waited_s

    def leap(self, seconds: float, wall_seconds: float) -> None:
        """Let the clocks of the master's machine jump."""
        self.master_clock_ahead_s += seconds
        self.store.wall_clock_ahead_s += wall_seconds
        self._attentive_s = self._decisive_s()

    def _watch(self, effects: list[Effect]) -> None:
        """Check the invariants after a decision of the master."""
        self.notify()
        if not self.strict:
            return
        assert self.master is not None
        coordinator = self.master.coordinator
        if not self.master.sessions.crowded:  # a larger crowd's decisions are batched
            check_invariants(coordinator)
        liars = [self.peers[name].peer for name in self.liars]
        check_honesty(effects, coordinator.scheduler.driver.audits, liars)
        for peer in promoted(effects):
            for sim in self.peers.values():
                if sim.peer == peer and sim.alive and sim.name not in self.twins:
                    self._check_promoted(sim)
        long_ago_s = self._decisive_s() - self.spec.membership.deadline_s - DEAD_SLACK_S
        for member in coordinator.context.roster:
            mute_s = self._mute.get((member.peer, member.incarnation))
            if mute_s is not None and max(mute_s, self._attentive_s) < long_ago_s:
                raise ViolationError(
                    f"{member.name} is silent since {mute_s:.2f}, but still a member"
                )

    def _check_promoted(self, sim: SimPeer) -> None:
        context = self.coordinator.context
        member = context.roster.get(sim.peer)
        if member is None or member.incarnation != sim.service.config.incarnation:
            return  # the master means an earlier life, and does not know of its death yet
        if not context.history.founded:
            return
        if not keeps_state(sim, self.witness, self.master):
            raise ViolationError(f"{sim.name} got a place without holding the state")

    # ------------------------------------------------------------ peers

    def add_peer(
        self,
        name: str,
        *,
        role: Role = Role.CONTRIBUTOR,
        founder: bool = True,
    ) -> SimPeer:
        """Start a new machine that has redeemed an invite."""
        peer = f"{len(self.peers) + 1:08x}" + f"{self.rng.getrandbits(96):024x}"
        self.store.admit(peer, GrantRow(role, founder, name))
        self.peers[name] = sim = self._boot(name, peer, 1)
        return sim

    def add_first(self, name: str) -> None:
        self.add_peer(name, role=Role.SPARE if name == SPARE else Role.CONTRIBUTOR)

    def _boot(self, name: str, peer: str, lives: int, disk: Path | None = None) -> SimPeer:
        sim = self._machine(name, peer, lives, disk)
        with on_host(name):
            self.nursery.start_soon(self._run_peer, sim)
        return sim

    def _machine(self, name: str, peer: str, lives: int, disk: Path | None) -> SimPeer:
        network = self.world.host(name, peer, Party.PEER)
        kind: Callable[..., SimTrainer] = SimTrainer
        if name in self.hosted:
            kind = partial(HostedTrainer, swarm=self, network=network)
        trainer = kind(
            peer,
            self.layout,
            self.witness,
            step_s=self.step_s * self.slowness.get(name, 1.0),
            delta=self.delta,
            samples=self.samples,
        )
        config = PeerConfig(
            me=peer,
            name=name,
            run_id=RUN_ID,
            masters=self.master_addresses,
            bind=[Address(name, 29701)],
            incarnation=self.rng.getrandbits(60),
            patience_s=None,
        )
        disk = disk or (None if self.disks is None else self.disks / name)
        place = None if disk is None else FolderStore(disk)
        make = self.liars[name].service if name in self.liars else WitnessedPeer
        service = make(config, network, trainer, checkpoints=place)
        service.witness, service.apply_s = self.witness, self.apply_s
        service.changed = self.notify
        trainer.tell_failed = service.training.failed_with
        service.checkpointer.turn_s = self.disk_turn_s
        if place is not None:
            service.state_service.restore(place)
        return SimPeer(name, peer, network, trainer, service, lives=lives)

    async def _run_peer(self, sim: SimPeer) -> None:
        with sim.scope:
            try:
                await sim.service.run()
            except EvictedError as error:
                sim.ended = error
            except BaseExceptionGroup as group:
                if not isinstance(only := only_error(group), UserError):
                    raise
                sim.ended = only  # a process prints it and exits
            if sim.alive:
                self._note_gone(sim)
                self._bury(sim)  # the process ended: its connections close

    def _note_gone(self, sim: SimPeer) -> None:
        """Note whether the newest state is gone with a process that leaves or is a twin's.

        A crash that would destroy it is not carried out, but what is committed until a peer has
        left nobody knows when it is asked to.
        """
        alone = not self.survives_without(sim.name)
        self.newest_gone |= alone and keeps_state(sim, self.witness, self.master)

    def _bury(self, sim: SimPeer) -> None:
        sim.alive = False
        self._mute[sim.peer, sim.service.config.incarnation] = self._decisive_s()
        self.world.crash(sim.name)
        self.notify()

    def crash(self, name: str) -> None:
        """Cut a machine's power."""
        self._kill(self.peers[name])

    def _kill(self, sim: SimPeer) -> None:
        if sim.alive:
            self.go_on(sim.name)
            self._bury(sim)
            sim.scope.cancel()

    def keep(self, name: str, folder: Path) -> None:
        """Write the checkpoint that a daemon leaves on its disk when it exits gracefully."""
        checkpointer = self.peers[name].service.checkpointer
        checkpointer.place = FolderStore(folder)
        last = checkpointer.last()
        for _piece in () if last is None else last[1]:
            pass

    def restart(self, name: str, *, disk: Path | None = None) -> SimPeer:
        """Start a machine again, with its identity and without its memory.

        Args:
          disk: folder with its checkpoints.
        """
        old = self.peers[name]
        self.peers[name] = sim = self._boot(name, old.peer, old.lives + 1, disk)
        return sim

    def add_twin(self, name: str) -> None:
        self.twins[name] = self._boot(f"{name}-twin", self.peers[name].peer, 1)

    def end_twin(self, name: str) -> None:
        twin = self.twins.pop(name, None)
        if twin is not None:
            self._note_gone(twin)
            self._kill(twin)

    def leave(self, name: str) -> None:
        self.left.add(name)
        with on_host(name):
            self.nursery.start_soon(self.peers[name].service.leave, "enough")

    def kick(self, name: str) -> None:
        self.left.add(name)
        self._kicked.add(self.peers[name].peer)
        self._kick_again()

    def _kick_again(self) -> None:
        """Repeat removals that are not on the master's disk: no operator saw them confirmed."""
        for peer in sorted(self._kicked - set(self.coordinator.context.history.members.revoked)):
            self.decide(partial(self.coordinator.kick, peer, "because"))

    # ------------------------------------------------------------ faults that last

    def stop(self, name: str, *, asleep: bool) -> None:
        """Stop a host's processes, and with ``asleep`` its network too."""
        self.standstill.stop(name)
        if name in self.peers:
            sim = self.peers[name]
            self._mute[sim.peer, sim.service.config.incarnation] = self._decisive_s()
        if asleep and self.world.is_alive(name):
            self.world.freeze(name)

    def go_on(self, name: str) -> None:
        if self.standstill.stopped(name):
            if self.world.is_alive(name):
                self.world.thaw(name)
            self.standstill.go_on(name)
            if name in self.peers:
                sim = self.peers[name]
                self._mute.pop((sim.peer, sim.service.config.incarnation), None)
            if name == MASTER:
                self._attentive_s = self._decisive_s()

    async def end_faults(self) -> None:
        """End all lasting faults; of the dead only the master is restarted."""
        self.at_peace = True
        for name in list(self.twins):
            self.end_twin(name)
        for name in [*sorted(self.peers), *self.master_hosts]:
            self.go_on(name)
        self.heal_all()
        for restore in reversed(self.restore_lines):
            restore()
        self.restore_lines.clear()
        self.store.full, self.store.slow_s = False, 0.0
        if self.master is None:
            await self.start_master()
        self._kick_again()

    def decide(self, decision: Callable[[float], list[Effect]]) -> None:
        """Let the master decide, as at the command of its operator."""
        assert self.master is not None
        self.master.decide(decision)

    def pause(self) -> None:
        self.decide(self.coordinator.pause)

    def resume(self) -> None:
        if self.master is not None and not self.standstill.stopped(MASTER):
            self.master.decide(self.coordinator.resume)

    def heal_all(self) -> None:
        names = [*sorted(self.peers), *self.master_hosts]
        for index, one in enumerate(names):
            for other in names[index + 1 :]:
                self.world.heal(one, other)

    # ------------------------------------------------------------ waiting and checking

    async def until(self, condition: Callable[[], bool], *, within_s: float = 600.0) -> None:
        """Poll in virtual time until a condition holds.

        Raises:
          trio.TooSlowError: it does not hold in time.
        """
        with trio.fail_after(within_s):
            while not condition():
                await trio.sleep(0.01)

    def notify(self) -> None:
        self._changed.unpark_all()

    async def when(self, condition: Callable[[], object], *, within_s: float) -> None:
        """Wait as ``until``, for what changes only with a decision or effect of a daemon."""
        with trio.fail_after(within_s):
            while not condition():
                await self._changed.park()

    async def commit(self, count: int = 1, *, within_s: float = 600.0) -> None:
        """Wait for more commits."""
        target = self.committed + count
        await self.when(lambda: self.committed >= target, within_s=within_s)

    @property
    def committed(self) -> int:
        return len(self.witness.commits)

    def in_sync(self, name: str) -> bool:
        """Return whether a peer holds every committed version."""
        sim = self.peers[name]
        held = {head.fragment: head.version for head in sim.service.replica.heads()}
        return (
            sim.alive
            and bool(held)
            and held
            == {f: self.witness.versions.get(f, 0) for f in range(self.spec.diloco.fragments)}
        )

    def survives_without(self, name: str) -> bool:
        """Return whether another peer holds the committed state, which is only in memory."""
        return any(
            keeps_state(self.peers[other], self.witness, self.master)
            for other in self.peers
            if other != name and other not in self.left
        )

    def role(self, name: str) -> Role:
        return self.peers[name].service.replica.trainer.role

    async def come_to_rest(self, names: Sequence[str], *, within_s: float = 60.0) -> None:
        """Pause the run, then wait until no round is in flight and the named peers are in sync."""
        self.pause()
        await self.when(self._rests, within_s=within_s)
        await self.when(lambda: all(self.in_sync(name) for name in names), within_s=within_s)

    def _rests(self) -> bool:
        """Return whether no round is in flight, whoever leads the run by now."""
        return self.master is not None and not self.coordinator.scheduler.rounds

    def check_final(self, names: Sequence[str]) -> None:
        """Check that the named peers hold the same bits at the committed versions."""
        for name in names:
            state = self.peers[name].service.state
            if state is None:
                raise ViolationError(f"{name} holds no state")
            for head in state.heads():
                self.witness.saw_root(self.peers[name].peer, head)
                if head.version != self.witness.versions.get(head.fragment, 0):
                    raise ViolationError(f"{name} is at version {head.version}")
