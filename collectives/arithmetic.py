"""The numbers of a reduction: how a fragment is cut into chunks, and the order of additions.

Pure functions and records over numpy arrays: no I/O, no waiting. Everything that decides a bit of
the result is in this file, in ``combine``, in ``robust_rules`` and in ``codecs``.

The weighted mean of a chunk, for contributors 1..n *in the order of the Reduce message*, which is
member order, with weights w_i, clip factors s_i and decoded values x_i:

    c_i  = float32(w_i / max w)                    computed in float64
    f_i  = float32(float64(c_i) * s_i)
    acc  = f_1*x_1;   acc <- acc + f_i*x_i         for i = 2..n, in order
    mean = acc / (c_1 + ... + c_n)                 the sum in float32, in order

Values are float32 and every multiply, add and divide is rounded by itself (numpy ufuncs). A
multiply by exactly 1.0 is left out, which changes no bit. Clipping does not shrink the divisor.

A contributor that is lost before its contribution to a chunk has arrived is left out of that chunk:
there i runs over the contributors that are in, while max w stays that of all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from ..protocol.errors import BadContributionError, RemoteProtocolError
from ..protocol.messages import Contributor, FragmentSize, Plan
from ..protocol.network.lane import PAYLOAD_BYTES_MAX, FrameKind
from .codecs.codec_base import Codec
from .codecs.codecs import expand, parse_codec

Values = NDArray[np.float32]
Counters = NDArray[np.int64]

CHUNKS_MAX = 2**20  # chunks of one fragment: 1 TiB of float32 at a MiB a chunk
COUNTER_BYTES = 8  # int64, little-endian
# Reads some of a peer's decoded values, which begin at this place in the chunk; see
# ``norm_report``. Called where numpy does not warn of values that are not finite.
Observe = Callable[[str, int, Values], None]
BLOCK_VALUES = 2**16  # added up at a time: a few operands of this length fit a core's L2 cache


@frozen
class ChunkCut:
    """One chunk of a fragment.

    Attributes:
      values: the values it holds; empty for the counter chunk.
      up_bytes, down_bytes: of its encoded contribution and result, at most.
      owner: peer id.
      is_counters: int64 counters instead of values.
    """

    values: slice
    up_bytes: int
    down_bytes: int
    owner: str
    is_counters: bool

    @property
    def count(self) -> int:
        """Values in the chunk."""
        return int(self.values.stop - self.values.start)


@frozen
class ChunkLayout:
    """A plan applied to a fragment of a certain size: the place and the owner of every chunk.

    Attributes:
      down_bytes: of all encoded results, at most.
      zstd_up: whether frames of contributions may be compressed.
      zstd_down: whether frames of results may be.
    """

    size: FragmentSize
    codec_up: Codec
    codec_down: Codec
    cuts: tuple[ChunkCut, ...]
    down_bytes: int
    zstd_up: bool
    zstd_down: bool

    # Rounds of one fragment have the same as long as the lines do.
    @classmethod
    @lru_cache(maxsize=2)
    def of(cls, plan: Plan, size: FragmentSize) -> ChunkLayout:
        """Cut a fragment of this size as the plan says.

        Raises:
          RemoteProtocolError: the plan does not fit the fragment, or chunks do not fit a frame.
        """
        try:
            up, zstd_up = parse_codec(plan.codec_up)
            down, zstd_down = parse_codec(plan.codec_down)
        except ValueError as error:
            raise RemoteProtocolError(f"the plan: {error}") from error
        cuts: list[ChunkCut] = []
        start = 0
        for owner, elements in _chunks(plan, size):
            is_counters = start >= size.value_count
            count = min(elements, size.value_count - start)
            up_bytes, down_bytes = up.encoded_bytes(count), down.encoded_bytes(count)
            if is_counters:
                up_bytes = down_bytes = COUNTER_BYTES * size.counter_count
            if max(up_bytes, down_bytes) > PAYLOAD_BYTES_MAX:
                raise RemoteProtocolError(f"chunk {len(cuts)} of the plan does not fit a frame")
            values = slice(start, start + count)
            cuts.append(ChunkCut(values, up_bytes, down_bytes, owner, is_counters))
            start += count
        all_down_bytes = sum(cut.down_bytes for cut in cuts)
        return cls(size, up, down, tuple(cuts), all_down_bytes, zstd_up, zstd_down)

    def objection(self, kind: FrameKind, index: int, payload_bytes: int) -> str | None:
        """Return what is wrong with a frame's length, as text that completes "peer X ..."."""
        cut = self.cuts[index]
        is_up = kind is FrameKind.CONTRIBUTION
        codec = self.codec_up if is_up else self.codec_down
        room = cut.up_bytes if is_up else cut.down_bytes
        may_be_shorter = (self.zstd_up if is_up else self.zstd_down) or codec.variable
        if payload_bytes == room:
            return None
        if may_be_shorter and not cut.is_counters and 0 < payload_bytes < room:
            return None
        return f"sent {payload_bytes} bytes for a chunk of {room}"


