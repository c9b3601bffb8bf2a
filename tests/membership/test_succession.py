"""The authority of a master and the versions of the run after a restart, as conversations."""

from __future__ import annotations

import attrs
import pytest

from holdfast.membership.master.coordinator import Coordinator
from holdfast.membership.master.state.history import ROUNDS_SKIPPED
from holdfast.membership.master.state.journal import (
    PeerRevoked,
    RoundCommitted,
    RunPaused,
    RunRewound,
    TermStarted,
    VersionAdopted,
)
from holdfast.membership.master.state.master_effects import StandDown
from holdfast.protocol import messages as m
from tests.membership.table import (
    DIGEST,
    LINEAGE,
    SPARE,
    A,
    B,
    C,
    D,
    E,
    Table,
    head_of,
    hello_of,
    holding,
    reducing,
    started,
)

NONCE = b"n" * 16


def cut(table: Table, *kinds: type) -> None:
    """The master dies; from the first of these records of the last round on all is lost."""
    while not isinstance(table.journal[-1], kinds):
        table.journal.pop()
    table.journal.pop()
    table.term += 1_000
    table.journal.append(TermStarted(table.term, NONCE, True))
    table.now_s += 1_000.0
    table.heard.clear()
    table.master = Coordinator.restore(table.spec, "ab" * 16, table.journal, table.term)


def behind(rounds: int = 1, toml: str = "") -> Table:
    """A, B and C have committed some rounds, of which the journal lacks the last one."""
    table = started(A, B, C, toml=toml)
    for _ in range(rounds):
        table.commit(A, B, C)
    cut(table, RoundCommitted)
    return table


# ---------------------------------------------------------------- fencing


def claim(term: int, nonce: bytes = b"", followers: int = 0) -> m.TermClaim:
    return m.TermClaim("ab" * 16, term, nonce, followers)


def test_who_has_obeyed_a_later_master_ends_this_one() -> None:
    table = started(A, B)
    records = len(table.journal)
    hello = attrs.evolve(hello_of(C), term=2)
    (effect,) = table.take(table.master.attach(C, hello, SPARE, table.now_s))
    assert isinstance(effect, StandDown)
    assert "another master has taken this run over" in effect.reason
    assert table.take(table.master.tick(table.now_s + 100)) == []
    assert table.take(table.master.detach(A, "gone", table.now_s)) == []
    assert table.take(table.master.pause(table.now_s)) == []
    assert len(table.journal) == records, "not a record more"
    assert table.status()["state"] == "superseded"


def test_of_two_masters_that_meet_the_higher_term_goes_on() -> None:
    table = started(A, B)
    assert table.take(table.master.met(claim(0, NONCE), "another one", table.now_s)) == []
    assert table.take(table.master.met(claim(1), "itself", table.now_s)) == []
    (effect,) = table.take(table.master.met(claim(2), "another one", table.now_s))
    assert isinstance(effect, StandDown)


@pytest.mark.fault("two starts on one backup", "whom members obey", "that one goes on")
def test_of_two_starts_of_one_term_that_goes_on_which_more_members_obey() -> None:
    table = started(A, B)
    assert table.take(table.master.met(claim(1, NONCE, 1), "its twin", table.now_s)) == []
    (effect,) = table.take(table.master.met(claim(1, NONCE, 2), "its twin", table.now_s))
    assert isinstance(effect, StandDown), "of as many that with the higher nonce"


def test_who_obeys_another_start_of_this_term_is_refused_while_fewer_do() -> None:
    table = started(A, B)
    for is_new in (True, False):
        table.join(C, hello=attrs.evolve(hello_of(C), term=1, nonce=NONCE))
        assert table.dropped(C) is m.RefusalCode.SUPERSEDED
        assert ("obeys another start of term 1: start this" in table.announced()) == is_new
    table.commit(A, B)
    hello = attrs.evolve(hello_of(D), term=1, nonce=NONCE)
    (effect,) = table.take(table.master.attach(D, hello, SPARE, table.now_s))
    assert isinstance(effect, StandDown), "two of four"


