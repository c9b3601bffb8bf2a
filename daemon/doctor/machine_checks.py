"""Checks of this machine alone: software, memory, disk, system limits.

They leave nothing behind: files written to test the disk are removed.
"""

from __future__ import annotations

import errno
import fcntl
import importlib.metadata
import importlib.util
import os
import platform
import re
import stat
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from ... import __version__
from ...collectives.links.link_parts import LaneRules
from ...protocol.messages import VERSION_MAX, VERSION_MIN, CheckAnswer
from ..congestion import examine
from ..process.memory_check import MEMORY_LEFT_BYTES, format_gib, machine_bytes
from ..process.paths import CONTROL_FILE, LOCK_FILE, read_control
from ..process.this_machine import descriptor_limit
from .findings import Finding, fault, ok, skipped, warning

# A clock before the date of this code is certainly wrong.
EPOCH_S = 1_767_225_600.0  # 2026-01-01
DISK_TRIED_BYTES = 2**20  # written and synced as a test
DISK_LEFT_BYTES = 256 * 2**20  # in addition to the run's data: logs, keys, other programs
FILES_BESIDE_LINKS = 128  # HTTP, the journal's or the state's files, the trainer's socket
FILES_PER_LINK = 4  # the control stream, and descriptors that a lane holds twice
# Linux's default for sending: 336 Mbit/s per connection over 100 ms; a link opens several.
BUFFER_BYTES = 4 * 2**20
BUFFER_BYTES_WANTED = 16 * 2**20
PEERS_ASSUMED = 16  # without a master's answer
LANES_ASSUMED = 16
SYSCTL = Path("/proc/sys/net")


def check_versions() -> Iterator[Finding]:
    """Check Python, holdfast and torch's build, without importing torch."""
    python = platform.python_version()
    text = f"holdfast {__version__}, Python {python}, protocol {VERSION_MIN} to {VERSION_MAX}"
    yield ok("versions", text)
    yield _torch()


def _torch() -> Finding:
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        return warning(
            "torch",
            f"torch is not installed in {sys.prefix}",
            "install it there, or give `holdfast join` a Python with torch and holdfast: "
            "-- /path/to/python train.py",
        )
    version = importlib.metadata.version("torch")
    text = Path(found.origin).with_name("version.py").read_text(errors="replace")
    cuda = re.search(r"^cuda\b.*= *'([\d.]+)'", text, re.MULTILINE)
    if cuda is None and Path("/dev/nvidia0").exists():
        return warning(
            "torch",
            f"torch {version} is built without CUDA, and this machine has an NVIDIA GPU",
            "install the CUDA build: see https://pytorch.org/get-started/locally/",
        )
    return ok("torch", f"torch {version}" + (f", CUDA {cuda.group(1)}" if cuda else ", no CUDA"))


def check_clock_alone(other: str, missing: str) -> Finding:
    """Check this machine's clock alone; ``missing`` says why there is no ``other`` one."""
    now = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
    if time.time() < EPOCH_S:
        return fault(
            "clock",
            f"this machine's clock says {now}",
            "set the clock: `timedatectl set-ntp true`",
        )
    return ok("clock", f"{now}; not compared with the {other}'s: {missing}")


# ---------------------------------------------------------------- memory


def check_memory(needs: CheckAnswer | None) -> Finding:
    """Compare this process's memory with what the run's model needs, and a reserve."""
    most = machine_bytes()
    free = min(psutil.virtual_memory().available, most)
    reserve = format_gib(MEMORY_LEFT_BYTES)
    model_bytes = needs.memory_bytes if needs is not None else 0
    text = f"{format_gib(most)} for this process, {format_gib(free)} of it free"
    if model_bytes:
        text += (
            f"; the run's model needs {format_gib(model_bytes)} beside the script's own memory, and"
            f" {reserve} must stay free for the system"
        )
    if most < MEMORY_LEFT_BYTES + (model_bytes or MEMORY_LEFT_BYTES):
        return fault(
            "memory",
            text if model_bytes else f"{text}; {reserve} must stay free in addition to the model",
            "raise the container's or the service's limit (docker run --memory, MemoryMax=), "
            "`ulimit -v`, or use a machine with more",
        )
    if model_bytes and free < MEMORY_LEFT_BYTES + model_bytes:
        return warning("memory", text, "stop other programs before joining")
    return ok("memory", text)


# ---------------------------------------------------------------- disk and state


def check_state(state: Path, needs: CheckAnswer | None, *, shared: bool) -> Iterator[Finding]:
    """Check that the state folder (or that of all, if ``shared``) is private, writable and unused,
    and that its disk is a persistent one with room for checkpoints.
    """
    folder = _existing(state)
    exists = folder == state.absolute()
    if exists and not shared:
        yield from _check_unused(state)
        yield from _check_permissions(state)
    error = _fault_of_writing(folder)
    if error is not None and error.errno not in (errno.ENOSPC, errno.EDQUOT):
        yield fault(
            "state folder",
            f"nothing can be written in {folder}: {error.strerror}",
            "make it writable for this user, or choose another folder with --state DIR",
        )
        yield skipped("disk", f"nothing can be written in {folder}")
    else:
        yield ok("state folder", str(state) + ("" if exists else " (will be created)"))
        yield _check_disk(folder, needs, error)


def _fault_of_writing(folder: Path) -> OSError | None:
    """Write and sync a megabyte, and remove it; return the error, if there is one."""
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".doctor-") as probe:
            probe.write(bytes(DISK_TRIED_BYTES))
            probe.flush()
            os.fsync(probe.fileno())
    except OSError as error:
        return error
    return None


