"""The section about strangers: ten thousand hostile connections a minute at the ports of a run that trains.

    python -m benchmarks.hostile                                  five minutes of it, between quiet ones
    python -m benchmarks.hostile --seconds 30 --per-minute 3000   a look

Master and three peers are processes on loopback with a fragment of some MiB and steps that only take
time, so what a round takes is the network's and the daemons' doing. A process of its own attacks all
four ports alike, from many addresses (of 127.66.0.0/16), each kind of connection in turn:

    junk      random bytes, not TLS, not a lane
    silent    connects and says nothing
    slow      the beginning of a genuine TLS ClientHello, a byte a second
    replayed  a genuine ClientHello, the same one each time, and nothing after it
    broken    a ClientHello with noise in it
    bare      TLS to the end without a certificate, then noise
    token     TLS, then the genuine words of a newcomer with a token that nobody gave (master), or
              what a member would say (peers)
    lane      a lane's preamble for a link that is not there, then noise
    reset     connects and resets at once

What is measured: the time from one commit to the next, quiet and under attack, and what the daemons'
memory grows by meanwhile, beside what it grows by in as long a quiet time.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import resource
import ssl
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import trio

from benchmarks.commands import ROOT, BenchError
from benchmarks.grounds import Loopback
from benchmarks.lab_run import MASTER_PORT, LabRun, Status, stop_on_signals
from benchmarks.progress import say
from benchmarks.report import Table, keep_json
from benchmarks.sections import Measured
from holdfast.protocol import wire
from holdfast.protocol.messages import VERSION_MAX, EnrolHello, EnrolRequest, Heartbeat

SECONDS = 300.0  # of the attack, and of each of the two quiet times around it
PER_MINUTE = 10_000
ADDRESSES = 250  # that the attackers have
PEERS = ("a", "b", "c")
MIB = 4
STEP_S = 0.05
SYNC_EVERY = 20
WAIT_S = 120.0
WARM_ROUNDS = 60  # discarded: lanes open, pages are touched
SAMPLE_S = 1.0  # between two looks at the daemons' memory
HOLD_S = 60.0  # an attacker hangs up after that, if nobody did before
OPEN_MAX = 20_000  # connections of the attackers at once
DELAY_MAX = 0.10  # promised: of a round
GROWTH_MAX_BYTES = 20 * 2**20  # promised: of a daemon's memory
SCRIPT = [
    str(Path(__file__).with_name("one_fragment.py")),
    f"--mib={MIB}",
    f"--step-s={STEP_S}",
]

SPEC = f"""\
[run]
name = "hostile"
[diloco]
sync_every = {SYNC_EVERY}
[reduce]
lanes = 2
lanes_max = 2
[membership]
min_members = {len(PEERS)}
deadline_s = 10
grace_s = 10
[checkpoint]
every_s = 0
"""

# ---------------------------------------------------------------- the attackers


def client_hello() -> bytes:
    """What a client of TLS 1.3 says first."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    out = ssl.MemoryBIO()
    tls = context.wrap_bio(ssl.MemoryBIO(), out)
    try:
        tls.do_handshake()
    except ssl.SSLWantReadError:
        return out.read()
    raise AssertionError("a handshake with nobody came to its end")


