"""What chunk owners find in each member's updates, over rounds: who works, and who only claims to.

Honest members may train on any data, so a figure means something only beside those of the others in
the same round, and only if it stays odd:

    figure      of one update                                      odd if it is far
    agreement   cosine with the sum of all others                  below
    effort      norm, for its tokens, in norms of the others       below
    likeness    cosine with the most similar other update          above

With ``d`` a contribution times its clip factor and ``S`` the sum of all, agreement is

    (<d, S> - <d, d>) / (|d| sqrt(<S, S> - 2 <d, S> + <d, d>))

Effort is ``log |d| - p log tokens`` against the medians, where ``p`` is fitted to rounds of unequal
tokens. The *score* of a figure is its distance from the median in robust standard deviations
(1.4826 times the median distance from the median, or the least that matters). A moving average of a
score that stays beyond ``SCORE_MAX`` for ``ODD_ROUNDS`` rounds is told the operator. It decides
nothing: data may be unlike the others', and what to do about it is a person's choice.

**One owner's word counts for nothing.** Each owner's report is read alone, about the chunks that it
added up. Nobody is heard about itself. Of the other reports the median counts, of an even number
the one that speaks for the member: so one of two or more says nothing that another does not.

The history is this master's; it begins again with the next one.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from attrs import Factory, define, frozen

from ....protocol.messages import MEMBERS_MAX, SKETCH_BYTES, Contributor
from .norms import Report, cosine_of, numbers_of, sketches_of

SCORE_MAX = 5.0  # robust standard deviations
SCORE_LIMIT = 2 * SCORE_MAX  # of one round, which is soon forgotten
ODD_ROUNDS = 10  # in a row, before anybody is told
NEWEST_SHARE = 0.2  # of the newest round in a moving average
COMPARED_MIN = 4  # updates; of fewer a median does not tell which one is odd
REPORTS_MIN = 2  # about one member
REPORTS_MAX = 5  # that are read, of the owners of the most chunks: pairs grow with members squared
NORMAL = 1.4826  # the standard deviation of normal numbers, in median distances from the median
# The least standard deviations that matter: five times this is odd even if all others are equal.
AGREEMENT_SPREAD = 0.15  # of the median agreement
AGREEMENT_SPREAD_MIN = 0.02  # what a sample of a small model leaves uncertain
EFFORT_SPREAD = 0.1  # of a natural logarithm: five are 0.6 of the usual norm
UNLIKE_SPREAD = 0.1  # of the usual angle to the nearest: five are half of it
# Of ``p``. A walk without a direction goes as far as the root of its steps, a straight one as them.
EXPONENT, EXPONENT_MIN, EXPONENT_MAX = 0.7, 0.5, 1.0
UNEQUAL = math.log(1.25)  # from this ratio to the median on, tokens tell the exponent
UNEQUAL_MIN = 3  # members with such tokens: more than a few liars among many

AGREEMENT, EFFORT, LIKENESS = "agreement", "effort", "likeness"
WORDS = {
    AGREEMENT: "its updates do not point where the others' do",
    EFFORT: "much less work than its tokens say",
    LIKENESS: "its updates are nearly those of {like}",
}
AGAINST, AGAINST_MAX = "its updates point against the others'", -0.1  # an agreement below it


@frozen
class OwnerFindings:
    """One owner's report on the chunks that it added up; lists are by contributor."""

    owner: str
    agreement: list[float | None]
    effort: list[float | None]  # logarithm of the norm, against the median
    sketches: list[int]

    @classmethod
    def of(cls, owner: str, report: bytes, scales: Sequence[float]) -> OwnerFindings:
        """Read a report about contributors with these clip factors."""
        numbers = numbers_of(report, len(scales))
        rows = list(zip(numbers[0::3], numbers[1::3], numbers[2::3], strict=True))
        *contributions, (_result, total, _along) = rows
        norms = [math.log(square) / 2 if square > 0 else None for square, *_ in contributions]
        usual = statistics.median([norm for norm in norms if norm is not None] or [0.0])
        return cls(
            owner,
            [
                cosine_of(
                    square := scale * scale * sampled,
                    scale * along - square,
                    total - 2 * scale * along + square,
                )
                for (_, sampled, along), scale in zip(contributions, scales, strict=True)
            ],
            [None if norm is None else norm - usual for norm in norms],
            sketches_of(report, len(scales)),
        )


