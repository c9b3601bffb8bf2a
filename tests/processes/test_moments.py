"""Moments from one real trainer to another, over real sockets."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from tests.processes.harness import Fleet, spec

pytestmark = pytest.mark.slow

TRIES_MAX = 5  # a round may be due just when the trainer begins, and then it contributes before


def optimizers(status: dict[str, Any]) -> list[str]:
    return [e["text"] for e in status["events"] if "'s optimizer" in e["text"]]


def more(count: int, status: dict[str, Any]) -> bool:
    return len(optimizers(status)) > count


def test_a_joiners_trainer_goes_on_from_a_contributors_moments(fleet: Fleet) -> None:
    text = spec(sync_every=200, min_members=1)
    fleet.start_master(text.replace("[diloco]", '[diloco]\ninner_state = "int8"'))
    arguments = ("--width", "600", "--pause", "0.01")  # of the first layer 4,800 weights
    fleet.join("a", "--rank", "0", *arguments, founder=True)
    fleet.until_committed(1)
    crash = fleet.folder / "crash"
    fleet.join("b", "--rank", "1", *arguments, "--crash", str(crash))
    for tries in range(TRIES_MAX):
        said = optimizers(
            fleet.until(partial(more, tries), "it is known how b's optimizer goes on")
        )
        assert all(each.startswith("b (") for each in said)
        if "goes on from" in said[-1]:
            break
        assert "its first contribution was due before they came" in said[-1]
        crash.touch()
    assert "goes on from the moments of a (" in said[-1]
    assert any("goes on from" in line for line in fleet.peer("b")["told"])
    assert not list(fleet.nodes["b"].folder.glob("moments.*"))
