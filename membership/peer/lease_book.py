"""A peer's leases, pure: what the master gave, what its trainer draws, what is in its updates.

    master --Leased--> pool --draw--> stream of a data rank --trained, posted--> update --> spent
                        ^                |                                         |
                        '----------------'<---trainer gone, delta dropped----------'

A *stream* is the order in which one data rank of the trainer was given samples; it draws and trains
them in this order, so a count tells which ones it has trained. Samples that were trained and then
lost, because the trainer ended or loaded the shared state, go back into the pool and are trained
again.

*Void samples.* A trainer may hold samples in its loader that are not leased to this peer: the
master has given the leases to others while this peer was away, or this peer was a spare, whose
trainer draws samples only to be warm. It trains through them, and contributes again once it has
loaded the shared state after that. Until then the book is *barred*.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from attrs import define, field

from ...protocol import messages as m
from ...protocol.errors import RemoteProtocolError
from ..shared.lease_ranges import RangeSet

# The pool holds so many times what the trainer draws in the time for which it goes on without a
# master. Half of that is the limit below which more are wanted.
AHEAD = 2.0
DRAW_RANGES_MAX = 64  # of one draw
MARKS = 16  # counts that are kept to tell how much was drawn in a time


@define
class RankStream:
    """What one data rank was given, in order, as far as it is not known to be spent or lost.

    Attributes:
      base: the index of the first sample in ``ranges``.
      ranges: positions in the order in which they are drawn.
      void_until: samples before this index must not be contributed.
    """

    base: int = 0
    ranges: list[tuple[int, int]] = field(factory=list)
    void_until: int = 0

    @property
    def handed(self) -> int:
        """The index of the next sample to be drawn."""
        return self.base + sum(stop - start for start, stop in self.ranges)

    def between(self, first: int, last: int) -> list[tuple[int, int]]:
        """Return the positions of the samples from index ``first`` up to ``last``."""
        found, index = [], self.base
        for start, stop in self.ranges:
            low = max(first, index) - index
            high = min(last, index + stop - start) - index
            if low < high:
                found.append((start + low, start + high))
            index += stop - start
        return found

    def forget(self, index: int) -> None:
        if index > self.base:
            self.ranges, self.base = self.between(index, self.handed), index

    def add(self, start: int, stop: int) -> None:
        if self.ranges and self.ranges[-1][1] == start:
            start = self.ranges.pop()[0]
        self.ranges.append((start, stop))


@define
class LeaseBook:
    """All leases of one peer.

    Attributes:
      length: samples of the data set; 0: no sampler draws.
      first_count: samples to ask for before the trainer's speed is known.
      run_length: as the master says; another one than the sampler's is refused.
      held: positions that are leased to this peer.
      pool: those of them that no stream and no round has.
      streams: by data rank.
      rounds: by round, what this peer's update was trained on.
      practice_count: samples that were drawn without a lease.
    """

    length: int = 0
    first_count: int = m.SAMPLES_AHEAD
    run_length: int = 0
    held: RangeSet = field(factory=RangeSet)
    pool: RangeSet = field(factory=RangeSet)
    streams: dict[int, RankStream] = field(factory=dict)
    rounds: dict[int, RangeSet] = field(factory=dict)
    practice_count: int = 0
    _began: bool = False
    _wanted: int = 0  # what the master was asked for and has not given yet
    _drawn: int = 0  # by all streams, ever
    _marks: list[tuple[float, int]] = field(factory=list)  # recent (time, drawn)

    # ------------------------------------------------------------ the trainer draws

    def begin(self, length: int, first_count: int = m.SAMPLES_AHEAD) -> bool:
        """Take the length of the data set that the trainer's sampler has.

        Args:
          first_count: samples to ask for before the trainer's speed is known.

        Returns:
          False if another sampler of this trainer has another length.
        """
        if self._began and length != self.length:
            return False
        self.length, self.first_count, self._began = length, first_count, True
        return True

    def draw(self, data_rank: int, index: int, count: int, *, leased: bool) -> list[m.LeaseRange]:
        """Return the positions of a data rank's samples from ``index`` on.

        Ranks that train on the same samples draw each of them once, and get the same answer.

        Args:
          leased: False: the peer is a spare, whose trainer gets any samples.

        Returns:
          ``count`` positions or less; none if none is there yet.

        Raises:
          RemoteProtocolError: samples before ``index`` were never drawn.
        """
        stream = self.streams.setdefault(data_rank, RankStream())
        if index > stream.handed:
            raise RemoteProtocolError(f"a draw of sample {index} after {stream.handed} samples")
        if index < stream.base:  # void for this rank, too, which is behind another one
            return self._practice(min(count, stream.base - index))
        if index == stream.handed:
            if leased:
                for start, stop in self.pool.take(count, DRAW_RANGES_MAX):
                    stream.add(start, stop)
                    self._drawn += stop - start
            else:
                for each in self._practice(count):
                    stream.add(each.start, each.stop)
                stream.void_until = stream.handed
        ranges = stream.between(index, index + count)[:DRAW_RANGES_MAX]
        return [m.LeaseRange(start, stop) for start, stop in ranges]

    def _practice(self, count: int) -> list[m.LeaseRange]:
        """Return positions that need not be leased: what is trained on them is dropped."""
        first = self.practice_count % self.length
        stop = min(self.length, first + count)
        self.practice_count += stop - first
        return [m.LeaseRange(first, stop)]

    def trainer_gone(self) -> None:
        """Take back what a trainer that has ended was given."""
        self.streams.clear()
        self._began = False
        self._collect()

    def barred(self, trained: Mapping[int, int]) -> bool:
        """Return whether the trainer is to contribute nothing: it is still on void samples.

        Args:
          trained: by data rank, how many samples it has trained.
        """
        return any(
            trained.get(data_rank, 0) < stream.void_until
            for data_rank, stream in self.streams.items()
        )

    # ------------------------------------------------------------ rounds

    def post(self, number: int, samples: Iterable[m.RankSamples]) -> tuple[m.LeaseRange, ...] | str:
        """Return the leased positions behind an update, or why it must not be contributed."""
        trained = RangeSet()
        for each in samples:
            stream = self.streams.get(each.data_rank)
            if stream is None or not each.lost <= each.trained <= stream.handed:
                return "it trained on more samples than it was given"
            if each.lost < stream.void_until:
                return "it trained on samples that were given to others"
            stream.forget(each.lost)
            trained.update(stream.between(each.lost, each.trained))
        trained = trained & self.held
        self._collect()
        if len(trained) > m.LEASE_RANGES_MAX:
            return "it trained on too many ranges of samples"
        self.rounds[number] = trained
        return trained.leases()

    def committed(self, number: int, *, contributed: bool) -> None:
        """Note the commit of a round: what this peer gave to it is spent."""
        spent = self.rounds.pop(number, None)
        if spent and contributed:
            self.held.subtract(spent)
            self.pool.subtract(spent)
            for stream in self.streams.values():
                self._forget_spent(stream)
        self._collect()

    def aborted(self, number: int) -> None:
        """Note that a round was void: what this peer gave to it is still in its local weights."""
        if self.rounds.pop(number, None) is not None:
            self._collect()

    def _forget_spent(self, stream: RankStream) -> None:
        index = stream.base
        for start, stop in stream.ranges:
            left = RangeSet([(start, stop)]) & self.held
            if left:
                index += next(iter(left))[0] - start
                break
            index += stop - start
        stream.forget(index)

    def _collect(self) -> None:
        """Put into the pool what is leased, in no stream, and in no round under way."""
        loose = self.held - self.pool
        for stream in self.streams.values():
            loose.subtract(stream.ranges)
        for ranges in self.rounds.values():
            loose.subtract(ranges)
        self.pool.update(loose)

    # ------------------------------------------------------------ the master

    def claim(self) -> m.LeasesHeld | None:
        """Return what is held, for the master at the begin of a session; None if nothing is."""
        self._wanted = 0
        if not self.held:
            return None
        return m.LeasesHeld(self.length, self.held.leases()[: m.LEASE_RANGES_MAX])

    def leased(self, message: m.Leased) -> None:
        self.run_length = message.length
        ranges = RangeSet.of(message.ranges)
        if not message.all:
            self._wanted = 0
            self.held.update(ranges)
            self._collect()
            return
        lost, self.held = self.held - ranges, ranges
        self.pool = self.pool & ranges
        for stream in self.streams.values():
            if lost & RangeSet(stream.ranges):
                stream.forget(stream.handed)
                stream.void_until = stream.handed
        self._collect()

    def want(self, now_s: float, ahead_s: float) -> m.LeasesWanted | None:
        """Return what to ask the master for, or None.

        Args:
          ahead_s: for so many seconds the trainer goes on without a master.
        """
        refused = self.run_length not in (0, self.length)
        if not self.length or self._wanted or refused:
            return None
        wanted = self._ahead_count(now_s, ahead_s)
        have = self.pool.count
        if have * 2 > wanted:
            return None
        self._wanted = max(1, min(wanted - have, self.length, m.LEASED_MAX))
        return m.LeasesWanted(self.length, self._wanted)

    def _ahead_count(self, now_s: float, ahead_s: float) -> int:
        """Return how many samples the pool should hold: by what was drawn in the last seconds."""
        if not self._marks or now_s - self._marks[-1][0] > ahead_s / MARKS:
            self._marks.append((now_s, self._drawn))
        while len(self._marks) > 1 and self._marks[1][0] <= now_s - ahead_s:
            del self._marks[0]
        return max(
            min(self.first_count, self.length), int(AHEAD * (self._drawn - self._marks[0][1]))
        )
