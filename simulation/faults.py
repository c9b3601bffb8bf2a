"""Injection of one fault into a swarm, and its end if the fault is limited in time.

A fault that is impossible at its moment is skipped: a crash of a dead peer, or of the last peer
that holds the state, which is only in memory. A shrunk list of faults therefore stays valid.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import trio

from .scenario import MASTER, SPARE, Fault, Kind
from .several_masters import MastersSwarm
from .swarm import Swarm

PEERS_GROWTH_MAX = 2  # peers that may join in a scenario
LEFT_MIN = 2  # contributors that never leave
FLAP_S = 0.3  # longest time between a flapping peer's crash and return

End = Callable[[], object]


def carry_out(swarm: Swarm, fault: Fault) -> bool:
    """Inject a fault now; return False if it is impossible at this moment."""
    end = _BEGIN[fault.kind](swarm, fault)
    if end is None:
        return False
    if fault.for_s:
        swarm.nursery.start_soon(_end_later, swarm, fault.for_s, end)
    return True


async def _end_later(swarm: Swarm, after_s: float, end: End) -> None:
    await trio.sleep(after_s)
    if not swarm.at_peace:  # else the swarm has ended all faults
        end()


def _nothing() -> None:
    """End a fault that has no duration."""


# ---------------------------------------------------------------- machines and processes


def _crash(swarm: Swarm, fault: Fault) -> End | None:
    name = fault.who
    if name in swarm.master_hosts:
        if not swarm.master_runs(name):
            return None
        swarm.crash_master(name)
        return partial(swarm.nursery.start_soon, swarm.return_master, name)
    if not _expendable(swarm, name):
        return None
    swarm.crash(name)
    return partial(_return, swarm, name)


def _return(swarm: Swarm, name: str) -> None:
    if not swarm.at_peace and not swarm.peers[name].alive and name not in swarm.left:
        swarm.restart(name)


def _expendable(swarm: Swarm, name: str) -> bool:
    """Return whether a peer is alive and another one holds the state."""
    return name in swarm.peers and swarm.peers[name].alive and swarm.survives_without(name)


def _flap(swarm: Swarm, fault: Fault) -> End | None:
    if not _expendable(swarm, fault.who):
        return None
    swarm.nursery.start_soon(_crash_and_return, swarm, fault.who, int(fault.amount))
    return _nothing


async def _crash_and_return(swarm: Swarm, name: str, count: int) -> None:
    for _ in range(count):
        if swarm.at_peace:
            return
        if _expendable(swarm, name):
            swarm.crash(name)
        await trio.sleep(swarm.rng.uniform(0, FLAP_S))
        _return(swarm, name)
        await trio.sleep(swarm.rng.uniform(0, FLAP_S))


def _trainer(swarm: Swarm, fault: Fault) -> End | None:
    if not swarm.peers[fault.who].alive:
        return None
    swarm.peers[fault.who].trainer.crash()
    return _nothing


def _stop(swarm: Swarm, fault: Fault) -> End | None:
    name = fault.who
    is_master = name in swarm.master_hosts
    alive = swarm.master_runs(name) if is_master else swarm.peers[name].alive
    if not alive or swarm.standstill.stopped(name):
        return None
    swarm.stop(name, asleep=fault.kind is Kind.SLEEP)
    return partial(swarm.go_on, name)


def _clock(swarm: Swarm, fault: Fault) -> End | None:
    backwards = swarm.rng.random() < 0.5  # for the wall clock; a monotonic one never goes back
    swarm.leap(fault.amount, -fault.amount if backwards else fault.amount)
    return _nothing


def _twin(swarm: Swarm, fault: Fault) -> End | None:
    if fault.who in swarm.twins or not swarm.peers[fault.who].alive:
        return None
    swarm.add_twin(fault.who)
    return partial(swarm.end_twin, fault.who)


# ---------------------------------------------------------------- lines


def _partition(swarm: Swarm, fault: Fault) -> End | None:
    swarm.world.partition(fault.who, fault.other, one_way=fault.kind is Kind.ONE_WAY)
    return partial(swarm.world.heal, fault.who, fault.other)


def _cut_off(swarm: Swarm, fault: Fault) -> End | None:
    others = [name for name in sorted(swarm.peers) if name != fault.who]
    if fault.kind is Kind.CUT_OFF:
        others.append(MASTER)
    for other in others:
        swarm.world.partition(fault.who, other)

    def heal() -> None:
        for other in others:
            swarm.world.heal(fault.who, other)

    return heal


def _cut(swarm: Swarm, fault: Fault) -> End | None:
    swarm.world.cut(fault.who, fault.other)
    return _nothing


def _lane(swarm: Swarm, fault: Fault) -> End | None:
    swarm.world.corrupt_next_lane_frame(fault.who, fault.other)
    return _nothing


def _control(swarm: Swarm, fault: Fault) -> End | None:
    swarm.world.corrupt_next_control_message(fault.who, fault.other)
    return _nothing


def _slow_lines(swarm: Swarm, fault: Fault) -> End | None:
    delay_s = fault.amount if fault.kind is Kind.DELAY else None
    rate = fault.amount if fault.kind is Kind.RATE else None
    before = {}
    for other in [*sorted(swarm.peers), MASTER]:
        if other != fault.who:
            line = swarm.world.direction(fault.who, other)
            before[other] = line.delay_s, line.bytes_per_s
            swarm.world.link(fault.who, other, delay_s=delay_s, bytes_per_s=rate)

    def restore() -> None:
        for other, (was_delay_s, was_bytes_per_s) in before.items():
            swarm.world.link(fault.who, other, delay_s=was_delay_s, bytes_per_s=was_bytes_per_s)

    swarm.restore_lines.append(restore)
    return restore


# ---------------------------------------------------------------- the master's disk or database


def _slow_disk(swarm: Swarm, fault: Fault) -> End | None:
    swarm.store.slow_s = fault.amount
    return partial(setattr, swarm.store, "slow_s", 0.0)


def _full_disk(swarm: Swarm, _fault: Fault) -> End | None:
    swarm.store.full = True
    return partial(setattr, swarm.store, "full", False)


def _no_database(swarm: Swarm, fault: Fault) -> End | None:
    assert isinstance(swarm, MastersSwarm)
    swarm.database.cut_off.add(fault.who)
    return partial(swarm.database.cut_off.discard, fault.who)


# ---------------------------------------------------------------- actions of operators


def _join(swarm: Swarm, _fault: Fault) -> End | None:
    newcomers = [name for name in swarm.peers if name.startswith("new")]
    if len(newcomers) >= PEERS_GROWTH_MAX:
        return None
    swarm.add_peer(f"new{len(newcomers)}")
    return _nothing


def _may_leave(swarm: Swarm, name: str) -> bool:
    staying = [each for each in swarm.peers if each not in swarm.left and each != SPARE]
    enough = max(LEFT_MIN, swarm.spec.membership.min_members)
    return (
        len(staying) > enough
        and name not in swarm.left
        and _expendable(swarm, name)
        and not swarm.standstill.stopped(name)
    )


def _leave(swarm: Swarm, fault: Fault) -> End | None:
    if not _may_leave(swarm, fault.who):
        return None
    swarm.leave(fault.who)
    return _nothing


def _kick(swarm: Swarm, fault: Fault) -> End | None:
    if swarm.master is None or not _may_leave(swarm, fault.who):
        return None
    if swarm.standstill.stopped(MASTER):
        return None
    swarm.kick(fault.who)
    return _nothing


def _pause(swarm: Swarm, _fault: Fault) -> End | None:
    if swarm.master is None or swarm.standstill.stopped(MASTER):
        return None
    swarm.pause()
    return swarm.resume


_BEGIN: dict[Kind, Callable[[Swarm, Fault], End | None]] = {
    Kind.CRASH: _crash,
    Kind.FLAP: _flap,
    Kind.TRAINER: _trainer,
    Kind.STALL: _stop,
    Kind.SLEEP: _stop,
    Kind.CLOCK: _clock,
    Kind.PARTITION: _partition,
    Kind.ONE_WAY: _partition,
    Kind.ALONE: _cut_off,
    Kind.CUT_OFF: _cut_off,
    Kind.CUT: _cut,
    Kind.DELAY: _slow_lines,
    Kind.RATE: _slow_lines,
    Kind.LANE: _lane,
    Kind.CONTROL: _control,
    Kind.SLOW_DISK: _slow_disk,
    Kind.FULL_DISK: _full_disk,
    Kind.NO_DATABASE: _no_database,
    Kind.TWIN: _twin,
    Kind.JOIN: _join,
    Kind.LEAVE: _leave,
    Kind.KICK: _kick,
    Kind.PAUSE: _pause,
}
