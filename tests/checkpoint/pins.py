"""What a state keeps for its receivers."""

from __future__ import annotations

from holdfast.checkpoint.shared_state import SharedState


def pinned(state: SharedState, fragment: int) -> tuple[int, ...]:
    """Return the pinned versions."""
    return tuple(sorted(state.fragments[fragment]._pins))


def copied(state: SharedState, fragment: int) -> tuple[int, ...]:
    """Return the pinned versions that had to be copied."""
    pins = state.fragments[fragment]._pins
    return tuple(sorted(version for version, pin in pins.items() if pin.copy is not None))


def copied_to_files(state: SharedState, fragment: int) -> tuple[int, ...]:
    """Return the pinned versions whose copy lies in a file."""
    pins = state.fragments[fragment]._pins
    return tuple(version for version, pin in sorted(pins.items()) if pin.copy and pin.copy._file)
