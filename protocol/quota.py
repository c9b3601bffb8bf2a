"""What one member may say in a while, on one control stream: so many messages, so many bytes.

Two buckets that run empty with what comes and fill with time. They are far beyond what an honest member
ever says, even in the second in which it attaches; who exceeds them keeps a whole process busy with
reading, so its connection ends, and it is named. Bulk bytes have no quota: they are read as fast as
somebody here wants them.
"""

from __future__ import annotations

from attrs import define

MESSAGES_PER_S = 2_000.0  # decoding as many is a tenth of a core
MESSAGES_MAX = 20_000.0  # at once
BYTES_PER_S = 4 * 2.0**20
BYTES_MAX = 64 * 2.0**20  # at once: four layouts of the largest size


@define
class Quota:
    """What is left of it for one connection."""

    _at_s: float
    _messages: float = MESSAGES_MAX
    _bytes: float = BYTES_MAX

    def take(self, size_bytes: int, now_s: float) -> str:
        """A message has come; what is wrong with that, empty: nothing."""
        passed_s, self._at_s = now_s - self._at_s, now_s
        self._messages = min(MESSAGES_MAX, self._messages + MESSAGES_PER_S * passed_s) - 1
        self._bytes = min(BYTES_MAX, self._bytes + BYTES_PER_S * passed_s) - size_bytes
        if self._messages < 0:
            return f"more than {MESSAGES_PER_S:.0f} messages a second"
        if self._bytes < 0:
            return f"messages of more than {BYTES_PER_S / 2**20:.0f} MiB a second"
        return ""
