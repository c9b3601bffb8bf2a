"""What ``holdfast watch`` draws fits its screen and shows what matters, whatever the run is like."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from holdfast.daemon.asked import News, event_rows
from holdfast.daemon.watch import Lines, draw, essence
from tests.membership.table import Table

Status = dict[str, Any]


def a_run(members: int) -> Status:
    table = Table()
    for number in range(members):
        table.join("abcdef"[number % 6] + f"{number:031x}")
    return {**table.master.status(table.now_s), "name": "[b]first[/b]"}


def screen(status: Status | None, width: int, height: int, away_s: float = 0.0) -> list[str]:
    out = io.StringIO()
    console = Console(file=out, width=width, height=height, color_system=None)
    console.print(draw("master", status, away_s, width, height))
    return out.getvalue().splitlines()


@pytest.mark.parametrize("members", [0, 1, 5, 26])
@pytest.mark.parametrize("height", [24, 10, 60])
def test_it_fits_and_shows_members_and_events(members: int, height: int) -> None:
    lines = screen(a_run(members), 80, height)
    assert len(lines) <= height
    assert max(len(line) for line in lines) <= 80
    assert lines[0].startswith("[b]first[/b]  waiting for founder  round 0"), "and no markup"
    assert lines[-1].startswith("q: ")
    if members:
        assert lines[4].split()[0] == "a"
        assert any("waiting for the founder" in line for line in lines[4:])
    if members == 26 and height == 24:
        assert any(line.startswith("... and ") for line in lines)
        assert sum("joined as member" in line for line in lines) >= 3, "the newest events"
        assert any("joined as member 26" in line for line in lines)


def test_a_master_that_is_away_is_said_above_what_was_known() -> None:
    lines = screen(a_run(2), 80, 24, away_s=7)
    assert lines[0].startswith("the master does not answer, for 7 s")
    assert lines[4].split()[0] == "a"
    assert screen(None, 80, 24, away_s=3)[0].startswith("the master does not answer")


def test_lines_are_for_what_changes() -> None:
    table = Table()
    lines = Lines("master")

    def told() -> list[str]:
        status = {**table.master.status(table.now_s), "name": "first"}
        return [line.partition("  ")[2] for line in lines.of(status)]

    table.join("a" * 32)
    first = told()
    assert len(first) == 1, "what was before is not told"
    assert first[0].startswith("first  waiting for founder, 1 member: waiting for the founder")
    assert told() == []
    table.join("b" * 32)
    state, event = told()
    assert state.startswith("first  waiting for founder, 2 members")
    assert event.startswith("join   b (bbbbbbbb) joined as member 2")
    assert told() == []


def test_news_are_new_once_also_of_another_term() -> None:
    news, status = News(), a_run(2)
    assert news.of(status, "events") == status["events"]
    assert news.of(status, "events") == []
    assert news.of({**status, "term": 2}, "events") == status["events"]


def test_a_clock_that_moved_is_no_change() -> None:
    status = a_run(2)
    assert essence({**status, "now_s": 7.0}) == essence(status)
    assert essence({**status, "step": 7}) != essence(status)


def test_events_are_found_by_name_id_kind_and_text() -> None:
    status = a_run(3)
    assert [row["name"] for row in event_rows(status, kinds=["join"])] == ["a", "b", "c"]
    assert [row["name"] for row in event_rows(status, peer="b")] == ["b"]
    assert [row["name"] for row in event_rows(status, peer="b000")] == ["b"]
    assert [row["name"] for row in event_rows(status, text="MEMBER 3")] == ["c"]
    assert event_rows(status, kinds=["leave"]) == []
