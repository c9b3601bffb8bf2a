"""Audits as conversations: who is asked to look, what follows from what is seen, who is convicted."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from attrs import evolve

from holdfast.membership.master.coordinator import Coordinator
from holdfast.membership.master.rounds.audits import (
    AUDITORS_MAX,
    FALSE_MAX,
    FORGIVEN_BY,
    WITHHELD_MAX,
)
from holdfast.membership.master.state.journal import PeerCleared, PeerQuarantined, RunHistory
from holdfast.membership.master.state.master_effects import CheckProof
from holdfast.membership.spec.spec import RunSpec
from holdfast.protocol.messages import (
    PROOF_BYTES_MAX,
    Audited,
    AuditOrder,
    Commit,
    ContributorRun,
    Flush,
    ProofPiece,
    ProofWanted,
    Ready,
    Reduce,
    Reduced,
    RefusalCode,
    Repair,
)
from tests.membership.table import CONTRIBUTOR, DIGEST, A, B, C, D, E, Table, hello_of, root_of
from tests.plain import describe

ALL = "[reduce]\naudit = 1.0\n[membership]\nmin_members = 2\n"
PEERS = (A, B, C, D)


def a_table(toml: str = ALL, peers: Sequence[str] = PEERS) -> Table:
    table = Table(toml)
    table.start(*peers)
    return table


def owner_of(order: Reduce) -> str:
    """The fragment is small: one chunk."""
    ((owner, count),) = [(run.peer, run.chunk_count) for run in order.plan.owners]
    assert count == 1
    return owner


def look(table: Table, peers: Sequence[str] = PEERS) -> tuple[str, AuditOrder]:
    """Return the peer that was asked to audit, and its order."""
    asked = [
        (peer, message)
        for peer in peers
        for message in table.heard.get(peer, [])
        if isinstance(message, AuditOrder)
    ]
    ((auditor, audit),) = asked
    table.heard[auditor].remove(audit)
    return auditor, audit


def to_look(table: Table, peers: Sequence[str] = PEERS) -> tuple[Reduce, str, str, AuditOrder]:
    """A round whose result is there: order, owner, auditor, and what it was told."""
    order = table.reduce(*peers)
    table.reduced(order, *peers)
    auditor, audit = look(table, peers)
    owner = owner_of(order)
    assert auditor != owner
    table.forget()
    return order, owner, auditor, audit


def told(audit: AuditOrder, wrong: tuple[int, ...] = (), unseen: tuple[int, ...] = ()) -> Audited:
    return Audited(audit.round, audit.attempt, wrong, unseen)


def piece(
    audit: AuditOrder, data: bytes, offset: int = 0, all_bytes: int | None = None
) -> ProofPiece:
    length = len(data) if all_bytes is None else all_bytes
    return ProofPiece(audit.round, audit.attempt, 0, offset, length, data)


def prove(table: Table, auditor: str, audit: AuditOrder, fault: str) -> CheckProof:
    """The auditor calls the chunk wrong and sends its proof, which is judged."""
    table.say(auditor, told(audit, wrong=(0,)))
    assert table.hear(auditor, ProofWanted).offset == 0
    table.say(auditor, piece(audit, b"half of", all_bytes=10))
    assert table.hear(auditor, ProofWanted).offset == 7
    table.say(auditor, piece(audit, b" it", 7, 10))
    (case,) = [effect for effect in table.effects if isinstance(effect, CheckProof)]
    assert case.proof == b"half of it"
    table.take(table.master.proof_checked(case, fault, table.now_s))
    return case


def quarantined(table: Table) -> list[str]:
    return [record.peer for record in table.records(PeerQuarantined)]


# ---------------------------------------------------------------- looking


def test_without_audits_nobody_signs_or_looks() -> None:
    table = a_table("")
    order = table.reduce(*PEERS)
    assert not order.plan.sealed
    table.reduced(order, *PEERS)
    table.hear(A, Commit)


def test_nothing_is_committed_before_it_was_looked_at() -> None:
    table = a_table()
    order, _owner, auditor, audit = to_look(table)
    assert order.plan.sealed
    table.hears_no(A, Commit)
    for other in PEERS:
        if other != auditor:
            table.say(other, told(audit))
            table.say(other, told(audit, wrong=(0,)))  # nobody asked it
    table.hears_no(A, Commit)
    table.say(auditor, told(audit))
    table.hear(A, Commit)
    assert describe(table.master, table.now_s)["audited"] == 1


def test_who_is_alone_is_not_audited() -> None:
    table = a_table("[reduce]\naudit = 1.0\n", (A,))
    table.commit(A)


# ---------------------------------------------------------------- what is proven


@pytest.mark.fault("an owner adds up something else than it was given")
def test_a_proven_lie_ends_the_liar_and_the_round_is_run_again_without_it() -> None:
    table = a_table()
    order, owner, auditor, audit = to_look(table)
    case = prove(table, auditor, audit, "the result is not what its contributions make")
    assert (case.order, case.chunk, case.owner) == (order, 0, owner)
    assert (case.digest, case.manifest) == (DIGEST, ())
    assert quarantined(table) == [owner]
    assert table.dropped(owner) is RefusalCode.QUARANTINED
    said = table.announced()
    assert "is quarantined" in said
    assert "not what its contributions make" in said
    left = [peer for peer in PEERS if peer != owner]
    again = table.hear(left[0], Reduce)
    assert [c.peer for c in again.contributors] == left
    assert (again.round, again.version) == (order.round, order.version)
    table.hears_no(left[0], Commit)
    table.reduced(again, *left)
    auditor, audit = look(table, left)
    table.say(auditor, told(audit))
    assert table.hear(left[0], Commit).attempt == again.attempt


def test_what_a_liar_made_in_other_rounds_goes_with_it() -> None:
    """Nobody has looked at that; repaired, it would be spread as it is."""
    table = Table(ALL, fragments=2)
    table.start(*PEERS)
    first = table.reduce(*PEERS)
    table.forget()
    (second,) = [r for r in table.master.scheduler.rounds.values() if r.number != first.round]
    for peer in PEERS:
        root = root_of(second.fragment, second.version)
        table.say(peer, Ready(second.number, 10, 1.0, root, second.at_step))
    other = table.hear(A, Reduce)
    assert other.round == second.number
    table.reduced(first, *PEERS)
    auditor, audit = look(table)
    table.forget()
    prove(table, auditor, audit, "it is wrong")
    (liar,) = quarantined(table)
    left = [peer for peer in PEERS if peer != liar]
    again = [m for m in table.heard[left[0]] if isinstance(m, Reduce)]
    assert {message.round for message in again} == {first.round, other.round}
    assert all(liar not in message.receivers for message in again)


def test_who_is_in_quarantine_stays_out_until_it_is_cleared() -> None:
    table = a_table()
    _order, owner, auditor, audit = to_look(table)
    prove(table, auditor, audit, "it is wrong")
    table.restart()
    table.join(owner, CONTRIBUTOR, hello_of(owner, incarnation=2))
    assert table.dropped(owner) is RefusalCode.QUARANTINED
    (row,) = describe(table.master, table.now_s)["quarantined"]
    assert (row["peer"], row["name"]) == (owner, table.master.context.history.admitted[owner].name)
    assert "wrong" in row["why"]
    table.take(table.master.clear(owner, table.now_s))
    assert [record.peer for record in table.records(PeerCleared)] == [owner]
    assert RunHistory.replay(table.journal).quarantined == {}
    table.join(owner, CONTRIBUTOR, hello_of(owner, incarnation=2))
    assert owner in table.master.context.roster


def test_who_accuses_and_proves_nothing_is_convicted_at_the_last_time() -> None:
    table = a_table()
    liar = ""
    for time in range(1, FALSE_MAX + 1):
        _order, owner, auditor, audit = to_look(table)
        while auditor != liar and liar:  # by chance: until it is asked again
            table.say(auditor, told(audit, unseen=(0,)))
            auditor, audit = look(table)
        liar = auditor
        assert owner != liar
        prove(table, liar, audit, "")
        assert quarantined(table) == ([liar] if time == FALSE_MAX else [])
        if time < FALSE_MAX:
            auditor, audit = look(table)  # somebody else looks
            assert auditor not in (liar, owner)
            table.say(auditor, told(audit))
            table.hear(A, Commit)
            order = next(
                r for r in table.master.scheduler.round_table.past if r.number == audit.round
            )
            table.forget()
            for peer in PEERS:
                table.applied(order.running().order, peer)  # type: ignore[arg-type]
    assert table.dropped(liar) is RefusalCode.QUARANTINED


def test_a_proof_that_does_not_come_is_none_and_somebody_else_looks() -> None:
    table = a_table()
    _order, _owner, auditor, audit = to_look(table)
    table.say(auditor, told(audit, wrong=(0,)))
    table.say(auditor, piece(audit, b"half of", all_bytes=10))
    table.wait(table.spec.membership.deadline_s + 1, *PEERS)
    other, again = look(table)
    assert other != auditor
    table.say(auditor, piece(audit, b" it", 7, 10))  # too late
    table.say(other, told(again))
    table.hear(A, Commit)
    assert quarantined(table) == []


@pytest.mark.parametrize("odd", ["too long", "nothing", "of another", "elsewhere", "another chunk"])
def test_pieces_that_are_none_convict_nobody(odd: str) -> None:
    table = a_table()
    _order, _owner, auditor, audit = to_look(table)
    table.say(auditor, told(audit, wrong=(0,)))
    void = {
        "too long": piece(audit, b"x", all_bytes=PROOF_BYTES_MAX + 1),
        "nothing": piece(audit, b"", all_bytes=7),
    }
    ignored = {
        "elsewhere": piece(audit, b"x", offset=3),
        "another chunk": evolve(piece(audit, b"x"), chunk=1),
    }
    if odd == "of another":
        table.say(next(p for p in PEERS if p != auditor), piece(audit, b"x"))
    else:
        table.say(auditor, void.get(odd) or ignored[odd])
    assert not any(isinstance(effect, CheckProof) for effect in table.effects)
    if odd in void:
        other, again = look(table)
        assert other != auditor
        table.say(other, told(again))
        table.hear(A, Commit)
    else:
        table.say(auditor, piece(audit, b"x"))
        assert any(isinstance(effect, CheckProof) for effect in table.effects)


# ---------------------------------------------------------------- what is not shown


def withhold(table: Table) -> tuple[Reduce, str]:
    """A round whose owner shows nobody what it added: the first order, and the owner."""
    order, owner, auditor, audit = to_look(table)
    asked = []
    while True:
        asked.append(auditor)
        table.say(auditor, told(audit, unseen=(0,)))
        if len(asked) == min(AUDITORS_MAX, len(PEERS) - 1):
            break
        auditor, audit = look(table)
    assert len(set(asked)) == len(asked)
    return order, owner


def test_who_shows_nothing_is_not_convicted_but_owns_nothing_in_the_round() -> None:
    table = a_table()
    order, owner = withhold(table)
    assert quarantined(table) == []
    again = table.hear(A, Reduce)
    assert again.attempt == order.attempt + 1
    assert {c.peer for c in again.contributors} == set(PEERS)
    assert owner_of(again) != owner
    assert "does not show what it added" in table.announced()


def test_who_shows_nothing_again_and_again_owns_nothing_until_it_is_cleared() -> None:
    table = a_table()
    barred: list[str] = []
    for _round in range(4 * WITHHELD_MAX):
        order, owner = withhold(table)
        assert owner not in barred
        again = table.hear(A, Reduce)
        table.reduced(again, *PEERS)
        auditor, audit = look(table)
        table.say(auditor, told(audit))
        table.hear(A, Commit)
        table.applied(order, *PEERS)
        barred = describe(table.master, table.now_s)["barred"]
        if barred:
            break
    assert barred == [owner]
    assert quarantined(table) == []
    assert owner_of(table.reduce(*PEERS)) != owner
    table.take(table.master.clear(owner, table.now_s))
    assert describe(table.master, table.now_s)["barred"] == []


def test_many_chunks_that_are_right_make_up_for_one_that_was_not_shown() -> None:
    table = a_table()
    audits = table.master.scheduler.driver.audits
    audits.withheld[A] = 2
    for _chunk in range(FORGIVEN_BY - 1):
        audits._pass(A)
    assert audits.withheld[A] == 2
    audits._pass(A)
    assert audits.withheld[A] == 1
    for _chunk in range(FORGIVEN_BY):
        audits._pass(A)
    assert A not in audits.withheld


@pytest.mark.fault(
    "an auditor is silent, slow or lost", "its connection, a deadline", "another one looks"
)
def test_an_auditor_that_is_lost_or_silent_is_replaced() -> None:
    table = a_table(peers=(*PEERS, E))
    peers = (*PEERS, E)
    _order, _owner, auditor, _audit = to_look(table, peers)
    table.leave(auditor)
    left = [peer for peer in peers if peer != auditor]
    second, _audit = look(table, left)
    table.wait(table.spec.membership.deadline_s + 1, *left)
    third, audit = look(table, left)
    assert len({auditor, second, third}) == 3
    table.say(second, told(audit))  # too late: it is not its turn
    table.hears_no(third, Commit)
    table.say(third, told(audit))
    table.hear(third, Commit)


@pytest.mark.fault("an owner shows nothing, or leaves before it is looked at")
def test_an_owner_that_is_gone_before_it_was_looked_at_leaves_nothing_behind() -> None:
    table = a_table()
    order, owner, _auditor, _audit = to_look(table)
    table.leave(owner)
    left = [peer for peer in PEERS if peer != owner]
    for peer in left:
        table.hears_no(peer, Commit)
        again = table.hear(peer, Reduce)
        assert again.attempt == order.attempt + 1
        assert [c.peer for c in again.contributors] == left


def test_a_result_that_an_owner_left_behind_when_it_died_is_made_again() -> None:
    """The owner has sent its results and left; no peer can prove any more what it added."""
    table = a_table()
    order = table.reduce(*PEERS)
    owner = owner_of(order)
    left = [peer for peer in PEERS if peer != owner]
    table.leave(owner)
    flush = table.hear(left[0], Flush)
    table.hold(flush, *left, results=b"\x01")
    repair = table.hear(left[0], Repair)
    assert not repair.assignments[0].from_scratch
    for peer in left:
        table.say(peer, Reduced(order.round, repair.attempt, DIGEST))
    table.hears_no(left[0], Commit)
    assert table.hear(left[0], Reduce).attempt > repair.attempt


def test_chunks_that_a_successor_adds_are_audited_as_its_own() -> None:
    table = a_table()
    order = table.reduce(*PEERS)
    owner = owner_of(order)
    left = [peer for peer in PEERS if peer != owner]
    table.leave(owner)
    flush = table.hear(left[0], Flush)
    table.hold(flush, *left)
    repair = table.hear(left[0], Repair)
    successor = repair.assignments[0].owner
    place = [c.peer for c in order.contributors].index(owner)
    manifest = (ContributorRun(bytes([0b1111 & ~(1 << place)]), 1),)
    for peer in left:
        table.say(peer, Reduced(order.round, repair.attempt, DIGEST, manifest))
    auditor, audit = look(table, left)
    assert auditor != successor
    table.say(auditor, told(audit))
    table.hear(left[0], Commit)


def test_who_leaves_out_a_contributor_that_was_not_lost_owns_nothing_in_the_round() -> None:
    table = a_table()
    order = table.reduce(*PEERS)
    owner = owner_of(order)
    manifest = (ContributorRun(b"\x07", 1),)
    for peer in PEERS:
        table.say(peer, Reduced(order.round, order.attempt, DIGEST, manifest))
    table.hears_no(A, Commit)
    assert owner_of(table.hear(A, Reduce)) != owner


# ---------------------------------------------------------------- the draw


def draws(share: float, rounds: int, chunks: int, lot: bytes = b"secret") -> list[set[int]]:
    """Return the chunks that are drawn in each of ``rounds`` rounds."""
    spec = RunSpec.parse(f"[reduce]\naudit = {share}\n")
    audits = Coordinator(spec, "5" * 32, 1, lot).scheduler.driver.audits
    audits._alone = lambda number: False  # type: ignore[method-assign]
    return [{chunk for chunk, _lot in audits._draw(at, 1, chunks)} for at in range(rounds)]


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
