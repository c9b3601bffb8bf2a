"""Where a run's processes live: hosts with addresses, made of loopback or of network namespaces.

    Loopback    every host is an address of 127.77.0.0/24; nobody can be cut off from anybody
    Switch      every host is a namespace with one Ethernet to a switch (a bridge, also in a
                namespace of its own); root only; hosts can be cut off from each other, one way too

A cut changes no route and closes no connection: in the sender's table of neighbours the other one
gets an Ethernet address that nobody has, so packets leave and silently arrive nowhere, as when a
cable is pulled two houses away. ``WanLab`` is the third ground, for lines with delay, rate and
loss.
"""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Sequence
from typing import Any

from benchmarks.namespaces import LabError, Namespaces, ip, missing_tool, try_bridge, why_none

NOBODY = "02:00:00:00:00:01"  # a locally administered address that no host has
DEVICE = "eth0"
SWITCH_HOSTS_MAX = 128


class Loopback:
    """Hosts that are only addresses of this machine."""

    def __enter__(self) -> Loopback:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def address(self, number: int) -> str:
        return f"127.77.0.{number + 1}"

    def command(self, number: int, argv: Sequence[str]) -> list[str]:
        return list(argv)

    def popen(self, number: int, argv: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        return subprocess.Popen(argv, **options)

    def inside(self, number: int) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


class Switch(Namespaces):
    """Hosts in namespaces on one switch, for as long as the ``with`` block lasts.

    Args:
      count: of the hosts.

    Raises:
      LabError: from ``with``: it cannot be made here.
    """

    def __init__(self, count: int) -> None:
        if not 1 <= count <= SWITCH_HOSTS_MAX:
            raise ValueError(f"from 1 to {SWITCH_HOSTS_MAX} hosts")
        super().__init__()
        self._count = count

    def why_not(self) -> str:
        return why_no_switch()

    def _make(self) -> None:
        switch = self._add("switch")
        self._bridge(switch)
        for number in range(self._count):
            host = self._add(str(number))
            self._cable(switch, f"port{number}", host, DEVICE)
            ip("-n", host, "link", "set", "lo", "up")
            ip("-n", host, "addr", "add", f"{self.address(number)}/24", "dev", DEVICE)

    def address(self, number: int) -> str:
        return f"198.18.1.{number + 1}"

    # ------------------------------------------------------------ cuts

    def cut(self, source: int, target: int) -> None:
        """Let nothing of ``source`` reach ``target``; the other direction goes on."""
        where = ("-n", self.host(source))
        to = ("to", self.address(target), "dev", DEVICE)
        ip(*where, "neigh", "replace", *to, "lladdr", NOBODY, "nud", "permanent")

    def heal(self, source: int, target: int) -> None:
        """End a ``cut``; harmless where there is none."""
        where = ("-n", self.host(source))
        with contextlib.suppress(LabError):  # there was none
            ip(*where, "neigh", "del", "to", self.address(target), "dev", DEVICE)

    def host(self, number: int) -> str:
        return self.names[1 + number]


Ground = Loopback | Namespaces  # the place where a run's processes are started


def why_no_switch() -> str:
    """Why this machine allows no ``Switch``; empty if it does."""
    return missing_tool("ip", "nsenter") or why_none(try_bridge)
