"""Lines of a virtual network, and the faults on them: delay, rate, loss, separation.

A fault never touches the code under test. It changes what its streams do, as the real fault would:

    partition   bytes are held, in one direction or both; nothing breaks, dials hang
    freeze      all bytes that one host sends and receives are held
    corrupt     a bit of a lane's record is flipped; a control stream breaks, because TLS would
                reject it
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Iterable

from attrs import define, evolve, field, frozen

from ..protocol.network.lane import HEADER_BYTES, PREAMBLE_BYTES

BUFFER_BYTES = 4 * 2**20  # of a pipe; a full buffer makes the sender wait, as a socket's does

Filter = Callable[["Sent"], bytes]


@frozen
class Sent:
    """The data of one ``send_all``, as a test's filter sees it."""

    source: str
    target: str
    lane: bool
    data: bytes


@define(eq=False)
class MemoryLink:
    """One direction between two hosts; shared by all their streams."""

    delay_s: float
    bytes_per_s: float
    jitter_s: float
    window_bytes: float = math.inf  # limit of one stream's bytes in flight, in whole segments
    free_s: float = 0.0  # time at which all bytes put on it have left


@define(eq=False)
class MemoryHostLine:
    """One direction between a group of hosts and all others; all streams share it."""

    hosts: frozenset[str]
    bytes_per_s: float
    free_s: float = 0.0


@define(eq=False, slots=False)  # without slots tests can replace methods
class MemoryLines:
    """All lines between virtual hosts, known by name, and the faults on them.

    Args:
      rng: the source of all random choices: lost tails, corrupted bytes, jitter.
      delay_s: one-way delay of lines that ``link`` did not set.
      bytes_per_s: rate of each direction, shared by the pair's streams.
      jitter_s: upper bound of the random delay added to each segment.
      buffer_bytes: size of each pipe's buffer.

    Attributes:
      filter: maps every ``send_all`` to the bytes that are really sent (``b""`` drops them); set by
        tests.
      sent_bytes: by (source, target), the bytes given to ``send_all``.
    """

    rng: random.Random
    delay_s: float = field(default=0.01, kw_only=True)
    bytes_per_s: float = field(default=math.inf, kw_only=True)
    jitter_s: float = field(default=0.0, kw_only=True)
    buffer_bytes: int = field(default=BUFFER_BYTES, kw_only=True)
    filter: Filter | None = field(default=None, init=False)
    sent_bytes: Counter[tuple[str, str]] = field(factory=Counter, init=False)
    _links: dict[tuple[str, str], MemoryLink] = field(factory=dict, init=False)
    _shared: list[tuple[MemoryHostLine, MemoryHostLine]] = field(
        factory=list, init=False
    )  # out, in
    _partitions: set[tuple[str, str]] = field(factory=set, init=False)  # (source, target)
    _frozen: set[str] = field(factory=set, init=False)
    _corruptions: Counter[tuple[str, str]] = field(factory=Counter, init=False)
    _tears: Counter[tuple[str, str]] = field(factory=Counter, init=False)

    def wake(self) -> None:
        """Let all streams and dials notice that a fault has ended."""
        raise NotImplementedError

    def link(
        self,
        a: str,
        b: str,
        *,
        delay_s: float | None = None,
        bytes_per_s: float | None = None,
        jitter_s: float | None = None,
        window_bytes: float | None = None,
    ) -> None:
        """Set both directions of a pair at once; omitted values stay.

        Args:
          window_bytes: limit of one stream's bytes in flight; if it is less than delay times rate,
            several streams carry more than one.
        """
        for source, target in ((a, b), (b, a)):
            link = self.direction(source, target)
            link.delay_s = link.delay_s if delay_s is None else delay_s
            link.bytes_per_s = link.bytes_per_s if bytes_per_s is None else bytes_per_s
            link.jitter_s = link.jitter_s if jitter_s is None else jitter_s
            link.window_bytes = link.window_bytes if window_bytes is None else window_bytes

    def share_line(self, hosts: Iterable[str], *, up: float, down: float) -> None:
        """Put hosts behind one line to all others, with rates in bytes per second."""
        behind = frozenset(hosts)
        self._shared.append((MemoryHostLine(behind, up), MemoryHostLine(behind, down)))

    def lines_between(self, source: str, target: str) -> list[MemoryHostLine]:
        crossed = []
        for out, into in self._shared:
            if (source in out.hosts) != (target in out.hosts):
                crossed.append(out if source in out.hosts else into)
        return crossed

    def direction(self, source: str, target: str) -> MemoryLink:
        """Return the link from one host to another, which is made at its first use."""
        link = self._links.get((source, target))
        if link is None:
            delay_s, bytes_per_s, jitter_s = self.delay_s, self.bytes_per_s, self.jitter_s
            if source == target:
                delay_s, bytes_per_s, jitter_s = 0.0, math.inf, 0.0
            link = self._links[source, target] = MemoryLink(delay_s, bytes_per_s, jitter_s)
        return link

    def held(self, source: str, target: str) -> bool:
        """Return whether bytes from source to target are held at this moment."""
        return (
            source in self._frozen or target in self._frozen or (source, target) in self._partitions
        )

    # ------------------------------------------------------------ faults

    def partition(self, a: str, b: str, *, one_way: bool = False) -> None:
        """Hold all bytes between two hosts, or only those from ``a`` to ``b``.

        Nothing breaks; new dials hang, because they need an answer.
        """
        self._partitions.add((a, b))
        if not one_way:
            self._partitions.add((b, a))

    def heal(self, a: str, b: str) -> None:
        """End a partition of either kind and deliver the held bytes."""
        self._partitions -= {(a, b), (b, a)}
        self.wake()

    def freeze(self, name: str) -> None:
        """Hold all bytes to and from a host; ``frozen_hosts`` stops its tasks."""
        self._frozen.add(name)

    def thaw(self, name: str) -> None:
        self._frozen.discard(name)
        self.wake()

    def corrupt_next_lane_frame(self, a: str, b: str) -> None:
        """Flip one bit in the ciphertext of the next record that ``a`` sends to ``b``."""
        self._corruptions[a, b] += 1

    def corrupt_next_control_message(self, a: str, b: str) -> None:
        """Break the control stream at the next message from ``a`` to ``b``.

        A flipped bit has this effect, because TLS rejects changed bytes.
        """
        self._tears[a, b] += 1

    # ------------------------------------------------------------ for streams

    def is_torn(self, source: str, target: str) -> bool:
        """Return whether the control stream breaks with the bytes that are sent now."""
        if not self._tears[source, target]:
            return False
        self._tears[source, target] -= 1
        return True

    def pass_filter(self, sent: Sent) -> bytes:
        """Count sent bytes and return the bytes that really go onto the link."""
        pair, data = (sent.source, sent.target), sent.data
        self.sent_bytes[pair] += len(data)
        if sent.lane and self._corruptions[pair] and len(data) > PREAMBLE_BYTES:
            self._corruptions[pair] -= 1
            changed = bytearray(data)
            at = self.rng.randrange(min(HEADER_BYTES, len(data) - 1), len(data))
            changed[at] ^= 1 << self.rng.randrange(8)
            data = bytes(changed)
        return data if self.filter is None else self.filter(evolve(sent, data=data))
