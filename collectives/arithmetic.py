"""The numbers of a reduction: how a fragment is cut, what is added in which order, what is hashed.

Pure functions and records over numpy arrays: no I/O, no waiting. Everything that decides a bit of
the result is in this file and in ``codecs``.

The weighted mean of a chunk, for contributors 1..n *in the order of the Reduce message*, which is
member order, with weights w_i, clip factors s_i and decoded values x_i:

    c_i  = float32(w_i / max w)                    computed in float64
    f_i  = float32(float64(c_i) * s_i)
    acc  = f_1*x_1;   acc <- acc + f_i*x_i         for i = 2..n, in order
    mean = acc / (c_1 + ... + c_n)                 the sum in float32, in order

Values are float32 and every multiply, add and divide is rounded by itself (numpy ufuncs). A multiply
by exactly 1.0 is left out, which changes no bit. Clipping shrinks what is added, not the divisor.

A contributor that is lost before all of its chunks are in is left out of the others: there i runs
over those that are in, and the set of them follows the chunk's mean on the wire.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from ..protocol.errors import BadContributionError, LocalProtocolError, RemoteProtocolError
from ..protocol.lane import PAYLOAD_BYTES_MAX
from ..protocol.messages import Contributor, ContributorRun, FragmentSize, Plan
from .codecs import Codec, get_codec

Values = NDArray[np.float32]
Counters = NDArray[np.int64]

SET_ALIGNMENT_BYTES = 8  # results stay aligned for numpy
CHUNKS_MAX = 2**20  # chunks of one fragment: 1 TiB of float32 at a MiB a chunk
COUNTER_BYTES = 8  # int64, little-endian


@frozen
class Cut:
    """One chunk of a fragment.

    Attributes:
      values: the values it holds; empty for the counter chunk.
      up: where its encoded contribution lies in the encoded input.
      down: where its result lies in the whole result: the encoded mean, then the set of its
        contributors (``pack_set``).
      mean_bytes: of the encoded mean.
      owner: peer id.
      is_counters: int64 counters instead of values.
    """

    values: slice
    up: slice
    down: slice
    mean_bytes: int
    owner: str
    is_counters: bool

    @property
    def up_bytes(self) -> int:
        return int(self.up.stop - self.up.start)

    @property
    def down_bytes(self) -> int:
        return int(self.down.stop - self.down.start)

    @property
    def count(self) -> int:
        """Values in the chunk."""
        return int(self.values.stop - self.values.start)


@frozen
class Layout:
    """A plan applied to a fragment of a certain size: every chunk, where it lies and whose it is.

    Encoded chunks lie one after the other, in chunk order, counters last.
    """

    size: FragmentSize
    codec_up: Codec
    codec_down: Codec
    cuts: tuple[Cut, ...]
    up_bytes: int
    down_bytes: int

    @classmethod
    def of(cls, plan: Plan, size: FragmentSize, contributor_count: int = 0) -> Layout:
        """Lay the fragment out; without the number of contributors ``down`` has no room for sets.

        Raises:
          RemoteProtocolError: the plan does not fit the fragment, or chunks do not fit a frame.
        """
        try:
            up, down = get_codec(plan.codec_up), get_codec(plan.codec_down)
        except ValueError as error:
            raise RemoteProtocolError(f"the plan: {error}") from error
        owners = _owners(plan, size)
        set_bytes = len(pack_set([False] * contributor_count))
        cuts = []
        up_at = down_at = 0
        for index, owner in enumerate(owners):
            start = index * plan.chunk_elements
            is_counters = start >= size.value_count
            count = 0 if is_counters else min(plan.chunk_elements, size.value_count - start)
            up_bytes, down_bytes = up.encoded_bytes(count), down.encoded_bytes(count)
            if is_counters:
                start = size.value_count
                up_bytes = down_bytes = COUNTER_BYTES * size.counter_count
            mean_bytes, down_bytes = down_bytes, down_bytes + set_bytes
            if max(up_bytes, down_bytes) > PAYLOAD_BYTES_MAX:
                raise RemoteProtocolError(f"chunk {index} of the plan does not fit a frame")
            cuts.append(
                Cut(
                    values=slice(start, start + count),
                    up=slice(up_at, up_at + up_bytes),
                    down=slice(down_at, down_at + down_bytes),
                    mean_bytes=mean_bytes,
                    owner=owner,
                    is_counters=is_counters,
                )
            )
            up_at += up_bytes
            down_at += down_bytes
        return cls(size, up, down, tuple(cuts), up_at, down_at)


def _owners(plan: Plan, size: FragmentSize) -> list[str]:
    """The owner of each chunk; the total is checked before anything is expanded."""
    chunk_count = -(-size.value_count // plan.chunk_elements) + (size.counter_count > 0)
    if chunk_count > CHUNKS_MAX:
        raise RemoteProtocolError(f"the plan cuts a fragment into {chunk_count} chunks")
    planned = sum(run.chunk_count for run in plan.owners)
    if planned != chunk_count:
        raise RemoteProtocolError(f"the plan has {planned} chunks, the fragment {chunk_count}")
    return [run.peer for run in plan.owners for _ in range(run.chunk_count)]


def pack_set(present: Sequence[bool]) -> bytes:
    """A set of contributors as it follows a chunk's mean: a bit each, padded with zeros."""
    bits = np.packbits(np.array(present, np.bool_), bitorder="little").tobytes()
    return bits + bytes(-len(bits) % SET_ALIGNMENT_BYTES)


