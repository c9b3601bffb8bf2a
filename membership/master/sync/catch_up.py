"""Members whose lines are too slow for the run's commits beside a copy of the state.

A joiner gets the results of all rounds of a fragment from the moment its copy begins, keeps them,
and replays them when the copy is complete. With a line of ``d`` bytes per second and commits of
``r``, the copy of a state of ``S`` bytes takes ``S / (d - r)``, and ``r * S / (d - r)`` bytes have
to be kept: no more than the state itself as long as ``d >= 2 r``. That is the bound (small states
may use more). A member that needs more cannot be brought in sync now. The master ends its copy and
tells it why. It tries again when the run commits less, or after a delay, in case the line has
become better.
"""

from __future__ import annotations

import math
from collections import deque

from attrs import define

from ....protocol.messages import ROUNDS_HELD_MAX
from ...planning.plan import wire_bytes_per_value
from ...shared.event_kind import EventKind
from ...shared.peer_rows import format_rate
from ..state.context import Context
from ..state.roster import Fetch, Member

# Results that a joiner keeps for replay take at most the size of the state, or this if that is
# more. Their number is limited to what a peer keeps in any case.
LOG_BYTES_MIN = 256 * 2**20
HEADROOM = 2.0  # ``d / r`` at least, see above
COMMITS_MAX = 16  # recent commits by which the run's pace is measured
RETRY_DEADLINES = 4  # until a member that could not keep up is tried again; doubled each time
RETRY_MAX_S = 3_600.0
RESTARTS_MAX = 3  # copies in a row that were overtaken by rounds; then the member waits, too
MEASURED_S_MIN = 5.0  # a copy that is younger says nothing about what the line carries


@define
class CatchUpDelay:
    """A member that could not keep up, and when it is tried again."""

    text: str = ""  # the reason, for people
    carried_bytes_per_s: float = 0.0  # what its line carried; 0: unknown
    # The delay.
    since_s: float = -math.inf
    until_s: float = -math.inf
    tries: int = 0  # failed attempts to bring it in sync
    restarts: int = 0  # copies in a row that rounds have overtaken
    outrun: Fetch | None = None  # the copy before this one, if rounds have overtaken it
    waiting: bool = False  # the delay lasts; else the member is being tried again


