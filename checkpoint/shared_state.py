"""The shared state: the arrays that must be bit-identical at every peer.

``SharedState`` owns every fragment's arrays. Values and counters lie in the arena that the trainer
reads, too; outer momentum is private. It knows each fragment's version and digests, changes
fragments only by whole rounds or whole transfers, and keeps old versions readable for receivers
that fetch them:

    pin(v) ---- the live arrays serve v ---- apply() to v + 1: copied first ---- release(v): freed
                                              (only because v is pinned)

    begin() -> IncomingFragment    fetched blocks wait beside a valid fragment, or go straight into
                                   one that is not valid; the fragment has no head until finish()

Everything here is synchronous. ``load_initial``, ``apply``, ``begin``, ``finish`` and ``block`` are
heavy: call them through ``network.run_sync``. Changes of one fragment wait for each other; reading,
pinning and releasing are safe at the same time, from any thread, and do not wait.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from ..protocol.arena import Arena, Counters, Values
from ..protocol.errors import LocalProtocolError, StateMismatchError
from ..protocol.messages import FragmentHead, FragmentSize
from .blocks import (
    DIGEST_BYTES,
    FragmentArrays,
    digest_blocks,
    fragment_root,
    lineage,
)
from .fragment_state import FragmentState
from .incoming_fragment import Find, IncomingFragment

Step = Callable[[Values, Values], None]  # (values, momentum), in place


class SharedState:
    """All fragments of a run's shared state.

    Args:
      sizes: the fragments' sizes.
      arena: the shared arena, of the same sizes; still unwritten.
      run_id: part of every root, so that state of another run never passes for this run's.
      folder: where versions that receivers still read may be kept in files; None: in memory.

    Attributes:
      fragments: each by itself, for readers of arrays and of old versions. Only this object changes
        their arrays.
    """

    def __init__(
        self, sizes: Sequence[FragmentSize], arena: Arena, run_id: str, folder: Path | None = None
    ) -> None:
        if sys.byteorder != "little":
            raise LocalProtocolError("state is digested and sent as little-endian bytes")
        if tuple(sizes) != arena.sizes:
            raise LocalProtocolError("the arena is of other sizes than the state")
        self.sizes = tuple(sizes)
        self.arena = arena
        self.run_id = run_id
        self.fragments = tuple(
            FragmentState(number, size, arena, folder) for number, size in enumerate(sizes)
        )
        self._transfers: dict[int, IncomingFragment] = {}  # the last one that began, by fragment

    def head(self, fragment: int) -> FragmentHead | None:
        """Return a fragment's version and root; None while it is not whole or is being received."""
        state = self.fragments[fragment]
        return state.head if self._open_transfer(fragment) is None else None

    def size_bytes(self, fragment: int) -> int:
        """Return the bytes of a fragment's arrays."""
        return sum(array.nbytes for array in self.fragments[fragment].parts)

    def heads(self) -> tuple[FragmentHead, ...]:
        """Return the heads of all whole fragments, in order."""
        found = (self.head(number) for number in range(len(self.fragments)))
        return tuple(head for head in found if head is not None)

    def lineage(self) -> bytes:
        """Return the lineage of a run that begins with this state, all of it at version 0."""
        heads = self.heads()
        if len(heads) != len(self.sizes) or any(head.version for head in heads):
            raise LocalProtocolError("a lineage is made of version 0 of every fragment")
        return lineage(self.run_id, [head.root for head in heads])

    # ------------------------------------------------------------ changes

    def load_initial(self, fragment: int, values: Values, counters: Counters) -> FragmentHead:
        """Set a fragment to version 0 with these values and counters, and zero momentum."""
        state = self.fragments[fragment]
        _check_shapes(state, values, counters)
        blank = state.blank
        with state.changes, state.changing(), self.arena.writing(fragment, 0):
            self._abandon_transfer(fragment)
            state.kept.clear()
            state.parts.values[:] = values
            if not blank:  # else writing would only allocate the pages
                state.parts.momentum[:] = 0
            state.parts.counters[:] = counters
            return self._digest(state, 0)

    def restore(self, head: FragmentHead, parts: FragmentArrays, digests: bytes) -> None:
        """Set a fragment to ``head`` with arrays that an earlier process saved, checked by then.

        Args:
          digests: of their blocks.
        """
        state = self.fragments[head.fragment]
        ours = state.parts
        _check_shapes(state, parts.values, parts.counters)
        with state.changes, state.changing(), self.arena.writing(head.fragment, head.version):
            ours.values[:] = parts.values
            ours.momentum[:] = parts.momentum
            ours.counters[:] = parts.counters
            state.became(head, digests)

    def apply(
        self,
        fragment: int,
        version_after: int,
        counters: Counters,
        step: Step,
    ) -> FragmentHead:
        """Apply a committed round.

        A valid fragment that is being received may still apply a round; the transfer detects at its
        end whether that changed bytes that it relied on.

        Args:
          version_after: the current version plus 1.
          counters: ``(counter_count,)``, the new counters.
          step: the outer step with the round's mean, called with values and momentum.

        Raises:
          LocalProtocolError: the fragment is not at the version before; nothing was changed.
        """
        state = self.fragments[fragment]
        _check_shapes(state, state.parts.values, counters)
        with state.changes:
            if state.head is None or state.head.version + 1 != version_after:
                raise LocalProtocolError(
                    f"version {version_after} of fragment {fragment} cannot follow {state.head}"
                )
            with state.changing(), self.arena.writing(fragment, version_after):
                step(state.parts.values, state.parts.momentum)
                state.parts.counters[:] = counters
                return self._digest(state, version_after)

    def check_index(self, head: FragmentHead, digests: bytes) -> bool:
        """Return whether these are the block digests of a head."""
        places = self.fragments[head.fragment].places
        return len(digests) == DIGEST_BYTES * len(places) and head.root == fragment_root(
            self.run_id, head.fragment, head.version, self.sizes[head.fragment], digests
        )

    def begin(
        self, head: FragmentHead, digests: bytes, find: Find | None = None
    ) -> IncomingFragment:
        """Start to replace a fragment by ``head``; an earlier transfer of it is abandoned.

        The bytes in memory are digested again, so that a copy with damaged memory is repaired, too.

        Args:
          find: looks for blocks that are not in memory.

        Raises:
          StateMismatchError: the digests are not those of the head.
        """
        if not self.check_index(head, digests):
            raise StateMismatchError(f"the index of fragment {head.fragment} does not fit its root")
        state = self.fragments[head.fragment]
        with state.changes:
            self._abandon_transfer(head.fragment)
            incoming = self._transfers[head.fragment] = IncomingFragment(
                self.arena, state, head, digests
            )
            incoming.start(find)
        return incoming

    def _open_transfer(self, fragment: int) -> IncomingFragment | None:
        transfer = self._transfers.get(fragment)
        return transfer if transfer is not None and transfer.open else None

    def _abandon_transfer(self, fragment: int) -> None:
        if (transfer := self._transfers.pop(fragment, None)) is not None:
            transfer.abandon()

    def forget_kept(self) -> None:
        """Drop the blocks of transfers that did not finish."""
        for state in self.fragments:
            with state.changes:
                state.kept.clear()

    def _digest(self, state: FragmentState, version: int) -> FragmentHead:
        digests = digest_blocks(state.parts, state.places)
        root = fragment_root(self.run_id, state.number, version, state.size, digests)
        head = FragmentHead(state.number, version, root)
        state.became(head, digests)
        return head

    # ------------------------------------------------------------ old versions

    def release_receiver(self, receiver: str) -> None:
        """Release all pins of a receiver."""
        for state in self.fragments:
            state.release(receiver)


def _check_shapes(state: FragmentState, values: Values, counters: Counters) -> None:
    if values.shape != state.parts.values.shape or counters.shape != state.parts.counters.shape:
        raise LocalProtocolError(
            f"fragment {state.number} has {state.parts.values.shape} values and "
            f"{state.parts.counters.shape} counters, got {values.shape} and {counters.shape}"
        )
    if values.dtype != np.float32 or counters.dtype != np.int64:
        raise LocalProtocolError(
            f"float32 and int64 expected, got {values.dtype}, {counters.dtype}"
        )
