"""The WAN lab: links as configured, TCP intact through losses, and nothing left behind."""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks import namespaces, wan_lab
from benchmarks.report import ROOT
from tests import needs

Host, WanLab = wan_lab.Host, wan_lab.WanLab

HANGS_S = 120.0  # for what hangs
needs_lab = needs.needed(needs.namespaces(wan_lab.missing, wan_lab.why_not))

WARM_UP_S = 1.5  # until TCP has found its rate; not measured

LAB = """
import sys, time
from benchmarks.report import run_main
from benchmarks.wan_lab import Host, WanLab
def main():
    with WanLab([Host()] * 2) as lab:
        lab.popen(0, ["sh", "-c", "echo up; exec sleep 20"]).wait()
    return 0
sys.exit(run_main("lab", main))
"""

# Sends a file's worth of bytes that the receiver can check, and hangs up.
SENDER = """
import random, socket, sys
stream = socket.create_connection((sys.argv[1], 29500))
stream.sendall(random.Random(7).randbytes(int(sys.argv[2])))
stream.shutdown(socket.SHUT_WR)
stream.recv(1)
"""
RECEIVER = """
import hashlib, socket
listener = socket.create_server(("0.0.0.0", 29500))
print("ready", flush=True)
stream, _ = listener.accept()
digest = hashlib.sha256()
while data := stream.recv(1 << 16):
    digest.update(data)
print(digest.hexdigest())
"""

# Run on the hosts. Plain blocking sockets: what is measured is the lab, not holdfast.
SINK = """
import socket, sys, time
listener = socket.create_server(("0.0.0.0", int(sys.argv[1])))
print("ready", flush=True)
stream, _ = listener.accept()
buffer = bytearray(1 << 18)
warm_s, total, first, last = float(sys.argv[2]), 0, None, None
while count := stream.recv_into(buffer):
    last = time.monotonic()
    first = first or last
    if last - first >= warm_s:
        if not total:
            began = last
        total += count
print(total * 8 / (last - began) / 1e6 if total else 0.0)
"""
SOURCE = """
import socket, sys, time
stream = socket.create_connection((sys.argv[1], int(sys.argv[2])))
end = time.monotonic() + float(sys.argv[3])
data = bytes(1 << 18)
while time.monotonic() < end:
    stream.sendall(data)
"""
# Small UDP packets there and back: how long they take, and how many get lost.
ECHO = """
import socket
s = socket.socket(type=socket.SOCK_DGRAM)
s.bind(("0.0.0.0", 29401))
print("ready", flush=True)
while True:
    data, sender = s.recvfrom(64)
    s.sendto(data, sender)
"""
PINGER = """
import json, socket, statistics, struct, sys, threading, time
count, gap_s = int(sys.argv[2]), float(sys.argv[3])
s = socket.socket(type=socket.SOCK_DGRAM)
s.connect((sys.argv[1], 29401))
s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 22)
s.settimeout(1.5)
def send():
    for _ in range(count):
        s.send(struct.pack("d", time.monotonic()))
        time.sleep(gap_s)
threading.Thread(target=send).start()
times = []
try:
    while len(times) < count:
        (sent_s,) = struct.unpack("d", s.recv(64))
        times.append(time.monotonic() - sent_s)
except TimeoutError:
    pass
print(json.dumps({"lost": 1 - len(times) / count, "rtt_ms": statistics.median(times or [0]) * 1e3}))
"""


def measure_rates(
    lab: wan_lab.WanLab, pairs: Sequence[tuple[int, int]], seconds: float
) -> list[float]:
    """One TCP connection per (from, to), all at once; Mbit/s of user bytes that arrived."""
    sinks = []
    for index, (_source, target) in enumerate(pairs):
        argv = [sys.executable, "-c", SINK, str(29_400 + index), str(WARM_UP_S)]
        sinks.append(lab.popen(target, argv, stdout=subprocess.PIPE, text=True))
        assert sinks[-1].stdout is not None
        sinks[-1].stdout.readline()
    for index, (source, target) in enumerate(pairs):
        argv = [sys.executable, "-c", SOURCE, lab.address(target), str(29_400 + index)]
        lab.popen(source, [*argv, str(seconds + WARM_UP_S)])
    return [float(sink.communicate()[0]) for sink in sinks]