@frozen
class RoundFindings:
    """What the owners together say about a round's updates, by peer.

    Attributes:
      nearest: the least share of unlike signs in its sketch and another one, and whose that is.
      unlike: the median of these shares. That of all pairs would be larger where members oppose or
        resemble nobody, and make twins of all others.
    """

    agreement: dict[str, float]
    effort: dict[str, float]
    nearest: dict[str, tuple[float, str]]
    unlike: float

    # Small figures are odd, so of an even number the one that speaks for the member.
    middle = staticmethod(statistics.median_high)

    @classmethod
    def of(
        cls, reports: Iterable[tuple[str, bytes]], contributors: Sequence[Contributor]
    ) -> RoundFindings:
        """Read the reports of the owners that added the most chunks."""
        scales = [each.scale for each in contributors]
        peers = [each.peer for each in contributors]
        owners = [OwnerFindings.of(owner, report, scales) for owner, report in reports]

        def told(figure: Callable[[OwnerFindings], list[float | None]]) -> dict[str, float]:
            found = {}
            for place, peer in enumerate(peers):
                values = [figure(each)[place] for each in owners if each.owner != peer]
                known = [value for value in values if value is not None]
                if len(known) >= REPORTS_MIN:
                    found[peer] = cls.middle(known)
            return found

        nearest: dict[str, tuple[float, str]] = {}
        for one, other, unlike in _pairs(owners, peers):
            for peer, like in ((one, other), (other, one)):
                nearest[peer] = min(nearest.get(peer, (1.0, "")), (unlike, like))
        return cls(
            told(lambda owner: owner.agreement),
            told(lambda owner: owner.effort),
            nearest,
            statistics.median_high([unlike for unlike, _ in nearest.values()] or [0.0]),
        )


def _pairs(
    owners: Sequence[OwnerFindings], peers: Sequence[str]
) -> Iterator[tuple[str, str, float]]:
    """Yield pairs with the share of unlike signs in their sketches."""
    for place, one in enumerate(peers):
        for at in range(place + 1, len(peers)):
            other = peers[at]
            counts = [
                (each.sketches[place] ^ each.sketches[at]).bit_count()
                for each in owners
                if each.owner != one and each.owner != other
            ]
            if len(counts) >= REPORTS_MIN:
                yield one, other, RoundFindings.middle(counts) / (8 * SKETCH_BYTES)


@define
class Record:
    """What is known of one member's updates."""

    figures: dict[str, float] = Factory(dict)  # of its last round
    scores: dict[str, float] = Factory(dict)  # moving averages; positive: suspicious
    odd_rounds: dict[str, int] = Factory(dict)  # in a row in which the score was too large
    like: str = ""  # the member whose updates are most like its own

    def note(self, figure: str, value: float, score: float) -> None:
        """Note a figure of one round."""
        score = min(max(score, -SCORE_LIMIT), SCORE_LIMIT)
        before = self.scores.get(figure, score)
        self.figures[figure] = value
        self.scores[figure] = before + NEWEST_SHARE * (score - before)
        odd = self.scores[figure] > SCORE_MAX
        self.odd_rounds[figure] = self.odd_rounds.get(figure, 0) + 1 if odd else 0

    def suspicion(self, name: Callable[[str], str]) -> str:
        """Return what is odd, as words for the operator; empty if nothing is for long."""
        texts = []
        for figure, rounds in self.odd_rounds.items():
            if rounds >= ODD_ROUNDS:
                words = WORDS[figure]
                if figure == AGREEMENT and self.figures[figure] < AGAINST_MAX:
                    words = AGAINST
                if figure == LIKENESS:
                    words = words.format(like=name(self.like))
                texts.append(f"{words}, for {rounds} rounds")
        return "; ".join(texts)


