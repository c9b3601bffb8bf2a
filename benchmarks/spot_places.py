"""Machines in three zones that are lost and come back, and the processes on them.

    place ---1 Gbit/s--- zone's switch and router ---100 Mbit/s, 7.5 ms--- hub of the WAN lab

Four places share their zone's line; a fourth zone has one host that is never lost, for what
coordinates. A machine's processes are forks of this process, which has imported torch: twelve
places on two cores cannot pay for imports as real machines do. A lost machine's processes are all
killed at once; their connections end at that moment, as those of a machine that is shut down.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
import torch.distributed.run
from torch.distributed.elastic.rendezvous import dynamic_rendezvous
from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

from benchmarks import spot_trainers
from benchmarks.namespaces import LIBC, NAMESPACES, ip, missing_tool
from benchmarks.report import BenchError
from benchmarks.wan_lab import DEVICE, Host, WanLab
from holdfast.daemon.cli.daemon_client import call
from holdfast.daemon.process.paths import CONTROL_FILE, read_control
from tests import fork_server

TRAINERS = spot_trainers.__file__

ZONES, NODES = 3, 4  # and of places in each zone
PLACES = ZONES * NODES
STANDING = PLACES  # the number of the host that is never lost
ZONE_LINE = Host(up_mbit=100, down_mbit=100, delay_ms=7.5)
PLACE_GBIT = 1
NEW_NAME_AND_MOUNTS = 0x04000000 | 0x00020000  # CLONE_NEWUTS, CLONE_NEWNS
MS_BIND, MS_PRIVATE = 0x1000, 0x40000 | 0x4000  # of all that is mounted below, too
OWN_DEVICE = "eth0"
END_S = 10.0


class Zones(WanLab):
    """The network: hosts 0 to 3 are the zones' routers, then come places and the standing host."""

    bits_behind = 8

    def __init__(self) -> None:
        super().__init__([ZONE_LINE] * (ZONES + 1))

    def why_not(self) -> str:
        return super().why_not() or missing_tool("tc")

    def address(self, number: int) -> str:
        if number <= ZONES:
            return f"198.18.{number + 1}.254"
        zone, node = divmod(number - ZONES - 1, NODES)
        return f"198.18.{zone + 1}.{node + 1}"

    def _make(self) -> None:
        super()._make()
        for zone in range(ZONES + 1):
            router, subnet = self.names[zone], f"198.18.{zone + 1}"
            self._bridge(router)
            self.run(zone, ["sysctl", "-qw", "net.ipv4.ip_forward=1"], check=True)
            ip("-n", router, "route", "del", f"{subnet}.0/24", "dev", DEVICE)
            ip("-n", router, "route", "add", "198.18.0.0/16", "dev", DEVICE)
            ip("-n", router, "addr", "add", f"{subnet}.253/24", "dev", "br0")
        for number in range(ZONES + 1, ZONES + 1 + PLACES + 1):
            zone, node = divmod(number - ZONES - 1, NODES)
            host = self._add(str(number))
            self._cable(self.names[zone], f"port{node}", host, OWN_DEVICE)
            ip("-n", host, "link", "set", "lo", "up")
            ip("-n", host, "addr", "add", f"{self.address(number)}/24", "dev", OWN_DEVICE)
            ip("-n", host, "route", "add", "default", "via", f"198.18.{zone + 1}.253")
            for where, device in ((host, OWN_DEVICE), (self.names[zone], f"port{node}")):
                shape = ["root", "tbf", "rate", f"{PLACE_GBIT}gbit", "burst", "2mb"]
                change = ["tc", "-n", where, "qdisc", "add", "dev", device, *shape]
                subprocess.run([*change, "limit", "8mb"], check=True)

    def carried(self) -> tuple[int, int, float]:
        """Return the bytes that hosts have sent, those of them between zones, and by how many
        milliseconds the hub was late at most since the last call.
        """
        total = 0
        for number in range(ZONES + 1, len(self.names)):
            asked = ["ip", "-n", self.names[number], "-j", "-s", "link", "show", OWN_DEVICE]
            (found,) = json.loads(subprocess.check_output(asked, text=True))
            total += int(found["stats64"]["tx"]["bytes"])
        hub = self.stats()
        between = sum(int(host["up"]["bytes"]) for host in hub["hosts"])
        return total, between, float(hub["late_ms_max"])


