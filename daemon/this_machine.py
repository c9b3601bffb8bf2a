"""What this machine runs on, and how gently a process of ours asks for its time and its disk."""

from __future__ import annotations

import ctypes
import logging
import os
import platform
import resource
from pathlib import Path

log = logging.getLogger("holdfast.peer")

# File descriptors of a daemon: links to a thousand peers. Not more: programs that close all that there
# might be, before they start another one, are slow where there might be a million.
DESCRIPTORS_WANTED = 65_536

POWER = Path("/sys/class/power_supply")

# Linux's ioprio_set has no wrapper in C libraries; its number is the kernel's, by architecture.
IOPRIO_SET = {"x86_64": 251, "aarch64": 30, "riscv64": 30}
IOPRIO_WHO_PROCESS = 1
IO_CLASSES = {"low": (2, 7), "idle": (3, 0)}  # best effort at its lowest, or what nobody else wants
IO_CLASS_SHIFT = 13


def on_battery() -> bool:
    """Whether it runs on a battery now; a machine without one, or that does not say, does not."""
    discharging = False
    for supply in POWER.glob("*"):
        kind, online = _read(supply / "type"), _read(supply / "online")
        if kind in ("Mains", "USB") and online == "1":
            return False
        if kind == "Battery" and _read(supply / "scope") != "Device":  # else a mouse's
            discharging |= _read(supply / "status") == "Discharging"
    return discharging


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def be_nice(nice: int, io: str) -> None:
    """Of this process from now on, and of all that it starts. Call it before there are threads."""
    if nice:
        os.setpriority(os.PRIO_PROCESS, 0, nice)
    if io:
        number = IOPRIO_SET.get(platform.machine()) if platform.system() == "Linux" else None
        kind, level = IO_CLASSES[io]
        libc = ctypes.CDLL(None, use_errno=True)
        if number is None or libc.syscall(
            number, IOPRIO_WHO_PROCESS, 0, kind << IO_CLASS_SHIFT | level
        ):
            log.warning("this system knows no priorities for its disk: --ionice does nothing")


def descriptor_limit() -> int:
    """How many file descriptors a daemon of ours may have here, once it has raised its limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return DESCRIPTORS_WANTED
    most = DESCRIPTORS_WANTED if hard == resource.RLIM_INFINITY else hard
    return max(soft, min(most, DESCRIPTORS_WANTED))


def raise_descriptor_limit() -> None:
    """Of this process and all that it starts, as far as it may without asking anybody.

    Most systems begin with 1,024, for the sake of programs that wait with ``select``; ours do not.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < descriptor_limit():
        resource.setrlimit(resource.RLIMIT_NOFILE, (descriptor_limit(), hard))