class Attack:
    """Connections at a steady rate, until its time is over.

    Attributes:
      counts: connections by kind, and what became of them.
    """

    def __init__(self, ports: Sequence[tuple[str, int]], addresses: int, seed: int) -> None:
        self._ports = ports
        self._chance = random.Random(seed)
        self._sources = [f"127.66.{n // 250}.{n % 250 + 1}" for n in range(addresses)]
        self._hello = client_hello()
        self._open = 0
        self.counts: Counter[str] = Counter()
        self.longest_s = 0.0  # that anybody was let stay

    async def run(self, seconds: float, per_minute: int) -> None:
        kinds = itertools.cycle(KINDS)
        end_s = trio.current_time() + seconds
        next_s = trio.current_time()
        async with trio.open_nursery() as nursery:
            while next_s < end_s:
                await trio.sleep_until(next_s)
                next_s += 60.0 / per_minute
                if self._open < OPEN_MAX:
                    port = self._chance.choice(self._ports)
                    nursery.start_soon(self._one, next(kinds), port)
                else:
                    self.counts["not made"] += 1
            nursery.cancel_scope.deadline = trio.current_time() + HOLD_S

    async def _one(self, kind: str, port: tuple[str, int]) -> None:
        self._open += 1
        began_s = trio.current_time()
        sock = trio.socket.socket()
        try:
            await sock.bind((self._chance.choice(self._sources), 0))
            await sock.connect(port)
            self.counts[kind] += 1
            with trio.move_on_after(HOLD_S) as held:
                await KINDS[kind](self, trio.SocketStream(sock))
            self.counts["held to our end" if held.cancelled_caught else "hung up on"] += 1
        except* (trio.BrokenResourceError, trio.ClosedResourceError, ssl.SSLError):
            self.counts["hung up on"] += 1
        except* OSError:
            self.counts["not let in"] += 1
        finally:
            self.longest_s = max(self.longest_s, trio.current_time() - began_s)
            self._open -= 1
            sock.close()

    async def _until_hung_up_on(self, stream: trio.abc.Stream, kind: str) -> None:
        while data := await stream.receive_some(65_536):
            self.counts[f"bytes answered to {kind}"] += len(data)

    async def _junk(self, stream: trio.SocketStream) -> None:
        await stream.send_all(b"\x01" + self._chance.randbytes(self._chance.randrange(1, 4_096)))
        await self._until_hung_up_on(stream, "junk")

    async def _silent(self, stream: trio.SocketStream) -> None:
        await self._until_hung_up_on(stream, "silence")

    async def _slow(self, stream: trio.SocketStream) -> None:
        async with trio.open_nursery() as nursery:

            async def drip() -> None:
                for byte in self._hello:
                    await stream.send_all(bytes([byte]))
                    await trio.sleep(1.0)

            nursery.start_soon(drip)
            await self._until_hung_up_on(stream, "slow words")
            nursery.cancel_scope.cancel()

    async def _replayed(self, stream: trio.SocketStream) -> None:
        await stream.send_all(self._hello)
        await self._until_hung_up_on(stream, "replayed words")

    async def _broken(self, stream: trio.SocketStream) -> None:
        hello = bytearray(self._hello)
        for _ in range(8):
            hello[self._chance.randrange(9, len(hello))] = self._chance.randrange(256)
        await stream.send_all(hello)
        await self._until_hung_up_on(stream, "broken words")

    async def _tls(self, stream: trio.SocketStream) -> trio.SSLStream[trio.SocketStream]:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        tls = trio.SSLStream(stream, context)
        await tls.do_handshake()
        return tls

    async def _bare(self, stream: trio.SocketStream) -> None:
        tls = await self._tls(stream)
        await tls.send_all(self._chance.randbytes(2_000))
        await self._until_hung_up_on(tls, "noise in TLS")

    async def _token(self, stream: trio.SocketStream) -> None:
        tls = await self._tls(stream)
        for message in (
            EnrolHello(VERSION_MAX, VERSION_MAX),
            EnrolRequest("x" * 32, b"no request at all", "stranger"),
            Heartbeat(1),
        ):
            body = wire.encode(message)
            await tls.send_all(struct.pack(">I", len(body)) + body)
        await self._until_hung_up_on(tls, "a bad token")

    async def _lane(self, stream: trio.SocketStream) -> None:
        await stream.send_all(b"H" + self._chance.randbytes(self._chance.randrange(64)))
        await self._until_hung_up_on(stream, "lanes")

    async def _reset(self, stream: trio.SocketStream) -> None:
        stream.setsockopt(trio.socket.SOL_SOCKET, trio.socket.SO_LINGER, struct.pack("ii", 1, 0))


KINDS = {
    "junk": Attack._junk,
    "silent": Attack._silent,
    "slow": Attack._slow,
    "replayed": Attack._replayed,
    "broken": Attack._broken,
    "bare": Attack._bare,
    "token": Attack._token,
    "lane": Attack._lane,
    "reset": Attack._reset,
}


