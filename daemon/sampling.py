"""Points of members, made of their reports of progress."""

from __future__ import annotations

from ..protocol.messages import MEMBERS_MAX, Progress
from .member_curves import MemberPoint


class Sampler:
    """Makes a member's points; its utilisation is that since its last point."""

    def __init__(self) -> None:
        # By member number: seconds in steps, and seconds waited, at the last point.
        self._seconds: dict[int, tuple[float, float]] = {}

    def take(self, peer: str, name: str, at: float, number: int, progress: Progress) -> MemberPoint:
        """Return a member's point.

        Args:
          at: unix seconds.
          number: of the member; its process counts the seconds.
        """
        stepped_s, waited_s = self._seconds.pop(number, (0.0, 0.0))
        self._seconds[number] = progress.stepped_s, progress.waited_s
        if len(self._seconds) > 2 * MEMBERS_MAX:
            del self._seconds[next(iter(self._seconds))]
        stepped_s = max(0.0, progress.stepped_s - stepped_s)
        waited_s = max(0.0, progress.waited_s - waited_s)
        return MemberPoint(
            peer,
            name,
            at,
            progress.step,
            progress.loss,
            progress.tokens_per_s,
            stepped_s / (stepped_s + waited_s) if stepped_s + waited_s else None,
            progress.bulk_sent_bytes,
            progress.bulk_received_bytes,
            dict(progress.metrics),
        )
