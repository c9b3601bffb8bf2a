"""Which links get more of a node's line: by what they have left to send."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.collectives.links.rates.send_priority import WEIGHT_MAX, WEIGHT_MIN, SendBacklog


def test_equal_links_get_equal_parts() -> None:
    backlog = SendBacklog()
    for peer in ("a", "b", "c"):
        backlog.set_left(peer, 7)
    assert [backlog.weight(peer) for peer in ("a", "b", "c")] == [1.0, 1.0, 1.0]


def test_a_link_with_three_times_as_much_left_gets_three_times_as_much() -> None:
    backlog = SendBacklog()
    backlog.set_left("a", 30)
    backlog.set_left("b", 10)
    assert backlog.weight("a") == pytest.approx(3 * backlog.weight("b"))
    assert backlog.weight("a") + backlog.weight("b") == pytest.approx(2.0)


def test_a_link_that_is_done_weighs_no_more() -> None:
    backlog = SendBacklog()
    backlog.set_left("a", 30)
    backlog.set_left("b", 10)
    backlog.set_left("a", 0)
    assert backlog.weight("a") == backlog.weight("b") == 1.0


@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(0, 2**20)), max_size=40))
def test_no_link_starves_and_none_takes_all(changes: list[tuple[str, int]]) -> None:
    backlog = SendBacklog()
    for peer, left in changes:
        backlog.set_left(peer, left)
        assert all(WEIGHT_MIN <= backlog.weight(each) <= WEIGHT_MAX for each in "abcdef")
