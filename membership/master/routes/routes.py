"""Routes: how two members get to each other where the view's rule does not do. Pure.

Every pair has a route that follows from the view (``protocol.routes``): of two that can be dialled the
later joiner dials, of others the one that cannot be dialled. It is taken to work until a member says
that it does not (``RouteWanted``); two that cannot be dialled have none to begin with. Then the master
arranges one after the other, best first, and tells both ends (``Route``), until one says that it works
(``RouteWorks``). After the last comes the first again, so nothing that passes is final.

    what follows from the view -> RouteWanted -> Route -> RouteWorks
                                      ^----------'

An end whose link breaks says so (``LinkBroken``), and when there is one again (``RouteWorks``). So the
master knows which pairs have a link, whatever the reason.

A pair without a route costs nobody the run: the plan has neither of the two own what the other needs,
and whoever only listens, or adds, without any owner to go to is left out of the round.

What is arranged lasts from the moment when both ends are members until one of them is removed, at the
ends likewise: there it ends with the view without the other one, or with the session. A new session is
another membership, though the number stays. That a pair had no link outlives a return, since it says
something about the lines: the pair is told a route at once, and counts as apart until that works.

Nothing here is lasting: a new master's views cut the old links, and who has none asks again.
"""

from __future__ import annotations

import hashlib
import hmac
import math
from collections import Counter
from collections.abc import Collection, Iterable, Sequence

from attrs import Factory, define, frozen

from ....protocol.addresses import Address
from ....protocol.messages import (
    LinkBroken,
    Relayed,
    RelayPair,
    Route,
    RouteKind,
    RouteWanted,
    RouteWorks,
    StopRelayingPair,
)
from ..state.context import Context, quoted
from ..state.master_effects import EventKind
from ..state.roster import Member
from .disputes import Disputes, Ends, ends_of

# A route that was arranged so long ago and still does not work is given up when somebody asks for
# another one, though it may never have heard of this one: its session broke.
ROUTE_AGAIN_S = 10.0
TRIED_MAX = 8  # words on routes that failed, kept for a pair
# That two who parted had no link is forgotten after so long: lines change, and most that were gone
# for an hour come from elsewhere.
APART_S = 3_600.0


@frozen
class CandidateRoute:
    """A route that a pair might take.

    Attributes:
      dials: who keeps the dialler's part.
      relay: who forwards; empty: nobody.
    """

    kind: RouteKind
    dials: str
    relay: str = ""


@define
class RoutedPair:
    """Two members that somebody has spoken of.

    Attributes:
      number: of the route of the moment; 0: what follows from the view.
      route: that route; None: what follows from the view.
      since_s: when it was arranged.
      works: they have a link, as far as is known.
      broken_s: when the link broke over which it worked; most are made again at once.
      without: ends that say that they have no link to the other one.
      ticket: of a relayed route; empty: the relay has it from another master, or there is none.
      failed: routes that did, since something worked or all had failed.
      tried: the same and why, since something worked last, for people.
    """

    number: int = 0
    route: CandidateRoute | None = None
    since_s: float = -math.inf
    works: bool = False
    broken_s: float = -math.inf
    without: set[str] = Factory(set)
    ticket: bytes = b""
    failed: list[CandidateRoute] = Factory(list)
    tried: list[str] = Factory(list)


