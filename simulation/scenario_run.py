"""The run of a scenario: all peers join, faults happen, then the faults are ended.

    run founded --faults, each in time--> aimed: one more round --faults ended--> more rounds

After the faults have ended, the run must recover: every peer that has not left takes part, rounds
are committed, all copies have the same bits. If the only fault was one contributor's death, its
round must have been repaired, neither aborted nor run again.

Beside an adversary there are no faults; ``honest_peers`` says what must hold.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import numpy as np
import trio
from attrs import define, evolve
from numpy.typing import NDArray

from ..membership.master.leases import Leases
from ..membership.master.rounds.round import Round
from ..membership.master.rounds.round_table import RoundTable
from ..membership.master.status.status import describe
from ..membership.master.sync.catch_up import HEADROOM
from ..membership.shared.event_kind import EventKind
from .drifting_trainer import small_layout
from .faults import carry_out
from .honest_peers import endure
from .hostile_peer import Hostile
from .scenario import (
    FOUND_S,
    LEADER,
    MASTER,
    SPARE,
    SUCCESSOR,
    Fault,
    Instant,
    Kind,
    Scenario,
)
from .several_masters import MastersSwarm
from .swarm import Swarm
from .virtual_time import run_virtually
from .witness import Tell, ViolationError

QUIET_S = 60.0  # limit for a round after aimed faults, and for the recovery
SPEND_S = 120.0  # limit until more of what is leased is in committed work
HOST_HARM_S = 4.0  # mean time between two faults of a further host of a peer
INSTANT_S = 3.0  # longest wait for an instant, after which the fault happens anyway
POLL_S = 0.005  # precision for instants that no decision of the master marks
MASTER_BYTES_PER_S = 1e7  # rate of lines to the master, if the peers' lines are slower


@define
class RunOutcome:
    """The outcome of a scenario.

    Attributes:
      faults: the faults that happened, with their times.
      repairs, reruns, aborts: counts of the last master.
      lies: of the adversary: false messages, or rounds with false sums.
      trace: digest of all witnessed events with their times.
    """

    seed: int
    faults: list[str]
    events: int
    committed: int
    repairs: int
    reruns: int
    aborts: int
    lies: int
    trace: str

    @classmethod
    def of(cls, seed: int, faults: list[str], swarm: Swarm) -> RunOutcome:
        """Return the outcome of a swarm's run."""
        round_table = swarm.coordinator.scheduler.round_table
        return cls(
            seed,
            faults,
            swarm.witness.events,
            swarm.committed,
            round_table.repair_count,
            round_table.rerun_count,
            round_table.abort_count,
            sum(liar.lie_count for liar in swarm.liars.values()),
            swarm.witness.trace.hexdigest()[:32],
        )


def run_scenario(scenario: Scenario, tell: Tell | None = None) -> RunOutcome:
    """Run a scenario in virtual time; to be called outside trio.

    Args:
      tell: receives every witnessed event.

    Raises:
      ViolationError: a daemon logged an internal error, which ended a connection.
      BaseExceptionGroup: contains a ViolationError if an invariant was violated or the run stopped
        making progress, or the error that ended a daemon.
    """
    return run_virtually(partial(_ScenarioRun(scenario, tell).live), seed=scenario.seed)


def _telling(peer: str, _round: int, count: int) -> NDArray[np.float32]:
    """Return a pseudo-gradient that identifies its peer: the n-th peer's is 256 + 2 ** (n mod 12).

    A mean then reveals its contributors, and no norm differs enough from the others to be refused.
    """
    return np.full(count, 256 + 2.0 ** ((int(peer[:8], 16) - 1) % 12), np.float32)


