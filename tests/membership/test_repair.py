"""Repairs, as conversations: what the master asks for after a loss, and who gets which chunks."""

from __future__ import annotations

import pytest

from holdfast.membership.master.rounds.repair import plan_repair
from holdfast.membership.master.state.journal import RoundCommitted
from holdfast.protocol import messages as m
from tests.membership.table import DIGEST, TEN_SECONDS, A, B, C, D, E, owners_of, reducing, started


@pytest.mark.fault(
    "somebody is lost at any instant of a reduction: owner, heir, two at once, cut off, stalled",
    "the same",
    "its chunks go to others, nothing else is done again",
)
def test_a_chunk_that_a_survivor_holds_is_spread_and_the_others_are_made_again() -> None:
    table = started(A, B, C, spares=[D])
    table.reduce(A, B, C)
    owners_of(table, A, B, B, B, C)
    table.leave(B)
    flush = table.hear(A, m.Flush)
    assert table.hear(D, m.Flush) == flush
    table.hold(flush, A, results=b"\x07")
    table.hears_no(A, m.Repair)  # C has not shut B out yet: a result of B may still reach it
    table.hold(flush, C, results=b"\x10")
    table.hears_no(A, m.Repair)  # the spare may hold chunk 3, which no survivor has
    table.hold(flush, D)
    repair = table.hear(A, m.Repair)
    assert repair.assignments == (
        m.Assignment(1, 2, A, from_scratch=False, lacking=b"\x0e"),  # B, C and the spare D
        m.Assignment(3, 1, C, from_scratch=True, lacking=b"\x00"),
    )
    assert table.hear(C, m.Repair) == table.hear(D, m.Repair) == repair


def test_a_death_while_the_others_are_asked_begins_the_asking_again() -> None:
    table, order = reducing(A, B, C, D, E)
    owners_of(table, A, B, C, D, E)
    table.leave(B)
    first = table.hear(A, m.Flush)
    table.hold(first, A, C, E)
    table.leave(D)
    second = table.hear(A, m.Flush)
    assert second == m.Flush(order.round, first.attempt + 1, (B, D))
    table.hold(first, A, C, E)  # old answers do not count
    table.hears_no(A, m.Repair)
    table.hold(second, A, C, E)
    repair = table.hear(A, m.Repair)
    assert (repair.attempt, repair.lost) == (second.attempt, (B, D))
    assert [a.first_chunk for a in repair.assignments] == [1, 3]


def test_the_death_of_the_repairer_is_repaired_again() -> None:
    table = started(A, B, C, D, E)
    table.reduce(A, B, C, D, E)
    owners_of(table, B, C, D, E, B)
    table.leave(B)
    first = table.repair(A, C, D, E)
    (successor,) = {a.owner for a in first.assignments if a.first_chunk == 0}
    table.leave(successor)
    left = [peer for peer in (A, C, D, E) if peer != successor]
    flush = table.hear(left[0], m.Flush)
    if flush.lost == (B,):
        flush = table.hear(left[0], m.Flush)
    assert flush.lost == (B, successor)
    table.hold(flush, *left)
    again = table.hear(left[0], m.Repair)
    assert 0 in [a.first_chunk for a in again.assignments]
    assert successor not in [a.owner for a in again.assignments]


def test_who_does_not_answer_a_flush_is_removed() -> None:
    table = started(A, B, C, D, E, toml=TEN_SECONDS)
    table.reduce(A, B, C, D, E)
    table.leave(B)
    table.hold(table.hear(A, m.Flush), A, C, E)
    table.wait(10.0, A, C, D, E)
    assert table.dropped(D) is m.RefusalCode.LAGGING
    assert table.hear(A, m.Flush).lost == (B, D)


def test_a_spare_that_does_not_answer_a_flush_holds_up_nobody_for_long() -> None:
    table = started(A, B, C, spares=[D], toml=TEN_SECONDS)
    table.reduce(A, B, C)
    owners_of(table, A, B, C)
    table.leave(B)
    table.hold(table.hear(A, m.Flush), A, C)
    table.hears_no(D, m.Repair)
    assert table.master.next_deadline_s() <= table.now_s + 1.0
    table.wait(1.0, A, C, D)
    table.hear(D, m.Repair)


