"""The newest lines of a daemon's notices and of its trainer's output, in memory."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Annotated, Literal

from attrs import frozen

from ...membership.shared.run_status import about
from .output_lines import PLAIN_CHARS_MAX, kept_line

LINES_KEPT_MAX = 1_000  # of both sources together; at most a few megabytes
TICK_S = 1e-6  # between two lines of one moment, so that no two have the same time

Source = Literal["trainer", "daemon"]


@frozen
class LogLine:
    """A line of a peer's log."""

    at: Annotated[float, about("Unix seconds; no two lines of a peer have the same.")]
    source: Source
    text: Annotated[str, about("Printable, without colours.")]


@frozen
class PeerLog:
    """The newest lines of a peer's log."""

    peer: Annotated[str, about("Its name.")]
    lines: Annotated[tuple[LogLine, ...], about("The oldest first.")]


class LogRing:
    """The newest ``LINES_KEPT_MAX`` lines. Threads may call every method.

    Lines are made printable when they are read: a script may print a great many that nobody reads.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._lines: deque[LogLine] = deque(maxlen=LINES_KEPT_MAX)  # as they were written
        self._lock = threading.Lock()
        self._last_at = 0.0

    def add(self, source: Source, texts: Sequence[str]) -> None:
        with self._lock:
            at = max(self._clock(), self._last_at + TICK_S)
            for number, text in enumerate(texts[-LINES_KEPT_MAX:]):
                self._last_at = at + number * TICK_S
                self._lines.append(LogLine(self._last_at, source, text[: PLAIN_CHARS_MAX + 1]))

    def tail(
        self, count: int, *, after: float = 0.0, source: Source | None = None
    ) -> list[LogLine]:
        """Return the newest lines later than ``after``, the oldest first, printable and cut."""
        with self._lock:
            found = [
                line
                for line in self._lines
                if line.at > after and (source is None or line.source == source)
            ]
        newest = found[max(0, len(found) - count) :]
        return [LogLine(line.at, line.source, kept_line(line.text)) for line in newest]


class RingHandler(logging.Handler):
    """Log records as a daemon's notices."""

    def __init__(self, ring: LogRing) -> None:
        super().__init__(logging.WARNING)
        self._ring = ring

    def emit(self, record: logging.LogRecord) -> None:
        self._ring.add("daemon", record.getMessage().splitlines())
