"""The status of a run as a whole, and the steps of each member in a round."""

from __future__ import annotations

import math
from typing import Any

import attrs
import msgspec
import pytest

from holdfast.membership.master.status.round_rows import recorded_round
from holdfast.protocol.messages import Heartbeat, NotReady, Progress
from tests.membership.table import A, B, C, D, Table, hello_of, started
from tests.plain import describe

VALUES = 16  # of the table's run, in float32


def progress(loss: float | None = None, rate: float = 0.0, **more: Any) -> Progress:
    return attrs.evolve(Progress(1, 10, rate, loss, "training", 0, 0, 0, {}), **more)


def headline(table: Table) -> dict[str, Any]:
    told: dict[str, Any] = table.status()["headline"]
    return told


def newest(table: Table) -> dict[str, Any]:
    round_ = table.master.scheduler.round_table.past[-1]
    row: dict[str, Any] = msgspec.to_builtins(recorded_round(round_, 0.0, 0.0))
    return row


def states(table: Table) -> dict[str, str]:
    return {peer[0]: mark["state"] for peer, mark in newest(table)["marks"].items()}


# ---------------------------------------------------------------- the headline


def test_an_empty_run_claims_nothing() -> None:
    told = headline(Table())
    unknown = ("loss", "loss_min", "loss_max", "utilisation", "eta_s", "rounds_wanted")
    assert all(told[name] is None for name in unknown)
    assert (told["tokens"], told["sent_bytes"], told["saved_bytes"]) == (0, 0, 0)


def test_the_loss_is_that_of_a_token_of_a_contributor() -> None:
    table = started(A, B, spares=[C], toml="[membership]\ncontributors = 2\n")
    table.say(A, progress(2.0, 300.0))
    table.say(B, progress(4.0, 100.0))
    table.say(C, progress(100.0, 100.0))  # a spare
    told = headline(table)
    assert (told["loss"], told["loss_min"], told["loss_max"]) == (2.5, 2.0, 4.0)
    assert told["tokens_per_s"] == 400.0
    table.say(B, progress(math.nan, 100.0))
    assert headline(table)["loss"] == 2.0, "what is no number is not averaged"
    table.say(A, progress(2.0, 0.0))
    table.say(B, progress(4.0, 0.0))
    assert headline(table)["loss"] == 3.0, "nobody has a rate yet"


def test_tokens_are_those_of_committed_rounds_also_after_a_restart() -> None:
    table = started(A, B, fragments=2)
    table.commit(A, B)
    table.commit(A, B)
    assert headline(table)["tokens"] == 20, "each fragment has had 10 of each peer"
    table.restart()
    assert headline(table)["tokens"] == 20


def test_bytes_are_counted_once_whoever_comes_back() -> None:
    table = started(A, B)
    table.say(A, progress(bulk_sent_bytes=1_000))
    table.say(A, progress(bulk_sent_bytes=1_500))
    assert headline(table)["sent_bytes"] == 1_500
    table.join(A, hello=hello_of(A))  # the same daemon connects again
    table.say(A, progress(bulk_sent_bytes=1_600))
    assert headline(table)["sent_bytes"] == 1_600
    table.leave(A)
    assert headline(table)["sent_bytes"] == 1_600, "who is gone has sent it all the same"
    table.join(A, hello=hello_of(A, incarnation=2))  # another process, which counts from 0
    table.say(A, progress(bulk_sent_bytes=50))
    assert headline(table)["sent_bytes"] == 1_650
    table.restart()
    table.join(A, hello=hello_of(A, incarnation=2))
    table.say(A, progress(bulk_sent_bytes=60))
    assert headline(table)["sent_bytes"] == 0, "what came before this master's start is not its own"
    table.say(A, progress(bulk_sent_bytes=75))
    assert headline(table)["sent_bytes"] == 15


def test_bytes_saved_are_those_of_a_ring_at_every_step() -> None:
    table = started(A, B, C)
    for rounds in (1, 2):
        table.commit(A, B, C)
        ring = 2 * 2 * (2 * VALUES) * 100 * rounds  # 2 (n - 1) gradients in bfloat16, 100 steps
        assert headline(table)["saved_bytes"] == ring
    table.say(B, progress(bulk_sent_bytes=1_000))
    assert headline(table)["saved_bytes"] == ring - 1_000


