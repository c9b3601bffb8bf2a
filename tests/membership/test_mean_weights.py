"""What contributors weigh: a newcomer's trial, and the cap of an invite."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.membership.master.coordinator import Grant
from holdfast.membership.master.rounds.round_scheduler import capped_by_invite
from holdfast.membership.master.state.journal import RoundCommitted
from holdfast.membership.spec.mistakes import SpecError
from holdfast.membership.spec.spec import RunSpec
from holdfast.protocol import messages as m
from tests.membership.table import CONTRIBUTOR, A, B, C, D, E, Table, hello_of, started

TRIAL = '[membership]\nnewcomers = "shadow:3"\nquorum = 0.5\n'


def weights(order: m.Reduce) -> dict[str, int]:
    return {each.peer: each.weight for each in order.contributors}


def test_a_newcomer_weighs_nothing_in_its_first_rounds() -> None:
    table = started(A, B, toml=TRIAL)
    assert weights(table.commit(A, B)) == {A: 10, B: 10}, "the first ones have no trial"
    table.join_in_sync(C)
    for _ in range(3):
        assert weights(table.commit(A, B, C)) == {A: 10, B: 10, C: 0}
    assert weights(table.commit(A, B, C)) == {A: 10, B: 10, C: 10}


def test_a_trial_goes_on_after_a_restart_and_under_another_number() -> None:
    table = started(A, B, toml=TRIAL)
    table.commit(A, B)
    table.join_in_sync(C)
    table.commit(A, B, C)
    table.leave(C)
    table.join_in_sync(C, incarnation=2)
    for _ in range(2):
        assert weights(table.commit(A, B, C))[C] == 0
    assert weights(table.commit(A, B, C))[C] == 10
    history = table.master.context.history
    assert type(history).replay(table.journal).members.served == history.members.served


def test_where_only_newcomers_are_left_they_weigh() -> None:
    table = started(A, B, toml=TRIAL)
    table.commit(A, B)
    for peer in (C, D):
        table.join_in_sync(peer)
    for peer in (A, B):
        table.leave(peer)
    assert weights(table.commit(C, D)) == {C: 10, D: 10}


def test_a_round_of_which_only_newcomers_are_left_is_aborted() -> None:
    """Their sum would be divided by nothing."""
    table = started(A, toml=TRIAL)
    table.commit(A)
    for peer in (B, C):
        table.join_in_sync(peer)
    table.reduce(A, B, C)
    committed = len(table.records(RoundCommitted))
    table.leave(A)
    table.hear(B, m.Abort)
    assert len(table.records(RoundCommitted)) == committed


def test_an_invite_has_its_share_and_no_more() -> None:
    table = Table("[membership]\ninvite_share_max = 0.25\n")
    table.found(A)
    for peer in (B, C, D, E):
        invite = "1111AAAA" if peer in (D, E) else peer[:8]
        table.join(peer, Grant(m.Role.CONTRIBUTOR, invite=invite), hello_of(peer))
        table.sync(peer)
    table.forget()
    for peer in (A, B, C, D, E):
        table.ready(peer, weight=3_000)
    assert weights(table.hear(A, m.Reduce)) == {A: 3_000, B: 3_000, C: 3_000, D: 1_500, E: 1_500}


def test_by_default_nothing_is_weighed_otherwise() -> None:
    table = started(A, B)
    table.commit(A, B)
    table.join_in_sync(C, CONTRIBUTOR)
    assert weights(table.commit(A, B, C)) == {A: 10, B: 10, C: 10}


@given(
    st.lists(st.tuples(st.integers(0, 10**6), st.sampled_from("abcdef")), min_size=1, max_size=12),
    st.sampled_from([0.1, 0.25, 0.34, 0.5, 0.9]),
)
def test_no_invite_has_more_than_its_share_or_than_another(
    members: list[tuple[int, str]], share: float
) -> None:
    given_ = {str(place): weight for place, (weight, _) in enumerate(members)}
    invites = {str(place): invite for place, (_, invite) in enumerate(members)}
    made = capped_by_invite(given_, invites, share)
    sums: dict[str, Fraction] = {}
    for peer, weight in made.items():
        assert weight <= given_[peer]
        assert (weight > 0) == (given_[peer] > 0)
        sums[invites[peer]] = sums.get(invites[peer], Fraction()) + weight
    heavy = sorted(filter(None, sums.values()))
    slack = len(members)  # rounding
    if heavy:
        assert heavy[-1] <= max(Fraction(share) * sum(heavy), heavy[0]) + slack


@pytest.mark.parametrize("text", ["shadow", "shadow:0", "shadow:-1", "shadow:1.5", "half:3", "20"])
def test_a_trial_has_rounds(text: str) -> None:
    with pytest.raises(SpecError, match="newcomers"):
        RunSpec.parse(f'[membership]\nnewcomers = "{text}"\n')
    assert RunSpec.parse('[membership]\nnewcomers = "shadow:20"\n').membership.trial_rounds == 20
    assert RunSpec.parse("").membership.trial_rounds == 0
