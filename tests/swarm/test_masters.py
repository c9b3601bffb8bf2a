"""Masters that die, return and take over from each other: whole runs in virtual time.

The witness inside the swarm sees the records of every master; one history of commits is all that it
accepts, so a fork fails the test that made it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial

import pytest
import trio

from holdfast.daemon.master.journal.journal_base import JournalAwayError
from holdfast.daemon.master.journal.journal_store import JournalStore
from holdfast.daemon.process.exit_codes import ExitCode
from holdfast.membership.master.coordinator import Coordinator
from holdfast.membership.master.state.history import TERMS_SKIPPED
from holdfast.membership.master.state.journal import (
    JournalRecord,
    RoundCommitted,
    RunPaused,
    TermStarted,
    VersionAdopted,
)
from holdfast.protocol.addresses import Address
from holdfast.protocol.errors import UserError
from holdfast.protocol.messages import Role
from holdfast.protocol.trust.authority import Party
from holdfast.simulation.swarm import RUN_ID, Swarm
from holdfast.simulation.witnessed_services import WitnessedMaster, WitnessedStore
from tests.plain import describe
from tests.swarm.test_swarm import state_bytes

STANDBY = Address("standby", 29700)
SPEC = """
[run]
name = "masters"
[diloco]
sync_every = 4
[membership]
contributors = {contributors}
min_members = {min_members}
spares = {spares}
deadline_s = 3
grace_s = 1
rewind_s = {rewind_s}
[reduce]
chunk_bytes = 4096
"""


def spec(
    contributors: int = 3, min_members: int = 2, spares: int = -1, rewind_s: float = 60
) -> str:
    return SPEC.format(
        contributors=contributors, min_members=min_members, spares=spares, rewind_s=rewind_s
    )


class Ended:
    """The exit of a master that ended by itself."""

    def __init__(self) -> None:
        self.error: UserError | None = None


class Guarded(Swarm):
    """A swarm whose first master may end by itself."""

    first_ended: Ended

    async def _master_ended(self, error: UserError) -> None:
        self.first_ended.error = error


class Machines:
    """A swarm with a standby machine, which has a copy of the master's journal."""

    def __init__(self, swarm: Guarded) -> None:
        self.swarm = swarm
        self.ended = {"master": Ended(), "standby": Ended()}
        swarm.first_ended = self.ended["master"]

    async def start(self, names: Sequence[str], more: Sequence[str] = ()) -> None:
        """Start the first master with peers that know the standby; wait for sync and some
        rounds.
        """
        swarm = self.swarm
        await swarm.start_master()
        addresses = ("master:29700", str(STANDBY))
        swarm.decide(partial(swarm.coordinator.know_masters, addresses))
        for name in names:
            swarm.add_peer(name)
        for name in more:
            swarm.add_peer(name, role=Role.SPARE)
        await swarm.until(lambda: swarm.committed >= 2 and all(map(swarm.in_sync, [*names, *more])))

    def copy(self) -> list[JournalRecord]:
        return self.swarm.store.records()

    @property
    def leader(self) -> WitnessedMaster:
        assert self.swarm.master is not None
        return self.swarm.master

    async def stand_in(self, *dead: str) -> tuple[list[JournalRecord], WitnessedMaster]:
        """Start peers a, b and c, crash the master and some of them, and start a standby; also
        return its records.
        """
        await self.start("abc")
        records = self.copy()
        self.swarm.crash_master()
        for name in dead:
            self.swarm.crash(name)
        return records, await self.run("standby", records, behind=True)

    async def take_over(self) -> tuple[list[JournalRecord], WitnessedMaster]:
        """As ``stand_in``, until all three peers follow the standby."""
        records, new = await self.stand_in()
        await settled(self.swarm, new, "abc")
        return records, new

    async def come_back(self, name: str) -> None:
        """Restart a machine whose invite also names the standby."""
        sim = self.swarm.restart(name)
        sim.service.session.search.masters.append(STANDBY)
        await trio.sleep(20)

    async def run(
        self, host: str, records: Sequence[JournalRecord], *, behind: bool, nonce: bytes = b"n" * 16
    ) -> WitnessedMaster:
        """Start a master on a machine from the given records."""
        swarm = self.swarm
        store = WitnessedStore(swarm.witness)
        for peer, grant in swarm.store.granted().items():
            store.admit(peer, grant)
        last = max(r.term for r in records if isinstance(r, TermStarted))
        term = last + (TERMS_SKIPPED if behind else 1)
        records = [*records, TermStarted(term, nonce, behind)]
        for record in records:
            JournalStore.append(store, record)
        coordinator = Coordinator.restore(swarm.spec, RUN_ID, records, term)
        number = "e" if host == "standby" else "f"
        network = swarm.world.host(host, number * 32, Party.MASTER)
        master = WitnessedMaster(coordinator, store, network, [Address(host, 29700)], probe=False)
        master.witness, master.watch = swarm.witness, lambda _effects: swarm.notify()
        await swarm.nursery.start(self._serve, host, master)
        return master

    async def _serve(
        self,
        host: str,
        master: WitnessedMaster,
        *,
        task_status: trio.TaskStatus[object] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        try:
            await master.run(task_status=task_status)
        except* UserError as group:
            (error,) = group.exceptions
            assert isinstance(error, UserError)
            self.ended[host].error = error
            self.swarm.world.crash(host)


@asynccontextmanager
async def machines(toml: str, seed: int = 0) -> AsyncIterator[Machines]:
    with trio.fail_after(7200):
        async with trio.open_nursery() as nursery:
            yield Machines(Guarded(nursery, toml, seed=seed))
            nursery.cancel_scope.cancel()


def why(master: WitnessedMaster) -> str:
    return str(describe(master.coordinator, trio.current_time())["why_waiting"])


def told(master: WitnessedMaster) -> str:
    return "\n".join(event.text for event in master.coordinator.context.events)


async def settled(
    swarm: Swarm, master: WitnessedMaster, names: Sequence[str], more: int = 3
) -> None:
    """Wait for more rounds, then check that all peers hold the same bits."""
    await swarm.commit(more)
    swarm.master = master
    await swarm.come_to_rest(names)
    swarm.check_final(names)
    master.decide(master.coordinator.resume)


# ---------------------------------------------------------------- takeover and fencing


@pytest.mark.fault("the journal's end is damaged or lost")
@pytest.mark.fault("the master's machine is gone", "its owner", "a standby goes on from a copy")
async def test_a_copy_that_lacks_commits_adopts_what_the_members_hold() -> None:
    async with machines(spec()) as run:
        await run.start("abc", "d")
        records = run.copy()
        await run.swarm.commit(3)
        swarm = run.swarm
        await swarm.come_to_rest("abcd")
        before, committed = state_bytes(swarm, "abcd"), swarm.committed
        swarm.crash_master()
        new = await run.run("standby", records, behind=True)
        await settled(swarm, new, "abcd")
        adopted = [r for r in new.store.records() if isinstance(r, VersionAdopted)]
        assert [record.head.version for record in adopted] == [committed]
        assert state_bytes(swarm, "abcd") == before
        assert "has taken the run over" in told(new)
        rounds = [commit.round for commit in swarm.witness.commits]
        assert len(set(rounds)) == len(rounds), "a round number was used twice"


async def test_a_takeover_waits_for_more_than_half_and_kick_decides_otherwise() -> None:
    async with machines(spec()) as run:
        _records, new = await run.stand_in("b", "c")
        committed = run.swarm.committed
        await trio.sleep(40)
        assert run.swarm.committed == committed
        assert "1 of 3 contributors are here" in why(new)
        assert "b (" in why(new)
        await run.come_back("c")  # without its state; but it obeys the new master now
        assert not new.coordinator.succession.waiting
        await settled(run.swarm, new, "ac")


async def test_the_old_master_gives_way_when_it_comes_back() -> None:
    async with machines(spec()) as run:
        records, new = await run.take_over()
        old = await run.run("master", run.copy(), behind=False)
        await run.swarm.until(lambda: run.ended["master"].error is not None, within_s=60)
        error = run.ended["master"].error
        assert error is not None
        assert error.exit_code == ExitCode.SUPERSEDED
        assert "another master has taken this run over" in str(error)
        assert not [r for r in old.store.records()[len(records) + 1 :] if _decides(r)]
        await settled(run.swarm, new, "abc")
        assert run.ended["standby"].error is None


def _decides(record: JournalRecord) -> bool:
    return isinstance(record, RoundCommitted)


@pytest.mark.fault(
    "two masters of one run",
    "terms in `Hello` and `Claim`",
    "the older one decides nothing more and ends",
)
@pytest.mark.parametrize("seed", range(2))
async def test_two_masters_apart_never_both_commit_and_the_old_one_ends(seed: int) -> None:
    """The masters cannot see each other, peers move one by one: min_members is a majority."""
    async with machines(spec(), seed) as run:
        await run.start("abc")
        swarm = run.swarm
        swarm.world.partition("master", "standby")
        old = swarm.master
        assert old is not None
        new = await run.run("standby", run.copy(), behind=True)
        order = list("abc")
        swarm.rng.shuffle(order)
        for name in order:
            await trio.sleep(swarm.rng.uniform(0, 6))
            swarm.world.partition("master", name)
        await settled(swarm, new, "abc")
        assert not old.coordinator.succession.superseded, "nobody could tell it"
        swarm.heal_all()
        swarm.world.heal("master", "standby")
        await swarm.until(lambda: run.ended["master"].error is not None, within_s=60)
        await settled(swarm, new, "abc")


@pytest.mark.fault("two starts on one backup")
async def test_of_two_starts_on_one_backup_that_goes_on_which_the_members_obey() -> None:
    async with machines(spec()) as run:
        records, first = await run.take_over()
        await run.run("master", records, behind=True, nonce=b"z" * 16)
        await run.swarm.until(lambda: run.ended["master"].error is not None, within_s=60)
        await settled(run.swarm, first, "abc")
        assert run.ended["standby"].error is None


@pytest.mark.fault("two masters of one run")
async def test_a_peer_tells_a_master_of_before_that_its_time_is_over() -> None:
    async with machines(spec()) as run:
        swarm, (records, new) = run.swarm, await run.take_over()
        swarm.world.partition("master", "standby")  # only peers can tell
        old = await run.run("master", records, behind=False)
        swarm.world.cut("a", "standby")  # a looks for a master again, at the first address first
        await swarm.until(lambda: run.ended["master"].error is not None, within_s=60)
        assert "says a (" in old.coordinator.succession.superseded
        await settled(swarm, new, "abc")


# ---------------------------------------------------------------- disks


def full(times: list[int]) -> Callable[[JournalStore, JournalRecord], None]:
    original = WitnessedStore.append

    def append(self: JournalStore, record: JournalRecord) -> None:
        if times[0] > 0:
            times[0] -= 1
            raise JournalAwayError("database or disk is full")
        assert isinstance(self, WitnessedStore)
        original(self, record)

    return append


@pytest.mark.fault(
    "the journal's disk is full",
    "SQLite's error",
    "nothing behind the record leaves; heartbeats do; tried again; the clock of decisions stands"
    " still, so nobody is late with an answer",
)
async def test_a_full_disk_stops_commits_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    async with machines(spec()) as run:
        await run.start("abc")
        swarm, master = run.swarm, run.leader
        times = [12]
        monkeypatch.setattr(WitnessedStore, "append", full(times))
        committed = swarm.committed
        await trio.sleep(30)
        assert swarm.committed == committed
        assert "disk is full" in master.why_stuck()
        assert len(master.sessions) == 3, "heartbeats still go both ways"
        swarm.add_peer("d", role=Role.SPARE)
        await trio.sleep(10)
        assert "d (" not in told(master), "newcomers wait outside"
        await swarm.until(lambda: times[0] == 0)
        await settled(swarm, master, "abcd")
        assert not master.why_stuck()
        assert "the journal can be written again" in told(master)


@pytest.mark.fault("the journal's disk is full")
@pytest.mark.parametrize("lost", ["", "c"])
async def test_nobody_is_late_with_what_a_full_disk_kept_from_being_sent(lost: str) -> None:
    """For longer than the run waits for lost versions. What is decided at its begin, a commit or
    the flush after a death, goes out when there is room again.
    """
    async with machines(spec(rewind_s=20)) as run:
        await run.start("abc")
        swarm, master = run.swarm, run.leader
        round_table = master.coordinator.scheduler.round_table
        await swarm.when(round_table.reducing, within_s=60)
        swarm.store.full = True
        for name in lost:
            swarm.crash(name)
        await trio.sleep(60)
        assert master.why_stuck()
        swarm.store.full = False
        await settled(swarm, master, "ab" if lost else "abc")
        events = told(master)
        assert "removed" not in events
        assert "no longer in sync" not in events
        assert "holds version" not in events
        assert round_table.abort_count == 0


async def test_what_the_owner_wants_is_done_when_it_is_on_disk(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with machines(spec()) as run:
        await run.start("abc")
        master = run.leader
        await master.see_through(master.coordinator.pause)
        assert any(isinstance(r, RunPaused) for r in run.swarm.store.records())
        monkeypatch.setattr(WitnessedStore, "append", full([1_000]))
        with pytest.raises(UserError, match=r"not on the master's disk .* disk is full"):
            await master.see_through(master.coordinator.resume)


@pytest.mark.fault("the journal is slow", "the time a record takes", "commits wait, members stay")
async def test_a_slow_disk_delays_commits_and_no_heartbeat() -> None:
    async with machines(spec()) as run:
        await run.start("abc")
        swarm, master = run.swarm, run.leader
        quick = master.network.run_sync

        async def slow(function: Callable[[], object]) -> object:
            await trio.sleep(20)  # several deadlines
            return await quick(function)

        master.network.run_sync = slow  # type: ignore[assignment, method-assign]
        await trio.sleep(10)
        assert "journal is slow" in master.why_stuck()
        assert len(master.sessions) == 3
        await swarm.commit(2)
        master.network.run_sync = quick  # type: ignore[method-assign]
        await settled(swarm, master, "abc", more=2)
        assert "gone" not in told(master)
        assert "no longer in sync" not in told(master)


# ---------------------------------------------------------------- lineage


async def lose_the_newest(run: Machines) -> tuple[int, int]:
    """Let b and c miss some rounds and then crash a, which saw them; return both versions."""
    swarm = run.swarm
    await run.start("abc")
    await swarm.come_to_rest("abc")
    older = swarm.committed
    for name in "bc":
        for other in ("master", "a"):
            swarm.world.partition(name, other)
    swarm.resume()
    await swarm.until(lambda: swarm.committed >= older + 3)
    await swarm.come_to_rest("a")
    decided = swarm.coordinator.context.history.versions
    newest = decided[0]  # perhaps not on disk yet
    for other in ("b", "c", "master"):
        swarm.world.partition("a", other)
    await trio.sleep(10)
    swarm.resume()
    for name in "bc":
        swarm.world.heal(name, "master")
    return older, newest


@pytest.mark.fault("all holders of the newest version are gone")
async def test_when_they_do_not_come_the_run_goes_back_and_they_are_synced_later() -> None:
    async with machines(spec(min_members=1, rewind_s=60)) as run:
        _older, newest = await lose_the_newest(run)
        swarm, master = run.swarm, run.leader
        history = master.coordinator.context.history
        await swarm.until(lambda: history.rewinds.count == 1, within_s=120)
        assert history.versions[0] < newest
        assert "REWOUND" in told(master)
        target = history.commit_count + 2
        await swarm.until(lambda: history.commit_count >= target)
        swarm.heal_all()  # a returns, and what it has is newer than what the run went back to
        await settled(swarm, master, "abc", more=2)
        rounds = [commit.round for commit in swarm.witness.commits]
        assert len(set(rounds)) == len(rounds), "a round number was used twice"
