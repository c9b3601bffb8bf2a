"""Manifests: the contributors of a committed mean, their shares, and their chunks."""

from __future__ import annotations

import random

import pytest

from holdfast.membership.shared.manifest import MeanContents, contents_of, format_committed
from holdfast.protocol.messages import Commit, Contributor, ContributorRun

PEERS = [letter * 32 for letter in "abcdef12"]


def commit_of(weights: list[int], *runs: tuple[int, int]) -> Commit:
    """Runs: a set of contributors, a bit each, and of how many chunks."""
    contributors = tuple(Contributor(p, w, 1.0) for p, w in zip(PEERS, weights, strict=False))
    manifest = tuple(ContributorRun(bits.to_bytes(1, "little"), count) for bits, count in runs)
    return Commit(1, 1, 0, 0, 10, contributors, bytes(32), manifest)


def chunks_of(made: MeanContents, chunk_count: int) -> list[set[str]]:
    """By chunk: who is in it, as a program reads it."""
    sets: list[set[str]] = [{each.contributor.peer for each in made.added}] * chunk_count
    for part in made.parts:
        for first, count in part.chunks:
            names = {made.added[place].contributor.peer for place in part.places}
            sets[first : first + count] = [names] * count
    return sets


def test_if_no_contributor_is_missing_each_has_its_share_of_the_weight() -> None:
    made = contents_of(commit_of([30, 10]))
    assert [(e.chunk_share, e.weight_share) for e in made.added] == [(1.0, 0.75), (1.0, 0.25)]
    assert (made.parts, made.tokens) == ((), 40)
    assert format_committed(made) == "committed with 2 contributors"


def test_a_contributor_in_no_chunk_does_not_count() -> None:
    made = contents_of(commit_of([30, 500, 10], (0b101, 3), (0b101, 5)))
    assert [each.contributor.peer for each in made.added] == [PEERS[0], PEERS[2]]
    assert [(e.chunk_share, e.weight_share) for e in made.added] == [(1.0, 0.75), (1.0, 0.25)]
    assert (made.parts, made.tokens) == ((), 40)


def test_a_contributor_in_some_chunks_counts_for_these() -> None:
    made = contents_of(commit_of([30, 60, 10], (0b111, 2), (0b101, 1), (0b101, 2), (0b111, 5)))
    assert [each.chunk_share for each in made.added] == [1.0, 0.7, 1.0]
    assert [each.weight_share for each in made.added] == pytest.approx(
        [0.7 * 0.3 + 0.3 * 0.75, 0.7 * 0.6, 0.7 * 0.1 + 0.3 * 0.25]
    )
    whole, rest = made.parts
    assert (whole.places, whole.weight, whole.chunks) == ((0, 1, 2), 100, ((0, 2), (5, 5)))
    assert (rest.places, rest.weight, rest.chunks) == ((0, 2), 40, ((2, 3),))
    assert made.tokens == 30 + 42 + 10
    assert (
        format_committed(made)
        == "committed with 3 contributors (1 of them in a part of the chunks)"
    )


@pytest.mark.parametrize("seed", range(50))
def test_every_chunk_is_told_with_those_who_are_in_it(seed: int) -> None:
    chance = random.Random(f"manifests {seed}")
    count = chance.randint(1, len(PEERS))
    weights = [chance.randint(0, 100) for _ in range(count)]
    runs = [(chance.randint(1, 2**count - 1), chance.randint(1, 5)) for _ in range(6)]
    made = contents_of(commit_of(weights, *runs))
    expected = [
        {PEERS[place] for place in range(count) if bits >> place & 1}
        for bits, run in runs
        for _ in range(run)
    ]
    assert chunks_of(made, len(expected)) == expected
    weight = dict(zip(PEERS, weights, strict=False))
    for part in made.parts:
        inside = [made.added[place].contributor.peer for place in part.places]
        assert part.weight == sum(weight[peer] for peer in inside)
    for each in made.added:
        inside_count = sum(each.contributor.peer in names for names in expected)
        assert each.chunk_share == pytest.approx(inside_count / len(expected))
    total = sum(each.weight_share for each in made.added)
    empty = sum(not any(weight[peer] for peer in names) for names in expected)
    assert total == pytest.approx(1.0 - empty / len(expected))