class Machines:
    """Processes on the places and on the standing host; all are killed when the block ends."""

    def __init__(self, zones: Zones, folder: Path) -> None:
        self.zones, self.folder = zones, folder
        names = (f"{self.address(place)} place{place}" for place in range(PLACES + 1))
        (folder / "hosts").write_text("\n".join(["127.0.0.1 localhost", *names, ""]))
        fork_server.become_subreaper()
        # For a line of its log each turn of a rendezvous looks through all modules that are loaded:
        # more than in torchrun's own process, and by twelve processes on two cores.
        dynamic_rendezvous.get_method_name = lambda depth=2: sys._getframe(depth).f_code.co_name
        with contextlib.suppress(ImportError):
            importlib.import_module("torchft.local_sgd")

    def __enter__(self) -> Machines:
        return self

    def __exit__(self, *_: object) -> None:
        for place in range(PLACES + 1):
            self.lose(place)
        time.sleep(0.5)
        self.reap()

    def address(self, place: int) -> str:
        return self.zones.address(ZONES + 1 + place)

    def start(self, place: int, name: str, arguments: Sequence[str], **variables: str) -> int:
        """Start ``python ARGUMENTS`` on a place as a fork of this process; return its id.

        Args:
          name: of its log and of the folder that it runs in.
          variables: of its environment, beside this process's.
        """
        work = self.folder / name
        work.mkdir(exist_ok=True)
        if pid := os.fork():
            return pid
        run: Callable[[], object] = lambda: os._exit(1)  # noqa: E731
        try:
            self._enter(place, work.with_suffix(".log"))
            if arguments[0] == torch.distributed.run.__file__:  # `join` does it by itself
                fork_server.serve_trainers()
                subprocess_handler.Popen = fork_server.ForkedPopen  # type: ignore[misc]
            request = {
                "arguments": list(arguments),
                "environment": {**os.environ, "GLOO_SOCKET_IFNAME": OWN_DEVICE, **variables},
                "folder": str(work),
            }
            run = fork_server.become(request)
            run()
        except SystemExit as stop:
            _leave(stop.code if isinstance(stop.code, int) else int(stop.code is not None))
        except BaseException:  # a fork must never go on as the benchmark
            import traceback

            traceback.print_exc()
            _leave(1)
        _leave(0)
        raise AssertionError

    def _enter(self, place: int, log: Path) -> None:
        os.setsid()
        with (NAMESPACES / self.zones.names[ZONES + 1 + place]).open() as namespace:
            done = [LIBC.setns(namespace.fileno(), 0), LIBC.unshare(NEW_NAME_AND_MOUNTS)]
        # Names that programs advertise and look up: nobody answers for them on this network.
        socket.sethostname(f"place{place}")
        hosts = str(self.folder / "hosts").encode()
        done.append(LIBC.mount(None, b"/", None, MS_PRIVATE, None))
        done.append(LIBC.mount(hosts, b"/etc/hosts", None, MS_BIND, None))
        if any(done):
            raise OSError(f"entering a namespace: {done}")
        with log.open("ab") as out, open(os.devnull) as nothing:
            os.dup2(nothing.fileno(), 0)
            os.dup2(out.fileno(), 1)
            os.dup2(out.fileno(), 2)
        os.closerange(3, fork_server.FILES_MAX)

    def lose(self, place: int) -> None:
        """Kill all that runs on a place, and wait until it is gone."""
        until_s = time.monotonic() + END_S
        while (found := self._processes(place)) and time.monotonic() < until_s:
            for pid in found:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self.reap()
            time.sleep(0.01)

    def _processes(self, place: int) -> list[int]:
        wanted = (NAMESPACES / self.zones.names[ZONES + 1 + place]).stat().st_ino
        found = []
        for entry in os.scandir("/proc"):
            with contextlib.suppress(OSError):  # it has just ended
                if entry.name.isdigit() and os.stat(f"/proc/{entry.name}/ns/net").st_ino == wanted:
                    found.append(int(entry.name))
        return found

    def reap(self) -> list[int]:
        """Take note of ended processes, also orphans, and return their ids."""
        ended = []
        with contextlib.suppress(ChildProcessError):
            while (pid := os.waitpid(-1, os.WNOHANG)[0]) != 0:
                ended.append(pid)
        return ended

    @staticmethod
    def processor_s() -> float:
        """Return the processor seconds of all that has ended and was reaped."""
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        return used.ru_utime + used.ru_stime


