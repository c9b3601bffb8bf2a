"""Untrusted text: the characters that a record may hold, and the escaping of all others.

A text from the network or from a file may hold escape sequences that a terminal obeys, line ends
that forge log lines, bidirectional controls that reverse the reading order, and zero-width
characters that nobody sees. ``printable`` keeps them out of messages. Texts that this process puts
into its own messages go through ``plain``, and all that is printed or logged through ``escaped``.

The set of characters is written out, not taken from ``unicodedata``: two Python versions that
disagree about a new character would refuse each other's messages.
"""

from __future__ import annotations

import codecs
import re

import attrs

TEXT_CHARS_MAX = 1_000  # reasons and addresses; longer ones are a bug or an attack

_UNPRINTABLE = re.compile(
    "["
    "\x00-\x1f\x7f-\x9f"  # controls: escape sequences, bells, line ends
    "\u2028\u2029"  # line ends that JSON and log shippers know
    "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # direction
    "\xad\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200d\u2060-\u2065"  # invisible
    "\u206a-\u206f\u3164\ufeff\uffa0\ufff0-\ufffb\U0001d173-\U0001d17a\U000e0000-\U000e0fff"
    "\ufffe\uffff\ud800-\udfff"  # not characters; surrogates come from file names
    "]"
)
_SPACES = re.compile(r"[\t\n\r]+")


def unprintable(text: str) -> str:
    """Return the name of the first character that must not be shown (``U+001B``), or ""."""
    if text.isascii() and text.isprintable():
        return ""
    found = _UNPRINTABLE.search(text)
    return "" if found is None else f"U+{ord(found[0]):04X}"


def printable(_instance: object, attribute: attrs.Attribute[str], value: str) -> None:
    """Validate a text field of a record: the one rule for every text in a message."""
    if fault := unprintable(value):
        raise ValueError(f"{attribute.name} has the character {fault}, which is not printable")


def escaped(text: str) -> str:
    r"""Escape the characters that must not be shown, line ends too, as Python does (``\x1b``)."""
    if text.isascii() and text.isprintable():
        return text
    return _UNPRINTABLE.sub(lambda found: found[0].encode("unicode_escape").decode("ascii"), text)


def escaped_lines(text: str) -> str:
    """Escape each line of a text as ``escaped`` does, and keep the line ends."""
    return "\n".join(map(escaped, text.split("\n")))


def plain(text: str, chars_max: int = TEXT_CHARS_MAX) -> str:
    """Make a text (an exception's, for example) fit a message: one line, escaped, cut to length."""
    return escaped(_SPACES.sub(" ", text))[:chars_max]


def decoded(data: bytes) -> str:
    """Return the text of a file from any system: UTF-8, or UTF-16 with a mark; lines end in LF.

    Raises:
      UnicodeDecodeError: it is neither.
    """
    wide = data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    return data.decode("utf-16" if wide else "utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")


def plural(count: int, thing: str) -> str:
    return f"{count:,} {thing}" + ("" if count == 1 else "s")


def format_duration(seconds: float) -> str:
    """Format a duration in its two largest units."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, s = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes} min {s} s" if s and minutes < 10 else f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {minutes} min" if minutes else f"{hours} h"
    days, hours = divmod(hours, 24)
    return f"{days} days {hours} h" if hours else f"{days} days"
