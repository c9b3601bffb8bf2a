"""Rounds, as conversations: who is asked, what closes, what a death costs, what is committed."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable

import pytest
from attrs import evolve

from holdfast.membership.master.rounds.outer_momentum import ROUNDS_SEEN
from holdfast.membership.master.rounds.round_table import BAD_MAX
from holdfast.membership.master.state.journal import RoundCommitted, RoundNumbered
from holdfast.membership.master.state.master_effects import RecordDurably, SendMessage
from holdfast.membership.master.state.round_schedule import RETRY_S
from holdfast.protocol import messages as m
from tests.membership.table import (
    CONTRIBUTOR,
    DIGEST,
    LAYOUT,
    OTHER_DIGEST,
    SPARE,
    TEN_SECONDS,
    A,
    B,
    C,
    D,
    E,
    Table,
    head_of,
    holding,
    owners_of,
    reducing,
    root_of,
    started,
)


def test_a_round_goes_from_open_to_commit() -> None:
    table = Table("[membership]\ngrace_s = 5.0\n")
    table.found(A)
    opened = table.hear(A, m.Open)
    assert (opened.round, opened.fragment, opened.version, opened.at_step) == (1, 0, 0, 100)
    table.join_in_sync(B)
    assert table.hear(B, m.Open) == opened  # invited to the round that is open
    table.ready(B, weight=20)
    table.hears_no(A, m.Reduce)
    table.ready(A, weight=10)
    order = table.hear(A, m.Reduce)
    assert order == table.hear(B, m.Reduce)
    assert [(c.peer, c.weight, c.scale) for c in order.contributors] == [(A, 10, 1.0), (B, 20, 1.0)]
    assert order.receivers == (A, B)
    assert order.view == table.master.context.roster.view_number
    table.reduced(order, A)
    table.hears_no(A, m.Commit)
    table.reduced(order, B)
    commit = table.hear(B, m.Commit)
    assert commit.digest == DIGEST
    assert commit.contributors == order.contributors
    table.applied(order, A, B)
    assert table.hear(A, m.Open).at_step == 200
    assert table.master.context.history.root(0, 1) == root_of(0, 1)


def test_the_decision_is_durable_before_anybody_hears_of_it() -> None:
    table, order = reducing(A, B)
    table.reduced(order, A, B)
    kinds = [
        "record" if isinstance(effect, RecordDurably) else "send"
        for effect in table.effects
        if (isinstance(effect, RecordDurably) and isinstance(effect.record, RoundCommitted))
        or (isinstance(effect, SendMessage) and isinstance(effect.message, m.Commit))
    ]
    assert kinds == ["record", "send", "send"]


def test_fragments_take_turns_at_evenly_spread_steps() -> None:
    table = started(A, fragments=2)
    seen = []
    for _ in range(4):
        order = table.commit(A)
        seen.append((order.fragment, order.version))
    assert seen == [(0, 0), (1, 0), (0, 1), (1, 1)]
    opened = table.hear(A, m.Open)
    steps = [round_.at_step for round_ in table.master.scheduler.round_table.past]
    assert steps == [50, 100, 150, 200]
    assert opened.at_step == 250


def test_no_round_opens_below_min_members() -> None:
    table = Table("[membership]\nmin_members = 2\n")
    table.found(A)
    table.hears_no(A, m.Open)
    assert table.status()["state"] == "waiting for members"
    why = table.status()["why_waiting"]
    assert why.startswith("waiting for 1 more contributor: 1 of 2 are connected")
    table.join_in_sync(B)
    table.hear(A, m.Open)
    table.hear(B, m.Open)


def test_a_round_that_nobody_has_reached_yet_waits_for_nobody() -> None:
    table = started(A, B)
    (opened,) = table.master.scheduler.rounds.values()
    why = table.status()["why_waiting"]
    assert why == f"training up to step {opened.at_step}, where the next round averages"
    table.ready(A)
    why = table.status()["why_waiting"]
    assert why == "the next round waits (b still training)"


def test_a_late_contributor_is_left_out_after_the_grace() -> None:
    table = started(A, B, C, toml="[membership]\ngrace_s = 5.0\n")
    table.ready(A)
    table.wait(4.0, A, B, C)
    table.ready(C)  # two of three are the quorum; the grace begins now
    table.wait(4.9, A, B, C)
    table.hears_no(A, m.Reduce)
    table.wait(0.1, A, B, C)
    order = table.hear(A, m.Reduce)
    assert [c.peer for c in order.contributors] == [A, C]
    assert order.receivers == (A, B, C)  # it gets the result all the same
    table.ready(B)
    assert [c.peer for c in order.contributors] == [A, C]


def test_no_grace_begins_before_the_quorum() -> None:
    table = started(A, B, C, toml="[membership]\ngrace_s = 1.0\nquorum = 1.0\n")
    table.ready(A)
    table.ready(B)
    table.wait(100.0, A, B, C)
    table.hears_no(A, m.Reduce)
    assert "the next round waits (c still training)" in table.status()["why_waiting"]


@pytest.mark.parametrize(
    ("quorum", "expected", "needed"),
    [(0.6, 1, 1), (0.6, 2, 2), (0.1, 5, 2), (0.6, 5, 3), (0.6, 6, 4), (1.0, 7, 7), (0.0, 1, 1)],
)
def test_quorum_counts(quorum: float, expected: int, needed: int) -> None:
    from holdfast.membership.master.rounds.round import quorum_count

    assert quorum_count(quorum, expected) == needed


def test_who_cannot_contribute_is_not_waited_for() -> None:
    table = started(A, B, C)
    number = table.open_round()
    table.ready(A)
    table.ready(B)
    table.say(C, m.NotReady(number, "loss is NaN"))
    assert [c.peer for c in table.hear(A, m.Reduce).contributors] == [A, B]
    assert "loss is NaN" in table.why(C)


def test_weight_zero_is_no_contribution() -> None:
    table = started(A, B, C)
    table.ready(C, weight=0)
    order = table.reduce(A, B)
    assert [c.peer for c in order.contributors] == [A, B]


def test_ready_after_not_ready_counts() -> None:
    table = started(A, B)
    table.say(A, m.NotReady(table.open_round(), "no trainer is attached"))
    table.ready(A)
    assert [c.peer for c in table.reduce(B).contributors] == [A, B]


def test_too_few_ready_aborts_and_the_next_round_waits() -> None:
    table = started(A, B)
    number = table.open_round()
    table.say(A, m.NotReady(number, "not finite"))
    table.ready(B)
    assert "not finite" in table.hear(A, m.Abort).reason
    assert table.hear(B, m.Abort).round == number
    assert not table.master.scheduler.rounds
    table.wait(RETRY_S, A, B)
    opened = table.hear(B, m.Open)
    assert (opened.round, opened.fragment, opened.at_step) == (number + 1, 0, 100)


def test_aborts_in_a_row_wait_longer_and_longer() -> None:
    table = started(A)
    for _ in range(12):
        number = table.open_round()
        table.say(A, m.NotReady(number, "broken"))
        while not table.master.scheduler.rounds:
            table.wait(1.0, A)
    assert table.now_s > 100 + 6 * 30
    assert table.status()["aborted"] == 12
    assert len(table.records(RoundNumbered)) == 13
    table.commit(A)  # and a commit ends the row
    number = table.open_round()
    table.say(A, m.NotReady(number, "broken"))
    table.wait(RETRY_S, A)
    assert table.open_round() == number + 1


def test_aborts_in_a_row_wait_no_longer_where_all_have_trained_nothing() -> None:
    """Scripts in float16 leave out their first steps, to find the scale of their losses."""
    table = started(A, B)
    began_s, count = table.now_s, 12
    for _ in range(count):
        number = table.open_round()
        table.ready(A, weight=0)
        table.ready(B, weight=0)
        table.wait(RETRY_S, A, B)
        assert table.open_round() == number + 1
    assert table.now_s == began_s + count * RETRY_S
    for _ in range(3):  # it is a failure if somebody else cannot contribute
        table.ready(A, weight=0)
        table.say(B, m.NotReady(table.open_round(), "broken"))
        began_s = table.now_s
        while not table.master.scheduler.rounds:
            table.wait(RETRY_S, A, B)
    assert table.now_s > began_s + 2 * RETRY_S


def test_a_contributor_without_a_trainer_is_not_expected() -> None:
    table = started(A, B, C)
    table.say(C, m.TrainerLost("it crashed"))
    order = table.reduce(A, B)
    assert [c.peer for c in order.contributors] == [A, B]
    assert C in order.receivers
    assert table.why(C) == "waiting for its trainer"
    table.complete(order, A, B, others=[C])
    table.forget()
    table.say(C, m.TrainerAttached(LAYOUT))
    table.hear(C, m.Open)


def test_what_was_posted_survives_its_trainer() -> None:
    table = started(A, B)
    table.ready(A)
    table.say(A, m.TrainerLost("it crashed"))
    assert [c.peer for c in table.reduce(B).contributors] == [A, B]


# ---------------------------------------------------------------- updates that must not be added


def test_a_large_update_is_scaled_to_three_medians() -> None:
    table = started(A, B, C)
    table.ready(A, norm=1.0)
    table.ready(B, norm=1.5)
    table.ready(C, norm=9.0)
    scales = {c.peer: c.scale for c in table.hear(A, m.Reduce).contributors}
    assert scales == {A: 1.0, B: 1.0, C: pytest.approx(3 * 1.5 / 9.0)}


def test_a_huge_update_is_refused_and_its_sender_told() -> None:
    table = started(A, B, C)
    table.ready(A, norm=1.0)
    table.ready(B, norm=1.5)
    table.ready(C, norm=15.1)
    order = table.hear(A, m.Reduce)
    assert [c.peer for c in order.contributors] == [A, B]
    assert C in order.receivers
    assert "10" in table.hear(C, m.Notice).text
    assert "the update of c (cccccccc)" in table.announced()


@pytest.mark.parametrize(("norm", "scale"), [(60.0, 1.0), (120.0, 0.5), (210.0, None)])
def test_who_has_trained_on_twenty_times_as_much_may_have_come_as_far(
    norm: float, scale: float | None
) -> None:
    """The first round of an elastic run: one was there before the others had taken some steps."""
    table = started(A, B, C)
    table.ready(A, norm=1.0)
    table.ready(B, norm=1.0)
    table.ready(C, weight=200, norm=norm)
    scales = {c.peer: c.scale for c in table.hear(A, m.Reduce).contributors}
    assert scales.get(C) == scale
    assert (scales[A], scales[B]) == (1.0, 1.0)


def test_two_updates_are_too_few_to_judge_by_the_median() -> None:
    table = started(A, B)
    table.ready(A, norm=1.0)
    table.ready(B, norm=1000.0)
    assert [c.scale for c in table.hear(A, m.Reduce).contributors] == [1.0, 1.0]


@pytest.mark.fault(
    "an update is far too large", "the median of the norms", "clipped, refused, in the end removed"
)
def test_who_sends_what_must_not_be_added_is_left_out_and_in_the_end_removed() -> None:
    table = started(A, B, C, D)
    peers = [A, B, C, D]
    for time in range(1, BAD_MAX + 1):
        order = table.reduce(*peers)
        owners_of(table, A, B)
        table.forget()
        table.say(
            A, m.ReduceFailed(order.round, order.attempt, (C,), True, "chunk 3 is not finite")
        )
        table.hears_no(A, m.Reduce)
        table.say(
            B, m.ReduceFailed(order.round, order.attempt, (C,), True, "chunk 3 is not finite")
        )
        again = table.hear(A, m.Reduce)
        assert again.attempt == 2
        assert [c.peer for c in again.contributors] == [A, B, D]
        if time < BAD_MAX:
            assert C in again.receivers
            assert "chunk 3 is not finite" in table.hear(C, m.Notice).text
        table.reduced(again, A, B, D)
        table.applied(again, A, B, D, *([C] if time < BAD_MAX else []))
    assert C not in table.master.context.roster


@pytest.mark.fault(
    "an update is far too small", "the median of the norms", "refused, in the end removed"
)
def test_an_update_far_shorter_than_the_others_is_refused() -> None:
    """A peer that sends almost nothing gains without training; one that trained less may send
    less.
    """
    table = started(A, B, C, D)
    table.ready(A, norm=1.0)
    table.ready(B, norm=1.2)
    table.ready(C, norm=0.004)
    table.ready(D, norm=0.004, weight=1)
    order = table.hear(A, m.Reduce)
    assert [c.peer for c in order.contributors] == [A, B, D]
    assert "0.01" in table.hear(C, m.Notice).text


@pytest.mark.fault(
    "peers train on the same samples",
    "digests of the first batches of their trainers",
    "their terminals, the master's, the page and the status say it",
)
def test_peers_that_train_on_the_same_samples_are_told() -> None:
    def warnings() -> list[str]:
        found: list[str] = table.status()["warnings"]
        return found

    table = started(A, B, C, toml="[membership]\nquorum = 1.0")
    ready = m.Ready(table.open_round(), 10, 1.0, root_of(0, 0), 1)
    table.say(A, evolve(ready, first_batches=DIGEST))
    table.say(C, evolve(ready, first_batches=OTHER_DIGEST))
    assert not warnings()
    table.say(B, evolve(ready, first_batches=DIGEST))
    (warning,) = warnings()
    assert warning.startswith("2 members train on the same samples")
    assert warning.endswith(f": a ({A[:8]}), b ({B[:8]})")
    assert warning in table.announced()
    assert [table.hear(peer, m.Notice).text for peer in (A, B)] == [warning] * 2
    table.hears_no(C, m.Notice)
    same_samples = table.master.scheduler.same_samples
    for digest in (b"", DIGEST):
        for peer in (A, B):  # their trainers start again
            same_samples.note(peer, digest)
        assert bool(warnings()) == bool(digest)
    table.leave(B)
    assert not warnings()


def sums_of(
    contributors: Iterable[tuple[float, float, float]],
    result: tuple[float, float, float] = (0.0, 0.0, 0.0),
) -> bytes:
    """``Reduced.norm_sums``, without sketches."""
    rows = [*contributors, result]
    sums = b"".join(struct.pack("<3f", *each) for each in rows)
    return sums + bytes(m.SKETCH_BYTES * (len(rows) - 1))


def norm_sums(table: Table, order: m.Reduce, norms: dict[str, float]) -> None:
    """Everybody owns as much as the others and has found its part of these norms."""
    owners_of(table, *[contributor.peer for contributor in order.contributors])
    peers = [contributor.peer for contributor in order.contributors]
    for peer in peers:
        squares = [norms[p] ** 2 / len(peers) for p in peers]
        found = sums_of((square, square, 0.0) for square in squares)
        table.say(peer, m.Reduced(order.round, order.attempt, DIGEST, (), found, 1 / len(peers)))


@pytest.mark.fault(
    "an update is larger than its sender said",
    "norms that those who add it up find",
    "refused, the round runs again without it; in the end removed",
)
def test_who_sends_more_than_it_said_is_refused_and_in_the_end_removed() -> None:
    table = started(A, B, C, D)
    for time in range(1, BAD_MAX + 1):
        order = table.reduce(A, B, C, D)  # all say 1
        table.forget()
        norm_sums(table, order, {A: 1.0, B: 1.0, C: 1.2, D: 0.3})
        table.hears_no(B, m.Commit)
        again = table.hear(A, m.Reduce)
        assert [c.peer for c in again.contributors] == [A, B, D]
        if time < BAD_MAX:
            assert "its norm is 1.2, and it had announced 1" in table.hear(C, m.Notice).text
        table.reduced(again, A, B, D)
        table.applied(again, A, B, D, *([C] if time < BAD_MAX else []))
    assert C not in table.master.context.roster


@pytest.mark.parametrize(("codec", "norm"), [("fp32", 1.005), ("int8+zstd", 1.08), ("nf4", 1.9)])
def test_what_a_codec_rounds_up_is_nobodys_lie(codec: str, norm: float) -> None:
    table, order = reducing(A, B, C, toml=f'[reduce]\ncodec_up = "{codec}"\n')
    norm_sums(table, order, {A: norm, B: 1.0, C: 1.0})
    assert table.hear(A, m.Commit).attempt == 1


def test_who_finds_that_most_others_lie_is_not_believed() -> None:
    table, order = reducing(A, B, C, D)
    norm_sums(table, order, {A: 1.0, B: 7.0, C: 7.0, D: 1.0})
    assert len(table.hear(A, m.Commit).contributors) == 4
    assert "2 of 4 contributions seem longer" in table.announced()


@pytest.mark.parametrize(
    "found",
    [bytes(12), bytes(71), struct.pack("<12f", *[0.0] * 11, math.nan) + bytes(24), b"\xff" * 72],
)
def test_who_finds_what_cannot_be_is_removed(found: bytes) -> None:
    table, order = reducing(A, B, C)
    table.say(C, m.Reduced(order.round, 1, DIGEST, (), found))
    assert C not in table.master.context.roster


def test_steps_that_overshoot_are_told_but_no_alarm_once_ten_rounds_say_so() -> None:
    table = started(A, B, C)  # an outer momentum of 0.9, with Nesterov
    for number in range(ROUNDS_SEEN):
        assert table.status()["headline"]["outer_gain"] is None, f"after {number} rounds"
        assert table.status()["headline"]["outer_text"] == ""
        order = table.reduce(A, B, C)
        along = 7.0 if number < 4 else -0.4  # the median is of the last six
        # Two own all; each reports its part of <D, D> = 2 and <b, b> = 8.
        for peer, share in ((A, 0.75), (B, 0.25), (C, 0.0)):
            result = (2.0 * share, 0.0, along * share)
            sums = sums_of([(1.0, 1.0, 0.0)] * 3, result) if share else b""
            table.say(peer, m.Reduced(order.round, 1, DIGEST, (), sums, 8.0 * share))
        table.applied(order, A, B, C)
    found = table.status()
    assert found["headline"]["outer_cosine"] == pytest.approx(-0.4 / 4)
    assert found["headline"]["outer_gain"] == pytest.approx(1 + 0.9 - 0.81 * 0.4 / 2)
    text = found["headline"]["outer_text"]
    assert text.startswith("outer steps go 1.74 times as far as their gradients and overshoot")
    assert "(cosine -0.10)" in text
    assert not found["warnings"]


def test_what_all_owners_found_together_but_for_one_is_needed_for_a_refusal() -> None:
    """The rest could be one owner's lie."""
    table, order = reducing(A, B, C, D)
    norm_sums(table, order, {A: 1.0, B: 1.0, C: 1.1, D: 0.3})
    assert len(table.hear(A, m.Commit).contributors) == 4


