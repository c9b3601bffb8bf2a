"""Sensitivity of the simulated runs: each test plants a bug in production code, which the runs must find.

Beside each bug is a seed that finds it; other seeds are searched only if it no longer does.

In peers:

    divisor of all           a chunk owner divides by the weight of all contributors, even absent ones
    set not told             a result does not name the contributors missing in it
    successor encodes again  a successor sends other bytes than those that it holds
    dead owner awaited       a member keeps waiting for data from a lost member
    momentum left behind     a fetched copy lacks its outer momentum

In the master:

    commit before record     a commit is sent before its record is on disk
    record forgotten         a restart forgets the last record
    lost not given up        a round keeps waiting for a lost contributor
    manifest not recorded    a commit claims that all contributors are in all chunks
    unready promoted         a peer gets a place before it has the state
    flush not awaited        a repair begins before all members have reported what they hold
    chunks of the dead       a repair leaves a lost member's chunks with it
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import pytest

from holdfast.checkpoint.incoming_fragment import IncomingFragment
from holdfast.collectives.arithmetic import MeanFactors
from holdfast.collectives.chunk_tracker import ChunkTracker
from holdfast.collectives.reduction import Reduction
from holdfast.collectives.result import RoundResult
from holdfast.daemon.master.journal.journal_store import JournalStore
from holdfast.daemon.master.journal.journal_writer import JournalWriter
from holdfast.membership.master import places as places_rules
from holdfast.membership.master.rounds.attempt import Attempt
from holdfast.membership.master.rounds.outcome import ReductionOutcome
from holdfast.membership.master.state.journal import JournalRecord, RoundCommitted
from holdfast.membership.master.state.roster import Member, Roster
from holdfast.protocol.messages import FragmentHead, Repair
from holdfast.simulation.batch import broken_by
from holdfast.simulation.scenario import Scenario
from tests.planting import Bugs, Note, Patch, first_that_shows, what_shows

SEEDS_MAX = 500

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
        waiting = [m for m in roster if m.peer not in places and m.layout is not None]
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


def shows(seed: int) -> str:
    return broken_by(Scenario.of(seed))


@pytest.mark.fault(
    "somebody is lost at any instant of a reduction: owner, heir, two at once, cut off, stalled"
)
@pytest.mark.planted
@pytest.mark.timeout(600)  # a search, on busy cores
@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_shows(name: str, monkeypatch: Patch, record_property: Note) -> None:
    BUGS[name](monkeypatch)
    search = partial(first_that_shows, shows, range(SEEDS_MAX))
    assert what_shows(BUGS.seeds.get(name), shows, search, record_property) is not None


def test_every_bug_is_listed_above() -> None:
    assert __doc__ is not None
    listed = [line for line in __doc__.splitlines() if line.startswith("    ")]
    assert len(BUGS) == len(listed) >= 10
    for name in BUGS:
        assert any(line.startswith(f"    {name} ") for line in listed)