def test_a_spare_is_not_waited_for_when_survivors_hold_everything() -> None:
    table = started(A, B, C, spares=[D])
    table.reduce(A, B, C)
    owners_of(table, B, B, C)
    table.leave(B)
    flush = table.hear(A, m.Flush)
    table.hold(flush, A, results=b"\x01")
    table.hold(flush, C, results=b"\x02")
    assert [a.from_scratch for a in table.hear(D, m.Repair).assignments] == [False, False]


def test_what_only_a_spare_holds_is_spread_by_the_spare() -> None:
    table, order = reducing(A, B, C, spares=[D])
    owners_of(table, B, B, C)
    table.leave(B)
    flush = table.hear(A, m.Flush)
    table.hold(flush, A, C)
    table.hold(flush, D, results=b"\x02")
    repair = table.hear(A, m.Repair)
    assert repair.assignments == (
        m.Assignment(0, 1, A, from_scratch=True, lacking=b"\x00"),
        m.Assignment(1, 1, D, from_scratch=False, lacking=b"\x07"),
    )
    table.leave(D)  # a successor's death is repaired like an owner's
    second = table.hear(A, m.Flush)
    assert second.lost == (B, D)
    table.hold(second, A, results=b"\x03")
    table.hold(second, C)
    repair = table.hear(C, m.Repair)
    repair = table.hear(C, m.Repair)
    assert repair.assignments == (m.Assignment(1, 1, A, from_scratch=False, lacking=b"\x0e"),)
    table.reduced(order, A, C, attempt=repair.attempt)
    table.hear(A, m.Commit)


def test_a_spare_that_cannot_spread_what_it_holds_is_replaced() -> None:
    table, order = reducing(A, B, C, spares=[D])
    owners_of(table, B, A, C)
    table.leave(B)
    flush = table.hear(A, m.Flush)
    table.hold(flush, A, C)
    table.hold(flush, D, results=b"\x01")
    repair = table.hear(A, m.Repair)
    table.forget()
    table.say(D, m.ReduceFailed(order.round, repair.attempt, (), False, "no memory"))
    again = table.hear(A, m.Flush)
    assert again.lost == (B, D)
    table.hears_no(D, m.Flush)
    table.hold(again, A, C)
    repair = table.hear(A, m.Repair)
    assert repair.assignments[0].from_scratch
    table.reduced(order, A, C, attempt=repair.attempt)
    table.applied(order, A, C)
    table.hear(D, m.SyncFragment)


def test_a_spare_that_came_too_late_with_what_it_held_is_synced_again() -> None:
    table, order = reducing(A, B, C, spares=[D], toml=TEN_SECONDS)
    owners_of(table, B, A, C)
    table.leave(B)
    table.hold(table.hear(A, m.Flush), A, C)
    table.wait(1.0, A, C, D)
    repair = table.hear(D, m.Repair)
    assert repair.assignments[0].from_scratch
    table.say(D, m.ReduceFailed(order.round, repair.attempt, (), False, "it holds another result"))
    table.hears_no(A, m.Flush)
    table.reduced(order, A, C, attempt=repair.attempt)
    table.applied(order, A, C)
    table.hear(D, m.SyncFragment)


def test_who_cannot_go_on_is_lost_to_the_round_but_not_to_the_run() -> None:
    table, order = reducing(A, B, C, D)
    table.forget()
    table.say(B, m.ReduceFailed(order.round, 1, (), False, "out of memory"))
    flush = table.hear(A, m.Flush)
    assert flush.lost == (B,)
    table.hears_no(B, m.Flush)
    table.hold(flush, A, C, D)
    repair = table.hear(A, m.Repair)
    table.reduced(order, A, C, D, attempt=repair.attempt)
    assert table.hear(B, m.Commit).round == order.round
    table.applied(order, A, C, D)
    table.hear(B, m.SyncFragment)
    assert B in table.master.context.roster


def test_results_with_equal_digests_and_unlike_manifests_do_not_agree() -> None:
    table, order = reducing(A, B, C, D)
    count = len(table.master.scheduler.rounds[order.round].running().owners)
    some = (m.ContributorRun(b"\x0d", count),)
    for peer, manifest in ((A, ()), (B, some), (C, some), (D, some)):
        table.say(peer, m.Reduced(order.round, 1, DIGEST, manifest))
    table.diagnosed(order, A, B, C, D)
    (record,) = table.records(RoundCommitted)
    assert record.commit.manifest == some
    assert not table.master.context.roster.members[A].in_sync


