"""Machines in three zones that are lost and come back, and how each system runs on them.

    place ---1 Gbit/s--- zone's switch and router ---100 Mbit/s, 7.5 ms--- hub of the WAN lab

The four places of a zone share its line; a fourth zone has one host that is never lost, for what
coordinates. All processes of all systems are forks of this one, which has imported torch: twelve
places on two cores cannot pay for imports as twelve machines do. What runs on a lost place is
killed at once, and its connections end then, as those of a machine do that is shut down.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler
from torch.distributed.elastic.rendezvous import dynamic_rendezvous

from benchmarks import spot_trainers
from benchmarks.namespaces import LIBC, NAMESPACES, ip, missing_tool
from benchmarks.report import BenchError
from benchmarks.spot import NODES, RUN_TOML, ZONES
from benchmarks.wan_lab import DEVICE, Host, WanLab
from holdfast.daemon.cli.daemon_client import call
from holdfast.daemon.process.paths import CONTROL_FILE, read_control
from tests import fork_server

PLACES = ZONES * NODES
STANDING = PLACES  # the host that is never lost
FIRST = ZONES + 1  # of the lab's hosts that is a place, behind the routers
ZONE_LINE = Host(up_mbit=100, down_mbit=100, delay_ms=7.5)
ETHERNET = "eth0"
SHAPE = ["root", "tbf", "rate", "1gbit", "burst", "2mb", "limit", "8mb"]
NEW_NAME_AND_MOUNTS = 0x04000000 | 0x00020000  # CLONE_NEWUTS, CLONE_NEWNS
BIND, PRIVATE = 0x1000, 0x40000 | 0x4000  # of mounts; private ones with all below
END_S = 10.0
MASTER_PORT = 29_700
MASTER = "master"
# Options that a user may give: with torchrun's own values a restart takes half a minute more, and a
# minute more if the place that assigns ranks is lost meanwhile.
# With torch 2.13's shared store a place that comes later waits for an address that nobody gives.
OWN_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
RENDEZVOUS = (
    "is_host=0,last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=3,read_timeout=10"
)


class Zones(WanLab):
    """The network: first the zones' routers, then the places and the host that is never lost."""

    bits_behind = 8

    def __init__(self) -> None:
        super().__init__([ZONE_LINE] * FIRST)

    def why_not(self) -> str:
        return super().why_not() or missing_tool("tc", "sysctl")

    def address(self, number: int) -> str:
        if number < FIRST:
            return f"198.18.{number + 1}.254"
        zone, node = divmod(number - FIRST, NODES)
        return f"198.18.{zone + 1}.{node + 1}"

    def _make(self) -> None:
        super()._make()
        for zone in range(FIRST):
            router, subnet = self.names[zone], f"198.18.{zone + 1}"
            self._bridge(router)
            self.run(zone, ["sysctl", "-qw", "net.ipv4.ip_forward=1"], check=True)
            ip("-n", router, "route", "del", f"{subnet}.0/24", "dev", DEVICE)
            ip("-n", router, "route", "add", "198.18.0.0/16", "dev", DEVICE)
            ip("-n", router, "addr", "add", f"{subnet}.253/24", "dev", "br0")
        for number in range(FIRST, FIRST + PLACES + 1):
            zone, node = divmod(number - FIRST, NODES)
            host, router, port = self._add(str(number)), self.names[zone], f"port{node}"
            self._cable(router, port, host, ETHERNET)
            ip("-n", host, "link", "set", "lo", "up")
            ip("-n", host, "addr", "add", f"{self.address(number)}/24", "dev", ETHERNET)
            ip("-n", host, "route", "add", "default", "via", f"198.18.{zone + 1}.253")
            for where, device in ((host, ETHERNET), (router, port)):
                subprocess.run(
                    ["tc", "-n", where, "qdisc", "add", "dev", device, *SHAPE], check=True
                )

    def carried(self) -> tuple[int, int, float]:
        """Return the bytes that hosts have sent, those of them between zones, and by how many
        milliseconds the hub was late at most since the last call.
        """
        total = 0
        for name in self.names[FIRST:]:
            asked = ["ip", "-n", name, "-j", "-s", "link", "show", ETHERNET]
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
        for late in ("torch._dynamo", "torchft.local_sgd"):  # imported later by what is forked
            with contextlib.suppress(ImportError):
                importlib.import_module(late)

    def __enter__(self) -> Machines:
        return self

    def __exit__(self, *_: object) -> None:
        stops = (signal.SIGINT, signal.SIGTERM)  # a second one must not leave processes behind
        before = [signal.signal(number, signal.SIG_IGN) for number in stops]
        for place in range(PLACES + 1):
            self.lose(place)
        time.sleep(0.5)  # what was orphaned becomes a child of this process
        self.reap()
        for number, handler in zip(stops, before, strict=True):
            signal.signal(number, handler)

    def address(self, place: int) -> str:
        return self.zones.address(FIRST + place)

    def _namespace(self, place: int) -> Path:
        return NAMESPACES / self.zones.names[FIRST + place]

    def start(self, place: int, name: str, arguments: Sequence[str], **variables: str) -> int:
        """Start ``python ARGUMENTS`` on a place, as a fork of this process; return its id.

        Args:
          name: of its log and of the folder that it runs in.
          variables: of its environment, beside this process's.
        """
        (self.folder / name).mkdir(exist_ok=True)
        if pid := os.fork():
            return pid
        code: object = 1
        try:
            self._enter(place, self.folder / f"{name}.log")
            if arguments[0] == torchrun.__file__:  # `join` does the same by itself
                fork_server.serve_trainers()
                vars(subprocess_handler)["Popen"] = fork_server.ForkedPopen
            request = {
                "arguments": list(arguments),
                "environment": {**os.environ, "GLOO_SOCKET_IFNAME": ETHERNET, **variables},
                "folder": str(self.folder / name),
            }
            fork_server.become(request)()
            code = 0
        except SystemExit as end:
            code = end.code or 0
        except BaseException:  # noqa: BLE001 - a fork must never go on as the benchmark
            traceback.print_exc()
        sys.stdout.flush()
        os._exit(code if isinstance(code, int) else 1)

    def _enter(self, place: int, log: Path) -> None:
        """Make this process one of a place, with its network, its name and its log."""
        os.setsid()
        with self._namespace(place).open() as namespace:
            done = [LIBC.setns(namespace.fileno(), 0), LIBC.unshare(NEW_NAME_AND_MOUNTS)]
        # What programs advertise and look up: nobody else answers for names on this network.
        socket.sethostname(f"place{place}")
        hosts = str(self.folder / "hosts").encode()
        done.append(LIBC.mount(None, b"/", None, PRIVATE, None))
        done.append(LIBC.mount(hosts, b"/etc/hosts", None, BIND, None))
        if any(done):
            raise OSError(f"entering a place: {done}")
        with log.open("ab") as out, open(os.devnull) as nothing:
            for number, file in enumerate((nothing, out, out)):
                os.dup2(file.fileno(), number)
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
        wanted, found = self._namespace(place).stat().st_ino, []
        for pid in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError):  # it has just ended
                if os.stat(f"/proc/{pid}/ns/net").st_ino == wanted:
                    found.append(int(pid))
        return found

    def reap(self) -> list[int]:
        """Return which processes have ended, also orphans: their processor time counts then."""
        ended = []
        with contextlib.suppress(ChildProcessError):
            while pid := os.waitpid(-1, os.WNOHANG)[0]:
                ended.append(pid)
        return ended

    @staticmethod
    def processor_s() -> float:
        """Return the processor seconds of all processes that have ended."""
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        return used.ru_utime + used.ru_stime