class Routes:
    """Routes of all pairs, of which most need none arranged.

    Attributes:
      secret: tickets are made with it; whoever runs the master sets it to something random.
      disputes: pairs that failed each other in a round; they outlive removals and returns.
    """

    def __init__(self, context: Context) -> None:
        self.secret = b""
        self.disputes = Disputes(context.spec.membership.deadline_s)
        self._context = context
        self._pairs: dict[Ends, RoutedPair] = {}
        # Those that had no link when one of them was removed: when that was, and their last route.
        self._apart: dict[Ends, tuple[float, int]] = {}
        self._returned: dict[Ends, int] = {}  # of those: of whom both are members again

    # ------------------------------------------------------------ facts

    def wanted(self, member: Member, message: RouteWanted) -> None:
        """A member has no link to another one and cannot get any: arrange the next route."""
        other = self._context.roster.get(message.peer)
        if other is None or other is member or member.relay or other.relay:
            return  # it has not heard yet that the other one is gone
        pair = self._pairs.setdefault(ends_of(member.peer, other.peer), RoutedPair())
        fresh = self._context.now_s < pair.since_s + ROUTE_AGAIN_S
        if message.route < pair.number and fresh:
            return  # another one is arranged already
        pair.works, pair.broken_s = False, -math.inf
        pair.without.add(member.peer)
        failed = pair.route or self._default(member, other)
        if failed.kind is RouteKind.DIRECT or not message.worked:  # else it may again
            pair.failed.append(failed)
        said = "" if pair.route is None else f" ({self._said(pair.route)})"
        pair.tried = [*pair.tried, f"{quoted(message.reason)}{said}"][-TRIED_MAX:]
        self._arrange(member, other, pair, max(pair.number, message.route) + 1)

    def broken(self, member: Member, message: LinkBroken) -> None:
        """A member has lost its link to another one; it says when there is one again."""
        other = self._context.roster.get(message.peer)
        if other is None or other is member or member.relay or other.relay:
            return
        pair = self._pairs.setdefault(ends_of(member.peer, other.peer), RoutedPair(works=True))
        if pair.works:
            pair.works, pair.broken_s = False, self._context.now_s
        pair.without.add(member.peer)

    def works(self, member: Member, message: RouteWorks) -> None:
        """A pair has a link over a route that was arranged, or that was in doubt."""
        other = self._context.roster.get(message.peer)
        if other is None or other is member:
            return
        pair = self._pairs.get(ends_of(member.peer, other.peer))
        if pair is None or message.route != pair.number:
            return  # that one was given up meanwhile; the next one is on its way
        if not pair.works and pair.route is not None:
            text = f"{self._names(member, other)} have a link {self._said(pair.route)}"
            self._context.announce(EventKind.ROUTE, member.peer, text)
        pair.works, pair.failed, pair.tried = True, [], []
        pair.without.clear()

    def attached(self, peer: str) -> None:
        """A member has come, perhaps back: to whom had it no link when it was here?"""
        now_s, roster = self._context.now_s, self._context.roster
        self._apart = {e: last for e, last in self._apart.items() if last[0] > now_s - APART_S}
        for ends in [e for e in self._apart if peer in e and e[0] in roster and e[1] in roster]:
            self._returned[ends] = self._apart.pop(ends)[1]

    def arrange_again(self) -> None:
        """Tell those a route that had none before one of them returned; both have the view by now."""
        returned, self._returned = self._returned, {}
        for ends, number in returned.items():
            one, other = (self._context.roster.get(peer) for peer in ends)
            if one is not None and other is not None:
                self._pairs[ends] = pair = RoutedPair(tried=["they had no link before"])
                self._arrange(one, other, pair, number + 1)

    def removed(self, peer: str) -> None:
        """Whoever comes again begins anew, with everybody."""
        for ends in [ends for ends in self._pairs if peer in ends]:
            pair = self._pairs.pop(ends)
            self._leave(pair)
            if pair.tried and not pair.works:
                self._apart[ends] = self._context.now_s, pair.number
        lost = [e for e, pair in self._pairs.items() if pair.route and pair.route.relay == peer]
        for ends in lost:
            pair, roster = self._pairs[ends], self._context.roster
            pair.works, pair.ticket = False, b""
            pair.tried = [f"its relay {self._context.name(peer)} is gone"]
            self._arrange(roster.members[ends[0]], roster.members[ends[1]], pair, pair.number + 1)

    def relayed(self, member: Member, message: Relayed) -> None:
        """A relay says what it forwards."""
        member.relayed = message

    def classed(self, member: Member) -> None:
        """It can be dialled now, or no longer: what was arranged for another case is void."""
        for ends in [ends for ends, pair in self._pairs.items() if member.peer in ends]:
            if not self._pairs[ends].works:
                self._pairs[ends].since_s, self._pairs[ends].failed = -math.inf, []

    # ------------------------------------------------------------ questions

    def connected(self, one: str, other: str) -> bool:
        """Whether two members have a link that is of use to a round, as far as is known."""
        apart = self.disputes.apart(one, other, self._context.now_s)
        return not apart and self._has_route(one, other)

    def _has_route(self, one: str, other: str) -> bool:
        pair = self._pairs.get(ends_of(one, other))
        if pair is not None:
            again_s = pair.broken_s + self._context.spec.settle_s
            return pair.works or self._context.now_s < again_s
        members = self._context.roster
        a, b = members.get(one), members.get(other)
        return a is None or b is None or a.reachable or b.reachable

    def without(self, peer: str) -> set[str]:
        """Members that say that they have no link to this one."""
        found: set[str] = set()
        for ends, pair in self._pairs.items():
            if peer in ends:
                found |= pair.without - {peer}
        return found

    def linked(self, one: str, other: str) -> bool:
        """Whether two members have a link that would break if one of them died."""
        members = self._context.roster
        a, b = members.get(one), members.get(other)
        if a is None or b is None or a.relay or b.relay:
            return False
        return self._has_route(one, other)

    def limits(self, peers: Sequence[str]) -> dict[tuple[str, str], float]:
        """What a plan must know of pairs: bytes per second each way; 0: they have no link."""
        inside = set(peers)
        found: dict[tuple[str, str], float] = {}
        carried = self._carried()
        for ends in self._doubtful(inside):
            if not self.connected(*ends):
                found[ends] = found[ends[1], ends[0]] = 0.0
            elif (route := self._pairs[ends].route) is not None and route.relay:
                rate = self._share(route.relay, carried[route.relay])
                found[ends] = found[ends[1], ends[0]] = rate
        return found

    def _carried(self) -> Counter[str]:
        """By relay: for how many pairs it forwards."""
        return Counter(p.route.relay for p in self._pairs.values() if p.route and p.route.relay)

    def _share(self, relay: str, pair_count: int) -> float:
        """What each way of each of a relay's pairs may count on, in bytes per second."""
        member = self._context.roster.get(relay)
        if member is None or member.offer is None:
            return 0.0
        return member.offer.bytes_per_s / (2 * max(1, pair_count))

    def _doubtful(self, inside: Collection[str]) -> Iterable[Ends]:
        """Pairs of these that may have no link."""
        roster = self._context.roster
        yield from (ends for ends in self._pairs if ends[0] in inside and ends[1] in inside)
        for ends in self.disputes.pairs(inside, self._context.now_s):
            if ends not in self._pairs:
                yield ends
        outbound = sorted(m.peer for m in roster if not m.reachable and m.peer in inside)
        for at, one in enumerate(outbound):
            for other in outbound[at + 1 :]:
                if (one, other) not in self._pairs:
                    yield one, other

    def together(
        self, adding: Sequence[str], receivers: Sequence[str]
    ) -> tuple[list[str], list[str]]:
        """Leave out as few as need be so that there is an owner that all the others can reach.

        Args:
          adding: contributors, in order of member number.
          receivers: everybody who is to get the result, contributors too.

        Returns:
          Those of both who are left, in the same order. Who has fallen out with many others goes
          first. Then as few contributors go as possible, and of equal choices as few listeners: so
          whoever says of itself that it reaches nobody goes alone.
        """
        out = set(self.disputes.quarrelsome(adding, self._context.now_s))
        missing = self._missing([peer for peer in receivers if peer not in out])
        contributing = [peer for peer in adding if peer not in out]
        if contributing:
            adders = set(contributing)
            out |= min(
                (missing.get(peer, set()) for peer in contributing),
                key=lambda lost: (len(lost & adders), len(lost)),
            )
        return (
            [peer for peer in adding if peer not in out],
            [peer for peer in receivers if peer not in out],
        )

    def _missing(self, peers: Sequence[str]) -> dict[str, set[str]]:
        missing: dict[str, set[str]] = {}
        for one, other in self._doubtful(set(peers)):
            if not self.connected(one, other):
                missing.setdefault(one, set()).add(other)
                missing.setdefault(other, set()).add(one)
        return missing

    def apart(self, peers: Sequence[str]) -> set[str]:
        """Those that have no link to another one of these."""
        return set(self._missing(peers))

    def arranged(self) -> list[tuple[Ends, RoutedPair]]:
        """Return the pairs whose route was arranged, or is wanted."""
        return [
            (ends, pair)
            for ends, pair in self._pairs.items()
            if pair.route is not None or not pair.works
        ]

    # ------------------------------------------------------------ arranging

    def _arrange(self, one: Member, other: Member, pair: RoutedPair, number: int) -> None:
        candidates = self._candidates(one, other, pair)
        self._leave(pair)
        if not candidates:
            pair.route, pair.number, pair.since_s = None, 0, self._context.now_s
            return
        left = [candidate for candidate in candidates if candidate not in pair.failed]
        if not left:
            pair.failed, left = [], candidates
        pair.route = left[0]
        pair.number, pair.since_s = number, self._context.now_s
        relays: tuple[str, ...] = ()
        if pair.route.relay:
            pair.ticket = self._ticket(one, other, number)
            relays = self._context.roster.members[pair.route.relay].addresses
            self._context.send(pair.route.relay, RelayPair(pair.ticket, (one.peer, other.peer)))
        punched = pair.route.kind is RouteKind.PUNCHED
        for end, far in ((one, other), (other, one)):
            self._context.send(
                end.peer,
                Route(
                    far.peer,
                    number,
                    pair.route.kind,
                    pair.route.dials == end.peer,
                    pair.route.relay,
                    (str(Address(far.host, far.port)),) if punched else relays,
                    pair.ticket,
                    end.port if punched else 0,
                ),
            )

    def _leave(self, pair: RoutedPair) -> None:
        """A route is given up: its relay need not keep its ticket."""
        if pair.ticket and pair.route is not None:
            self._context.send(pair.route.relay, StopRelayingPair(pair.ticket))
        pair.ticket = b""

    def _ticket(self, one: Member, other: Member, number: int) -> bytes:
        """Nobody else can know it; each is for one pair and one route."""
        term = self._context.term
        what = f"{term} {number} {one.peer} {one.incarnation} {other.peer} {other.incarnation}"
        return hmac.new(self.secret, what.encode(), hashlib.sha256).digest()

    def _relays(self, one: Member, other: Member, pair: RoutedPair) -> list[Member]:
        """Those that would forward for this pair, the least busy first."""
        carried = self._carried()
        mine = pair.route.relay if pair.route is not None else ""
        found = [
            member
            for member in self._context.roster
            if member.offer is not None
            and member.reachable
            and not member.draining
            and member is not one
            and member is not other
            and (member.peer == mine or carried[member.peer] < member.offer.pairs)
            and not (member.relayed is not None and member.relayed.spent)
        ]
        return sorted(found, key=lambda m: (-self._share(m.peer, carried[m.peer] + 1), m.number))

    def _candidates(self, one: Member, other: Member, pair: RoutedPair) -> list[CandidateRoute]:
        """All routes that the two might take, the best first."""
        first, later = sorted((one, other), key=lambda member: member.number)
        found = []
        if first.reachable == later.reachable:
            neighbours = first.host != "" and first.host == later.host
            if first.reachable or neighbours:  # behind one router they may reach each other
                found += [
                    CandidateRoute(RouteKind.DIRECT, later.peer),
                    CandidateRoute(RouteKind.DIRECT, first.peer),
                ]
        else:
            caller = later if first.reachable else first
            found.append(CandidateRoute(RouteKind.DIRECT, caller.peer))
        same_family = (":" in first.host) == (":" in later.host)
        if first.port and later.port and first.host and later.host and same_family:
            found.append(CandidateRoute(RouteKind.PUNCHED, later.peer))
        found += [
            CandidateRoute(RouteKind.RELAYED, later.peer, relay.peer)
            for relay in self._relays(one, other, pair)
        ]
        return found

    def _default(self, one: Member, other: Member) -> CandidateRoute:
        first, later = sorted((one, other), key=lambda member: member.number)
        caller = first if later.reachable and not first.reachable else later
        return CandidateRoute(RouteKind.DIRECT, caller.peer)

    def word(self, route: CandidateRoute) -> str:
        """Return the route's kind, for people."""
        if route.kind is RouteKind.DIRECT:
            return f"direct, {self._context.name(route.dials)} dials"
        return str(route.kind.value)

    def _said(self, route: CandidateRoute) -> str:
        if route.kind is RouteKind.DIRECT:
            return f"that {self._context.name(route.dials)} dials"
        if route.kind is RouteKind.PUNCHED:
            return "through both their routers"
        return f"by the relay {self._context.name(route.relay)}"

    def _names(self, one: Member, other: Member) -> str:
        return f"{self._context.name(one.peer)} and {self._context.name(other.peer)}"