def found_by(table: Table, order: m.Reduce, owner: str, norms: dict[str, float]) -> None:
    """One says that it has found this; the others, what was announced."""
    peers = [contributor.peer for contributor in order.contributors]
    for peer in peers:
        squares = [(norms[p] if peer == owner else 0.4) ** 2 for p in peers]
        found = sums_of((square, square, 0.0) for square in squares)
        table.say(peer, m.Reduced(order.round, order.attempt, DIGEST, (), found, 0.25))


def test_what_one_owner_alone_has_found_refuses_nothing_and_keeps_the_two_apart() -> None:
    table, order = reducing(A, B, C, D)
    owners_of(table, A, B, C, D)
    found_by(table, order, D, {A: 9.0, B: 0.4, C: 0.4, D: 0.4})
    again = table.hear(A, m.Reduce)
    assert [c.peer for c in again.contributors] == [A, B, C, D]
    assert not {run.peer for run in again.plan.owners} & {A, D}
    table.reduced(again, A, B, C, D)
    assert table.hear(A, m.Commit).attempt == again.attempt


def test_what_another_owner_finds_when_it_is_tried_again_counts() -> None:
    table, order = reducing(A, B, C, D)
    owners_of(table, A, B, C, D)
    found_by(table, order, D, {A: 9.0, B: 0.4, C: 0.4, D: 0.4})
    again = table.hear(A, m.Reduce)
    owners_of(table, B)
    found_by(table, again, B, {A: 9.0, B: 0.4, C: 0.4, D: 0.4})
    assert "its norm is 9" in table.hear(A, m.Notice).text
    for contributors in ([A, B, C, D], [A, B, C, D], [B, C, D]):
        assert [c.peer for c in table.hear(B, m.Reduce).contributors] == contributors