def test_a_manifest_of_another_round_is_a_violation() -> None:
    table, order = reducing(A, B, C, D)
    count = len(table.master.scheduler.rounds[order.round].running().owners)
    table.say(A, m.Reduced(order.round, 1, DIGEST, (m.ContributorRun(b"\x0f", count + 1),)))
    assert table.dropped(A) is m.RefusalCode.PROTOCOL
    table.say(B, m.Reduced(order.round, 1, DIGEST, (m.ContributorRun(b"\x1f", count),)))
    assert table.dropped(B) is m.RefusalCode.PROTOCOL


def test_a_result_that_fewer_than_the_quorum_hold_is_not_committed() -> None:
    table, order = reducing(A, B, C)
    table.reduced(order, A)
    table.leave(B)
    table.leave(C)
    assert not table.records(RoundCommitted)
    table.hear(A, m.Abort)


def test_a_repair_is_told_to_people() -> None:
    table, order = reducing(A, B, C)
    owners_of(table, A, B, B, B, C)
    table.leave(B)
    flush = table.hear(A, m.Flush)
    status = table.status()
    assert status["why_waiting"] == (
        "the round goes on without b (bbbbbbbb) (a and c still to report the chunks they hold)"
    )
    table.hold(flush, A, results=b"\x02")
    table.hold(flush, C)
    repair = table.hear(A, m.Repair)
    status = table.status()
    (running,) = status["rounds"]
    assert (running["repairs"], running["reruns"]) == (1, 0)
    assert list(running["lost"]) == [B]
    (said,) = [e["text"] for e in status["events"] if "repaired" in e["text"]]
    assert "repaired round 1: b (bbbbbbbb) lost, 3 of 5 chunks taken over by" in said
    assert "2 of them added up again, nothing else rerun" in said
    table.reduced(order, A, C, attempt=repair.attempt)
    status = table.status()
    assert (status["repaired"], status["rerun"]) == (1, 0)
    (past,) = status["past_rounds"]
    assert past["why"] == "committed with 3 contributors, repaired once"


@pytest.mark.fault("it dies at any instant of a reduction")
def test_the_record_of_a_repaired_round_names_what_went_in() -> None:
    """B is in no chunk, C in some: neither counts for more than that anywhere."""
    table, order = reducing(A, B, C, D)
    assert [each.peer for each in order.contributors] == [A, B, C, D]
    weight = order.contributors[0].weight
    owners_of(table, A, B, C, D)
    table.leave(B)
    repair = table.repair(A, C, D)
    manifest = (m.ContributorRun(b"\x0d", 3), m.ContributorRun(b"\x09", 1))
    table.reduced(order, A, C, D, attempt=repair.attempt, manifest=manifest)
    status = table.status()
    (past,) = status["past_rounds"]
    shares = {each["peer"]: each["chunk_share"] for each in past["contributors"]}
    assert shares == {A: 1.0, C: 0.75, D: 1.0}
    assert past["chunk_count"] == 4
    assert past["manifest"] == [
        {"contributors": [0, 1, 2], "weight": 3 * weight, "chunks": [[0, 3]]},
        {"contributors": [0, 2], "weight": 2 * weight, "chunks": [[3, 1]]},
    ]
    assert past["why"] == (
        "committed with 3 contributors (1 of them in a part of the chunks), repaired once"
    )
    assert status["counts"]["contributed"] == 3
    assert status["headline"]["tokens"] == round(2.75 * weight)
    assert list(past["lost"]) == [B]


def test_chunks_that_do_not_exist_are_a_violation() -> None:
    table = started(A, B, C, D)
    table.reduce(A, B, C, D)
    table.leave(B)
    flush = table.hear(A, m.Flush)
    table.say(D, m.Held(flush.round, flush.attempt, bytes(9)))
    assert table.dropped(D) is m.RefusalCode.PROTOCOL


def test_a_result_that_comes_during_the_flush_is_still_committed() -> None:
    table, order = reducing(A, B, C)
    table.reduced(order, A)
    table.leave(B)
    table.reduced(order, C)
    (record,) = table.records(RoundCommitted)
    assert record.commit.attempt == 1


