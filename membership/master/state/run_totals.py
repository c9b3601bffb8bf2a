"""Totals of a run since its master started: bytes sent, bytes saved, utilisation.

Members report counters that begin with their daemon processes; each process has its own member
number.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from ....protocol.messages import MEMBERS_MAX, Progress
from .history import RunHistory
from .roster import Member

RECENT_ROUNDS = 4  # commits over which utilisation is computed
BFLOAT16_BYTES = 2


class RunTotals:
    """Sums over all members."""

    def __init__(self, history: RunHistory) -> None:
        self.sent_bytes = 0  # by all members to each other, as reported
        # Bytes that data parallel training with bfloat16 gradients would have sent for the same
        # steps: a ring sends each gradient 2 (n - 1) times.
        self.parallel_bytes = 0
        self._history = history
        self._steps = {fragment: commit.at_step for fragment, commit in history.commits.items()}
        self._sent: dict[int, int] = {}  # by member number: bytes sent, as last reported
        # At each of the last commits, by member number: seconds in steps, and seconds waited.
        self._seconds: deque[dict[int, tuple[float, float]]] = deque(maxlen=RECENT_ROUNDS + 1)

    def attached(self, member: Member, *, known: bool) -> None:
        """Begin to count a member's bytes.

        Args:
          known: its process attached before, perhaps to another master; its bytes so far are not
            counted again.
        """
        if not known:
            self._sent[member.number] = 0
            if len(self._sent) > 2 * MEMBERS_MAX:
                del self._sent[next(iter(self._sent))]

    def progress(self, member: Member, message: Progress) -> None:
        """Add the bytes that a member has sent since its last report."""
        before = self._sent.get(member.number, message.bulk_sent_bytes)
        self._sent[member.number] = message.bulk_sent_bytes
        self.sent_bytes += max(0, message.bulk_sent_bytes - before)

    def committed(
        self, fragment: int, at_step: int, contributor_count: int, members: Iterable[Member]
    ) -> None:
        """Add a committed round."""
        steps = at_step - self._steps.get(fragment, 0)
        self._steps[fragment] = at_step
        values_count = self._history.sizes[fragment].value_count
        gradient_bytes = BFLOAT16_BYTES * values_count
        self.parallel_bytes += 2 * (contributor_count - 1) * gradient_bytes * max(0, steps)
        self._seconds.append(_seconds_of(members))

    def utilisation(self, contributors: Iterable[Member]) -> float | None:
        """Return the share of the last rounds' time spent in steps; None if not known yet."""
        before = self._seconds[0] if self._seconds else {}
        stepped_s = waited_s = 0.0
        for number, (stepped, waited) in _seconds_of(contributors).items():
            stepped_then, waited_then = before.get(number, (0.0, 0.0))
            stepped_s += max(0.0, stepped - stepped_then)
            waited_s += max(0.0, waited - waited_then)
        return stepped_s / (stepped_s + waited_s) if stepped_s + waited_s > 0.0 else None


def _seconds_of(members: Iterable[Member]) -> dict[int, tuple[float, float]]:
    return {
        member.number: (member.progress.stepped_s, member.progress.waited_s)
        for member in members
        if member.progress is not None
    }
