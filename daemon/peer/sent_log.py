"""The part of a peer's log that it sends to its master when the run's operator asks for it."""

from __future__ import annotations

from ...protocol.messages import LOG_CHARS_MAX, LogRequest, LogTail, SentLine
from ..log_ring import LogRing

PRIVATE = "its owner keeps its log private (`holdfast join --private-log`)"


def answer_log(wanted: LogRequest, ring: LogRing | None) -> LogTail:
    """Return the newest lines that fit into one message.

    Args:
      ring: None: the machine's owner shows it to nobody else.
    """
    if ring is None:
        return LogTail(wanted.number, refusal=PRIVATE)
    sent: list[SentLine] = []
    left_chars = LOG_CHARS_MAX
    for line in reversed(ring.tail(wanted.lines, after=wanted.after)):
        left_chars -= len(line.text)
        if left_chars < 0:
            break
        sent.append(SentLine(line.at, line.source == "trainer", line.text))
    return LogTail(wanted.number, tuple(reversed(sent)))
