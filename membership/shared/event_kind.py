"""The subjects of a run's events."""

from __future__ import annotations

import enum


class EventKind(enum.Enum):
    """Subject of an event; the dashboard filters by it."""

    RUN = "run"  # founded, paused, finished
    JOIN = "join"  # a peer attached or was refused
    LEAVE = "leave"  # a member left, died or was removed
    ROLE = "role"  # a place was taken or given up, a trainer attached or was lost
    SYNC = "sync"  # copies: roots that differ, transfers that failed
    ROUND = "round"  # rounds that were aborted, repaired or run again
    ROUTE = "route"  # routes between members that cannot dial each other
    BAD = "bad"  # a member sent what must not be added
