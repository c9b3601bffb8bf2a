"""Text from elsewhere: what may enter a record, and how anything is shown to people.

A text that came over a network or out of a file may hold what a terminal obeys (escape sequences),
what forges lines (line ends of every kind), what turns the reading order round (bidirectional
controls) and what nobody sees (zero-width characters). None of it enters a message: see ``printable``.
What this process says in a message of its own goes through ``plain``, and everything that is printed or
logged through ``escaped``.

The set is written out, not asked of ``unicodedata``: two Python versions that disagree about a new
character would refuse each other's messages.
"""

from __future__ import annotations

import re

import attrs

TEXT_CHARS_MAX = 1_000  # reasons and addresses; longer ones are a bug or an attack

_UNPRINTABLE = re.compile(
    "["
    "\x00-\x1f\x7f-\x9f"  # controls: escape sequences, bells, line ends
    "\u2028\u2029"  # line ends that JSON and log shippers know
    "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # direction
    "\xad\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200d\u2060-\u2065"  # not to be seen
    "\u206a-\u206f\u3164\ufeff\uffa0\ufff0-\ufffb\U0001d173-\U0001d17a\U000e0000-\U000e0fff"
    "\ufffe\uffff\ud800-\udfff"  # no characters; surrogates come from names of files
    "]"
)
_SPACES = re.compile(r"[\t\n\r]+")


def unprintable(text: str) -> str:
    """Name the first character that must not be shown as it is: ``U+001B``; empty if there is none."""
    if text.isascii() and text.isprintable():
        return ""
    found = _UNPRINTABLE.search(text)
    return "" if found is None else f"U+{ord(found[0]):04X}"


def printable(_instance: object, attribute: attrs.Attribute[str], value: str) -> None:
    """Validate a field of a record: the one rule for every text in a message."""
    if fault := unprintable(value):
        raise ValueError(f"{attribute.name} has the character {fault}, which is not printable")


def escaped(text: str) -> str:
    r"""Escape what must not be shown as it is, as Python would: ``\x1b``; one line stays one line."""
    if text.isascii() and text.isprintable():
        return text
    return _UNPRINTABLE.sub(lambda found: found[0].encode("unicode_escape").decode("ascii"), text)


def escaped_lines(text: str) -> str:
    """As ``escaped``, for what we have put on several lines ourselves."""
    return "\n".join(map(escaped, text.split("\n")))


def plain(text: str, chars_max: int = TEXT_CHARS_MAX) -> str:
    """Make a text of ours, an exception's for example, fit a message: one line, plain, cut."""
    return escaped(_SPACES.sub(" ", text))[:chars_max]
