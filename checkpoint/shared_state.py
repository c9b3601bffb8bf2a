"""The shared state: what must be bit-identical at every peer, and nothing else.

``SharedState`` owns every fragment's arrays. Values and counters lie in the arena that the trainer
reads too, outer momentum is private. It knows each fragment's version and digests, changes them
only by whole rounds or whole transfers, and keeps old versions readable for those who fetch them:

    pin(v) ---- the live arrays serve v ---- apply() to v + 1: copied first ---- release(v): freed
                                              (only because v is pinned)

    begin() -> Incoming    fetched blocks wait beside a valid fragment, or go straight into one that
                           is not valid; the fragment has no head until finish()

Everything here is synchronous. ``load_initial``, ``apply``, ``begin``, ``finish`` and ``block`` are
heavy: call them through ``network.run_sync``. Whoever changes a fragment waits for whoever does so
already; reading, pinning and releasing are safe beside that, from any thread, and wait for nobody.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

import numpy as np

from ..protocol.arena import Arena, Counters, Values
from ..protocol.errors import LocalProtocolError, StateMismatchError
from ..protocol.messages import FragmentHead, FragmentSize
from .blocks import (
    DIGEST_BYTES,
    BlockPlace,
    FragmentArrays,
    digest_blocks,
    fragment_root,
    lineage,
)
from .fragment_state import FragmentState
from .incoming_fragment import Find, IncomingFragment

Step = Callable[[Values, Values, Values], None]  # (values, momentum, mean), in place


class SharedState:
    """All fragments of a run's shared state.

    Args:
      sizes: the fragments' sizes.
      arena: the shared arena, of the same sizes; nothing was ever written to it.
      run_id: goes into every root, so state of another run never passes for this one's.
    """

    def __init__(self, sizes: Sequence[FragmentSize], arena: Arena, run_id: str) -> None:
        if sys.byteorder != "little":
            raise LocalProtocolError("state is digested and sent as little-endian bytes")
        if tuple(sizes) != arena.sizes:
            raise LocalProtocolError("the arena is of other sizes than the state")
        self.sizes = tuple(sizes)
        self.arena = arena
        self.run_id = run_id
        self._fragments = tuple(
            FragmentState(number, size, arena) for number, size in enumerate(sizes)
        )
        self._transfers: dict[int, IncomingFragment] = {}  # the last one that began, by fragment

    def values(self, fragment: int) -> Values:
        """Float32 values, parameters first; a view, to be read only."""
        return self._fragments[fragment].parts.values

    def momentum(self, fragment: int) -> Values:
        """Outer momentum of the parameters; a view, to be read only."""
        return self._fragments[fragment].parts.momentum

    def counters(self, fragment: int) -> Counters:
        """Int64 counters; a view, to be read only."""
        return self._fragments[fragment].parts.counters

    def parts(self, fragment: int) -> FragmentArrays:
        """All its arrays; views, to be read only."""
        return self._fragments[fragment].parts

    def places(self, fragment: int) -> tuple[BlockPlace, ...]:
        """Where the fragment's blocks are."""
        return self._fragments[fragment].places

    def head(self, fragment: int) -> FragmentHead | None:
        """Version and root; None while the fragment is not whole or is being received."""
        state = self._fragments[fragment]
        return state.head if self._open_transfer(fragment) is None else None

    def size_bytes(self, fragment: int) -> int:
        """Of all its arrays."""
        return sum(array.nbytes for array in self._fragments[fragment].parts)

    def heads(self) -> tuple[FragmentHead, ...]:
        """Heads of all fragments that are whole, in order."""
        found = (self.head(number) for number in range(len(self._fragments)))
        return tuple(head for head in found if head is not None)

    def lineage(self) -> bytes:
        """The lineage of a run that is founded on the present state, all of it at version 0."""
        heads = self.heads()
        if len(heads) != len(self.sizes) or any(head.version for head in heads):
            raise LocalProtocolError("a lineage is made of version 0 of every fragment")
        return lineage(self.run_id, [head.root for head in heads])

    # ------------------------------------------------------------ changes

    def load_initial(self, fragment: int, values: Values, counters: Counters) -> FragmentHead:
        """Make these the fragment's version 0, with zero momentum."""
        state = self._fragments[fragment]
        _check_shapes(state, values, counters)
        with state.changes, state.changing(), self.arena.writing(fragment, 0):
            self._abandon_transfer(fragment)
            state.kept.clear()
            state.parts.values[:] = values
            state.parts.momentum[:] = 0
            state.parts.counters[:] = counters
            return self._digest(state, 0)

    def restore(self, head: FragmentHead, parts: FragmentArrays) -> None:
        """Make these the fragment's ``head``, as an earlier process held it.

        Raises:
          StateMismatchError: they are not what its root says; the fragment holds nothing whole.
        """
        state = self._fragments[head.fragment]
        ours = state.parts
        if any(
            getattr(ours, name).shape != getattr(parts, name).shape
            or getattr(ours, name).dtype != getattr(parts, name).dtype
            for name in FragmentArrays._fields
        ):
            raise StateMismatchError(f"fragment {head.fragment} has other arrays", ())
        with state.changes, state.changing(), self.arena.writing(head.fragment, head.version):
            ours.values[:] = parts.values
            ours.momentum[:] = parts.momentum
            ours.counters[:] = parts.counters
            if self._digest(state, head.version) != head:
                raise StateMismatchError(f"fragment {head.fragment} does not have its root", ())

    def apply(
        self,
        fragment: int,
        version_after: int,
        mean_values: Values,
        mean_counters: Counters,
        step: Step,
    ) -> FragmentHead:
        """Apply a committed round.

        A fragment that is valid while it is being received may still take the round it was about to
        take; the transfer finds out at its end if that changed bytes that it had relied on.

        Args:
          version_after: the present version plus 1.
          mean_values: ``(value_count,)``, mean pseudo-gradient.
          mean_counters: ``(counter_count,)``, what the counters become.
          step: the outer step, called with values, momentum and ``mean_values``.

        Raises:
          LocalProtocolError: the fragment is not at the version before; nothing was changed.
        """
        state = self._fragments[fragment]
        _check_shapes(state, mean_values, mean_counters)
        with state.changes:
            if state.head is None or state.head.version + 1 != version_after:
                raise LocalProtocolError(
                    f"version {version_after} of fragment {fragment} cannot follow {state.head}"
                )
            with state.changing(), self.arena.writing(fragment, version_after):
                step(state.parts.values, state.parts.momentum, mean_values)
                state.parts.counters[:] = mean_counters
                return self._digest(state, version_after)

    def digest_now(self, fragment: int) -> tuple[FragmentHead, bytes] | None:
        """Version, root and block digests by the bytes that are in memory now.

        Not what was remembered when they got there: who compares memories wants to know. Heavy.

        Returns:
          None: the fragment is not whole, or is being received.
        """
        state = self._fragments[fragment]
        with state.changes:
            if state.head is None or self._open_transfer(fragment) is not None:
                return None
            version, digests = state.head.version, digest_blocks(state.parts, state.places)
        root = fragment_root(self.run_id, fragment, version, state.size, digests)
        return FragmentHead(fragment, version, root), digests

    def check_index(self, head: FragmentHead, digests: bytes) -> bool:
        """Whether these are the block digests of that head."""
        places = self._fragments[head.fragment].places
        return len(digests) == DIGEST_BYTES * len(places) and head.root == fragment_root(
            self.run_id, head.fragment, head.version, self.sizes[head.fragment], digests
        )

    def begin(
        self, head: FragmentHead, digests: bytes, find: Find | None = None
    ) -> IncomingFragment:
        """Start to replace a fragment by ``head``; an earlier transfer of it is given up.

        Our own bytes are digested afresh, so a copy that was damaged in memory heals too.

        Args:
          find: where else to look for blocks than in our memory.

        Raises:
          StateMismatchError: the digests are not that head's.
        """
        if not self.check_index(head, digests):
            raise StateMismatchError(f"the index of fragment {head.fragment} does not fit its root")
        state = self._fragments[head.fragment]
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
        """Nothing is missing: blocks of transfers that ended too early are of no use."""
        for state in self._fragments:
            with state.changes:
                state.kept.clear()

    def _digest(self, state: FragmentState, version: int) -> FragmentHead:
        digests = digest_blocks(state.parts, state.places)
        root = fragment_root(self.run_id, state.number, version, state.size, digests)
        head = FragmentHead(state.number, version, root)
        state.became(head, digests)
        return head

    # ------------------------------------------------------------ old versions

    def pin(self, fragment: int, version: int, receiver: str) -> bool:
        """Keep a version readable until ``receiver`` is released; one still to come counts too.

        Returns:
          False: that version is past and gone, or the fragment is not whole.
        """
        return self._fragments[fragment].pin(version, receiver)

    def release(self, fragment: int, version: int, receiver: str) -> None:
        """``receiver`` needs that version no more; unknown ones are ignored."""
        self._fragments[fragment].release(receiver, version)

    def release_receiver(self, receiver: str) -> None:
        """``receiver`` needs nothing any more: it left."""
        for state in self._fragments:
            state.release(receiver)

    def pinned(self, fragment: int) -> tuple[int, ...]:
        """Versions that somebody still needs."""
        return self._fragments[fragment].pinned_versions()

    def copied(self, fragment: int) -> tuple[int, ...]:
        """Pinned versions that had to be copied: each costs a fragment's memory."""
        return self._fragments[fragment].copied_versions()

    def index(self, fragment: int, version: int) -> bytes:
        """Block digests of a version, joined. Raises NotHeldError."""
        return self._fragments[fragment].index(version)

    def block(self, fragment: int, version: int, index: int) -> memoryview:
        """Bytes of a block that will not change any more. Raises NotHeldError."""
        return self._fragments[fragment].block(version, index)


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
