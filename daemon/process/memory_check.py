"""The check that the shared state fits into this machine's memory."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator, Sequence
from pathlib import Path

from ...membership.planning.predict import FETCHES_MAX
from ...protocol.arena import arena_bytes
from ...protocol.errors import UserError
from ...protocol.messages import FragmentSize
from .exit_codes import ExitCode

# Memory that the state must leave for the system, the training command and rounds. With less, the
# kernel begins to kill processes.
MEMORY_LEFT_BYTES = 2**30
CGROUPS = Path("/sys/fs/cgroup")


def machine_bytes() -> int:
    """Return the memory limit of this process: the machine's, its container's, or its unit's."""
    most = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for limit in limit_files():
        try:
            most = min(most, int(limit.read_text()))
        except (OSError, ValueError):  # no such limit, or "max"
            continue
    for kind in (resource.RLIMIT_AS, resource.RLIMIT_DATA):
        soft, _hard = resource.getrlimit(kind)
        most = most if soft == resource.RLIM_INFINITY else min(most, soft)
    return most


def limit_files() -> Iterator[Path]:
    """Yield the limit files of this process's control groups, up to the root; all limits apply."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:  # not on Linux
        return
    for line in lines:
        _number, controllers, path = line.split(":", 2)
        if controllers == "":  # version 2
            root, name = CGROUPS, "memory.max"
        elif "memory" in controllers.split(","):
            root, name = CGROUPS / "memory", "memory.limit_in_bytes"
        else:
            continue
        folder = root / path.lstrip("/")  # absent in a container, where the parents' limits apply
        yield from (
            each / name for each in (folder, *folder.parents) if root in (each, *each.parents)
        )


def state_bytes(sizes: Sequence[FragmentSize]) -> int:
    """Return the most bytes that a daemon holds, apart from rounds.

    These are the state, the arena that the trainer writes to, and the fragments that are being
    fetched, or kept unchanged while another peer copies them.
    """
    fragments = sorted(map(fragment_bytes, sizes))
    return sum(fragments) + arena_bytes(sizes) + sum(fragments[-FETCHES_MAX:])


def fragment_bytes(size: FragmentSize) -> int:
    return 4 * (size.value_count + size.momentum_count) + 8 * size.counter_count


def check_room(sizes: Sequence[FragmentSize], memory_bytes: int | None) -> None:
    """Raise UserError if a state of these sizes does not fit, before any of it is fetched."""
    needed = state_bytes(sizes)
    if memory_bytes is None or needed + MEMORY_LEFT_BYTES <= memory_bytes:
        return
    raise UserError(
        f"the run's state does not fit into this machine's memory: it takes {format_gib(needed)}"
        f" here, and of {format_gib(memory_bytes)} {format_gib(MEMORY_LEFT_BYTES)} must stay free",
        exit_code=ExitCode.MEMORY,
        hint="nothing was fetched; use a machine, or a container with a limit, of at least "
        + format_gib(needed + MEMORY_LEFT_BYTES),
    )


def format_gib(count: float) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 / 10 else f"{count / 2**20:.0f} MiB"
