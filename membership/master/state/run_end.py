"""How a run ends: with the last of its rounds, or of the epochs of its data."""

from __future__ import annotations

from ...spec.spec import RunSpec
from .history import RunHistory


def ends_by_epochs(history: RunHistory, spec: RunSpec) -> bool:
    """Return whether a finished run has ended with its epochs, and had rounds left."""
    rounds = spec.run.rounds
    return spec.data.epochs > 0 and not 0 < rounds <= history.commit_count


def what_is_committed(history: RunHistory, spec: RunSpec) -> str:
    """Return why a run is finished, such as "all 40 rounds are committed"."""
    count, what = history.commit_count, "round"
    if ends_by_epochs(history, spec):
        count, what = spec.data.epochs, "epoch"
    return f"the only {what} is committed" if count == 1 else f"all {count} {what}s are committed"


def how_to_go_on(history: RunHistory, spec: RunSpec) -> tuple[str, str]:
    """Return the command with which a finished run goes on, and its goal ("round N")."""
    what = "epoch" if ends_by_epochs(history, spec) else "round"
    return f"`holdfast resume --{what}s N`", f"{what} N"
