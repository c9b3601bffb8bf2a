"""The pace of rounds: nobody waits for a slower peer's steps, unless the spec says so."""

from __future__ import annotations

import pytest

from holdfast.membership.master.rounds.round_clock import LEAD_MARGIN
from holdfast.membership.master.trainers import LATE_MAX, REST_DEADLINES
from holdfast.protocol.messages import Open, Reduce

from .table import A, B, C, D, Table

STEP_S = 1.0
H = 10  # steps from round to round


def table_of(toml: str = "", **diloco: object) -> Table:
    keys = {"sync_every": H, **diloco}
    lines = "".join(f"{name} = {value!r}\n".replace("'", '"') for name, value in keys.items())
    return Table(f"{lines}[membership]\ngrace_s = 5.0\n{toml}")


def is_nudged(table: Table, peer: str) -> bool:
    heard = table.heard.get(peer, [])
    return any(isinstance(message, Open) and message.at_step == 0 for message in heard)


def one_round(
    table: Table, fast: str, slow: str, slow_step_s: float, *others: str
) -> tuple[float, float]:
    """A round at the pace of the fast one; the slow one posts so long after it is nudged.

    Returns when the slow one was nudged and when it was ready, in seconds after the round's time.
    """
    everybody = (fast, slow, *others)
    due_s, nudged_s, ready_s = table.now_s + H * STEP_S, None, None
    while table.now_s < due_s or ready_s is None:
        table.wait(STEP_S / 4, *everybody)
        if table.now_s == due_s:
            for peer in (fast, *others):
                table.ready(peer, step_s=STEP_S)
        if nudged_s is None and is_nudged(table, slow):
            nudged_s = table.now_s
        if nudged_s is not None and ready_s is None and table.now_s >= nudged_s + slow_step_s:
            table.ready(slow, step=3, step_s=slow_step_s)
            ready_s = table.now_s
    order = table.hear(fast, Reduce)
    table.forget()  # the next round may nudge the slow one as soon as it opens
    table.complete(order, *everybody)
    assert nudged_s is not None
    return nudged_s - due_s, ready_s - due_s


def two_of_three_ready(table: Table, *, reduction_s: float) -> float:
    """After rounds of three the pace is known; in the next one C is late. Returns a step's time."""
    table.start(A, B, C)
    for _ in range(3):
        table.wait(H * STEP_S, A, B, C)
        order = table.reduce(A, B, C)
        table.wait(reduction_s, A, B, C)
        table.complete(order, A, B, C)
    step_s = table.master.scheduler.clock.step_s
    table.forget()
    table.wait(H * STEP_S, A, B, C)
    table.ready(A)
    table.ready(B)
    return step_s


def test_in_lockstep_all_are_waited_for_and_nobody_is_nudged() -> None:
    table = table_of(pace="lockstep")
    table.start(A, B, C)
    table.forget()
    table.ready(A)
    table.ready(B)
    table.wait(1_000.0, A, B, C)
    table.hears_no(A, Reduce)
    table.hears_no(C, Open)
    table.ready(C)
    assert len(table.hear(A, Reduce).contributors) == 3


def test_who_is_late_gives_what_it_has_when_the_first_has_come() -> None:
    table = table_of()
    table.start(A, B, C)
    number = table.open_round()
    table.wait(3.0, A, B, C)
    table.hears_no(B, Open)
    table.ready(A)
    nudged = table.hear(B, Open)
    assert (nudged.round, nudged.at_step) == (number, 0)
    table.wait(1.0, A, B, C)
    table.hears_no(B, Open)  # once is enough
    table.hears_no(A, Open)
    table.ready(C)
    table.ready(B, weight=7, step=4)
    order = table.hear(A, Reduce)
    assert [(c.peer, c.weight) for c in order.contributors][1] == (B, 7)


@pytest.mark.fault(
    "a contributor is slower, or comes back while the others go on",
    "it is not ready when the first is, or was not in the last rounds",
    "it contributes what it has",
)
def test_a_slow_peer_is_nudged_so_early_that_nobody_waits_for_it() -> None:
    table = table_of()
    table.start(A, B)
    first = one_round(table, A, B, 7.0)
    assert first == (0.0, 7.0), "nothing is known of it, and A waits"
    one_round(table, A, B, 7.0)  # of which the pace is known, and A's waiting is a part of it
    for _ in range(4):
        nudged_s, ready_s = one_round(table, A, B, 7.0)
    assert nudged_s <= -LEAD_MARGIN * 7.0 + 0.5
    assert ready_s < 0.0


def test_a_grace_is_never_less_than_who_is_as_fast_as_the_run_needs() -> None:
    """Else who was left out of one round is left out of the next one, some steps behind."""
    table = table_of(overlap=1)
    step_s = two_of_three_ready(table, reduction_s=3.0)  # more than the overlap
    assert is_nudged(table, C)
    table.wait(2 * step_s - 0.1, A, B, C)
    table.ready(C, step=H * 3 + 2)
    assert len(table.hear(A, Reduce).contributors) == 3


