"""The check of a run's fragment sizes: they must match its layout, and be within members' limits.

A founder supplies both. The master records them and derives plans, blocks and chunks from them at
every start, so they are checked before they are recorded.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from ...protocol.messages import BLOCKS_MAX, CHUNK_BITS_BYTES_MAX, FragmentSize, ModelLayout
from ..spec.spec import RunSpec
from .plan import COUNTER_BYTES, VALUE_BYTES, chunk_elements_of

BLOCK_BYTES = 2**20  # as ``checkpoint.blocks`` cuts state
# Limit of a fragment's state, by the size of its index of blocks. A larger model needs more
# fragments.
FRAGMENT_BYTES_MAX = BLOCKS_MAX * BLOCK_BYTES
CHUNKS_MAX = 8 * CHUNK_BITS_BYTES_MAX  # of a fragment: ``Held`` has a bit for each


def sizes_fault(layout: ModelLayout, sizes: Sequence[FragmentSize], spec: RunSpec) -> str | None:
    """Return what is wrong with the sizes of a run's fragments, or None."""
    wanted = spec.diloco.fragments
    if len(sizes) != wanted:
        return f"{len(sizes)} fragments, where run.toml says {wanted}"
    elements: Counter[str] = Counter()
    for tensor in layout.tensors:
        # Sixteen dimensions of 63 bits make 1,008 bits; Python's integers do not overflow.
        elements[tensor.kind] += math.prod(tensor.shape)
    sums = {
        "values": (
            sum(size.value_count for size in sizes),
            elements["parameter"] + elements["buffer"],
        ),
        "values with momentum": (
            sum(size.momentum_count for size in sizes),
            elements["parameter"],
        ),
        "counters": (sum(size.counter_count for size in sizes), elements["counter"]),
    }
    for what, (of_fragments, of_tensors) in sums.items():
        if of_fragments != of_tensors:
            return f"its fragments have {of_fragments} {what}, its tensors {of_tensors}"
    for number, size in enumerate(sizes):
        if (fault := _size_fault(size, spec)) is not None:
            return f"fragment {number} {fault}"
    return None


def _size_fault(size: FragmentSize, spec: RunSpec) -> str | None:
    if size.momentum_count > size.value_count:
        return f"has {size.momentum_count} values with momentum, of {size.value_count}"
    state_bytes = VALUE_BYTES * (size.value_count + size.momentum_count)
    state_bytes += COUNTER_BYTES * size.counter_count
    if state_bytes > FRAGMENT_BYTES_MAX:
        return f"takes {state_bytes} bytes, at most {FRAGMENT_BYTES_MAX}: use more fragments"
    # Chunks are largest for one owner. More owners get smaller chunks, but a limited number of
    # them.
    chunk_count = -(-size.value_count // chunk_elements_of(size, 1, spec.reduce.chunk_bytes))
    if chunk_count >= CHUNKS_MAX:
        return f"has {chunk_count} chunks, fewer than {CHUNKS_MAX} are allowed: use larger ones"
    return None
