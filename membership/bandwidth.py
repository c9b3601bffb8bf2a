"""What the members' lines can carry, learned from what they did carry.

After every reduction a peer reports bytes and busy seconds (``Measured``), each way. Their sums,
in which the past fades, give a rate. Three things follow from how it is measured:

- A rate is what went through, so it is a lower bound. For the uplink it is a good one: a sender
  offers frames to everybody at once. What comes in may be slow because the senders are; so a peer
  counts as able to receive at least as fast as it sends, as nearly every line can. Without this a
  fast peer among slow ones would look slow for ever, and own little for ever.
- A line that was hardly busy says nothing: what the system buffers seems to be sent at once.
- A peer nobody has measured yet counts as the median of the others.

Before any reduction a probe (``probing``) gives a first idea of an uplink. Its receiver has timed it,
so it is believed however short it was; but it counts as little work, which rounds soon outweigh.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

from attrs import Factory, define, frozen

from ..protocol.messages import MEMBERS_MAX, Measured, Probed

BUSY_HALF_LIFE_S = 10.0  # busy seconds after which what a line carried before counts half
BUSY_S_MIN = 0.1  # a line busy for less has only filled the system's buffers
PROBE_COUNTS_S = 0.5  # busy seconds that a probe stands for
DEFAULT_BYTES_PER_S = 2.5e6  # 20 Mbit/s, each way, while nobody is known: a home's uplink
# Bounds on what is believed, so that no report can make a plan of infinities or zeros.
RATE_MIN_BYTES_PER_S = 1e3
RATE_MAX_BYTES_PER_S = 1e11


@frozen
class Bandwidth:
    """What a peer can send and receive, in bytes per second."""

    up_bytes_per_s: float
    down_bytes_per_s: float


NO_CAP = Bandwidth(math.inf, math.inf)


@frozen
class Lines:
    """What a plan has to know about the network.

    Attributes:
      rates: of every member that takes part.
      pair_limits: bytes per second from one peer to another, where a pair can do less than its
        members' own lines; 0: the first cannot send to the second at all.
      guessed: whose rates are only assumed.
      delay_s: the longest one-way delay between two members; 0 while nobody measures it.
    """

    rates: Mapping[str, Bandwidth]
    pair_limits: Mapping[tuple[str, str], float] = Factory(dict)
    guessed: frozenset[str] = frozenset()
    delay_s: float = 0.0


@define
class _Carried:
    """Bytes and busy seconds of one direction; the past fades."""

    carried_bytes: float = 0.0
    busy_s: float = 0.0

    def add(self, carried_bytes: float, busy_s: float) -> None:
        kept = 0.5 ** (busy_s / BUSY_HALF_LIFE_S)
        self.carried_bytes = kept * self.carried_bytes + carried_bytes
        self.busy_s = kept * self.busy_s + busy_s

    def rate(self) -> float | None:
        """Bytes per second; None while too little is known."""
        return _believable(self.carried_bytes / self.busy_s) if self.busy_s >= BUSY_S_MIN else None


@define
class _Line:
    up: _Carried = Factory(_Carried)
    down: _Carried = Factory(_Carried)


class Bandwidths:
    """The master's knowledge of all peers' lines, of those that are away too.

    Attributes:
      links: bytes per second from one peer (first key) to another, as last measured. What a link
        carried beside others is no limit of the pair, so no plan depends on it.
    """

    def __init__(self) -> None:
        self._lines: dict[str, _Line] = {}
        self.links: dict[str, dict[str, float]] = {}

    def measured(self, peer: str, report: Measured) -> None:
        """Add a peer's report to what is known of it."""
        line = self._line(peer)
        line.up.add(report.sent_bytes, report.sending_s)
        line.down.add(report.received_bytes, report.receiving_s)
        self.links.pop(peer, None)
        self.links[peer] = {
            link.peer: link.sent_bytes / link.sending_s for link in report.links if link.sending_s
        }

    def probed(self, report: Probed) -> None:
        """Add what a probe has found of its sender's uplink, if anything."""
        if report.carried_bytes and report.seconds:
            rate = _believable(report.carried_bytes / report.seconds)
            self._line(report.sender).up.add(rate * PROBE_COUNTS_S, PROBE_COUNTS_S)

    def _line(self, peer: str) -> _Line:
        """A peer's, which is now the one heard of last; the one not heard of for longest may go."""
        line = self._lines[peer] = self._lines.pop(peer, _Line())
        if len(self._lines) > MEMBERS_MAX:
            oldest = next(iter(self._lines))
            del self._lines[oldest]
            self.links.pop(oldest, None)
        return line

    def known(self, peer: str) -> Bandwidth | None:
        """What was measured of a peer; None if too little was."""
        line = self._lines.get(peer)
        up, down = (line.up.rate(), line.down.rate()) if line is not None else (None, None)
        if up is None:
            return None
        return Bandwidth(up, max(up, down or 0.0))

    def lines(self, peers: Sequence[str], caps: Mapping[str, Bandwidth]) -> Lines:
        """The lines of these peers, for a plan.

        Args:
          caps: what a peer's person allows it to carry; infinite: no cap that way; peers without
            any are left out.
        """
        known = {peer: rate for peer in peers if (rate := self.known(peer)) is not None}
        usual = Bandwidth(
            _median([rate.up_bytes_per_s for rate in known.values()]),
            _median([rate.down_bytes_per_s for rate in known.values()]),
        )
        rates = {}
        for peer in peers:
            rate = known.get(peer, usual)
            cap = caps.get(peer, NO_CAP)
            rates[peer] = Bandwidth(
                min(_believable(cap.up_bytes_per_s), rate.up_bytes_per_s),
                min(_believable(cap.down_bytes_per_s), rate.down_bytes_per_s),
            )
        return Lines(rates, guessed=frozenset(peers) - known.keys())


def _median(rates: Sequence[float]) -> float:
    return statistics.median(rates) if rates else DEFAULT_BYTES_PER_S


def _believable(rate: float) -> float:
    return min(RATE_MAX_BYTES_PER_S, max(RATE_MIN_BYTES_PER_S, rate))
