"""Moments from one real trainer to another, over real sockets."""

from __future__ import annotations

from typing import Any

import pytest

from tests.processes.harness import Fleet, contributing, in_sync, spec

pytestmark = pytest.mark.slow


def optimizers(status: dict[str, Any]) -> list[str]:
    return [e["text"] for e in status["events"] if "'s optimizer" in e["text"]]


@pytest.mark.timeout(120)
def test_a_joiners_trainer_goes_on_from_a_contributors_moments(fleet: Fleet) -> None:
    text = spec(sync_every=200, min_members=1)
    fleet.start_master(text.replace("[diloco]", '[diloco]\ninner_state = "int8"'))
    arguments = ("--width", "600", "--pause", "0.01")  # of the first layer 4,800 weights
    fleet.join("a", "--rank", "0", *arguments, founder=True)
    fleet.until_committed(1)
    fleet.join("b", "--rank", "1", *arguments)
    status = fleet.until(optimizers, "b's optimizer has something to go on from")
    (said,) = optimizers(status)
    assert said.startswith("b (")
    assert "goes on from the moments of a (" in said
    fleet.until(lambda s: contributing(s, *"ab") and in_sync(s, *"ab"), "both train")
    fleet.until_committed(1)
    found = fleet.settle(*"ab")
    assert len(set(found.values())) == 1, found
    assert any("goes on from" in line for line in fleet.peer("b")["told"])
