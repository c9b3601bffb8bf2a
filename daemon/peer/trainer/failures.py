"""The cause of a training process's death, from its exit status and the kernel's counters."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from attrs import frozen

from ....protocol.messages import FailureKind

SHELL_SIGNAL = 128  # a shell's exit status for a command that a signal killed, plus its number
CGROUPS = Path("/sys/fs/cgroup")
STOPPED = "it was stopped"  # the reason of a command that was ended for good
OWN_CGROUPS = Path("/proc/self/cgroup")
# The last line of a traceback; torchrun may put the rank before it.
ERROR_LINE = re.compile(r"(\[rank\d+\]: *)?[\w.]+(?:Error|Exception|Refused|Gone): .")
# What torchrun says of ranks, and of being ended itself.
ENDED_BY_US = re.compile(r"ChildFailedError|SignalException")


@frozen
class Failure:
    """The failure of a process.

    Attributes:
      kind: its category, for counting.
      reason: a phrase: "was killed by SIGSEGV".
    """

    kind: FailureKind
    reason: str


def failure_of(status: int, *, kernel_killed: bool) -> Failure:
    """Return the failure for an exit status that is not 0.

    Args:
      status: as ``Popen.returncode``: negative for a signal.
      kernel_killed: the kernel killed a process of our control group because memory ran out.
    """
    number, through = -status, ""
    if SHELL_SIGNAL < status < SHELL_SIGNAL + 65:
        number, through = status - SHELL_SIGNAL, f" (exit status {status})"
    if number <= 0:
        return Failure(FailureKind.CRASH, f"ended with exit status {status}")
    name = next((s.name for s in signal.Signals if s == number), f"signal {number}")
    if number != signal.SIGKILL:
        return Failure(FailureKind.CRASH, f"was killed by {name}{through}")
    if kernel_killed:
        return Failure(FailureKind.MEMORY, f"was killed by the kernel: out of memory{through}")
    return Failure(FailureKind.CRASH, f"was killed by {name} (out of memory?){through}")


def memory_kills(own: Path = OWN_CGROUPS, root: Path = CGROUPS) -> int:
    """Return how often the kernel killed in our control group because memory ran out; 0 if unknown.

    The trainer is in the daemon's group. A group's count includes the groups below it.
    """
    kills = 0
    with suppress(OSError, ValueError):
        for line in own.read_text().splitlines():
            _number, controllers, path = line.split(":", 2)
            if not controllers:
                file = root / path.strip("/") / "memory.events"
            elif "memory" in controllers.split(","):
                file = root / "memory" / path.strip("/") / "memory.oom_control"
            else:
                continue
            with suppress(OSError, ValueError):
                words = dict(each.split()[:2] for each in file.read_text().splitlines())
                kills = max(kills, int(words.get("oom_kill", "0")))
    return kills


def last_error(lines: Iterable[str]) -> str:
    """Return the last error in a command's output; empty if there is none."""
    found = [line for line in lines if ERROR_LINE.match(line) and not ENDED_BY_US.search(line)]
    return found[-1] if found else ""