def attack(ports: Sequence[str], seconds: float, per_minute: int, addresses: int) -> int:
    """In a process of its own: what it has done comes out as JSON."""
    _soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    targets = [(host, int(port)) for host, _, port in (each.rpartition(":") for each in ports)]
    attackers = Attack(targets, addresses, seed=1)
    trio.run(attackers.run, seconds, per_minute)
    print(json.dumps({"counts": dict(attackers.counts), "longest_s": attackers.longest_s}))
    return 0


# ---------------------------------------------------------------- the run


def under_attack(seconds: float, per_minute: int, addresses: int) -> dict[str, Any]:
    """Rounds and memory of a run, quiet, attacked, quiet."""
    with (
        tempfile.TemporaryDirectory(prefix="holdfast-bench-") as directory,
        Loopback() as ground,
        LabRun(ground, Path(directory), SCRIPT) as run,
    ):
        run.start_master(SPEC)
        for host, name in enumerate(PEERS, 1):
            run.join(name, host, founder=host == 1)
        run.until(lambda status: status["committed"] >= WARM_ROUNDS, "the run is warm", WAIT_S)
        names = ("master", *PEERS)
        ports = [f"{ground.address(0)}:{MASTER_PORT}"]
        ports += [f"{ground.address(host)}:{MASTER_PORT + 1}" for host in range(1, len(PEERS) + 1)]
        memory = Memory({name: run.pid(name) for name in names})
        found: dict[str, Any] = {"seconds": seconds, "per_minute": per_minute}
        found["addresses"] = addresses
        members = _members(run.master())
        for phase in ("quiet", "attacked", "quiet again"):
            say(f"{phase}, {seconds:g} s")
            attackers = None
            if phase == "attacked":
                attackers = _attackers(ports, seconds, per_minute, addresses)
            memory.begin()
            found[phase] = _watched(run, memory, seconds)
            found[phase]["memory"] = memory.told()
            if attackers is not None:
                said, _ = attackers.communicate(timeout=2 * HOLD_S)
                found["attack"] = json.loads(said)
        after = run.master()
        found["members_lost"] = len(members - _members(after))
        found["rounds_aborted"] = after["aborted"]
    return found


def _attackers(
    ports: Sequence[str], seconds: float, per_minute: int, addresses: int
) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "benchmarks.hostile", "--attack", *ports]
    command += ["--seconds", f"{seconds:g}", "--per-minute", str(per_minute)]
    command += ["--addresses", str(addresses)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE)


def _members(status: Status) -> set[tuple[str, int]]:
    return {(member["peer"], member["number"]) for member in status["members"]}


class Memory:
    """What processes take, looked at now and then."""

    def __init__(self, pids: dict[str, int]) -> None:
        self._pids = pids
        self.begin()

    def begin(self) -> None:
        self._first = {name: resident_bytes(pid) for name, pid in self._pids.items()}
        self._most = dict(self._first)

    def look(self) -> None:
        for name, pid in self._pids.items():
            self._most[name] = max(self._most[name], resident_bytes(pid))

    def told(self) -> dict[str, dict[str, int]]:
        return {
            name: {"first_bytes": self._first[name], "most_bytes": self._most[name]}
            for name in self._pids
        }


