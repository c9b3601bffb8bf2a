"""Audits as conversations: who is asked to check, and what follows from what it finds.

Each planted bug removes one rule, and the conversation of that name must miss it:

    one word           the word of one checker removes an owner
    owns again         the suspects own chunks again when the round is run again
    one bloc           two checkers of one voting bloc count as two
    two bytes          the contributor that two contradictions have in common is no suspect
    withheld           an owner that withholds from two checkers is not left out
    silence is guilt   a chunk that cannot be checked counts as wrong
    heard for ever     a checker that has contradicted several owners is drawn again
    any transfer       findings of an earlier order count for a later one
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.membership.master.coordinator import Coordinator, Grant
from holdfast.membership.master.rounds import audits
from holdfast.membership.master.rounds.attempt import Check
from holdfast.membership.master.rounds.audits import ALONE_MAX, CHECKERS_MAX, Auditing
from holdfast.membership.master.state.history import RunHistory
from holdfast.membership.master.state.journal import PeerRevoked
from holdfast.membership.spec.spec import RunSpec
from holdfast.protocol import messages as m
from tests import planting
from tests.membership.table import (
    CONTRIBUTOR,
    DIGEST,
    FOUNDER,
    LINEAGE,
    A,
    B,
    C,
    D,
    E,
    Table,
    head_of,
    hello_of,
    root_of,
    started,
)
from tests.planting import Bugs, Patch

ALL = "[reduce]\naudit = 1.0\n[membership]\nmin_members = 2\n"
PEERS = (A, B, C, D, E)

BUGS = Bugs(
    {
        "one word": planting.one_word,
        "owns again": planting.owns_again,
        "silence is guilt": planting.silence_is_guilt,
    }
)
bug = BUGS.named


def owner_of(order: m.Reduce) -> str:
    """The fragment is small: one chunk."""
    ((owner, count),) = [(run.peer, run.chunk_count) for run in order.plan.owners]
    assert count == 1
    return owner


def ordered(table: Table, peers: Sequence[str] = PEERS) -> tuple[str, m.AuditOrder]:
    """Return the peer that is asked to check, and the order, which all hear."""
    heard = [
        (peer, message)
        for peer in peers
        for message in table.heard.get(peer, [])
        if isinstance(message, m.AuditOrder)
    ]
    for peer, message in heard:
        table.heard[peer].remove(message)
    orders = {message for _peer, message in heard}
    assert len(orders) == 1, "one check is ordered"
    (order,) = orders
    ((checker, chunks),) = [(each.checker, each.chunks) for each in order.checks]
    assert chunks == (0,)
    return checker, order


def to_check(table: Table, peers: Sequence[str] = PEERS) -> tuple[m.Reduce, str, str, m.AuditOrder]:
    """A round whose result is there: order, owner, checker, and what it was told."""
    order = table.reduce(*peers)
    table.reduced(order, *peers)
    checker, audit = ordered(table, peers)
    assert checker != owner_of(order)
    return order, owner_of(order), checker, audit


def checking() -> tuple[Table, m.Reduce, str, str, m.AuditOrder]:
    """A run of five with such a round."""
    table = started(*PEERS, toml=ALL)
    return table, *to_check(table)


def found(audit: m.AuditOrder, *findings: m.ChunkFinding) -> m.Audited:
    return m.Audited(audit.round, audit.attempt, audit.transfer, findings)


def differs(peer: str = "") -> m.ChunkFinding:
    return m.ChunkFinding(0, True, peer)


def unchecked(peer: str = "") -> m.ChunkFinding:
    return m.ChunkFinding(0, False, peer)


def word(table: Table, owner: str, checker: str, contributor: str = "") -> None:
    """Have a checker contradict an owner in an earlier round."""
    auditing = table.master.scheduler.driver.audits
    attempt = next(iter(table.master.scheduler.rounds.values())).running()
    suspects = auditing._voices(attempt, {owner, checker, contributor} - {""})
    auditing.contradictions.append(audits.SumContradiction(0, owner, checker, suspects))


def others(*than: str) -> list[str]:
    return [peer for peer in PEERS if peer not in than]


def rerun(table: Table, order: m.Reduce, peers: Sequence[str] = PEERS) -> m.Reduce:
    """Return the order by which the round is run again, with these contributors."""
    again = next(each for each in reversed(table.heard[peers[0]]) if isinstance(each, m.Reduce))
    assert (again.round, again.version) == (order.round, order.version)
    assert again.attempt > order.attempt
    assert [c.peer for c in again.contributors] == list(peers)
    table.hears_no(peers[0], m.Commit)
    return again


def next_check(
    table: Table, fits: Callable[[str, str], object], peers: Sequence[str] = PEERS
) -> tuple[m.Reduce, str, str, m.AuditOrder]:
    """Have rounds until such an owner is checked by such a checker."""
    for _round in range(100):
        order, owner, checker, audit = to_check(table, peers)
        if fits(owner, checker):
            return order, owner, checker, audit
        table.say(checker, found(audit))
        table.applied(order, *peers)
        table.forget()
    raise AssertionError("no such check was drawn")


def removed(table: Table) -> list[str]:
    return [record.peer for record in table.records(PeerRevoked)]


# ---------------------------------------------------------------- checking


def test_without_audits_nobody_checks() -> None:
    table = started(*PEERS)
    order = table.reduce(*PEERS)
    table.reduced(order, *PEERS)
    table.hear(A, m.Commit)


def test_nothing_is_committed_before_it_was_checked() -> None:
    table, _order, _owner, checker, audit = checking()
    table.hears_no(A, m.Commit)
    for other in PEERS:
        if other != checker:
            table.say(other, found(audit), found(audit, differs()))  # nobody asked it
    table.hears_no(A, m.Commit)
    table.say(checker, found(audit))
    table.hear(A, m.Commit)
    assert table.status()["audited"] == 1


@pytest.mark.parametrize("peers", [(A,), (A, B)])
def test_of_two_nobody_checks(peers: tuple[str, ...]) -> None:
    table = started(*peers, toml="[reduce]\naudit = 1.0\n")
    table.commit(*peers)


def test_who_left_out_a_contributor_that_is_not_lost_owns_nothing_in_the_round() -> None:
    table = started(*PEERS, toml=ALL)
    order = table.reduce(*PEERS)
    owner = owner_of(order)
    manifest = (m.ContributorRun(b"\x0f", 1),)
    for peer in PEERS:
        table.say(peer, m.Reduced(order.round, order.attempt, DIGEST, manifest))
    table.hears_no(A, m.Commit)
    assert owner_of(table.hear(A, m.Reduce)) != owner


# ---------------------------------------------------------------- sums that differ


def one_word() -> None:
    table, order, owner, checker, audit = checking()
    table.say(checker, found(audit, differs()))
    assert removed(table) == []
    assert owner in table.master.context.roster
    rerun(table, order)


def owns_again() -> None:
    table, order, owner, checker, audit = checking()
    table.say(checker, found(audit, differs()))
    assert "finds another sum than its owner" in table.announced()
    again = rerun(table, order)
    assert owner_of(again) not in (owner, checker)
    table.forget()
    table.reduced(again, *PEERS)
    second, audit = ordered(table)
    assert second not in (owner, checker)
    table.say(second, found(audit))
    table.hear(A, m.Commit)


def test_an_owner_that_two_checkers_contradict_leaves_the_run() -> None:
    table, order, owner, checker, audit = checking()
    word(table, owner, others(owner, checker)[0])
    table.say(checker, found(audit, differs()))
    assert removed(table) == [owner]
    assert table.dropped(owner) is m.RefusalCode.KICKED
    assert "is removed: checks of sums contradict it" in table.announced()
    assert not table.master.scheduler.driver.audits.contradictions, "it was all its fault"
    rerun(table, order, others(owner))
    table.restart()
    assert RunHistory.replay(table.journal).members.is_out(owner)
    table.join(owner, CONTRIBUTOR, hello_of(owner, incarnation=2))
    assert table.dropped(owner) is m.RefusalCode.KICKED
    assert owner in table.status()["revoked"]


def test_what_an_owner_made_in_other_rounds_goes_with_it() -> None:
    """Nobody has checked that; repaired, it would be spread as it is."""
    table = started(*PEERS, toml=ALL, fragments=2)
    first = table.reduce(*PEERS)
    table.forget()
    (second,) = [r for r in table.master.scheduler.rounds.values() if r.number != first.round]
    for peer in PEERS:
        root = root_of(second.fragment, second.version)
        table.say(peer, m.Ready(second.number, 10, 1.0, root, second.at_step))
    other = table.hear(A, m.Reduce)
    table.reduced(first, *PEERS)
    checker, audit = ordered(table)
    owner = owner_of(first)
    word(table, owner, others(owner, checker)[0])
    table.forget()
    table.say(checker, found(audit, differs()))
    assert removed(table) == [owner]
    left = others(owner)
    again = [each for each in table.heard[left[0]] if isinstance(each, m.Reduce)]
    assert {message.round for message in again} == {first.round, other.round}
    assert all(owner not in message.receivers for message in again)


def test_a_checker_is_not_asked_again_about_an_owner_that_it_has_contradicted() -> None:
    table, order, owner, checker, audit = checking()
    pair = owner, checker
    word(table, *pair)
    table.say(checker, found(audit))
    table.applied(order, *PEERS)
    table.forget()
    with pytest.raises(AssertionError, match="no such check"):
        next_check(table, lambda *both: both == pair)


@bug("one bloc")
def _(patch: Patch) -> None:
    def voices(_self: Auditing, _attempt: object, peers: Sequence[str]) -> dict[str, object]:
        return {peer: ("", peer) for peer in peers}

    patch.setattr(Auditing, "_voices", voices)


def one_bloc() -> None:
    table = Table(ALL)
    table.found()
    table.join_in_sync(B)
    bloc = Grant(m.Role.CONTRIBUTOR, invite="of one person")
    for peer in (C, D, E):
        table.join(peer, bloc, host="192.0.2.7")
        table.sync(peer)
    table.forget()
    bloc_checks = next_check(table, lambda owner, by: owner in (A, B) and by in (C, D, E))
    _order, owner, checker, audit = bloc_checks
    word(table, owner, next(peer for peer in (C, D, E) if peer != checker))
    table.say(checker, found(audit, differs()))
    assert removed(table) == []
    assert table.master.scheduler.driver.audits.barred() == set()


@bug("two bytes")
def _(patch: Patch) -> None:
    def beside(self: audits.SumContradiction, peer: str) -> set[object]:
        return {self.suspects[each] for each in {self.owner, self.checker} - {peer}}

    patch.setattr(audits.SumContradiction, "beside", beside)


def two_bytes() -> None:
    """One of the two may have sent unlike bytes, or said so: neither owns chunks, both stay."""
    table, order, owner, checker, audit = checking()
    liar, other, _another = others(owner, checker)
    word(table, owner, other, liar)
    table.say(checker, found(audit, differs(liar)))
    assert removed(table) == []
    assert table.master.scheduler.driver.audits.barred() == {owner, liar}
    rerun(table, order)


def test_a_contributor_that_is_all_that_contradictions_have_in_common_leaves() -> None:
    table, order, owner, checker, audit = checking()
    liar, other, another = others(owner, checker)
    word(table, other, another, liar)
    table.say(checker, found(audit, differs(liar)))
    assert removed(table) == [liar]
    rerun(table, order, others(liar))


@bug("heard for ever")
def _(patch: Patch) -> None:
    patch.setattr(audits, "ALONE_MAX", 99)


def heard_for_ever() -> None:
    table, order, owner, checker, audit = checking()
    for other in others(owner, checker)[:ALONE_MAX]:
        word(table, other, checker)
    table.say(checker, found(audit))
    table.applied(order, *PEERS)
    table.forget()
    with pytest.raises(AssertionError, match="no such check"):
        next_check(table, lambda _owner, by: by == checker)


def test_the_operator_hears_of_a_checker_that_checks_no_more() -> None:
    table, order, owner, checker, audit = checking()
    word(table, others(owner, checker)[0], checker)
    table.say(checker, found(audit, differs()))
    assert f"has contradicted {ALONE_MAX} owners alone: it checks no more" in table.announced()
    assert removed(table) == []
    rerun(table, order)


@given(st.data())
def test_no_words_of_one_person_remove_another_member(data: st.DataObject) -> None:
    """One of its two identities is among the suspects of each contradiction: so much it can do."""
    mine, honest = [A, B], [C, D, E, "f" * 32]
    voices = {peer: ("its own", peer) for peer in honest} | dict.fromkeys(mine, ("one", "line"))
    auditing = Coordinator(RunSpec.parse(ALL), "5" * 32, 1, b"secret").scheduler.driver.audits
    for number in range(data.draw(st.integers(2, 12))):
        liar = data.draw(st.sampled_from(mine))
        suspects = [liar, *data.draw(st.lists(st.sampled_from(honest), min_size=1, max_size=2))]
        owner, checker, *_rest = data.draw(st.permutations(list(dict.fromkeys(suspects))))
        among = {peer: voices[peer] for peer in suspects}
        auditing.contradictions.append(audits.SumContradiction(number, owner, checker, among))
        assert not any(auditing._is_common(peer) for peer in honest)


# ---------------------------------------------------------------- what cannot be checked


@bug("withheld")
def _(patch: Patch) -> None:
    patch.setattr(Auditing, "_leave_out_silent", lambda *_: "")


def withheld() -> None:
    """An owner that sends its checkers nothing is left out of the round, and stays in the run."""
    table, order, owner, first, audit = checking()
    table.say(first, found(audit, unchecked(owner)))
    table.hears_no(first, m.Commit)
    second, audit = ordered(table)
    assert second not in (owner, first)
    table.say(second, found(audit, unchecked(owner)))
    rerun(table, order, others(owner))
    assert "2 checkers got nothing from" in table.announced()
    assert owner in table.master.context.roster


def silence_is_guilt() -> None:
    """A chunk that no checker could check is committed, and nobody is accused."""
    table, _order, owner, checker, audit = checking()
    tried = []
    for _checker in range(CHECKERS_MAX):
        tried.append(checker)
        table.say(checker, found(audit, unchecked()))
        if len(tried) < CHECKERS_MAX:
            table.hears_no(A, m.Commit)
            checker, audit = ordered(table)
    assert len({owner, *tried}) == CHECKERS_MAX + 1
    table.hear(A, m.Commit)
    assert not table.master.scheduler.driver.audits.contradictions
    assert table.status()["audited"] == 0


def test_one_checkers_word_that_a_member_is_silent_costs_it_nothing() -> None:
    table, _order, owner, first, audit = checking()
    table.say(first, found(audit, unchecked(owner)))
    second, audit = ordered(table)
    table.say(second, found(audit))
    commit = table.hear(A, m.Commit)
    assert [c.peer for c in commit.contributors] == list(PEERS)


@pytest.mark.fault("a checker is silent or slow", "a deadline", "another one checks")
def test_a_checker_that_is_silent_is_replaced() -> None:
    table, _order, _owner, first, late = checking()
    table.wait(table.spec.membership.deadline_s + 1, *PEERS)
    second, audit = ordered(table)
    assert second != first
    table.say(first, found(late))  # it is not its turn any more
    table.hears_no(A, m.Commit)
    table.say(second, found(audit))
    table.hear(A, m.Commit)


def test_a_checker_that_bytes_reach_keeps_its_turn_and_no_longer() -> None:
    table, _order, _owner, checker, _audit = checking()
    for at in range(4):
        table.say(checker, m.Progress(1, 1, 1.0, None, "", 10 + at, 10 + at, 0, {}))
        table.wait(0.9 * table.spec.membership.deadline_s, *PEERS)
        for peer in PEERS:
            table.hears_no(peer, m.Commit)
    table.wait(table.spec.membership.deadline_s, *PEERS)
    assert ordered(table)[0] != checker


def test_the_only_checker_of_three_is_silent_and_the_round_goes_on() -> None:
    peers = (A, B, C)
    table = started(*peers, toml=ALL)
    _order, owner, checker, audit = to_check(table, peers)
    table.say(checker, found(audit, unchecked()))
    (left,) = {*peers} - {owner, checker}
    assert ordered(table, peers)[0] == left
    table.wait(table.spec.membership.deadline_s + 1, *peers)
    table.hear(A, m.Commit)


@pytest.mark.fault(
    "an owner leaves before its chunks are checked",
    "its connection",
    "the round is run again without it",
)
def test_an_owner_that_is_gone_before_it_was_checked_leaves_nothing_behind() -> None:
    table, order, owner, _checker, _audit = checking()
    table.leave(owner)
    rerun(table, order, others(owner))


def test_a_result_that_an_owner_left_behind_when_it_died_is_made_again() -> None:
    """The owner has sent its results and left; its own contribution cannot come again."""
    table = started(*PEERS, toml=ALL)
    order = table.reduce(*PEERS)
    owner = owner_of(order)
    left = others(owner)
    table.leave(owner)
    flush = table.hear(left[0], m.Flush)
    table.hold(flush, *left, results=b"\x01")
    repair = table.hear(left[0], m.Repair)
    assert not repair.assignments[0].from_scratch
    table.reduced(order, *left, attempt=repair.attempt)
    table.hears_no(left[0], m.Commit)
    assert table.hear(left[0], m.Reduce).attempt > repair.attempt


@pytest.mark.parametrize("came", [True, False])
def test_a_contributor_that_is_gone_ends_no_check_and_begins_none(came: bool) -> None:
    """The checker may have its contribution; another checker cannot get it."""
    table, _order, owner, checker, audit = checking()
    gone = others(owner, checker)[0]
    table.leave(gone)
    table.hears_no(owner, m.Commit)
    table.say(checker, found(audit) if came else found(audit, unchecked(gone)))
    table.hear(owner, m.Commit)
    assert table.status()["audited"] == came


def test_a_checker_that_is_lost_leaves_its_chunk_unchecked() -> None:
    """The chunk has its contribution, which cannot come again."""
    table, _order, owner, checker, _audit = checking()
    table.leave(checker)
    table.hear(owner, m.Commit)


def test_chunks_that_a_successor_adds_are_checked_as_its_own() -> None:
    table = started(*PEERS, toml=ALL)
    order = table.reduce(*PEERS)
    owner = owner_of(order)
    left = others(owner)
    table.leave(owner)
    repair = table.repair(*left)
    successor = repair.assignments[0].owner
    place = [c.peer for c in order.contributors].index(owner)
    manifest = (m.ContributorRun(bytes([0b11111 & ~(1 << place)]), 1),)
    table.reduced(order, *left, attempt=repair.attempt, manifest=manifest)
    checker, audit = ordered(table, left)
    assert checker != successor
    table.say(checker, found(audit))
    table.hear(left[0], m.Commit)


def test_a_master_that_starts_during_a_check_has_it_made_again() -> None:
    table, order, _owner, checker, audit = checking()
    held = m.Reduced(order.round, order.attempt, DIGEST)
    table.restart()
    table.master.context.lot = b"of the master that starts"
    for peer in PEERS:
        hello = hello_of(peer, heads=[head_of(0, order.version)], lineage=LINEAGE, undecided=[held])
        table.join(peer, FOUNDER if peer == A else CONTRIBUTOR, hello)
        table.reduced(order, peer)
    second, again = ordered(table)
    assert again.transfer != audit.transfer
    table.say(checker, found(audit))  # of the order by the master before
    table.hears_no(A, m.Commit)
    table.say(second, found(again))
    table.hear(A, m.Commit)


@bug("any transfer")
def _(patch: Patch) -> None:
    patch.setattr(Check, "__eq__", lambda self, other: self.checker == other.checker)


def any_transfer() -> None:
    """A checker that gets a chunk of another one has not checked it with its first chunks."""
    table, _order, _owner, checker, order = checking()
    (round_,) = table.master.scheduler.rounds.values()
    audit = round_.running().audit
    assert audit is not None
    later = audit.open[1] = Check(checker, order.transfer + 1)
    member = table.master.context.roster.members[checker]
    table.master.scheduler.driver.audits.audited(member, found(order))
    assert audit.open == {1: later}


CONVERSATIONS = {
    "one word": one_word,
    "owns again": owns_again,
    "one bloc": one_bloc,
    "two bytes": two_bytes,
    "heard for ever": heard_for_ever,
    "withheld": withheld,
    "silence is guilt": silence_is_guilt,
    "any transfer": any_transfer,
}


@pytest.mark.fault(
    "an owner adds up something else than it was given",
    "another member adds the chunk up again",
    "the round is run again; an owner that two contradict leaves",
)
@pytest.mark.parametrize("name", CONVERSATIONS)
def test_a_rule_holds(name: str) -> None:
    CONVERSATIONS[name]()


@pytest.mark.planted
@pytest.mark.parametrize("name", BUGS)
def test_a_rule_that_is_taken_out_is_missed(name: str, monkeypatch: Patch) -> None:
    BUGS[name](monkeypatch)
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        CONVERSATIONS[name]()


def test_every_rule_is_listed_above() -> None:
    assert set(BUGS) == set(CONVERSATIONS)
    assert BUGS.are_listed(__doc__)


# ---------------------------------------------------------------- the draw


def draws(share: float, rounds: int, chunks: int, lot: bytes = b"secret") -> list[set[int]]:
    """Return the chunks that are drawn in each of ``rounds`` rounds."""
    spec = RunSpec.parse(f"[reduce]\naudit = {share}\n")
    auditing = Coordinator(spec, "5" * 32, 1, lot).scheduler.driver.audits
    auditing._too_few = lambda number: False  # type: ignore[method-assign]
    return [{chunk for chunk, _lot in auditing._draw(at, 1, chunks)} for at in range(rounds)]


def test_chunks_are_drawn_as_often_as_the_spec_says() -> None:
    found = sum(len(drawn) for drawn in draws(0.05, 1_000, 40))
    assert abs(found / 40_000 - 0.05) < 0.005
    assert draws(1.0, 3, 40) == [set(range(40))] * 3
    assert draws(0.05, 50, 40) != draws(0.05, 50, 40, b"another secret")


@pytest.mark.parametrize(("rounds", "chunks"), [(1, 1), (20, 1), (5, 4), (1, 14)])
def test_a_liar_escapes_as_rarely_as_is_said(rounds: int, chunks: int) -> None:
    """Lies in so many chunks of each of so many rounds, tried 2,000 times."""
    tries, share = 2_000, 0.05
    drawn = draws(share, tries * rounds, chunks)
    escaped = sum(
        not any(drawn[start : start + rounds]) for start in range(0, tries * rounds, rounds)
    )
    expected = (1 - share) ** (rounds * chunks)
    assert abs(escaped / tries - expected) < 4 * (expected * (1 - expected) / tries) ** 0.5
