"""Points of members, made of their reports of progress."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

from attrs import Factory, define

from ..protocol.messages import MEMBERS_MAX, LoggedFigure, Progress
from .curves import MemberPoint, mean_figures

UTILISATION_S = 20.0  # a trainer waits once a round: over less time its utilisation leaps

Seconds = tuple[float, float, float]  # a time, and until then seconds in steps, and seconds waited


@define
class _Past:
    """What is remembered of a member from one point to the next."""

    seconds: deque[Seconds]  # of the last ``UTILISATION_S``
    logged: Mapping[str, LoggedFigure] = Factory(dict)


class Sampler:
    """Makes members' points: with the utilisation of the last ``UTILISATION_S``, and the figures of
    ``run.log`` that were logged since the member's point before.
    """

    def __init__(self) -> None:
        self._past: dict[int, _Past] = {}  # by member number

    def take(self, peer: str, name: str, at: float, number: int, progress: Progress) -> MemberPoint:
        """Return a member's point; ``number`` is the member's, whose process counts the seconds."""
        begun = _Past(deque([(at, 0.0, 0.0)]))  # its process has counted from its start
        past = self._past[number] = self._past.pop(number, begun)
        if len(self._past) > 2 * MEMBERS_MAX:
            del self._past[next(iter(self._past))]
        known, past.logged = past.logged, progress.metrics
        logged = progress.metrics.items()
        return MemberPoint(
            peer,
            name,
            at,
            progress.step,
            progress.loss,
            progress.tokens_per_s,
            _utilisation(at, past.seconds, progress),
            progress.bulk_sent_bytes,
            progress.bulk_received_bytes,
            {name: figure.value for name, figure in logged if figure != known.get(name)},
        )


def _utilisation(at: float, past: deque[Seconds], progress: Progress) -> float | None:
    """Add a member's seconds to its past ones; return the share of steps in the last ones."""
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
    for each in ages:
        for name, age in each.items():
            if age >= 0:
                least[name] = min(least.get(name, age), age)
    return mean_figures(
        {
            name: figure.value
            for name, figure in report.metrics.items()
            if 0 <= each[name] <= least[name] + steps
        }
        for report, each in zip(reports, ages, strict=True)
    )
