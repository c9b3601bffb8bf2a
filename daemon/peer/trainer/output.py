"""The output of a training command: a pipe, and a thread that reads it.

The thread reads whether or not the event loop is busy, so a trainer does not wait for its daemon to
print. Nobody waits for the thread: it ends with the pipe, which a process that the command left
running may hold open, and otherwise with the daemon.
"""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Callable
from contextlib import suppress

import trio

from ...process.output_lines import LineReader

READ_BYTES = 2**16  # at a time
# That a trainer may write while its daemon is stopped; where the kernel allows it.
PIPE_BYTES = 2**20
LAST_LINES_S = 1.0  # for what is in the pipe when the command has ended

Take = Callable[[list[str], str], None]


class OutputPipe:
    """The pipe that one process writes its output to.

    Args:
      take: called in the thread, with the lines that were completed and the one that was not yet.

    Attributes:
      write_end: for the process to be started; ``close`` it here then.
    """

    def __init__(self, take: Take) -> None:
        self._take = take
        self._read_end, self.write_end = os.pipe()
        with suppress(OSError, AttributeError):  # not Linux, or more than this user may have
            fcntl.fcntl(self._read_end, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        self._ended = trio.Event()
        self._loop = trio.lowlevel.current_trio_token()
        threading.Thread(target=self._read, name="trainer output", daemon=True).start()

    def close(self) -> None:
        """Close the end for writing; the processes that have it keep theirs."""
        os.close(self.write_end)

    async def last_lines(self) -> None:
        """Wait a moment until all that the process wrote was taken, also if cancelled."""
        with trio.move_on_after(LAST_LINES_S, shield=True):
            await self._ended.wait()

    def _read(self) -> None:
        reader = LineReader()
        with os.fdopen(self._read_end, "rb", buffering=0) as pipe:
            while data := pipe.read(READ_BYTES):
                self._take(reader.feed(data), reader.rest)
        self._take(reader.finish(), "")
        with suppress(trio.RunFinishedError):
            self._loop.run_sync_soon(self._ended.set)
