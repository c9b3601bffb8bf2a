"""The newest lines of a daemon's notices and of its trainer's output, in memory."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Annotated, Literal

from attrs import frozen

from ..membership.master.status.records import about
from .output_lines import kept_line

LINES_KEPT_MAX = 1_000  # of both sources together; at most a few megabytes
TICK_S = 1e-6  # between two lines of one moment, so that no two have the same time

Source = Literal["trainer", "daemon"]


@frozen
class LogLine:
    """A line of a peer's log."""

    at: Annotated[float, about("Unix seconds; no two lines of a peer have the same.")]
    source: Source
    text: Annotated[str, about("Printable, without colours.")]


class LogRing:
    """The newest ``LINES_KEPT_MAX`` lines. Threads may call every method."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._lines: deque[LogLine] = deque(maxlen=LINES_KEPT_MAX)
        self._lock = threading.Lock()
        self._last_at = 0.0

    def add(self, source: Source, texts: Iterable[str]) -> None:
        """Add lines as they were written; they are made printable and cut to length."""
        newest = deque(texts, maxlen=LINES_KEPT_MAX)
        with self._lock:
            for text in newest:
                self._last_at = max(self._clock(), self._last_at + TICK_S)
                self._lines.append(LogLine(self._last_at, source, kept_line(text)))

    def tail(
        self, count: int, *, after: float = 0.0, source: Source | None = None
    ) -> list[LogLine]:
        """Return the newest lines, the oldest of them first.

        Args:
          after: unix seconds; only lines that came later.
          source: only lines of this source.
        """
        with self._lock:
            found = [
                line
                for line in self._lines
                if line.at > after and (source is None or line.source == source)
            ]
        return found[max(0, len(found) - count) :]


class RingHandler(logging.Handler):
    """Log records as a daemon's notices."""

    def __init__(self, ring: LogRing) -> None:
        super().__init__(logging.WARNING)
        self._ring = ring

    def emit(self, record: logging.LogRecord) -> None:
        self._ring.add("daemon", record.getMessage().splitlines())