def _check_unused(state: Path) -> Iterator[Finding]:
    try:
        descriptor = os.open(state / LOCK_FILE, os.O_RDONLY)
    except OSError:
        return  # no daemon ever ran here
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        control = read_control(state / CONTROL_FILE)
        user = f"the {control.kind} with process id {control.pid}" if control else "another process"
        yield fault(
            "state folder",
            f"{state} is in use by {user}",
            "stop that process (`holdfast leave`), or choose another folder: --state DIR",
        )
    finally:
        os.close(descriptor)


def _check_permissions(state: Path) -> Iterator[Finding]:
    try:
        info = state.stat()
    except OSError as error:
        yield fault(
            "state folder", f"{state}: {error.strerror}", "choose another folder: --state DIR"
        )
        return
    if info.st_uid not in (os.geteuid(), 0):
        yield fault(
            "state folder",
            f"{state} belongs to user {info.st_uid}, but this is user {os.geteuid()}",
            f"run as that user, or `chown -R {os.geteuid()} {state}`",
        )
    if info.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        yield warning(
            "state folder",
            f"other users may enter {state}",
            f"`chmod 700 {state}`",
        )
    key = state / "identity.key"
    if key.exists() and key.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        yield fault(
            "state folder",
            f"other users may read {key}: a copy of it is this peer's identity",
            f"`chmod 600 {key}`",
        )


def _check_disk(folder: Path, needs: CheckAnswer | None, error: OSError | None) -> Finding:
    wanted = DISK_LEFT_BYTES
    if needs is not None:
        # The retained checkpoints, and one being written.
        wanted += (needs.checkpoint_count + 1) * needs.checkpoint_bytes
    disk = os.statvfs(folder)
    free = disk.f_bavail * disk.f_frsize
    text = f"{format_gib(free)} free in {folder}, {format_gib(wanted)} needed"
    fix = "free some space, or choose a folder on another disk with --state DIR"
    if free < wanted:
        return fault("disk", text, fix)
    if error is not None:
        return fault("disk", f"{text}, but a megabyte cannot be written: {error.strerror}", fix)
    if (kind := _file_system(folder)) in ("tmpfs", "ramfs"):
        return warning(
            "disk",
            f"{text}, in memory ({kind}): lost at the next reboot",
            "choose a folder on a disk with --state DIR, or accept the loss of checkpoints at a"
            " reboot",
        )
    return ok("disk", text)


def _existing(path: Path) -> Path:
    """Return the folder, or its nearest ancestor that exists."""
    path = path.absolute()
    while not path.is_dir() and path != path.parent:
        path = path.parent
    return path


def _file_system(folder: Path) -> str:
    """Return the type of the file system that holds a folder, or an empty string if unknown."""
    mounts = [
        each for each in psutil.disk_partitions(all=True) if folder.is_relative_to(each.mountpoint)
    ]
    # Of two mounts at one point the later one counts.
    return max(reversed(mounts), key=lambda each: len(each.mountpoint)).fstype if mounts else ""


# ---------------------------------------------------------------- limits of the system


def check_files(needs: CheckAnswer | None) -> Finding:
    """Check the limit of file descriptors, for links to every other peer."""
    peers = needs.member_count + 1 if needs is not None else PEERS_ASSUMED
    lanes = needs.lanes_max if needs is not None else LANES_ASSUMED
    wanted = FILES_BESIDE_LINKS + peers * (lanes + FILES_PER_LINK)
    most = descriptor_limit()
    text = f"{most} at most, {wanted} needed for links to {peers} peer{'s' if peers > 1 else ''}"
    if most >= wanted:
        return ok("open files", text)
    fix = (
        f"raise the hard limit: LimitNOFILE={wanted} in the service, or nofile in "
        "/etc/security/limits.conf"
    )
    # A link adds lanes only while they raise its rate; it cannot do without its first two.
    few = most < FILES_BESIDE_LINKS + peers * (2 + FILES_PER_LINK)
    return fault("open files", text, fix) if few else warning("open files", text, fix)


def check_buffers() -> Finding:
    """Check how far the kernel lets one connection's buffers grow."""
    sizes = {}
    for name in ("tcp_rmem", "tcp_wmem"):
        try:
            sizes[name] = int((SYSCTL / "ipv4" / name).read_text().split()[2])
        except (OSError, ValueError, IndexError):
            return skipped("TCP buffers", "this kernel does not publish the limits")
    least = min(sizes.values())
    text = ", ".join(f"{name} up to {size / 2**20:.1f} MiB" for name, size in sizes.items())
    if least >= BUFFER_BYTES:
        return ok("TCP buffers", text)
    wanted = " ".join(
        f"net.ipv4.{name}='4096 131072 {BUFFER_BYTES_WANTED}'"
        for name, size in sizes.items()
        if size < BUFFER_BYTES
    )
    return warning(
        "TCP buffers",
        f"{text}: one connection carries at most {8 * least / 0.1 / 1e6:.0f} Mbit/s over 100 ms; "
        "a link opens several",
        f"on a fast line, as root: `sysctl -w {wanted}` (and net.core.rmem_max, wmem_max as large)",
    )


def check_congestion() -> Finding:
    """Check which TCP congestion control this process's lanes get."""
    report = examine(LaneRules().congestion)
    if not report.used:
        return skipped("congestion", report.text)
    if report.fix:
        return warning("congestion", report.text, report.fix)
    return ok("congestion", report.text)
