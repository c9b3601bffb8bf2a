"""Logs: in which form, where to, and how much of them is kept."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.daemon.process import logs
from holdfast.daemon.process.exit_codes import ExitCode
from holdfast.protocol.errors import UserError

log = logging.getLogger("holdfast.test")
Configure = Callable[[str, str, Path | None], None]


@pytest.fixture
def configure() -> Iterator[Configure]:
    """Configures as in a fresh process; afterwards all is as it was."""
    root = logging.getLogger()
    before, level = root.handlers[:], root.level

    def as_if_first(*arguments: Any) -> None:
        root.handlers[:] = []  # pytest's
        logs.configure(*arguments)

    yield as_if_first
    if root.handlers != before:
        for handler in root.handlers:
            handler.close()
    root.handlers[:] = before
    root.setLevel(level)


def test_a_line_of_json_says_all_there_is(tmp_path: Path, configure: Configure) -> None:
    path = tmp_path / "log"
    configure("info", "json", path)
    log.info("two\nlines of %s", "é", extra={"kind": "join", "peer": "ab"})
    log.debug("not this")
    try:
        raise ValueError("a bug")
    except ValueError:
        log.exception("it went wrong")
    first, second = [json.loads(line) for line in path.read_text().splitlines()]
    assert first.pop("at") > 1e9
    assert first == {
        "level": "info",
        "logger": "holdfast.test",
        "text": "two\nlines of é",
        "kind": "join",
        "peer": "ab",
    }
    assert second["level"] == "error"
    assert "ValueError: a bug" in second["traceback"]


def test_a_file_is_turned_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, configure: Configure
) -> None:
    monkeypatch.setattr(logs, "FILE_BYTES_MAX", 1_000)
    configure("info", "text", tmp_path / "log")
    for number in range(200):
        log.info("line %d", number)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["log", *(f"log.{n}" for n in range(1, 5))]
    assert all(p.stat().st_size <= 1_000 for p in tmp_path.iterdir())
    assert (tmp_path / "log").read_text().endswith("holdfast.test: line 199\n")


def test_without_a_file_it_goes_to_standard_error(
    capsys: pytest.CaptureFixture[str], configure: Configure
) -> None:
    configure("warning", "text", None)
    log.warning("look")
    assert "WARNING holdfast.test: look" in capsys.readouterr().err


def test_a_file_that_cannot_be_written_is_said(tmp_path: Path, configure: Configure) -> None:
    with pytest.raises(UserError, match="cannot log to") as raised:
        configure("info", "text", tmp_path / "none" / "log")
    assert raised.value.exit_code == ExitCode.CONFIG