def test_who_owned_no_chunk_has_found_nothing() -> None:
    table, order = reducing(A, B, C, D)
    owners_of(table, A, B)
    found_by(table, order, D, {A: 9.0, B: 0.4, C: 0.4, D: 0.4})
    assert table.hear(A, m.Commit).attempt == 1


def test_a_result_with_a_refused_update_in_it_is_never_committed() -> None:
    table, order = reducing(A, B, C, D)
    owners_of(table, A, B)
    table.reduced(order, D)
    table.say(A, m.ReduceFailed(order.round, 1, (C,), True, "not finite"))
    table.reduced(order, C)
    table.say(B, m.ReduceFailed(order.round, 1, (C,), True, "not finite"))
    table.leave(A)  # the rest has reported attempt 1, which has C's update in it
    assert not table.records(RoundCommitted)
    assert "2 of 4" in table.hear(D, m.Abort).reason


def test_one_alone_does_not_get_an_update_refused_and_nobody_is_removed() -> None:
    table = started(A, B, C, D, toml=TEN_SECONDS)
    for _time in range(2 * BAD_MAX):
        order = table.reduce(A, B, C, D)
        owners_of(table, A, B)
        table.forget()
        table.say(D, m.ReduceFailed(order.round, order.attempt, (A,), True, "not finite"))
        table.wait(5.0, A, B, C, D)
        again = table.hear(A, m.Reduce)
        assert [c.peer for c in again.contributors] == [A, B, C, D]
        assert not {run.peer for run in again.plan.owners} & {A, D}
        table.complete(again, A, B, C, D)
        table.wait(200.0, A, B, C, D)
    assert len(table.master.context.roster) == 4


