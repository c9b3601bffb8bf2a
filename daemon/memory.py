"""Whether this machine's memory has room for the shared state."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from ..membership.syncing import FETCHES_MAX
from ..protocol.arena import arena_bytes
from ..protocol.errors import UserError
from ..protocol.messages import FragmentSize
from .exit_codes import ExitCode

# Of this machine's memory, what the state must leave to the system, the training command and rounds:
# with less, the kernel begins to kill.
MEMORY_LEFT_BYTES = 2**30
# The control group's limit: what a container may have.
LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def machine_bytes() -> int:
    """Memory that this process may have at the most: the machine's, or its container's."""
    most = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for limit in LIMITS:
        try:
            most = min(most, int(Path(limit).read_text()))
        except (OSError, ValueError):  # no such limit, or "max"
            continue
    return most


def state_bytes(sizes: Sequence[FragmentSize]) -> int:
    """What a daemon holds at the most, beside rounds.

    The state once, the arena in which the trainer posts, and the fragments that are on their way here,
    or kept as they were for somebody who copies them.
    """
    fragments = sorted(
        4 * (size.value_count + size.momentum_count) + 8 * size.counter_count for size in sizes
    )
    return sum(fragments) + arena_bytes(sizes) + sum(fragments[-FETCHES_MAX:])


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
