"""Records: what they amount to, that they survive the disk, and what a damaged journal does."""

from __future__ import annotations

import msgpack
import pytest

from holdfast.membership.master.state.history import ADMITTED_MAX, ROOTS_KEPT_MAX, RunHistory
from holdfast.membership.master.state.journal import (
    RECORDS,
    DataKnown,
    JournalRecord,
    LeasesReserved,
    MastersKnown,
    PeerAdmitted,
    PeerDemoted,
    PeerRevoked,
    PlaceTaken,
    PlaceVacated,
    RootKnown,
    RoundCommitted,
    RoundNumbered,
    RoundOrdered,
    RunCreated,
    RunFinished,
    RunFounded,
    RunPaused,
    RunRewound,
    SpecChanged,
    TermStarted,
    VersionAdopted,
)
from holdfast.membership.master.state.roster import Detector
from holdfast.membership.master.state.round_schedule import (
    RETRY_S,
    RETRY_S_MAX,
    Backoff,
    due_step,
    moved_to,
    next_fragment,
)
from holdfast.membership.peer.trainer_control import next_boundary
from holdfast.protocol import messages as m
from holdfast.protocol.errors import LocalProtocolError
from holdfast.protocol.wire import from_plain, to_plain
from tests.membership.table import DIGEST, LAYOUT, LINEAGE, A, head_of, started

COMMIT = m.Commit(3, 1, 0, 0, 100, (m.Contributor(A, 10, 0.5),), DIGEST)
PLAN = m.Plan(1024, (m.OwnerRun(A, 1),), "fp32", "fp32")
ORDER = m.Reduce(3, 1, 0, 0, 1, (m.Contributor(A, 10, 0.5),), (A,), PLAN)
FOUNDING = RunFounded(LAYOUT, (m.FragmentSize(16, 16, 0),), LINEAGE, (head_of(0, 0),))
EXAMPLES: list[JournalRecord] = [
    RunCreated("ab" * 16, "[run]\n"),
    TermStarted(1),
    PeerAdmitted(A, "a", 1, 2**62),
    FOUNDING,
    PlaceTaken(A),
    DataKnown(10_007),
    LeasesReserved(4_096),
    RoundNumbered(3),
    RoundOrdered(ORDER, 120, (m.Ready(3, 10, 1.0, DIGEST, 120),)),
    RoundCommitted(COMMIT),
    RootKnown(head_of(0, 1)),
    PlaceVacated(A),
    PeerRevoked(A, "because"),
    PeerDemoted(A, False),
    RunPaused(True),
    MastersKnown(("master:1", "standby:1")),
    SpecChanged("[run]\n"),
    VersionAdopted(head_of(0, 2), 120),
    RunRewound((head_of(0, 2),)),
    RunFinished(3),
]


def test_every_kind_of_record_survives_the_disk() -> None:
    assert {type(record) for record in EXAMPLES} == set(RECORDS.values())
    for record in EXAMPLES:
        stored = msgpack.packb([type(record).__name__, to_plain(record)])
        name, plain = msgpack.unpackb(stored)
        assert from_plain(RECORDS[name], plain) == record


def test_what_the_records_amount_to() -> None:
    history = RunHistory.replay(EXAMPLES)
    assert (history.run_id, history.masters.term) == ("ab" * 16, 1)
    assert history.head(0) == head_of(0, 2)
    assert (history.commit_count, history.step, history.schedule.last_round) == (2, 120, 3)
    assert (history.schedule.next_round, history.members.next_number) == (4, 2)
    assert history.commits == {}, "an adopted version has none that we know"
    assert history.masters.addresses == ("master:1", "standby:1")
    assert (history.members.places, history.members.vacancies) == (set(), 1)
    assert history.members.revoked == {A: "because"}
    assert history.paused
    assert history.finished


def test_replay_equals_the_live_history() -> None:
    table = started("a" * 32, "b" * 32, spares=["c" * 32], fragments=2)
    for _ in range(3):
        table.commit("a" * 32, "b" * 32, others=["c" * 32])
    table.leave("b" * 32)
    assert RunHistory.replay(table.journal) == table.master.context.history