def _chunks(plan: Plan, size: FragmentSize) -> Iterator[tuple[str, int]]:
    """Yield each chunk's owner and values. The total is checked before the runs are expanded."""
    unit_count = -(-size.value_count // plan.chunk_elements) + (size.counter_count > 0)
    if unit_count > CHUNKS_MAX:
        raise RemoteProtocolError(f"the plan cuts a fragment into {unit_count} chunks")
    planned = sum(run.unit_count for run in plan.owners)
    if planned != unit_count:
        raise RemoteProtocolError(f"the plan has {planned} chunks, the fragment {unit_count}")
    if size.counter_count and plan.owners[-1].chunk_units > 1:
        raise RemoteProtocolError("the plan joins the counters with values")
    for run in plan.owners:
        for _ in range(run.chunk_count):
            yield run.peer, run.chunk_units * plan.chunk_elements


@frozen
class MeanFactors:
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
    ) -> MeanFactors:
        """Compute the factors of the contributors that are ``present``, or of all if that is None.

        Raises:
          RemoteProtocolError: there is no contributor, or none has any weight.
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
            raise RemoteProtocolError("a chunk without any weight")
        return cls(factors, divisor)


@frozen
class SumTerm:
    """One term of a chunk's sum: a contribution.

    Attributes:
      peer: its sender, to blame if it cannot be added.
      data: the encoding as it came.
      factor: what its values are multiplied by.
      codec, zstd: how it is encoded, and whether it may be compressed.
    """

    peer: str
    data: memoryview
    factor: np.float32
    codec: Codec
    zstd: bool = False


def reduce_values(
    terms: Sequence[SumTerm],
    divisor: np.float32,
    codec: Codec,
    out: Values,
    encoded_out: memoryview,
    observe: Observe | None = None,
) -> int:
    """Add up one chunk of ``n`` values, in order, divide and encode the sum.

    Args:
      observe: reads the values of every term.
      out: shape ``(n,)``; becomes the result before it is encoded. Receivers have what
        ``encoded_out`` decodes to.
      encoded_out: becomes the encoded result; for ``verbatim`` perhaps the memory of ``out``.

    Returns:
      The length of the encoded result in bytes.

    Raises:
      BadContributionError: a term that is not finite or not an encoding; or the terms are finite
        but so large that the result cannot be expressed (the sender of the largest one is named).
    """
    if all(t.codec.verbatim and len(t.data) == t.codec.encoded_bytes(out.size) for t in terms):
        finite = _add_verbatim(terms, divisor, out, observe)
    else:
        finite = _add_decoded(terms, divisor, out, observe)
    return encode_result(terms, finite, codec, out, encoded_out)


def encode_result(
    terms: Sequence[SumTerm], finite: bool, codec: Codec, out: Values, encoded_out: memoryview
) -> int:
    """Encode the result of these terms; arguments, return value and errors as of ``reduce_values``.

    Args:
      finite: whether all of ``out`` is finite.
    """
    try:
        if not finite:
            raise ValueError("the mean is not finite")
        if codec.verbatim and np.may_share_memory(out, np.frombuffer(encoded_out, np.uint8)):
            return len(encoded_out)
        length = codec.encode(out, encoded_out)
    except ValueError as error:
        scratch = np.empty_like(out)
        largest = []
        for term in terms:
            decode_checked(term.codec, term.zstd, term.data, scratch, term.peer)
            largest.append(float(np.abs(scratch).max()))
        culprit = terms[int(np.argmax(largest))].peer
        raise BadContributionError(culprit, f"too large to be added: {error}") from error
    return length


def _add_verbatim(
    terms: Sequence[SumTerm], divisor: np.float32, out: Values, observe: Observe | None
) -> bool:
    """Write the sum of terms that are float32 in memory, divided, to ``out``.

    Terms are not checked one by one: a value that is not finite stays so in a sum, and when it is
    multiplied or divided by a finite number.

    Returns:
      Whether all of ``out`` is finite.
    """
    inputs = [(np.frombuffer(term.data, np.float32), term) for term in terms]
    scratch = np.empty(min(BLOCK_VALUES, out.size), np.float32)
    divide, by = _division(divisor)
    finite = True
    with np.errstate(over="ignore", invalid="ignore"):  # what came out is checked
        for start in range(0, out.size, BLOCK_VALUES):
            block = slice(start, start + BLOCK_VALUES)
            into = out[block]
            total: Values | None = None
            for values, term in inputs:
                part = values[block]
                if term.factor != 1:
                    part = np.multiply(
                        part, term.factor, out=(into if total is None else scratch[: into.size])
                    )
                total = part if total is None else np.add(total, part, out=into)
            assert total is not None
            if divisor != 1:
                total = divide(total, by, out=into)
            if total is not into:
                into[:] = total
            finite = finite and all_finite(into)
            if observe is not None:  # now that the values are in the cache
                for values, term in inputs:
                    observe(term.peer, start, values[block])
    return finite


def _add_decoded(
    terms: Sequence[SumTerm], divisor: np.float32, out: Values, observe: Observe | None
) -> bool:
    """Write the sum of terms that must be decoded, divided; returns whether it is finite."""
    scratch = np.empty_like(out)
    with np.errstate(over="ignore", invalid="ignore"):  # what came out is checked
        for position, term in enumerate(terms):
            values = out if position == 0 else scratch
            decode_checked(term.codec, term.zstd, term.data, values, term.peer)
            if observe is not None:
                observe(term.peer, 0, values)
            if term.factor != 1:
                np.multiply(values, term.factor, out=values)
            if position > 0:
                np.add(out, scratch, out=out)
        if divisor != 1:
            divide, by = _division(divisor)
            divide(out, by, out=out)
        return all_finite(out)


def _division(divisor: np.float32) -> tuple[np.ufunc, np.float32]:
    """Return the operation and the operand that divide by ``divisor``.

    To divide by a power of two is to multiply by its reciprocal, to the bit: both round the same
    number. It takes a quarter of the time; equal weights of 2, 4 or 8 contributors allow it.
    """
    if np.frexp(divisor)[0] == 0.5:
        with np.errstate(over="ignore"):
            reciprocal = np.float32(1) / divisor
        if np.isfinite(reciprocal):
            return np.multiply, reciprocal
    return np.divide, divisor


def reduce_counters(contributions: Sequence[memoryview], out: Counters) -> None:
    """Write the elementwise maximum of the contributions, little-endian int64, to ``out``."""
    for position, data in enumerate(contributions):
        counters = np.frombuffer(data, "<i8")
        if position == 0:
            out[:] = counters
        else:
            np.maximum(out, counters, out=out)


def decode_checked(codec: Codec, zstd: bool, data: memoryview, out: Values, peer: str) -> None:
    """Decode an encoding that ``peer`` sent.

    Args:
      zstd: whether ``data`` may be compressed; it is, if it is shorter than an encoding.

    Raises:
      BadContributionError: ``data`` is not an encoding, or not finite.
    """
    try:
        wanted_bytes = codec.encoded_bytes(out.size)
        compressed = zstd and len(data) < wanted_bytes
        codec.decode(expand(data, wanted_bytes) if compressed else data, out)
    except ValueError as error:
        raise BadContributionError(peer, str(error)) from error
    if not codec.lossy:  # lossy ones decode to finite values only
        check_finite(out, peer)


def check_finite(values: Values, peer: str) -> None:
    """Check what ``peer`` sent.

    Raises:
      BadContributionError: a value is not finite.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        if not all_finite(values):
            raise BadContributionError(peer, "a value that is not finite")


# ---------------------------------------------------------------- sums of products

# As fast as BLAS makes them: they decide no bit of a result.

PIECE_VALUES = 2**13  # multiplied at once; BLAS starts its threads for longer ones


def product(one: Values, other: Values) -> float:
    """Return the sum of products, in float32 by pieces; not finite if they are too large.

    Callers use ``np.errstate``, since numpy warns of products that are too large.
    """
    whole = one.size - one.size % PIECE_VALUES
    pieces = np.vecdot(
        one[:whole].reshape(-1, PIECE_VALUES), other[:whole].reshape(-1, PIECE_VALUES)
    )
    total = float(sum(pieces.tolist()))
    if whole < one.size:
        total += float(np.dot(one[whole:], other[whole:]))
    return total


def all_finite(values: Values) -> bool:
    """Return whether all values, shape ``(n,)``, are finite.

    Squares cannot cancel each other, so a finite sum of them has no infinity and no NaN in it. BLAS
    makes that sum in a third of the time of ``np.isfinite``, which is asked only where squares are
    too large for float32. Callers use ``np.errstate``, as for ``product``.
    """
    return math.isfinite(product(values, values)) or bool(np.isfinite(values).all())
