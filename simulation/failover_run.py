"""A run of three masters on one database, which is led by one of them at a time, with faults of masters.

    host       m1, m2, m3   each in ``Leadership``: waits for the lease, leads, waits again
    database   in memory, with a lease and a fence; can be away, slow, or cut off from a host

Masters crash, are frozen and go on, lose the database or all members; members crash too, a few faults at a time.
The witness checks every record, version and term, so a second commit of a version is found as it is written.
After the faults the run must go on, with the same bits everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from random import Random

import trio
from attrs import define, evolve, field

from ..daemon.master.journal.lease import Lease
from ..daemon.master.leadership import Leader, Leadership
from ..membership.master.coordinator import Coordinator
from ..membership.master.state.journal import TermStarted
from ..membership.master.state.master_effects import Effect
from ..membership.master.status.invariants import check_invariants
from ..protocol.addresses import Address
from ..protocol.trust.authority import Party
from .drifting_trainer import small_layout
from .frozen_hosts import on_host
from .scenario import Scenario
from .scenario_run import RunOutcome, format_state, telling
from .simulated_database import DatabaseClient, LeasedJournal, SimulatedDatabase
from .swarm import RUN_ID, Swarm
from .virtual_time import run_virtually
from .witness import Tell, ViolationError
from .witnessed_services import WitnessedMaster

MASTERS = {"m1": "f" * 32, "m2": "e" * 32, "m3": "d" * 32}  # hosts and their identities
PORT = 29_700
LEASE_S = 1.0
PEERS = 3
FAULTS = (2, 3, 4, 5)
GAP_S = 1.5  # between the beginnings of two faults, on average
FAULT_S = (0.3, 6.0)  # how long one lasts
LASTING_SHARE = 0.5  # of the runs, in which the last fault does not end
BOOT_S = 0.5  # of a master's process
FOUND_S = 60.0
RECOVERY_S = 90.0  # after the last fault, until two more rounds
ROUNDS_AFTER = 2


@define
class _Life:
    """One life of a master's process."""

    host: str
    leadership: Leadership
    scope: trio.CancelScope = field(factory=trio.CancelScope)


class FailoverSwarm(Swarm):
    """A swarm whose masters share a database."""

    def prepare(self) -> None:
        """Make the database, with a run in it."""
        self.database = SimulatedDatabase(self.store)
        self.lives: dict[str, _Life] = {}
        self.life_count = 0
        self.master_addresses = [Address(host, PORT) for host in MASTERS]

    def boot(self, host: str) -> None:
        """Start a master's process."""
        self.life_count += 1
        client = DatabaseClient(self.database, host)
        leadership = Leadership(
            client,
            f"{host} life {self.life_count}",
            LEASE_S,
            call=client.call,
            clock=trio.current_time,
            addresses=[str(Address(host, PORT))],
        )
        self.lives[host] = life = _Life(host, leadership)
        with on_host(host):
            self.nursery.start_soon(self._live, life)

    async def _live(self, life: _Life) -> None:
        with life.scope:
            while True:
                lease = await life.leadership.take(lambda: None)
                self.witness.note("leads", life.host, lease.fence)
                await life.leadership.lead(lease, partial(self._begin, life, lease))

    async def _begin(self, life: _Life, lease: Lease) -> Leader:
        journal = LeasedJournal(self.database, life.host, lease)
        client = DatabaseClient(self.database, life.host)
        records = await client.call(journal.records)
        term = 1 + max((r.term for r in records if isinstance(r, TermStarted)), default=0)
        started = TermStarted(term, self.rng.randbytes(16))
        await client.call(lambda: journal.append(started))
        lot = f"{self.seed} {term}".encode()
        coordinator = Coordinator.restore(self.spec, RUN_ID, [*records, started], term, lot)
        network = self.world.host(life.host, MASTERS[life.host], Party.MASTER)
        master = WitnessedMaster(
            coordinator,
            journal,
            network,
            [Address(life.host, PORT)],
            may_decide=life.leadership.is_held,
        )

        def watch(effects: list[Effect]) -> None:
            if effects and not life.leadership.is_held():
                raise ViolationError(f"{life.host} decides though its lease is over")
            check_invariants(coordinator)
            self.notify()

        master.witness, master.watch = self.witness, watch
        self.master = master
        return _SimulatedLeader(master, partial(self.world.crash, life.host))

    def kill(self, host: str) -> None:
        """Cut a master's machine off its power."""
        life = self.lives.pop(host)
        self.go_on(host)
        if self.world.is_alive(host):  # it leads
            self.world.crash(host)
        life.scope.cancel()

    @property
    def leading(self) -> str | None:
        """The host of the master that holds the lease, by the database."""
        holder = self.database.holder
        return next(
            (host for host, life in self.lives.items() if life.leadership.holder == holder), None
        )


