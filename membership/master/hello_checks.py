"""Checks of a ``Hello``: all reasons to refuse a peer, each with a sentence that says what to
do.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from ...protocol import messages as m
from ..planning.plan import COUNTER_BYTES, VALUE_BYTES, chunk_elements_of
from ..shared.layout_difference import layout_difference
from ..spec.spec import RunSpec
from .state.context import Context, quoted
from .state.history import RunHistory
from .state.roster import Member

# New processes of one key. Each costs a journal record, so their rate is limited: a burst, then one
# per interval. A service manager restarts a failing daemon more slowly than that.
PROCESSES_MAX = 16
PROCESS_S = 10.0
BLOCK_BYTES = 2**20  # as ``checkpoint.blocks`` cuts state
# Limit of a fragment's state, by the size of its index of blocks. A larger model needs more
# fragments.
FRAGMENT_BYTES_MAX = m.BLOCKS_MAX * BLOCK_BYTES
CHUNKS_MAX = 8 * m.CHUNK_BITS_BYTES_MAX  # of a fragment: ``Held`` has a bit for each

Refusal = tuple[m.RefusalCode, str]


class Processes:
    """Limits how often a key attaches as a new process: a token bucket for each key."""

    def __init__(self) -> None:
        self._spent: dict[str, tuple[float, float]] = {}  # by peer: tokens spent, and when

    def refusal(self, peer: str, now_s: float) -> Refusal | None:
        """Count a new process. Returns why it must wait, or None."""
        for other in [p for p, (n, at_s) in self._spent.items() if self._left(n, at_s, now_s) == 0]:
            del self._spent[other]
        spent = self._left(*self._spent.get(peer, (0.0, now_s)), now_s)
        if spent > PROCESSES_MAX - 1:
            return m.RefusalCode.BUSY, (
                f"this key has come as {PROCESSES_MAX} new processes in a short time: wait "
                f"{PROCESS_S:.0f} s"
            )
        self._spent[peer] = spent + 1, now_s
        return None

    @staticmethod
    def _left(spent: float, at_s: float, now_s: float) -> float:
        return max(0.0, spent - (now_s - at_s) / PROCESS_S)


def refusal(context: Context, peer: str, hello: m.Hello) -> Refusal | None:
    """Return why a peer may not enter now; None if it may."""
    history = context.history
    if hello.version_max < m.VERSION_MIN or hello.version_min > m.VERSION_MAX:
        return m.RefusalCode.VERSION, (
            f"you speak protocol versions {hello.version_min} to {hello.version_max}, "
            f"this master speaks {m.VERSION_MIN} to {m.VERSION_MAX}: upgrade the older side"
        )
    if hello.run_id != context.run_id:
        return m.RefusalCode.RUN, (
            f"this master serves run {context.run_id}, you asked for run {quoted(hello.run_id)}"
        )
    if (out := shut_out(history, peer)) is not None:
        return out
    if history.finished:
        last = history.schedule.last_round
        text = f"the run has committed all its rounds (the last was round {last})"
        return m.RefusalCode.FINISHED, text
    if peer not in context.roster and len(context.roster) >= m.MEMBERS_MAX:
        return (
            m.RefusalCode.FULL,
            (
                f"this run has {m.MEMBERS_MAX} members, the most there are: join again when one has"
                " left, or let its operator start a second run"
            ),
        )
    return layout_refusal(context, hello.layout)


def shut_out(history: RunHistory, peer: str) -> Refusal | None:
    """Refuse a key that was removed for good."""
    if peer not in history.members.revoked:
        return None
    what = (
        "removed from the run"
        if peer in history.members.admitted
        else "refused by the run's operator"
    )
    return m.RefusalCode.KICKED, f"{what}: {quoted(history.members.revoked[peer])}"


def layout_refusal(context: Context, layout: m.ModelLayout | None) -> Refusal | None:
    """Refuse a trainer whose tensors are not the run's."""
    ours = context.history.layout
    if ours is None or layout is None:
        return None
    difference = layout_difference(ours, layout)
    if difference is None:
        return None
    return m.RefusalCode.LAYOUT, f"the script's tensors are not the run's: {quoted(difference)}"


def founding_fault(member: Member, message: m.WeightsSupplied, spec: RunSpec) -> str | None:
    """Return what is wrong with a ``WeightsSupplied``; None if it may found the run."""
    count = len(message.heads)
    if not 1 <= count <= m.FRAGMENTS_MAX or len(message.sizes) != count:
        return f"{count} heads for {len(message.sizes)} fragment sizes"
    for index, head in enumerate(message.heads):
        if head.fragment != index or head.version != 0 or len(head.root) != 32:
            return f"head {index} is not version 0 of fragment {index} with a root"
    if not message.lineage:
        return "no lineage"
    if member.trainer.layout is not None:
        difference = layout_difference(member.trainer.layout, message.layout)
        if difference is not None:
            return f"another layout than its trainer's: {difference}"
    return sizes_fault(message.layout, message.sizes, spec)


def sizes_fault(
    layout: m.ModelLayout, sizes: Sequence[m.FragmentSize], spec: RunSpec
) -> str | None:
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


def _size_fault(size: m.FragmentSize, spec: RunSpec) -> str | None:
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
