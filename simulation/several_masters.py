"""Masters that share a database; one of them leads at a time.

    host       each in ``Leadership``: waits for the lease, leads, waits again
    database   in memory, with a lease and a fence; can be away, slow, or cut off from a host

The witness checks every record, version and term, so a second commit of a version is found as it is
written.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import trio
from attrs import define, field

from ..daemon.master.journal.lease import Lease
from ..daemon.master.leadership import Leader, Leadership
from ..membership.master.coordinator import Coordinator
from ..membership.master.state.journal import TermStarted
from ..membership.master.state.master_effects import Effect
from ..protocol.addresses import Address
from ..protocol.trust.authority import Party
from .frozen_hosts import on_host
from .invariants import check_invariants
from .simulated_database import DatabaseClient, LeasedJournal, SimulatedDatabase
from .swarm import RUN_ID, Swarm
from .witness import ViolationError
from .witnessed_services import WitnessedMaster

PORT = 29_700
LEASE_S = 1.0
START_S = LEASE_S  # at most, from reading the journal until a leader listens
BOOT_S = 0.5  # at most, between the starts of two masters
TRIP_S = (0.001, 0.03)  # of a statement to the database, one way


@define
class _Life:
    """One life of a master's process."""

    host: str
    leadership: Leadership
    scope: trio.CancelScope = field(factory=trio.CancelScope)


class MastersSwarm(Swarm):
    """A swarm whose masters share a database. ``master`` is the one that led last."""

    def __init__(self, *args: Any, masters: Sequence[str], **options: Any) -> None:
        super().__init__(*args, **options)
        self.master_hosts = tuple(masters)
        self.master_addresses = [Address(host, PORT) for host in masters]
        self.database = SimulatedDatabase(self.store, trip_s=self.rng.uniform(*TRIP_S))
        self._lives: dict[str, _Life] = {}
        self._life_count = 0

    async def start_master(self) -> None:
        """Start the masters that do not run."""
        for host in self.master_hosts:
            if host not in self._lives:
                self._boot_master(host)
                await trio.sleep(BOOT_S * self.rng.random())

    async def return_master(self, host: str) -> None:
        if host not in self._lives:
            self._boot_master(host)

    def _boot_master(self, host: str) -> None:
        self._life_count += 1
        client = DatabaseClient(self.database, host)
        leadership = Leadership(
            client,
            f"{host} life {self._life_count}",
            LEASE_S,
            call=client.call,
            clock=trio.current_time,
            addresses=[str(Address(host, PORT))],
        )
        self._lives[host] = life = _Life(host, leadership)
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
        identity = f"{0xF - self.master_hosts.index(life.host):x}" * 32
        network = self.world.host(life.host, identity, Party.MASTER)
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
        start_s = self.rng.uniform(0, START_S)
        return _SimulatedLeader(master, start_s, partial(self.world.crash, life.host))

    def master_runs(self, host: str) -> bool:
        return host in self._lives

    def crash_master(self, host: str = "") -> None:
        """Cut a master's machine off its power."""
        life = self._lives.pop(host)
        self.go_on(host)
        if self.world.is_alive(host):  # it leads
            self.world.crash(host)
        life.scope.cancel()

    @property
    def leading(self) -> str | None:
        """The host of the master that holds the lease, by the database."""
        holder = self.database.holder
        return next(
            (host for host, life in self._lives.items() if life.leadership.holder == holder), None
        )

    async def end_faults(self) -> None:
        self.database.cut_off.clear()
        await super().end_faults()
        await self.start_master()


class _SimulatedLeader:
    def __init__(self, master: WitnessedMaster, start_s: float, close: Callable[[], None]) -> None:
        self.service = master
        self._start_s = start_s
        self._close = close

    async def run(self) -> None:
        try:
            await trio.sleep(self._start_s)
            await self.service.run()
        finally:
            self._close()

    def know_others(self, addresses: Sequence[str]) -> None:
        own = str(self.service.bound[0])
        self.service.decide(partial(self.service.coordinator.know_masters, (own, *addresses)))

    def whereabouts(self) -> tuple[Sequence[str], str] | None:
        return ([str(each) for each in self.service.bound], "") if self.service.bound else None
