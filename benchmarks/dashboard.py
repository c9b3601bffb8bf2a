"""What the dashboard costs its master: answers over a long history, an idle run, a round.

    python -m benchmarks.dashboard --rounds 10000 --members 64 --json dashboard.json

A history of ``--rounds`` rounds with ``--members`` contributors is written as a master writes it. Then
a master's HTTP side serves it on loopback, and every answer that a page needs is asked for. Then, with a
page open on the live stream (in another process), this process' processor time is measured while nothing
changes, and while every member tells of itself once a second.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from pathlib import Path
from typing import Any

import attrs
import httpx
import trio
from starlette.routing import Route

from benchmarks.progress import say
from benchmarks.report import Table, keep_json, print_tables
from benchmarks.sections import Measured
from holdfast.daemon.curves import Point
from holdfast.daemon.master.event_log import EVENT_LOG_FILE, EventLog
from holdfast.daemon.master.journal.journal_store import JournalStore
from holdfast.daemon.master.master_service import MasterService
from holdfast.daemon.master.run_recorder import POINT_S, RunRecorder
from holdfast.daemon.metrics_store import HISTORY_FILE, MetricsStore, PastEvent
from holdfast.daemon.status_records import MasterStatus
from holdfast.daemon.web.app import make_app
from holdfast.daemon.web.http_server import bind_http, serve_http
from holdfast.daemon.web.json_answers import compact
from holdfast.daemon.web.live_stream import LiveStream
from holdfast.daemon.web.prometheus import metrics_route
from holdfast.daemon.web.run_history import past_routes, status_route
from holdfast.membership.master.coordinator import Coordinator, Grant
from holdfast.membership.master.state.journal import RunCreated, TermStarted
from holdfast.membership.master.status.status import describe
from holdfast.membership.spec.spec import RunSpec
from holdfast.protocol.addresses import Address
from holdfast.protocol.messages import (
    MEMBERS_MAX,
    VERSION_MAX,
    VERSION_MIN,
    Applied,
    FragmentHead,
    FragmentSize,
    Hello,
    ModelLayout,
    Progress,
    Ready,
    Reduced,
    Role,
    Synced,
    TensorSpec,
    WeightsSupplied,
)
from holdfast.protocol.trust.authority import Party
from holdfast.simulation.memory_network import MemoryNetwork, MemoryWorld

RUN_ID = "5" * 32
VALUE_COUNT = 2**20
LAYOUT = ModelLayout((TensorSpec("weights", (VALUE_COUNT,), "float32", "parameter"),))
SIZE = FragmentSize(VALUE_COUNT, VALUE_COUNT, 0)
LINEAGE = b"l" * 32
ROOT_BYTES = 32
ROUND_S = 60.0  # between two of the written history
BATCH = 500  # rounds to a transaction: a master writes each by itself, which takes longer
ASKED = (
    "/",
    "/api/status",
    "/api/status?past=0",
    "/api/history?points=600",
    "/api/rounds?limit=50",
    "/api/events?limit=200",
    "/api/events?limit=200&text=nothing+like+it",
    "/metrics",
)
TIMES = 15  # each is asked
SECONDS = 20.0  # of each measurement of processor time
SETTLE_S = 3.0
SPEC = """\
[run]
name = "dashboard"
[diloco]
sync_every = 100
[membership]
deadline_s = 3600
"""

# The page, as far as its master is concerned.
LISTEN = """\
import sys, urllib.request
with urllib.request.urlopen(sys.argv[1] + "/api/live") as stream:
    print("listening", flush=True)
    while stream.read(1):
        pass
"""


class InPlace(MemoryNetwork):
    """No network; its threads are real ones, as a master's."""

    async def run_sync(self, function: Any, limiter: Any = None) -> Any:
        return await trio.to_thread.run_sync(function, limiter=limiter)


