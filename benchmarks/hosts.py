"""A peer of two hosts: what its boxes cost, and how long a restart takes.

    python -m benchmarks.hosts --mib 256 --gbit 1 --json hosts.json

A master with a plain peer, and a peer of two hosts with a process on each, in namespaces on a
switch; the line between the two hosts carries ``--gbit``. The model is sharded over both (FSDP2)
and nothing is computed, so what the second host's device counts is boxes and messages.
"""

from __future__ import annotations

import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from benchmarks.grounds import Switch
from benchmarks.lab_run import LabRun
from benchmarks.report import Measured, Table, bench_parser, run_main, say, tell

MIB, GBIT, ROUNDS, RESTARTS = 256, 1.0, 8, 3
MASTER, PLAIN, HEAD, HOST = 0, 1, 2, 3  # of the switch
PORT = 29_500
DEVICE = "eth0"
OWN_DEVICE = {"GLOO_SOCKET_IFNAME": DEVICE}  # the machine's name is the same in all namespaces
WAIT_S = 300.0
STEP_S = 0.05
SYNC_EVERY = 100
STRING = re.compile(r"holdfasthost1\.[\w-]+")
BOXES = re.compile(r"boxes of fragment \d+: (\d+) bytes (to|from) host in ([\d.]+) s")
SCRIPT = Path(__file__).with_name("hosts_script.py")

SPEC = f"""\
[run]
name = "hosts"
[diloco]
sync_every = {SYNC_EVERY}
overlap = {SYNC_EVERY // 2}
[membership]
contributors = 2
min_members = 1
deadline_s = 60
[reduce]
codec_up = "int8"
codec_down = "int8"
"""


class Site:
    """The run: the plain peer, the head and its host."""

    def __init__(self, run: LabRun, ground: Switch, mib: int, gbit: float) -> None:
        self.run, self.ground = run, ground
        for number in (HEAD, HOST):
            shape = ["tc", "qdisc", "add", "dev", DEVICE, "root", "tbf", "rate", f"{gbit:g}gbit"]
            limits = ["burst", "2mb", "limit", "8mb"]
            subprocess.run(ground.command(number, [*shape, *limits]), check=True)
        size = ["--mib", str(mib), "--step-s", str(STEP_S)]
        launch = ["-m", "torch.distributed.run", "--nproc-per-node", "1", "--nnodes"]
        alone = [sys.executable, *launch, "1", "--master-port", str(PORT), str(SCRIPT), *size]
        places = ["{hosts}", "--node-rank", "{host}", "--master-addr", "{head}"]
        both = [sys.executable, *launch, *places, "--master-port", str(PORT), str(SCRIPT), *size]
        run.start_master(SPEC)
        self._join(PLAIN, "plain", alone, founder=True)
        self._join(HEAD, "head", both, more=["--hosts", "2"])
        found = None
        while (found := STRING.search(run.nodes["head"].log)) is None:
            time.sleep(0.1)
        run.hosts["host"] = HOST
        own = ["--name=host", f"--state={run.folder / 'host'}", "--", *both]
        run.spawn("host", "host", found[0], *own, env=OWN_DEVICE)

    def _join(self, number: int, name: str, command: list[str], **how: Any) -> None:
        self.run.hosts[name] = number
        listen, http = f"{self.ground.address(number)}:29701", self.run.http(number)
        how |= {"env": OWN_DEVICE, "patience_s": WAIT_S}
        self.run.join(name, command=command, listen=listen, http=http, **how)

    def trains(self, more: int) -> None:
        """Wait until so many more rounds have the site's update in them."""
        before = self.run.master()["committed"]

        def done(status: Any) -> bool:
            head = next((m for m in status["members"] if m["name"] == "head"), None)
            ended = [r for r in status["past_rounds"] if r["outcome"] == "committed"]
            fresh = ended[-more:] if status["committed"] >= before + more else []
            peers = [{c["peer"] for c in each["contributors"]} for each in fresh]
            return head is not None and len(fresh) == more and all(head["peer"] in p for p in peers)

        self.run.until(done, f"{more} rounds with the site", WAIT_S)

    def device_bytes(self) -> int:
        """Return what the host's device has carried, both ways."""
        asked = self.ground.command(HOST, ["ip", "-j", "-s", "link", "show", "dev", DEVICE])
        (found,) = json.loads(subprocess.check_output(asked, text=True))
        return int(found["stats64"]["rx"]["bytes"] + found["stats64"]["tx"]["bytes"])

    def memory_bytes(self, name: str) -> int:
        """Return the daemon's memory, with its arenas."""
        return int(psutil.Process(self.run.nodes[name].process.pid).memory_info().rss)

    def kill_rank(self) -> None:
        daemon = psutil.Process(self.run.nodes["host"].process.pid)
        below = daemon.children(recursive=True)
        next(each for each in reversed(below) if str(SCRIPT) in each.cmdline()).kill()


