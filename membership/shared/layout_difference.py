"""How the tensors of a script differ from those of the run."""

from __future__ import annotations

from ...protocol.messages import ModelLayout


def layout_difference(ours: ModelLayout, theirs: ModelLayout) -> str | None:
    """Return the first difference, as the end of a sentence about ``theirs``; None if none."""
    for index, (mine, other) in enumerate(zip(ours.tensors, theirs.tensors, strict=False)):
        if mine == other:
            continue
        if mine.name != other.name:
            return f"tensor {index} is {other.name!r} where the run has {mine.name!r}"
        for name in ("shape", "dtype", "kind", "aliases"):
            has, wants = getattr(other, name), getattr(mine, name)
            if has != wants:
                return f"{mine.name!r} has {name} {_format(has)} where the run has {_format(wants)}"
    have, want = len(theirs.tensors), len(ours.tensors)
    if have > want:
        return f"it has {theirs.tensors[want].name!r}, which the run has not"
    if have < want:
        return f"it lacks {ours.tensors[have].name!r}"
    return None


def _format(value: object) -> str:
    return str(list(value)) if isinstance(value, tuple) else str(value)
