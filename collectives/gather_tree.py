"""The paths on which a chunk is gathered and spread: a star, or a tree of two levels.

    star                                     tree: a1 and a2 are behind one line

    a1 ---.                                  a1 -> [a2] ---.
    a2 ---+---> owner ---> a1, a2, b                       +---> owner ---> a2 -> a1
    b ----'                                  b ------------'                b

Without sites every peer exchanges a chunk with its owner. Members of a site exchange it with the
site's *leader* for that chunk: they send the leader their contributions in fp32; the leader sends the
owner their weighted sum as one contribution, and forwards the result verbatim. An owner that is a
member of the site is its leader.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from attrs import frozen

from ..protocol.errors import RemoteProtocolError
from ..protocol.messages import Plan

INNER_CODEC = "fp32"  # within a site, so that a leader adds up unrounded values


@frozen
class ChunkRole:
    """This node's part in one chunk.

    Attributes:
      parent: the peer that our contribution goes to and the result comes from; None if we own it.
      gathers: whether contributions are added up here.
      givers: peers that send us contributions.
      takers: peers that we send the result, in the receivers' order.
    """

    parent: str | None
    gathers: bool
    givers: frozenset[str]
    takers: tuple[str, ...]


class Tree:
    """One node's roles in all chunks.

    Args:
      owners: by chunk.
      contributors, receivers: of the order; contributors are receivers.
      me: a receiver.

    Attributes:
      sites: the number of each receiver's site; receivers without a site are not in it.
      leaders: all peers that lead a chunk of a site.

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
        self._roles = []
        for index, owner in enumerate(owners):
            key = (owner, *(leaders[index] for leaders in self._leaders))
            if key not in known:
                known[key] = self._make_role(owner, key[1:])
            self._roles.append(known[key])

    def role(self, index: int) -> ChunkRole:
        """Return this node's planned role in a chunk."""
        return self._roles[index]

    def star(self, owner: str) -> ChunkRole:
        """Return this node's role in a chunk that every peer exchanges with its owner."""
        if owner != self._me:
            return ChunkRole(owner, False, frozenset(), ())
        others = tuple(peer for peer in self._receivers if peer != self._me)
        return ChunkRole(None, True, self._contributors - {self._me}, others)

    def is_near(self, peer: str) -> bool:
        """Return whether a peer is in this node's site; this node is, if it has one."""
        return self._me in self.sites and self.sites[self._me] == self.sites.get(peer)

    def is_alone(self, peer: str) -> bool:
        """Return whether a peer is in no site, so that it sends its own contribution, encoded."""
        return peer not in self.sites

    def _make_role(self, owner: str, leaders: Sequence[str]) -> ChunkRole:
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
