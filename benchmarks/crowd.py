"""Hundreds of members' sessions against one real master, over TLS on loopback.

    python -m benchmarks.crowd --peers 50,100,250,500 --json crowd.json

The master is ``holdfast master`` as people start it, a process of its own. Its members are the light peers of
``benchmarks.scale`` in this process, in real time: each enrols with an invite, has a session of its own over TLS, and
says all that a member says; none moves tensors. What members pass on to each other is handed over within
this process. Measured at the master's process: processor time and memory; at the members: bytes that it sent them.
"""

from __future__ import annotations

import argparse
import json
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import psutil
import trio
from attrs import asdict, frozen

from benchmarks import scale
from benchmarks.commands import HOLDFAST, BenchError, end
from benchmarks.progress import say
from benchmarks.report import Table, keep_json, print_tables
from benchmarks.scale import LightPeer
from benchmarks.sections import Measured
from holdfast.daemon.peer.peer_credentials import obtain_credentials
from holdfast.daemon.peer.peer_service import progress_every_s
from holdfast.daemon.this_machine import raise_descriptor_limit
from holdfast.membership.spec.spec import RunSpec
from holdfast.protocol.addresses import Address
from holdfast.protocol.messages import Hello
from holdfast.protocol.network.interface import Channel
from holdfast.protocol.network.sockets import SocketNetwork
from holdfast.protocol.trust.credentials import Credentials
from holdfast.protocol.trust.invite import Invite

COUNTS = (50, 100, 250, 500)
ROUNDS = 3  # measured, after one that is not
JOIN_EVERY_S = 0.02
DIAL_AGAIN_S = 0.2
READY_S = 300.0
SPEC = '[run]\nname = "crowd"\n[diloco]\nsync_every = 100\n'


class RealSession(LightPeer):
    """A light peer with a certificate of the run, over TLS."""

    def __init__(
        self,
        number: int,
        invite: Invite,
        credentials: Credentials,
        passed_on: dict[bytes, bytes],
        progress_s: float,
    ) -> None:
        network = SocketNetwork(credentials, newcomers=False)
        peer, lot = credentials.identity.peer_id, random.Random(number)
        super().__init__(f"n{number}", peer, network, lot, passed_on, progress_s)
        self.at, self.master = Address("127.0.0.1", 0), invite.addresses[0]
        self._run_id = invite.run_id

    async def _dial(self) -> Channel:
        """Dial again and again, as peers do: a master takes few handshakes at once from one address."""
        while True:
            try:
                return await super()._dial()
            except OSError:
                await trio.sleep(DIAL_AGAIN_S)

    def _hello(self) -> Hello:
        return attrs.evolve(super()._hello(), run_id=self._run_id)


@frozen
class Crowd:
    """What so many sessions cost the master's process.

    Attributes:
      join_s: until all were in sync; ``JOIN_EVERY_S`` apart.
      join_cpu_s, join_bytes: of all joins.
      round_s: of a round, of which ``commit_s`` from the order to the commit.
      cpu_s, sent_bytes: a round.
      memory_bytes: resident, at the end.
    """

    peers: int
    join_s: float
    join_cpu_s: float
    join_bytes: int
    round_s: float
    commit_s: float
    cpu_s: float
    sent_bytes: float
    memory_bytes: int


def measure(peers: int) -> Crowd:
    """One run of so many sessions.

    Raises:
      BenchError: the master does not serve them.
    """
    with tempfile.TemporaryDirectory(prefix="holdfast-bench-") as name:
        folder = Path(name)
        (folder / "run.toml").write_text(SPEC)
        with socket.create_server(("127.0.0.1", 0)) as free:
            listen = f"127.0.0.1:{free.getsockname()[1]}"
        more = ["--state", str(folder / "state"), "--listen", listen, "--http", "127.0.0.1:0"]
        command = [*HOLDFAST, "master", str(folder / "run.toml"), "--no-invite", *more]
        with (folder / "master.log").open("w") as log:
            master = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        try:
            return trio.run(_measured, folder, master.pid, peers)
        except trio.TooSlowError:
            log_end = (folder / "master.log").read_text()[-2_000:]
            raise BenchError(f"{peers} sessions are not served: {log_end}") from None
        finally:
            end(master)