def _leave(code: int) -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(code)


# ---------------------------------------------------------------- the systems

RUN_TOML = """\
[run]
name = "spot"
rounds = 0
preset = "streaming"
[membership]
min_members = 1
"""
STORE_PORT, LIGHTHOUSE_PORT, MASTER_PORT = 29_400, 29_510, 29_700
# Options of the rendezvous that a user may set; with those that it has, a restart takes 30 s more.
RENDEZVOUS = "is_host=0,last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=3"


class System:
    """A system under the schedule: what runs on the standing host, and what on a place.

    Args:
      name: ``holdfast``, ``ddpN``, ``torchft-ddp`` or ``torchft-diloco``.
    """

    def __init__(self, name: str, machines: Machines, step_s: float) -> None:
        self.kind, every = (name[:3], name[3:]) if name.startswith("ddp") else (name, "20")
        self.machines, self._invite, self._lives = machines, "", 0
        self._common = [f"--folder={machines.folder}", f"--every={every}", f"--step-s={step_s}"]
        self._host = machines.address(STANDING)
        if self.kind == "holdfast":
            self._start_master()
        else:
            kind = "store" if self.kind == "ddp" else "lighthouse"
            machines.start(STANDING, kind, [TRAINERS, kind, f"--address={self._host}"])
            time.sleep(1.0)

    def _start_master(self) -> None:
        toml = self.machines.folder / "run.toml"
        toml.write_text(RUN_TOML)
        where = ["--listen", f"{self._host}:{MASTER_PORT}", "--http", "127.0.0.1:0"]
        state = ["--state", str(self.machines.folder / "master"), "--no-invite"]
        words = ["-m", "holdfast", "--log-level", "info", "master", str(toml), *where, *state]
        self.machines.start(STANDING, "master", words)
        body = {"role": "contributor", "uses": 1000, "hours": 24, "founder": True}
        until_s = time.monotonic() + END_S
        while read_control(self.machines.folder / "master" / CONTROL_FILE) is None:
            if time.monotonic() > until_s:
                raise BenchError("the master does not serve")
            time.sleep(0.1)
        self._invite = self.ask("invite", body)["invite"]

    def ask(self, what: str, body: dict[str, Any] | None = None) -> Any:
        address = read_control(self.machines.folder / "master" / CONTROL_FILE)
        assert address is not None
        with self.machines.zones.inside(ZONES + 1 + STANDING):
            return call(address, what, body, timeout_s=END_S)

    def start(self, place: int) -> None:
        """Start the system on an empty machine."""
        self._lives += 1
        name, address = f"{self.kind}-{place}-{self._lives}", self.machines.address(place)
        script = [TRAINERS, self.kind, *self._common, f"--place={place}", f"--address={address}"]
        if self.kind == "holdfast":
            state = ["--name", name, "--state", f"{self.machines.folder / name}"]
            where = ["--listen", f"{address}:29701", "--http", "127.0.0.1:0"]
            words = ["-m", "holdfast", "--log-level", "info", "join", self._invite, *state, *where]
            self.machines.start(place, name, [*words, "--", sys.executable, *script])
        elif self.kind == "ddp":
            words = ["--nnodes", f"1:{PLACES}", "--nproc-per-node", "1", "--max-restarts", "10000"]
            words += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{self._host}:{STORE_PORT}"]
            words += ["--rdzv-conf", RENDEZVOUS, "--rdzv-id", "spot", "--local-addr", address]
            words += ["--monitor-interval", "0.1", "--no-python", sys.executable, *script]
            self.machines.start(place, name, [torch.distributed.run.__file__, *words])
        else:
            lighthouse = f"http://{self._host}:{LIGHTHOUSE_PORT}"
            self.machines.start(place, name, script, TORCHFT_LIGHTHOUSE=lighthouse)

    def end(self) -> None:
        """Have the weights written, at the latest by the end of a round."""
        (self.machines.folder / spot_trainers.STOP).touch()
        if self.kind == "holdfast":
            self.ask("finish", {})
