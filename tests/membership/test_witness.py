"""The model itself, where a search has found that it demanded what the design does not promise.

Each of these conversations is right, and once made the witness object. That it still objects to what is
wrong is what ``test_planted_bugs`` is for.
"""

from __future__ import annotations

from holdfast.membership.master.coordinator import Grant
from holdfast.membership.master.rounds.attempt import Attempt
from holdfast.membership.master.rounds.round import RoundPhase
from holdfast.membership.master.state.journal import PlaceTaken, RunRewound
from holdfast.protocol.messages import ReduceFailed, Role
from tests.membership.model import DEADLINE_S, ModelPeer, World
from tests.membership.witness import hashed

GRANTS = (
    Grant(Role.CONTRIBUTOR, founder=True),
    Grant(Role.CONTRIBUTOR),
    Grant(Role.CONTRIBUTOR),
    Grant(Role.CONTRIBUTOR),
    Grant(Role.SPARE),
)


def started(min_members: int = 1, rewind_s: int = 0, fragments: int = 2) -> World:
    """Everybody is in sync; a reduction of four, to which the spare listens, is under way."""
    toml = (
        f"[membership]\nmin_members = {min_members}\ndeadline_s = {DEADLINE_S}\ngrace_s = 2.0\n"
        f"rewind_s = {rewind_s}\n"
    )
    world = World(toml, fragments, GRANTS)
    for peer in world.peers:
        world.attach(peer)
    everybody(world, 4)
    attempt_of(world, 2)
    return world


def everybody(world: World, times: int = 1) -> None:
    for _ in range(times):
        for peer in world.peers:
            world.work(peer)


def attempt_of(world: World, number: int) -> Attempt:
    round_ = world.master.scheduler.rounds[number]
    assert round_.phase is RoundPhase.REDUCING
    return round_.running()


def damage(peer: ModelPeer, fragment: int) -> None:
    held = peer.state[fragment]
    assert held is not None
    peer.state[fragment] = (held[0], hashed("damaged", held))
    peer.corrupt.add(fragment)


def test_who_fetches_a_fragment_may_still_hold_another_one_damaged() -> None:
    """Bits flip after the peer has said what it holds: the master hears of it with the next report."""
    world = started()
    joiner, history = world.peers[3], world.master.context.history
    world.call(world.master.pause)
    everybody(world, 4)
    assert not world.master.scheduler.rounds
    before = list(history.versions)
    world.detach(joiner)
    world.call(world.master.resume)  # opens one round
    world.call(world.master.pause)
    everybody(world, 4)
    (stale,) = (f for f in (0, 1) if history.versions[f] != before[f])
    world.attach(joiner)
    damage(joiner, 1 - stale)
    world.call(world.master.resume)
    count = len(world.journal)
    for _ in range(10):
        everybody(world)
        if PlaceTaken(joiner.peer) in world.journal[count:]:
            break
    else:
        raise AssertionError("it was never in sync")
    assert joiner.corrupt == {1 - stale}
    world.calm_down()


def test_what_a_listener_held_is_gone_with_it() -> None:
    """The listener alone has a lost owner's result, reports it, and dies before the repair."""
    world = started()
    owner, listener = world.peers[3], world.peers[4]
    world.detach(owner)
    attempt = attempt_of(world, 2)
    assert attempt.flushing
    world.work(listener)
    assert any(attempt.held[listener.peer])
    world.restart_peer(listener, keep_state=False)
    everybody(world)
    assert attempt.number == 2, "repaired: a survivor has made the chunk anew"
    world.calm_down()


def test_the_next_master_counts_repairs_from_the_order_on() -> None:
    """The one before died between a repair's record and its messages: nobody obeys that repair."""
    world = started()
    first, last = world.peers[0], world.peers[4]
    world.detach(first)
    world.crash_after = 2
    everybody(world)
    assert world.term == 2
    assert (2, 2) not in world.witness.orders
    for peer in world.peers:
        if peer is not last:
            world.attach(peer)
    world.deliver(first)
    attempt = first.reducing[2].attempt
    first.reducing[2].lost = True
    first.message_queue.append(ReduceFailed(2, attempt, (last.peer,), False, "?"))
    world.flush(first)
    world.attach(last)
    everybody(world)
    assert attempt_of(world, 2).number == 2
    world.calm_down()


def test_one_holder_of_an_older_state_is_enough_to_go_back() -> None:
    """``min_members`` must be here, not hold it: they copy it, and its roots are the journal's."""
    world = started(min_members=2, rewind_s=15)
    stale = world.peers[2]
    world.detach(stale)
    before = world.master.context.history.commit_count
    while world.master.context.history.commit_count == before:
        everybody(world)
    for peer in world.peers:
        if peer.connected:
            world.restart_peer(peer, keep_state=False)
    world.attach(stale)
    world.attach(world.peers[3])
    everybody(world)
    world.wait(20.0)
    assert any(isinstance(record, RunRewound) for record in world.journal)
    world.calm_down()
