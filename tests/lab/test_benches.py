"""Benches with ranks: honest bytes, a cap that is obeyed, and clear refusals."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import trio

from benchmarks import allreduce, codecs, ranks
from benchmarks.ranks import free_port
from benchmarks.rendezvous import RankSeat, Rendezvous
from holdfast.collectives.codecs.codecs import CODECS
from holdfast.protocol.addresses import Address
from holdfast.protocol.errors import UserError

HOST = "127.0.0.1"
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
def test_ranks_on_loopback_report_time_and_bytes() -> None:
    report = bench("allreduce", "--peers=3", "--size=300KiB", "--repeat=2", "--warm-up=0")

    assert (report["peers"], report["bytes"], report["codec"]) == (3, 300 * 1024, "fp32")
    assert report["repeat"] == 2
    assert 0 < report["min_s"] <= report["median_s"]
    # A third of the values is a rank's own: it sends the rest once, and that third twice.
    for sent in report["sent_bytes_per_peer"]:
        assert 4 / 3 * report["bytes"] * 0.9 < sent < 4 / 3 * report["bytes"] * 1.1
    assert report["gloo_median_s"] is None
    assert report["t_lb_s"] is report["ring_s"] is None


@pytest.mark.slow
def test_gloo_takes_turns_with_us_and_rates_give_a_bound() -> None:
    rates = ("--up=100,100", "--delay-ms=5")
    report = bench("allreduce", "--size=64KiB", "--repeat=2", "--vs=gloo", *rates)

    assert report["gloo_median_s"] > 0
    assert report["ratio"] == pytest.approx(report["gloo_median_s"] / report["median_s"])
    # 64 KiB at 100 Mbit/s, and there and back.
    assert report["t_lb_s"] == pytest.approx(65_536 * 8 / 100e6 + 0.010)


@pytest.mark.slow
def test_a_rank_obeys_its_upload_limit() -> None:
    caps = ("--max-upload=10,1000", "--repeat=1", "--warm-up=0")
    report = bench("allreduce", "--size=1MiB", *caps)

    # Half of a contribution and half of the result, at 10 Mbit/s, less the burst of a tenth of a second.
    assert report["min_s"] > (2**20 * 8 - 10e6 * 0.1) / 10e6 * 0.95


@pytest.mark.slow
def test_a_copy_over_real_lanes_and_one_that_is_equal() -> None:
    sizes = ("--donors=2", "--size=12MiB", "--fragments=3", "--repeat=2", "--warm-up=0")
    report = bench("transfer", *sizes)
    assert (report["donors"], report["bytes"], report["fragments"]) == (2, 12 * 2**20, 3)
    # What moves no byte takes a fraction of what moves them all, on any machine.
    assert 0 < report["equal"]["min_s"] < report["copy"]["median_s"]


def test_every_codec_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codecs, "SAMPLE_COUNT", 1 << 16)
    monkeypatch.setattr(codecs, "CHUNK_COUNT", 1 << 14)
    monkeypatch.setattr(codecs, "MEASURE_S", 0.001)
    (table,), rows = codecs.measured()
    assert [row[0] for row in table.rows] == list(CODECS)
    figures = {row["codec"]: row for row in rows}
    assert figures["fp32"]["noise_db"] == {"normal": None, "laplace": None, "student": None}
    assert figures["nf4"]["bits"] == 4.25
    assert figures["nf4"]["noise_db"]["normal"] == pytest.approx(20.7, abs=0.3)


@pytest.mark.parametrize(
    ("text", "count"), [("256MiB", 256 * 2**20), ("4 KiB", 4096), ("1MB", 10**6), ("12", 12)]
)
def test_sizes_are_written_as_people_write_them(text: str, count: int) -> None:
    assert ranks.size(text) == count


def test_invalid_sizes_and_rates_are_refused() -> None:
    assert allreduce.rates("20,1000.5") == (20.0, 1000.5)
    for text in ("", "MiB", "1.5MiB", "-4", "4 KiX"):
        with pytest.raises(argparse.ArgumentTypeError):
            ranks.size(text)
    for text in ("0", "a", "1,,2"):
        with pytest.raises(argparse.ArgumentTypeError):
            allreduce.rates(text)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--master=127.0.0.1:1"], "without --rank"),
        (["--rank=0"], "--rank needs"),
        (["--rank=2", "--master=127.0.0.1:1", "--token=t"], "no rank 2 of 2"),
        (["--up=1,2,3"], "3 rates, but there are 2 peers"),
    ],
)
def test_contradictory_options_are_refused(
    arguments: list[str], complaint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["allreduce", *arguments])
    with pytest.raises(UserError, match=complaint):
        allreduce.main()


@pytest.mark.real_time
async def test_ranks_hear_each_other_in_order() -> None:
    master = Address(HOST, free_port(HOST))
    heard: dict[int, list[dict[str, Any]]] = {}

    async def rank(number: int) -> None:
        async with Rendezvous.open(RankSeat(number, 3, master, "secret")) as rendezvous:
            heard[number] = await rendezvous.exchange({"rank": number})
            await rendezvous.exchange({})

    async with trio.open_nursery() as nursery:
        for number in range(3):
            nursery.start_soon(rank, number)

    everything = [{"rank": 0}, {"rank": 1}, {"rank": 2}]
    assert heard == {0: everything, 1: everything, 2: everything}


@pytest.mark.real_time
async def test_a_rank_with_another_token_is_refused() -> None:
    master = Address(HOST, free_port(HOST))

    async def rank(number: int, token: str) -> None:
        async with Rendezvous.open(RankSeat(number, 2, master, token)):
            pass

    async with trio.open_nursery() as nursery:
        nursery.start_soon(rank, 0, "secret")
        with pytest.RaisesGroup(pytest.RaisesExc(UserError, match="ended")):
            await rank(1, "guess")
        nursery.cancel_scope.cancel()