# ---------------------------------------------------------------- a journal that is behind


def test_a_version_that_more_than_half_hold_is_adopted() -> None:
    table = behind()
    table.join(A, hello=holding(A, 1))
    assert table.master.succession.waiting
    assert "1 of 3 contributors are here" in table.status()["why_waiting"]
    table.join(B, hello=holding(B, 1))
    assert [r.head for r in table.records(VersionAdopted)] == [head_of(0, 1)]
    table.hears_no(A, m.Open)
    table.join(C, hello=holding(C, 0))
    assert table.hear(C, m.SyncFragment).head == head_of(0, 1)
    opened = table.hear(A, m.Open)
    assert opened.version == 1
    assert opened.round >= ROUNDS_SKIPPED


def test_a_version_that_fewer_hold_is_given_up() -> None:
    table = behind()
    table.join(B, hello=holding(B, 0))
    table.join(A, hello=holding(A, 1))
    table.hears_no(A, m.SyncFragment)
    table.join(C, hello=holding(C, 0))
    assert not table.records(VersionAdopted)
    order = table.hear(A, m.SyncFragment)
    assert (order.head, order.replaces_newer) == (head_of(0, 0), True)


def a_copy_that_everybody_has_left_behind() -> Table:
    """The journal lacks two rounds; B holds the first of them, A both, C is away."""
    table = started(A, B, C)
    for _ in range(2):
        table.commit(A, B, C)
    cut(table, RoundCommitted)
    cut(table, RoundCommitted)
    table.join(B, hello=holding(B, 1))
    table.join(A, hello=holding(A, 2))
    table.wait(20.0, A, B)
    assert not table.records(VersionAdopted), "C may know better"
    assert "and they differ" in table.status()["why_waiting"]
    return table


def test_who_came_with_a_version_each_waits_for_the_last_one_to_come() -> None:
    table = a_copy_that_everybody_has_left_behind()
    table.join(C, hello=holding(C, 1))
    assert [r.head for r in table.records(VersionAdopted)] == [head_of(0, 1)], "two of three"


def test_if_the_last_one_does_not_come_the_newest_version_is_the_runs() -> None:
    table = a_copy_that_everybody_has_left_behind()
    table.wait(300.0, A, B)
    assert [r.head for r in table.records(VersionAdopted)] == [head_of(0, 2)]
    assert table.hear(B, m.SyncFragment).head == head_of(0, 2)


def test_fresh_peers_do_not_decide_what_the_journal_lacks() -> None:
    table = behind()
    for peer in (D, E):
        table.join(peer)
    table.wait(200.0, D, E)
    assert table.master.succession.waiting
    table.hears_no(D, m.SyncFragment)
    table.join(A, hello=holding(A, 1))
    table.join(C, hello=holding(C, 1))
    assert [r.head for r in table.records(VersionAdopted)] == [head_of(0, 1)]


def test_who_is_kicked_is_not_waited_for() -> None:
    table = behind()
    table.join(A, hello=holding(A, 1))
    assert table.master.succession.waiting
    table.take(table.master.kick(B, "gone", table.now_s))
    table.take(table.master.kick(C, "gone", table.now_s))
    assert not table.master.succession.waiting
    table.wait(20.0, A)
    table.hear(A, m.Open)


def test_who_was_kicked_is_not_waited_for_whatever_was_written_after_that() -> None:
    table = started(A, B)
    table.take(table.master.kick(A, "gone", table.now_s))
    while not isinstance(table.journal[-1], PeerRevoked):
        table.journal.pop()
    table.journal.append(RunPaused(True))
    cut(table, RunPaused)
    assert table.master.succession.electorate == {B}