class _SimulatedLeader:
    def __init__(self, master: WitnessedMaster, close: Callable[[], None]) -> None:
        self.service = master
        self._close = close

    async def run(self) -> None:
        addresses = tuple(str(Address(host, PORT)) for host in MASTERS)
        self.service.decide(partial(self.service.coordinator.know_masters, addresses))
        try:
            await self.service.run()
        finally:
            self._close()

    def know_others(self, addresses: Sequence[str]) -> None:
        """All are known from the start."""

    def whereabouts(self) -> tuple[Sequence[str], str] | None:
        return None


# ---------------------------------------------------------------- faults

End = Callable[[], object]


def _crash(swarm: FailoverSwarm, host: str, _chance: Random) -> End:
    swarm.kill(host)
    return partial(swarm.boot, host)


def _freeze(swarm: FailoverSwarm, host: str, chance: Random) -> End:
    swarm.standstill.stop(host)
    if chance.random() < 0.3 and swarm.world.is_alive(host):
        swarm.world.freeze(host)
    return partial(_thaw, swarm, host)


def _thaw(swarm: FailoverSwarm, host: str) -> None:
    if swarm.standstill.stopped(host):
        if swarm.world.is_alive(host):
            swarm.world.thaw(host)
        swarm.standstill.go_on(host)


def _lose_database(swarm: FailoverSwarm, host: str, _chance: Random) -> End:
    swarm.database.cut_off.add(host)
    return partial(swarm.database.cut_off.discard, host)


def _lose_members(swarm: FailoverSwarm, host: str, _chance: Random) -> End:
    for name in swarm.peers:
        swarm.world.partition(host, name)

    def heal() -> None:
        for name in swarm.peers:
            swarm.world.heal(host, name)

    return heal


def _database_away(swarm: FailoverSwarm, _host: str, _chance: Random) -> End:
    swarm.database.away = True

    def back() -> None:
        swarm.database.away = False

    return back


def _slow_database(swarm: FailoverSwarm, _host: str, chance: Random) -> End:
    before = swarm.database.trip_s
    swarm.database.trip_s = chance.uniform(0.05, 0.4)

    def fast() -> None:
        swarm.database.trip_s = before

    return fast


FAULT_KINDS = {
    "crash": _crash,
    "freeze": _freeze,
    "lose database": _lose_database,
    "lose members": _lose_members,
    "database away": _database_away,
    "slow database": _slow_database,
}
LASTING = ("crash", "freeze", "lose database", "lose members")
OF_A_MEMBER = "a member crashes"