def test_a_loss_that_was_told_before_the_repair_may_be_told_again() -> None:
    table, order = reducing(A, B, C, D, E, toml=TEN_SECONDS)
    table.say(A, m.ReduceFailed(order.round, 1, (D,), False, "reset"))
    table.leave(B)
    repair = table.repair(A, C, D, E)
    table.wait(2.0, A, C, D, E)
    assert D in table.master.context.roster  # under this attempt nobody has complained yet
    table.say(A, m.ReduceFailed(order.round, repair.attempt, (D,), False, "reset"))
    table.wait(1.0, A, C, D, E)
    table.hears_no(A, m.Flush)  # the others may still find the same
    table.wait(4.0, A, C, D, E)
    assert [table.hear(C, m.Flush).lost, table.hear(C, m.Flush).lost] == [(B,), (B, A)]


def test_a_refused_update_is_never_repaired_but_reduced_again_without_it() -> None:
    table, order = reducing(A, B, C, D, E)
    table.forget()
    table.leave(B)
    table.hear(A, m.Flush)
    table.say(A, m.ReduceFailed(order.round, 1, (D,), True, "not finite"))
    assert [c.peer for c in table.hear(A, m.Reduce).contributors] == [A, C, D, E]
    order = table.hear(C, m.Reduce)
    owners_of(table, A, C)
    table.say(C, m.ReduceFailed(order.round, order.attempt, (D,), True, "not finite"))
    again = table.hear(A, m.Reduce)
    assert [c.peer for c in again.contributors] == [A, C, E]
    assert again.attempt > 2


def test_a_spare_gets_from_others_what_a_dead_owner_has_not_sent_it() -> None:
    table, order = reducing(A, B, C, spares=[D])
    owners_of(table, A, B, C)
    table.say(D, m.ReduceFailed(order.round, 1, (B,), False, "reset"))
    table.reduced(order, A, C)
    table.leave(B)
    repair = table.hear(D, m.Repair)
    assert repair.assignments == (m.Assignment(1, 1, A, from_scratch=False, lacking=b"\x0a"),)
    commit = table.hear(D, m.Commit)
    assert (commit.attempt, commit.digest) == (repair.attempt, DIGEST)
    table.say(D, m.Reduced(order.round, repair.attempt, DIGEST))
    table.applied(order, A, C, D)
    table.hears_no(D, m.SyncFragment)


def test_chunks_are_dealt_evenly_and_runs_are_joined() -> None:
    none = dict.fromkeys((A, C), b"\x00")
    assert plan_repair([B] * 4, {B}, [A, C], [A, B, C], none) == tuple(
        m.Assignment(chunk, 1, (A, C)[chunk % 2], from_scratch=True, lacking=b"\x00")
        for chunk in range(4)
    )
    held = {A: b"\x00", C: b"\x0f"}
    assert plan_repair([B] * 4, {B}, [A, C], [A, B, C], held) == (
        m.Assignment(0, 4, C, from_scratch=False, lacking=b"\x03"),
    )


def test_a_member_that_lacks_a_link_takes_over_what_nobody_else_can() -> None:
    held = {A: b"\x01", C: b"\x00"}
    repair = plan_repair([B] * 3, {B}, [A, C], [A, B, C], held, [A])
    assert [(each.first_chunk, each.owner) for each in repair] == [(0, A), (1, C)]


def test_what_the_lost_have_said_about_others_is_void() -> None:
    table, order = reducing(A, B, C, D, toml=TEN_SECONDS)
    table.say(D, *[m.ReduceFailed(order.round, 1, (p,), False, "no link") for p in (A, B, C)])
    for peer in (A, B, C):
        table.say(peer, m.ReduceFailed(order.round, 1, (D,), False, "no link"))
    table.wait(5.0, A, B, C, D)
    flush = table.hear(A, m.Flush)
    assert flush.lost == (D,)
    assert order.round in table.master.scheduler.rounds, "enough are left"
    table.hold(flush, A, B, C)
    table.hear(A, m.Repair)
    table.wait(5.0, A, B, C, D)
    table.hears_no(A, m.Flush)
    assert {A, B, C, D} <= set(table.master.context.roster.members)


def test_who_tells_of_a_loss_that_is_known_already_stays_in_the_round() -> None:
    table, order = reducing(A, B, C, D)
    table.leave(B)
    table.say(A, m.ReduceFailed(order.round, 1, (B,), False, "reset"))
    table.hold(table.hear(A, m.Flush), A, C, D)
    assert table.hear(A, m.Repair).lost == (B,)
