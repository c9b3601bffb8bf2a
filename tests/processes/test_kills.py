"""SIGKILL in the middle of reductions: equal values everywhere, and records that tell what went
in.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.processes.harness import Fleet
from tests.processes.kills import PEERS, check, run_with_kills
from tests.processes.kills_trainer import PLACES, TOKENS, VALUES, sets_in, update_of

CHUNKS = 64
IDS = {f"{place:032x}": place for place in range(PLACES)}


@pytest.mark.fault("it dies at any instant of a reduction")
def test_whoever_is_killed_when_values_are_equal_and_records_say_what_went_in(fleet: Fleet) -> None:
    kills, found = run_with_kills(fleet, 4, seed=3)
    assert found.faults == []
    assert (found.differing, found.records_wrong) == (0, 0)
    assert kills >= 4
    assert found.rounds_checked >= 4


def mean_of(*inside: int) -> Any:
    return np.mean([update_of(place) for place in inside], axis=0)


def row(contributors: list[int], *parts: tuple[list[int], list[list[int]]]) -> dict[str, Any]:
    peers = list(IDS)
    return {
        "round": 1,
        "outcome": "committed",
        "chunk_count": CHUNKS,
        "contributors": [{"peer": peers[place]} for place in contributors],
        "manifest": [
            {"contributors": places, "weight": TOKENS * len(places), "chunks": chunks}
            for places, chunks in parts
        ],
    }


def test_a_mean_says_who_is_in_it() -> None:
    values = mean_of(0, 1, 3)
    quarter = VALUES // 4
    values[quarter : 2 * quarter] = mean_of(0, 3)[:quarter]
    assert sets_in(values) == [(0b1011, quarter), (0b1001, quarter), (0b1011, 2 * quarter)]
    values[5] += 1.0
    assert sets_in(values)[1][0] == 0, "nobody's mean is like that"


SETS = sets_in(np.concatenate([mean_of(0, 1, 3)[: VALUES // 4], mean_of(0, 3)[VALUES // 4 :]]))
TRUE = row([0, 1, 3], ([0, 1, 2], [[0, 16]]), ([0, 2], [[16, 48]]))


@pytest.mark.parametrize(
    ("record", "wrong"),
    [
        (TRUE, 0),
        (row([0, 1, 3]), 1),  # with full weight, in all chunks
        (row([0, 3]), 1),
        (row([0, 1, 3], ([0, 1, 2], [[0, 17]]), ([0, 2], [[17, 47]])), 1),
        ({**TRUE, "round": 2}, 1),
        ({**TRUE, "manifest": [{**TRUE["manifest"][0], "weight": 2 * TOKENS}]}, 1),
    ],
)
def test_a_record_that_says_something_else_is_found(record: dict[str, Any], wrong: int) -> None:
    line = {"version": 1, "digest": "a", "round": 1, "sets": [list(run) for run in SETS]}
    found = check({name: [line] for name in PEERS[:2]}, [record], IDS)
    assert (found.records_wrong, len(found.faults), found.differing) == (wrong, wrong, 0)
    assert (found.versions_checked, found.rounds_checked, found.in_part) == (1, 1, 1)


def test_values_that_differ_are_found() -> None:
    seen = {name: [{"version": 4, "digest": name[0]}] for name in PEERS}
    found = check(seen, [], IDS)
    assert (found.versions_checked, found.differing, len(found.faults)) == (1, 1, 1)