def test_who_calls_another_bad_alone_and_again_is_left_out_itself() -> None:
    table, order = reducing(A, B, C, D, toml=TEN_SECONDS)
    table.say(D, m.ReduceFailed(order.round, 1, (A,), True, "not finite"))
    table.forget()
    table.wait(5.0, A, B, C, D)
    assert len(table.hear(A, m.Reduce).contributors) == 4
    table.forget()
    table.say(D, m.ReduceFailed(order.round, 2, (B,), True, "not finite"))
    assert table.hear(A, m.Flush).lost == (D,)


def test_who_has_been_sent_nothing_cannot_call_it_bad() -> None:
    table, order = reducing(A, B, C, D, toml=TEN_SECONDS)
    owners_of(table, A, B)
    table.forget()
    table.say(D, m.ReduceFailed(order.round, 1, (C,), True, "not finite"))
    assert table.hear(A, m.Flush).lost == (D,)


def test_who_was_right_of_one_is_heard_of_another() -> None:
    table, order = reducing(A, B, C, D, toml="[membership]\ndeadline_s = 10.0\nquorum = 0.25\n")
    owners_of(table, A, B)
    table.say(A, m.ReduceFailed(order.round, 1, (C,), True, "not finite"))
    table.wait(5.0, A, B, C, D)  # nobody else says so
    owners_of(table, A, B)
    table.say(B, m.ReduceFailed(order.round, 2, (C,), True, "not finite"))  # now somebody does
    owners_of(table, A, B)
    table.forget()
    table.say(A, m.ReduceFailed(order.round, 3, (D,), True, "not finite"))
    table.hears_no(A, m.Flush)
    table.say(B, m.ReduceFailed(order.round, 3, (D,), True, "not finite"))
    assert [c.peer for c in table.hear(A, m.Reduce).contributors] == [A, B]