@pytest.mark.parametrize("first", [A, B])
def test_of_as_many_contributors_those_decide_whom_spares_bear_out(first: str) -> None:
    """One of two contributors holds damaged bits; the spare was sent what the other one has."""
    table = started(A, B, spares=[C])
    table.commit(A, B, others=[C])
    cut(table, RoundCommitted)
    damaged = hello_of(first, heads=[head_of(0, 1, b"?" * 32)], lineage=LINEAGE)
    table.join(first, hello=damaged)
    table.join(C, SPARE, hello=holding(C, 1))
    assert not table.records(VersionAdopted)
    other = B if first == A else A
    table.join(other, hello=holding(other, 1))
    assert [r.head for r in table.records(VersionAdopted)] == [head_of(0, 1)]
    assert table.hear(first, m.SyncFragment).head == head_of(0, 1)


# ---------------------------------------------------------------- going back


def lost(toml: str = "rewind_s = 60\n") -> Table:
    """A has made version 1 and is gone; nobody else has it."""
    table = started(A, B, C, toml="[membership]\nquorum = 0.1\n" + toml)
    table.leave(B)
    table.leave(C)
    table.commit(A)
    table.leave(A)
    table.forget()
    return table


def test_a_fresh_peer_is_nobody_to_go_back_to() -> None:
    table = lost()
    table.join(D)
    table.wait(1_000.0, D)
    assert not table.records(RunRewound)
    table.hears_no(D, m.SyncFragment)
    assert "no connected peer holds version 1" in table.status()["why_waiting"]


def test_the_time_to_go_back_begins_when_somebody_holds_an_older_state() -> None:
    table = lost("rewind_s = 60\n[run]\nrounds = 3\n")
    table.wait(1_000.0)
    table.join(B, hello=holding(B, 0, incarnation=2))
    table.wait(59.0, B)
    assert not table.records(RunRewound)
    assert "in 1 s the run goes on without the last 1 rounds" in (table.status()["why_waiting"])
    table.wait(2.0, B)
    assert [r.heads for r in table.records(RunRewound)] == [(head_of(0, 0),)]
    assert "REWOUND by 1 round, " in table.announced()
    (warning,) = table.status()["warnings"]
    assert warning.startswith("REWOUND from round 1 to round 0: 1 round, about 100 steps")
    ends = [table.hear(B, m.Welcome).total_steps for _ in range(2)]
    assert ends == [300, 400], "the lost round is made up for at a later step"
    opened = table.hear(B, m.Open)
    assert opened.version == 0
    assert opened.round == 3, "the number of the round that A had opened is spent, too"
    assert opened.at_step == 200, "nor are steps"
    table.restart()
    assert table.status()["warnings"], "also by another master"
    table.join(B, hello=holding(B, 0, incarnation=2))
    table.commit(B)
    assert not table.status()["warnings"], "the run is as far as it was"


def test_who_returns_in_time_is_the_source() -> None:
    table = lost()
    table.join(B, hello=holding(B, 0, incarnation=2))
    table.wait(50.0, B)
    table.join(A, hello=holding(A, 1, incarnation=2))
    assert table.hear(B, m.SyncFragment) == m.SyncFragment(head_of(0, 1), (A,))
    table.wait(100.0, A, B)
    assert not table.records(RunRewound)


def test_who_returns_too_late_is_synced_to_what_the_run_is_now() -> None:
    table = lost()
    table.join(B, hello=holding(B, 0, incarnation=2))
    table.wait(61.0, B)
    table.join(A, hello=holding(A, 1, incarnation=2))
    assert table.hear(A, m.Welcome).branch == 1
    assert table.hear(A, m.SyncFragment) == m.SyncFragment(head_of(0, 0), (B,), True)


def test_one_holder_of_an_older_state_is_enough_if_there_are_members_to_go_on() -> None:
    table = started(A, B, C, toml="[membership]\nmin_members = 2\nrewind_s = 60\n")
    table.leave(B)
    table.commit(A, C)
    table.leave(A)
    table.leave(C)
    table.join(B, hello=holding(B, 0, incarnation=2))
    table.wait(1_000.0, B)
    assert not table.records(RunRewound), "nobody is there to go on with"
    table.join(D)
    table.wait(59.0, B, D)
    assert not table.records(RunRewound)
    table.wait(2.0, B, D)
    assert [r.heads for r in table.records(RunRewound)] == [(head_of(0, 0),)]
    assert table.hear(D, m.SyncFragment) == m.SyncFragment(head_of(0, 0), (B,))


