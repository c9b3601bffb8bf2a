"""The end of a run, its going on after that, and what a restart of the master does not forget."""

from __future__ import annotations

from holdfast.membership.master.state.history import RunHistory
from holdfast.membership.master.state.journal import RunFinished, SpecChanged
from holdfast.membership.spec.spec_changes import with_end
from holdfast.protocol import messages as m
from tests.membership.table import LINEAGE, A, B, C, Table, head_of, hello_of, started

ROUNDS = "[run]\nrounds = {}\n[membership]\nmin_members = 2\n"


def finished(rounds: int = 1) -> Table:
    """Return a run whose rounds are committed, and whose members have left."""
    table = started(A, B, toml=ROUNDS.format(rounds))
    for _round in range(rounds):
        order = table.commit(A, B)
        table.applied(order, A, B)
    for peer in (A, B):
        assert table.hear(peer, m.Finish).round == rounds
    for peer in (A, B):
        table.leave(peer)
    return table


def back(table: Table) -> None:
    """Let the peers return with the state after one round, and with their trainers."""
    for peer in (A, B):
        hello = hello_of(peer, heads=(head_of(0, 1),), lineage=LINEAGE, incarnation=2)
        table.join(peer, hello=hello)


def change(table: Table, rounds: int) -> None:
    spec = with_end(table.master.context.spec, rounds=rounds)
    table.take(table.master.change_end(spec, table.now_s))


def test_a_finished_run_goes_on_with_more_rounds() -> None:
    table = finished()
    table.join(A)
    assert table.dropped(A) is m.RefusalCode.FINISHED
    change(table, 2)
    assert "run.rounds from 1 to 2" in table.announced()
    back(table)
    order = table.commit(A, B)
    table.applied(order, A, B)
    assert table.hear(A, m.Finish).round == order.round, "it ends again"
    assert [each.round for each in table.records(RunFinished)] == [1, 2]
    table.restart()
    table.join(A)
    assert table.dropped(A) is m.RefusalCode.FINISHED


def test_a_restart_with_more_rounds_goes_on_and_with_fewer_is_finished() -> None:
    table = finished()
    for rounds, over in ((3, False), (1, True)):
        table.spec = with_end(table.spec, rounds=rounds)
        table.journal.append(SpecChanged(table.spec.toml_text))
        table.restart()
        table.take(table.master.settle(table.now_s))
        assert table.master.context.history.finished is over
        assert table.status()["state"] == ("finished" if over else "waiting for members")


def test_members_are_told_of_more_rounds_in_the_middle_of_one() -> None:
    table = started(A, B, toml=ROUNDS.format(2))
    number = table.open_round()
    change(table, 9)
    for peer in (A, B):
        assert "rounds = 9" in table.hear(peer, m.NewSpec).spec_toml
    assert number in table.master.scheduler.rounds, "the open round goes on"
    for _round in range(3):
        order = table.commit(A, B)
        table.applied(order, A, B)
    table.hears_no(A, m.Finish)


def test_a_trainer_that_ends_after_the_last_round_is_not_lost() -> None:
    table = started(A, B, toml=ROUNDS.format(1))
    order = table.commit(A, B)
    table.applied(order, A, B)
    table.say(A, m.TrainerLost("the training process closed its connection"))
    assert "has no trainer any more: the run is finished" in table.announced()
    assert "lost" not in table.announced()


def test_rounds_without_a_commit_are_counted_over_restarts() -> None:
    table = started(A, B, toml="[membership]\nmin_members = 2\n")
    table.applied(table.commit(A, B), A, B)
    table.open_round()
    assert table.status()["aborted"] == 0, "it is in progress"
    table.restart()
    assert table.status()["aborted"] == 1
    back(table)
    table.hear(A, m.Open)
    status = table.status()
    assert (status["committed"], status["aborted"]) == (1, 1)
    assert RunHistory.replay(table.journal).schedule.uncommitted_count == 2


def test_a_machine_that_was_never_a_member_was_refused_and_not_removed() -> None:
    table = started(A, B)
    for peer, word in ((B, "removed from the run"), (C, "refused by the run's operator")):
        table.take(table.master.kick(peer, "no", table.now_s))
        table.join(peer)
        assert f"was refused: {word}: no" in table.announced()
