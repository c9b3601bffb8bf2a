"""What can be seen on this machine alone: programs, memory, disk, limits of the system.

Nothing is left behind: what is written to try the disk is removed again.
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

from ... import __version__
from ...protocol.messages import VERSION_MAX, VERSION_MIN, CheckAnswer
from ..memory_check import MEMORY_LEFT_BYTES, machine_bytes
from ..paths import CONTROL_FILE, LOCK_FILE, read_control
from ..this_machine import descriptor_limit
from .findings import Finding, fault, ok, skipped, warning

PYTHON_MIN = (3, 11)
# A clock before this text was written is wrong, whatever it says.
EPOCH_S = 1_767_225_600.0  # 2026-01-01
DISK_TRIED_BYTES = 2**20  # written and synced to see that the disk takes it
DISK_LEFT_BYTES = 256 * 2**20  # beside what the run writes: logs, keys, other programs
FILES_BESIDE_LINKS = (
    128  # descriptors: HTTP, the journal's or the state's files, the trainer's socket
)
FILES_PER_LINK = 4  # its control stream, and what a lane holds twice
# Linux's own for what is sent: 336 Mbit/s of one connection over 100 ms, and links open several.
BUFFER_BYTES = 4 * 2**20
BUFFER_BYTES_WANTED = 16 * 2**20
PEERS_ASSUMED = 16  # where no master says how many there are
LANES_ASSUMED = 16
SYSCTL = Path("/proc/sys/net")


def look_at_versions() -> Iterator[Finding]:
    """Python, holdfast, and torch as it was built; nothing of torch is imported."""
    python = platform.python_version()
    if sys.version_info < PYTHON_MIN:  # an installer would have refused; a copied folder does not
        yield fault("versions", f"Python {python}", "install Python 3.11 or newer")
    else:
        yield ok(
            "versions",
            f"holdfast {__version__}, Python {python}, protocol {VERSION_MIN} to {VERSION_MAX}",
        )
    yield _torch()


def _torch() -> Finding:
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        return warning(
            "torch",
            f"there is no torch in {sys.prefix}",
            "install it there, or give `holdfast join` the Python that has it and holdfast: "
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


def look_at_clock_alone() -> Finding:
    now = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
    if time.time() < EPOCH_S:
        return fault(
            "clock",
            f"this machine believes it is {now}",
            "set the clock: `timedatectl set-ntp true`",
        )
    return ok("clock", f"{now}; give an invite to compare it with the master's")


# ---------------------------------------------------------------- memory


def look_at_memory(needs: CheckAnswer | None) -> Finding:
    """What this process may have, beside what the run's state takes."""
    most = machine_bytes()
    free = _available_bytes()
    said = f"{_gib(most)} for this process, {_gib(min(free, most))} of it free"
    if needs is None or not needs.memory_bytes:
        if most < 2 * MEMORY_LEFT_BYTES:
            return fault(
                "memory",
                f"{_gib(most)} for this process; {_gib(MEMORY_LEFT_BYTES)} must stay free beside "
                "the state",
                "raise the container's or the service's limit (docker run --memory, MemoryMax=), "
                "`ulimit -v`, or use another machine",
            )
        return ok("memory", said)
    if most < needs.memory_bytes:
        return fault(
            "memory",
            f"{_gib(most)} for this process, and the run's state takes {_gib(needs.memory_bytes)}",
            "raise the container's or the service's limit (docker run --memory, MemoryMax=), "
            "`ulimit -v`, or use a machine with more",
        )
    if free < needs.memory_bytes:
        return warning(
            "memory",
            f"{said}; the run's state takes {_gib(needs.memory_bytes)}",
            "end other programs before you join",
        )
    return ok("memory", f"{said}; the run's state takes {_gib(needs.memory_bytes)}")


def _available_bytes() -> int:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return machine_bytes()


# ---------------------------------------------------------------- disk and state


def look_at_state(state: Path) -> Iterator[Finding]:
    """Whether the folder can be ours alone, and nobody uses it."""
    folder = _existing(state)
    if folder == state:
        yield from _others(state)
        yield from _permissions(state)
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".doctor-") as probe:
            probe.write(b"x")
            probe.flush()
    except OSError as error:
        if error.errno == errno.ENOSPC:
            return  # the disk's finding says so
        yield fault(
            "state folder",
            f"nothing can be written in {folder}: {error.strerror}",
            "make it writable for this user, or give another folder with --state DIR",
        )
        return
    yield ok("state folder", str(state) + ("" if folder == state else " (will be made)"))


def _others(state: Path) -> Iterator[Finding]:
    try:
        descriptor = os.open(state / LOCK_FILE, os.O_RDONLY)
    except OSError:
        return  # nobody ever ran here
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        control = read_control(state / CONTROL_FILE)
        who = f"the {control.kind} with process id {control.pid}" if control else "another process"
        yield fault(
            "state folder",
            f"{state} is in use by {who}",
            "stop that one (`holdfast leave`), or give this one a folder of its own: --state DIR",
        )
    finally:
        os.close(descriptor)


