"""A process that ends a training command whose daemon was killed; started by this file's path.

    daemon --starts--> command, its children and theirs
       '---- pipe ---> watcher      a byte comes: the command is over, all is well
                                    the pipe ends without one: the daemon was killed

A trainer notices at its next step that its daemon is gone, its data loaders some seconds later, and
all of them hold memory and a GPU that the next daemon's trainer needs. The command's processes are
found by their session and by the socket's path in their environment: torchrun gives each rank its
own session.

This file imports nothing of holdfast, so that the process, which lasts as long as the command,
stays small.
"""

import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import suppress

PASSES_MAX = 40  # over all processes; a killed one takes a moment to end and may start others
PAUSE_S = 0.05


def end(group: int, marker: bytes) -> None:
    """Kill a session's first process group and every process with this entry in its environment."""
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
    """Yield the ids of this user's processes with the entry; none where there is no /proc."""
    with suppress(FileNotFoundError):
        for name in os.listdir("/proc"):
            if name.isdecimal() and int(name) != os.getpid():
                with suppress(OSError), open(f"/proc/{name}/environ", "rb") as file:
                    if marker in file.read().split(b"\0"):
                        yield int(name)


if __name__ == "__main__":
    if not os.read(0, 1):
        end(int(sys.argv[1]), os.fsencode(sys.argv[2]))
