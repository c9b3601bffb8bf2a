"""Volunteer limits: when a machine is available and how much of its disk, as pure decisions.

    available --outside its hours, or on battery for STEADY_S--> away
    away --within its hours, and off battery for STEADY_S--> available

Time and power supply come in as arguments; the caller acts on the answer.
"""

from __future__ import annotations

import re

from attrs import define, field, frozen

from ...protocol.errors import UserError
from ..process.exit_codes import ExitCode

DAY_MINUTES = 24 * 60
# A change of the power supply counts after this time: a plug may only move to another socket.
STEADY_S = 5.0

_HOURS = re.compile(r"(\d{1,2})(?::(\d\d))?-(\d{1,2})(?::(\d\d))?")


@frozen
class Hours:
    """A part of the day in local time; it may go over midnight.

    Attributes:
      text: as the operator wrote it.
      start_minute, end_minute: minutes of the day; the end is not part of it.
    """

    text: str
    start_minute: int
    end_minute: int

    @classmethod
    def parse(cls, text: str) -> Hours:
        """Read ``22-07`` or ``9:30-17``; raises UserError."""
        found = _HOURS.fullmatch(text.strip())
        if found is not None:
            hours = [int(found.group(each)) for each in (1, 3)]
            minutes = [int(found.group(each) or 0) for each in (2, 4)]
            start, end = (60 * h + m for h, m in zip(hours, minutes, strict=True))
            good = all(minute < 60 for minute in minutes) and max(start, end) <= DAY_MINUTES
            if good and start % DAY_MINUTES != end % DAY_MINUTES:
                return cls(text.strip(), start % DAY_MINUTES, end % DAY_MINUTES)
        raise UserError(
            f"{text!r} is no part of a day",
            exit_code=ExitCode.USAGE,
            hint="write it like 22-07 or 9:30-17, by this machine's local time",
        )

    def holds(self, minute: int) -> bool:
        """Return whether a minute of the day is within these hours."""
        since_start = (minute - self.start_minute) % DAY_MINUTES
        return since_start < (self.end_minute - self.start_minute) % DAY_MINUTES

    @property
    def start(self) -> str:
        return f"{self.start_minute // 60:02}:{self.start_minute % 60:02}"


@define
class VolunteerLimits:
    """Rules for when this machine is available.

    Args:
      hours: None: at any time.
      off_battery: only while it does not run on battery.
    """

    hours: Hours | None = None
    off_battery: bool = False
    _paused: bool = field(default=False, init=False)  # by the battery
    # When the supply changed; None: no change waits.
    _since_s: float | None = field(default=None, init=False)

    def why_not(self, now_s: float, minute: int, *, on_battery: bool) -> str:
        """Return why this machine is not available; empty if it is. Called every few seconds.

        Args:
          now_s: a monotonic clock.
          minute: of the day, local time; it may leap, as at the start of summer time.
        """
        self._follow(now_s, on_battery)
        if self.hours is not None and not self.hours.holds(minute):
            return f"outside its hours ({self.hours.text}); back at {self.hours.start}"
        return "on battery" if self._paused else ""

    def _follow(self, now_s: float, on_battery: bool) -> None:
        if not self.off_battery or on_battery == self._paused:
            self._since_s = None
        elif self._since_s is None:
            self._since_s = now_s
        elif now_s - self._since_s >= STEADY_S:
            self._paused, self._since_s = on_battery, None


@frozen
class DiskQuota:
    """A limit for checkpoints on this machine's disk."""

    disk_bytes: int

    def refuses(self, checkpoint_bytes: int) -> str:
        """Return why a checkpoint of this size is not written; empty if it fits.

        The last checkpoint stays until the next one is whole, so there must be room for two.
        """
        if 2 * checkpoint_bytes <= self.disk_bytes:
            return ""
        return (
            f"two checkpoints of {checkpoint_bytes / 1e9:.2f} GB (the last one stays until the next"
            f" is whole) do not fit into --max-disk {self.disk_bytes / 1e9:g}"
        )

    def keep_count(self, wanted: int, checkpoint_bytes: int) -> int:
        """Return how many checkpoints may stay beside the one that is being written."""
        return max(1, min(wanted, self.disk_bytes // max(1, checkpoint_bytes) - 1))
