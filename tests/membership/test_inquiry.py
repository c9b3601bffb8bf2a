"""Members that withhold data from others or send them different data: inquiry, finding,
exclusion.
"""

from __future__ import annotations

import pytest

from holdfast.membership.master.rounds.inquiry import differing, waiting
from holdfast.membership.master.state.journal import RoundCommitted
from holdfast.membership.shared.event_kind import EventKind
from holdfast.protocol import messages as m
from tests.membership.table import DIGEST, OTHER_DIGEST, A, B, C, D, E, Table, owners_of, reducing

FIVE = (A, B, C, D, E)
DEADLINE_S = 10.0
LINK_S = DEADLINE_S / 2
ONE, TWO = b"1" * 32, b"2" * 32


def five() -> tuple[Table, m.Reduce]:
    """A reduction of five, each of which owns a chunk."""
    table, order = reducing(*FIVE, toml=f"[membership]\ndeadline_s = {DEADLINE_S}\n")
    owners_of(table, *FIVE)
    return table, order


def all_differ(table: Table, order: m.Reduce, *peers: str) -> None:
    """Each reports a result of its own."""
    for number, peer in enumerate(peers):
        table.reduced(order, peer, digest=bytes([number]) * 32)


def blame_e(table: Table, order: m.Reduce, *peers: str) -> None:
    """Each holds another result of E, and the same ones of all others."""
    for number, peer in enumerate(peers):
        made = dict.fromkeys((A, B, C, D), ONE) | {E: bytes([number]) * 32}
        table.diagnosed(order, peer, made=made)


def answer(
    contributions: tuple[str, ...] = (),
    results: tuple[str, ...] = (),
    **made: bytes,
) -> m.Diagnosis:
    names = {"a": A, "b": B, "c": C, "d": D, "e": E}
    digests = tuple(m.MadeDigest(names[name], digest) for name, digest in made.items())
    return m.Diagnosis(1, 1, contributions, results, digests)


# ---------------------------------------------------------------- what answers come to


def test_an_owner_that_lacks_a_contribution_is_excused_and_names_who_owes_it() -> None:
    told = {
        A: answer(contributions=(E,)),
        B: answer(results=(A,)),
        C: answer(results=(A,)),
        D: answer(results=(A,)),
        E: answer(results=(A,)),
    }
    assert waiting(told, FIVE).against == {E: {A}}


def test_who_names_most_of_the_others_excuses_nothing_by_it() -> None:
    told = {peer: answer(results=(E,)) for peer in (A, B, C, D)}
    told[E] = answer(contributions=(A, B, C, D))
    findings = waiting(told, FIVE)
    assert findings.against == {E: {A, B, C, D}}


def test_an_answer_that_is_ignored_does_not_excuse_its_speaker() -> None:
    told = {A: answer(results=(E,)), E: answer(contributions=(A, B), results=(C,))}
    assert waiting(told, FIVE).against == {E: {A}}


def test_who_has_reported_a_result_lacks_nothing_whatever_it_says() -> None:
    told = {A: answer(results=(E,)), E: answer(contributions=(B,))}
    assert waiting(told, FIVE, done=(B, C, D, E)).against == {E: {A}}


def test_unknown_peers_and_oneself_are_not_named() -> None:
    assert waiting({A: answer(contributions=(A, "9" * 32))}, FIVE).against == {}


def test_a_maker_is_measured_by_what_it_says_that_it_gave() -> None:
    told = {
        A: answer(a=ONE, e=ONE),
        B: answer(a=ONE, e=TWO),
        C: answer(a=ONE, e=TWO),
        E: answer(a=ONE, e=ONE),
    }
    findings = differing(told, FIVE)
    assert (findings.against, findings.culprits) == ({E: {B, C}}, [E])


def test_of_a_maker_that_says_nothing_the_commonest_result_counts() -> None:
    told = {A: answer(e=ONE), B: answer(e=TWO), C: answer(e=TWO)}
    assert differing(told, FIVE).against == {E: {A}}
    told = {A: answer(e=ONE), B: answer(e=TWO)}
    assert differing(told, FIVE).against == {E: {A, B}}