async def _measured(folder: Path, pid: int, peers: int) -> Crowd:
    process, state = psutil.Process(pid), folder / "state"
    passed_on: dict[bytes, bytes] = {}
    members: list[RealSession] = []

    async def ask(*words: str) -> str:
        command = [*HOLDFAST, *words, "--state", str(state)]
        done = await trio.run_process(
            command, capture_stdout=True, capture_stderr=True, check=False
        )
        return str(done.stdout.decode())

    async def status() -> dict[str, Any]:
        return dict(json.loads(await ask("status", "--json") or "{}"))

    def taken() -> tuple[float, int]:
        times = process.cpu_times()
        return times.user + times.system, sum(each.received_bytes for each in members)

    async def until(condition: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        with trio.fail_after(READY_S):
            while not condition(found := await status()):
                await trio.sleep(0.5)
            return found

    await until(lambda found: bool(found))
    text = await ask("invite", "--founder", "--uses", str(peers))
    invite = Invite.decode(next(word for word in text.split() if word.startswith("holdfast1.")))
    async with trio.open_nursery() as nursery:
        for number in range(peers):
            home = folder / f"n{number}"
            credentials = await obtain_credentials(
                home, invite, f"n{number}", READY_S, lambda _: None
            )
            every_s = progress_every_s(peers)
            members.append(RealSession(number, invite, credentials, passed_on, every_s))
        await ask("pause")
        heartbeat_s = RunSpec.parse(SPEC).heartbeat_s
        began_s, (cpu_s, _) = time.monotonic(), taken()
        for member in members:
            nursery.start_soon(member.run, heartbeat_s)
            await trio.sleep(JOIN_EVERY_S)
        await until(lambda found: sum(m["in_sync"] for m in found["members"]) == peers)
        join_s, (joined_cpu_s, joined_bytes) = time.monotonic() - began_s, taken()
        await ask("resume")
        first = await until(lambda found: found["committed"] >= 1)
        round_began_s, (before_cpu_s, before_bytes) = time.monotonic(), taken()
        goal = first["committed"] + ROUNDS
        with trio.fail_after(READY_S):
            while (found := await status())["committed"] < goal:
                await trio.sleep(1.0)
        seconds, (after_cpu_s, after_bytes) = time.monotonic() - round_began_s, taken()
        ended = [row for row in found["past_rounds"] if row["outcome"] == "committed"][-ROUNDS:]
        nursery.cancel_scope.cancel()
    count = found["committed"] - first["committed"]
    return Crowd(
        peers=peers,
        join_s=join_s,
        join_cpu_s=joined_cpu_s - cpu_s,
        join_bytes=joined_bytes,
        round_s=seconds / count,
        commit_s=max(row["reduce_s"] for row in ended),
        cpu_s=(after_cpu_s - before_cpu_s) / count,
        sent_bytes=(after_bytes - before_bytes) / count,
        memory_bytes=process.memory_info().rss,
    )


def crowd(counts: tuple[int, ...] = COUNTS) -> Measured:
    """The section of RESULTS.md."""
    raise_descriptor_limit()
    found = []
    for peers in counts:
        say(f"{peers} sessions")
        found.append(measure(peers))
        say(f"  {found[-1].cpu_s:.2f} s of a core a round")
    table = Table(
        "Sessions over TLS against one `holdfast master`, on the same machine",
        ["python -m benchmarks.crowd"],
        [
            "peers",
            "all join, s",
            "master's CPU, s",
            "bytes sent",
            "a round, s",
            "order to commit, s",
            "master's CPU, s",
            "bytes sent",
            "its memory",
        ],
        [
            [
                f"{each.peers}",
                f"{each.join_s:.1f}",
                f"{each.join_cpu_s:.1f}",
                f"{each.join_bytes / 1e6:.2f} MB",
                f"{each.round_s:.1f}",
                f"{each.commit_s:.2f}",
                f"{each.cpu_s:.2f}",
                f"{each.sent_bytes / 1e6:.3f} MB",
                f"{each.memory_bytes / 2**20:.0f} MiB",
            ]
            for each in found
        ],
        [
            f"A peer comes every {JOIN_EVERY_S * 1e3:g} ms, with a certificate of its own. A round trains "
            f"{scale.TRAIN_S:g} s, reduces {scale.REDUCE_S:g} s and applies {scale.APPLY_S:g} s, each up to "
            f"{scale.JITTER_S:g} s longer. CPU is of the whole process: TLS, page and status too, which is asked for "
            "about once a second. The members share the machine's other core, so times are no shorter than "
            "theirs. Bytes are before TLS."
        ],
    )
    return [table], {"runs": [asdict(each) for each in found]}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--peers", default=",".join(map(str, COUNTS)), metavar="N[,...]")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    try:
        tables, raw = crowd(tuple(int(text) for text in options.peers.split(",")))
    except BenchError as error:
        print(f"crowd: {error}", file=sys.stderr)
        return 2
    keep_json(raw, options.json)
    print_tables(tables)
    return 0


if __name__ == "__main__":
    sys.exit(main())
