"""Logging of daemons: its destination, rotation and format."""

from __future__ import annotations

import json
import logging
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any

from ...protocol.errors import UserError
from ...protocol.text import escaped, escaped_lines
from .exit_codes import ExitCode

FILE_BYTES_MAX = 16 * 2**20  # then the file becomes PATH.1, and a new one begins
FILES_KEPT = 4  # full files
TEXT_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
EXTRAS = ("kind", "peer")  # fields of some records besides their text


class TextLines(logging.Formatter):
    """Lines for people, with control characters escaped so that a terminal obeys none."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        return escaped(super().formatMessage(record))

    def formatException(self, ei: Any) -> str:
        return escaped_lines(super().formatException(ei))


class JsonLines(logging.Formatter):
    """One JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "at": round(record.created, 3),
            "level": record.levelname.lower(),
            "logger": record.name,
            "text": escaped_lines(record.getMessage()),
        }
        line |= {name: vars(record)[name] for name in EXTRAS if name in vars(record)}
        if record.exc_info:
            line["traceback"] = escaped_lines(self.formatException(record.exc_info))
        return json.dumps(line, ensure_ascii=False)


def configure(level: str, form: str, file: Path | None) -> None:
    """Set up this process's log, as ``text`` or ``json``; raise UserError for a bad file."""
    handler: logging.Handler = logging.StreamHandler()
    if file is not None:
        try:
            handler = RotatingFileHandler(
                file, maxBytes=FILE_BYTES_MAX, backupCount=FILES_KEPT, encoding="utf-8"
            )
        except OSError as error:
            raise UserError(
                f"cannot log to {file}: {error.strerror}",
                exit_code=ExitCode.CONFIG,
                hint="give a writable file with --log-file PATH, or leave the option out",
            ) from error
    handler.setFormatter(JsonLines() if form == "json" else TextLines(TEXT_FORMAT))
    logging.basicConfig(level=level.upper(), handlers=[handler])
