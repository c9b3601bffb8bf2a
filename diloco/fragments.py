"""The division of a model's tensors into fragments, and each tensor's place in its fragment.

A fragment is a set of tensors that one round synchronises. Inside it the parameters come first,
then the floating buffers, then the counters, each in the order of the layout; parameters and
buffers share one float32 vector, the counters one int64 vector:

    values    [ parameters (momentum_count) | buffers ]      (value_count,) float32
    counters  [ counters ]                                   (counter_count,) int64

Everything here is a pure function of the layout, so every peer computes the same fragments.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

PARAMETER = "parameter"  # float, averaged through the outer optimizer
BUFFER = "buffer"  # float, averaged plainly
COUNTER = "counter"  # integer or bool, takes the maximum over peers
KINDS = (PARAMETER, BUFFER, COUNTER)  # also their order inside a fragment

VALUE_BYTES = 4  # float32
COUNTER_BYTES = 8  # int64

# Tensors outside every layer (embeddings, the head) get a fragment of their own if they have at
# least this part of an even share of the bytes; a smaller fragment would waste a round.
APART_SHARE_MIN = 0.5


@dataclass(frozen=True)
class TensorShape:
    """A tensor's name, shape and kind (one of ``KINDS``)."""

    name: str
    shape: tuple[int, ...]
    kind: str

    @property
    def count(self) -> int:
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        return self.count * (COUNTER_BYTES if self.kind == COUNTER else VALUE_BYTES)


@dataclass(frozen=True)
class TensorSlot:
    """A tensor's place in its fragment: ``count`` elements from ``offset`` on.

    Attributes:
      index: the tensor's, in the layout.
      offset: into the fragment's counters for a counter, into its values otherwise.
    """

    index: int
    offset: int
    count: int


@dataclass(frozen=True)
class Fragment:
    """Tensors that one round synchronises.

    Attributes:
      places: one per tensor, in the fragment's order.
      value_count: float32 elements, parameters first.
      momentum_count: those of parameters, which have an outer momentum.
      counter_count: int64 elements.
    """

    places: tuple[TensorSlot, ...]
    value_count: int
    momentum_count: int
    counter_count: int

    @property
    def tensors(self) -> tuple[int, ...]:
        """Indices into the layout, in the fragment's order."""
        return tuple(place.index for place in self.places)

    @property
    def bytes(self) -> int:
        return self.value_count * VALUE_BYTES + self.counter_count * COUNTER_BYTES


def split(tensors: Sequence[TensorShape], fragment_count: int) -> tuple[Fragment, ...]:
    """Divide a layout into fragments; every tensor is in exactly one of them.

    A layer is all tensors whose names agree up to their first integer component:
    ``h.3.attn.weight`` and ``h.3.ln.bias`` belong to ``h.3``. In a model without such names every
    module counts as a layer. Tensors outside the layers (embeddings, final norm, head) are kept
    together in the last fragment, unless they are so small that they join the lightest one.

    Layers are strided over depth (arXiv 2501.18512, section 2): of every ``Q`` consecutive layers
    each of the ``Q`` layer fragments gets one, and the heaviest goes to the fragment that is
    lightest so far. Fragments therefore differ by at most one layer's bytes, and layer ``i`` of
    layers of equal size is in fragment ``i % Q``.

    Args:
      tensors: the layout; tied tensors appear once.
      fragment_count: at least 1; 1 means one fragment of everything.

    Raises:
      ValueError: there is nothing to split, or there are fewer groups of tensors than fragments.
    """
    _require_tensors(tensors)
    if fragment_count == 1:
        return (_fragment(tensors, range(len(tensors))),)

    layers, apart = _groups(tensors)
    group_count = len(layers) + bool(apart)
    if fragment_count > group_count:
        raise ValueError(
            f"{fragment_count} fragments asked for, but the model has only {group_count} "
            f"group{'s' if group_count != 1 else ''} of tensors to form them from"
        )
    layer_bytes = [_bytes(tensors, layer) for layer in layers]
    apart_bytes = _bytes(tensors, apart)
    fair_bytes = (sum(layer_bytes) + apart_bytes) / fragment_count
    stays_apart = bool(apart) and (
        fragment_count > len(layers) or apart_bytes >= APART_SHARE_MIN * fair_bytes
    )
    bins = [
        [index for layer in layer_numbers for index in layers[layer]]
        for layer_numbers in _strided(layer_bytes, fragment_count - stays_apart)
    ]
    if stays_apart:
        bins.append(apart)
    elif apart:
        min(bins, key=lambda indices: _bytes(tensors, indices)).extend(apart)
    return tuple(_fragment(tensors, indices) for indices in bins)