def measure_path(
    lab: wan_lab.WanLab, source: int, target: int, count: int, gap_s: float
) -> dict[str, Any]:
    """Round trip and loss (there and back) of small packets."""
    with lab.popen(target, [sys.executable, "-c", ECHO], stdout=subprocess.PIPE) as echo:
        assert echo.stdout is not None
        echo.stdout.readline()
        argv = [sys.executable, "-c", PINGER, lab.address(target), str(count), str(gap_s)]
        done = lab.run(source, argv, capture_output=True, check=True)
        echo.kill()
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def made_by(pid: int) -> set[str]:
    return {path.name for path in namespaces.NAMESPACES.glob(f"holdfast-{pid}-*")}


def transfer(lab: wan_lab.WanLab, count: int) -> str:
    """Send that many bytes from host 0 to host 1; the digest of what arrived."""
    receiver = lab.popen(1, [sys.executable, "-c", RECEIVER], stdout=subprocess.PIPE, text=True)
    assert receiver.stdout is not None
    receiver.stdout.readline()
    argv = [sys.executable, "-c", SENDER, lab.address(1), str(count)]
    lab.run(0, argv, check=True, timeout=HANGS_S)
    return str(receiver.communicate(timeout=HANGS_S)[0]).strip()


def test_a_queue_holds_a_round_trip_but_not_less_than_a_burst() -> None:
    long = Host(up_mbit=300, down_mbit=8, delay_ms=25)

    # 300 Mbit/s over 100 ms; 8 Mbit/s over 100 ms would be 100 kB.
    assert long.command(3) == "set 3 300000000 8000000 25000000 0.0 3750000 262144"
    assert Host(10, 10, down_queue_bytes=9_000).command(0).endswith(" 262144 9000")


def test_a_machine_without_the_tools_is_told_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 0)
    monkeypatch.setattr(Path, "exists", lambda _path: True)
    monkeypatch.setattr("shutil.which", lambda _command: None)

    with pytest.raises(namespaces.LabError, match="'ip' is missing"), WanLab([Host()]):
        pass


def test_who_is_not_root_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    monkeypatch.setattr("shutil.which", lambda command: command)

    with pytest.raises(namespaces.LabError, match="only root"), WanLab([Host()]):
        pass


@pytest.mark.nightly
@needs_lab
def test_packets_take_both_delays_each_way() -> None:
    with WanLab([Host(delay_ms=10), Host(delay_ms=30)]) as lab:
        path = measure_path(lab, 0, 1, 20, 0.005)

    assert path["lost"] == 0
    # On a machine busy with other tests the median may be late, but never early.
    assert path["rtt_ms"] >= 80


@pytest.mark.nightly
@needs_lab
def test_the_slower_end_decides_the_rate_also_after_a_change() -> None:
    with WanLab([Host(up_mbit=100, delay_ms=2), Host(down_mbit=20, delay_ms=2)]) as lab:
        (narrow,) = measure_rates(lab, [(0, 1)], 1.0)
        lab.set(1, down_mbit=40)
        for _attempt in range(20):  # a busy machine may be slower than the rate for some seconds
            (wide,) = measure_rates(lab, [(0, 1)], 1.0)
            if wide > narrow:
                break

    # A second's burst makes it a little faster than the rate.
    assert narrow <= 22
    assert narrow < wide <= 44


