"""The run's events as lines of JSON in a file, for ``tail -f``, jq or a log shipper.

One event a line, in the order in which they happened: ``at`` (unix seconds), ``kind``, ``peer``,
``name``, ``text``. A file that has grown to ``LOG_BYTES_MAX`` becomes ``events.jsonl.1``.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from logging.handlers import RotatingFileHandler
from pathlib import Path

from ...protocol.text import escaped
from ..metrics_store import PastEvent

log = logging.getLogger("holdfast.master")

EVENT_LOG_FILE = "events.jsonl"
LOG_BYTES_MAX = 16 * 2**20  # of one file
LOG_FILES_KEPT = 4  # full files


class EventLog:
    """Append events; this may wait for the disk. A failure drops them with a warning."""

    def __init__(self, path: Path, warn: Callable[[str], None] = log.warning) -> None:
        self._path = path
        self._warn = warn
        self._failing = False
        self._file = _File(
            path, maxBytes=LOG_BYTES_MAX, backupCount=LOG_FILES_KEPT, encoding="utf-8", delay=True
        )

    def write(self, events: Sequence[PastEvent]) -> None:
        try:
            for event in events:
                self._file.emit(logging.makeLogRecord({"msg": line_of(event)}))
        except OSError as error:
            if not self._failing:
                self._warn(f"events are not logged: {self._path}: {error.strerror or error}")
            self._failing = True
        else:
            self._failing = self._failing and not events

    def close(self) -> None:
        self._file.close()


class _File(RotatingFileHandler):
    def handleError(self, record: logging.LogRecord) -> None:
        # The logging module calls this inside its exception handler.
        raise  # noqa: PLE0704


def line_of(event: PastEvent) -> str:
    return json.dumps(
        {
            "at": round(event.at, 3),
            "kind": event.kind,
            "peer": event.peer,
            "name": event.name and escaped(event.name),
            "text": escaped(event.text),
        },
        ensure_ascii=False,
    )
