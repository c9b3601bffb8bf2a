"""What a state keeps for its receivers."""

from __future__ import annotations

from holdfast.checkpoint.shared_state import SharedState


def pinned(state: SharedState, fragment: int) -> tuple[int, ...]:
    """Return the pinned versions."""
    return tuple(sorted(state._fragments[fragment]._pins))


def copied(state: SharedState, fragment: int) -> tuple[int, ...]:
    """Return the pinned versions that had to be copied: each costs a fragment's memory."""
    pins = state._fragments[fragment]._pins
    return tuple(sorted(version for version, pin in pins.items() if pin.parts is not None))
