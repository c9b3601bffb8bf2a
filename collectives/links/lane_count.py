"""The number of lanes of a link: a search by halving and doubling, one measured step at a time.

One TCP connection carries little over a long lossy path; several carry more, until they only take
it from each other. So another number is tried, on the traffic that there is anyway:

    measure a window of busy time -> try another number -> let it settle -> measure a window
        better: keep it, and try the next step at once
        not:    go back, and wait twice as long as the last time before the other direction is tried

Only time counts in which every lane had something to send: otherwise the lanes do not limit the rate.
Nothing is tried over a short path, where one connection fills the line, nor under a congestion control
that does not slow down for losses (``lane_pool.STEADY``).

Links of a node share its line. What one link gains by more lanes must not be taken from the other
links, so one link of a node tries at a time, and it considers what they all carry.

No clock, no I/O: the owner calls ``sample`` whenever it learns what has arrived.
"""

from __future__ import annotations

import math

from attrs import define, frozen

COUNT_FIRST = 2  # while one pauses for a loss, the other sends
COUNT_MAX = 16  # more connections crowd out other users of the line
GAIN_MIN = 1.10  # more lanes are kept if they carry at least this many times as much
OWN_GAIN_MIN = 0.5  # at least this share of the gain must not be taken from the node's other links
KEPT_MIN = 0.95  # fewer lanes are kept if they carry at least this share of what more did
WINDOW_S = 1.0  # of busy time; at least
# At least: within a window connections must lose and recover several times, or chance decides.
WINDOW_ROUND_TRIPS = 30
SETTLE_S = 0.5  # of busy time after a change that is not measured; at least
SETTLE_ROUND_TRIPS = 20  # a new connection starts slowly, overshoots, and falls back
GAP_S_MAX = 1.0  # between two samples; what happened in a longer gap is unknown
OPEN_S_MAX = 10.0  # after which a trial whose lanes are not open is given up
WAIT_FIRST_S = 10.0  # after a step that was not worth it; doubled each time
WAIT_S_MAX = 640.0
ROUND_TRIP_S_MIN = 0.002  # below, a connection recovers from a loss in no time that matters


@frozen
class Sample:
    """A measurement of a link at one moment.

    Attributes:
      carried_bytes: bytes that arrived since the link began.
      lane_count: lanes that work.
      busy: whether every lane is sending.
      others_bytes: bytes that arrived over all other links of the node.
    """

    now_s: float
    carried_bytes: int
    lane_count: int
    busy: bool
    others_bytes: int = 0


@define(eq=False)
class LaneTrials:
    """State of the search that all links of a node share.

    Attributes:
      by: the link that tries another number of lanes now; at most one does.
      arrived_bytes: what the other sides of all links have acknowledged.
    """

    by: LaneCount | None = None
    arrived_bytes: int = 0


@frozen
class _Trial:
    """A trial of another number of lanes, and what was measured before it."""

    before: int
    bytes_per_s_before: float
    others_per_s_before: float
    began_s: float


