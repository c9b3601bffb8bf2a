"""A terminal for tests: a pty, and what stands on its screen."""

from __future__ import annotations

import codecs
import fcntl
import os
import re
import select
import struct
import termios
import time
import tty
from collections.abc import Callable

PATIENCE_S = 120.0  # for what takes a moment, unless the machine is very busy
PART = re.compile(r"\x1b\[[0-9;]*[A-Za-z]|[\r\n\x08]|[^\x1b\r\n\x08]+|\x1b")
UNFINISHED = re.compile(r"\x1b(?:\[[0-9;]*)?$")
COLOURS = re.compile(r"\x1b\[[0-9;]*m")


class Terminal:
    """A pty of some width, and the lines that it would show; it never scrolls and never wraps.

    Attributes:
      end: the descriptor for the program whose terminal this is.
      written: all that came, as it came.
    """

    def __init__(self, columns: int = 100) -> None:
        self.columns = columns
        self._own, self.end = os.openpty()
        tty.setraw(self.end)
        fcntl.ioctl(self.end, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        self.written = ""
        self.lines = [""]
        self._row = self._column = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._cut = ""  # an escape sequence whose end has not come

    def close(self) -> None:
        os.close(self._own)
        os.close(self.end)

    def press(self, keys: bytes) -> None:
        os.write(self._own, keys)

    def read(self, wait_s: float = 0.05) -> bool:
        """Take what has come; return False if there was nothing."""
        ready, _, _ = select.select([self._own], [], [], wait_s)
        if not ready:
            return False
        text = self._decoder.decode(os.read(self._own, 65_536))
        self.written += text
        text = self._cut + text
        self._cut = found[0] if (found := UNFINISHED.search(text)) else ""
        for part in PART.findall(text.removesuffix(self._cut)):
            self._obey(part)
        return True

    def until(self, condition: Callable[[], object], what: str) -> None:
        """Read until the condition holds; the test fails if it never does."""
        until_s = time.monotonic() + PATIENCE_S
        while not condition():
            if not self.read() and time.monotonic() > until_s:
                shown = "\n".join(self.lines[-24:])
                raise AssertionError(f"never: {what}\n{shown}")

    def until_shown(self, text: str) -> None:
        self.until(lambda: any(text in line for line in self.lines), text)

    def _obey(self, part: str) -> None:
        if part == "\n":
            self._row += 1
            self._column = 0 if self.raw_newlines else self._column
            if self._row == len(self.lines):
                self.lines.append("")
        elif part == "\r":
            self._column = 0
        elif part == "\x1b[K":
            self.lines[self._row] = self.lines[self._row][: self._column]
        elif part == "\x1b[A":
            self._row -= 1
            assert self._row >= 0, "above the screen"
        elif not COLOURS.fullmatch(part):
            assert not part.startswith(("\x1b", "\x08")), f"an order: {part!r}"
            line = self.lines[self._row].ljust(self._column)
            after = self._column + len(part)
            self.lines[self._row] = line[: self._column] + part + line[after:]
            self._column = after
            assert len(self.lines[self._row]) <= max(self.columns, after)

    raw_newlines = True  # a line feed goes to the first column, as without a raw pty
