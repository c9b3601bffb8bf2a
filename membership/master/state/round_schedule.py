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
from collections.abc import Collection, Sequence

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
