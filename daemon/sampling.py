"""Points of members, made of their reports of progress."""

from __future__ import annotations

from collections import deque

from ..protocol.messages import MEMBERS_MAX, Progress
from .curves import MemberPoint

UTILISATION_S = 20.0  # a trainer waits once a round: over less time its utilisation leaps

Seconds = tuple[float, float, float]  # a time, and until then seconds in steps, and seconds waited


class Sampler:
    """Makes members' points, with the utilisation of the last ``UTILISATION_S``."""

    def __init__(self) -> None:
        self._seconds: dict[int, deque[Seconds]] = {}  # by member number

    def take(self, peer: str, name: str, at: float, number: int, progress: Progress) -> MemberPoint:
        """Return a member's point; ``number`` is the member's, whose process counts the seconds."""
        return MemberPoint(
            peer,
            name,
            at,
            progress.step,
            progress.loss,
            progress.tokens_per_s,
            self._utilisation(at, number, progress),
            progress.bulk_sent_bytes,
            progress.bulk_received_bytes,
            dict(progress.metrics),
        )

    def _utilisation(self, at: float, number: int, progress: Progress) -> float | None:
        past = self._seconds.pop(number, deque([(at, 0.0, 0.0)]))
        self._seconds[number] = past
        if len(self._seconds) > 2 * MEMBERS_MAX:
            del self._seconds[next(iter(self._seconds))]
        past.append((at, progress.stepped_s, progress.waited_s))
        while len(past) > 2 and at - past[1][0] >= UTILISATION_S:
            past.popleft()
        _then, stepped_s, waited_s = past[0]
        stepped_s = max(0.0, progress.stepped_s - stepped_s)
        waited_s = max(0.0, progress.waited_s - waited_s)
        return stepped_s / (stepped_s + waited_s) if stepped_s + waited_s else None
