"""Routes between two members whose default route fails. Pure.

Every pair has a default route that follows from the view (``protocol.dial_order``): of two members
that can be dialled the later joiner dials, otherwise the member that cannot be dialled. The route
is taken to work until a member reports that it does not (``RouteWanted``); two members that cannot
be dialled have none to begin with. Then the master arranges one route after the other, best first,
and tells both ends (``Route``), until an end reports that it works (``RouteWorks``). After the last
route comes the first again, so no temporary fault is final.

    default route -> RouteWanted -> Route -> RouteWorks
                          ^-----------'

An end reports when its link breaks (``LinkBroken``), and when it has a link again (``RouteWorks``).
So the master knows which pairs have a link, whatever the reason.

A pair without a route does not stop the run: in a plan neither of the two owns what the other
needs, and a member that can reach no owner is left out of the round.

An arranged route lasts while both ends are members. At the ends it lasts until a view without the
other end, or until the session ends. A new session is a new membership, though the number stays.
The fact that a pair had no link outlives a return, since it says something about the lines: the
pair is told a route at once, and counts as apart until that works.

Nothing here is stored: a new master's views cut the old links, and members without a link ask
again.
"""

from __future__ import annotations

import hashlib
import hmac
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence

from attrs import Factory, define, frozen

from ....protocol import messages as m
from ....protocol.addresses import Address, is_public
from ...shared.event_kind import EventKind
from ..state.context import Context, quoted
from ..state.roster import Member
from .disputes import Disputes, Ends, ends_of

# A route that was arranged this long ago and does not work is replaced when an end asks for another
# route, even if that end has never heard of this one: its session may have broken.
ROUTE_AGAIN_S = 10.0
TRIED_MAX = 8  # texts on failed routes, kept per pair
# The fact that a pair had no link is forgotten after this time: lines change, and most members that
# were gone for an hour return from another place.
APART_S = 3_600.0


@frozen
class CandidateRoute:
    """A route that a pair might take."""

    kind: m.RouteKind
    dials: str  # the peer that dials
    relay: str = ""  # the peer that forwards; empty: none


@define
class RoutedPair:
    """Two members of which one has reported about their link."""

    number: int = 0  # of the current route; 0: the default one
    route: CandidateRoute | None = None  # the current route; None: the default one
    since_s: float = -math.inf  # when it was arranged
    works: bool = False  # they have a link, as far as is known
    broken_s: float = -math.inf  # when the working link broke; most links are made again at once
    without: set[str] = Factory(set)  # ends that report that they have no link to the other one
    ticket: bytes = b""  # of a relayed route; empty: there is none
    # Routes that failed since one worked or all had failed.
    failed: list[CandidateRoute] = Factory(list)
    tried: list[str] = Factory(list)  # texts on routes that failed since one worked, for people


