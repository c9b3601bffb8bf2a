"""A program's output as lines that are safe to show: what a terminal would leave of them, without
its orders.

    bytes --> LineReader --> lines as written --> shown        for a terminal: colours stay
                                              '-> plain_line   for logs, files and other machines

A program may write anything: halves of characters, binary data, escape sequences that clear the
screen or set the window's title. Of escape sequences only colours are kept, and these only for this
machine's own terminal. Sequences that move the cursor are dropped, and every other control
character is escaped. A carriage return begins the line again, as progress bars want it.
"""

from __future__ import annotations

import codecs
import re

from ...protocol.text import TEXT_CHARS_MAX, escaped

LINE_CHARS_MAX = 16_384  # of a line as written; a longer one goes on in the next line
PLAIN_CHARS_MAX = TEXT_CHARS_MAX  # of a line that is kept or sent; the rest is cut

_COLOUR = re.compile(r"(\x1b\[[0-9;:]*m)")
# Sequences as ECMA-48 has them: CSI, the strings (OSC, DCS, ...) up to their end, and the short
# ones.
_SEQUENCE = re.compile(
    r"\x1b(?:\[[0-?]*[ -/]*[@-~]|[\]PX^_][^\x07\x1b]*(?:\x07|\x1b\\)|[ -/]+[0-~]|[0-OQ-WYZ\\`-~])"
)
_UNFINISHED = re.compile(r"\x1b(?:\[[0-?]*[ -/]*)?$")
_COLOURS_END = "\x1b[0m"
_CUT = "…"


class LineReader:
    """Bytes of a program cut into lines; ``rest`` is the line that has no end yet."""

    def __init__(self) -> None:
        # A sequence of bytes that is no character becomes text like \xff.
        self._decoder = codecs.getincrementaldecoder("utf-8")("backslashreplace")
        self.rest = ""

    def feed(self, data: bytes) -> list[str]:
        """Return the lines that these bytes complete, as written but for their ends."""
        text = self.rest + self._decoder.decode(data)
        lines = text.split("\n")
        if "\r" in text:
            lines = [_last_overwritten(line) for line in lines]
        if len(text) > LINE_CHARS_MAX:
            lines = [
                line[at : at + LINE_CHARS_MAX]
                for line in lines
                for at in range(0, len(line) or 1, LINE_CHARS_MAX)
            ]
        self.rest = lines.pop()
        return lines

    def finish(self) -> list[str]:
        """Return the last line if it has no end."""
        rest = self.rest + self._decoder.decode(b"", final=True)
        self.rest = ""
        return [rest] if rest else []


def _last_overwritten(line: str) -> str:
    """Return what stands after the last carriage return that text follows."""
    if "\r" not in line:
        return line
    ended = line.endswith("\r")
    kept = line.rstrip("\r").rpartition("\r")[2]
    return kept + "\r" * ended  # what follows it may still overwrite this


def shown(lines: list[str], *, colours: bool) -> str:
    """Return lines as text for this machine's own terminal or log; colours end with the line."""
    text = "".join(f"{line}\n" for line in lines)
    if text.isascii() and text.replace("\n", "").isprintable():
        return text  # nearly all output, however much of it
    clean = _coloured if colours else plain_line
    return "".join(f"{clean(line)}\n" for line in lines)


def plain_line(line: str) -> str:
    """Return a line without colours, escaped; it may become longer than it was written."""
    if line.isascii() and line.isprintable():
        return line
    text = _UNFINISHED.sub("", _SEQUENCE.sub("", line.rstrip("\r")))
    return escaped(text.expandtabs().replace("\b", ""))


def kept_line(line: str) -> str:
    """Return a line as ``plain_line`` does, cut to ``PLAIN_CHARS_MAX`` characters."""
    plain = plain_line(line[: PLAIN_CHARS_MAX + 1])
    return plain if len(plain) <= PLAIN_CHARS_MAX else plain[: PLAIN_CHARS_MAX - 1] + _CUT


def _coloured(line: str) -> str:
    parts = _COLOUR.split(line)
    if len(parts) == 1:
        return plain_line(line)
    # Every second part is a colour.
    return "".join(p if at % 2 else plain_line(p) for at, p in enumerate(parts)) + _COLOURS_END