class Run:
    """A master's rules with light peers, without a network."""

    def __init__(self, members_count: int, chance: random.Random) -> None:
        spec = RunSpec.parse(SPEC)
        records = [RunCreated(RUN_ID, SPEC), TermStarted(1, b"n" * 16)]
        self.coordinator = Coordinator.restore(spec, RUN_ID, records, 1)
        self.chance = chance
        self.peers = [chance.randbytes(16).hex() for _ in range(members_count)]
        store = JournalStore(":memory:")
        world = MemoryWorld(chance)
        network = InPlace(world, world.host("master", "f" * 32, Party.MASTER)._host)
        self.service = MasterService(
            self.coordinator, store, network, [], probe=False, clock=time.monotonic
        )
        for index, peer in enumerate(self.peers):
            self._join(peer, f"peer-{index}", founder=index == 0)

    def _join(self, peer: str, name: str, *, founder: bool) -> None:
        now_s = time.monotonic()
        hello = Hello(
            VERSION_MIN,
            VERSION_MAX,
            RUN_ID,
            name,
            ("127.0.0.1:29700",),
            self.chance.getrandbits(62),
            LAYOUT,
            (),
            b"",
            (),
        )
        self.coordinator.attach(peer, hello, Grant(Role.CONTRIBUTOR, founder), now_s)
        if founder:
            head = FragmentHead(0, 0, self.root(0))
            self.coordinator.receive(
                peer, WeightsSupplied(LAYOUT, (SIZE,), (head,), LINEAGE), now_s
            )
        else:
            self.coordinator.receive(
                peer, Synced(FragmentHead(0, self.version, self.root(self.version)), 0), now_s
            )
        self.progress(peer)

    @property
    def version(self) -> int:
        return self.coordinator.context.history.versions[0]

    @staticmethod
    def root(version: int) -> bytes:
        return version.to_bytes(ROOT_BYTES, "big")

    def progress(self, peer: str) -> None:
        draw = self.chance.random
        seen = Progress(
            self.chance.randrange(10**6),
            self.chance.randrange(10**9),
            1e4 * draw(),
            3.0 * draw(),
            "training",
            self.chance.randrange(10**11),
            self.chance.randrange(10**11),
            0,
            {"lr": 1e-3 * draw(), "gpu": draw()},
            1e4 * draw(),
            1e5 * draw(),
        )
        self.coordinator.receive(peer, seen, time.monotonic())

    def round(self) -> None:
        """All contribute; committed."""
        (number,) = self.coordinator.scheduler.rounds
        round_ = self.coordinator.scheduler.rounds[number]
        version, step = round_.version, round_.at_step
        for peer in self.peers:
            ready = Ready(number, self.chance.randrange(1, 10**6), 1.0, self.root(version), step)
            self.coordinator.receive(peer, ready, time.monotonic())
        attempt = round_.running().number
        for peer in self.peers:
            reduced = Reduced(number, attempt, b"d" * ROOT_BYTES)
            self.coordinator.receive(peer, reduced, time.monotonic())
        head = FragmentHead(0, version + 1, self.root(version + 1))
        for peer in self.peers:
            self.coordinator.receive(peer, Applied(number, head), time.monotonic())


def fill(folder: Path, run: Run, rounds_count: int) -> dict[str, float]:
    """A history as if the run had gone on like this for so many rounds."""
    history = MetricsStore(folder / HISTORY_FILE)
    recorder = RunRecorder(
        run.service, history, EventLog(folder / EVENT_LOG_FILE), deque(), wall_clock=time.time
    )
    for _ in range(50):
        run.round()
    recorder.look()
    rows = [json.loads(body) for _, body in recorder._new.rounds]
    began_at = time.time() - rounds_count * ROUND_S
    chance, took_s = run.chance, 0.0
    for start in range(0, rounds_count, BATCH):
        numbers = range(start, min(start + BATCH, rounds_count))
        points = [
            Point(
                began_at + n * ROUND_S + i * POINT_S,
                step=100 * n,
                rounds=n,
                loss=2 + chance.random(),
                loss_min=2.0,
                loss_max=3.0,
                tokens_per_s=1e4 * chance.random(),
                utilisation=chance.random(),
                members=len(run.peers),
                sent_bytes=10**9 * n,
                saved_bytes=10**10 * n,
            )
            for n in numbers
            for i in range(int(ROUND_S / POINT_S))
        ]
        bodies = [(n + 1, compact(_another(rows[n % len(rows)], n + 1, chance))) for n in numbers]
        events = [
            PastEvent(n + 1, began_at + n * ROUND_S, "round", None, "", f"round {n} was repaired")
            for n in numbers
        ]
        before_s = time.perf_counter()
        history.write(points, bodies, events)
        took_s += time.perf_counter() - before_s
    size_bytes = sum(path.stat().st_size for path in folder.glob(f"{HISTORY_FILE}*"))
    recorder.close()
    return {"write_s": took_s / rounds_count, "history_bytes": size_bytes}


def _another(row: dict[str, Any], number: int, chance: random.Random) -> dict[str, Any]:
    """A round like this one, with times of its own, as no two are alike on disk."""
    marks = {
        peer: {**mark, "ready_s": round(9 * chance.random(), 6), "reduced_s": 9 + chance.random()}
        for peer, mark in row["marks"].items()
    }
    return {**row, "round": number, "marks": marks}