class System:
    """A system: what runs on the standing host, and what on each place.

    Args:
      name: ``holdfast``, ``torchft-ddp``, ``torchft-diloco``, or ``ddp10`` for DDP with a
        checkpoint every 10 steps.
    """

    def __init__(self, name: str, machines: Machines, step_s: float) -> None:
        self.kind, every = (name[:3], name[3:]) if name.startswith("ddp") else (name, "20")
        self._machines, self._invite, self._names = machines, "", itertools.count(1)
        self._running: dict[int, tuple[str, int]] = {}  # by place, its name and its process
        self._job = 0  # torchrun's, and how often it was started again
        self.restarts = 0
        self._options = [f"--folder={machines.folder}", f"--every={every}", f"--step-s={step_s}"]
        self._host = machines.address(STANDING)
        if self.kind == "holdfast":
            self._start_master()
        else:
            server = "store" if self.kind == "ddp" else "lighthouse"
            script = [spot_trainers.__file__, server, f"--address={self._host}"]
            machines.start(STANDING, server, script)
            time.sleep(1.0)

    def _holdfast(self, place: int, name: str, *words: str) -> int:
        state = ["--state", str(self._machines.folder / name), "--http", "127.0.0.1:0"]
        return self._machines.start(place, name, ["-m", "holdfast", words[0], *state, *words[1:]])

    def _start_master(self) -> None:
        toml = self._machines.folder / "run.toml"
        toml.write_text(RUN_TOML)
        listen = ["--listen", f"{self._host}:{MASTER_PORT}", "--no-invite"]
        self._holdfast(STANDING, MASTER, "master", *listen, str(toml))
        until_s = time.monotonic() + END_S
        while read_control(self._machines.folder / MASTER / CONTROL_FILE) is None:
            if time.monotonic() > until_s:
                raise BenchError("the master does not serve")
            time.sleep(0.1)
        body = {"role": "contributor", "uses": 1_000, "hours": 24, "founder": True}
        self._invite = self._ask("invite", body)["invite"]

    def _ask(self, what: str, body: dict[str, Any]) -> Any:
        address = read_control(self._machines.folder / MASTER / CONTROL_FILE)
        if address is None:
            raise BenchError("the master has ended")
        with self._machines.zones.inside(FIRST + STANDING):
            return call(address, what, body, timeout_s=END_S)

    def come(self, place: int) -> None:
        """Start the system on an empty machine."""
        self._start(place, f"{self.kind}-{place}-{next(self._names)}")

    def lose(self, place: int) -> None:
        del self._running[place]
        self._machines.lose(place)

    def watch(self) -> None:
        """Start again what has ended by itself, as systemd would; with torchrun the whole job: an
        agent that fails closes the rendezvous for all.
        """
        ended = self._machines.reap()
        failed = [place for place, (_name, pid) in self._running.items() if pid in ended]
        if failed and self.kind == "ddp":
            failed = list(self._running)
            for place in failed:
                self._machines.lose(place)
            self._job += 1
        self.restarts += bool(failed)
        for place in failed:
            self._start(place, self._running[place][0])

    def _start(self, place: int, name: str) -> None:
        address = self._machines.address(place)
        own = [f"--place={place}", f"--address={address}"]
        script = [spot_trainers.__file__, self.kind, *self._options, *own]
        if self.kind == "holdfast":
            where = ["--name", name, "--listen", f"{address}:{MASTER_PORT + 1}"]
            train = ["--", sys.executable, *script]
            pid = self._holdfast(place, name, "join", *where, self._invite, *train)
        elif self.kind == "ddp":
            words = ["--nnodes", f"1:{PLACES}", "--nproc-per-node", "1", "--max-restarts", "10000"]
            meet = f"{self._host}:{spot_trainers.STORE_PORT}"
            words += ["--rdzv-backend", "c10d", "--rdzv-id", f"spot{self._job}"]
            words += ["--rdzv-endpoint", meet]
            words += ["--rdzv-conf", RENDEZVOUS, "--local-addr", address]
            words += ["--monitor-interval", "0.1", "--no-python", sys.executable, *script]
            pid = self._machines.start(place, name, [torchrun.__file__, *words], **OWN_STORE)
        else:
            lighthouse = f"http://{self._host}:{spot_trainers.LIGHTHOUSE_PORT}"
            pid = self._machines.start(place, name, script, TORCHFT_LIGHTHOUSE=lighthouse)
        self._running[place] = name, pid

    def end(self) -> None:
        """Have the weights written, with holdfast at the end of a round."""
        (self._machines.folder / spot_trainers.STOP).touch()
        if self.kind == "holdfast":
            self._ask("finish", {})
