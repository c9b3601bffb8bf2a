"""The states of one copy (a member's fragment), and its transitions as a table.

STALE ---- a transfer starts ----> FETCHING ---- Synced ----> HELD | UNCHECKED
  ^                                   |                        |        |
  |<------ failed, donors gone -------+                        |        | when the version's root
  |<------ differs, or did not apply a commit in time ---------+--------+ is agreed: HELD | STALE
"""

from __future__ import annotations

import enum

from ..state.roster import CopyState


class CopyEvent(enum.Enum):
    """Events of one copy."""

    FETCH = "fetch"  # a transfer began
    AGREES = "agrees"  # it has the run's root
    UNKNOWN = "unknown"  # it has a version whose root is not agreed yet
    DIFFERS = "differs"  # it has another root
    FAILED = "failed"  # the transfer ended without a copy
    LATE = "late"  # a commit was not applied in time, or its result was never received


NEXT_STATE: dict[tuple[CopyState, CopyEvent], CopyState] = {
    (CopyState.STALE, CopyEvent.FETCH): CopyState.FETCHING,
    (CopyState.STALE, CopyEvent.AGREES): CopyState.HELD,  # it caught up by itself
    (CopyState.STALE, CopyEvent.UNKNOWN): CopyState.UNCHECKED,
    (CopyState.STALE, CopyEvent.DIFFERS): CopyState.STALE,
    (CopyState.STALE, CopyEvent.LATE): CopyState.STALE,
    (CopyState.FETCHING, CopyEvent.AGREES): CopyState.HELD,
    (CopyState.FETCHING, CopyEvent.UNKNOWN): CopyState.UNCHECKED,
    (CopyState.FETCHING, CopyEvent.DIFFERS): CopyState.STALE,
    (CopyState.FETCHING, CopyEvent.FAILED): CopyState.STALE,
    (CopyState.UNCHECKED, CopyEvent.AGREES): CopyState.HELD,
    (CopyState.UNCHECKED, CopyEvent.UNKNOWN): CopyState.UNCHECKED,
    (CopyState.UNCHECKED, CopyEvent.DIFFERS): CopyState.STALE,
    (CopyState.UNCHECKED, CopyEvent.LATE): CopyState.STALE,
    (CopyState.HELD, CopyEvent.AGREES): CopyState.HELD,
    (CopyState.HELD, CopyEvent.UNKNOWN): CopyState.UNCHECKED,
    (CopyState.HELD, CopyEvent.DIFFERS): CopyState.STALE,
    (CopyState.HELD, CopyEvent.LATE): CopyState.STALE,
}

RECEIVED_STATES = (CopyState.HELD, CopyState.UNCHECKED)
