"""A daemon's standard output: notices, the trainer's output, and in a terminal a living line below
them.

    tell, output, show --> queue --> a thread --> the terminal, file or pipe

    epoch 3: loss 2.91                           lines, which scroll
     42%|████▏     | 210/500 [00:12<00:17]       the trainer's unfinished line
    round 12/20  loss 2.87  8,120 tokens/s       the living line

The event loop never waits for a terminal: a thread of its own writes. A trainer waits for a slow
reader as it would without a daemon between them, but not for a reader that takes nothing: after
``STUCK_S`` its lines are skipped and counted. Without a terminal there is no living line, and a
line appears when it is whole.
"""

from __future__ import annotations

import io
import logging
import os
import sys
import threading
import time
from collections import deque
from types import TracebackType
from typing import Any, Self

from rich.cells import cell_len, set_cell_size

from ...protocol.text import escaped
from .log_ring import LogRing, RingHandler
from .output_lines import kept_line, shown

REDRAW_S = 0.25  # between two redraws of the living line, at least
QUEUE_BYTES_MAX = 2**18  # of the trainer's output that wait to be written
PIECE_BYTES = 4_096  # written at a time: a slow reader is seen to read
STUCK_S = 1.0  # a reader that takes nothing for this long loses output
CLOSE_S = 5.0  # for the last lines, at the end
COLUMNS_DEFAULT = 80  # of a terminal that does not say its width

ERASE = "\r\x1b[K"  # the row of the cursor
ERASE_ABOVE = "\x1b[A\x1b[K"  # the row above, and go there


