"""The newest lines of a peer, whoever asks from wherever."""

from __future__ import annotations

import logging
import threading

from holdfast.daemon.process.log_ring import LINES_KEPT_MAX, LogRing, RingHandler


def test_only_the_newest_lines_are_kept() -> None:
    ring = LogRing()
    ring.add("trainer", [f"line {number}" for number in range(3 * LINES_KEPT_MAX)])
    ring.add("daemon", ["a notice"])
    lines = ring.tail(10 * LINES_KEPT_MAX)
    assert len(lines) == LINES_KEPT_MAX
    assert (lines[0].text, lines[-1].text) == (f"line {2 * LINES_KEPT_MAX + 1}", "a notice")
    assert [line.text for line in ring.tail(2)] == [f"line {3 * LINES_KEPT_MAX - 1}", "a notice"]
    assert ring.tail(2, source="daemon")[0].text == "a notice"
    assert ring.tail(0) == []


def test_times_grow_even_if_the_clock_stands_or_goes_back() -> None:
    times = iter([100.0, 100.0, 50.0, 101.0])
    ring = LogRing(lambda: next(times))
    for text in ("a", "b", "c", "d"):
        ring.add("trainer", [text])
    assert [line.text for line in ring.tail(9)] == ["a", "b", "c", "d"]
    at = [line.at for line in ring.tail(9)]
    assert at == sorted(set(at))
    assert at[-1] == 101.0
    assert [line.text for line in ring.tail(9, after=at[1])] == ["c", "d"]


def test_lines_are_printable_and_plain() -> None:
    ring = LogRing()
    ring.add("trainer", ["\x1b[31mred\x1b[0m \x07"])
    assert ring.tail(1)[0].text == "red \\x07"


def test_warnings_of_the_log_are_notices() -> None:
    ring = LogRing()
    logger = logging.getLogger("holdfast.test_log_ring")
    logger.setLevel(logging.INFO)
    handler = RingHandler(ring)
    logger.addHandler(handler)
    try:
        logger.info("not this")
        logger.warning("first\nsecond %d", 3)
    finally:
        logger.removeHandler(handler)
    assert [(line.source, line.text) for line in ring.tail(9)] == [
        ("daemon", "first"),
        ("daemon", "second 3"),
    ]


def test_threads_may_add_while_another_reads() -> None:
    ring = LogRing()

    def add() -> None:
        for _ in range(2_000):
            ring.add("trainer", ["x"])

    threads = [threading.Thread(target=add) for _ in range(3)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        at = [line.at for line in ring.tail(LINES_KEPT_MAX)]
        assert at == sorted(set(at))
    assert len(ring.tail(9_999)) == LINES_KEPT_MAX
