"""A program's output as lines: cut anywhere, overwritten, coloured, binary, or without an end."""

from __future__ import annotations

import random

import pytest

from holdfast.daemon.process.output_lines import (
    LINE_CHARS_MAX,
    PLAIN_CHARS_MAX,
    LineReader,
    kept_line,
    plain_line,
    shown,
)
from holdfast.protocol.text import unprintable

RED, END = "\x1b[31m", "\x1b[0m"


def lines_of(*pieces: bytes) -> tuple[list[str], str]:
    reader = LineReader()
    lines = [line for piece in pieces for line in reader.feed(piece)]
    return lines, reader.rest


def test_lines_are_the_same_wherever_the_bytes_are_cut() -> None:
    text = "première ligne\nзначение: 3.14\n\n🙂 половина\r\nrest".encode()
    whole = lines_of(text)
    assert whole == (["première ligne", "значение: 3.14", "", "🙂 половина\r"], "rest")
    for seed in range(50):
        cuts = sorted(random.Random(seed).choices(range(len(text)), k=6))
        pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        assert lines_of(*pieces) == whole


def test_the_last_line_may_lack_its_end() -> None:
    reader = LineReader()
    assert reader.feed(b"one\ntwo\xe2\x82") == ["one"]
    assert reader.finish() == ["two\\xe2\\x82"]
    assert reader.finish() == []


def test_a_progress_bar_is_one_line_that_changes() -> None:
    reader = LineReader()
    assert reader.feed(b"\r  0%|      | 0/9") == []
    assert reader.feed(b"\r 44%|##    | 4/9") == []
    assert reader.rest == " 44%|##    | 4/9"
    assert reader.feed(b"\r100%|######| 9/9\nnext\n") == ["100%|######| 9/9", "next"]


def test_a_bar_without_line_ends_takes_no_memory() -> None:
    reader = LineReader()
    for step in range(10_000):
        assert reader.feed(b"\rstep %d" % step) == []
    assert reader.rest == "step 9999"


def test_a_line_without_an_end_is_broken() -> None:
    lines, rest = lines_of(*[b"x" * 1_000] * 100)
    assert {len(line) for line in lines} == {LINE_CHARS_MAX}
    assert len("".join(lines) + rest) == 100_000
    lines, rest = lines_of(b"y" * (3 * LINE_CHARS_MAX + 5) + b"\n")
    assert [len(line) for line in lines] == [*[LINE_CHARS_MAX] * 3, 5]


@pytest.mark.parametrize(
    ("line", "coloured", "plain"),
    [
        ("plain", "plain", "plain"),
        (f"{RED}loss{END} 3", f"{RED}loss{END} 3{END}", "loss 3"),
        (f"{RED}no end", f"{RED}no end{END}", "no end"),
        ("\x1b[38;2;1;2;3mrgb", f"\x1b[38;2;1;2;3mrgb{END}", "rgb"),
        ("a\x1b[2J\x1b[Hb", "ab", "ab"),  # clear the screen, go home
        ("a\x1b]0;title\x07b", "ab", "ab"),  # the window's title
        ("a\x1b]52;c;AAAA\x1b\\b", "ab", "ab"),  # the clipboard
        ("a\x1bPq#0\x1b\\b", "ab", "ab"),  # a picture
        ("a\x1b(Bb\x1b=c\x1b7d", "abcd", "abcd"),
        ("a\x1b[3", "a", "a"),  # its rest is still to come
        ("a\x1b]0;no end", "a\\x1b]0;no end", "a\\x1b]0;no end"),
        ("bell\x07 and \x9b31m", "bell\\x07 and \\x9b31m", "bell\\x07 and \\x9b31m"),
        ("tab\tstop", "tab     stop", "tab     stop"),
        ("ab\b\bcd\r", "abcd", "abcd"),
        ("right \u202eto left", "right \\u202eto left", "right \\u202eto left"),
    ],
)
def test_a_terminal_obeys_no_line_but_for_its_colours(line: str, coloured: str, plain: str) -> None:
    assert shown([line], colours=True) == coloured + "\n"
    assert shown([line], colours=False) == plain + "\n"
    assert plain_line(line) == plain


def test_any_bytes_become_printable_lines() -> None:
    reader = LineReader()
    lines = [*reader.feed(random.Random(0).randbytes(200_000)), *reader.finish()]
    assert len(lines) > 500
    for line in lines:
        assert not unprintable(kept_line(line))
        assert len(kept_line(line)) <= PLAIN_CHARS_MAX
    text = shown(lines, colours=False)
    assert text.count("\n") == len(lines)
    assert not any(map(unprintable, text.split("\n")))


def test_a_long_line_is_kept_cut() -> None:
    assert kept_line("x" * PLAIN_CHARS_MAX) == "x" * PLAIN_CHARS_MAX
    cut = kept_line("x" * (PLAIN_CHARS_MAX + 1))
    assert (len(cut), cut[-1]) == (PLAIN_CHARS_MAX, "…")
