"""Sensitivity of the simulated runs: each test plants a bug in production code, which the runs must
find.

Beside each bug is a seed that finds it; other seeds are searched only if it no longer does.

In peers:

    divisor of all           a chunk owner divides by the weight of absent contributors, too
    set not told             a result does not name the contributors missing in it
    successor encodes again  a successor sends other bytes than those that it holds
    dead owner awaited       a member keeps waiting for data from a lost member
    momentum left behind     a fetched copy lacks its outer momentum
    posted twice             who is invited again posts again, and either update is taken

In the master:

    commit before record     a commit is sent before its record is on disk
    record forgotten         a restart forgets the last record
    lost not given up        a round keeps waiting for a lost contributor
    manifest not recorded    a commit claims that all contributors are in all chunks
    unready promoted         a peer gets a place before it has the state
    flush not awaited        a repair begins before all members have reported what they hold
    chunks of the dead       a repair leaves a lost member's chunks with it

About the rules of rounds:

    commit before journal    a decision's messages precede its record
    impatient                a result is committed when all survivors but one have it
    waits for the dead       a lost contributor stays in the attempt
    joiner left out          a joiner is not among the receivers, so it cannot replay
    never finishes stalls    an attempt in which nothing moves goes on for ever
    no way back              a healed contributor is not asked again
    rounds reused            round numbers start over with the master
    dead successors          a lost owner's chunks stay where they are
    same number              a rerun with fewer contributors goes on under the old number
    below the quorum         a result that too few are left to hold is committed

About members and copies:

    transfer too early       a joiner fetches while a reduction runs without it
    pins too late            a copy is ordered before its donors are told to pin
    donor without state      a donor is asked for what it is still fetching itself
    first root wins          a root is agreed when one member has reported it
    forgets the late         a commit that is never applied is not missed
    deaf to silence          no member is ever found silent
    views reused             view numbers start over with the master
    vacancies lost           a place that is given up is never filled
    back at once             the run goes back although a holder of the newest version may return
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import pytest
from attrs import evolve

from holdfast.checkpoint.incoming_fragment import IncomingFragment
from holdfast.collectives.arithmetic import MeanFactors
from holdfast.collectives.chunk_tracker import ChunkTracker
from holdfast.collectives.reduction import Reduction
from holdfast.collectives.result import RoundResult
from holdfast.daemon.master.journal.journal_store import JournalStore
from holdfast.daemon.master.journal.journal_writer import JournalWriter
from holdfast.membership.master import places as places_rules
from holdfast.membership.master.lineage import Lineage
from holdfast.membership.master.removal import Removal
from holdfast.membership.master.rounds import (
    reduction_driver,
    reduction_orders,
    repair,
    round_scheduler,
)
from holdfast.membership.master.rounds.attempt import Attempt, ReductionOutcome
from holdfast.membership.master.rounds.round import Round
from holdfast.membership.master.state import journal, roster
from holdfast.membership.master.state.context import Context
from holdfast.membership.master.state.history import RunHistory
from holdfast.membership.master.state.journal import JournalRecord, RoundCommitted, RoundNumbered
from holdfast.membership.master.state.master_effects import Effect, RecordDurably, SendMessage
from holdfast.membership.master.state.roster import Detector, Member, Roster
from holdfast.membership.master.sync import donor_choice, state_sync
from holdfast.membership.peer.round_course import RoundCourse
from holdfast.protocol.messages import Donate, FragmentHead, Open, Posted, Repair
from holdfast.simulation.batch import broken_by
from holdfast.simulation.scenario import RunKind, Scenario
from holdfast.simulation.witnessed_services import promoted
from tests.planting import Bugs, Note, Patch

SEEDS_MAX = 1_100

BUGS = Bugs()
bug = BUGS.named


# ---------------------------------------------------------------- in peers


@bug("divisor of all", seed=7)
def _(patch: Patch) -> None:
    original = MeanFactors.of

    def of(contributors: Any, present: Sequence[bool] | None = None) -> MeanFactors:
        return MeanFactors(original(contributors, present).factors, original(contributors).divisor)

    patch.setattr(MeanFactors, "of", of)


@bug("set not told", seed=7)
def _(patch: Patch) -> None:
    original = RoundResult.made

    def made(self: RoundResult, index: int, length: int, present: Sequence[bool]) -> None:
        original(self, index, length, [True] * len(present))

    patch.setattr(RoundResult, "made", made)


@bug("successor encodes again", seed=94)
def _(patch: Patch) -> None:
    original = Reduction.repair

    def repair(self: Reduction, order: Repair) -> None:
        for assignment in order.assignments:
            if assignment.from_scratch or assignment.owner != self._context.me:
                continue
            first = assignment.first_chunk
            for index in range(first, first + assignment.chunk_count):
                other = bytearray(self._context.result.room(index))
                other[0] ^= 1
                self._context.result._rooms[index] = memoryview(other)
        original(self, order)

    patch.setattr(Reduction, "repair", repair)


@bug("dead owner awaited", seed=29)
def _(patch: Patch) -> None:
    patch.setattr(ChunkTracker, "shut_out", lambda self, lost: [])


@bug("momentum left behind", seed=0)
def _(patch: Patch) -> None:
    original = IncomingFragment.finish

    def finish(self: IncomingFragment) -> FragmentHead:
        fragment, head = self._fragment, original(self)
        fragment.parts.momentum[:] = 0
        return head

    patch.setattr(IncomingFragment, "finish", finish)


@bug("posted twice", seed=600_149)
def _(patch: Patch) -> None:
    def open_again(course: RoundCourse, message: Open) -> Any:
        known = course.rounds.get(message.round)
        if known is not None and message.at_step >= known.at_step:
            known.offer = 0
        return open_round(course, message)

    def posted(course: RoundCourse, message: Posted, norm: float | None, why: str) -> Any:
        known = course.rounds.get(message.round)
        offer = message.offer if known is None else known.offer
        return take(course, evolve(message, offer=offer), norm, why)

    open_round, take = RoundCourse.open, RoundCourse.posted
    patch.setattr(RoundCourse, "open", open_again)
    patch.setattr(RoundCourse, "posted", posted)


# ---------------------------------------------------------------- in the master


@bug("commit before record", seed=6)
def _(patch: Patch) -> None:
    original = JournalWriter.write
    kept_by = WeakKeyDictionary[JournalWriter, list[JournalRecord]]()

    async def journal(self: JournalWriter, record: JournalRecord) -> None:
        kept = kept_by.setdefault(self, [])
        while kept:
            await original(self, kept.pop(0))
        if isinstance(record, RoundCommitted):
            kept.append(record)
        else:
            await original(self, record)

    patch.setattr(JournalWriter, "write", journal)


@bug("record forgotten", seed=1)
def _(patch: Patch) -> None:
    original = JournalStore.records

    def records(self: JournalStore) -> list[JournalRecord]:
        found = original(self)
        commits = [at for at, each in enumerate(found) if isinstance(each, RoundCommitted)]
        return found[: commits[-1]] + found[commits[-1] + 1 :] if commits else found

    patch.setattr(JournalStore, "records", records)


@bug("lost not given up", seed=4)
def _(patch: Patch) -> None:
    patch.setattr(Attempt, "lose", lambda *_: None)


@bug("manifest not recorded", seed=7)
def _(patch: Patch) -> None:
    original = Attempt.agreed

    def agreed(self: Attempt, roster: Roster) -> ReductionOutcome | None:
        outcome = original(self, roster)
        return None if outcome is None else ReductionOutcome(outcome.digest, ())

    patch.setattr(Attempt, "agreed", agreed)


@bug("unready promoted", seed=3)
def _(patch: Patch) -> None:
    def first_that_waits(
        roster: Roster,
        places: set[str],
        vacancies: int,
        place_count: int,
        versions: list[int],
        now_s: float,
    ) -> Member | None:
        if place_count and len(places) >= place_count:
            return None
        waiting = [m for m in roster if m.peer not in places and m.trainer.running]
        return min(waiting, key=lambda member: member.number, default=None)

    patch.setattr(places_rules, "next_to_seat", first_that_waits)


@bug("flush not awaited", seed=39)
def _(patch: Patch) -> None:
    patch.setattr(Attempt, "unheard", lambda self: [])


@bug("chunks of the dead", seed=20)
def _(patch: Patch) -> None:
    original = Attempt.begin_repair

    def begin_repair(self: Attempt, assignments: Any, now_s: float) -> None:
        original(self, (), now_s)

    patch.setattr(Attempt, "begin_repair", begin_repair)


# ---------------------------------------------------------------- in the master's rules


def reorder(patch: Patch, last: Callable[[Effect], bool]) -> None:
    """The effects that ``last`` names come after all others."""
    original = Context.take_effects

    def take_effects(self: Context) -> list[Effect]:
        return sorted(original(self), key=last)

    patch.setattr(Context, "take_effects", take_effects)


@bug("commit before journal", seed=27)
def _(patch: Patch) -> None:
    reorder(patch, lambda e: isinstance(e, RecordDurably) and isinstance(e.record, RoundCommitted))


@bug("impatient", RunKind.HOSTILE, seed=3)
def _(patch: Patch) -> None:
    original = Attempt.unreported

    def unreported(self: Attempt) -> list[str]:
        missing = original(self)
        return [] if len(self.survivors()) > 2 and len(missing) == 1 else missing

    patch.setattr(Attempt, "unreported", unreported)


@bug("waits for the dead", seed=3)
def _(patch: Patch) -> None:
    patch.setattr(Round, "forget", lambda self, peer, why: None)


@bug("joiner left out", seed=6)
def _(patch: Patch) -> None:
    original = reduction_orders.ReductionOrders._receivers

    def receivers(
        self: reduction_orders.ReductionOrders, adding: set[str], fragment: int
    ) -> tuple[str, ...]:
        members = self.context.roster.members
        all_ = original(self, adding, fragment)
        return tuple(p for p in all_ if p in adding or members[p].in_sync)

    patch.setattr(reduction_orders.ReductionOrders, "_receivers", receivers)


@bug("never finishes stalls", RunKind.HOSTILE, seed=0)
def _(patch: Patch) -> None:
    patch.setattr(
        reduction_driver.ReductionDriver, "_stall_limit_s", lambda self, attempt: math.inf
    )


@bug("no way back", seed=0)
def _(patch: Patch) -> None:
    original = round_scheduler.RoundScheduler._invite

    def invite(self: round_scheduler.RoundScheduler, round_: Round) -> None:
        if not round_.answers.invited:
            original(self, round_)

    patch.setattr(round_scheduler.RoundScheduler, "_invite", invite)


@bug("rounds reused", RunKind.FAILOVER, seed=3)
def _(patch: Patch) -> None:
    original = RunHistory.replay

    def replay(records: Any) -> RunHistory:
        return original([r for r in records if not isinstance(r, RoundNumbered)])

    patch.setattr(RunHistory, "replay", replay)


@bug("dead successors", seed=20)
def _(patch: Patch) -> None:
    patch.setattr(repair, "plan_repair", lambda *_: ())


@bug("same number", RunKind.HOSTILE, seed=1)
def _(patch: Patch) -> None:
    original = reduction_orders.ReductionOrders.begin

    def begin(self: reduction_orders.ReductionOrders, round_: Round, contributors: Any) -> None:
        if round_.attempt is not None:
            round_.attempt.number = round_.attempt.flush.number = round_.attempt.number - 1
        original(self, round_, contributors)

    patch.setattr(reduction_orders.ReductionOrders, "begin", begin)


@bug("below the quorum", seed=4)
def _(patch: Patch) -> None:
    patch.setattr(
        reduction_orders.ReductionOrders,
        "_too_few",
        lambda self, round_: not round_.running().survivors(),
    )


@bug("transfer too early", seed=11)
def _(patch: Patch) -> None:
    patch.setattr(round_scheduler.RoundScheduler, "excluded", lambda self, member, fragment: False)


@bug("pins too late", seed=0)
def _(patch: Patch) -> None:
    reorder(patch, lambda e: isinstance(e, SendMessage) and isinstance(e.message, Donate))


@bug("donor without state", seed=0)
def _(patch: Patch) -> None:
    def donors(choice: Any, member: roster.Member, _head: Any) -> list[roster.Member]:
        return [m for m in choice._members if m is not member and m.copies]

    patch.setattr(donor_choice.DonorChoice, "choose", donors)


@bug("first root wins", RunKind.HOSTILE, seed=18)
def _(patch: Patch) -> None:
    original = state_sync.StateSync.decide

    def decide(
        self: state_sync.StateSync, fragment: int, version: int, *, force: bool = False
    ) -> bytes:
        return original(self, fragment, version, force=True)

    patch.setattr(state_sync.StateSync, "decide", decide)


@bug("forgets the late", seed=6)
def _(patch: Patch) -> None:
    patch.setattr(
        state_sync.StateSync, "late", lambda self, member, fragment, why, version=None: None
    )
    patch.setattr(state_sync.StateSync, "next_deadline_s", lambda self: math.inf)


@bug("deaf to silence", seed=85)
def _(patch: Patch) -> None:
    patch.setattr(Detector, "silent", lambda self, now_s: [])
    patch.setattr(Detector, "next_deadline_s", lambda self: math.inf)


@bug("views reused", seed=1)
def _(patch: Patch) -> None:
    patch.setattr(roster, "VIEWS_PER_TERM", 0)


@bug("vacancies lost", seed=3)
def _(patch: Patch) -> None:
    original = Removal.remove

    def remove(self: Removal, member: Any, why: str, *, keep_place: bool = False) -> None:
        original(self, member, why, keep_place=True)

    patch.setattr(Removal, "remove", remove)


@bug("back at once", seed=1_017)
def _(patch: Patch) -> None:
    patch.setattr(Lineage, "_back_s", lambda self, since_s: since_s)


def shows(kinds: Sequence[RunKind], seed: int) -> str:
    return broken_by(Scenario.of(seed, kind=kinds[0] if kinds else RunKind.PLAIN))


@pytest.mark.fault(
    "somebody is lost at any instant of a reduction: owner, heir, two at once, cut off, stalled"
)
@pytest.mark.planted
@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_shows(name: str, monkeypatch: Patch, record_property: Note) -> None:
    shown = partial(shows, BUGS.shown_by[name])
    assert BUGS.is_found(name, monkeypatch, record_property, shown, range(SEEDS_MAX))


def test_who_gets_a_place_before_a_commit_need_not_have_its_result() -> None:
    commit: Any = None
    seated, committed = map(RecordDurably, (journal.PlaceTaken("b"), RoundCommitted(commit, ())))
    assert promoted([committed, seated]) == ["b"]
    assert promoted([seated, committed]) == []


def test_every_bug_is_listed_above() -> None:
    assert BUGS.are_listed(__doc__)
