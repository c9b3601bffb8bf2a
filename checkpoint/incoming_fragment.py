"""A fragment that is being received, block by verified block.

Blocks of a valid fragment wait beside it until all are here; blocks of one that is not valid are
written at once. A block that is here, came for another transfer, or is all zeros is not missing.

``accept`` is called from lanes' threads, several at a time, and perhaps once more after the
transfer is over; everything else by the owner of the transfer.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
from blake3 import blake3

from ..protocol.arena import Arena
from ..protocol.errors import LocalProtocolError, StateMismatchError
from ..protocol.messages import FragmentHead
from .blocks import (
    DIGEST_BYTES,
    VALUES,
    BlockPlace,
    Bytes,
    differing_blocks,
    zeros_digest,
)
from .fragment_state import FragmentState

Find = Callable[[bytes], bytes | memoryview | None]
"""Returns the checked bytes for a digest, or None."""


class IncomingFragment:
    """One transfer of a fragment; ``SharedState.begin`` makes it.

    Attributes:
      head: the head after the transfer.
      missing: indices of the blocks that have not come yet.
      open: the transfer can still take blocks and be installed.
      in_place: blocks are written to the live arrays at once, so their buffers can be used again.
    """

    def __init__(
        self, arena: Arena, fragment: FragmentState, head: FragmentHead, digests: bytes
    ) -> None:
        self.head = head
        self.missing: set[int] = set()
        self.in_place = fragment.head is None
        self.open = True
        self._arena = arena
        self._fragment = fragment
        self._digests = digests
        self._staged: dict[int, Bytes] = {}
        # Held while a block is written, so that none is written after the transfer is over.
        self._lock = threading.Lock()

    def place(self, index: int) -> BlockPlace:
        """Return the position of a block."""
        return self._fragment.places[index]

    def digest(self, index: int) -> bytes:
        return self._digests[DIGEST_BYTES * index : DIGEST_BYTES * (index + 1)]

    def accept(self, index: int, data: bytes | bytearray | memoryview) -> bool:
        """Take one block. Unless ``in_place``, ``data`` must not change any more.

        Returns:
          False if the block is here already or the transfer is over.

        Raises:
          StateMismatchError: the bytes do not match the index; nothing was changed.
        """
        if blake3(data).digest() != self.digest(index):
            raise StateMismatchError(
                f"block {index} of fragment {self.head.fragment} does not match its digest",
                (index,),
            )
        with self._lock:
            if not self.open or index not in self.missing:
                return False
            self._put(index, np.frombuffer(data, np.uint8))
        return True

    def _put(self, index: int, block: Bytes) -> None:
        if self.in_place:
            fragment, place = self._fragment, self.place(index)
            fragment.blank = False
            if place.part == VALUES:
                self._arena.write_values(fragment.number, place.start, block)
            else:
                place.of(fragment.parts)[:] = block
        else:
            self._staged[index] = block
        self.missing.discard(index)

    def finish(self) -> FragmentHead:
        """Install the fragment, and digest all of it: what did not come may have changed.

        Raises:
          LocalProtocolError: blocks are missing, or the transfer was given up.
          StateMismatchError: a block changed; the fragment is not valid.
        """
        self._check_open()
        if self.missing:
            raise LocalProtocolError(f"{len(self.missing)} blocks are still missing")
        fragment = self._fragment
        try:
            with (
                fragment.changes,
                fragment.changing(),
                self._arena.writing(fragment.number, self.head.version),
            ):
                for index, block in self._staged.items():
                    self.place(index).of(fragment.parts)[:] = block
                if differing := differing_blocks(fragment.digest_all(), self._digests):
                    why = f"fragment {fragment.number} changed while it was received"
                    raise StateMismatchError(why, differing)
                fragment.became(self.head, self._digests)
                self._staged.clear()
        finally:
            self.abandon()
        return self.head

    def abandon(self) -> None:
        """End the transfer without installing it; does nothing after ``finish``.

        A valid fragment stays unchanged, and the blocks that came are kept for the next transfer.
        """
        with self._lock:
            if self.open:
                self.open = False
                self._fragment.kept.update(
                    (self.digest(index), block) for index, block in self._staged.items()
                )
            self._staged.clear()

    def start(self, find: Find | None = None) -> None:
        """Find the missing blocks; ``SharedState.begin`` calls it.

        Args:
          find: looks for blocks that are not in memory.
        """
        fragment = self._fragment
        self.missing = set(differing_blocks(fragment.digest_all(), self._digests))
        kept, fragment.kept = fragment.kept, {}
        for index in sorted(self.missing):
            digest, size_bytes = self.digest(index), self.place(index).size_bytes
            if (block := kept.get(digest)) is not None:
                self._put(index, block)
            elif digest == zeros_digest(size_bytes):
                self._put(index, np.zeros(size_bytes, np.uint8))
            elif find is not None and (data := find(digest)) is not None:
                self._put(index, np.frombuffer(data, np.uint8))

    def _check_open(self) -> None:
        if not self.open:
            raise LocalProtocolError(f"the transfer of {self.head} was given up or is finished")
