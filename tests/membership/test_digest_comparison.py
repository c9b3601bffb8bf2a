"""Copies that differ: by the journal's root, by majority, and when neither is known."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.membership.master.sync.digest_comparison import (
    DifferingCopy,
    differences,
    differing_blocks,
    format_blocks,
)
from holdfast.protocol.messages import FragmentHead

GOOD, BAD, ODD = b"g" * 32, b"b" * 32, b"o" * 32


def head(root: bytes, version: int = 3, fragment: int = 0) -> FragmentHead:
    return FragmentHead(fragment, version, root)


def test_the_journal_knows_who_is_right_even_against_a_majority() -> None:
    told = {"a": [head(GOOD)], "b": [head(BAD)], "c": [head(BAD)]}
    found = differences(told, lambda _fragment, _version: GOOD)
    assert [(each.peer, each.expected, each.against) for each in found] == [
        ("b", GOOD, "a"),
        ("c", GOOD, "a"),
    ]


def test_without_the_journal_more_than_half_are_right() -> None:
    told = {"a": [head(GOOD)], "b": [head(BAD)], "c": [head(GOOD)]}
    found = differences(told, lambda _fragment, _version: b"")
    assert found == [DifferingCopy("b", head(BAD), GOOD, "a")]


def test_two_copies_without_a_majority_differ_from_each_other() -> None:
    found = differences({"a": [head(GOOD)], "b": [head(BAD)]}, lambda _fragment, _version: b"")
    assert [(each.peer, each.expected, each.against) for each in found] == [
        ("a", b"", "b"),
        ("b", b"", "a"),
    ]


def test_copies_of_different_versions_are_not_compared() -> None:
    told = {"a": [head(GOOD, 3)], "b": [head(BAD, 4)], "c": [head(ODD, 3, fragment=1)]}
    assert differences(told, lambda _fragment, _version: b"") == []
    roots = {(0, 3): GOOD, (0, 4): ODD}
    found = differences(told, lambda fragment, version: roots.get((fragment, version), b""))
    assert found == [DifferingCopy("b", head(BAD, 4), ODD, "")]


@given(st.lists(st.booleans(), min_size=1, max_size=40))
def test_blocks_that_differ_are_told_by_their_numbers(differ: list[bool]) -> None:
    ours = b"".join(GOOD for _ in differ)
    theirs = b"".join(BAD if different else GOOD for different in differ)
    expected = [index for index, different in enumerate(differ) if different]
    assert differing_blocks(ours, theirs) == expected


def test_digests_of_unlike_fragments_tell_nothing() -> None:
    assert differing_blocks(GOOD, GOOD + BAD) is None
    assert differing_blocks(b"", b"") is None


@pytest.mark.parametrize(
    ("blocks", "text"),
    [
        ([], ""),
        ([4], "4"),
        ([1, 2], "1 to 2"),
        ([0, 1, 2, 5, 7, 8], "0 to 2, 5, 7 to 8"),
        (list(range(0, 26, 2)), "0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, ..."),
    ],
)
def test_blocks_are_formatted_as_runs(blocks: list[int], text: str) -> None:
    assert format_blocks(blocks) == text
