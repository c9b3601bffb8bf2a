"""Two-level trees: members behind one line add up within their site, and each chunk crosses it once.

    star, one chunk                          tree, the same chunk

    a1 ---.                                  a1 -> [a2] ---.
    a2 ---+===> owner ===> a1, a2, b2                      +===> owner b1 ===> a2 -> a1
    b2 -------> (b1)                         b2 -> (b1) ---'                   b1 -> b2

In each site every chunk has a *leader*. Members send their contributions to the leader within the
site. It adds them in member order and sends one contribution, with the sum of their weights, to the
chunk's owner. It gets the result once and forwards it verbatim. Where the owner is a member of the
site, it is the leader. A member without a site is a site of one.

*When a tree is faster.* Where no lines are shared, a tree cannot beat the star: any way to gather
``n`` contributions moves ``n - 1`` of them, any way to spread moves ``n - 1`` results, in both every
member sends its own contribution and receives the result, and the star comes as close to the bound
which follows from that as whole chunks allow. So a limit on the fan-in saves no time, only open
connections. But the star sends the ``m`` contributions of ``m`` members behind one line over it, and
takes ``m`` results; a tree sends and takes one: up to ``m`` times less.

*How a tree is planned.* Seen from outside a site is one member with its line, so the owning sites'
shares are those of a star of sites. Within a site a member's own line carries what it sends to the
leaders and gets from them, and what it moves as a leader, within and to the outside; all of that is
linear in the part that it leads. Both levels go on at once, chunk by chunk.
"""

from __future__ import annotations

from collections.abc import Sequence

from attrs import evolve, frozen

from ...protocol.errors import LocalProtocolError
from .shares import Direction, SharedLine, Workload, best_shares, bound_s, fill, shares_s

# A tree has two more hops, some of which may be slower than measured, and depends on more members. It
# is chosen only if it needs at most this part of the star's time.
TREE_TIME_MAX = 0.9


@frozen
class SitePlan:
    """One site's part of a tree.

    Attributes:
      members: of the site; one for a member without a site.
      owned: share of the result that is owned here.
      leading: the part of the site's work that each member leads; adds up to 1.
    """

    members: tuple[int, ...]
    owned: float
    leading: tuple[float, ...]


@frozen
class TreePlan:
    """The best tree, beside the best star.

    Attributes:
      sites: in order of their first members; together all members.
      tree_s: the tree's time.
      star: the contributors' shares in the best star over the same lines.
      star_s: the star's time.
      star_bound_s: no star can be faster.
      tree_bound_s: no tree of these sites can be faster.
    """

    sites: tuple[SitePlan, ...]
    tree_s: float
    star: tuple[float, ...]
    star_s: float
    star_bound_s: float
    tree_bound_s: float

    @property
    def pays(self) -> bool:
        """The tree is to be preferred."""
        return self.tree_s <= TREE_TIME_MAX * self.star_s


def plan_tree(
    work: Workload, sites: Sequence[SharedLine], *, inner_up_bytes: float, chunk_count: int
) -> TreePlan:
    """Plan the best tree for these sites, and the best star beside it.

    Args:
      work: contributors, receivers and their own lines; ``shared`` is taken from ``sites``.
      sites: no member is in two of them.
      inner_up_bytes: one whole contribution within a site. Members send float32 values to leaders,
        so that sums are not rounded twice.
      chunk_count: of the fragment; the first chunk fills the tree, the others follow.

    Raises:
      LocalProtocolError: a member is in two sites, or a site has less than two members.
      NoReachableOwnerError: see ``best_shares``.
    """
    _check(work, sites)
    star = evolve(work, shared=tuple(sites))
    star_shares = best_shares(star)
    groups = _groups(work, sites)
    outer = _outer(work, groups)
    owned = [*best_shares(outer), *[0.0] * (len(groups) - outer.contributor_count)]
    planned = []
    for (members, site), share in zip(groups, owned, strict=True):
        leading = [1.0]
        if site is not None:
            leading = _leading(work, members, _loads(work, outer, members, share, inner_up_bytes))
        planned.append(SitePlan(members, share, tuple(leading)))
    return TreePlan(
        sites=tuple(planned),
        tree_s=tree_s(work, sites, planned, inner_up_bytes=inner_up_bytes, chunk_count=chunk_count),
        star=tuple(star_shares),
        star_s=shares_s(star, star_shares),
        star_bound_s=bound_s(star),
        tree_bound_s=bound_s(outer),
    )


def tree_s(
    work: Workload,
    sites: Sequence[SharedLine],
    planned: Sequence[SitePlan],
    *,
    inner_up_bytes: float,
    chunk_count: int,
) -> float:
    """Return the time of a tree with given shares; arguments as in ``plan_tree``."""
    groups = _groups(work, sites)
    outer = _outer(work, groups)
    inner_s = max(
        (
            _inner_s(_loads(work, outer, members, plan.owned, inner_up_bytes), plan.leading)
            for (members, site), plan in zip(groups, planned, strict=True)
            if site is not None
        ),
        default=0.0,
    )
    outer_s = shares_s(outer, [plan.owned for plan in planned[: outer.contributor_count]])
    # Bytes move on both levels at once; only the first chunk finds the next hop idle.
    return max(outer_s, inner_s) + inner_s / max(1, chunk_count)