def test_who_calls_everybody_bad_is_left_out_itself() -> None:
    table, order = reducing(A, B, C, D)
    table.forget()
    table.say(D, m.ReduceFailed(order.round, 1, (A, B, C), True, "all of it is nonsense"))
    assert table.hear(A, m.Flush).lost == (D,)


# ---------------------------------------------------------------- deaths in the middle


def test_a_sign_of_life_after_the_wait_for_the_next_round_does_not_cancel_it() -> None:
    table = started(A, B, C)
    table.reduce(A, B, C)
    table.leave(B)
    table.leave(C)
    due_s = table.master.next_deadline_s()
    table.now_s = due_s + 0.01  # the heartbeat overtakes the tick
    table.say(A, m.Heartbeat())
    assert table.master.next_deadline_s() <= due_s


def test_a_death_is_repaired_among_the_survivors() -> None:
    table, order = reducing(A, B, C)
    table.reduced(order, A)
    table.forget()
    table.leave(B)
    view = table.hear(A, m.View)
    assert [info.peer for info in view.members] == [A, C]
    flush = table.hear(A, m.Flush)
    assert table.hear(C, m.Flush) == flush == m.Flush(order.round, 2, (B,))
    table.hold(flush, A, C)
    repair = table.hear(A, m.Repair)
    assert table.hear(C, m.Repair) == repair
    assert (repair.attempt, repair.lost) == (2, (B,))
    table.hears_no(A, m.Reduce)
    table.reduced(order, A, C)  # late answers of the first attempt
    assert not table.records(RoundCommitted)
    manifest = (m.ContributorRun(b"\x05" + bytes(7), 1),)
    table.reduced(order, A, C, attempt=2, digest=OTHER_DIGEST, manifest=manifest)
    (record,) = table.records(RoundCommitted)
    assert record.commit.digest == OTHER_DIGEST
    assert record.commit.attempt == 2
    assert record.commit.contributors == order.contributors
    assert record.commit.manifest == manifest


def test_a_result_that_all_survivors_hold_is_committed_over_a_death() -> None:
    table, order = reducing(A, B, C)
    table.reduced(order, A, C)
    table.leave(B)
    (record,) = table.records(RoundCommitted)
    assert [c.peer for c in record.commit.contributors] == [A, B, C]


def test_of_two_the_last_one_goes_on_in_a_new_round() -> None:
    table, order = reducing(A, B)
    table.leave(B)
    assert table.hear(A, m.Abort).round == order.round
    table.wait(RETRY_S, A)
    assert table.hear(A, m.Open).round == order.round + 1
    table.commit(A)


def test_an_accused_that_dies_is_not_held_against_its_accuser() -> None:
    table, order = reducing(A, B, C)
    table.forget()
    table.say(A, m.ReduceFailed(order.round, 1, (B,), False, "connection reset"))
    table.hears_no(A, m.Reduce)
    table.wait(0.5, A, B, C)
    table.leave(B)
    assert table.hear(A, m.Flush).lost == (B,)


def test_an_accused_that_stays_is_left_out_after_the_settle_time_and_stays_a_member() -> None:
    table, order = reducing(A, B, C, toml=TEN_SECONDS)
    table.forget()
    table.say(A, m.ReduceFailed(order.round, 1, (B,), False, "no bytes for 5 s"))
    table.say(B, m.ReduceFailed(order.round, 1, (A,), False, "no bytes for 5 s"))
    table.say(C, m.ReduceFailed(order.round, 1, (B,), False, "no bytes for 5 s"))
    table.wait(0.9, A, B, C)
    table.hears_no(A, m.Reduce)
    table.wait(0.1, A, B, C)
    flush = table.hear(A, m.Flush)
    assert flush.lost == (B,)
    table.hold(flush, A, C)
    repair = table.hear(A, m.Repair)
    manifest = (m.ContributorRun(b"\x05" + bytes(7), 1),)
    table.reduced(order, A, C, attempt=repair.attempt, digest=OTHER_DIGEST, manifest=manifest)
    assert table.records(RoundCommitted)
    assert table.hear(B, m.Commit)
    table.applied(order, A, C)
    assert table.hear(B, m.SyncFragment).head.version == 1


