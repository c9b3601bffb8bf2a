"""Ends a training command whose daemon was killed. A process of its own, started by this file's path.

    daemon --starts--> command, its children and theirs
       '---- pipe ---> watcher      a byte comes: the command is over, all is well
                                    the pipe ends without one: nobody looks after them any more

A trainer notices at its next step that its daemon is gone, its data loaders some seconds after that,
and all of them hold memory and a GPU that the next daemon's trainer needs. Whatever the command
started is found by its session and by the socket's path in its environment: torchrun gives each of
its ranks a session of its own.

It imports nothing of ours: it is there for as long as the command, and is to be small.
"""

import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import suppress

PASSES_MAX = 40  # over all processes; one that is killed takes a moment, and may be starting others
PAUSE_S = 0.05


def end(group: int, marker: bytes) -> None:
    """Kill a session's first group, and whatever has this entry in its environment."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)
    for _ in range(PASSES_MAX):
        found = list(marked(marker))
        if not found:
            return
        for pid in found:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(PAUSE_S)


def marked(marker: bytes) -> Iterator[int]:
    """Processes of ours that have it; none where there is no /proc."""
    with suppress(FileNotFoundError):
        for name in os.listdir("/proc"):
            if name.isdecimal() and int(name) != os.getpid():
                with suppress(OSError), open(f"/proc/{name}/environ", "rb") as file:
                    if marker in file.read().split(b"\0"):
                        yield int(name)


if __name__ == "__main__":
    if not os.read(0, 1):
        end(int(sys.argv[1]), os.fsencode(sys.argv[2]))