class Routes:
    """Routes of all pairs; most pairs keep their default route."""

    def __init__(self, context: Context) -> None:
        # Pairs that failed each other in a round; they outlive removals and returns.
        self.disputes = Disputes(context.spec.membership.deadline_s)
        self._context = context
        self._pairs: dict[Ends, RoutedPair] = {}
        # Pairs that had no link when one of them was removed: the time of that, and their last
        # route.
        self._apart: dict[Ends, tuple[float, int]] = {}
        self._returned: dict[Ends, int] = {}  # such pairs whose both ends are members again
        # Pairs with a relay of which one end has become easier to dial.
        self._hopeful: set[Ends] = set()

    # ------------------------------------------------------------ facts

    def wanted(self, member: Member, message: m.RouteWanted) -> None:
        """Arrange the next route for a member that cannot get a link to another one."""
        other = self._context.roster.get(message.peer)
        if other is None or other is member or member.relay or other.relay:
            return  # the member has not heard yet that the other one is gone
        pair = self._pairs.setdefault(ends_of(member.peer, other.peer), RoutedPair())
        fresh = self._context.now_s < pair.since_s + ROUTE_AGAIN_S
        if message.route < pair.number and fresh:
            return  # another route is arranged already
        pair.works, pair.broken_s = False, -math.inf
        pair.without.add(member.peer)
        failed = pair.route or self._default(member, other)
        if failed.kind is m.RouteKind.DIRECT or not message.worked:  # else it may work again
            pair.failed.append(failed)
        over = "" if pair.route is None else f" ({self._format_route(pair.route)})"
        pair.tried = [*pair.tried, f"{quoted(message.reason)}{over}"][-TRIED_MAX:]
        self._arrange(member, other, pair, max(pair.number, message.route) + 1)

    def broken(self, member: Member, message: m.LinkBroken) -> None:
        """Note that a member has lost its link to another one; it reports when it has one again."""
        other = self._context.roster.get(message.peer)
        if other is None or other is member or member.relay or other.relay:
            return
        pair = self._pairs.setdefault(ends_of(member.peer, other.peer), RoutedPair(works=True))
        if pair.works:
            pair.works, pair.broken_s = False, self._context.now_s
        pair.without.add(member.peer)

    def works(self, member: Member, message: m.RouteWorks) -> None:
        """Note that a pair has a link over an arranged or a doubtful route."""
        other = self._context.roster.get(message.peer)
        if other is None or other is member:
            return
        pair = self._pairs.get(ends_of(member.peer, other.peer))
        if pair is None or message.route != pair.number:
            return  # that route was replaced meanwhile; the ends are being told the next one
        if not pair.works and pair.route is not None:
            text = f"{self._names(member, other)} have a link {self._format_route(pair.route)}"
            self._context.announce(EventKind.ROUTE, member.peer, text)
        pair.works, pair.failed, pair.tried = True, [], []
        pair.without.clear()

    def attached(self, peer: str) -> None:
        """Find the members to which a returning member had no link before."""
        now_s, roster = self._context.now_s, self._context.roster
        self._apart = {e: last for e, last in self._apart.items() if last[0] > now_s - APART_S}
        for ends in [e for e in self._apart if peer in e and e[0] in roster and e[1] in roster]:
            self._returned[ends] = self._apart.pop(ends)[1]

    def arrange_again(self) -> None:
        """Tell pairs without a link before one end returned a route; both have the view by now."""
        returned, self._returned = self._returned, {}
        for ends, number in returned.items():
            one, other = (self._context.roster.get(peer) for peer in ends)
            if one is not None and other is not None:
                self._pairs[ends] = pair = RoutedPair(tried=["they had no link before"])
                self._arrange(one, other, pair, number + 1)

    def removed(self, peer: str) -> None:
        """Forget the routes of a removed member, and replace those that it relayed."""
        self._hopeful = {ends for ends in self._hopeful if peer not in ends}
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

    def relayed(self, member: Member, message: m.Relayed) -> None:
        """Take a relay's report of what it forwards."""
        member.connection.relayed = message

    def classed(self, member: Member) -> None:
        """Drop what was tried for a member that can be dialled now, or no longer, or elsewhere."""
        for ends in [ends for ends, pair in self._pairs.items() if member.peer in ends]:
            pair = self._pairs[ends]
            if not pair.works:
                pair.since_s, pair.failed = -math.inf, []
            elif pair.route is not None and pair.route.kind is m.RouteKind.RELAYED:
                self._hopeful.add(ends)

    def go_direct(self, busy: Callable[[], Collection[str]]) -> None:
        """Let pairs try to do without their relay, since an end may be dialled now.

        Args:
          busy: returns the members that use their links now; their pairs wait.
        """
        if not self._hopeful:
            return
        using = set(busy())
        for ends in [ends for ends in self._hopeful if not using & set(ends)]:
            self._hopeful.discard(ends)
            one, other = (self._context.roster.get(peer) for peer in ends)
            pair = self._pairs.get(ends)
            if one is None or other is None or pair is None or pair.route is None:
                continue
            if self._candidates(one, other, pair)[0].kind is m.RouteKind.DIRECT and pair.works:
                pair.works, pair.broken_s, pair.failed = False, self._context.now_s, []
                self._arrange(one, other, pair, pair.number + 1)

    # ------------------------------------------------------------ questions

    def connected(self, one: str, other: str) -> bool:
        """Return whether two members have a link that a round can use, as far as is known."""
        apart = self.disputes.apart(one, other, self._context.now_s)
        return not apart and self._has_route(one, other)

    def may_copy(self, one: str, other: str) -> bool:
        """Return whether one of two members can copy state from the other, as far as is known."""
        fresh = self.disputes.fresh(one, other, self._context.now_s)
        return not fresh and self._has_route(one, other)

    def _has_route(self, one: str, other: str) -> bool:
        pair = self._pairs.get(ends_of(one, other))
        if pair is not None:
            again_s = pair.broken_s + self._context.spec.settle_s
            return pair.works or self._context.now_s < again_s
        members = self._context.roster
        a, b = members.get(one), members.get(other)
        return a is None or b is None or a.connection.reachable or b.connection.reachable

    def without(self, peer: str) -> set[str]:
        """Return the members that report that they have no link to this one."""
        found: set[str] = set()
        for ends, pair in self._pairs.items():
            if peer in ends:
                found |= pair.without - {peer}
        return found

    def linked(self, one: str, other: str) -> bool:
        """Return whether two members have a link that would break if one of them died."""
        members = self._context.roster
        a, b = members.get(one), members.get(other)
        if a is None or b is None or a.relay or b.relay:
            return False
        return self._has_route(one, other)

    def limits(self, peers: Sequence[str]) -> dict[tuple[str, str], float]:
        """Return the limits of pairs, in bytes per second each way; 0: the pair has no link."""
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
        """Return the number of pairs that each relay forwards for."""
        return Counter(p.route.relay for p in self._pairs.values() if p.route and p.route.relay)

    def _share(self, relay: str, pair_count: int) -> float:
        """Return the bytes per second that each pair of a relay can count on, each way."""
        member = self._context.roster.get(relay)
        if member is None or member.connection.offer is None:
            return 0.0
        return member.connection.offer.bytes_per_s / (2 * max(1, pair_count))

    def _doubtful(self, inside: Collection[str]) -> Iterable[Ends]:
        """Yield the pairs among these peers that may have no link."""
        roster = self._context.roster
        yield from (ends for ends in self._pairs if ends[0] in inside and ends[1] in inside)
        for ends in self.disputes.pairs(inside, self._context.now_s):
            if ends not in self._pairs:
                yield ends
        outbound = sorted(
            each.peer for each in roster if not each.connection.reachable and each.peer in inside
        )
        for at, one in enumerate(outbound):
            for other in outbound[at + 1 :]:
                if (one, other) not in self._pairs:
                    yield one, other

    def together(
        self, adding: Sequence[str], receivers: Sequence[str]
    ) -> tuple[list[str], list[str]]:
        """Leave out as few members as possible so that all others can reach one owner.

        Args:
          adding: contributors, in order of member number.
          receivers: all members that are to get the result, contributors too.

        Returns:
          The contributors and the receivers that are left, in the same order. Contributors in
          dispute with many others are left out first; then as few contributors as possible, and of
          equal choices as few other receivers. So a member that reports to reach no other member is
          left out alone.
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
        """Return the peers among these that each of them has no link to."""
        missing: dict[str, set[str]] = {}
        for one, other in self._doubtful(set(peers)):
            if not self.connected(one, other):
                missing.setdefault(one, set()).add(other)
                missing.setdefault(other, set()).add(one)
        return missing

    def apart(self, peers: Sequence[str]) -> set[str]:
        """Return the peers that have no link to another one of these."""
        return set(self._missing(peers))

    def arranged(self) -> list[tuple[Ends, RoutedPair]]:
        """Return the pairs whose route was arranged, or is wanted."""
        return [
            (ends, pair)
            for ends, pair in self._pairs.items()
            if pair.route is not None or not pair.works
        ]

    # ------------------------------------------------------------ arranging a route

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
            relays = self._context.roster.members[pair.route.relay].connection.addresses
            self._context.send(pair.route.relay, m.RelayPair(pair.ticket, (one.peer, other.peer)))
        punched = pair.route.kind is m.RouteKind.PUNCHED
        for end, far in ((one, other), (other, one)):
            self._context.send(
                end.peer,
                m.Route(
                    far.peer,
                    number,
                    pair.route.kind,
                    pair.route.dials == end.peer,
                    pair.route.relay,
                    (str(Address(self._seen_by(end, far), far.connection.port)),)
                    if punched
                    else relays,
                    pair.ticket,
                    end.connection.port if punched else 0,
                ),
            )

    def _leave(self, pair: RoutedPair) -> None:
        """Let the relay of a route that is given up drop its ticket."""
        if pair.ticket and pair.route is not None:
            self._context.send(pair.route.relay, m.StopRelayingPair(pair.ticket))
        pair.ticket = b""

    def _ticket(self, one: Member, other: Member, number: int) -> bytes:
        """Make the ticket of one pair and one route; no peer can guess it."""
        term = self._context.term
        what = f"{term} {number} {one.peer} {one.incarnation} {other.peer} {other.incarnation}"
        return hmac.new(self._context.lot, what.encode(), hashlib.sha256).digest()

    def _relays(self, one: Member, other: Member, pair: RoutedPair) -> list[Member]:
        """Return the relays that would forward for this pair, the least busy first."""
        carried = self._carried()
        mine = pair.route.relay if pair.route is not None else ""
        found = [
            member
            for member in self._context.roster
            if member.connection.offer is not None
            and member.connection.reachable
            and not member.draining
            and member is not one
            and member is not other
            and (member.peer == mine or carried[member.peer] < member.connection.offer.pairs)
            and not (member.connection.relayed is not None and member.connection.relayed.spent)
        ]
        return sorted(
            found, key=lambda each: (-self._share(each.peer, carried[each.peer] + 1), each.number)
        )

    def _candidates(self, one: Member, other: Member, pair: RoutedPair) -> list[CandidateRoute]:
        """Return all routes that the two might take, best first."""
        first, later = sorted((one, other), key=lambda member: member.number)
        found = []
        near, far = first.connection, later.connection
        if near.reachable == far.reachable:
            # Members behind one router may reach each other.
            if near.reachable or (near.host != "" and near.host == far.host):
                found += [
                    CandidateRoute(m.RouteKind.DIRECT, later.peer),
                    CandidateRoute(m.RouteKind.DIRECT, first.peer),
                ]
        else:
            caller = later if near.reachable else first
            found.append(CandidateRoute(m.RouteKind.DIRECT, caller.peer))
        same_family = (":" in self._seen_by(later, first)) == (":" in self._seen_by(first, later))
        if near.port and far.port and near.host and far.host and same_family:
            found.append(CandidateRoute(m.RouteKind.PUNCHED, later.peer))
        found += [
            CandidateRoute(m.RouteKind.RELAYED, later.peer, relay.peer)
            for relay in self._relays(one, other, pair)
        ]
        return found

    def _seen_by(self, near: Member, far: Member) -> str:
        """Return the address that one member dials to meet another one.

        A member behind this master's own router comes from a private address. Machines outside see
        it at that router's, which is the one at which they dial this master.
        """
        if is_public(far.connection.host) or not is_public(near.connection.host):
            return far.connection.host
        hosts = (Address.parse(text).host for text in self._context.history.masters.addresses)
        return next(
            (host for host in hosts if ":" not in host and is_public(host)), far.connection.host
        )

    def _default(self, one: Member, other: Member) -> CandidateRoute:
        first, later = sorted((one, other), key=lambda member: member.number)
        caller = first if later.connection.reachable and not first.connection.reachable else later
        return CandidateRoute(m.RouteKind.DIRECT, caller.peer)

    def format_kind(self, route: CandidateRoute) -> str:
        """Return the route's kind, for people."""
        if route.kind is m.RouteKind.DIRECT:
            return f"direct, {self._context.name(route.dials)} dials"
        return str(route.kind.value)

    def _format_route(self, route: CandidateRoute) -> str:
        if route.kind is m.RouteKind.DIRECT:
            return f"that {self._context.name(route.dials)} dials"
        if route.kind is m.RouteKind.PUNCHED:
            return "through both their routers"
        return f"by the relay {self._context.name(route.relay)}"

    def _names(self, one: Member, other: Member) -> str:
        return f"{self._context.name(one.peer)} and {self._context.name(other.peer)}"