async def measure(folder: Path, run: Run) -> dict[str, Any]:
    """Latencies, and the processor's share of an open page."""
    before_s = time.perf_counter()
    recorder = RunRecorder.open(run.service, folder)
    measured: dict[str, Any] = {"open_s": time.perf_counter() - before_s}

    def status(*, past: bool = True) -> MasterStatus:
        seen = describe(run.coordinator, time.monotonic(), past=past)
        seen = attrs.evolve(seen, headline=recorder.headline(seen.headline))
        return MasterStatus(
            **attrs.asdict(seen, recurse=False),
            kind="master",
            version="0",
            journal_cut=None,
            run_id=RUN_ID,
            name="x",
            uptime_s=0.0,
            value_count=0,
            addresses=(),
            pending=(),
            ending=None,
        )

    live = recorder.live = LiveStream(
        lambda: status(past=False), lambda: run.coordinator.context.change_count
    )
    app = make_app(
        token="",
        actions={},
        routes=[
            status_route(lambda past: status(past=past)),
            Route("/api/live", live, methods=["GET"]),
            metrics_route(status),
            *past_routes(recorder.history, run.service.network),
        ],
    )
    measured["live_bytes"] = len(compact(status(past=False)))
    listener, url = bind_http(Address("127.0.0.1", 0))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(serve_http, app, listener)
        nursery.start_soon(recorder.run)
        nursery.start_soon(live.run)
        measured["answers"] = {
            path: await trio.to_thread.run_sync(latencies, url + path) for path in ASKED
        }
        page = await trio.to_thread.run_sync(open_page, url)
        try:
            measured["idle"] = await share_of_a_core()
            nursery.start_soon(tell, run)
            measured["training"] = await share_of_a_core()
        finally:
            page.kill()
            page.wait()
        nursery.cancel_scope.cancel()
    recorder.close()
    return measured


def latencies(url: str) -> dict[str, float]:
    """Of one answer, over a connection that is open already."""
    seconds = []
    with httpx.Client(timeout=60.0) as client:
        for _ in range(TIMES):
            before_s = time.perf_counter()
            response = client.get(url)
            seconds.append(time.perf_counter() - before_s)
            response.raise_for_status()
    return {
        "median_s": statistics.median(seconds),
        "max_s": max(seconds),
        "bytes": float(len(response.content)),
    }


def open_page(url: str) -> subprocess.Popen[bytes]:
    page = subprocess.Popen([sys.executable, "-c", LISTEN, url], stdout=subprocess.PIPE)
    assert page.stdout is not None
    with page.stdout as said:
        assert said.readline() == b"listening\n"
    return page


async def share_of_a_core() -> float:
    await trio.sleep(SETTLE_S)
    before_s, cpu_s = time.perf_counter(), time.process_time()
    await trio.sleep(SECONDS)
    return (time.process_time() - cpu_s) / (time.perf_counter() - before_s)


async def tell(run: Run) -> None:
    """Every member says once a second what it does."""
    while True:
        for peer in run.peers:
            run.progress(peer)
            await trio.sleep(1.0 / len(run.peers))


def dashboard(rounds_count: int = 10_000, members_count: int = 64) -> Measured:
    """The section of RESULTS.md."""
    run = Run(members_count, random.Random(1))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        say(f"writing {rounds_count} rounds of {members_count} members")
        raw: dict[str, Any] = fill(folder, run, rounds_count)
        say("asking for answers, then looking at the processor")
        raw |= trio.run(measure, folder, run)
    raw |= {"rounds": rounds_count, "members": members_count}
    command = ["python -m benchmarks.dashboard"]
    answers = Table(
        f"Answers of a master with {rounds_count:,} rounds of {members_count} members behind it",
        command,
        ["answer", "ms", "the longest of 15, ms", "KB"],
        [
            [
                f"`{path}`",
                f"{1e3 * each['median_s']:.1f}",
                f"{1e3 * each['max_s']:.1f}",
                f"{each['bytes'] / 1e3:,.0f}",
            ]
            for path, each in raw["answers"].items()
        ],
        ["On loopback, asked by the process that answers, in a thread."],
    )
    cost = Table(
        "What it costs",
        command,
        ["what", "how much"],
        [
            ["one page open, nothing changes: of a core", f"{raw['idle']:.2%}"],
            ["one page open, all members tell of themselves", f"{raw['training']:.2%}"],
            ["a status on the live stream", f"{raw['live_bytes'] / 1e3:.0f} KB"],
            ["a round and its points, written", f"{1e3 * raw['write_s']:.2f} ms"],
            ["the history on disk", f"{raw['history_bytes'] / 1e6:.0f} MB"],
            ["opening it at the start", f"{raw['open_s']:.2f} s"],
        ],
        [f"Shares over {SECONDS:g} s; in the second, members' messages are made here, too."],
    )
    return [answers, cost], raw


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=10_000)
    parser.add_argument("--members", type=int, default=64)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.rounds < 1 or not 2 <= options.members < MEMBERS_MAX:
        parser.error(f"at least one round, and from 2 to {MEMBERS_MAX - 1} members")
    tables, raw = dashboard(options.rounds, options.members)
    keep_json(raw, options.json)
    print_tables(tables)
    return 0


if __name__ == "__main__":
    sys.exit(main())