@pytest.mark.nightly
@needs_lab
def test_both_links_lose_packets_each_way() -> None:
    with WanLab([Host(loss=0.05), Host(loss=0.1)], seed=3) as lab:
        path = measure_path(lab, 0, 1, 4_000, 0.0)
        first, second = lab.stats()["hosts"]

    survive = 0.95 * 0.9
    # On a busy machine some more may find the queue of the one that answers full; never fewer.
    assert path["lost"] > 1 - survive * survive - 0.04
    assert first["up"]["lost"] / first["up"]["packets"] == pytest.approx(0.05, abs=0.02)
    assert second["down"]["lost"] / second["down"]["packets"] == pytest.approx(0.1, abs=0.03)


@pytest.mark.nightly
@needs_lab
def test_a_host_can_be_cut_off_and_come_back() -> None:
    with WanLab([Host(), Host()]) as lab:
        lab.set(1, loss=1.0)
        cut_off = measure_path(lab, 0, 1, 5, 0.0)
        lab.set(1, loss=0.0)
        back = measure_path(lab, 0, 1, 5, 0.0)

    assert cut_off["lost"] == 1
    assert back["lost"] == 0


@pytest.mark.nightly
@needs_lab
@pytest.mark.parametrize(
    "hosts",
    [
        pytest.param([Host(loss=0.01, delay_ms=1)] * 2, id="losses"),
        pytest.param(
            [Host(up_mbit=100, delay_ms=2, up_queue_bytes=10_000), Host(delay_ms=2)], id="drops"
        ),
    ],
)
def test_tcp_arrives_intact_where_bundles_are_cut(hosts: list[wan_lab.Host]) -> None:
    count = 8_000_000
    with WanLab(hosts) as lab:
        arrived = transfer(lab, count)
        up = lab.stats()["hosts"][0]["up"]

    assert arrived == hashlib.sha256(random.Random(7).randbytes(count)).hexdigest()
    assert up["lost"] + up["dropped"] > 10
    # A lost segment costs itself, not the bundle that it was in (those are up to 44 of them).
    assert up["packets"] < 1.3 * count / 1_448


@pytest.mark.nightly
@needs_lab
def test_nothing_leads_out_of_the_lab() -> None:
    with WanLab([Host()]) as lab:
        routes = lab.run(0, ["ip", "route"], capture_output=True, text=True, check=True).stdout
        outside = lab.run(0, ["ip", "route", "get", "192.0.2.1"], capture_output=True, check=False)

    assert routes.split()[:3] == ["198.18.0.0/24", "dev", "wan0"]
    assert len(routes.splitlines()) == 1
    assert outside.returncode != 0


@pytest.mark.nightly
@needs_lab
def test_an_error_leaves_neither_namespaces_nor_processes() -> None:
    lab = WanLab([Host(), Host()])

    def fail() -> None:
        with lab:
            sleepers.append(lab.popen(0, ["sleep", "20"]))
            assert len(made_by(os.getpid())) == 2
            raise RuntimeError("in the middle")

    sleepers: list[subprocess.Popen[bytes]] = []
    with pytest.raises(RuntimeError, match="in the middle"):
        fail()

    assert not made_by(os.getpid())
    assert sleepers[0].poll() is not None


@pytest.mark.nightly
@needs_lab
@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_lab_cleans_up(stop: signal.Signals) -> None:
    with started_lab() as lab:
        lab.send_signal(stop)
        assert lab.wait(HANGS_S) == 130

    assert not made_by(lab.pid)


@pytest.mark.nightly
@needs_lab
def test_the_next_lab_removes_what_a_killed_one_left() -> None:
    with started_lab() as lab:
        lab.kill()
    assert made_by(lab.pid)

    with WanLab([Host()]):
        assert not made_by(lab.pid)


def started_lab() -> subprocess.Popen[str]:
    """A lab in a process of its own whose hosts are up."""
    lab = subprocess.Popen(
        [sys.executable, "-c", LAB],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert lab.stdout is not None
    assert lab.stdout.readline() == "up\n"
    return lab