async def _some_faults(swarm: FailoverSwarm, chance: Random) -> list[str]:
    """Bring some faults about; return what happened, once all of them are over."""
    told: list[str] = []
    busy: set[str] = set()  # hosts with a fault

    async def last(host: str, for_s: float, end: End) -> None:
        await trio.sleep(for_s)
        end()
        busy.discard(host)

    async with trio.open_nursery() as nursery:
        for _ in range(chance.choice(FAULTS)):
            await trio.sleep(chance.expovariate(1 / GAP_S))
            kind = chance.choice([*FAULT_KINDS, OF_A_MEMBER])
            for_s = chance.uniform(*FAULT_S)
            leading = swarm.leading
            host = leading if leading and chance.random() < 0.8 else chance.choice([*MASTERS])
            if kind == OF_A_MEMBER:
                host = chance.choice([*swarm.peers])
                alone = sum(sim.alive for sim in swarm.peers.values()) < PEERS
                if host in busy or alone:
                    continue
                swarm.crash(host)
                end: End = partial(swarm.restart, host)
            elif "database" in kind and kind != "lose database":
                host = "database"
                if host in busy:
                    continue
                end = FAULT_KINDS[kind](swarm, host, chance)
            elif host in busy or host not in swarm.lives:
                continue
            else:
                end = FAULT_KINDS[kind](swarm, host, chance)
            busy.add(host)
            at_s = trio.current_time()
            told.append(f"{at_s:.2f} {kind}: {host}, {for_s:.2f} s, {leading} led")
            swarm.witness.note("fault", kind, host, for_s)
            nursery.start_soon(last, host, for_s, end)
    return told


def _lasting_fault(swarm: FailoverSwarm, chance: Random) -> str:
    """Bring about a fault of the leading master that does not end: another one has to lead."""
    kind, host = chance.choice(LASTING), swarm.leading
    assert host is not None
    FAULT_KINDS[kind](swarm, host, chance)
    swarm.witness.note("fault", kind, host)
    return f"{trio.current_time():.2f} {kind}: {host}, for good, {host} led"


def live_with_failovers(seed: int, tell: Tell | None = None) -> RunOutcome:
    """Run a seed in virtual time; to be called outside trio.

    Raises:
      BaseExceptionGroup: contains a ViolationError: an invariant was violated, or the run stopped making
        progress.
    """
    return run_virtually(partial(_live, seed, tell), seed=seed)


async def _live(seed: int, tell: Tell | None) -> RunOutcome:
    chance = Random(f"failover {seed}")
    made = Scenario(seed=seed, peers=PEERS, min_members=2, tensors=(2_000,), step_s=0.05)
    scenario = evolve(made, delay_s=chance.uniform(0.001, 0.03))
    async with trio.open_nursery() as nursery:
        swarm = FailoverSwarm(
            nursery,
            scenario.toml,
            seed=seed,
            layout=small_layout(scenario.tensors, scenario.counters),
            step_s=scenario.step_s,
            delay_s=scenario.delay_s,
            delta=telling,
        )
        swarm.witness.tell = tell
        swarm.prepare()
        swarm.database.trip_s = chance.uniform(0.001, 0.03)
        for host in MASTERS:
            swarm.boot(host)
            await trio.sleep(BOOT_S * chance.random())
        names = [f"p{number}" for number in range(PEERS)]
        for name in names:
            swarm.add_peer(name)
        told: list[str] = []
        try:
            await swarm.until(lambda: swarm.committed >= 1, within_s=FOUND_S)
            told = await _some_faults(swarm, chance)
            if chance.random() < LASTING_SHARE:
                await swarm.until(lambda: swarm.leading is not None, within_s=FOUND_S)
                told.append(_lasting_fault(swarm, chance))
            target = swarm.committed + ROUNDS_AFTER
            await swarm.until(
                lambda: swarm.committed >= target and all(map(swarm.in_sync, names)),
                within_s=RECOVERY_S,
            )
            swarm.check_final(names)
        except trio.TooSlowError:
            raise ViolationError(
                f"the run makes no progress: {told}; {format_state(swarm)}"
            ) from None
        finally:
            swarm.standstill.all_go_on()  # stopped tasks cannot end
        nursery.cancel_scope.cancel()
    return RunOutcome.of(seed, told, swarm)
