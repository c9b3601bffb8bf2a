"""What HTTP clients cost the run's port, in a master with few descriptors.

A master may open so many files. Fifty clients open connections to its HTTP side and leave: some
ask and read, some reset, some leave in the middle of a request, some listen to the live stream,
some stay idle for a while. Four ``holdfast events --follow`` look on. Once a second a stranger
dials the run's port and must be shown the run's authority. The descriptors of the master are
counted before, meanwhile, and when all have gone.
"""

from __future__ import annotations

import json
import math
import os
import random
import resource
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import trio
from attrs import define, field

from holdfast.protocol.addresses import Address
from holdfast.protocol.connection_phases import ADMITTING
from holdfast.protocol.enrolment import ENROL_S, newcomers_channel
from holdfast.protocol.errors import HoldfastError
from holdfast.protocol.messages import VERSION_MAX, VERSION_MIN, EnrolAuthority, EnrolHello
from holdfast.protocol.network.stream import MessageStream
from tests.background import background
from tests.processes.harness import WAIT_S

CLIENTS = 50
WATCHERS = 4
DESCRIPTORS = 256
# As often as a master looks at strangers of one address, for as long as they like.
DIAL_EVERY_S = 1.0
GONE_S = 10.0  # for the master to close what its clients have left: far less than a keep-alive
IDLE_S = 2.0
COUNT_EVERY_S = 0.1
HOLDFAST = (sys.executable, "-m", "holdfast")
SPEC = '[run]\nname = "clients"\n[diloco]\nsync_every = 10\n'
WAYS = ("ask", "say nothing", "half a request", "reset", "stay idle", "listen")
ENDS = (OSError, trio.BrokenResourceError, trio.ClosedResourceError)


@define
class Seen:
    """What was seen of a master while its HTTP side was busy."""

    opened: Counter[str] = field(factory=Counter)
    answered: int = 0
    hung_up: int = 0  # of the clients' connections: somebody had to yield
    dials_s: list[float] = field(factory=list)
    failed: list[str] = field(factory=list)
    before: int = 0
    most: int = 0
    left: int = 0
    watching: int = 0


@contextmanager
def a_master(folder: Path, descriptors: int) -> Iterator[tuple[int, Address, Address]]:
    """A master's process id, the address of its run's port and of its HTTP side."""
    (folder / "run.toml").write_text(SPEC)
    state = folder / "state"
    arguments = ["master", str(folder / "run.toml"), "--state", str(state), "--no-invite"]
    arguments += ["--listen", "127.0.0.1:0", "--http", "127.0.0.1:0"]
    with (folder / "master.log").open("wb") as log:
        process = subprocess.Popen(
            [*HOLDFAST, *arguments],
            stdout=log,
            stderr=log,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors,) * 2),
        )
    try:
        until_s = time.monotonic() + WAIT_S
        while not (state / "control.json").exists() and time.monotonic() < until_s:
            time.sleep(COUNT_EVERY_S)
        control = json.loads((state / "control.json").read_text())
        http = Address.parse(control["url"].removeprefix("http://"))
        yield process.pid, _run_port(folder, http), http
    finally:
        _end(process)
        print((folder / "master.log").read_text(errors="replace")[-3_000:])


def _end(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGINT)
    process.wait(WAIT_S)


def _run_port(folder: Path, http: Address) -> Address:
    import httpx

    status = httpx.get(f"http://{http}/api/status", trust_env=False).json()
    return Address.parse(status["addresses"][0])


def descriptors_of(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


# ---------------------------------------------------------------- those who come


async def client(
    seen: Seen, http: Address, chance: random.Random, goes_on: Callable[[], bool]
) -> None:
    """Open and leave, in all the ways that there are."""
    while goes_on():
        way = chance.choice(WAYS)
        seen.opened[way] += 1
        try:
            async with await trio.open_tcp_stream(http.host, http.port) as stream:
                await _use(seen, stream, way, chance)
        except ENDS:
            seen.hung_up += 1


async def _use(seen: Seen, stream: trio.SocketStream, way: str, chance: random.Random) -> None:
    path = "/api/live" if way == "listen" else "/api/status?past=0"
    asked = f"GET {path} HTTP/1.1\r\nhost: localhost\r\n\r\n".encode()
    if way == "say nothing":
        return
    if way == "half a request":
        await stream.send_all(asked[: chance.randrange(1, len(asked))])
        return
    await stream.send_all(asked)
    if not (await stream.receive_some()).startswith(b"HTTP/1.1 "):
        raise trio.BrokenResourceError
    seen.answered += 1
    if way == "reset":
        stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    elif way in ("stay idle", "listen"):
        await trio.sleep(chance.uniform(0.0, IDLE_S))


async def dial(seen: Seen, address: Address) -> None:
    """As a newcomer does: TLS, a greeting, and what the master shows for itself."""
    began_s = trio.current_time()
    try:
        with trio.fail_after(ENROL_S):
            async with newcomers_channel(address) as channel:
                messages = MessageStream(channel.stream, ADMITTING)
                await messages.send(EnrolHello(VERSION_MIN, VERSION_MAX))
                await messages.receive_expected(EnrolAuthority)
    except (*ENDS, trio.TooSlowError, trio.EndOfChannel, HoldfastError) as error:
        seen.failed.append(f"{error!r} after {trio.current_time() - began_s:.1f} s")
    else:
        seen.dials_s.append(trio.current_time() - began_s)


async def _dial_again(seen: Seen, address: Address) -> None:
    while True:
        await dial(seen, address)
        await trio.sleep(DIAL_EVERY_S)


async def _count(seen: Seen, pid: int) -> None:
    while True:
        seen.most = max(seen.most, descriptors_of(pid))
        await trio.sleep(COUNT_EVERY_S)


# ---------------------------------------------------------------- all of it


async def measure(folder: Path, *, each: int, descriptors: int) -> Seen:
    """Until each client has opened so many connections."""
    seen = Seen()
    with a_master(folder, descriptors) as (pid, run_port, http):
        await _gone(seen, pid, math.inf)
        seen.before = descriptors_of(pid)
        watch = [*HOLDFAST, "events", "--follow", "--state", str(folder / "state")]
        with (folder / "watch.log").open("wb") as log:
            watchers = [subprocess.Popen(watch, stdout=log, stderr=log) for _ in range(WATCHERS)]
        try:
            await _busy(seen, pid, run_port, http, each)
            seen.watching = sum(process.poll() is None for process in watchers)
        finally:
            for process in watchers:
                _end(process)
        await dial(seen, run_port)
        await _gone(seen, pid, seen.before)
    return seen


async def _busy(seen: Seen, pid: int, run_port: Address, http: Address, each: int) -> None:
    def goes_on() -> bool:
        return seen.opened.total() < each * CLIENTS

    async with background() as helpers:
        helpers.start_soon(_count, seen, pid)
        helpers.start_soon(_dial_again, seen, run_port)
        async with trio.open_nursery() as clients:
            for number in range(CLIENTS):
                clients.start_soon(client, seen, http, random.Random(number), goes_on)


async def _gone(seen: Seen, pid: int, wanted: float) -> None:
    """Count what is left when the master has had time to notice."""
    with trio.move_on_after(GONE_S):
        while (before := descriptors_of(pid)) > wanted or wanted == math.inf:
            await trio.sleep(2 * COUNT_EVERY_S)
            if wanted == math.inf and descriptors_of(pid) == before:
                break  # it has started: nothing changes any more
    seen.left = descriptors_of(pid)
