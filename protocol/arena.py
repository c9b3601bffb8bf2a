"""The arenas: memory that a daemon and its trainer share, so tensor bytes cross no socket.

There are two, of the same shape. The daemon writes the *shared* one (global values and counters),
the trainer the *posted* one (pseudo-gradients). Each is

    header   u64 slots, one page
    table    per fragment two u64: sequence (odd while it is being written), and version + 1;
             0 there: the fragment holds nothing whole
    bodies   per fragment: float32 values, then int64 counters, each aligned to 64 bytes

A reader of a fragment checks the sequence before and after (a seqlock), so it never uses a torn
copy. It waits for a writer as long as the writer lives: an outer step over a large fragment, with
its digests, takes seconds. A transfer takes minutes, and no reader waits for it: the bytes for a
whole fragment are kept beside it until all are there. They are written directly only into a
fragment that holds nothing whole (as after a writer that failed), and its readers get
``NotWholeError``.

Messages on the Unix socket announce changes. ``MAIL_SLOT`` counts them, so that a trainer with
nothing to do needs no system call to know it.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

import numpy as np
from numpy.typing import NDArray

from .errors import HoldfastError, LocalProtocolError
from .messages import FragmentSize

HEADER_BYTES = 4_096
ALIGNMENT_BYTES = 64
NOTHING_WHOLE = -1  # the version of a fragment that holds no whole version
FOUNDING_VERSION = 0  # of the run's initial weights

MAIL_SLOT = 0  # shared arena: messages the daemon has sent to the trainer
NAMED_SLOT = 1  # shared arena: the step at which all ranks wait for the word, or ``NO_STEP_NAMED``
NO_STEP_NAMED = 2**64 - 1
STEP_SLOT = 0  # posted arena: the trainer's global step
TOKENS_SLOT = 1  # posted arena: tokens trained since the trainer started
LOSS_SLOT = 2  # posted arena: the last loss, float64 bits
WAITING_SLOT = 3  # posted arena: 0; while the trainer waits, 1 + the messages it has received
SECONDS_SLOT = 4  # posted arena, and the next one: see ``Arena.seconds``; float64 bits
SAMPLES_SLOT = 6  # posted arena: samples trained since the trainer started that a sampler gave
# Of a trainer of several ranks each has slots of its own, as above, behind the first ones. Its
# daemon makes the first ones from these.
RANK_SLOT_COUNT = 8

Values = NDArray[np.float32]
Counters = NDArray[np.int64]


class NotWholeError(HoldfastError):
    """A fragment is being fetched, or its last writer failed. Wait for the daemon's ``Load``."""


