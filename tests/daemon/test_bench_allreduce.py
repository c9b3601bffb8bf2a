"""``holdfast bench allreduce``: real ranks, honest bytes, clear refusals."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest
import trio
from click.testing import CliRunner

from holdfast.daemon.bench.allreduce_bench import allreduce, parse_rates, parse_size
from holdfast.daemon.bench.rank_processes import RankSeat, free_port
from holdfast.daemon.bench.rendezvous import Rendezvous
from holdfast.protocol.addresses import Address
from holdfast.protocol.errors import UserError

HOST = "127.0.0.1"


def bench(path: Path, *arguments: str) -> dict[str, Any]:
    subprocess.run(
        [sys.executable, "-m", "holdfast", "bench", "allreduce", f"--json={path}", *arguments],
        check=True,
        timeout=250,
    )
    report: dict[str, Any] = json.loads(path.read_text())
    return report


@pytest.mark.slow
def test_ranks_on_loopback_report_time_and_bytes(tmp_path: Path) -> None:
    report = bench(tmp_path / "r.json", "--peers=3", "--size=300KiB", "--repeat=2", "--warm-up=0")

    assert report["peers"] == 3
    assert report["bytes"] == 300 * 1024
    assert report["codec"] == "fp32"
    assert report["repeat"] == 2
    assert 0 < report["min_s"] <= report["median_s"]
    # A third of the values is a rank's own: it sends the rest once, and that third twice.
    for sent in report["socket_bytes_per_peer"]:
        assert 4 / 3 * report["bytes"] * 0.9 < sent < 4 / 3 * report["bytes"] * 1.1
    assert sum(report["received_bytes_per_peer"]) == pytest.approx(
        sum(report["socket_bytes_per_peer"]), rel=0.01
    )
    assert report["gloo_median_s"] is None
    assert report["t_lb_s"] is report["ring_s"] is None
    assert len(report["extra_memory_bytes_per_peer"]) == 3
    assert 0 < max(report["extra_memory_bytes_per_peer"]) < 100 * 2**20


@pytest.mark.slow
def test_gloo_takes_turns_with_us_and_rates_give_a_bound(tmp_path: Path) -> None:
    rates = ("--up=100,100", "--delay-ms=5")
    report = bench(tmp_path / "r.json", "--size=64KiB", "--repeat=2", "--vs=gloo", *rates)

    assert report["gloo_median_s"] > 0
    assert report["ratio"] == pytest.approx(report["gloo_median_s"] / report["median_s"])
    # 64 KiB at 100 Mbit/s, and there and back.
    assert report["t_lb_s"] == pytest.approx(65_536 * 8 / 100e6 + 0.010)


@pytest.mark.slow
def test_a_rank_obeys_its_upload_limit(tmp_path: Path) -> None:
    caps = ("--max-upload=10,1000", "--repeat=1", "--warm-up=0")
    report = bench(tmp_path / "r.json", "--size=1MiB", *caps)

    # Half of a contribution and half of the result, at 10 Mbit/s, less the burst of a tenth of a second.
    assert report["min_s"] > (2**20 * 8 - 10e6 * 0.1) / 10e6 * 0.95


@pytest.mark.parametrize(
    ("text", "count"), [("256MiB", 256 * 2**20), ("4 KiB", 4096), ("1MB", 10**6), ("12", 12)]
)
def test_sizes_are_written_as_people_write_them(text: str, count: int) -> None:
    context = click.Context(allreduce)

    assert parse_size(context, allreduce.params[1], text) == count


@pytest.mark.parametrize("text", ["", "MiB", "1.5MiB", "-4", "3", "4 KiX"])
def test_an_invalid_size_is_refused(text: str) -> None:
    with pytest.raises(click.BadParameter):
        parse_size(click.Context(allreduce), allreduce.params[1], text)


def test_a_rate_is_a_positive_number() -> None:
    context, parameter = click.Context(allreduce), allreduce.params[1]

    assert parse_rates(context, parameter, "20,1000.5") == (20.0, 1000.5)
    for text in ("0", "a", "1,,2"):
        with pytest.raises(click.BadParameter):
            parse_rates(context, parameter, text)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--master=127.0.0.1:1"], "without --rank"),
        (["--rank=0"], "--rank needs"),
        (["--rank=2", "--master=127.0.0.1:1", "--token=t"], "no rank 2 of 2"),
        (
            ["--rank=0", "--master=127.0.0.1:1", "--token=t", "--up=1,2,3"],
            "3 rates, but there are 2 peers",
        ),
    ],
)
def test_contradictory_options_are_refused(arguments: list[str], complaint: str) -> None:
    outcome = CliRunner().invoke(allreduce, arguments)

    assert isinstance(outcome.exception, UserError)
    assert complaint in str(outcome.exception)


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
