"""When a machine's owner lends it, and how much of it: a volunteer's limits, as pure decisions.

    allowed --outside its hours, or on battery for STEADY_S--> not allowed
    not allowed --within its hours, and off battery for STEADY_S--> allowed

Time and what the machine runs on come in as arguments; whoever asks acts on the answer.
"""

from __future__ import annotations

import re

from attrs import define, field, frozen

from ...protocol.errors import UserError
from ..exit_codes import ExitCode

DAY_MINUTES = 24 * 60
# A plug that is moved to another socket is nothing to leave a run for, and nothing to come back for.
STEADY_S = 5.0

_HOURS = re.compile(r"(\d{1,2})(?::(\d\d))?-(\d{1,2})(?::(\d\d))?")


@frozen
class Hours:
    """A part of the day, by this machine's local time; it may go over midnight.

    Attributes:
      text: as it was given.
      start_minute, end_minute: of the day; the first one is in it, the last one is not.
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
        """Whether this minute of the day is in it."""
        since_start = (minute - self.start_minute) % DAY_MINUTES
        return since_start < (self.end_minute - self.start_minute) % DAY_MINUTES

    @property
    def start(self) -> str:
        return f"{self.start_minute // 60:02}:{self.start_minute % 60:02}"


@define
class VolunteerLimits:
    """Whether this machine may take part now.

    Args:
      hours: None: at any.
      off_battery: only while it runs on something else.
    """

    hours: Hours | None = None
    off_battery: bool = False
    _paused: bool = field(default=False, init=False)  # because of the battery
    _since_s: float | None = field(default=None, init=False)  # the other way round than that

    def why_not(self, now_s: float, minute: int, *, on_battery: bool) -> str:
        """Why it may not; empty: it may.

        Args:
          now_s: a clock that only goes on; to be asked every few seconds.
          minute: of the day, local time. It may leap: summer time, another time zone.
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
    """What of a machine's disk a peer may fill, with checkpoints and with what has come of a copy."""

    disk_bytes: int

    def refuses(self, checkpoint_bytes: int) -> str:
        """Why none of this size is written; empty: it fits.

        The last whole one stays until the next one is whole, so there must be room for two.
        """
        if 2 * checkpoint_bytes <= self.disk_bytes:
            return ""
        return (
            f"two checkpoints of {checkpoint_bytes / 1e9:.2f} GB (the last one stays until the next "
            f"is whole) do not fit into --max-disk {self.disk_bytes / 1e9:g}"
        )

    def keep_count(self, wanted: int, checkpoint_bytes: int) -> int:
        """How many may lie there beside the one that is being written."""
        return max(1, min(wanted, self.disk_bytes // max(1, checkpoint_bytes) - 1))

    def left_bytes(self, used_bytes: int) -> int:
        """For blocks of a copy, beside what lies there already."""
        return max(0, self.disk_bytes - used_bytes)
