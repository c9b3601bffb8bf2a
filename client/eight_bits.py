"""Tensors in 8 bits a value, block by block: what one optimizer has gathered, on its way to another.

Two codes, of ``BLOCK`` values each, with their scales in float32:

    signed      c = sign(x) round(127 sqrt(|x| / max|x|))       first moments: small ones finely
    positive    c = 1 + round(254 (log x - low) / (high - low))  second moments; 0 for 0 alone

Adam divides by the root of a second moment, so what counts there is the relative error, and nothing
may become 0 that is not: the logarithm's steps are between the block's own smallest and largest value,
both of which it keeps. Rounding moves no value by more than ``(largest / smallest) ** (1 / 508)``.

What that does to the update m / (sqrt(v) + eps) of ``examples/train.py``'s model after 400 steps, as the
length of the difference over the length of the update, and as the largest change of one value (1 is what
Adam's first step would be), in blocks of 64 and of 256:

    these: roots, logarithms between a block's own ends             0.8 %  0.014      1.6 %   0.7
    linear; roots, rounded up                                       1.0 %  0.12       4.7 %   0.8
    both by dynamic exponents (arXiv 2110.02861), where a small     1.3 %  0.04       250 %   98
        second moment beside large ones becomes 0
"""

from __future__ import annotations

import torch
from attrs import frozen

BLOCK = 64  # values that share their scales: 1/16 of a byte a value (signed), 1/8 (positive)
SLICE_VALUES = 2**22  # worked on at a time: some 16 MiB of float32 for each intermediate result

_SIGNED_MAX = 127
_POSITIVE_MAX = 255
_STEPS = _POSITIVE_MAX - 1
_LEAST = 2.0**-149  # of float32, above 0
_MOST = torch.finfo(torch.float32).max
_LOG_MIN, _LOG_MAX = -149.0, 128.0


@frozen
class Coded:
    """One tensor's values.

    Attributes:
      codes: ``(count,)``, int8 if signed, else uint8.
      scales: float32; ``(blocks,)`` if signed, else ``(blocks, 2)``, logarithms to base 2. Not
        finite where a value was not finite, or not positive as it should be.
    """

    codes: torch.Tensor
    scales: torch.Tensor


def encode(values: torch.Tensor, *, signed: bool) -> Coded:
    """On the device where they are, which does not wait for it. Values of any floating type."""
    flat = values.detach().reshape(-1)
    parts = [
        _encode_signed(part) if signed else _encode_positive(part)
        for part in torch.split(flat, SLICE_VALUES)
    ]
    return Coded(
        torch.cat([part.codes for part in parts]), torch.cat([part.scales for part in parts])
    )


def decode(coded: Coded, count: int, *, signed: bool) -> torch.Tensor:
    """``(count,)`` values, float32.

    Raises:
      ValueError: it is no such code of so many values.
    """
    blocks = -(-count // BLOCK)
    codes, scales = coded.codes, coded.scales
    if codes.dtype != (torch.int8 if signed else torch.uint8) or codes.shape != (count,):
        raise ValueError(f"codes of {codes.dtype} and shape {tuple(codes.shape)}")
    if scales.dtype != torch.float32 or scales.shape != ((blocks,) if signed else (blocks, 2)):
        raise ValueError(f"scales of {scales.dtype} and shape {tuple(scales.shape)}")
    low, high = (0.0, _MOST) if signed else (_LOG_MIN, _LOG_MAX)
    if not bool(((scales >= low) & (scales <= high)).all()):
        raise ValueError("a scale that no block can have")
    if signed and bool((codes < -_SIGNED_MAX).any()):
        raise ValueError("a code that no value has")
    parts = [
        _decode_signed(part, some) if signed else _decode_positive(part, some)
        for part, some in zip(
            torch.split(codes, SLICE_VALUES),
            torch.split(scales, SLICE_VALUES // BLOCK),
            strict=True,
        )
    ]
    return torch.cat(parts) if parts else torch.empty(0)


def _blocks(flat: torch.Tensor) -> torch.Tensor:
    """Rows of a block each, the last one filled up with zeros."""
    return torch.nn.functional.pad(flat, (0, -flat.numel() % BLOCK)).view(-1, BLOCK)


def _encode_signed(part: torch.Tensor) -> Coded:
    blocks = _blocks(part.float())
    sizes = blocks.abs()
    scales = sizes.amax(1)
    shares = (sizes / scales.clamp_min(_LEAST)[:, None]).sqrt_()
    codes = shares.mul_(_SIGNED_MAX).round_().copysign_(blocks)
    finite = scales.isfinite()
    codes = torch.where(finite[:, None], codes, 0.0).to(torch.int8)
    return Coded(codes.view(-1)[: part.numel()], torch.where(finite, scales, torch.nan))


def _decode_signed(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    shares = _blocks(codes.float() / _SIGNED_MAX)
    return (shares.abs() * shares * scales[:, None]).view(-1)[: codes.numel()]


def _encode_positive(part: torch.Tensor) -> Coded:
    blocks = _blocks(part.float())
    if part.dtype == torch.float64:  # what float32 has no number for is not nothing
        blocks = torch.where(_blocks(part) > 0, blocks.clamp_min(_LEAST), blocks)
    positive = blocks > 0
    logs = torch.where(positive, blocks, 1.0).log2_()
    least = torch.where(positive, logs, torch.inf).amin(1)
    most = torch.where(positive, logs, -torch.inf).amax(1)
    empty = ~positive.any(1)
    low = torch.where(empty, 0.0, least.clamp(_LOG_MIN, _LOG_MAX))
    high = torch.where(empty, 0.0, most.clamp(_LOG_MIN, _LOG_MAX))
    places = (logs - low[:, None]) / (high - low)[:, None]  # 0 / 0 where all are equal
    codes = places.mul_(_STEPS).round_().nan_to_num_(0.0).clamp_(0, _STEPS) + 1
    sound = blocks.isfinite().all(1) & (blocks >= 0).all(1)
    codes = torch.where(positive & sound[:, None], codes, 0.0).to(torch.uint8)
    scales = torch.where(sound[:, None], torch.stack((low, high), 1), torch.nan)
    return Coded(codes.view(-1)[: part.numel()], scales)


def _decode_positive(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    blocks = _blocks(codes).float()
    low, high = scales[:, :1], scales[:, 1:]
    logs = low + (blocks - 1) * ((high - low) / _STEPS)
    values = torch.exp2(logs).clamp(_LEAST, _MOST)
    return torch.where(blocks > 0, values, 0.0).view(-1)[: codes.numel()]