class LaneCount:
    """See the top of this file. One per link and side, for what it sends.

    Attributes:
      wanted: lanes that there should be.

    Args:
      first: lanes to start with; there are never fewer.
      count_max: the most lanes; the same as ``first`` makes the number fixed.
      trials: shared by all links of the node.
    """

    def __init__(
        self,
        first: int = COUNT_FIRST,
        count_max: int = COUNT_MAX,
        trials: LaneTrials | None = None,
    ) -> None:
        self._trials = LaneTrials() if trials is None else trials
        self.wanted = first
        self._count_min = first
        self._count_max = count_max
        self._last: Sample | None = None
        self._trial: _Trial | None = None
        self._upwards = True
        self._wait_s = WAIT_FIRST_S
        self._not_before_s = -math.inf
        self._unsettled_s = math.inf  # busy time still to pass before a window begins
        self._window_s = 0.0
        self._window_bytes = 0
        self._window_others_bytes = 0

    def sample(self, sample: Sample, round_trip_s: float) -> int:
        """Take note of what has arrived. Returns ``wanted``.

        Args:
          round_trip_s: the shortest round trip that was seen on the path.
        """
        last, self._last = self._last, sample
        if round_trip_s < ROUND_TRIP_S_MIN or self._count_min >= self._count_max:
            return self.wanted
        if last is None or not self._counts(last, sample):
            self._give_up_late_lanes(sample)
            return self.wanted
        span_s = sample.now_s - last.now_s
        if self._unsettled_s > 0:
            settle_s = max(SETTLE_S, SETTLE_ROUND_TRIPS * round_trip_s)
            self._unsettled_s = min(self._unsettled_s, settle_s) - span_s
            return self.wanted
        self._window_s += span_s
        self._window_bytes += sample.carried_bytes - last.carried_bytes
        self._window_others_bytes += sample.others_bytes - last.others_bytes
        if self._window_s >= max(WINDOW_S, WINDOW_ROUND_TRIPS * round_trip_s):
            bytes_per_s = self._window_bytes / self._window_s
            others_per_s = self._window_others_bytes / self._window_s
            self._window_s, self._window_bytes, self._window_others_bytes = 0.0, 0, 0
            self._decide(bytes_per_s, others_per_s, sample.now_s)
        return self.wanted

    def _counts(self, last: Sample, sample: Sample) -> bool:
        return (
            last.busy
            and sample.busy
            and last.lane_count == sample.lane_count == self.wanted
            and sample.now_s - last.now_s <= GAP_S_MAX
        )

    def _give_up_late_lanes(self, sample: Sample) -> None:
        trial = self._trial
        if (
            trial is not None
            and sample.lane_count < self.wanted
            and sample.now_s - trial.began_s > OPEN_S_MAX
        ):
            self._go_back(trial, sample.now_s)

    def _decide(self, bytes_per_s: float, others_per_s: float, now_s: float) -> None:
        trial = self._trial
        if trial is not None:
            if not self._was_worth_it(trial, bytes_per_s, others_per_s):
                self._go_back(trial, now_s)
                return
            self.end_trial()
            self._wait_s = WAIT_FIRST_S
        elif now_s < self._not_before_s or self._trials.by is not None:
            return
        self._try_next(bytes_per_s, others_per_s, now_s)

    def _was_worth_it(self, trial: _Trial, bytes_per_s: float, others_per_s: float) -> bool:
        if self.wanted < trial.before:
            return bytes_per_s >= KEPT_MIN * trial.bytes_per_s_before
        gain = bytes_per_s - trial.bytes_per_s_before
        taken = trial.others_per_s_before - others_per_s
        return (
            bytes_per_s >= GAIN_MIN * trial.bytes_per_s_before
            and gain - taken >= OWN_GAIN_MIN * gain
        )

    def end_trial(self) -> None:
        """End a trial, so that other links may try."""
        self._trial = None
        if self._trials.by is self:
            self._trials.by = None

    def _try_next(self, bytes_per_s: float, others_per_s: float, now_s: float) -> None:
        if self._step() == self.wanted:
            # The search is at its bound; the other direction is tried when some time has passed.
            self._upwards = not self._upwards
            self._not_before_s = now_s + self._wait_s
            return
        self._trial = _Trial(self.wanted, bytes_per_s, others_per_s, now_s)
        self._trials.by = self
        self.wanted = self._step()
        self._unsettled_s = math.inf

    def _step(self) -> int:
        if self._upwards:
            return min(2 * self.wanted, self._count_max)
        return max(self.wanted // 2, self._count_min)

    def _go_back(self, trial: _Trial, now_s: float) -> None:
        self.wanted = trial.before
        self.end_trial()
        self._upwards = not self._upwards
        self._not_before_s = now_s + self._wait_s
        self._wait_s = min(2 * self._wait_s, WAIT_S_MAX)
        self._unsettled_s = math.inf
