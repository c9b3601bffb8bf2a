"""Along which way a chunk is gathered and spread: a star, or a tree of two levels.

    star                                     tree: a1 and a2 are behind one line

    a1 ---.                                  a1 -> [a2] ---.
    a2 ---+---> owner ---> a1, a2, b                       +---> owner ---> a2 -> a1
    b ----'                                  b ------------'                b

Without sites everybody exchanges a chunk with its owner. Members of a site exchange it with the
site's *leader* for that chunk: they give it their contributions as they are (fp32), it sends the
owner their weighted sum as one contribution, and forwards the result verbatim. Where the owner is
itself a member of the site, it is the leader.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from attrs import frozen

from ..protocol.errors import RemoteProtocolError
from ..protocol.messages import Plan

INNER_CODEC = "fp32"  # within a site; what a leader adds up has not been rounded before


@frozen
class ChunkRole:
    """This node's part in one chunk.

    Attributes:
      parent: whom our contribution goes to and the result comes from; None: we own the chunk.
      gathers: whether contributions are added up here.
      givers: who sends us contributions.
      takers: whom we send the result, in the receivers' order.
    """

    parent: str | None
    gathers: bool
    givers: frozenset[str]
    takers: tuple[str, ...]


class Tree:
    """All chunks' ways, as one node sees them.

    Args:
      owners: by chunk.
      contributors, receivers: of the order; contributors are receivers.
      me: a receiver.

    Attributes:
      sites: each receiver's site; those who are alone are not in it.
      leaders: everybody who leads some chunk of some site.

    Raises:
      RemoteProtocolError: the plan's sites contradict themselves or the order.
    """

    def __init__(
        self,
        plan: Plan,
        owners: Sequence[str],
        contributors: Sequence[str],
        receivers: Sequence[str],
        me: str,
    ) -> None:
        self._me = me
        self._contributors = frozenset(contributors)
        self._receivers = tuple(receivers)
        self._sites = tuple(frozenset(site.members) for site in plan.sites)
        self.sites: Mapping[str, int] = {
            peer: number for number, site in enumerate(self._sites) for peer in site
        }
        runs = [site.leaders for site in plan.sites]
        if any(sum(run.chunk_count for run in of_site) != len(owners) for of_site in runs):
            raise RemoteProtocolError("the plan has a site without a leader for each chunk")
        self._leaders = [
            [run.peer for run in of_site for _chunk in range(run.chunk_count)] for of_site in runs
        ]
        self.leaders = frozenset(run.peer for of_site in runs for run in of_site)
        self._check(owners)
        known: dict[tuple[str, ...], ChunkRole] = {}  # there are few different ones
        self._parts = []
        for index, owner in enumerate(owners):
            key = (owner, *(leaders[index] for leaders in self._leaders))
            if key not in known:
                known[key] = self._make_part(owner, key[1:])
            self._parts.append(known[key])

    def part(self, index: int) -> ChunkRole:
        """Our part in a chunk, as planned."""
        return self._parts[index]

    def star(self, owner: str) -> ChunkRole:
        """Our part in a chunk that everybody exchanges with its owner."""
        if owner != self._me:
            return ChunkRole(owner, False, frozenset(), ())
        others = tuple(peer for peer in self._receivers if peer != self._me)
        return ChunkRole(None, True, self._contributors - {self._me}, others)

    def is_near(self, peer: str) -> bool:
        """Whether a peer is in our site; we ourselves are, if there is one."""
        return self._me in self.sites and self.sites[self._me] == self.sites.get(peer)

    def is_alone(self, peer: str) -> bool:
        """Whether a peer is in no site: what it sends is its own contribution, encoded."""
        return peer not in self.sites

    def _make_part(self, owner: str, leaders: Sequence[str]) -> ChunkRole:
        if not self._sites:
            return self.star(owner)
        my_site = self.sites.get(self._me)
        mates = frozenset() if my_site is None else self._sites[my_site] - {self._me}
        leads = my_site is not None and leaders[my_site] == self._me
        givers, takers = mates & self._contributors, mates
        if owner == self._me:
            outside = set(self._receivers) - set(self.sites)
            givers |= outside & self._contributors
            takers |= outside
            for number, (site, leader) in enumerate(zip(self._sites, leaders, strict=True)):
                if number != my_site:
                    takers |= {leader}
                    givers |= {leader} if site & self._contributors else frozenset()
            gathers, parent = True, None
        elif leads and my_site is not None:
            gathers, parent = bool(self._sites[my_site] & self._contributors), owner
        else:
            gathers, parent = False, owner if my_site is None else leaders[my_site]
            givers = takers = frozenset()
        ordered = tuple(peer for peer in self._receivers if peer in takers and peer != self._me)
        return ChunkRole(parent, gathers, givers - {self._me}, ordered)

    def _check(self, owners: Sequence[str]) -> None:
        if len(self.sites) != sum(map(len, self._sites)):
            raise RemoteProtocolError("the plan has a peer in two sites")
        if not self.sites.keys() <= set(self._receivers):
            raise RemoteProtocolError("the plan has a site of a peer that does not receive")
        for site, leaders in zip(self._sites, self._leaders, strict=True):
            if len(site) < 2:
                raise RemoteProtocolError("the plan has a site of fewer than two")
            if not set(leaders) <= site:
                raise RemoteProtocolError("the plan has a site that is led from outside")
            if any(o in site and o != leader for o, leader in zip(owners, leaders, strict=True)):
                raise RemoteProtocolError("the plan has an owner that does not lead its own site")
