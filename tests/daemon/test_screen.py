"""What a terminal shows while a peer runs, and what a log holds: real descriptors, and a slow or
dead reader.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import sys
import threading
from collections.abc import Iterator

import pytest

from holdfast.daemon.process import screen as module
from holdfast.daemon.process.screen import Screen
from tests.terminal import PATIENCE_S, Terminal


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Terminal]:
    monkeypatch.setenv("TERM", "xterm")
    made = Terminal(columns=40)
    yield made
    made.close()


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    ends = os.pipe()
    yield ends
    for end in ends:
        with contextlib.suppress(OSError):  # a test has closed it
            os.close(end)


def read_all(end: int, until: bytes) -> bytes:
    got = b""
    while until not in got:
        ready, _, _ = select.select([end], [], [], PATIENCE_S)
        assert ready, got[-1_000:]
        got += os.read(end, 65_536)
    return got


# ---------------------------------------------------------------- a terminal


def test_the_living_line_stays_below_and_is_gone_in_the_end(terminal: Terminal) -> None:
    with Screen(terminal.end) as screen:
        assert screen.live
        screen.tell("joined")
        screen.show("round 1")
        terminal.until_shown("round 1")
        screen.output(["epoch 1"], "")
        terminal.until_shown("epoch 1")
        screen.show("round 2")
        terminal.until_shown("round 2")
        assert terminal.lines == ["joined", "epoch 1", "round 2"]
    terminal.until(lambda: terminal.lines[-1] == "", "the line is gone")
    assert terminal.lines == ["joined", "epoch 1", ""]


def test_a_progress_bar_of_the_trainer_moves_above_the_living_line(terminal: Terminal) -> None:
    with Screen(terminal.end) as screen:
        screen.show("round 1")
        for percent in range(0, 101, 5):
            screen.output([], f"{percent}%|####")
            if percent in (0, 50, 100):
                terminal.until_shown(f"{percent}%")
                assert terminal.lines == [f"{percent}%|####", "round 1"]
        screen.output(["100% done"], "")
        terminal.until_shown("100% done")
        terminal.until(lambda: terminal.lines == ["100% done", "round 1"], "no bar any more")
        screen.output([], "the last line has no end")
        terminal.until_shown("no end")
    terminal.until(lambda: terminal.lines[-1] == "", "the line is gone")
    assert terminal.lines == ["100% done", "the last line has no end", ""]


def test_rows_are_cut_to_the_width_also_of_wide_characters(terminal: Terminal) -> None:
    with Screen(terminal.end) as screen:
        screen.show("x" * 100)
        screen.output(["y" * 100], "z" * 100)
        terminal.until_shown("zzz")
        terminal.until_shown("xxx")
        assert terminal.lines == ["y" * 100, "z" * 38 + "…", "x" * 38 + "…"]
        screen.show("日" * 50)
        terminal.until_shown("日")
        assert terminal.lines[-1] == "日" * 19 + "…"
        screen.show("a\x1b[2Jb\nc")
        terminal.until_shown("a\\x1b[2Jb\\nc")


def test_colours_of_the_script_stay_and_its_orders_do_not(terminal: Terminal) -> None:
    with Screen(terminal.end) as screen:
        screen.output(["\x1b[31mred\x1b[0m\x1b[2J\x1b]0;title\x07!"], "")
        screen.tell("the master said \x1b[31mred")
        terminal.until_shown("the master said")
    assert "\x1b[31mred\x1b[0m!" in terminal.written
    assert "the master said \\x1b[31mred" in terminal.written
    assert "title" not in terminal.written


def test_lines_of_the_log_do_not_tear_the_living_line(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = os.fdopen(os.dup(terminal.end), "w")
    monkeypatch.setattr(sys, "stderr", stream)
    handler = logging.StreamHandler(stream)
    logging.getLogger().addHandler(handler)
    try:
        with Screen(terminal.end) as screen:
            screen.show("round 1")
            terminal.until_shown("round 1")
            logging.getLogger("holdfast.test").warning("careful")
            terminal.until_shown("careful")
            terminal.until(lambda: terminal.lines == ["careful", "round 1"], "above it")
            assert screen.ring.tail(1)[0].text == "careful"
        assert handler.stream is stream
    finally:
        logging.getLogger().removeHandler(handler)
        stream.close()


# ---------------------------------------------------------------- a log


def test_a_log_has_whole_lines_without_colours_and_no_living_line(pipe: tuple[int, int]) -> None:
    with Screen(pipe[1]) as screen:
        assert not screen.live
        screen.tell("joined")
        screen.show("round 1")
        screen.output([], "half a")
        screen.output(["half a line", "\x1b[31mred\x1b[0m"], "rest")
        screen.progress("round 2", due=False)
        screen.progress("round 3", due=True)
        screen.tell("end")
    lines = read_all(pipe[0], b"end\n").decode().splitlines()
    assert [lines[0], lines[1], lines[2], lines[4]] == ["joined", "half a line", "red", "end"]
    assert lines[3].endswith("  round 3")
    assert lines[3][2] == lines[3][5] == ":", "the time of day"
    assert len(lines) == 5


def test_quiet_writes_nothing_and_logs_errors_only(pipe: tuple[int, int]) -> None:
    handler = logging.StreamHandler(os.fdopen(os.dup(pipe[1]), "w"))
    logging.getLogger().addHandler(handler)
    try:
        with Screen(pipe[1], quiet=True) as screen:
            screen.tell("joined")
            screen.output(["epoch 1"], "")
            logging.getLogger("holdfast.test").warning("careful")
            logging.getLogger("holdfast.test").error("no good")
    finally:
        logging.getLogger().removeHandler(handler)
        handler.stream.close()
    os.close(pipe[1])
    assert os.read(pipe[0], 1_000) == b"no good\n"
    texts = [line.text for line in screen.ring.tail(9)]
    assert texts == ["joined", "epoch 1", "careful", "no good"], "`holdfast logs` has them all"


# ---------------------------------------------------------------- readers


def test_a_slow_reader_gets_all_and_the_trainer_waits_for_it(pipe: tuple[int, int]) -> None:
    lines = [f"line {number:06d} {'x' * 80}" for number in range(20_000)]
    got: list[bytes] = []

    def read_slowly() -> None:
        pause = threading.Event()
        while data := os.read(pipe[0], 50_000):
            got.append(data)
            pause.wait(0.001)

    reader = threading.Thread(target=read_slowly)
    reader.start()
    with Screen(pipe[1]) as screen:
        for at in range(0, len(lines), 500):
            screen.output(lines[at : at + 500], "")
    os.close(pipe[1])
    reader.join(PATIENCE_S)
    assert b"".join(got).decode().splitlines() == lines


def test_a_reader_that_takes_nothing_costs_lines_and_stops_nobody(
    pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "STUCK_S", 0.05)
    lines = ["x" * 1_000] * 100
    with Screen(pipe[1]) as screen:
        for _ in range(50):
            screen.output(lines, "")
        screen.tell("a notice waits for no reader")
        got = read_all(pipe[0], b"lines of the trainer's output]\n")
    said = got.decode().splitlines()
    skipped = next(line for line in said if line.startswith("[holdfast: skipped "))
    assert 1_000 < int(skipped.split()[2]) == 5_000 - said.count("x" * 1_000)
    assert "a notice waits for no reader" in said


def test_a_reader_that_is_gone_stops_nobody(pipe: tuple[int, int]) -> None:
    with Screen(pipe[1]) as screen:
        os.close(pipe[0])
        for _ in range(200):
            screen.output(["x" * 1_000] * 100, "")
        screen.tell("still here")
    assert screen.ring.tail(1)[0].text == "still here"


def test_a_stuck_terminal_does_not_keep_the_process(
    pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CLOSE_S", 0.1)
    with Screen(pipe[1]) as screen:
        screen.output(["x" * 1_000] * 200, "")
    assert threading.active_count() >= 1
    read_all(pipe[0], b"x" * 1_000 + b"\n")