@pytest.mark.fault("all holders of the newest version are gone")
def test_nobody_is_waited_for_when_all_have_restarted_and_the_newest_counts() -> None:
    table = started(A, B, C, toml="[membership]\nquorum = 0.1\nrewind_s = 600\n")
    for _ in range(3):
        table.commit(A, B, C)
    table.restart()
    table.join(A, hello=holding(A, 1, incarnation=2))
    table.join(B, hello=holding(B, 2, incarnation=2))
    table.wait(100.0, A, B)
    assert not table.records(RunRewound), "C may have more"
    table.join(C, hello=holding(C, 1, incarnation=2))
    assert [r.heads for r in table.records(RunRewound)] == [(head_of(0, 2),)]
    assert table.hear(A, m.SyncFragment) == m.SyncFragment(head_of(0, 2), (B,))


def test_a_member_that_did_not_restart_may_still_apply_what_nobody_holds_yet() -> None:
    table, order = reducing(A, B, toml="[membership]\nquorum = 0.1\nrewind_s = 600\n")
    table.reduced(order, A, B)
    table.restart()
    table.join(A, hello=holding(A, 0, incarnation=2))
    table.join(B, hello=holding(B, 0, incarnation=1))  # the process that heard the commit
    table.wait(100.0, A, B)
    assert not table.records(RunRewound)


def mute() -> tuple[Table, m.Reduce]:
    """A was sent version 1, the only one, and has not said what came of it."""
    table = started(A, B, C, toml="[membership]\nquorum = 0.1\nrewind_s = 60\n")
    table.leave(B)
    table.leave(C)
    order = table.reduce(A)
    table.reduced(order, A)
    table.wait(16.0, A)
    assert "it did not apply the last commit in time" in table.why(A)
    table.wait(61.0, A)
    assert not table.records(RunRewound)
    assert table.dropped(A) is m.RefusalCode.LAGGING
    table.wait(10.0)
    return table, order


def test_who_may_yet_apply_the_newest_version_says_so_before_the_run_goes_back() -> None:
    table, order = mute()
    held = m.Reduced(order.round, order.attempt, DIGEST)
    table.join(A, hello=holding(A, 0, held))
    assert [c.round for c in table.hear(A, m.Welcome).committed] == [order.round]
    table.applied(order, A)
    table.wait(100.0, A)
    assert not table.records(RunRewound)
    assert table.hear(A, m.Open).version == 1


def test_if_it_does_not_have_the_newest_version_the_run_goes_back() -> None:
    table, _order = mute()
    table.join(A, hello=holding(A, 0, incarnation=2))
    table.wait(59.0, A)
    assert not table.records(RunRewound)
    table.wait(2.0, A)
    assert [r.heads for r in table.records(RunRewound)] == [(head_of(0, 0),)]


def test_a_state_whose_root_the_journal_does_not_know_is_none() -> None:
    table = lost()
    other = hello_of(B, heads=[head_of(0, 0, b"?" * 32)], lineage=LINEAGE, incarnation=2)
    table.join(B, hello=other)
    table.wait(1_000.0, B)
    assert not table.records(RunRewound)


def on_disk(peer: str, *heads: m.FragmentHead, holds: m.FragmentHead | None = None) -> m.Hello:
    """Return the ``Hello`` of a peer whose state the run never had, with older states in its
    checkpoints.
    """
    hello = hello_of(
        peer, heads=[holds or head_of(0, 1, b"?" * 32)], lineage=LINEAGE, incarnation=2
    )
    return attrs.evolve(hello, kept=tuple(m.KeptState((head,)) for head in heads))