@pytest.mark.fault("two peers cannot reach each other")
def test_of_two_that_accuse_each_other_the_newer_one_is_left_out() -> None:
    table, order = reducing(A, B, C)
    table.forget()
    table.say(C, m.ReduceFailed(order.round, 1, (A,), False, "no bytes"))
    table.say(A, m.ReduceFailed(order.round, 1, (C,), False, "no bytes"))
    table.wait(2.0, A, B, C)
    assert table.hear(A, m.Flush).lost == (C,)
    assert C in table.master.context.roster


def test_an_accusation_that_nobody_joins_costs_its_accuser_the_round() -> None:
    table, order = reducing(A, B, C, toml=TEN_SECONDS)
    table.forget()
    table.say(A, m.ReduceFailed(order.round, 1, (B,), False, "no bytes for 5 s"))
    table.wait(4.9, A, B, C)
    table.hears_no(B, m.Flush)  # the others may still find the same
    table.wait(0.1, A, B, C)
    assert table.hear(B, m.Flush).lost == (A,)
    assert A in table.master.context.roster


def test_who_lost_a_link_to_it_joins_the_accuser() -> None:
    table, order = reducing(A, B, C, toml=TEN_SECONDS)
    table.forget()
    table.say(A, m.ReduceFailed(order.round, 1, (B,), False, "no bytes for 5 s"))
    table.say(C, m.LinkBroken(B))
    table.wait(1.0, A, B, C)
    assert table.hear(A, m.Flush).lost == (B,)


def test_of_two_contributors_one_of_which_accuses_the_other_both_stay() -> None:
    """There is no third who could tell who is right, and no plan that does without the pair."""
    table, order = reducing(A, B, toml=TEN_SECONDS)
    table.say(B, m.ReduceFailed(order.round, 1, (A,), False, "no bytes"))
    table.wait(5.0, A, B)
    assert "1 of 2 contributors are left" in table.hear(A, m.Abort).reason
    assert len(table.master.context.roster) == 2


def left_out(table: Table, accuser: str, accused: tuple[str, ...], *others: str) -> None:
    """Check that the accuser alone loses the round, which the others end; it is synced again."""
    order = table.reduce(*others, accuser)
    table.forget()
    table.say(accuser, m.ReduceFailed(order.round, order.attempt, accused, False, "no bytes"))
    table.wait(5.0, *others, accuser)
    flush = table.hear(others[0], m.Flush)
    assert flush.lost == (accuser,)
    table.hold(flush, *others)
    again = table.hear(others[0], m.Repair)
    for peer in others:
        table.say(peer, m.Reduced(order.round, again.attempt, DIGEST))
    table.applied(order, *others)
    table.sync(accuser)
    assert len(table.master.context.roster) == len(others) + 1


def test_who_accuses_one_after_the_other_is_left_out_and_nobody_else() -> None:
    table = started(A, B, C, D, E, toml=TEN_SECONDS)
    left_out(table, E, (A,), A, B, C, D)
    left_out(table, E, (B,), A, B, C, D)
    assert table.master.context.roster.members[E].in_sync
    order = table.reduce(A, B, C, D, E)
    assert [c.peer for c in order.contributors] == [A, B, C, D]
    table.reduced(order, A, B, C, D)
    assert len(table.records(RoundCommitted)) == 3


def test_who_accuses_everybody_at_once_is_left_out_and_nobody_else() -> None:
    table = started(A, B, C, D, E, toml=TEN_SECONDS)
    left_out(table, E, (A, B, C, D), A, B, C, D)
    order = table.reduce(A, B, C, D, E)
    assert [c.peer for c in order.contributors] == [A, B, C, D]


def test_whom_one_alone_has_lost_it_need_not_reach_in_the_rounds_to_come() -> None:
    """Else one that answers some only would keep these out of rounds, one after the other."""
    table = started(A, B, C, D, toml=TEN_SECONDS)
    left_out(table, B, (A,), A, C, D)
    order = table.reduce(A, B, C, D)
    assert [c.peer for c in order.contributors] == [A, B, C, D]
    assert not {run.peer for run in order.plan.owners} & {A, B}


