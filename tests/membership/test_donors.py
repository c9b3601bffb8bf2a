"""The choice of donors: fast lines first, unless they are busy with other receivers."""

from __future__ import annotations

from collections import Counter

from holdfast.membership.master.sync import donor_choice
from holdfast.membership.master.sync.catch_up import RETRY_DEADLINES
from holdfast.protocol.messages import Measured, Progress, Synced, SyncFragment
from tests.membership.table import Table, head_of, started

PEERS = [f"{letter * 8}{0:024x}" for letter in "abcdef"]
A, B, C, D, E, F = PEERS
LATE, LATER, LAST = (f"{digit * 8}{0:024x}" for digit in "789")


def with_lines(megabytes_per_s: dict[str, float], *peers: str) -> Table:
    table = started(*peers)
    for peer, rate in megabytes_per_s.items():
        sent = int(rate * 1e6 * 20)
        table.say(peer, Measured(sent, 20.0, sent, 20.0, ()))
    return table


def donors_of(table: Table, joiner: str) -> tuple[str, ...]:
    table.join(joiner)
    return table.hear(joiner, SyncFragment).donors


def test_the_fastest_four_give() -> None:
    rates = dict(zip(PEERS, (1.0, 5.0, 2.0, 9.0, 3.0, 0.5), strict=True))
    assert donors_of(with_lines(rates, *PEERS), LATE) == (D, B, E, C)


def test_a_line_that_gives_to_others_counts_for_what_it_has_left() -> None:
    table = with_lines({A: 10.0, B: 10.0, C: 4.0, D: 4.0, E: 3.0}, A, B, C, D, E)
    assert donors_of(table, LATE) == (A, B, C, D)
    assert donors_of(table, LATER) == (A, B, E, C)  # 5, 5, 3, 2 and 2
    table.say(LATE, Synced(head_of(0, 0), 64))
    assert donors_of(table, LAST)[:2] == (A, B)


def test_where_nothing_is_known_the_idle_ones_give() -> None:
    table = started(*PEERS)
    assert donors_of(table, LATE) == (A, B, C, D)
    assert donors_of(table, LATER) == (E, F, A, B)


def test_a_member_that_leaves_is_chosen_last() -> None:
    table = with_lines({A: 10.0, B: 1.0, C: 1.0}, A, B, C)
    leaver = table.master.context.roster.get(A)
    assert leaver is not None
    leaver.draining_s = table.now_s  # as after Leaving, while the run still needs it
    assert donors_of(table, LATE) == (B, C, A)


def test_a_crowd_of_receivers_is_spread_over_a_crowd_of_donors() -> None:
    crowd = [f"{number:032x}" for number in range(1, 3 * donor_choice.CONSIDERED_MAX)]
    table = started(*crowd)
    given: Counter[str] = Counter()
    for number in range(len(crowd)):
        donors = donors_of(table, f"{number:08x}{'f' * 24}")
        assert len(set(donors)) == donor_choice.DONORS_MAX
        given.update(donors)
    assert len(given) > 0.8 * len(crowd)
    assert max(given.values()) <= 3 * donor_choice.DONORS_MAX


def test_copies_of_several_fragments_that_fall_behind_are_one_try() -> None:
    """Else a member of a run with eight fragments waits for an hour after its first try."""
    table = started(A, B, fragments=2)
    table.join(LATE)
    table.say(LATE, Progress(0, 0, 0.0, None, "copying", 0, 0, 0, {}))
    catch_up, member = table.master.state_sync.catch_up, table.master.context.roster.get(LATE)
    assert member is not None
    fetches = [copy.fetch for copy in member.copies if copy.fetch is not None]
    assert len(fetches) == 2
    for fetch in fetches:
        fetch.began_s, fetch.needed_bytes = table.now_s - 10.0, 500_000
        assert "the run's commits need 50.0 kB/s" in catch_up.give_up(member, fetch)
    first_s = RETRY_DEADLINES * table.master.context.spec.membership.deadline_s
    assert catch_up.next_deadline_s() == table.master.context.now_s + first_s