@pytest.mark.parametrize(
    ("record", "words"),
    [
        (FOUNDING, "founded twice"),
        (RoundCommitted(COMMIT), "which is at version 2"),
        (RoundCommitted(m.Commit(4, 1, 7, 0, 100, (), DIGEST)), "fragment 7, which is unknown"),
        (RootKnown(head_of(0, 2, DIGEST)), "two roots for version 2"),
    ],
)
def test_a_journal_that_contradicts_itself_is_refused(record: JournalRecord, words: str) -> None:
    history = RunHistory.replay(EXAMPLES)
    with pytest.raises(LocalProtocolError, match=words):
        history.apply(record)


def test_only_so_many_roots_and_numbers_are_kept() -> None:
    history = RunHistory.replay([FOUNDING])
    for version in range(3 * ROOTS_KEPT_MAX):
        history.apply(RoundCommitted(m.Commit(version + 1, 1, 0, version, 1, (), DIGEST)))
        history.apply(RootKnown(head_of(0, version + 1)))
    assert sorted(history.roots[0]) == list(range(2 * ROOTS_KEPT_MAX + 1, 3 * ROOTS_KEPT_MAX + 1))
    for number in range(ADMITTED_MAX + 5):
        history.apply(PeerAdmitted(f"{number:032x}", "", number, 0))
    assert len(history.members.admitted) == ADMITTED_MAX
    assert history.members.next_number == ADMITTED_MAX + 5


def test_the_schedule_spreads_fragments_evenly() -> None:
    assert [due_step(fragment, 0, 100, 3) for fragment in range(3)] == [33, 66, 100]
    assert due_step(0, 1, 100, 3) == 133
    assert [due_step(0, turn, 1, 1) for turn in range(3)] == [1, 2, 3]


@pytest.mark.parametrize(
    ("rounds", "fragments", "sync_every"), [(12, 4, 20), (7, 3, 30), (2, 3, 9)]
)
def test_a_run_with_an_end_takes_everything_in_at_its_last_step(
    rounds: int, fragments: int, sync_every: int
) -> None:
    turns = [divmod(number, fragments) for number in range(rounds)]
    free = [due_step(part, turn, sync_every, fragments) for turn, part in turns]
    end = rounds * sync_every // fragments
    steps = [due_step(part, turn, sync_every, fragments, end) for turn, part in turns]
    last = max(0, rounds - fragments)
    assert steps[:last] == free[:last]
    assert set(steps[last:]) == {free[-1]}


@pytest.mark.parametrize(
    ("turns", "before", "after", "steps"),
    [([71], 40, 200, [3000, 3200]), ([2], 500, 120, [1560, 1680]), ([1] * 3, 7, 20, [13, 20])],
)
def test_the_next_round_keeps_its_step_when_sync_every_changes(
    turns: list[int], before: int, after: int, steps: list[int]
) -> None:
    moved, count = moved_to(turns, before, after, 0), len(turns)
    slots = [divmod(sum(turns) + number, count) for number in range(2)]
    assert steps == [due_step(part, turn, after, count, 0, moved) for turn, part in slots]
    assert next_boundary(steps[0], after, count) == steps[1], "peers set their step limits so"


def test_who_is_due_next_is_no_turn_ahead_of_anybody() -> None:
    assert next_fragment([0, 0, 0], ()) == 0
    assert next_fragment([0, 0, 0], {0}) == 1
    assert next_fragment([1, 0, 0], {1}) == 2
    assert next_fragment([1, 0, 1], {1}) == 0, "its second round, while another has its first"
    assert next_fragment([2, 0, 1], {1}) is None
    assert next_fragment([0], {0}) is None


def test_back_off_is_bounded_and_ends_with_a_commit() -> None:
    backoff = Backoff()
    waits = []
    for _ in range(100):
        backoff.aborted(0.0)
        waits.append(backoff.until_s)
    assert waits[:3] == [1.0, 2.0, 4.0]
    assert waits[-1] == RETRY_S_MAX
    backoff.aborted(0.0, failed=False)
    assert backoff.until_s == RETRY_S
    backoff.committed()
    assert backoff.until_s < 0


def test_any_sign_of_life_counts_until_the_deadline() -> None:
    detector = Detector(10.0)
    detector.heard("a", 0.0)
    detector.heard("b", 5.0)
    assert detector.next_deadline_s() == 10.0
    assert detector.silent(9.9) == []
    assert detector.silent(10.0) == ["a"]
    detector.heard("a", 11.0)
    assert detector.silent(15.0) == ["b"]
    detector.forget("b")
    assert detector.silent(20.0) == []