class Screen:
    """The standard output of ``join`` and ``master``. Threads may call every method.

    Args:
      out: file descriptor to write to; None: nothing is written.
      live: whether it is a terminal; None: look.
      quiet: write nothing, and log errors only.

    Attributes:
      ring: the newest lines, whether they are written or not.
      live: there is a living line.
    """

    def __init__(self, out: int | None, *, live: bool | None = None, quiet: bool = False) -> None:
        self.ring = LogRing()
        if live is None:  # a terminal that can erase a line
            live = out is not None and os.isatty(out) and os.environ.get("TERM") != "dumb"
        self.live = live and not quiet and out is not None
        self._quiet = quiet
        self._out = None if quiet else out
        self._changed = threading.Condition()  # holds the lock of all that follows
        self._blocks: deque[bytes] = deque()  # what scrolls
        self._waiting_bytes = 0
        self._written_bytes = 0
        self._skipped_lines = 0
        self._stuck = False
        self._rest = self._line = ""
        self._drawn: tuple[str, ...] = ()  # the rows below what scrolls
        self._closing = False
        self._thread: threading.Thread | None = None
        self._log_handler: logging.StreamHandler[Any] | None = None
        self._ring_handler = RingHandler(self.ring)

    # ------------------------------------------------------------ what is shown

    def tell(self, line: str) -> None:
        """Print a notice of the daemon; control characters are escaped, so it stays one line."""
        self.ring.add("daemon", [line])
        self.scroll(escaped(line) + "\n")

    def scroll(self, text: str) -> None:
        """Print lines above the living line, with their ends; they are not kept."""
        with self._changed:
            self._append(text)

    def output(self, lines: list[str], rest: str) -> None:
        """Print the trainer's lines, and in a terminal show the one that it has not ended yet.

        This waits while much output has not been written, but not for a reader that is stuck.
        """
        self.ring.add("trainer", lines)
        if self._out is None:
            return
        text = shown(lines, colours=self.live)
        with self._changed:
            self._rest = kept_line(rest) if self.live else ""
            while self._waiting_bytes > QUEUE_BYTES_MAX and not self._stuck:
                self._wait_for_reader()
            if self._stuck:
                self._skipped_lines += len(lines)
            else:
                self._append(text)

    def show(self, line: str) -> None:
        """Replace a terminal's living line; an empty one takes it away."""
        if self.live:
            with self._changed:
                self._line = escaped(line)
                self._changed.notify_all()

    def progress(self, line: str, *, due: bool) -> None:
        """Make this the living line; without a terminal print it with the time, if it is due."""
        if self.live:
            self.show(line)
        elif due:
            self.scroll(f"{time.strftime('%H:%M:%S')}  {escaped(line)}\n")

    def _append(self, text: str) -> None:
        if text and self._out is not None:
            block = text.encode("utf-8", "backslashreplace")
            self._blocks.append(block)
            self._waiting_bytes += len(block)
        self._changed.notify_all()

    def _wait_for_reader(self) -> None:
        before = self._written_bytes
        self._stuck = not self._changed.wait_for(lambda: self._written_bytes != before, STUCK_S)

    # ------------------------------------------------------------ beginning and end

    def __enter__(self) -> Self:
        """Begin to write, and take over the log's lines, which would tear the living line."""
        root = logging.getLogger()
        for handler in root.handlers:
            if type(handler) is logging.StreamHandler and self._quiet:
                handler.setLevel(logging.ERROR)
            elif type(handler) is logging.StreamHandler and self.live and sys.stderr.isatty():
                handler.setStream(_LogStream(self))
                self._log_handler = handler
        root.addHandler(self._ring_handler)
        if self._out is not None:
            self._thread = threading.Thread(target=self._write_all, name="screen", daemon=True)
            self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Write what waits, and leave the terminal without a living line."""
        logging.getLogger().removeHandler(self._ring_handler)
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(CLOSE_S)
        if self._log_handler is not None:
            self._log_handler.setStream(sys.stderr)

    # ------------------------------------------------------------ the thread

    def _write_all(self) -> None:
        drawn_s = -REDRAW_S
        while not self._closing or self._has_news():
            with self._changed:
                self._changed.wait_for(lambda: self._closing or self._has_news())
                early_s = drawn_s + REDRAW_S - time.monotonic()
                if early_s > 0:
                    self._changed.wait_for(lambda: self._closing or self._blocks, early_s)
                waited_bytes = self._waiting_bytes
                text = self._take()
            drawn_s = time.monotonic()
            try:
                self._write(text, waited_bytes)
            except OSError:  # nobody reads any more; the run goes on
                with self._changed:
                    self._out, self._stuck = None, True
                return

    def _has_news(self) -> bool:
        return bool(self._blocks) or bool(self._skipped_lines) or self._rows() != self._drawn

    def _rows(self) -> tuple[str, ...]:
        """Return the rows that belong below what scrolls now."""
        if not self.live or self._closing:
            return ()
        return tuple(row for row in (self._rest, self._line) if row)

    def _take(self) -> bytes:
        """Return what is to be written now: the queue, and the rows below it."""
        text = b"".join(self._blocks)
        self._blocks.clear()
        if skipped := self._skipped_lines:
            self._skipped_lines = 0
            text += f"[holdfast: skipped {skipped} lines of the trainer's output]\n".encode()
        if self._closing and self._rest:
            text += f"{self._rest}\n".encode("utf-8", "backslashreplace")
            self._rest = ""
        before, self._drawn = len(self._drawn), self._rows()
        erased = ERASE + ERASE_ABOVE * (before - 1) if before else ""
        rows = "\n".join(map(self._cut, self._drawn))
        return erased.encode() + text + rows.encode("utf-8", "backslashreplace")

    def _cut(self, row: str) -> str:
        """Cut a row to the terminal's width; a character in the last column would break it."""
        columns = COLUMNS_DEFAULT
        if self._out is not None and os.isatty(self._out):
            columns = os.get_terminal_size(self._out).columns or COLUMNS_DEFAULT
        most = max(1, columns - 1)
        return row if cell_len(row) <= most else set_cell_size(row, most - 1) + "…"

    def _write(self, text: bytes, waited_bytes: int) -> None:
        """Write it all; while that takes long, waiting bytes are counted off piece by piece."""
        assert self._out is not None
        left = memoryview(text)
        while left:
            count = os.write(self._out, left[:PIECE_BYTES])
            left = left[count:]
            with self._changed:
                self._written_bytes += count
                off = min(count, waited_bytes) if left else waited_bytes
                self._waiting_bytes -= off
                waited_bytes -= off
                self._stuck = False
                self._changed.notify_all()


class _LogStream(io.TextIOBase):
    """The stream of a log handler whose lines go to a screen."""

    def __init__(self, screen: Screen) -> None:
        self._screen = screen

    def write(self, text: str) -> int:
        self._screen.scroll(text)
        return len(text)
