"""Benches with ranks: honest bytes, ranks that begin together, and clear refusals."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import trio

from benchmarks import ranks
from benchmarks.ranks import RankSeat
from benchmarks.report import BenchError

ROOT = Path(__file__).resolve().parents[2]


def bench(module: str, *arguments: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{module}", "--json=-", *arguments],
        check=True,
        cwd=ROOT,
        timeout=250,
        stdout=subprocess.PIPE,
    )
    report: dict[str, Any] = json.loads(done.stdout)
    return report


@pytest.mark.slow
def test_ranks_report_time_bytes_and_parts_in_turns_with_gloo() -> None:
    report = bench("allreduce", "--size=300KiB", "--repeat=2", "--warm-up=0", "--vs=gloo")

    assert (report["peers"], report["bytes"], report["codec"]) == (2, 300 * 1024, "fp32")
    assert report["repeat"] == 2
    assert 0 < report["min_s"] <= report["median_s"]
    # Half of the values is a rank's own: it sends the other half, and that half's mean.
    for sent in report["sent_bytes_per_peer"]:
        assert report["bytes"] * 0.9 < sent < report["bytes"] * 1.1
    assert report["gloo_median_s"] > 0
    assert report["ratio"] == pytest.approx(report["gloo_median_s"] / report["median_s"])
    assert set(report["parts_s"]) == {"sockets", "AES-GCM", "BLAKE3", "adding", "interpreter"}
    assert min(report["parts_s"].values()) > 0


@pytest.mark.slow
def test_a_copy_over_real_lanes_and_one_that_is_equal() -> None:
    sizes = ("--donors=2", "--size=12MiB", "--repeat=2", "--warm-up=0")
    report = bench("transfer", *sizes)
    assert (report["donors"], report["bytes"]) == (2, 12 * 2**20)
    # What moves no byte takes a fraction of what moves them all, on any machine.
    assert 0 < report["equal"]["min_s"] < report["copy"]["median_s"]


@pytest.mark.parametrize(("text", "count"), [("256MiB", 256 * 2**20), ("4 KiB", 4096), ("12", 12)])
def test_sizes_are_written_as_people_write_them(text: str, count: int) -> None:
    assert ranks.size(text) == count


@pytest.mark.parametrize("text", ["", "MiB", "1.5MiB", "-4", "4 KiX"])
def test_invalid_sizes_are_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        ranks.size(text)


@pytest.mark.real_time
async def test_ranks_hear_each_other_and_go_on_together(tmp_path: Path) -> None:
    heard: dict[int, list[int]] = {}
    went_on_s: list[float] = []

    async def rank(number: int) -> None:
        seat = RankSeat(number, 3, tmp_path)
        await trio.sleep(0.05 * number)
        heard[number] = [each["rank"] for each in await seat.exchange({"rank": number})]
        went_on_s.append(trio.current_time())
        await seat.exchange({})

    async with trio.open_nursery() as nursery:
        for number in range(3):
            nursery.start_soon(rank, number)

    assert heard == {number: [0, 1, 2] for number in range(3)}
    assert max(went_on_s) - min(went_on_s) < 0.05


def test_a_rank_that_fails_ends_all_of_them() -> None:
    with pytest.raises(BenchError, match="a rank failed"):
        ranks.run_ranks("allreduce", 2, ["--peers=2", "--codec=none"])
