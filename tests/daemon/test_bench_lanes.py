"""``holdfast bench lanes``: real ranks, one row each, clear refusals."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from click.testing import CliRunner

from holdfast.daemon.bench.lanes_bench import lanes
from holdfast.protocol.errors import UserError

BENCH = (sys.executable, "-m", "holdfast", "bench", "lanes", "--json=-")


@pytest.mark.slow
def test_rows_say_lanes_congestion_and_goodput() -> None:
    done = subprocess.run(
        [
            *BENCH,
            "--counts=1,3,adaptive",
            "--congestion=cubic",
            "--seconds=0.3",
            "--warm-up=0.1",
            "--adaptive-warm-up=0.1",
        ],
        check=True,
        timeout=250,
        capture_output=True,
        text=True,
    )
    report = json.loads(done.stdout)
    assert [(row["lanes"], row["lanes_open"]) for row in report["rows"]] == [
        ("1", 1),
        ("3", 3),
        ("adaptive", 2),  # over a short path none are added
    ]
    assert all(row["mbit_per_s"] > 0 for row in report["rows"])
    assert {row["congestion"] for row in report["rows"]} == {"cubic"}
    assert report["round_trip_ms"] > 0


@pytest.mark.slow
def test_a_cap_on_the_sender_is_never_exceeded() -> None:
    done = subprocess.run(
        [*BENCH, "--counts=2", "--congestion=cubic", "--seconds=1", "--max-mbit=40"],
        check=True,
        timeout=250,
        capture_output=True,
        text=True,
    )
    (row,) = json.loads(done.stdout)["rows"]
    # What was under way when the second began arrives in it, too.
    assert row["mbit_per_s"] < 40 * 1.5


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--master=127.0.0.1:1"], "without --rank"),
        (["--rank=0"], "--rank needs"),
        (["--counts=1,many"], "'many' is not a number of lanes"),
        (["--counts=0"], "'0' is not a number of lanes"),
        (["--counts=65"], "'65' is not a number of lanes"),
    ],
)
def test_contradictory_options_are_refused(arguments: list[str], complaint: str) -> None:
    outcome = CliRunner().invoke(lanes, arguments)

    assert isinstance(outcome.exception, UserError)
    assert complaint in str(outcome.exception)
