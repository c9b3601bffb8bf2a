"""Bandwidths of the members' lines, estimated from what the lines carried.

What follows from the peers' reports (``Measured``) is told in docs/design/planning.md. A rate is
what went through, so it is a lower bound: good for an uplink, whose sender offers frames to all
receivers at once, while bytes may arrive slowly because their senders are slow. So a peer counts as
able to receive at least as fast as it sends; else a fast peer among slow ones would look slow, and
own little, for ever.

*Doubt.* The rates of equal lines differ by what happened to be measured, so each peer also has a
*cautious* rate, by which the gain of unequal shares is judged (``shares.chosen_shares``).

*Waiting.* In a round among unequal lines everybody waits for the slowest one, so on average all
look as slow. But a fast line does not send evenly then: what it has is gone at once, and more comes
later. So a peer also reports at which rate it sent in its best second
(``collectives.links.rates.line_rate``). If that is ``WAITED`` times the average and more, it waited
for others, and its best second says what its line carries.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Mapping, Sequence

from attrs import Factory, define, frozen

from ...protocol.messages import MEMBERS_MAX, Measured

REPORTS_HALF_LIFE = 2.0  # further reports after which one counts half
REPORT_S_MAX = 10.0  # busy seconds that a report counts at most: a long copy is not many rounds
# A report counts as no more seconds than its bytes take at this rate, 2 Mbit/s.
IDLE_BYTES_PER_S = 2.5e5
REPORT_ERROR = 0.1  # of a rate: how far one report is usually off, before a line's spread is known
ERROR_REPORTS = 1.0  # the reports as which that counts beside the line's own
DOUBTS = 2.0  # standard errors by which a rate is moved towards the median
WAITED = 1.25  # times the average: the best second of a line that waited for others
NEW_SHARE_MAX = 0.5  # of the contributors: with as many new ones lines count as equal
BUSY_S_MIN = 0.1  # a line busy for less has mostly waited for acknowledgements
DEFAULT_BYTES_PER_S = 2.5e6  # 20 Mbit/s, each way, while no line is known: a home's uplink
# Bounds on measured rates, so that no report can make a plan of infinities or zeros.
RATE_MIN_BYTES_PER_S = 1e3
RATE_MAX_BYTES_PER_S = 1e11
DELAY_S_MAX = 5.0  # one way; a longer delay that a peer reports counts as this


@frozen
class Bandwidth:
    """The rates at which a peer can send and receive."""

    up_bytes_per_s: float
    down_bytes_per_s: float


NO_CAP = Bandwidth(math.inf, math.inf)


@frozen
class LineCapacities:
    """The network, as far as a plan needs it.

    Attributes:
      rates: of every member that takes part. Those of contributors are alike, but for caps, while
        half of them or more are guessed.
      pair_limits: bytes per second from one peer to another, where a pair can do less than its
        members' own lines; 0: the first cannot send to the second at all.
      guessed: members whose rates are only assumed.
      cautious: rates that differ from each other only as far as it is certain; empty: as ``rates``.
      delay_s: the longest one-way delay between two members; 0: not measured.
    """

    rates: Mapping[str, Bandwidth]
    pair_limits: Mapping[tuple[str, str], float] = Factory(dict)
    guessed: frozenset[str] = frozenset()
    cautious: Mapping[str, Bandwidth] = Factory(dict)
    delay_s: float = 0.0


@define
class _Carried:
    """The rate of one direction: the weighted mean of its reports, of which old ones count less.

    ``busy_s`` is of all reports; ``weight`` is the sum of their weights, which are busy seconds at
    most. ``rates`` are weighted sums, and squares those of the squares.
    """

    busy_s: float = 0.0
    weight: float = 0.0
    weights_square: float = 0.0
    rates: float = 0.0
    rates_square: float = 0.0

    def add(self, carried_bytes: float, busy_s: float) -> None:
        """Add a report; one of less than ``BUSY_S_MIN`` is a part of one."""
        if busy_s <= 0 or carried_bytes <= 0:
            return
        weight = min(busy_s, REPORT_S_MAX, carried_bytes / IDLE_BYTES_PER_S)
        kept = 0.5 ** (min(1.0, weight / BUSY_S_MIN) / REPORTS_HALF_LIFE)
        rate = _clamp(carried_bytes / busy_s)
        self.busy_s += busy_s
        self.weight = kept * self.weight + weight
        self.weights_square = kept**2 * self.weights_square + weight**2
        self.rates = kept * self.rates + weight * rate
        self.rates_square = kept * self.rates_square + weight * rate**2

    def rate(self) -> float | None:
        """Return bytes per second, or None while too little is known."""
        return _clamp(self.rates / self.weight) if self.busy_s >= BUSY_S_MIN else None

    def error(self) -> float:
        """Return the standard error of the known rate.

        The variance of a report is the reports' own and the usual one, by how many reports count.
        """
        mean = self.rates / self.weight
        count = self.weight**2 / self.weights_square
        own = max(0.0, self.rates_square / self.weight - mean**2)
        usual = (REPORT_ERROR * mean) ** 2
        variance = (count * own + ERROR_REPORTS * usual) / (count - 1 + ERROR_REPORTS)
        return math.sqrt(variance / count)

    def cautious(self, usual: float) -> float:
        """Return the rate, moved towards the usual one as far as it may be off; 0.0: not known."""
        if (rate := self.rate()) is None:
            return 0.0
        doubt = DOUBTS * self.error()
        return rate + min(doubt, max(-doubt, usual - rate))


@define
class _Line:
    up: _Carried = Factory(_Carried)
    down: _Carried = Factory(_Carried)


class Bandwidths:
    """The lines of all peers, as the master has measured them, also of peers that are away.

    ``links`` are the rates from one peer (first key) to another, as last measured. A link shares
    its line with others, so this is no limit of the pair, and no plan depends on it.

    """

    def __init__(self) -> None:
        self._lines: dict[str, _Line] = {}
        self.links: dict[str, dict[str, float]] = {}
        self._delays_s: dict[str, dict[str, float]] = {}  # one way, as last reported

    def measured(self, peer: str, report: Measured) -> None:
        line = self._line(peer)
        best_bytes = report.best_bytes_per_s * report.sending_s
        waited = best_bytes >= WAITED * report.sent_bytes
        line.up.add(best_bytes if waited else report.sent_bytes, report.sending_s)
        line.down.add(report.received_bytes, report.receiving_s)
        self.links.pop(peer, None)
        self.links[peer] = {
            link.peer: link.sent_bytes / link.sending_s for link in report.links if link.sending_s
        }
        self._delays_s[peer] = {
            link.peer: min(DELAY_S_MAX, link.round_trip_s / 2) for link in report.links
        }

    def _line(self, peer: str) -> _Line:
        """Return a peer's line, as the most recently used; drop the least recent of too many."""
        line = self._lines[peer] = self._lines.pop(peer, _Line())
        if len(self._lines) > MEMBERS_MAX:
            oldest = next(iter(self._lines))
            del self._lines[oldest]
            self.links.pop(oldest, None)
            self._delays_s.pop(oldest, None)
        return line

    def known(self, peer: str) -> Bandwidth | None:
        line = self._lines.get(peer)
        up, down = (line.up.rate(), line.down.rate()) if line is not None else (None, None)
        if up is None:
            return None
        return Bandwidth(up, max(up, down or 0.0))

    def lines(
        self,
        peers: Sequence[str],
        caps: Mapping[str, Bandwidth],
        sending: Collection[str] = (),
    ) -> LineCapacities:
        """Return the lines of these peers, for a plan.

        ``caps`` are what owners have set. What is usual is the median of those that are
        ``sending``, if any of them is known.
        """
        known = {peer: rate for peer in peers if (rate := self.known(peer)) is not None}
        judged = [known[peer] for peer in sending if peer in known] or list(known.values())
        usual = Bandwidth(
            _median([rate.up_bytes_per_s for rate in judged]),
            _median([rate.down_bytes_per_s for rate in judged]),
        )
        guessed = frozenset(
            peer
            for peer in peers
            if peer not in known and caps.get(peer, NO_CAP).up_bytes_per_s >= usual.up_bytes_per_s
        )
        new = guessed.intersection(sending)
        cautious = {peer: self._cautious(peer, usual) for peer in known}
        if new:
            if len(new) < NEW_SHARE_MAX * len(sending):
                known |= dict.fromkeys(new, _slowest(judged))
            else:
                known = {peer: rate for peer, rate in known.items() if peer not in sending}
                cautious = {peer: cautious[peer] for peer in known}
        rates, doubted = (
            {peer: capped(each.get(peer, usual), caps.get(peer, NO_CAP)) for peer in peers}
            for each in (known, cautious)
        )
        return LineCapacities(
            rates,
            guessed=guessed,
            cautious=doubted,
            delay_s=self._delay_s(peers),
        )

    def _cautious(self, peer: str, usual: Bandwidth) -> Bandwidth:
        line = self._lines[peer]
        up = line.up.cautious(usual.up_bytes_per_s)
        return Bandwidth(up, max(up, line.down.cautious(usual.down_bytes_per_s)))

    def _delay_s(self, peers: Sequence[str]) -> float:
        here = set(peers)
        return max(
            (
                delay_s
                for peer in peers
                for other, delay_s in self._delays_s.get(peer, {}).items()
                if other in here
            ),
            default=0.0,
        )


def _slowest(rates: Sequence[Bandwidth]) -> Bandwidth:
    return Bandwidth(
        min(rate.up_bytes_per_s for rate in rates), min(rate.down_bytes_per_s for rate in rates)
    )


def capped(rate: Bandwidth, cap: Bandwidth) -> Bandwidth:
    return Bandwidth(
        min(_clamp(cap.up_bytes_per_s), rate.up_bytes_per_s),
        min(_clamp(cap.down_bytes_per_s), rate.down_bytes_per_s),
    )


def _median(rates: Sequence[float]) -> float:
    return statistics.median(rates) if rates else DEFAULT_BYTES_PER_S


def _clamp(rate: float) -> float:
    return min(RATE_MAX_BYTES_PER_S, max(RATE_MIN_BYTES_PER_S, rate))
