"""The parts of a model that a trainer's ranks hold: do they make it whole, and who writes it?"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

from ...protocol.messages import ModelLayout, RankPart, TensorBox, TensorSpec

VALUES_NAMED_MAX = 4  # parts that an error lists


class RankPartsError(Exception):
    """The ranks do not hold the model exactly; the text names the tensor and its fault."""


def box_of(part: RankPart, layout: ModelLayout, index: int) -> TensorBox:
    if part.boxes:
        return part.boxes[index]
    shape = layout.tensors[index].shape
    return TensorBox((0,) * len(shape), shape)


def writers(
    layout: ModelLayout, parts: Sequence[RankPart], far: Collection[int] = ()
) -> list[list[int]]:
    """Return for each rank the tensors that it writes; of equal parts one rank writes, the least
    loaded of those beside the daemon, if there are any.

    Args:
      parts: of all ranks, in their order.
      far: ranks on other hosts, from which what is written has to be sent.

    Raises:
      RankPartsError: a part is outside of its tensor, two parts overlap without being equal, or a
        part of a tensor is held by no rank.
    """
    for part in parts:
        if part.boxes and len(part.boxes) != len(layout.tensors):
            raise RankPartsError(
                f"rank {part.rank} declares parts of {len(part.boxes)} tensors and the model has "
                f"{len(layout.tensors)}"
            )
    written: list[list[int]] = [[] for _ in parts]
    loads = [0] * len(parts)
    for index, spec in enumerate(layout.tensors):
        holders: dict[TensorBox, list[int]] = {}
        for rank, part in enumerate(parts):
            holders.setdefault(box_of(part, layout, index), []).append(rank)
        _require_exact(spec, holders)
        for box, ranks in holders.items():
            count = math.prod(box.shape)
            if count:
                writer = min(ranks, key=lambda rank: (rank in far, loads[rank]))
                loads[writer] += count
                written[writer].append(index)
    return written


def _require_exact(spec: TensorSpec, holders: dict[TensorBox, list[int]]) -> None:
    boxes = [box for box in holders if math.prod(box.shape)]
    for box in boxes:
        fits = len(box.start) == len(box.shape) == len(spec.shape) and all(
            start + length <= full
            for start, length, full in zip(box.start, box.shape, spec.shape, strict=True)
        )
        if not fits:
            raise RankPartsError(
                f"rank {holders[box][0]} holds {_text(box)} of tensor {spec.name!r}, whose shape is"
                f" {spec.shape}"
            )
    for number, box in enumerate(boxes):
        for other in boxes[:number]:
            if _overlap(box, other):
                raise RankPartsError(
                    f"ranks {holders[other][0]} and {holders[box][0]} hold parts of tensor"
                    f" {spec.name!r} that overlap: {_text(other)} and {_text(box)}"
                )
    held, whole = sum(math.prod(box.shape) for box in boxes), math.prod(spec.shape)
    if whole and not held:
        raise RankPartsError(
            f"tensor {spec.name!r} is in no rank: the stages of a pipeline must together have all"
            " tensors of the whole model"
        )
    if held != whole:
        named = ", ".join(
            f"rank {holders[box][0]} {_text(box)}" for box in boxes[:VALUES_NAMED_MAX]
        )
        more = ", ..." if len(boxes) > VALUES_NAMED_MAX else ""
        raise RankPartsError(
            f"{whole - held} of the {whole} values of tensor {spec.name!r} {spec.shape} are held by"
            f" no rank: {named}{more}"
        )


def _overlap(one: TensorBox, other: TensorBox) -> bool:
    return all(
        start < other_start + other_length and other_start < start + length
        for start, length, other_start, other_length in zip(
            one.start, one.shape, other.start, other.shape, strict=True
        )
    )


def _text(box: TensorBox) -> str:
    """Return a part as Python writes it: "[0:17, 0:8]"."""
    if len(box.start) != len(box.shape):
        return f"{box.shape} from {box.start} on"
    ranges = (
        f"{start}:{start + length}" for start, length in zip(box.start, box.shape, strict=True)
    )
    return f"[{', '.join(ranges)}]"
