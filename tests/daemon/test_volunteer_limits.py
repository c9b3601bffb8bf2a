"""Limits of a volunteer: hours, battery and disk; the time and the power supply are given."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.daemon.peer.volunteer_limits import (
    DAY_MINUTES,
    STEADY_S,
    DiskQuota,
    Hours,
    VolunteerLimits,
)
from holdfast.daemon.process import this_machine
from holdfast.protocol.errors import UserError

NIGHT = Hours.parse("22-07")
NOON = 12 * 60


@pytest.mark.parametrize(
    ("text", "inside", "outside"),
    [
        ("22-07", ["22:00", "23:59", "0:00", "6:59"], ["7:00", "12:00", "21:59"]),
        ("9:30-17", ["9:30", "16:59"], ["9:29", "17:00", "0:00"]),
        ("0-24", [], []),
        ("18-24", ["18:00", "23:59"], ["0:00", "17:59"]),
        ("0-6:15", ["0:00", "6:14"], ["6:15", "23:59"]),
    ],
)
def test_a_part_of_the_day(text: str, inside: list[str], outside: list[str]) -> None:
    def minute(time: str) -> int:
        hours, minutes = time.split(":")
        return 60 * int(hours) + int(minutes)

    if text == "0-24":
        with pytest.raises(UserError):
            Hours.parse(text)
        return
    hours = Hours.parse(text)
    assert all(hours.holds(minute(time)) for time in inside)
    assert not any(hours.holds(minute(time)) for time in outside)


@pytest.mark.parametrize(
    "text", ["", "22", "22-", "25-7", "7-7", "22-07-08", "a-b", "9:60-10", "-1-3"]
)
def test_what_is_no_part_of_a_day(text: str) -> None:
    with pytest.raises(UserError) as raised:
        Hours.parse(text)
    assert "22-07" in raised.value.hint


@given(
    st.integers(0, DAY_MINUTES - 1),
    st.integers(0, DAY_MINUTES - 1),
    st.integers(0, DAY_MINUTES - 1),
)
def test_a_minute_is_in_a_part_or_in_the_rest(start: int, end: int, minute: int) -> None:
    if start != end:
        part, rest = Hours("", start, end), Hours("", end, start)
        assert part.holds(minute) != rest.holds(minute)
        assert part.holds(start)
        assert not part.holds(end)


@pytest.mark.fault(
    "a machine's owner wants it back: its hours are over, it runs on battery",
    "its clock and its plug, looked at every second",
    "it drains, the owner of the run reads why; it comes back by itself",
)
def test_a_day_and_a_night() -> None:
    """Asked every second from noon to noon: away, here, away; and the owner reads why."""
    limits = VolunteerLimits(NIGHT)
    told: list[tuple[float, str]] = []
    for passed_s in range(24 * 3_600):
        minute = (NOON + passed_s // 60) % DAY_MINUTES
        why = limits.why_not(passed_s, minute, on_battery=True)  # nobody asked about that
        if not told or told[-1][1] != why:
            told.append((passed_s / 3_600, why))
    assert told == [
        (0.0, "outside its hours (22-07); back at 22:00"),
        (10.0, ""),
        (19.0, "outside its hours (22-07); back at 22:00"),
    ]


def test_a_plug_must_be_out_for_a_while_and_in_for_a_while() -> None:
    limits = VolunteerLimits(off_battery=True)
    on = [False, True, True, False, True, True, True, False, True, False, False, False, False]
    told = [
        limits.why_not(index * STEADY_S / 2, NOON, on_battery=each) for index, each in enumerate(on)
    ]
    battery = "on battery"
    assert told == ["", "", "", "", "", "", battery, battery, battery, battery, battery, "", ""]


def test_hours_are_told_before_the_battery() -> None:
    limits = VolunteerLimits(NIGHT, off_battery=True)
    for second in range(20):
        limits.why_not(second, NOON, on_battery=True)
    assert limits.why_not(20, NOON, on_battery=True).startswith("outside its hours")
    assert limits.why_not(21, 23 * 60, on_battery=True) == "on battery"


def supply(folder: Path, name: str, **values: str) -> None:
    (folder / name).mkdir(exist_ok=True)
    for key, value in values.items():
        (folder / name / key).write_text(value + "\n")


def test_what_a_machine_runs_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(this_machine, "POWER", tmp_path / "none")
    assert not this_machine.on_battery(), "it has none"
    monkeypatch.setattr(this_machine, "POWER", tmp_path)
    supply(tmp_path, "mouse", type="Battery", scope="Device", status="Discharging")
    assert not this_machine.on_battery()
    supply(tmp_path, "BAT0", type="Battery", status="Discharging")
    assert this_machine.on_battery()
    supply(tmp_path, "AC", type="Mains", online="1")
    assert not this_machine.on_battery()
    supply(tmp_path, "AC", online="0")
    assert this_machine.on_battery()
    supply(tmp_path, "BAT0", status="Full")
    assert not this_machine.on_battery()


def test_two_checkpoints_fit_or_there_is_none() -> None:
    disk_quota = DiskQuota(10_000_000_000)
    assert disk_quota.refuses(5_000_000_000) == ""
    assert "do not fit into --max-disk 10" in disk_quota.refuses(5_000_000_001)
    assert disk_quota.keep_count(9, 2_000_000_000) == 4, "and the one that is being written"
    assert disk_quota.keep_count(2, 2_000_000_000) == 2
    assert disk_quota.keep_count(9, 5_000_000_000) == 1
