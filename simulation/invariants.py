"""Invariants that must hold after every call of the master."""

from __future__ import annotations

import math

from ..membership.master.coordinator import Coordinator
from ..membership.master.leases import Leases
from ..membership.master.rounds.round import RoundPhase
from ..membership.master.state.history import ROOTS_KEPT_MAX
from ..membership.master.state.roster import RECEIVED_STATES, CopyState, can_contribute
from ..protocol.messages import MEMBERS_MAX


def check_invariants(coordinator: Coordinator) -> None:
    """Raise ``AssertionError`` if the machine's state contradicts itself."""
    assert not coordinator.context.out, "effects that nobody took"
    _check_roster(coordinator)
    _check_copies(coordinator)
    _check_rounds(coordinator)
    check_leases(coordinator.leases)


def check_leases(leases: Leases) -> None:
    """Raise ``AssertionError`` unless each position has exactly one state."""
    data = leases.context.history.data
    parts = [data.spent, leases.free, *leases.held.values()]
    parts += [kept.ranges for kept in leases.kept.values()]
    reached = 0
    for start, stop in sorted(pair for part in parts for pair in part):
        assert start >= reached, "a lease is in two states"
        assert start == reached, "a lease is lost"
        reached = stop
    assert reached == leases.cursor, "a lease is lost"
    assert leases.cursor <= data.reserved, "a lease that no record reserves"


def _check_roster(coordinator: Coordinator) -> None:
    context = coordinator.context
    history, roster = context.history, context.roster
    assert len(roster) <= MEMBERS_MAX
    assert context.detector.watched() == set(roster.members)
    if not coordinator.adoption.waiting:
        assert [i.peer for i in roster.view_members] == [m.peer for m in roster.by_number()]
    numbers = [member.number for member in roster]
    assert len(set(numbers)) == len(numbers), "two members with one number"
    assert all(number < history.members.next_number for number in numbers)
    assert not any(history.members.is_out(peer) for peer in roster.members), (
        "somebody is in who is out"
    )
    assert history.members.places <= set(roster.members) | coordinator.state_sync.missing
    places = context.spec.membership.contributors
    assert not places or len(history.members.places) <= places, "more contributors than places"
    assert history.members.vacancies >= 0
    for member in roster:
        assert len(member.copies) == history.fragment_count
        received = all(copy.state in RECEIVED_STATES for copy in member.copies)
        assert not member.in_sync or (member.copies and received), "in sync without the state"


def _check_copies(coordinator: Coordinator) -> None:
    context = coordinator.context
    history = context.history
    for member in context.roster:
        for fragment, copy in enumerate(member.copies):
            assert copy.version <= history.versions[fragment]
            fetching = copy.state is CopyState.FETCHING
            assert fetching == (copy.fetch is not None)
            if copy.fetch is not None:
                source = copy.fetch.donors or member.has_on_disk(copy.fetch.head)
                assert source, "a transfer without donors"
                assert member.peer not in copy.fetch.donors
                assert set(copy.fetch.donors) <= set(context.roster.members)
                assert copy.fetch.head.version <= history.versions[fragment]
            if copy.state is CopyState.HELD:
                known = history.root(fragment, copy.version)
                assert known in (b"", copy.root), "held, but with another root"
            behind = copy.version < history.versions[fragment]
            if copy.state in RECEIVED_STATES and behind:
                assert not math.isinf(copy.due_s), "behind, and nobody waits for it"
    for roots in history.roots:
        assert len(roots) <= ROOTS_KEPT_MAX


def _check_rounds(coordinator: Coordinator) -> None:
    context = coordinator.context
    history, roster = context.history, context.roster
    for round_ in coordinator.scheduler.rounds.values():
        assert round_.phase in (RoundPhase.OPEN, RoundPhase.REDUCING)
        assert round_.number < history.schedule.next_round
        assert round_.version == history.versions[round_.fragment]
        if round_.phase is RoundPhase.OPEN:
            assert round_.answers.invited <= set(roster.members)
            for member in roster:
                invited = member.peer in round_.answers.invited
                assert invited or not can_contribute(member, history.members.places)
            continue
        attempt = round_.running()
        assert set(attempt.peers()) <= set(attempt.receivers)
        survivors = attempt.survivors()
        assert survivors, "a reduction without contributors"
        assert set(survivors) <= set(roster.members), "a reduction waits for somebody who is gone"
        refused = round_.distrust.refused
        assert not refused.intersection(attempt.peers()), "a refused update is still in"
        assert len(survivors) >= coordinator.scheduler.round_table.quorum(round_.original_count)
        if not attempt.unreported() and attempt.inquiries.current is not None:
            assert attempt.unanswered(), "all have answered and nothing was decided"
            continue
        if not attempt.unreported():
            look = attempt.audit
            assert look is not None, "everybody has reported and nothing was decided"
            assert look.open, "everything is checked and nothing was decided"
            checkers = {check.checker for check in look.open.values() if check is not None}
            assert checkers <= set(survivors), "a check waits for somebody who is gone"
            continue
        flush = attempt.flush
        waits = not flush.in_progress or attempt.unheard() or attempt.may_learn_more()
        assert waits, "answered"
        assert not flush.held.keys() & attempt.lost.keys(), "the lost have a say"
        assert attempt.lost.keys() <= flush.shut, "somebody is lost and the attempt goes on"
        assert flush.in_progress or not flush.shut & set(attempt.owners), "the dead own chunks"
        assert len(set(attempt.peers())) == len(attempt.peers())