def unpack_set(data: memoryview, count: int) -> list[bool]:
    """The inverse; raises ValueError: nobody is in it, or somebody who does not exist."""
    bits = np.unpackbits(np.frombuffer(data, np.uint8), bitorder="little")
    if bits[count:].any() or not bits[:count].any():
        raise ValueError("a set of contributors that cannot be")
    return [bool(bit) for bit in bits[:count]]


def manifest_of(sets: Sequence[bytes], full: bytes) -> tuple[ContributorRun, ...]:
    """The chunks' packed sets as runs; empty if they are all ``full``."""
    if all(packed == full for packed in sets):
        return ()
    return tuple(ContributorRun(packed, len(list(run))) for packed, run in itertools.groupby(sets))


@frozen
class Factors:
    """The scalars of a weighted mean; see the top of this file.

    Attributes:
      factors: f_i, what each contributor's values are multiplied by.
      divisor: the sum of the c_i.
    """

    factors: tuple[np.float32, ...]
    divisor: np.float32

    @classmethod
    def of(
        cls, contributors: Sequence[Contributor], present: Sequence[bool] | None = None
    ) -> Factors:
        """Those of the contributors that are ``present`` (default: all).

        The c_i are relative to the heaviest of all, present or not.

        Raises RemoteProtocolError: nobody contributes, or nobody has any weight.
        """
        heaviest = max((c.weight for c in contributors), default=0)
        if heaviest == 0:
            raise RemoteProtocolError("a reduction without any weight")
        if present is not None:
            contributors = [c for c, here in zip(contributors, present, strict=True) if here]
        coefficients = [np.float32(c.weight / heaviest) for c in contributors]
        with np.errstate(over="ignore"):  # refused just below
            factors = tuple(
                np.float32(float(coefficient) * c.scale)
                for coefficient, c in zip(coefficients, contributors, strict=True)
            )
        if not all(np.isfinite(factor) for factor in factors):
            raise RemoteProtocolError("a clip factor that float32 cannot hold")
        divisor = np.float32(0)
        for coefficient in coefficients:
            divisor = np.float32(divisor + coefficient)
        if divisor == 0:
            raise RemoteProtocolError("a reduction without any weight")
        return cls(factors, divisor)


def reduce_values(
    layout: Layout,
    contributors: Sequence[Contributor],
    factors: Factors,
    contributions: Sequence[memoryview],
    out: Values,
    encoded_out: memoryview,
) -> None:
    """The owner's work on one chunk of ``n`` values.

    Args:
      contributions: encoded, in the contributors' order.
      out: shape ``(n,)``; becomes the *decoded encoded* mean, as at every receiver.
      encoded_out: becomes the encoded mean.

    Raises:
      BadContributionError: a contribution that is not finite or not an encoding; or one that is
        finite but so large that the mean cannot be expressed (the largest one is named).
    """
    scratch = np.empty_like(out)
    with np.errstate(over="ignore", invalid="ignore"):  # what came out is checked below
        for position, factor in enumerate(factors.factors):
            values = out if position == 0 else scratch
            decode_checked(
                layout.codec_up, contributions[position], values, contributors[position].peer
            )
            if factor != 1:
                np.multiply(values, factor, out=values)
            if position > 0:
                np.add(out, scratch, out=out)
        if factors.divisor != 1:
            np.divide(out, factors.divisor, out=out)
    try:
        if not np.isfinite(out).all():
            raise ValueError("the mean is not finite")
        layout.codec_down.encode(out, encoded_out)
    except ValueError as error:
        largest = []
        for data in contributions:
            layout.codec_up.decode(data, scratch)
            largest.append(float(np.abs(scratch).max()))
        culprit = contributors[int(np.argmax(largest))].peer
        raise BadContributionError(culprit, f"too large to be added: {error}") from error
    layout.codec_down.decode(encoded_out, out)