def test_a_distant_peer_is_not_taken_for_a_slow_one() -> None:
    """The peer is ready late after a nudge, but its steps are as fast as those of the others."""
    table = table_of()
    table.start(A, B)
    for _ in range(4):
        table.wait(H * STEP_S, A, B)
        table.ready(A, step_s=STEP_S)
        table.wait(5.0, A, B)
        assert is_nudged(table, B)
        table.ready(B, step_s=STEP_S)
        order = table.hear(A, Reduce)
        table.forget()
        table.complete(order, A, B)
    table.wait(H * STEP_S, A, B)
    assert not is_nudged(table, B)


def test_somebody_always_comes_to_the_step() -> None:
    """Also when all have become slow at once: the pace is still that of before."""
    table = table_of()
    table.start(A, B)
    for _ in range(3):
        table.wait(H * STEP_S, A, B)
        table.ready(A, step_s=5 * STEP_S)
        table.forget()
        table.ready(B, step_s=5 * STEP_S)
        order = table.hear(A, Reduce)
        table.forget()
        table.complete(order, A, B)
    table.wait(H * STEP_S - 0.5, A, B)
    assert [is_nudged(table, peer) for peer in (A, B)].count(True) == 1


def test_the_grace_is_what_the_overlap_leaves() -> None:
    table = table_of(overlap=4)
    slack_s = 4 * two_of_three_ready(table, reduction_s=1.0) - 1.0
    table.wait(slack_s - 0.1, A, B, C)
    table.hears_no(A, Reduce)
    table.wait(0.1, A, B, C)
    assert [c.peer for c in table.hear(A, Reduce).contributors] == [A, B]


def late_rounds(table: Table, count: int, late: str, *others: str) -> None:
    for _ in range(count):
        order = None
        table.forget()
        for peer in others:
            table.ready(peer)
        table.wait(5.0, late, *others)
        order = table.hear(others[0], Reduce)
        assert late not in [c.peer for c in order.contributors]
        table.complete(order, late, *others)


@pytest.mark.fault(
    "a contributor is always late",
    "it is not ready within the grace, three times in a row",
    "a spare takes its place; it is tried again later",
)
def test_who_is_always_late_becomes_a_spare_and_is_tried_again() -> None:
    table = table_of("contributors = 3\ndeadline_s = 10\n")
    table.start(A, B, C, spares=(D,))
    late_rounds(table, LATE_MAX - 1, C, A, B, D)
    assert table.roles()["c"] == "contributor*"
    late_rounds(table, 1, C, A, B, D)
    assert table.roles() == {
        "a": "contributor*",
        "b": "contributor*",
        "c": "spare*",
        "d": "contributor*",
    }
    assert "it was late again and again; it is tried again in 40 s" in table.why(C)
    table.leave(D)
    assert table.roles()["c"] == "spare*", "its time is not over"
    table.wait(REST_DEADLINES * 10.0, A, B, C)
    assert table.roles()["c"] == "contributor*"


def test_one_round_in_time_is_enough_to_stay() -> None:
    table = table_of("contributors = 3\n")
    table.start(A, B, C)
    for _ in range(2):
        late_rounds(table, LATE_MAX - 1, C, A, B)
        table.commit(A, B, C)
    late_rounds(table, LATE_MAX - 1, C, A, B)
    assert table.roles()["c"] == "contributor*"


def test_rounds_that_trainers_are_ahead_of_say_nothing_of_the_pace() -> None:
    """After a master's restart they come one soon after the other: nobody is slow for that."""
    table = table_of()
    table.start(A, B, C)
    for _ in range(3):
        table.wait(STEP_S, A, B, C)
        for peer in (A, B, C):
            table.ready(peer, step=10 * H, step_s=STEP_S)
        order = table.hear(A, Reduce)
        table.complete(order, A, B, C)
    table.forget()
    table.wait(STEP_S, A, B, C)
    assert not any(is_nudged(table, peer) for peer in (A, B, C))
    table.ready(A, step=10 * H, step_s=STEP_S)
    assert is_nudged(table, B), "the first one has come"


def test_a_prediction_that_nobody_kept_does_not_leave_the_fastest_out_of_further_rounds() -> None:
    """A fast contributor that began late in a round reaches each further step as late as the
    first.
    """
    table = table_of()
    table.start(A, B, C)
    slow_step_s = 4 * STEP_S

    def a_round(late_s: float, *, nudged: bool) -> bool:
        """A reaches its step so late; B and C post when they are nudged. Returns whether A is in
        it.
        """
        table.forget()
        reaches_s, posted = table.now_s + H * STEP_S + late_s, set[str]()
        while not any(isinstance(message, Reduce) for message in table.heard.get(B, [])):
            table.wait(STEP_S / 4, A, B, C)
            assert table.now_s < reaches_s + 5 * H * STEP_S, "the round never closes"
            if table.now_s >= reaches_s and A not in posted:
                posted.add(A)
                table.ready(A, step_s=STEP_S)
            for peer in (B, C):
                if peer not in posted and is_nudged(table, peer):
                    assert nudged or A in posted
                    posted.add(peer)
                    table.ready(peer, step=3, step_s=slow_step_s)
        order = table.hear(B, Reduce)
        table.complete(order, A, B, C)
        return any(each.peer == A for each in order.contributors)

    assert [a_round(0.0, nudged=True) for _ in range(3)] == [True] * 3
    assert not a_round(2 * H * STEP_S, nudged=True), "it began late"
    assert a_round(H * STEP_S, nudged=False)
    assert [a_round(0.0, nudged=True) for _ in range(3)] == [True] * 3