def same_site(hosts: Sequence[str]) -> list[tuple[int, ...]]:
    """Group members that have one public address, and so one line.

    Args:
      hosts: the IPv4 or IPv6 address from which each member connects; empty: unknown.

    Returns:
      Groups of two and more, in order of their first members. IPv6 hosts of one /64 count as one
      address, since a line gets a whole /64. Loopback addresses say nothing about lines.
    """
    groups: dict[str, list[int]] = {}
    for number, host in enumerate(hosts):
        if host and not host.startswith("127.") and host != "::1":
            groups.setdefault(line_of(host), []).append(number)
    return [tuple(members) for members in groups.values() if len(members) > 1]


# ---------------------------------------------------------------- the two levels

_Group = tuple[tuple[int, ...], SharedLine | None]


def _check(work: Workload, sites: Sequence[SharedLine]) -> None:
    inside = [member for site in sites for member in site.members]
    if len(set(inside)) != len(inside) or any(m >= len(work.rates) for m in inside):
        raise LocalProtocolError("a member of two sites, or one that takes no part")
    if any(len(site.members) < 2 for site in sites):
        raise LocalProtocolError("a site of less than two members")


def _groups(work: Workload, sites: Sequence[SharedLine]) -> list[_Group]:
    """Return all sites and lone members: first those that contribute, ordered by first member."""
    inside = {member for site in sites for member in site.members}
    groups: list[_Group] = [(tuple(sorted(site.members)), site) for site in sites]
    groups += [((m,), None) for m in range(len(work.rates)) if m not in inside]
    return sorted(groups, key=lambda group: group[0])  # contributors have the lower numbers


def _outer(work: Workload, groups: Sequence[_Group]) -> Workload:
    """Return the star of sites. A limited pair limits its two sites; pairs within a site do not count."""
    place = {member: index for index, (members, _) in enumerate(groups) for member in members}
    limits: dict[tuple[int, int], float] = {}
    for (sender, receiver), limit in work.pair_limits.items():
        pair = (place[sender], place[receiver])
        if pair[0] != pair[1]:
            limits[pair] = min(limit, limits.get(pair, limit))
    return Workload(
        rates=tuple(work.rates[m[0]] if site is None else site.rate for m, site in groups),
        contributor_count=sum(m[0] < work.contributor_count for m, _ in groups),
        up_bytes=work.up_bytes,
        down_bytes=work.down_bytes,
        pair_limits=limits,
        delay_s=work.delay_s,
    )


def _loads(
    work: Workload, outer: Workload, members: Sequence[int], owned: float, inner_up_bytes: float
) -> list[tuple[Direction, Direction]]:
    """Return each member's two directions, up and down, as functions of the part that it leads."""
    up, down = work.up_bytes, work.down_bytes
    contributing = [member for member in members if member < work.contributor_count]
    # What a single leader would move to and from the outside.
    out = owned * (len(outer.rates) - 1) * down
    into = (1 - owned) * down
    if contributing:
        out += (1 - owned) * up
        into += owned * (outer.contributor_count - 1) * up
    loads = []
    for member in members:
        rate = work.rates[member]
        gives = inner_up_bytes if member in contributing else 0.0
        gathers = inner_up_bytes * len(contributing) - gives
        spreads = (len(members) - 1) * down
        loads.append(
            (
                (rate.up_bytes_per_s, gives, spreads - gives + out),
                (rate.down_bytes_per_s, down, gathers - down + into),
            )
        )
    return loads


def _leading(
    work: Workload, members: Sequence[int], loads: Sequence[Sequence[Direction]]
) -> list[float]:
    """Return the part that each member leads. Only contributors lead, unless the site has none."""
    listening = {i for i, member in enumerate(members) if member >= work.contributor_count}
    barred = listening if len(listening) < len(members) else set()
    alone = [
        [float(member == leader) for member in range(len(members))]
        for leader in range(len(members))
        if leader not in barred
    ]
    return fill(loads, barred, low_s=0.0, high_s=2 * min(_inner_s(loads, each) for each in alone))


def _inner_s(loads: Sequence[Sequence[Direction]], leading: Sequence[float]) -> float:
    """Return the time after which the busiest member's own line is done."""
    return max(
        (base + slope * share) / speed
        for directions, share in zip(loads, leading, strict=True)
        for speed, base, slope in directions
    )


def line_of(host: str) -> str:
    """Return what all hosts behind one line have in common: an IPv4 address, or an IPv6 /64."""
    if ":" not in host:
        return host
    head, gap, tail = host.partition("::")
    front = [part for part in head.split(":") if part]
    back = [part for part in tail.split(":") if part]
    zeros = ["0"] * (8 - len(front) - len(back)) if gap else []
    return ":".join(part.lower().lstrip("0") or "0" for part in [*front, *zeros, *back][:4])
