"""A wide-area network on one machine: hosts with slow, long, lossy access links.

Every host is a network namespace with one TUN device; a small C program (``wan_hub.c``, compiled
on first use) carries the packets between them. Hosts are 198.18.0.1, 198.18.0.2, and so on, an
address range that is reserved for benchmarks; nothing leaves the machine. TCP is the kernel's own.

    with WanLab([Host(up_mbit=20, down_mbit=300, delay_ms=25), Host(delay_ms=25)]) as lab:
        lab.run(0, ["ping", "-c3", lab.address(1)])
        lab.set(1, loss=0.01)

A host's delay and loss count each way on its own link: a path from one host to another has the
delay of both, and its round trip twice that. Namespaces are called ``holdfast-PID-NUMBER`` after
the process that made them; those of dead processes are removed when the next lab starts.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import math
import os
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
from attrs import field, frozen
from attrs.validators import and_, ge, gt, le, optional

from benchmarks.namespaces import (
    NAMESPACES,
    LabError,
    Namespaces,
    end_all,
    ended,
    ip,
    missing_tool,
    why_none,
)

HUB_SOURCE = Path(__file__).with_name("wan_hub.c")
ALLOWED_CONGESTION = Path("/proc/sys/net/ipv4/tcp_allowed_congestion_control")
DEVICE = "wan0"
MTU = 1_500
HEADER_BYTES = 52  # of a packet: IPv4 and TCP with time stamps
HOSTS_MAX = 128
QUEUE_BYTES_MIN = 256 * 1024
# The hub reads a burst of a host later than the host sends it: the device must keep all of it.
DEVICE_QUEUE_PACKETS = 20_000


@frozen
class Host:
    """A machine at the end of an access link.

    Attributes:
      up_mbit: what it can send, 10^6 bits per second of IP packets; 0: no limit.
      down_mbit: what it can receive.
      delay_ms: between it and the middle of the network, one way.
      loss: chance that its link loses a packet, each way; 1.0 cuts it off.
      up_queue_bytes: what may wait to be sent; None: the bytes of one round trip to a host like
        this one, but at least 256 KiB.
      down_queue_bytes: what may wait to be received.
      congestion: the TCP congestion control of what it sends.
    """

    up_mbit: float = field(default=0.0, validator=ge(0))
    down_mbit: float = field(default=0.0, validator=ge(0))
    delay_ms: float = field(default=0.0, validator=and_(ge(0), le(60_000)))
    loss: float = field(default=0.0, validator=and_(ge(0), le(1)))
    up_queue_bytes: int | None = field(default=None, validator=optional(gt(0)))
    down_queue_bytes: int | None = field(default=None, validator=optional(gt(0)))
    congestion: str = "cubic"

    def _queue_bytes(self, mbit: float, given: int | None) -> int:
        round_trip_bytes = mbit * 1e6 / 8 * 4 * self.delay_ms / 1e3
        return given or max(QUEUE_BYTES_MIN, math.ceil(round_trip_bytes))

    def command(self, number: int) -> str:
        """What tells the hub about this host."""
        return (
            f"set {number} {self.up_mbit * 1e6:.0f} {self.down_mbit * 1e6:.0f} "
            f"{self.delay_ms * 1e6:.0f} {self.loss!r} "
            f"{self._queue_bytes(self.up_mbit, self.up_queue_bytes)} "
            f"{self._queue_bytes(self.down_mbit, self.down_queue_bytes)}"
        )


def why_not() -> str:
    """Why this machine allows no lab; empty if it does, or lacks a tool only."""
    if missing():
        return ""
    if not (reason := why_none()) and not Path("/dev/net/tun").exists():
        return "/dev/net/tun is missing (modprobe tun; containers: --device /dev/net/tun)"
    return reason


def missing() -> str:
    """Which command has to be installed first; empty if none."""
    return missing_tool("ip", "nsenter", "cc")


class WanLab(Namespaces):
    """Hosts and the network between them, for as long as the ``with`` block lasts.

    Args:
      hosts: at most 128.
      seed: of the losses.

    Raises:
      LabError: from ``with``: it cannot be made here.
    """

    bits_behind = 0  # of an address, for what is behind a host

    def __init__(self, hosts: Sequence[Host], *, seed: int = 0) -> None:
        if not 1 <= len(hosts) <= HOSTS_MAX:
            raise LabError(f"{len(hosts)} hosts")
        super().__init__()
        self.hosts = list(hosts)
        self._seed = seed
        self._hub: subprocess.Popen[str] | None = None

    # ------------------------------------------------------------ for users

    def why_not(self) -> str:
        return why_not() or missing()

    def address(self, number: int) -> str:
        """The host's IPv4 address."""
        return f"198.18.0.{number + 1}"

    def run(
        self, number: int, argv: Sequence[str], **options: Any
    ) -> subprocess.CompletedProcess[Any]:
        """Run a process on a host to its end; ``options`` are ``subprocess.run``'s."""
        return subprocess.run(self.command(number, argv), **options)

    def set(self, number: int, **changes: Any) -> None:
        """Change a host's link from now on: any attribute of ``Host`` but ``congestion``."""
        host = attrs.evolve(self.hosts[number], **changes)
        if self._ask(host.command(number)) != "ok":
            raise LabError(f"the hub does not understand {host.command(number)!r}")
        self.hosts[number] = host

    def stats(self) -> dict[str, Any]:
        """What the hub counted, per host and direction.

        ``late_ms_max`` says how far the hub itself was behind since the last call: as long as it is
        small next to the delays, the lab kept up. ``cpu_s`` is what the hub has used of a
        processor since it started.
        """
        answer: dict[str, Any] = json.loads(self._ask("stats"))
        return answer

    # ------------------------------------------------------------ making and removing

    def _make(self) -> None:
        hub = compiled_hub()
        for number in range(len(self.hosts)):
            self._add(str(number))
        # In a session of its own: Ctrl+C is for us to handle; the hub ends when its input does.
        self._hub = subprocess.Popen(
            [
                str(hub),
                str(self._seed),
                str(self.bits_behind),
                *(str(NAMESPACES / name) for name in self.names),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        if self._answer() != "ready":
            raise LabError("the hub did not start")
        for number, name in enumerate(self.names):
            inside = ("-n", name)
            ip(*inside, "link", "set", "lo", "up")
            ip(*inside, "addr", "add", f"{self.address(number)}/24", "dev", DEVICE)
            queue = ("txqueuelen", str(DEVICE_QUEUE_PACKETS))
            ip(*inside, "link", "set", DEVICE, "mtu", str(MTU), *queue, "up")
            self.set(number)
        self._choose_congestion()

    def _choose_congestion(self) -> None:
        """Other namespaces than the first may choose only what anybody may use: allow it
        meanwhile.
        """
        with alone():
            allowed = ALLOWED_CONGESTION.read_text()
            try:
                ALLOWED_CONGESTION.write_text(
                    " ".join({*allowed.split(), *(host.congestion for host in self.hosts)})
                )
                for number, host in enumerate(self.hosts):
                    script = 'echo "$1" > /proc/sys/net/ipv4/tcp_congestion_control'
                    self.run(number, ["sh", "-c", script, "sh", host.congestion], check=True)
            except (OSError, subprocess.CalledProcessError) as error:
                wanted = ", ".join(sorted({host.congestion for host in self.hosts}))
                raise LabError(f"cannot choose the congestion control {wanted}: {error}") from None
            finally:
                with contextlib.suppress(OSError):
                    ALLOWED_CONGESTION.write_text(allowed)

    def _remove(self) -> None:
        self._end_processes()
        hub = self._hub
        if hub is not None:
            assert hub.stdin is not None
            assert hub.stdout is not None
            with contextlib.suppress(OSError):
                hub.stdin.close()
            end_all([hub] if not ended(hub, 1.0) else [])
            hub.stdout.close()
        self._hub = None
        super()._remove()

    def _ask(self, command: str) -> str:
        assert self._hub is not None
        assert self._hub.stdin is not None
        try:
            self._hub.stdin.write(command + "\n")
            self._hub.stdin.flush()
        except OSError:
            raise LabError("the hub is gone") from None
        return self._answer()

    def _answer(self) -> str:
        assert self._hub is not None
        assert self._hub.stdout is not None
        return self._hub.stdout.readline().strip()


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """No other lab of this machine is in here: it would put back what this one has changed."""
    folder = os.open(NAMESPACES, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def compiled_hub() -> Path:
    """The hub's program, compiled if this source was not compiled before."""
    flags = ["-O2", "-std=gnu11"]
    source = HUB_SOURCE.read_bytes()
    version = hashlib.sha256(source + " ".join(flags).encode()).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "holdfast"
    program = cache / f"wan_hub-{version}"
    if program.exists():
        return program
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as directory:
        fresh = Path(directory) / "wan_hub"
        done = subprocess.run(
            ["cc", *flags, "-o", str(fresh), str(HUB_SOURCE)],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            raise LabError(f"cc cannot compile {HUB_SOURCE.name}:\n{done.stderr}")
        fresh.replace(program)
    return program