def _permissions(state: Path) -> Iterator[Finding]:
    try:
        info = state.stat()
    except OSError as error:
        yield fault("state folder", f"{state}: {error.strerror}", "give another one: --state DIR")
        return
    if info.st_uid not in (os.geteuid(), 0):
        yield fault(
            "state folder",
            f"{state} belongs to user {info.st_uid}, and this is user {os.geteuid()}",
            f"run as that user, or `chown -R {os.geteuid()} {state}`",
        )
    if info.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        yield warning(
            "state folder",
            f"others than its owner may enter {state}",
            f"`chmod 700 {state}`",
        )
    key = state / "identity.key"
    if key.exists() and key.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        yield fault(
            "state folder",
            f"others than its owner may read {key}: whoever has it is this peer",
            f"`chmod 600 {key}`",
        )


def look_at_disk(state: Path, needs: CheckAnswer | None) -> Finding:
    """Room for checkpoints and for what has come of a copy, on a disk that stays."""
    folder = _existing(state)
    wanted = DISK_LEFT_BYTES
    if needs is not None:
        # All that are kept, the one that is being written, and the blocks of a copy under way.
        wanted += (needs.checkpoint_count + 2) * needs.checkpoint_bytes
    disk = os.statvfs(folder)
    free = disk.f_bavail * disk.f_frsize
    said = f"{_gib(free)} free in {folder}, {_gib(wanted)} wanted"
    fix = "free some space, or give a folder on another disk with --state DIR"
    if free < wanted:
        return fault("disk", said, fix)
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".doctor-") as probe:
            probe.write(bytes(DISK_TRIED_BYTES))
            probe.flush()
            os.fsync(probe.fileno())
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EROFS, errno.EPERM):
            return skipped("disk", f"{said}; nothing can be written there")
        return fault("disk", f"{said}, but a megabyte cannot be written: {error.strerror}", fix)
    if (kind := _file_system(folder)) in ("tmpfs", "ramfs"):
        return warning(
            "disk",
            f"{said}, in memory ({kind}): gone with the next reboot",
            "give a folder on a disk with --state DIR, or live without checkpoints after a reboot",
        )
    return ok("disk", said)


def _existing(path: Path) -> Path:
    """The folder itself, or the nearest above it that is there."""
    path = path.absolute()
    while not path.is_dir() and path != path.parent:
        path = path.parent
    return path


def _file_system(folder: Path) -> str:
    """The kind of file system that a folder is on; empty: unknown."""
    best, kind = "", ""
    try:
        lines = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return ""
    for line in lines:
        before, _, after = line.partition(" - ")
        mount = before.split()[4].replace("\\040", " ")
        inside = mount == "/" or folder == Path(mount) or Path(mount) in folder.parents
        if inside and len(mount) >= len(best):
            best, kind = mount, after.split()[0]
    return kind


# ---------------------------------------------------------------- limits of the system


def look_at_files(needs: CheckAnswer | None) -> Finding:
    """Descriptors for all links: every peer speaks with every other one."""
    peers = needs.member_count + 1 if needs is not None else PEERS_ASSUMED
    lanes = needs.lanes_max if needs is not None else LANES_ASSUMED
    wanted = FILES_BESIDE_LINKS + peers * (lanes + FILES_PER_LINK)
    most = descriptor_limit()
    said = f"{most} at most, {wanted} wanted for links to {peers} peers"
    if most >= wanted:
        return ok("open files", said)
    fix = (
        f"raise the hard limit: LimitNOFILE={wanted} in the service, or nofile in "
        "/etc/security/limits.conf"
    )
    # Lanes are opened while they carry more; what a link begins with must be there.
    few = most < FILES_BESIDE_LINKS + peers * (2 + FILES_PER_LINK)
    return fault("open files", said, fix) if few else warning("open files", said, fix)


def look_at_buffers() -> Finding:
    """How far the kernel lets one connection's buffers grow."""
    sizes = {}
    for name in ("tcp_rmem", "tcp_wmem"):
        try:
            sizes[name] = int((SYSCTL / "ipv4" / name).read_text().split()[2])
        except (OSError, ValueError, IndexError):
            return skipped("TCP buffers", "this kernel does not say")
    least = min(sizes.values())
    said = ", ".join(f"{name} up to {size / 2**20:.1f} MiB" for name, size in sizes.items())
    if least >= BUFFER_BYTES:
        return ok("TCP buffers", said)
    wanted = " ".join(
        f"net.ipv4.{name}='4096 131072 {BUFFER_BYTES_WANTED}'"
        for name, size in sizes.items()
        if size < BUFFER_BYTES
    )
    return warning(
        "TCP buffers",
        f"{said}: one connection carries at most {8 * least / 0.1 / 1e6:.0f} Mbit/s over 100 ms; "
        "links open several",
        f"on a fast line, as root: `sysctl -w {wanted}` (and net.core.rmem_max, wmem_max as large)",
    )


def _gib(count: float) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 / 10 else f"{count / 2**20:.0f} MiB"