def reduce_counters(contributions: Sequence[memoryview], out: Counters) -> None:
    """The elementwise maximum of the contributions, little-endian int64."""
    for position, data in enumerate(contributions):
        counters = np.frombuffer(data, "<i8")
        if position == 0:
            out[:] = counters
        else:
            np.maximum(out, counters, out=out)


def decode_checked(codec: Codec, data: memoryview, out: Values, peer: str) -> None:
    """Decode what ``peer`` sent.

    Raises:
      BadContributionError: it is not an encoding, or not finite.
    """
    try:
        codec.decode(data, out)
    except ValueError as error:
        raise BadContributionError(peer, str(error)) from error
    if not np.isfinite(out).all():
        raise BadContributionError(peer, "a value that is not finite")


def decode_result(
    encoded: memoryview, plan: Plan, size: FragmentSize, contributor_count: int
) -> tuple[Values, Counters]:
    """Decode a whole result from its wire bytes, as kept for a replay.

    Returns:
      Values of shape ``(value_count,)`` and counters of shape ``(counter_count,)``, bit-identical
      to those of the reduction that the bytes come from.

    Raises:
      LocalProtocolError: the bytes are not of such a result.
    """
    layout = Layout.of(plan, size, contributor_count)
    if len(encoded) != layout.down_bytes:
        raise LocalProtocolError(f"a result of {len(encoded)} bytes, {layout.down_bytes} wanted")
    values = np.empty(size.value_count, np.float32)
    counters = np.empty(size.counter_count, np.int64)
    for cut in layout.cuts:
        mean = encoded[cut.down][: cut.mean_bytes]
        if cut.is_counters:
            counters[:] = np.frombuffer(mean, "<i8")
        else:
            layout.codec_down.decode(mean, values[cut.values])
    return values, counters


class EncodedInput:
    """A contributor's own encoded chunks: made once, sent in every attempt of a round.

    Chunks are encoded one by one, when they are first needed. ``data`` outlives the reduction, so a
    second attempt sends the same bytes even if the arrays that they came from have changed since,
    for all chunks that ``complete`` covers.

    Args:
      values: shape ``(value_count,)``, float32; read, never written.
      counters: shape ``(counter_count,)``, int64.
    """

    def __init__(self, plan: Plan, size: FragmentSize, values: Values, counters: Counters) -> None:
        _check_array("values", values, np.dtype(np.float32), size.value_count)
        _check_array("counters", counters, np.dtype(np.int64), size.counter_count)
        self._layout = Layout.of(plan, size)
        self._values = values
        self._counters = counters
        self._done = [False] * len(self._layout.cuts)
        self._data = np.empty(self._layout.up_bytes, np.uint8).data

    def fits(self, plan: Plan, size: FragmentSize) -> bool:
        """Whether the bytes can be used under that plan; owners may differ, cuts may not."""
        other = Layout.of(plan, size)
        mine = self._layout
        return (
            other.size == mine.size
            and other.codec_up.name == mine.codec_up.name
            and [cut.values for cut in other.cuts] == [cut.values for cut in mine.cuts]
        )

    @property
    def complete(self) -> bool:
        return all(self._done)

    def is_encoded(self, index: int) -> bool:
        return self._done[index]

    def encode(self, index: int) -> None:
        """Encode one chunk unless it is done already; raises ValueError as the codec does."""
        if self._done[index]:
            return
        cut = self._layout.cuts[index]
        out = self._data[cut.up]
        if cut.is_counters:
            np.frombuffer(out, "<i8")[:] = self._counters
        else:
            self._layout.codec_up.encode(self._values[cut.values], out)
        self._done[index] = True

    def encode_all(self) -> None:
        """Encode what is left; after this the arrays may change or go away."""
        for index in range(len(self._done)):
            self.encode(index)

    def chunk(self, index: int) -> memoryview:
        """The encoded bytes of a chunk that is encoded."""
        if not self._done[index]:
            raise LocalProtocolError(f"chunk {index} is not encoded yet")
        return self._data[self._layout.cuts[index].up]


def _check_array(
    name: str, array: NDArray[np.generic], dtype: np.dtype[np.generic], n: int
) -> None:
    if array.dtype != dtype or array.shape != (n,) or not array.flags.c_contiguous:
        raise LocalProtocolError(
            f"{name}: {array.dtype} of shape {array.shape}, contiguous {dtype} of ({n},) wanted"
        )
