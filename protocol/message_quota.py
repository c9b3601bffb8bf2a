"""What one member may say in a while: so many items, so many bytes.

An item is an entry of an array, or a key or a value of a map: what a message costs to read grows with
them, not with its bytes or its kind. Two buckets run empty with what comes and fill with time. They are
far beyond what an honest member ever says, even in the second in which it attaches. From who exceeds them
nothing more is taken until they have filled again, so it holds no more than a small share of this process,
and nobody is cut off for a burst. Bulk bytes have no quota: they are read as fast as somebody here wants
them.
"""

from __future__ import annotations

from collections import OrderedDict

from attrs import define

# Reading and checking as many takes 3 % of a core. For the master, where each message may lead to
# decisions: 240 small ones a second, which take a few percent more.
ITEMS_PER_S = 50_000.0
# The same for what members say to each other: acknowledgements of lanes, to which nothing is decided.
LINK_ITEMS_PER_S = 400_000.0
ITEMS_AT_ONCE = 4 * 2.0**20  # four layouts of 65,536 tensors: what attaching takes, and more
MESSAGE_ITEMS = 200  # a message counts as so many more, for what is done about it
BYTES_PER_S = 4 * 2.0**20
BYTES_MAX = 64 * 2.0**20  # at once: four layouts of the largest size
QUOTAS_MAX = (
    4_096  # members of whom is known what they have left; who spoke longest ago is forgotten
)


@define
class Quota:
    """What is left of it for one member."""

    _at_s: float
    _items_per_s: float = ITEMS_PER_S
    _items: float = ITEMS_AT_ONCE
    _bytes: float = BYTES_MAX

    def spend(self, items: int, size_bytes: int, now_s: float) -> None:
        """A message has come and was looked at; what it took may be more than was left."""
        self._fill(now_s)
        self._items -= items + MESSAGE_ITEMS
        self._bytes -= size_bytes

    def wait_s(self, now_s: float) -> float:
        """How long nothing more is to be taken from it; 0: it may speak."""
        self._fill(now_s)
        return max(-self._items / self._items_per_s, -self._bytes / BYTES_PER_S, 0.0)

    def _fill(self, now_s: float) -> None:
        passed_s, self._at_s = max(0.0, now_s - self._at_s), now_s
        self._items = min(ITEMS_AT_ONCE, self._items + self._items_per_s * passed_s)
        self._bytes = min(BYTES_MAX, self._bytes + BYTES_PER_S * passed_s)


class Quotas:
    """Of many members, each with its own over all its connections, one after the other or at once."""

    def __init__(self) -> None:
        self._by_peer: OrderedDict[str, Quota] = OrderedDict()

    def of(self, peer: str, now_s: float) -> Quota:
        found = self._by_peer.setdefault(peer, Quota(now_s))
        self._by_peer.move_to_end(peer)
        if len(self._by_peer) > QUOTAS_MAX:
            self._by_peer.popitem(last=False)
        return found