class UpdateHistory:
    """Figures of all members' updates, over rounds."""

    def __init__(self) -> None:
        self.records: dict[str, Record] = {}  # by peer, the last measured one last
        self.exponent = EXPONENT  # of norms over tokens

    def note(
        self,
        reports: Mapping[str, Report],
        makers: Sequence[str],
        contributors: Sequence[Contributor],
        tokens: Mapping[str, int],
    ) -> None:
        """Take in a committed round.

        Args:
          reports: by the member that added chunks up.
          makers: by chunk, the member that added it up.
          tokens: that each contributor says it has trained on.
        """
        told = [(owner, report) for owner, (report, _) in reports.items() if report]
        chunk_counts = Counter(makers)
        told.sort(key=lambda each: -chunk_counts[each[0]])
        found = RoundFindings.of(told[:REPORTS_MAX], contributors)
        if len(found.effort) < COMPARED_MIN:
            return
        efforts = self._efforts(found.effort, tokens)
        spread = AGREEMENT_SPREAD * abs(statistics.median([*found.agreement.values()] or [0.0]))
        usual = max(spread, AGREEMENT_SPREAD_MIN)
        self._compare(AGREEMENT, found.agreement, usual)
        self._compare(EFFORT, efforts, EFFORT_SPREAD, shown=math.exp)
        for peer, (unlike, like) in found.nearest.items() if found.unlike else ():
            record = self._record(peer)
            score = (1.0 - unlike / found.unlike) / UNLIKE_SPREAD
            record.note(LIKENESS, math.cos(math.pi * unlike), score)
            record.like = like

    def _efforts(self, norms: Mapping[str, float], tokens: Mapping[str, int]) -> dict[str, float]:
        """Return what norms are beyond what tokens explain, and fit the exponent."""
        logs = {peer: math.log(max(1, tokens[peer])) for peer in norms}
        usual = statistics.median(logs.values())
        slopes = [
            norms[peer] / (each - usual)
            for peer, each in logs.items()
            if abs(each - usual) > UNEQUAL
        ]
        if len(slopes) >= UNEQUAL_MIN:
            slope = min(max(statistics.median(slopes), EXPONENT_MIN), EXPONENT_MAX)
            self.exponent += NEWEST_SHARE * (slope - self.exponent)
        return {peer: norms[peer] - self.exponent * (logs[peer] - usual) for peer in norms}

    def _compare(
        self,
        figure: str,
        values: Mapping[str, float],
        spread_min: float,
        shown: Callable[[float], float] = float,
    ) -> None:
        """Note a figure of which small values are odd, of all members."""
        if len(values) < COMPARED_MIN:
            return
        middle = statistics.median(values.values())
        spread = NORMAL * statistics.median(abs(value - middle) for value in values.values())
        for peer, value in values.items():
            score = (middle - value) / max(spread, spread_min)
            self._record(peer).note(figure, shown(value), score)

    def _record(self, peer: str) -> Record:
        """Return a member's record, which is kept when it leaves, as long as there is room."""
        record = self.records[peer] = self.records.pop(peer, Record())
        if len(self.records) > 2 * MEMBERS_MAX:
            del self.records[next(iter(self.records))]
        return record

    def figures(self, peer: str) -> dict[str, float]:
        """Return the figures of a member's last measured round."""
        return self.records[peer].figures if peer in self.records else {}

    def suspicion(self, peer: str, name: Callable[[str], str]) -> str:
        """Return what is odd about a member's updates; empty if nothing is."""
        return self.records[peer].suspicion(name) if peer in self.records else ""