def _make_swarm(nursery: trio.Nursery, scenario: Scenario, tell: Tell | None) -> Swarm:
    make = partial(MastersSwarm, masters=scenario.masters) if scenario.masters else Swarm
    swarm = make(
        nursery,
        scenario.toml,
        seed=scenario.seed,
        layout=small_layout(scenario.tensors, scenario.counters),
        step_s=scenario.step_s,
        slowness={scenario.names[0]: scenario.slowness},
        delay_s=scenario.delay_s,
        jitter_s=scenario.jitter_s,
        bytes_per_s=scenario.bytes_per_s,
        apply_s=scenario.apply_s,
        delta=_telling if scenario.telling else None,
        strict=not isinstance(scenario.adversary, Hostile),
        samples=scenario.samples,
        hosted=scenario.hosted,
        host_harm_s=HOST_HARM_S,
    )
    swarm.witness.tell = tell
    for name in [*scenario.names, SPARE]:
        rate = max(MASTER_BYTES_PER_S, scenario.bytes_per_s)
        swarm.world.link(MASTER, name, bytes_per_s=rate)
    return swarm


def format_state(swarm: Swarm) -> str:
    """Describe the state of the run and all peers, for the report of a run that fails."""
    lines = [f"at {trio.current_time():.2f} s, {swarm.committed} committed"]
    if swarm.master is not None:
        status = describe(swarm.coordinator, swarm.master.now())
        lines.append(f"{status.state}: {status.why_waiting}")
        lines += [f"{m.name} {m.role}: {m.why}" for m in status.members]
        lines.append(format_leases(swarm.coordinator.leases))
        lines += [f"{e.at_s:.2f} {e.text}" for e in (status.events or ())[-12:]]
    for name, sim in sorted(swarm.peers.items()):
        replica = sim.service.replica
        held = [(f.version, f.fetching is not None) for f in replica.fragments]
        rounds = [(r.round, r.phase.value, r.attempt) for r in replica.rounds.values()]
        lines.append(
            f"{name} {'alive' if sim.alive else 'dead'} {replica.trainer.role.value} {held}"
            f" {rounds} {sim.ended or ''}"
        )
    return "\n  ".join(lines)


def format_leases(leases: Leases) -> str:
    spent = leases.context.history.data.spent
    held = {peer[:8]: list(ranges) for peer, ranges in leases.held.items()}
    kept = {peer[:8]: list(each.ranges) for peer, each in leases.kept.items()}
    return (
        f"leases: spent {list(spent)}, free {list(leases.free)}, held {held}, kept {kept}, "
        f"cursor {leases.cursor}"
    )


@contextmanager
def _logged_errors() -> Iterator[list[str]]:
    """Collect the exceptions that daemons log: bugs that end only a connection."""
    errors: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            cause = record.exc_info[1] if record.exc_info else None
            if cause is None:
                return  # a message for the operator, e.g. about a full disk
            errors.append(f"{record.getMessage()}: {_first(cause)!r}")

    listener, logger = Listener(logging.ERROR), logging.getLogger("holdfast")
    logger.addHandler(listener)
    try:
        yield errors
    finally:
        logger.removeHandler(listener)


def _first(error: BaseException | None) -> BaseException | None:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