def _align(offset: int) -> int:
    return -(-offset // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def arena_bytes(sizes: Sequence[FragmentSize]) -> int:
    return _offsets(sizes)[1]


def _offsets(sizes: Sequence[FragmentSize]) -> tuple[list[tuple[int, int]], int]:
    offset = _align(HEADER_BYTES + 16 * len(sizes))
    places = []
    for size in sizes:
        values_at = offset
        counters_at = _align(values_at + 4 * size.value_count)
        places.append((values_at, counters_at))
        offset = _align(counters_at + 8 * size.counter_count)
    return places, offset


class Arena:
    """Typed views over one arena's bytes.

    Args:
      buffer: writable bytes of ``arena_bytes(sizes)``: a memory map, or a ``bytearray`` in tests.
      sizes: the fragments' sizes; equal on both sides.
      file: descriptor of the file that the buffer maps; the arena closes it.
    """

    def __init__(
        self,
        buffer: mmap.mmap | bytearray | memoryview,
        sizes: Sequence[FragmentSize],
        file: int | None = None,
    ) -> None:
        self._file = file
        self._buffer = buffer
        if file is not None:
            weakref.finalize(self, os.close, file)
        places, total_bytes = _offsets(sizes)
        self._values_at = [values_at for values_at, _ in places]
        self._ends_at = [*self._values_at[1:], total_bytes]
        if len(buffer) < total_bytes:
            raise LocalProtocolError(f"an arena of {len(buffer)} bytes, {total_bytes} needed")
        self.sizes = tuple(sizes)
        self.slots: NDArray[np.uint64] = np.frombuffer(buffer, np.uint64, count=HEADER_BYTES // 8)
        self.loss: NDArray[np.float64] = self.slots[LOSS_SLOT : LOSS_SLOT + 1].view(np.float64)
        # Seconds of a contributing trainer: waiting in the hook, and outside of it. Never reset, so
        # they add up over restarts of the trainer.
        self.seconds: NDArray[np.float64] = self.slots[SECONDS_SLOT : SECONDS_SLOT + 2].view(
            np.float64
        )
        self._table: NDArray[np.uint64] = np.frombuffer(
            buffer, np.uint64, count=2 * len(sizes), offset=HEADER_BYTES
        ).reshape(len(sizes), 2)
        self._values = [
            np.frombuffer(buffer, np.float32, count=size.value_count, offset=values_at)
            for size, (values_at, _) in zip(sizes, places, strict=True)
        ]
        self._counters = [
            np.frombuffer(buffer, np.int64, count=size.counter_count, offset=counters_at)
            for size, (_, counters_at) in zip(sizes, places, strict=True)
        ]

    def rank_slots(self, rank: int) -> NDArray[np.uint64]:
        """Return a rank's slots in the posted arena, of a trainer of several ranks; a view."""
        start = RANK_SLOT_COUNT * (rank + 1)
        return self.slots[start : start + RANK_SLOT_COUNT]

    def values(self, fragment: int) -> Values:
        """Return a fragment's float32 values, shape ``(value_count,)``; a view, not a copy."""
        return self._values[fragment]

    def counters(self, fragment: int) -> Counters:
        """Return a fragment's int64 counters, shape ``(counter_count,)``; a view, not a copy."""
        return self._counters[fragment]

    def write_values(self, fragment: int, start: int, data: NDArray[np.uint8]) -> None:
        """Write bytes into a fragment's values, from byte ``start`` on.

        Fresh memory is written by a system call: direct writes would trap at every page, and the
        kernel would clear each page before it is overwritten.
        """
        if self._file is None:
            self._values[fragment].view(np.uint8)[start : start + data.size] = data
            return
        at, done = self._values_at[fragment] + start, 0
        while done < data.size:
            done += os.pwrite(self._file, data.data[done:], at + done)

    def release(self, fragment: int) -> None:
        """Give a fragment's memory back to the system; it holds zeros then, or what it held.

        The pages that it shares with its neighbours stay. Other systems than Linux keep all.
        """
        if not isinstance(self._buffer, mmap.mmap) or not hasattr(mmap, "MADV_REMOVE"):
            return
        start = -(-self._values_at[fragment] // mmap.PAGESIZE) * mmap.PAGESIZE
        end = self._ends_at[fragment] // mmap.PAGESIZE * mmap.PAGESIZE
        if end > start:
            with suppress(OSError):  # the file is on a file system that has no holes
                self._buffer.madvise(mmap.MADV_REMOVE, start, end - start)

    def version(self, fragment: int) -> int:
        """Return the fragment's version, or ``NOTHING_WHOLE``."""
        return int(self._table[fragment, 1]) + NOTHING_WHOLE

    @contextmanager
    def writing(self, fragment: int, version: int) -> Iterator[None]:
        """Mark the fragment as being written; on leaving it holds ``version``.

        If the block raises, the fragment holds nothing whole. Readers wait meanwhile, so the block
        must not wait for another process or machine.
        """
        sequence_and_version = self._table[fragment]
        sequence_and_version[0] |= np.uint64(1)
        sequence_and_version[1] = 0
        try:
            yield
            sequence_and_version[1] = version - NOTHING_WHOLE
        finally:
            sequence_and_version[0] += np.uint64(1)

    def read(self, fragment: int, copy: Callable[[], None], wait: Callable[[], None]) -> int:
        """Call ``copy`` until the fragment did not change meanwhile; return its version.

        Args:
          copy: must only read the arena and must be repeatable.
          wait: returns after a moment; called repeatedly while the fragment is being written. It
            raises if the writer is dead.

        Raises:
          NotWholeError: there is no version to read.
        """
        while True:
            if int(self._table[fragment, 0]) % 2:
                wait()
            elif (version := self.read_once(fragment, copy)) is not None:
                return version

    def read_once(self, fragment: int, copy: Callable[[], None]) -> int | None:
        """Call ``copy`` once, and return the fragment's version; None if it was written meanwhile.

        Raises:
          NotWholeError: there is no version to read.
        """
        before = int(self._table[fragment, 0])
        if before % 2:
            return None
        version = self.version(fragment)
        if version != NOTHING_WHOLE:
            copy()
        if int(self._table[fragment, 0]) != before:
            return None
        if version == NOTHING_WHOLE:
            raise NotWholeError(f"fragment {fragment} holds nothing whole")
        return version


def create_arena_file(sizes: Sequence[FragmentSize]) -> int:
    """Create an unnamed file of the right length, which exists as long as a process holds it open.

    Returns:
      Its file descriptor.
    """
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("holdfast-arena", os.MFD_CLOEXEC)
    else:
        descriptor, path = tempfile.mkstemp(prefix="holdfast-arena-")
        os.unlink(path)
    os.ftruncate(descriptor, arena_bytes(sizes))
    return descriptor


def map_arena(descriptor: int, sizes: Sequence[FragmentSize]) -> Arena:
    """Map an arena file for reading and writing, shared with the other process."""
    return Arena(mmap.mmap(descriptor, arena_bytes(sizes)), sizes, os.dup(descriptor))
