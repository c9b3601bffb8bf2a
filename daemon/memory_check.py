"""Whether this machine's memory has room for the shared state."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator, Sequence
from pathlib import Path

from .. import __version__
from ..membership.master.state.context import Context
from ..membership.master.sync.state_sync import FETCHES_MAX
from ..protocol.arena import arena_bytes
from ..protocol.errors import UserError
from ..protocol.messages import CheckAnswer, FragmentSize
from .exit_codes import ExitCode

# Of this machine's memory, what the state must leave to the system, the training command and rounds:
# with less, the kernel begins to kill.
MEMORY_LEFT_BYTES = 2**30
CGROUPS = Path("/sys/fs/cgroup")


def machine_bytes() -> int:
    """Memory that this process may have at the most: the machine's, its container's, its unit's."""
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
    """Where limits of our control groups are, from our own up to the root: all of them bind us."""
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
        folder = root / path.lstrip("/")  # not there in a container: then its parents count
        yield from (
            each / name for each in (folder, *folder.parents) if root in (each, *each.parents)
        )


def state_bytes(sizes: Sequence[FragmentSize]) -> int:
    """What a daemon holds at the most, beside rounds.

    The state once, the arena in which the trainer posts, and the fragments that are on their way here,
    or kept as they were for somebody who copies them.
    """
    fragments = sorted(
        4 * (size.value_count + size.momentum_count) + 8 * size.counter_count for size in sizes
    )
    return sum(fragments) + arena_bytes(sizes) + sum(fragments[-FETCHES_MAX:])


def needs_of(context: Context) -> CheckAnswer:
    """What a member of this run needs on its machine."""
    sizes, spec = context.history.sizes, context.spec
    plain_bytes = sum(
        4 * (size.value_count + size.momentum_count) + 8 * size.counter_count for size in sizes
    )
    return CheckAnswer(
        now_s=0.0,
        host="",
        faults=(),
        member_count=len(context.roster),
        lanes_max=spec.reduce.lanes_max,
        memory_bytes=state_bytes(sizes) + MEMORY_LEFT_BYTES if sizes else 0,
        checkpoint_bytes=plain_bytes,
        checkpoint_count=spec.checkpoint.keep_count,
        software=__version__,
    )


def check_room(sizes: Sequence[FragmentSize], memory_bytes: int | None) -> None:
    """Before anything is fetched: is there room for a state of these sizes?

    Args:
      memory_bytes: see ``machine_bytes``; None: whatever it takes.

    Raises:
      UserError: there is not.
    """
    needed = state_bytes(sizes)
    if memory_bytes is None or needed + MEMORY_LEFT_BYTES <= memory_bytes:
        return
    raise UserError(
        f"the run's state does not fit into this machine's memory: it takes {_said(needed)} here, "
        f"and of {_said(memory_bytes)} {_said(MEMORY_LEFT_BYTES)} must stay free",
        exit_code=ExitCode.MEMORY,
        hint="nothing was fetched; join from a machine, or with a container's limit, of at least "
        + _said(needed + MEMORY_LEFT_BYTES),
    )


def _said(count: int) -> str:
    return f"{count / 2**30:.1f} GiB"
