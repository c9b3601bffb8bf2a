"""``holdfast bench transfer``: real ranks, figures, clear refusals."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from click.testing import CliRunner

from holdfast.daemon.bench.transfer_bench import transfer
from holdfast.protocol.errors import UserError

BENCH = (sys.executable, "-m", "holdfast", "bench", "transfer", "--json=-")


@pytest.mark.slow
def test_a_copy_over_real_lanes_and_one_that_is_equal() -> None:
    done = subprocess.run(
        [*BENCH, "--donors=2", "--size=12MiB", "--fragments=3", "--repeat=2", "--warm-up=0"],
        check=True,
        timeout=250,
        capture_output=True,
        text=True,
    )
    report = json.loads(done.stdout)
    assert (report["donors"], report["bytes"], report["fragments"]) == (2, 12 * 2**20, 3)
    for name in ("copy", "equal"):
        assert len(report[name]["all_s"]) == 2
    # What moves no byte takes a fraction of what moves them all, on any machine.
    assert 0 < report["equal"]["min_s"] < report["copy"]["median_s"]
    assert all(rate > 0 for rate in report["digest"].values())


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--master=127.0.0.1:1"], "--master without --rank"),
        (["--rank=0"], "--rank needs --master and --token"),
        (["--rank=2", "--master=127.0.0.1:1", "--token=x"], "there is no rank 2 of 2"),
    ],
)
def test_contradictory_options_are_refused(arguments: list[str], complaint: str) -> None:
    result = CliRunner().invoke(transfer, arguments)
    assert isinstance(result.exception, UserError)
    assert complaint in str(result.exception)
