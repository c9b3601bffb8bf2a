"""Bandwidths of the members' lines, estimated from what the lines carried.

After every reduction a peer reports bytes and busy seconds (``Measured``), each way. Their sums, with
exponential decay, give a rate. Three things follow from how it is measured:

- A rate is what went through, so it is a lower bound. For the uplink it is a good one: a sender
  offers frames to all receivers at once. Bytes may arrive slowly because the senders are slow. So a
  peer counts as able to receive at least as fast as it sends, as nearly every line can. Otherwise a
  fast peer among slow ones would look slow for ever, and own little for ever.
- A line that was hardly busy says nothing. Sent bytes count as under way until the receiver has
  acknowledged them, some tenths of a second later at most; this is the same for all peers.
- A peer that was not measured yet counts as the median of the measured peers.

Members behind one line are a *site*. Bytes that leave the site are counted separately, over the
seconds in which the member sent at all, and the line's rate is the sum over its members: they send at
the same time, in stars as in trees, and bytes within the site take little time. The rate is a little
too low where members do not send at the same time, and for some rounds too high when the work within
a site is divided differently. Received bytes include those from the site. Where the downlink is the
bottleneck, the line may therefore look up to ``m`` times too wide with ``m`` members, and a tree that
would be faster is not planned.

Before any reduction a probe (``probing``) gives a first estimate of an uplink. The receiver has timed
it, so it counts however short it was; its weight is small, so that rounds soon outweigh it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Mapping, Sequence

from attrs import Factory, define, frozen

from ...protocol.messages import MEMBERS_MAX, Measured, Probed

BUSY_HALF_LIFE_S = 10.0  # busy seconds after which an earlier measurement counts half
BUSY_S_MIN = 0.1  # a line busy for less has mostly waited for acknowledgements
INNER_TIMES = 10.0  # rate to members of the same site, if unknown, by the rate to the outside
PROBE_COUNTS_S = 0.5  # busy seconds that a probe stands for
DEFAULT_BYTES_PER_S = 2.5e6  # 20 Mbit/s, each way, while no line is known: a home's uplink
# Bounds on measured rates, so that no report can make a plan of infinities or zeros.
RATE_MIN_BYTES_PER_S = 1e3
RATE_MAX_BYTES_PER_S = 1e11


@frozen
class Bandwidth:
    """The rates at which a peer can send and receive."""

    up_bytes_per_s: float
    down_bytes_per_s: float


NO_CAP = Bandwidth(math.inf, math.inf)


@frozen
class SiteLine:
    """Members behind one line.

    Attributes:
      members: at least two.
      line: the shared line to the outside.
      inner: each member's own rate, within the site and to the outside.
    """

    members: tuple[str, ...]
    line: Bandwidth
    inner: Mapping[str, Bandwidth]


@frozen
class LineCapacities:
    """The network, as far as a plan needs it.

    Attributes:
      rates: of every member that takes part.
      pair_limits: bytes per second from one peer to another, where a pair can do less than its
        members' own lines; 0: the first cannot send to the second at all.
      guessed: members whose rates are only assumed.
      delay_s: the longest one-way delay between two members; 0: not measured.
      sites: those whose lines are known; no member is in two of them.
    """

    rates: Mapping[str, Bandwidth]
    pair_limits: Mapping[tuple[str, str], float] = Factory(dict)
    guessed: frozenset[str] = frozenset()
    delay_s: float = 0.0
    sites: tuple[SiteLine, ...] = ()


@define
class _Carried:
    """Bytes and busy seconds of one direction, with exponential decay."""

    carried_bytes: float = 0.0
    busy_s: float = 0.0

    def add(self, carried_bytes: float, busy_s: float) -> None:
        kept = 0.5 ** (busy_s / BUSY_HALF_LIFE_S)
        self.carried_bytes = kept * self.carried_bytes + carried_bytes
        self.busy_s = kept * self.busy_s + busy_s

    def rate(self) -> float | None:
        """Return bytes per second, or None while too little is known."""
        return _clamp(self.carried_bytes / self.busy_s) if self.busy_s >= BUSY_S_MIN else None


@define
class _Line:
    up: _Carried = Factory(_Carried)
    out: _Carried = Factory(_Carried)  # of these, the bytes that left the site
    down: _Carried = Factory(_Carried)


class Bandwidths:
    """The lines of all peers, as the master has measured them, also of peers that are away.

    Attributes:
      links: bytes per second from one peer (first key) to another, as last measured. A link shares
        its line with others, so this is no limit of the pair, and no plan depends on it.
    """

    def __init__(self) -> None:
        self._lines: dict[str, _Line] = {}
        self.links: dict[str, dict[str, float]] = {}

    def measured(self, peer: str, report: Measured, mates: Collection[str] = ()) -> None:
        """Add a peer's report; ``mates``: the other members of its site."""
        line = self._line(peer)
        inside_bytes = sum(link.sent_bytes for link in report.links if link.peer in mates)
        line.up.add(report.sent_bytes, report.sending_s)
        line.out.add(max(0, report.sent_bytes - inside_bytes), report.sending_s)
        line.down.add(report.received_bytes, report.receiving_s)
        self.links.pop(peer, None)
        self.links[peer] = {
            link.peer: link.sent_bytes / link.sending_s for link in report.links if link.sending_s
        }

    def probed(self, report: Probed) -> None:
        """Add a probe's measurement of its sender's uplink, if there is one."""
        if report.carried_bytes and report.seconds:
            rate = _clamp(report.carried_bytes / report.seconds)
            line = self._line(report.sender)
            for carried in (line.up, line.out):
                carried.add(rate * PROBE_COUNTS_S, PROBE_COUNTS_S)

    def _line(self, peer: str) -> _Line:
        """Return a peer's line, as the most recently used; of too many the least recent is dropped."""
        line = self._lines[peer] = self._lines.pop(peer, _Line())
        if len(self._lines) > MEMBERS_MAX:
            oldest = next(iter(self._lines))
            del self._lines[oldest]
            self.links.pop(oldest, None)
        return line

    def known(self, peer: str) -> Bandwidth | None:
        """Return a peer's measured bandwidth, or None if too little was measured."""
        line = self._lines.get(peer)
        up, down = (line.up.rate(), line.down.rate()) if line is not None else (None, None)
        if up is None:
            return None
        return Bandwidth(up, max(up, down or 0.0))

    def lines(
        self,
        peers: Sequence[str],
        caps: Mapping[str, Bandwidth],
        sites: Sequence[tuple[str, ...]] = (),
        sending: Collection[str] = (),
    ) -> LineCapacities:
        """Return the lines of these peers, for a plan.

        Args:
          caps: the bandwidth limit that a machine's owner has set, infinite where there is none.
            Peers without limits are left out.
          sites: groups of these peers that share a line each.
          sending: the peers that contribute. A site without any has no known line.
        """
        known = {peer: rate for peer in peers if (rate := self.known(peer)) is not None}
        usual = Bandwidth(
            _median([rate.up_bytes_per_s for rate in known.values()]),
            _median([rate.down_bytes_per_s for rate in known.values()]),
        )
        rates = {}
        for peer in peers:
            rate = known.get(peer, usual)
            rates[peer] = _capped(rate, caps.get(peer, NO_CAP))
        return LineCapacities(
            rates,
            guessed=frozenset(peers) - known.keys(),
            sites=tuple(
                line
                for site in sites
                if (line := self._site_line(site, sending, rates, caps)) is not None
            ),
        )

    def _site_line(
        self,
        members: tuple[str, ...],
        sending: Collection[str],
        rates: Mapping[str, Bandwidth],
        caps: Mapping[str, Bandwidth],
    ) -> SiteLine | None:
        """Return a site's line, or None unless some member sends and all that send are measured.

        A member that only receives counts by what it received: a probe of its uplink measures the
        whole line, while the other members' rates are shares of it.
        """
        senders = [peer for peer in members if peer in sending]
        if not senders or any(self.known(peer) is None for peer in senders):
            return None
        up = down = 0.0
        inner = {}
        for peer in members:
            cap, line = caps.get(peer, NO_CAP), self._lines.get(peer, _Line())
            out_rate = line.out.rate() or rates[peer].up_bytes_per_s
            if peer in senders:
                up += min(out_rate, _clamp(cap.up_bytes_per_s))
                down += rates[peer].down_bytes_per_s
            else:
                down += min(line.down.rate() or 0.0, _clamp(cap.down_bytes_per_s))
            mates = [mate for mate in members if mate != peer]
            sent = max(self.links.get(peer, {}).get(mate, 0.0) for mate in mates)
            taken = max(self.links.get(mate, {}).get(peer, 0.0) for mate in mates)
            within = Bandwidth(
                max(out_rate, _clamp(sent or INNER_TIMES * out_rate)),
                max(out_rate, _clamp(taken or INNER_TIMES * out_rate)),
            )
            inner[peer] = _capped(within, cap)
        return SiteLine(members, Bandwidth(up, down), inner)


def _capped(rate: Bandwidth, cap: Bandwidth) -> Bandwidth:
    return Bandwidth(
        min(_clamp(cap.up_bytes_per_s), rate.up_bytes_per_s),
        min(_clamp(cap.down_bytes_per_s), rate.down_bytes_per_s),
    )


def _median(rates: Sequence[float]) -> float:
    return statistics.median(rates) if rates else DEFAULT_BYTES_PER_S


def _clamp(rate: float) -> float:
    return min(RATE_MAX_BYTES_PER_S, max(RATE_MIN_BYTES_PER_S, rate))