def grouped(
    tensors: Sequence[TensorShape], groups: Sequence[Sequence[str]]
) -> tuple[Fragment, ...]:
    """Divide a layout into given groups of tensors; every tensor is in exactly one fragment.

    Args:
      tensors: the layout; tied tensors appear once, under the first of their names.
      groups: for each fragment the patterns of its tensors' names (``*``, ``?``, ``[...]``; a ``*``
        matches dots too).

    Raises:
      ValueError: there is nothing to divide, a tensor is in no group or in several, or a
        pattern matches no tensor; the text names it.
    """
    _require_tensors(tensors)
    bins: list[list[int]] = [[] for _ in groups]
    unused = {(number, pattern) for number, group in enumerate(groups) for pattern in group}
    for index, tensor in enumerate(tensors):
        homes: dict[int, str] = {}
        for number, group in enumerate(groups):
            for pattern in group:
                if fnmatchcase(tensor.name, pattern):
                    homes.setdefault(number, pattern)
                    unused.discard((number, pattern))
        if not homes:
            raise ValueError(f"tensor {tensor.name!r} is in no group")
        if len(homes) > 1:
            found = " and ".join(f"{pattern!r} of group {n}" for n, pattern in homes.items())
            raise ValueError(f"tensor {tensor.name!r} is in several groups: {found}")
        bins[next(iter(homes))].append(index)
    for number, group in enumerate(groups):
        for pattern in group:
            if (number, pattern) in unused:
                raise ValueError(
                    f"{pattern!r} of group {number} matches no tensor (tied tensors have the "
                    f"first of their names only; the model has {_list_names(tensors)})"
                )
    return tuple(_fragment(tensors, indices) for indices in bins)


def _list_names(tensors: Sequence[TensorShape]) -> str:
    names = [tensor.name for tensor in tensors]
    return ", ".join(names if len(names) <= 4 else [*names[:3], "...", names[-1]])


def _require_tensors(tensors: Sequence[TensorShape]) -> None:
    if not tensors:
        raise ValueError("the model has no tensors to share")


def _groups(tensors: Sequence[TensorShape]) -> tuple[list[list[int]], list[int]]:
    """Return the layers in order of first appearance, and the tensors outside of all layers."""
    layers: dict[tuple[str, ...], list[int]] = {}
    apart: list[int] = []
    for index, tensor in enumerate(tensors):
        key = _layer(tensor.name)
        if key is None:
            apart.append(index)
        else:
            layers.setdefault(key, []).append(index)
    if layers:
        return list(layers.values()), apart
    modules: dict[str, list[int]] = {}
    for index, tensor in enumerate(tensors):
        modules.setdefault(tensor.name.rpartition(".")[0], []).append(index)
    return list(modules.values()), []


def _layer(name: str) -> tuple[str, ...] | None:
    parts = name.split(".")
    for depth, part in enumerate(parts):
        if part.isascii() and part.isdigit():
            return tuple(parts[: depth + 1])
    return None


def _strided(layer_bytes: Sequence[int], bin_count: int) -> list[list[int]]:
    bins: list[list[int]] = [[] for _ in range(bin_count)]
    load_bytes = [0] * bin_count
    for start in range(0, len(layer_bytes), bin_count):
        stride = range(start, min(start + bin_count, len(layer_bytes)))
        # Both sorts are stable: equal layers go to equal fragments in their own order.
        heaviest_first = sorted(stride, key=lambda layer: -layer_bytes[layer])
        lightest_first = sorted(range(bin_count), key=lambda number: load_bytes[number])
        for layer, number in zip(heaviest_first, lightest_first, strict=False):
            bins[number].append(layer)
            load_bytes[number] += layer_bytes[layer]
    return bins


def _bytes(tensors: Sequence[TensorShape], indices: Sequence[int]) -> int:
    return sum(tensors[index].bytes for index in indices)


def _fragment(tensors: Sequence[TensorShape], indices: Sequence[int]) -> Fragment:
    ordered = sorted(indices, key=lambda index: (KINDS.index(tensors[index].kind), index))
    places = []
    value_count = momentum_count = counter_count = 0
    for index in ordered:
        tensor = tensors[index]
        if tensor.kind == COUNTER:
            places.append(TensorSlot(index, counter_count, tensor.count))
            counter_count += tensor.count
            continue
        places.append(TensorSlot(index, value_count, tensor.count))
        value_count += tensor.count
        if tensor.kind == PARAMETER:
            momentum_count = value_count
    return Fragment(tuple(places), value_count, momentum_count, counter_count)