def measured(mib: int, gbit: float, rounds: int, restarts: int) -> dict[str, Any]:
    """Return the figures of a run."""
    model_bytes = mib * 2**20
    with (
        Switch(4) as ground,
        tempfile.TemporaryDirectory(prefix="holdfast-bench-") as folder,
        LabRun(ground, Path(folder), []) as run,
    ):
        site = Site(run, ground, mib, gbit)
        site.trains(2)
        say("both hosts train")
        carried, first = site.device_bytes(), run.master()["committed"]
        site.trains(rounds)
        carried = site.device_bytes() - carried
        count = run.master()["committed"] - first
        moves = [(int(b), float(s)) for b, _, s in BOXES.findall(run.nodes["head"].log)]
        rates = [size / seconds for size, seconds in moves if size and seconds > 0.01]
        memory = {name: site.memory_bytes(name) for name in ("head", "host")}
        copied = run.peer("head")["state_received_bytes"]
        took_s = []
        for _ in range(restarts):
            began_s = time.monotonic()
            site.kill_rank()
            run.until(lambda s: not _trains(s), "the group has ended", WAIT_S)
            run.until(_trains, "the group is back", WAIT_S)
            took_s.append(time.monotonic() - began_s)
            site.trains(1)
        return {
            "model_bytes": model_bytes,
            "gbit": gbit,
            "rounds": count,
            "box_bytes_per_round": carried // count,
            "box_s": 2**30 / statistics.median(rates),  # for a box of 1 GiB
            "head_memory_times_model": memory["head"] / model_bytes,
            "host_memory_times_model": memory["host"] / model_bytes,
            "restart_s": statistics.median(took_s),
            "state_bytes_from_peers": run.peer("head")["state_received_bytes"] - copied,
        }


def _trains(status: Any) -> bool:
    head = next((m for m in status["members"] if m["name"] == "head"), None)
    return head is not None and bool(head["trainer"]) and head["in_sync"]


def hosts(mib: int = MIB, gbit: float = GBIT) -> Measured:
    """The section of RESULTS.md."""
    found = measured(mib, gbit, ROUNDS, RESTARTS)
    table = Table(
        f"A peer of two hosts, {mib} MiB of float32, {gbit:g} Gbit/s between them",
        [f"python -m benchmarks.hosts --mib {mib} --gbit {gbit:g}"],
        [
            *("boxes and messages a round, bytes", "1 GiB of boxes, s", "head's memory"),
            *("host's memory", "restart, s", "state from peers, bytes"),
        ],
        [
            [
                f"{found['box_bytes_per_round']:,}",
                f"{found['box_s']:.1f}",
                f"{found['head_memory_times_model']:.1f} models",
                f"{found['host_memory_times_model']:.1f} models",
                f"{found['restart_s']:.1f}",
                f"{found['state_bytes_from_peers']:,}",
            ]
        ],
        ["Memory is a daemon's, with its program; restarts are after SIGKILL of the host's rank."],
    )
    return [table], found


def main() -> int:
    parser = bench_parser("hosts", __doc__)
    parser.add_argument("--mib", type=int, default=MIB)
    parser.add_argument("--gbit", type=float, default=GBIT)
    options = parser.parse_args()
    tell(hosts(options.mib, options.gbit), options)
    return 0


if __name__ == "__main__":
    sys.exit(run_main("hosts", main))
