"""Points of members, made of their reports of progress."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from ..protocol.messages import MEMBERS_MAX, LoggedFigure, Progress
from .curves import MemberPoint, mean_figures

UTILISATION_S = 20.0  # a trainer waits once a round: over less time its utilisation leaps

Seconds = tuple[float, float, float]  # a time, and until then seconds in steps, and seconds waited


class Sampler:
    """Makes members' points: with the utilisation of the last ``UTILISATION_S``, and the figures of
    ``run.log`` that were logged since the member's point before.
    """

    def __init__(self) -> None:
        # Both by member number.
        self._seconds: dict[int, deque[Seconds]] = {}
        self._logged: dict[int, dict[str, LoggedFigure]] = {}

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
            self._fresh(number, progress),
        )

    def _fresh(self, number: int, progress: Progress) -> dict[str, float]:
        known = self._logged.pop(number, {})
        self._logged[number] = progress.metrics
        if len(self._logged) > 2 * MEMBERS_MAX:
            del self._logged[next(iter(self._logged))]
        logged = progress.metrics.items()
        return {name: figure.value for name, figure in logged if figure != known.get(name)}

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


def newest_means(reports: Sequence[Progress], steps: int) -> dict[str, float]:
    """Return the mean of each figure over the members that logged it lately: of which age in steps
    exceeds the least of all by so many at most. What one has logged since replaces what all logged
    at the start. A member's age counts from its own step, since reports come at different times; a
    figure beyond that is of before a rewind, or a lie.
    """
    ages = [
        {name: report.step - figure.step for name, figure in report.metrics.items()}
        for report in reports
    ]
    least: dict[str, int] = {}
    for name, age in (item for each in ages for item in each.items() if item[1] >= 0):
        least[name] = min(least.get(name, age), age)
    return mean_figures(
        {
            name: figure.value
            for name, figure in report.metrics.items()
            if 0 <= age[name] <= least[name] + steps
        }
        for report, age in zip(reports, ages, strict=True)
    )
