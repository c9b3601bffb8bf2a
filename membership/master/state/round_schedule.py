"""The schedule of rounds: each fragment once per ``sync_every`` steps, evenly spread.

    fragment     0      1      0      1      0   ...      (P = 2 fragments, H = 100)
    turn         0      0      1      1      2            of that fragment
    at_step     50    100    150    200    250

A run with a limit of rounds takes the last turn of every fragment at its last step, so that the
final weights include all training.

Due steps are multiples of H / P, floored: peers set step limits so. When the operator changes H,
the next round keeps its step, rounded up to such a multiple: ``moved`` is how far the multiples are
ahead of the rounds.

An aborted round is tried again with the same fragment and step, after a wait that doubles with each
abort in a row, so that a persistent fault does not keep all members busy. Rounds of several
fragments may be in flight at once; no fragment gets a whole turn ahead of another.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterable, Sequence

from ....protocol.messages import MEMBERS_MAX, Progress
from .history import RunHistory
from .roster import Member

RETRY_S = 1.0  # wait after the first abort
RETRY_S_MAX = 30.0  # doubling stops here


def due_step(
    fragment: int,
    turn: int,
    sync_every: int,
    fragment_count: int,
    last_step: int = 0,
    moved: int = 0,
) -> int:
    """Return the step at which a fragment is due for the ``turn``-th time, both counted from 0.

    Args:
      last_step: of the run; 0 for a run without an end.
    """
    step = (turn * fragment_count + fragment + 1 + moved) * sync_every // fragment_count
    return last_step if step <= last_step < step + sync_every else step


def moved_to(turns: Sequence[int], before: int, sync_every: int, moved: int) -> int:
    """Return ``moved`` after a change of ``sync_every``, which was ``before``."""
    count = len(turns)
    turn, fragment = min((turn, fragment) for fragment, turn in enumerate(turns))
    step = due_step(fragment, turn, before, count, moved=moved)
    return -(-step * count // sync_every) - (turn * count + fragment + 1)


def next_fragment(turns: Sequence[int], busy: Collection[int]) -> int | None:
    """Return the fragment whose round is due next.

    Args:
      turns: rounds that each fragment has had.
      busy: fragments that have a round in flight.

    Returns:
      None if all fragments have to wait for a round in flight.
    """
    first = min(range(len(turns)), key=lambda fragment: (turns[fragment], fragment))
    free = [fragment for fragment in range(len(turns)) if fragment not in busy]
    if not free:
        return None
    found = min(free, key=lambda fragment: (turns[fragment], fragment))
    behind = (turns[first] + 1, first)  # the last fragment, one turn later
    return found if (turns[found], found) < behind else None


class Backoff:
    """The wait after aborts in a row; a commit ends the row."""

    def __init__(self) -> None:
        self.abort_count = 0
        self.until_s = -math.inf

    def aborted(self, now_s: float, *, failed: bool = True) -> None:
        """Begin the wait after an abort; one without a failure leaves the row as it is."""
        wait_s = min(RETRY_S_MAX, RETRY_S * 2.0 ** min(self.abort_count, 16)) if failed else RETRY_S
        self.abort_count += failed
        self.until_s = now_s + wait_s

    def committed(self) -> None:
        self.abort_count = 0
        self.until_s = -math.inf


# ---------------------------------------------------------------- totals


RECENT_ROUNDS = 4  # commits over which utilisation is computed
BFLOAT16_BYTES = 2


class RunTotals:
    """Sums over all members since this master started.

    Members report counters that begin with their daemon processes; each process has its own member
    number.
    """

    def __init__(self, history: RunHistory) -> None:
        self.sent_bytes = 0  # by all members to each other, as reported
        # Bytes that data parallel training with bfloat16 gradients would have sent for the same
        # steps: a ring sends each gradient 2 (n - 1) times.
        self.parallel_bytes = 0
        self._history = history
        self._steps = {fragment: commit.at_step for fragment, commit in history.commits.items()}
        self._sent: dict[int, int] = {}  # by member number: bytes sent, as last reported
        # At each of the last commits, by member number: seconds in steps, and seconds waited.
        self._seconds: deque[dict[int, tuple[float, float]]] = deque(maxlen=RECENT_ROUNDS + 1)

    def attached(self, member: Member, *, known: bool) -> None:
        """Begin to count a member's bytes.

        Args:
          known: its process attached before, perhaps to another master; its bytes so far are not
            counted again.
        """
        if not known:
            self._sent[member.number] = 0
            if len(self._sent) > 2 * MEMBERS_MAX:
                del self._sent[next(iter(self._sent))]

    def progress(self, member: Member, message: Progress) -> None:
        """Add the bytes that a member has sent since its last report."""
        before = self._sent.get(member.number, message.bulk_sent_bytes)
        self._sent[member.number] = message.bulk_sent_bytes
        self.sent_bytes += max(0, message.bulk_sent_bytes - before)

    def committed(
        self, fragment: int, at_step: int, contributor_count: int, members: Iterable[Member]
    ) -> None:
        steps = at_step - self._steps.get(fragment, 0)
        self._steps[fragment] = at_step
        values_count = self._history.sizes[fragment].value_count
        gradient_bytes = BFLOAT16_BYTES * values_count
        self.parallel_bytes += 2 * (contributor_count - 1) * gradient_bytes * max(0, steps)
        self._seconds.append(_seconds_of(members))

    def utilisation(self, contributors: Iterable[Member]) -> float | None:
        """Return the share of the last rounds' time spent in steps; None if not known yet."""
        before = self._seconds[0] if self._seconds else {}
        stepped_s = waited_s = 0.0
        for number, (stepped, waited) in _seconds_of(contributors).items():
            stepped_then, waited_then = before.get(number, (0.0, 0.0))
            stepped_s += max(0.0, stepped - stepped_then)
            waited_s += max(0.0, waited - waited_then)
        return stepped_s / (stepped_s + waited_s) if stepped_s + waited_s > 0.0 else None


def _seconds_of(members: Iterable[Member]) -> dict[int, tuple[float, float]]:
    return {
        member.number: (member.progress.stepped_s, member.progress.waited_s)
        for member in members
        if member.progress is not None
    }