class _ScenarioRun:
    def __init__(self, scenario: Scenario, tell: Tell | None = None) -> None:
        self.scenario = scenario
        self.tell = tell
        self.happened: list[str] = []
        self.found_s = 0.0
        self._repairs_before = 0  # repair count before the last fault

    async def live(self) -> RunOutcome:
        with _logged_errors() as errors:
            outcome = await self._live()
        if errors:
            raise ViolationError(f"an internal error ended a connection: {errors[0]}")
        return outcome

    async def _live(self) -> RunOutcome:
        scenario = self.scenario
        async with trio.open_nursery() as nursery:
            self.swarm = swarm = _make_swarm(nursery, scenario, self.tell)
            try:
                if scenario.adversary is not None:
                    self.happened = await endure(swarm, scenario, scenario.adversary)
                else:
                    await self._suffer()
            except trio.TooSlowError as error:
                raise ViolationError(f"the run makes no progress: {format_state(swarm)}") from error
            finally:
                swarm.standstill.all_go_on()
            nursery.cancel_scope.cancel()
        return RunOutcome.of(scenario.seed, self.happened, swarm)

    async def _suffer(self) -> None:
        await self._begin()
        for fault in self.scenario.faults:
            await self._inject(fault)
        if self.scenario.aimed:
            await self._continue_with_faults()
        await trio.sleep(self.scenario.linger_s)
        await self._recover()

    async def _begin(self) -> None:
        """Start all peers and wait for the first commit."""
        swarm = self.swarm
        await swarm.start_master()
        for name in self.scenario.first_peers:
            swarm.add_first(name)
        await swarm.when(lambda: swarm.committed >= 1 and self._whole(), within_s=FOUND_S)
        self.found_s = trio.current_time()

    # ------------------------------------------------------------ state of the run

    @property
    def _tracker(self) -> RoundTable:
        return self.swarm.coordinator.scheduler.round_table

    def _staying(self) -> list[str]:
        return [name for name in sorted(self.swarm.peers) if name not in self.swarm.left]

    def _whole(self) -> bool:
        """Return whether the remaining peers are in sync, the others gone and all places taken."""
        swarm, staying = self.swarm, self._staying()
        if any(sim.alive != (name in staying) for name, sim in swarm.peers.items()):
            return False
        if not all(swarm.in_sync(name) for name in staying):
            return False
        able = sum(name != SPARE and not self._may_be_late(name) for name in staying)
        here = sum(swarm.peers[name].service.replica.trainer.contributing for name in staying)
        return here >= (min(able, self.scenario.places) if self.scenario.places else able)

    def _are_outrun(self) -> bool:
        """Return whether results take more than half of a line, and all members that are not in
        sync were told so: see ``catch_up``.
        """
        swarm = self.swarm
        if swarm.master is None or not self._tracker.past:
            return False
        done = [round_ for round_ in self._tracker.past if round_.contents is not None]
        size_of = swarm.coordinator.state_sync.catch_up.result_bytes
        seconds = trio.current_time() - self._tracker.past[0].ended_s
        needed_bytes_per_s = sum(size_of(round_.fragment) for round_ in done) / seconds
        behind = [swarm.peers[name] for name in self._staying() if not swarm.in_sync(name)]
        return HEADROOM * needed_bytes_per_s > self.scenario.bytes_per_s and all(
            any("cannot keep up" in text for text in sim.service.report.notices) for sim in behind
        )

    def _may_be_late(self, name: str) -> bool:
        """Return whether a peer may be late so often that it is left out: only the slow one."""
        return self.scenario.slowness > 1.0 and name == self.scenario.names[0]

    def _reducing(self) -> Round | None:
        if self.swarm.master is None:
            return None
        return next(iter(self._tracker.reducing()), None)

    # ------------------------------------------------------------ instants

    async def _inject(self, fault: Fault) -> None:
        """Wait for a fault's moment, then inject it."""
        swarm = self.swarm
        await trio.sleep_until(self.found_s + fault.at_s)
        before = self._repairs_before
        self._repairs_before = self._tracker.repair_count if swarm.master is not None else 0
        with trio.move_on_after(INSTANT_S):  # the round may end without reaching the instant
            await self._instant(fault, before)
        await trio.sleep(fault.after_s)
        if fault.who == SUCCESSOR:
            fault = self._with_successor(fault)
        elif fault.who == LEADER:
            with trio.move_on_after(INSTANT_S):
                await self._when(lambda: swarm.leading)
            fault = evolve(fault, who=swarm.leading or swarm.master_hosts[0])
        if carry_out(swarm, fault):
            self.happened.append(f"{trio.current_time():.3f} {fault}")

    async def _instant(self, fault: Fault, repairs_before: int) -> None:
        swarm, seen = self.swarm, self.swarm.committed
        match fault.instant:
            case Instant.TIME:
                return
            case Instant.FLUSH:
                await self._when(self._flushing)
                return
            case Instant.REPAIR:
                await self._when(
                    lambda: not self._reducing() or self._tracker.repair_count > repairs_before
                )
                return
        if self._reducing():  # wait for the next reduction, from its start
            await self._when(lambda: swarm.committed > seen)
            seen = swarm.committed
        await self._when(self._reducing)
        match fault.instant:
            case Instant.FIRST_RESULT:
                while self._reducing() and not self._holds_a_result(fault.who):
                    await trio.sleep(POLL_S)
            case Instant.LAST_REPORT:
                await self._when(self._all_but_one_reported)
            case Instant.COMMIT:
                await self._when(lambda: swarm.committed > seen)

    async def _when(self, condition: Callable[[], object]) -> None:
        await self.swarm.when(condition, within_s=math.inf)

    def _flushing(self) -> bool:
        round_ = self._reducing()
        return round_ is None or round_.running().flush.in_progress

    def _all_but_one_reported(self) -> bool:
        round_ = self._reducing()
        return round_ is None or len(round_.running().unreported()) <= 1

    def _holds_a_result(self, name: str) -> bool:
        """Return whether a peer, or for the master any peer, holds the result of a chunk."""
        for each in [name] if name in self.swarm.peers else sorted(self.swarm.peers):
            for running in self.swarm.peers[each].service.reducer.running():
                if any(running.flush(())):
                    return True
        return False

    def _with_successor(self, fault: Fault) -> Fault:
        """Direct a fault at a living chunk owner, or at its ``other`` if there is none."""
        round_ = self._reducing()
        owners = set(round_.running().owners) if round_ is not None else set()
        for name, sim in sorted(self.swarm.peers.items()):
            if sim.alive and sim.peer in owners:
                return evolve(fault, who=name, other="")
        return evolve(fault, who=fault.other, other="")

    # ------------------------------------------------------------ the end

    async def _continue_with_faults(self) -> None:
        """Wait for a commit while the faults last, if enough peers are left."""
        swarm = self.swarm
        stopped = swarm.standstill.stopped
        left = [n for n in self.scenario.names if swarm.peers[n].alive and not stopped(n)]
        if len(left) >= self.scenario.min_members:
            await swarm.commit(within_s=QUIET_S)
        self._check_repaired()

    def _check_repaired(self) -> None:
        """Raise ViolationError if the death of a single contributor cost a whole round."""
        if [fault.kind for fault in self.scenario.faults] != [Kind.CRASH] or self.scenario.hosted:
            return  # there is other harm
        if self.scenario.faults[0].who not in self.swarm.peers:
            return
        # An owner that dies before its check does: nobody could tell any more whether it lied.
        rerun_count = 0 if self.scenario.audit else self._tracker.rerun_count
        if self._tracker.abort_count or rerun_count:
            raise ViolationError(f"one death cost a whole round: {format_state(self.swarm)}")

    async def _recover(self) -> None:
        """End all faults, then check that the run recovers."""
        swarm = self.swarm
        await swarm.end_faults()
        for name in self._staying():
            if not swarm.peers[name].alive:
                swarm.restart(name)
        swarm.resume()
        try:
            await swarm.when(self._whole, within_s=QUIET_S)
        except trio.TooSlowError:
            if swarm.newest_gone:
                await swarm.when(self._whole, within_s=swarm.spec.membership.rewind_s)
            elif not self._are_outrun():  # else they come in sync when the run rests
                raise
        await swarm.commit(within_s=QUIET_S)
        await self._spend_leases()
        staying = self._staying()
        await swarm.come_to_rest(staying, within_s=QUIET_S)
        swarm.check_final(staying)
        if swarm.coordinator.context.history.rewinds.count and not swarm.newest_gone:
            raise ViolationError(f"the run went back without need: {format_state(swarm)}")
        for event in swarm.coordinator.context.events:
            if event.kind is EventKind.BAD:
                raise ViolationError(event.text)

    async def _spend_leases(self) -> None:
        """Wait until all that was leased by now is committed; a slow peer would take long."""
        swarm = self.swarm
        if not self.scenario.samples or self.scenario.slowness > 1.0:
            return
        leases, data = swarm.coordinator.leases, swarm.coordinator.context.history.data
        given = [data.spent, *leases.held.values(), *(kept.ranges for kept in leases.kept.values())]
        last = max((stop for ranges in given for _start, stop in ranges), default=0)
        while (spent_count := data.spent.count_in(0, last)) < last:
            await swarm.when(partial(self._spent_more, last, spent_count), within_s=SPEND_S)

    def _spent_more(self, last: int, than_count: int) -> bool:
        """Return whether more of the positions below ``last`` are spent than there were."""
        return self.swarm.coordinator.context.history.data.spent.count_in(0, last) > than_count
