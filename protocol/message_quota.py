"""Rate limits on one member's control messages: items and bytes per second.

An item is an entry of an array, or a key or a value of a map: the cost of reading a message grows
with its items, not with its bytes or its type. Two token buckets, one of items and one of bytes,
are far larger than any honest member needs, even in the second in which it attaches. When a member
has emptied one, nothing more is read from it until the bucket has refilled. So it can take only a
small share of this process, and no member is disconnected for a burst. Bulk bytes have no quota:
they are read as fast as their receiver wants them.
"""

from __future__ import annotations

from collections import OrderedDict

from attrs import define

# Reading and checking this many takes 3 % of a core. For the master, where a message may lead to
# decisions, they are 240 small messages a second, which take a few percent more.
ITEMS_PER_S = 50_000.0
# The same between members, whose messages acknowledge lanes and lead to no decisions.
LINK_ITEMS_PER_S = 400_000.0
ITEMS_AT_ONCE = 4 * 2.0**20  # four layouts of 65,536 tensors: more than attaching takes
MESSAGE_ITEMS = 200  # added to the items of each message, for the work that it causes
BYTES_PER_S = 4 * 2.0**20
BYTES_MAX = 64 * 2.0**20  # at once: four layouts of the largest size
QUOTAS_MAX = 4_096  # members whose quota is remembered; the one silent for longest is forgotten


@define
class Quota:
    """The remaining quota of one member."""

    _at_s: float
    _items_per_s: float = ITEMS_PER_S
    _items: float = ITEMS_AT_ONCE
    _bytes: float = BYTES_MAX

    def spend(self, items: int, size_bytes: int, now_s: float) -> None:
        """Take a received message off the quota, which may become negative."""
        self._fill(now_s)
        self._items -= items + MESSAGE_ITEMS
        self._bytes -= size_bytes

    def wait_s(self, now_s: float) -> float:
        """Return the seconds until the next message may be read from the member."""
        self._fill(now_s)
        return max(-self._items / self._items_per_s, -self._bytes / BYTES_PER_S, 0.0)

    def _fill(self, now_s: float) -> None:
        passed_s, self._at_s = max(0.0, now_s - self._at_s), now_s
        self._items = min(ITEMS_AT_ONCE, self._items + self._items_per_s * passed_s)
        self._bytes = min(BYTES_MAX, self._bytes + BYTES_PER_S * passed_s)


class Quotas:
    """The quotas of all members; a member's connections share its quota."""

    def __init__(self) -> None:
        self._by_peer: OrderedDict[str, Quota] = OrderedDict()

    def of(self, peer: str, now_s: float) -> Quota:
        found = self._by_peer.setdefault(peer, Quota(now_s))
        self._by_peer.move_to_end(peer)
        if len(self._by_peer) > QUOTAS_MAX:
            self._by_peer.popitem(last=False)
        return found