def resident_bytes(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def _watched(run: LabRun, memory: Memory, seconds: float) -> dict[str, Any]:
    """The times between commits in the next so many seconds."""
    first, until_s = run.master()["committed"], time.monotonic() + seconds
    while time.monotonic() < until_s:
        memory.look()
        time.sleep(SAMPLE_S)
    time.sleep(2 * SAMPLE_S)  # until the last one is in the history, too
    last = run.master()["committed"]
    ends: list[float] = []
    before = ""
    while len(ends) <= last - first:
        page = run.ask(f"rounds?limit=200{before}")["rounds"]
        ends += [row["ended_at"] for row in page if row["outcome"] == "committed"]
        if len(page) < 200:
            break
        before = f"&before={page[-1]['round']}"
    ends = sorted(ends)[-(last - first + 1) :]
    between = [later - earlier for earlier, later in itertools.pairwise(ends)]
    if len(between) < 2:
        raise BenchError(f"only {len(between)} rounds in {seconds:g} s")
    ordered = sorted(between)
    return {
        "rounds": len(between),
        "median_s": statistics.median(between),
        "p95_s": ordered[min(len(ordered) - 1, round(0.95 * len(ordered)))],
        "most_s": ordered[-1],
    }


def growth_bytes(found: dict[str, Any]) -> int:
    """By how much more a daemon's memory grew under attack than in the worse of the quiet times; of
    the daemon of which that is most."""

    def grew(phase: str, name: str) -> int:
        memory = found[phase]["memory"][name]
        return int(memory["most_bytes"] - memory["first_bytes"])

    return max(
        grew("attacked", name) - max(grew("quiet", name), grew("quiet again", name))
        for name in found["attacked"]["memory"]
    )


def delay(found: dict[str, Any], figure: str) -> float:
    """By how much longer a round took under attack than in the worse of the quiet times."""
    quiet = max(found["quiet"][figure], found["quiet again"][figure])
    return float(found["attacked"][figure] / quiet - 1)


# ---------------------------------------------------------------- what comes of it


def hostile() -> Measured:
    """The section of RESULTS.md."""
    found = under_attack(SECONDS, PER_MINUTE, ADDRESSES)
    return [shown(found)], found


def shown(found: dict[str, Any]) -> Table:
    """The section's table."""
    rows = [
        [
            phase,
            str(found[phase]["rounds"]),
            *(f"{found[phase][figure]:.3f}" for figure in ("median_s", "p95_s", "most_s")),
            ", ".join(
                f"{name} {(each['most_bytes'] - each['first_bytes']) / 2**20:+.1f}"
                for name, each in found[phase]["memory"].items()
            ),
        ]
        for phase in ("quiet", "attacked", "quiet again")
    ]
    counts = found["attack"]["counts"]
    made = sum(counts.get(kind, 0) for kind in KINDS)
    answered = {name: n for name, n in counts.items() if name.startswith("bytes answered")}
    return Table(
        f"A run under {found['per_minute']} hostile connections a minute for "
        f"{found['seconds']:g} s, from {found['addresses']} addresses",
        ["python -m benchmarks.hostile"],
        [
            "when",
            "rounds",
            "commit to commit, median, s",
            "95 %, s",
            "longest, s",
            "memory at most beside the start, MiB",
        ],
        rows,
        [
            f"{made} connections at the ports of a master and {len(PEERS)} peers, of nine kinds in "
            f"turn (see the top of benchmarks/hostile.py); the longest was let stay for "
            f"{found['attack']['longest_s']:.1f} s. Members lost: {found['members_lost']}, rounds "
            f"aborted: {found['rounds_aborted']}. {MIB} MiB a fragment, {SYNC_EVERY} steps of "
            f"{STEP_S:g} s that only take time.",
            "Answered: "
            + (", ".join(f"{name[15:]} {n} bytes" for name, n in answered.items()) or "nothing")
            + ". TLS says what it must; junk, silence and lanes hear nothing.",
        ],
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=SECONDS)
    parser.add_argument("--per-minute", type=int, default=PER_MINUTE)
    parser.add_argument("--addresses", type=int, default=ADDRESSES)
    parser.add_argument("--attack", nargs="+", metavar="HOST:PORT", help="only attack these")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.attack:
        return attack(options.attack, options.seconds, options.per_minute, options.addresses)
    stop_on_signals()
    try:
        found = under_attack(options.seconds, options.per_minute, options.addresses)
    except BenchError as error:
        print(f"hostile: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    print(keep_json(found, options.json))
    late, grown = delay(found, "most_s"), growth_bytes(found)
    say(f"the longest round {late:+.1%}, memory {grown / 2**20:+.1f} MiB at most")
    broken = found["members_lost"] or late > DELAY_MAX or grown > GROWTH_MAX_BYTES
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