def test_a_pair_that_fails_again_is_apart_for_longer_and_in_the_end_tried_again() -> None:
    table = started(A, B, C, toml=TEN_SECONDS)
    disputes = table.master.routes.disputes
    for apart_s in (10, 20, 40, 80, 80):
        order = table.reduce(A, B, C)
        table.forget()
        table.say(C, m.ReduceFailed(order.round, order.attempt, (A,), True, "not finite"))
        table.wait(5.0, A, B, C)
        again = table.hear(A, m.Reduce)
        began_s = table.now_s
        assert [c.peer for c in again.contributors] == [A, B, C]
        assert {run.peer for run in again.plan.owners} == {B}
        table.complete(again, A, B, C)
        for _round in range(apart_s // 10):
            assert disputes.apart(A, C, began_s + apart_s)  # for as many rounds, too
            disputes.planned([A, B, C])
        assert disputes.apart(A, C, began_s)
        assert not disputes.apart(C, A, began_s + apart_s)
        table.wait(apart_s + 1.0, A, B, C)


def test_one_member_that_says_it_moves_does_not_keep_an_attempt_alive() -> None:
    table = started(A, B, C, toml=TEN_SECONDS)
    table.reduce(A, B, C)
    table.forget()
    for second in range(1, 12):
        table.wait(1.0, A, B, C)
        table.say(C, m.Progress(1, 1, 1.0, None, "", second, second, 0, {}))
    assert table.hear(A, m.Reduce).attempt == 2


def test_nobody_waits_for_an_attempt_in_which_nothing_moves() -> None:
    table, order = reducing(A, B, C, toml=TEN_SECONDS)
    table.reduced(order, A, B)
    table.wait(10.0, A, B, C)
    table.diagnosed(order, C)  # waits for nobody
    (record,) = table.records(RoundCommitted)
    assert record.commit.attempt == 1
    assert table.dropped(C) is m.RefusalCode.LAGGING


@pytest.mark.fault(
    "nothing moves and nobody is blamed",
    "no byte for `deadline_s`, and no answer that tells",
    "rerun, then abort",
)
def test_a_stall_without_a_culprit_reruns_then_aborts() -> None:
    table, order = reducing(A, B, C, toml=TEN_SECONDS)
    table.wait(10.0, A, B, C)
    table.diagnosed(order, A, B, C)
    assert table.hear(A, m.Reduce).attempt == 2
    table.wait(10.0, A, B, C)
    table.diagnosed(order, A, B, C)
    assert table.hear(A, m.Abort).round == order.round
    assert len(table.master.context.roster) == 3


def test_bytes_that_move_keep_an_attempt_alive() -> None:
    table, order = reducing(A, B, toml=TEN_SECONDS)
    for second in range(1, 40):
        table.wait(1.0, A, B)
        table.say(A, m.Progress(1, 1, 1.0, None, "", second, second, 0, {}))
        table.say(B, m.Progress(1, 1, 1.0, None, "", second, second, 0, {}))
    table.hears_no(A, m.Reduce)
    table.reduced(order, A, B)
    assert table.records(RoundCommitted)


def test_who_needs_more_than_twice_as_long_as_the_quorum_is_left_behind() -> None:
    table, order = reducing(A, B, C, toml=TEN_SECONDS)
    for second in range(1, 61):
        table.wait(1.0, A, B, C)
        for peer in (A, B, C):
            table.say(peer, m.Progress(1, 1, 1.0, None, "", second, second, 0, {}))
        if second == 30:
            table.reduced(order, A, B)
        assert C in table.master.context.roster
    table.diagnosed(order, C)
    assert C not in table.master.context.roster
    assert table.records(RoundCommitted)


@pytest.mark.fault(
    "a result differs", "its digest is in the minority", "not committed; its holder is healed"
)
def test_a_minority_result_is_not_committed_and_its_holder_synced_again() -> None:
    table, order = reducing(A, B, C)
    table.reduced(order, A, B)
    table.reduced(order, C, digest=OTHER_DIGEST)
    table.diagnosed(order, A, B, C)
    assert table.hear(C, m.Commit).digest == DIGEST
    assert table.roles() == {"a": "contributor*", "b": "contributor*", "c": "contributor"}
    table.hears_no(C, m.SyncFragment)
    table.applied(order, A, B)
    sync = table.hear(C, m.SyncFragment)
    assert sync.head == head_of(0, 1)
    table.sync(C)


def test_no_majority_aborts() -> None:
    table, order = reducing(A, B)
    table.reduced(order, A)
    table.reduced(order, B, digest=OTHER_DIGEST)
    assert "majority" in table.hear(A, m.Abort).reason
    assert not table.records(RoundCommitted)


def test_late_and_foreign_answers_are_ignored() -> None:
    table = started(A, B, spares=[C])
    number = table.open_round()
    table.say(C, m.Ready(number, 10, 1.0, root_of(0, 0), 100))  # was not asked
    table.say(A, m.Reduced(number, 1, DIGEST), m.Reduced(99, 1, DIGEST))
    table.say(A, m.ReduceFailed(99, 1, (B,), True, "?"), m.NotReady(99, "?"))
    order = table.reduce(A, B)
    assert [c.peer for c in order.contributors] == [A, B]
    table.say(A, m.Reduced(number, 7, DIGEST))
    table.reduced(order, B)
    assert not table.records(RoundCommitted)
    table.say(C, m.Reduced(number, 1, OTHER_DIGEST))  # a spare's digest does not vote
    table.reduced(order, A)
    assert table.records(RoundCommitted)


# ---------------------------------------------------------------- spares, leaving, the end


def test_a_draining_contributor_finishes_its_round_and_goes() -> None:
    table = started(A, B, C)
    table.ready(C)
    table.say(C, m.Leaving("Ctrl+C"))
    assert C in table.master.context.roster
    order = table.reduce(A, B)
    assert [c.peer for c in order.contributors] == [A, B, C]
    table.reduced(order, A, B)
    table.hears_no(C, m.Released)
    table.reduced(order, C)
    table.applied(order, A, C)
    table.hear(C, m.Released)
    assert table.dropped(C) is m.RefusalCode.LEFT
    assert table.roles() == {"a": "contributor*", "b": "contributor*"}


def test_a_draining_contributor_that_is_not_ready_goes_at_once() -> None:
    table = started(A, B)
    table.say(B, m.Leaving("Ctrl+C"))
    table.hear(B, m.Released)
    assert table.reduce(A).receivers == (A,)


def test_a_draining_contributor_is_not_kept_for_ever() -> None:
    table = started(A, B, toml=TEN_SECONDS)
    table.ready(B)
    table.say(B, m.Leaving("Ctrl+C"))
    table.wait(15.0, A, B)
    table.hear(B, m.Released)


@pytest.mark.parametrize("spares", [[], [B]])
def test_the_newest_version_does_not_go_with_the_last_that_holds_it(spares: list[str]) -> None:
    table = started(A, spares=spares)
    order = table.reduce(A)
    table.say(A, m.Leaving("Ctrl+C"))
    table.reduced(order, A)
    for peer in (A, *spares):
        table.hears_no(A, m.Released)
        table.applied(order, peer)
    table.hear(A, m.Released)


def test_the_last_holder_goes_when_another_has_a_copy() -> None:
    table = started(A, toml="[membership]\ncontributors = 1\nspares = 0\ndeadline_s = 10.0\n")
    for peer in (B, C):
        table.join(peer)
    table.say(A, m.Leaving("Ctrl+C"))
    table.hears_no(C, m.SyncFragment)
    table.sync(B)
    table.hear(A, m.Released)
    table.say(B, m.Leaving("Ctrl+C"))
    table.wait(14.0, B, C)
    table.hears_no(B, m.Released)
    table.wait(1.0, B, C)
    table.hear(B, m.Released)


def test_pausing_stops_the_opening_of_rounds_only() -> None:
    table = started(A)
    table.take(table.master.pause(table.now_s))
    table.commit(A)
    assert not table.master.scheduler.rounds
    assert table.status()["state"] == "paused"
    table.restart()
    table.join(A, hello=holding(A, 1))
    assert table.status()["state"] == "paused"
    table.take(table.master.resume(table.now_s))
    table.hear(A, m.Open)


def test_the_run_finishes_when_everybody_has_applied_the_last_round() -> None:
    table = started(A, B, spares=[C], toml="[run]\nrounds = 2\n")
    table.commit(A, B, others=[C])
    order = table.reduce(A, B)
    table.complete(order, A, B)
    table.hears_no(A, m.Finish)
    table.applied(order, C)
    assert {table.hear(peer, m.Finish).round for peer in (A, B, C)} == {order.round}
    table.join(D)
    assert table.dropped(D) is m.RefusalCode.FINISHED
    assert table.status()["state"] == "finished"


def test_finishing_does_not_wait_for_ever() -> None:
    table, order = reducing(A, B, toml="[run]\nrounds = 1\n[membership]\ndeadline_s = 10.0\n")
    table.reduced(order, A, B)
    table.applied(order, A)
    table.wait(10.0, A, B)
    table.hear(A, m.Finish)


def test_a_commit_that_is_not_applied_in_time_costs_the_member_its_sync() -> None:
    table, order = reducing(A, B, spares=[C, D], toml=TEN_SECONDS)
    table.complete(order, A, B, others=[D])
    assert table.roles()["c"] == "spare*"
    table.wait(10.0, A, B, C, D)
    assert table.roles()["c"] == "spare"
    table.hear(C, m.SyncFragment)


def test_a_spare_that_missed_the_result_is_synced_again() -> None:
    table, order = reducing(A, B, spares=[C])
    table.say(C, m.ReduceFailed(order.round, 1, (A,), False, "link lost"))
    table.complete(order, A, B)
    assert table.hear(C, m.SyncFragment).head == head_of(0, 1)


def test_a_spare_that_finds_out_later_is_synced_again() -> None:
    table, order = reducing(A, B, spares=[C])
    table.complete(order, A, B)
    table.hears_no(C, m.SyncFragment)
    table.say(C, m.ReduceFailed(order.round, 1, (), False, "the committed result is not here"))
    assert table.hear(C, m.SyncFragment).head == head_of(0, 1)


def test_a_returning_contributor_is_asked_again_in_an_open_round() -> None:
    table = started(A, B, C)
    table.ready(B)
    table.leave(B)
    state = holding(B, 0)
    table.join(B, CONTRIBUTOR, state)
    table.hear(B, m.Open)
    table.ready(A)
    table.ready(C)
    table.hears_no(A, m.Reduce)  # what it said over the old connection does not count
    assert [c.peer for c in table.reduce(B).contributors] == [A, B, C]


def test_a_root_that_differs_in_ready_costs_the_round_and_is_healed() -> None:
    table = started(A, B, C)
    number = table.open_round()
    table.say(C, m.Ready(number, 10, 1.0, OTHER_DIGEST, 100))
    assert table.roles()["c"] == "contributor"
    assert table.hear(C, m.SyncFragment).head == head_of(0, 0)
    assert [c.peer for c in table.reduce(A, B).contributors] == [A, B]


def test_a_healed_member_is_asked_again() -> None:
    table = started(A, B, C)
    table.say(C, m.Ready(table.open_round(), 10, 1.0, OTHER_DIGEST, 100))
    table.sync(C)
    table.hear(C, m.Open)
    assert [c.peer for c in table.reduce(A, B, C).contributors] == [A, B, C]


def test_roots_agreed_only_at_the_close_leave_out_the_odd_one() -> None:
    table = started(A, B, C, D, E)
    order = table.commit(A, B, C, D, E)
    order = table.reduce(A, B, C, D, E)
    table.reduced(order, A, B, C, D, E)
    number = table.open_round()
    for peer in (A, B, D):  # nobody has said Applied for version 2: Ready speaks first
        table.say(peer, m.Ready(number, 10, 1.0, root_of(0, 2), 300))
    table.say(C, m.Ready(number, 10, 1.0, OTHER_DIGEST, 300))
    table.wait(table.spec.membership.grace_s, A, B, C, D, E)
    assert [c.peer for c in table.hear(A, m.Reduce).contributors] == [A, B, D]


def test_applied_roots_decide_by_majority() -> None:
    table, order = reducing(A, B, C)
    table.reduced(order, A, B, C)
    table.say(A, m.Applied(order.round, head_of(0, 1, OTHER_DIGEST)))
    assert table.master.context.history.root(0, 1) == b""
    table.applied(order, B, C)
    assert table.master.context.history.root(0, 1) == root_of(0, 1)
    assert table.hear(A, m.SyncFragment).donors == (B, C)


def test_a_joining_spare_does_not_hold_the_others_up() -> None:
    table, order = reducing(A, B)
    table.join(C, SPARE)
    table.hears_no(C, m.SyncFragment)  # that reduction runs without it
    assert "before it joined" in table.why(C)
    table.complete(order, A, B)
    assert table.hear(C, m.SyncFragment).head == head_of(0, 1)