def test_an_older_checkpoint_that_the_journal_knows_is_enough() -> None:
    table = lost()
    table.join(B, hello=on_disk(B, head_of(0, 0, b"!" * 32), head_of(0, 0)))
    table.wait(61.0, B)
    assert [r.heads for r in table.records(RunRewound)] == [(head_of(0, 0),)]
    order = table.hear(B, m.SyncFragment)
    assert (order.head, order.donors, order.replaces_newer) == (head_of(0, 0), (), True)
    assert table.why(B) == "fetching 1 fragments from its disk"
    table.join(C)
    table.hears_no(C, m.SyncFragment)
    table.say(B, m.Synced(head_of(0, 0), 0))
    assert table.hear(C, m.SyncFragment).donors == (B,)
    table.say(C, m.Synced(head_of(0, 0), 100))
    assert table.hear(B, m.Open).version == 0


def test_a_checkpoint_that_turns_out_damaged_is_not_asked_for_again() -> None:
    table = lost()
    table.join(B, hello=on_disk(B, head_of(0, 0)))
    table.join(C, hello=on_disk(C, head_of(0, 0)))
    table.wait(61.0, B, C)
    table.hear(B, m.SyncFragment)
    table.hear(C, m.SyncFragment)
    table.forget()
    table.say(B, m.SyncFailed(0, 0, (), "it is damaged"))
    table.hears_no(B, m.SyncFragment)
    table.say(C, m.Synced(head_of(0, 0), 0))
    assert table.hear(B, m.SyncFragment).donors == (C,)


def test_a_checkpoint_of_another_lineage_is_none() -> None:
    table = lost()
    hello = attrs.evolve(on_disk(B, head_of(0, 0)), lineage=b"x" * 32)
    table.join(B, hello=hello)
    table.wait(1_000.0, B)
    assert not table.records(RunRewound)


@pytest.mark.fault(
    "all that is left is older than a journal that lacks its end",
    "nothing beyond it is claimed",
    "after `rewind_s` the run goes back to that",
)
def test_a_journal_that_is_behind_goes_back_to_what_there_is() -> None:
    """The journal lacks one of three rounds, and all states that are left are older."""
    table = behind(3, "[membership]\nrewind_s = 60\n")
    for peer in (A, B):
        table.join(peer, hello=holding(peer, 1))
    table.wait(50.0, A, B)
    assert not table.records(RunRewound), "C may hold it"
    table.wait(60.0, A, B)
    assert [r.heads for r in table.records(RunRewound)] == [(head_of(0, 1),)]
    assert table.hear(A, m.Open).version == 1


def test_what_lies_beyond_a_journal_that_is_behind_goes_before_what_is_older() -> None:
    table = behind(3, "[membership]\nrewind_s = 60\n")
    table.join(A, hello=on_disk(A, head_of(0, 1), holds=head_of(0, 3)))
    table.join(B, hello=holding(B, 1))
    table.wait(200.0, A, B)
    assert not table.records(RunRewound)
    assert [r.head for r in table.records(VersionAdopted)] == [head_of(0, 3)]


# ---------------------------------------------------------------- spares and the line


def test_more_than_the_spares_wait_in_line_without_state_and_move_up() -> None:
    table = started(A, B, toml="[membership]\ncontributors = 2\nspares = 1\n")
    table.join_in_sync(C)
    table.join(D)
    table.join(E, SPARE)
    for peer in (D, E):
        table.hears_no(peer, m.SyncFragment)
        assert table.why(peer) == "waiting: all places and spares are taken"
    order = table.reduce(A, B)
    assert order.receivers == (A, B, C), "who waits gets no results either"
    table.complete(order, A, B, others=[C])
    table.forget()
    table.leave(B)
    assert table.roles()["c"] == "contributor*", "in sync: nothing is fetched"
    table.hears_no(C, m.SyncFragment)
    table.hear(D, m.SyncFragment)
    table.hears_no(E, m.SyncFragment)


def test_without_spares_only_who_gets_a_place_is_synced() -> None:
    table = Table("[membership]\ncontributors = 2\nspares = 0\n")
    table.found(A)
    table.join(B)
    table.hear(B, m.SyncFragment)
    table.join(C)
    table.hears_no(C, m.SyncFragment)
    table.leave(B)
    table.hear(C, m.SyncFragment)