def test_utilisation_is_that_of_the_last_rounds() -> None:
    table = started(A, B)
    for seconds in (100.0, 200.0, 300.0, 400.0, 500.0, 600.0):
        table.say(A, progress(stepped_s=seconds, waited_s=50.0))  # waited long ago
        table.say(B, progress(stepped_s=seconds / 2, waited_s=seconds / 2))
        table.commit(A, B)
    assert headline(table)["utilisation"] == 0.75, "A all of it, B half"


def test_the_end_is_as_far_as_the_last_rounds_say() -> None:
    table = started(A, B, toml="[run]\nrounds = 10\n")
    for _ in range(4):
        table.wait(3.0, A, B)
        table.commit(A, B)
    assert headline(table)["eta_s"] == pytest.approx(6 * 3.0)
    table.wait(1_000.0, A, B)
    table.commit(A, B)
    assert headline(table)["eta_s"] == pytest.approx(5 * 3.0), "a long wait is not the run's pace"
    table.take(table.master.pause(table.now_s))
    assert headline(table)["eta_s"] is None


# ---------------------------------------------------------------- marks


def test_a_round_tells_when_each_was_ready_and_had_the_result() -> None:
    table = started(
        A, B, C, spares=[D], toml="pace = 'lockstep'\n[membership]\ncontributors = 3\ngrace_s = 4\n"
    )
    table.wait(1.0, A, B, C, D)
    table.ready(A)
    table.wait(2.0, A, B, C, D)
    table.say(C, NotReady(table.open_round(), "not finite"))
    order = table.reduce(B)
    table.wait(0.5, A, B, C, D)
    table.reduced(order, B)
    table.wait(0.25, A, B, C, D)
    table.reduced(order, A)
    row = newest(table)
    assert row["outcome"] == "committed"
    marks = {peer[0]: mark for peer, mark in row["marks"].items()}
    times = {peer: (mark["ready_s"], mark["reduced_s"]) for peer, mark in marks.items()}
    assert times == {"a": (1.0, 3.75), "b": (3.0, 3.5), "c": (None, None), "d": (None, None)}
    assert marks["a"]["name"] == "a"
    assert states(table) == {
        "a": "contributed",
        "b": "contributed",
        "c": "excluded",
        "d": "received",
    }
    table.reduced(order, D)  # a spare may be later than the decision
    assert newest(table)["marks"][D]["reduced_s"] == 3.75


def test_who_dies_in_a_round_is_marked_as_lost() -> None:
    table = started(A, B, C, D)
    table.leave(D)  # before anything is reduced
    order = table.reduce(A, B, C)
    table.leave(C)
    table.reduced(order, A, B)
    assert states(table)["d"] == "lost"
    assert states(table)["c"] == "lost"


def test_marks_are_of_the_last_rounds_only() -> None:
    table = started(A, B)
    for _ in range(60):
        table.commit(A, B)
    past = table.master.scheduler.round_table.past
    assert len(past) == 50
    assert all(len(round_.marks) == 2 for round_ in past)


# ---------------------------------------------------------------- whether there is news


def test_what_people_see_changes_with_facts_and_not_with_heartbeats() -> None:
    table = started(A, B)
    before = table.master.context.change_count
    table.say(A, Heartbeat())
    table.wait(5.0, A, B)
    assert table.master.context.change_count == before
    table.say(A, progress(2.0))
    assert table.master.context.change_count > before
    before = table.master.context.change_count
    table.ready(A)  # not enough for a round: no effect follows
    assert table.master.context.change_count > before


def test_the_present_is_told_without_the_past() -> None:
    table = started(A, B)
    table.commit(A, B)
    whole, present = (
        table.status(),
        describe(table.master, table.now_s, past=False),
    )
    assert {name for name in whole if present[name] != whole[name]} == {"past_rounds", "events"}
    assert (present["past_rounds"], present["events"]) == (None, None)