def test_who_holds_something_else_of_most_makers_says_it_of_itself() -> None:
    right = answer(a=ONE, b=ONE, c=ONE, d=ONE, e=ONE)
    told = dict.fromkeys((A, B, C, D), right) | {E: answer(a=TWO, b=TWO, c=TWO, d=TWO, e=TWO)}
    findings = differing(told, FIVE)
    assert findings.against == {E: {A, B, C, D}}  # of its own, too


# ---------------------------------------------------------------- conversations


@pytest.mark.fault(
    "somebody alive keeps what it owes another one",
    "no byte for `deadline_s`, or the others have finished; then everybody is asked",
    "the round goes on without one of the two, plans do without the pair; who fails several is"
    " left out",
)
def test_a_result_that_is_kept_from_one_costs_that_one_the_round_and_the_pair() -> None:
    table, order = five()
    table.reduced(order, A, B, C, E)
    table.wait(DEADLINE_S, *FIVE)
    for peer in (A, B, C, E):
        table.hears_no(peer, m.Diagnose)
    table.diagnosed(order, D, results=(E,))
    table.wait(LINK_S, *FIVE)
    (record,) = table.records(RoundCommitted)
    assert record.commit.digest == DIGEST
    assert len(table.master.context.roster) == 5
    table.applied(order, A, B, C, E)
    assert table.hear(D, m.SyncFragment)
    assert not table.master.routes.connected(D, E)
    assert table.master.routes.connected(C, E)


@pytest.mark.fault("somebody alive keeps what it owes another one")
def test_a_contribution_withheld_from_all_owners_costs_its_sender_the_round() -> None:
    table, order = five()
    table.wait(DEADLINE_S, *FIVE)
    table.diagnosed(order, A, B, C, D, contributions=(E,), results=(A, B, C, D))
    table.diagnosed(order, E)
    table.wait(DEADLINE_S / 10, *FIVE)
    assert table.hear(A, m.Flush).lost == (E,)
    assert len(table.master.context.roster) == 5


def test_who_says_nothing_is_named_by_the_others() -> None:
    table, order = five()
    table.wait(DEADLINE_S, *FIVE)
    table.diagnosed(order, A, B, C, D, results=(E,))
    table.hears_no(A, m.Flush)
    table.wait(2 * DEADLINE_S / 10, *FIVE)
    assert table.hear(A, m.Flush).lost == (E,)


def test_who_fails_a_second_one_is_the_one_to_go() -> None:
    table, order = five()
    table.master.routes.disputes.note(D, E, table.now_s)
    table.reduced(order, A, B, D, E)
    table.wait(0.9 * DEADLINE_S, *FIVE)
    table.master.routes.disputes.note(D, E, table.now_s)
    table.wait(0.1 * DEADLINE_S, *FIVE)
    table.diagnosed(order, C, results=(E,))
    table.wait(LINK_S, *FIVE)
    assert table.hear(A, m.Flush).lost == (E,)


def test_one_that_gives_each_another_result_is_left_out_and_the_round_run_again() -> None:
    table, order = five()
    all_differ(table, order, *FIVE)
    blame_e(table, order, *FIVE)
    again = table.hear(A, m.Reduce)
    assert (again.attempt, [c.peer for c in again.contributors]) == (2, [A, B, C, D])
    bad = [e.text for e in table.master.context.events if e.kind is EventKind.BAD]
    assert bad == ["round 1: e (eeeeeeee) gave others different results"]
    table.reduced(again, A, B, C, D)
    assert table.records(RoundCommitted)


def test_whom_an_owner_misled_is_synced_again_and_not_called_bad() -> None:
    table, order = five()
    table.reduced(order, A, B, C, E)
    table.reduced(order, D, digest=OTHER_DIGEST)
    table.diagnosed(order, A, B, C, E, made={E: ONE})
    table.diagnosed(order, D, made={E: TWO})
    assert table.records(RoundCommitted)
    assert not [e for e in table.master.context.events if e.kind is EventKind.BAD]
    table.applied(order, A, B, C, E)
    assert table.hear(D, m.SyncFragment)
    assert not table.master.routes.connected(D, E)


def test_two_are_not_asked() -> None:
    table, order = reducing(A, B, toml=f"[membership]\ndeadline_s = {DEADLINE_S}\n")
    table.reduced(order, A)
    table.reduced(order, B, digest=OTHER_DIGEST)
    table.hears_no(A, m.Diagnose)
    assert table.hear(A, m.Abort)


