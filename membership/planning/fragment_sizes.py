"""Whether the sizes of a run's fragments are those of its layout, and such as members can hold.

A founder says both. What it says is recorded, and plans, blocks and chunks are made of it at every
start of the master; so it is checked before it is recorded.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from ...protocol.messages import BLOCKS_MAX, CHUNK_BITS_BYTES_MAX, FragmentSize, ModelLayout
from ..spec.spec import RunSpec
from .plan import COUNTER_BYTES, VALUE_BYTES, chunk_elements_of

BLOCK_BYTES = 2**20  # as ``checkpoint.blocks`` cuts state
# Of a fragment's state: so much has an index of blocks. A larger model takes more fragments.
FRAGMENT_BYTES_MAX = BLOCKS_MAX * BLOCK_BYTES
CHUNKS_MAX = 8 * CHUNK_BITS_BYTES_MAX  # of a fragment: a ``Held`` has a bit for each


def sizes_fault(layout: ModelLayout, sizes: Sequence[FragmentSize], spec: RunSpec) -> str | None:
    """What is wrong with the sizes of a run's fragments; None: they may be recorded and planned with."""
    wanted = spec.diloco.fragments
    if len(sizes) != wanted:
        return f"{len(sizes)} fragments, where run.toml says {wanted}"
    elements: Counter[str] = Counter()
    for tensor in layout.tensors:
        # Python's integers do not overflow; sixteen dimensions of 63 bits are a number of 1,008.
        elements[tensor.kind] += math.prod(tensor.shape)
    said = {
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
    for what, (of_fragments, of_tensors) in said.items():
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
    # For one owner chunks are largest; with more they are cut finer, and stay few.
    chunk_count = -(-size.value_count // chunk_elements_of(size, 1, spec.reduce.chunk_bytes))
    if chunk_count >= CHUNKS_MAX:
        return f"has {chunk_count} chunks, fewer than {CHUNKS_MAX} are allowed: use larger ones"
    return None
