"""Hosts in network namespaces: making and removing them, and processes that run in them.

Namespaces are called ``holdfast-PID-NAME`` after the process that made them; those of dead
processes are removed when the next are made.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Self

from holdfast.protocol.errors import UserError

NAMESPACES = Path("/run/netns")
BRIDGE = "br0"
CLONE_NEWNET = 0x40000000
LIBC = ctypes.CDLL(None, use_errno=True)
END_S = 5.0  # for what still runs there to end before it is killed


class LabError(UserError):
    """There is no lab here; the text says what is missing."""


def missing_tool(*commands: str) -> str:
    """Which of these commands has to be installed first; empty if none."""
    for command in commands:
        if shutil.which(command) is None:
            return f"the command {command!r} is missing (`make packages`)"
    return ""


def why_none(try_more: Callable[[str], None] = lambda _namespace: None) -> str:
    """Why this machine allows no network namespaces; empty if it does.

    Args:
      try_more: gets a namespace of its own to try what else is needed; raises LabError.
    """
    if sys.platform != "linux":
        return "network namespaces are Linux's"
    if os.geteuid() != 0:
        return "only root may make network namespaces"
    name = f"holdfast-{os.getpid()}-try"
    try:
        ip("netns", "add", name)
        try:
            try_more(name)
        finally:
            ip("netns", "del", name)
    except LabError as error:
        return f"no network in namespaces ({error}; containers: --privileged)"
    return ""


def try_bridge(name: str) -> None:
    """Try in a namespace of its own what a switch needs; raises LabError."""
    ip("-n", name, "link", "add", BRIDGE, "type", "bridge")
    ip("-n", name, "link", "add", "port0", "type", "veth", "peer", "name", "port1")


class Namespaces:
    """Numbered hosts for as long as the ``with`` block lasts; what is in them is for subclasses.

    Attributes:
      names: of the namespaces.

    Raises:
      LabError: from ``with``: it cannot be made here.
    """

    def __init__(self) -> None:
        self.names: list[str] = []
        self._processes: list[subprocess.Popen[Any]] = []

    def __enter__(self) -> Self:
        if reason := self.why_not():
            raise LabError(reason)
        remove_leftovers()
        try:
            self._make()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._remove()

    def _bridge(self, namespace: str) -> None:
        """Make a switch in a namespace."""
        ip("-n", namespace, "link", "add", BRIDGE, "type", "bridge")
        ip("-n", namespace, "link", "set", BRIDGE, "up")

    def _cable(self, namespace: str, port: str, other: str, device: str) -> None:
        """From a port of a namespace's bridge to a device of another one."""
        ends = ("peer", "name", device, "netns", other)
        ip("-n", namespace, "link", "add", port, "type", "veth", *ends)
        ip("-n", namespace, "link", "set", port, "master", BRIDGE, "up")
        ip("-n", other, "link", "set", device, "up")

    def why_not(self) -> str:
        """Why this machine allows none; empty if it does."""
        raise NotImplementedError

    def _make(self) -> None:
        raise NotImplementedError

    def _add(self, name: str) -> str:
        """A new namespace; returns its whole name."""
        whole = f"holdfast-{os.getpid()}-{name}"
        ip("netns", "add", whole)
        self.names.append(whole)
        return whole

    def _end_processes(self) -> None:
        end_all([process for process in self._processes if process.poll() is None])
        self._processes = []

    def _remove(self) -> None:
        self._end_processes()
        for name in reversed(self.names):
            with contextlib.suppress(LabError):  # the others must go all the same
                ip("netns", "del", name)
        self.names = []

    # ------------------------------------------------------------ hosts

    def host(self, number: int) -> str:
        """The name of a host's namespace."""
        return self.names[number]

    def address(self, number: int) -> str:
        """The address that a host has itself."""
        raise NotImplementedError

    def command(self, number: int, argv: Sequence[str]) -> list[str]:
        """``argv`` as it must be started to run on a host."""
        return ["nsenter", f"--net={NAMESPACES / self.host(number)}", "--", *argv]

    def popen(self, number: int, argv: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """Start a process on a host; it is stopped at the latest when the block ends.

        Args:
          options: ``subprocess.Popen``'s.
        """
        process = subprocess.Popen(self.command(number, argv), **options)
        self._processes = [each for each in self._processes if each.poll() is None]
        self._processes.append(process)
        return process

    @contextlib.contextmanager
    def inside(self, number: int) -> Iterator[None]:
        """Let what this thread opens or starts in the block belong to a host's network.

        For a few sockets to what listens on the host's loopback; they stay there after the block.
        """
        with (
            open("/proc/thread-self/ns/net") as ours,
            open(NAMESPACES / self.host(number)) as its,
        ):
            _set_network(its.fileno())
            try:
                yield
            finally:
                _set_network(ours.fileno())


def _set_network(namespace: int) -> None:
    """Move this thread into a network namespace, given as an open file."""
    if LIBC.setns(namespace, CLONE_NEWNET) != 0:
        raise LabError(f"setns: {os.strerror(ctypes.get_errno())}")


def ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise LabError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")


def ended(process: subprocess.Popen[Any], seconds: float) -> bool:
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        return False
    return True


def end_all(processes: Sequence[subprocess.Popen[Any]]) -> None:
    for process in processes:
        process.terminate()
    deadline = time.monotonic() + END_S
    for process in processes:
        if not ended(process, max(0.0, deadline - time.monotonic())):
            process.kill()
            process.wait()


def remove_leftovers() -> None:
    """Remove the namespaces of labs whose process is gone (it was killed)."""
    for path in NAMESPACES.glob("holdfast-*-*"):
        pid = path.name.split("-")[1]
        if pid.isdigit() and not Path(f"/proc/{pid}").exists():
            with contextlib.suppress(LabError):  # another lab may be removing it, too
                ip("netns", "del", path.name)