def test_answers_that_were_not_asked_for_are_ignored() -> None:
    table, order = five()
    table.say(A, m.Diagnosis(order.round, order.attempt, (B,)), m.Diagnosis(99, 1, (B,)))
    assert table.master.scheduler.rounds[order.round].running().inquiries.current is None


def test_a_report_without_an_answer_does_not_keep_the_others_from_being_asked() -> None:
    table, order = five()
    all_differ(table, order, A, B, C, D)
    table.wait(DEADLINE_S, *FIVE)
    table.reduced(order, E, digest=b"E" * 32)
    blame_e(table, order, A, B, C, D)
    table.wait(2.0, *FIVE)
    assert [c.peer for c in table.hear(A, m.Reduce).contributors] == [A, B, C, D]


def test_a_commit_waits_for_no_answer_once_all_have_reported_the_same() -> None:
    table, order = five()
    table.reduced(order, A, B, C, D)
    table.wait(DEADLINE_S, *FIVE)
    assert table.hear(E, m.Diagnose)
    table.reduced(order, E)
    assert table.records(RoundCommitted)


def test_who_takes_its_report_back_does_not_spoil_the_comparison() -> None:
    table, order = five()
    all_differ(table, order, *FIVE)
    table.say(E, m.ReduceFailed(order.round, order.attempt, (A,), False, "lost"))
    blame_e(table, order, A, B, C, D)
    table.wait(LINK_S, *FIVE)  # a lone word: who says it is left out
    blame_e(table, order, A, B, C, D)
    assert [c.peer for c in table.hear(A, m.Reduce).contributors] == [A, B, C, D]
    assert len(table.master.context.roster) == 5


def test_who_lacks_nothing_any_more_has_a_deadline_to_report() -> None:
    table, order = five()
    table.reduced(order, A, B, C, E)
    table.wait(DEADLINE_S, *FIVE)
    table.diagnosed(order, D, made=dict.fromkeys(FIVE, ONE))
    table.wait(0.9 * DEADLINE_S, *FIVE)
    assert D in table.master.context.roster
    table.wait(0.2 * DEADLINE_S, *FIVE)
    assert table.dropped(D) is m.RefusalCode.LAGGING


def test_when_bytes_move_after_a_stall_all_may_be_asked_again() -> None:
    table, order = five()
    table.wait(DEADLINE_S, *FIVE)
    for peer in FIVE:
        table.say(peer, m.Progress(1, 1, 1.0, None, "", 9, 9, 0, {}))
        table.wait(0.1, *FIVE)
        table.say(peer, m.Progress(1, 1, 1.0, None, "", 10, 10, 0, {}))
    table.diagnosed(order, *FIVE)
    table.hears_no(A, m.Reduce)
    table.wait(DEADLINE_S, *FIVE)
    table.diagnosed(order, A, B, C, D, results=(E,))
    table.diagnosed(order, E)
    table.wait(DEADLINE_S / 10, *FIVE)
    assert table.hear(A, m.Flush).lost == (E,)


def test_several_of_one_invite_and_line_have_one_word() -> None:
    voices = {A: "x", B: "y", C: "z", D: "z", E: "v"}
    findings = differing({C: answer(e=TWO), D: answer(e=TWO), E: answer(e=ONE)}, FIVE)
    assert (findings.culprits, findings.by_voice(voices).culprits) == ([E], [])


def test_what_a_successor_spreads_is_not_blamed_on_the_dead() -> None:
    table, order = five()
    table.reduced(order, A)
    table.leave(E)
    flush = table.hear(A, m.Flush)
    table.hold(flush, A, results=b"\x1f")
    table.hold(flush, B, C, D)
    attempt = table.hear(A, m.Repair).attempt
    for number, peer in enumerate((A, B, C, D)):
        table.say(peer, m.Reduced(order.round, attempt, bytes([number]) * 32))
    blame_e(table, order, A, B, C, D)
    assert [c.peer for c in table.hear(A, m.Reduce).contributors] == [A, B, C, D]
    assert not [e for e in table.master.context.events if e.kind is EventKind.BAD]