class CatchUp:
    """Copies that go on beside the run's commits, and members whose copies cannot."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self._behind: dict[str, CatchUpDelay] = {}  # by peer, attached members only
        self._commits: deque[tuple[float, int]] = deque(maxlen=COMMITS_MAX)  # (when, bytes)

    # ------------------------------------------------------------ facts

    def began(self, member: Member, fetch: Fetch) -> None:
        """Start to measure a copy; the one after an overtaken copy is measured with that."""
        behind = self._behind.get(member.peer)
        if behind is not None and behind.outrun is not None:
            fetch.began_s, fetch.received_before = (
                behind.outrun.began_s,
                behind.outrun.received_before,
            )
            fetch.needed_bytes = behind.outrun.needed_bytes
            return
        fetch.began_s = self.context.now_s
        progress = member.progress
        fetch.received_before = progress.bulk_received_bytes if progress else None

    def heard(self, member: Member, fetch: Fetch) -> None:
        """Start counting what the member receives, at its first report."""
        if fetch.received_before is None and member.progress is not None:
            fetch.began_s = self.context.now_s
            fetch.received_before = member.progress.bulk_received_bytes

    def committed(self, fragment: int, receivers: set[str]) -> None:
        """Count a committed result against the copies of its receivers."""
        size = self.result_bytes(fragment)
        self._commits.append((self.context.now_s, size))
        for member in self.context.roster:
            if member.peer not in receivers:
                continue
            for number, copy in enumerate(member.copies):
                if copy.fetch is not None:
                    copy.fetch.needed_bytes += size
                    if number == fragment:
                        copy.fetch.log_bytes += size
                        copy.fetch.log_count += 1

    def in_sync(self, member: Member) -> None:
        """Forget the delays of a member that is in sync."""
        self._behind.pop(member.peer, None)

    def removed(self, peer: str) -> None:
        self._behind.pop(peer, None)

    # ------------------------------------------------------------ decisions

    def result_bytes(self, fragment: int) -> int:
        """Return the encoded size of one round's result of the fragment, at each receiver."""
        size = self.context.history.sizes[fragment]
        _up, down = self.context.spec.reduce.codecs(fragment)
        per_value = wire_bytes_per_value(down)
        return math.ceil(size.value_count * per_value) + 8 * size.counter_count

    def log_full(self, fetch: Fetch) -> bool:
        """Return whether more results have been committed than a joiner keeps."""
        state_bytes = sum(
            4 * (size.value_count + size.momentum_count) + 8 * size.counter_count
            for size in self.context.history.sizes
        )
        most_bytes = max(state_bytes, LOG_BYTES_MIN)
        return fetch.log_bytes > most_bytes or fetch.log_count >= ROUNDS_HELD_MAX

    def give_up(self, member: Member, fetch: Fetch) -> str:
        """End a copy that cannot succeed.

        Returns:
          Why the member must wait, or "" if the copy may start again at once.
        """
        behind = self._behind.setdefault(member.peer, CatchUpDelay())
        if behind.waiting:  # the copy of another fragment has failed: it is the same try
            return behind.text
        behind.restarts += 1
        behind.outrun = fetch
        carried, needed = self._rates(member, fetch)
        if self.context.now_s - fetch.began_s < MEASURED_S_MIN:
            return ""
        if carried < HEADROOM * needed:
            behind.carried_bytes_per_s = carried
            behind.text = format_slow(carried, needed)
        elif behind.restarts < RESTARTS_MAX:
            return ""
        else:
            behind.carried_bytes_per_s = 0.0
            behind.text = f"rounds have outrun its copy {behind.restarts} times in a row"
        wait_s = min(RETRY_MAX_S, self._retry_first_s * 2.0 ** min(behind.tries, 16))
        behind.since_s, behind.until_s = self.context.now_s, self.context.now_s + wait_s
        behind.tries, behind.restarts = behind.tries + 1, 0
        behind.waiting, behind.outrun = True, None
        again = f"tried again in {wait_s:g} s, or when the run needs less"
        self.context.announce_peer(
            EventKind.SYNC, member.peer, f"cannot keep up: {behind.text}; {again}"
        )
        self.context.tell(member.peer, f"you cannot keep up with the run: {behind.text}; {again}")
        return behind.text

    @property
    def _retry_first_s(self) -> float:
        return RETRY_DEADLINES * self.context.spec.membership.deadline_s

    def carries(self, member: Member, fetch: Fetch) -> bool:
        """Return whether anything arrived since the copy began; if not, the line is cut."""
        return self._rates(member, fetch)[0] > 0

    def _rates(self, member: Member, fetch: Fetch) -> tuple[float, float]:
        """Return what the member received since its copy began, and what the results needed.

        Both in bytes per second.
        """
        seconds = self.context.now_s - fetch.began_s
        if fetch.received_before is None or member.progress is None or seconds <= 0:
            return math.inf, 0.0
        received_bytes = member.progress.bulk_received_bytes - fetch.received_before
        return max(0, received_bytes) / seconds, fetch.needed_bytes / seconds

    def waits(self, member: Member) -> str:
        """Return why no copy to this member may begin now, or "" if one may."""
        behind = self._behind.get(member.peer)
        if behind is None or not behind.waiting:
            return ""
        if self.context.now_s < self._until_s(behind):
            return behind.text
        behind.waiting = False
        return ""

    def _until_s(self, behind: CatchUpDelay) -> float:
        """Return when the member is tried again if nothing is committed meanwhile."""
        if len(self._commits) < 2 or not behind.carried_bytes_per_s:
            return behind.until_s
        first_s, first_bytes = self._commits[0]
        since_bytes = sum(size for _when_s, size in self._commits) - first_bytes
        # By then, without a commit, the run's measured pace has fallen to what the line carries.
        slower_s = first_s + HEADROOM * since_bytes / behind.carried_bytes_per_s
        return min(behind.until_s, max(slower_s, behind.since_s + self._retry_first_s))

    def next_deadline_s(self) -> float:
        """Return when the next waiting member may be tried again."""
        times = [self._until_s(behind) for behind in self._behind.values() if behind.waiting]
        return min((t for t in times if t > self.context.settled_s), default=math.inf)


def format_slow(carried_bytes_per_s: float, needed_bytes_per_s: float) -> str:
    carried, needed = format_rate(carried_bytes_per_s), format_rate(needed_bytes_per_s)
    if carried_bytes_per_s <= needed_bytes_per_s:
        return f"its link carries {carried}, the run's commits need {needed}"
    return (
        f"its link carries {carried}, of which the run's commits need {needed}: "
        "too little is left for the state itself"
    )
