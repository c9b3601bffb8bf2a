"""A merge in the host's memory, piece by piece, so that the next values are nowhere held whole.

The daemon may commit another version meanwhile. The pieces that were merged before are then merged
again, from the version that they have: training in no version stays in the tensors, as always.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import cast

import numpy as np
import torch
from attrs import define
from numpy.typing import NDArray

from ...diloco.fragments import BUFFER
from ...diloco.merge import merged
from .tensors import SharedTensor

# Values of a piece: with what a merge computes from them, they fit a core's cache.
PIECE_COUNT = 2**18

Values = NDArray[np.float32]
# Calls the function, and returns the version that it read.
Read = Callable[[Callable[[], None]], int]
TensorMerge = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def merged_tensor(
    kind: str, target: torch.Tensor, local: torch.Tensor, base: torch.Tensor
) -> torch.Tensor:
    """Return ``merged(target, local, base)``, in the precision of ``local``.

    Elements of a buffer that did not move get the target: the difference of two infinities is NaN.
    """
    # ``merged`` uses operators only, so it works on tensors as on arrays.
    new = cast("TensorMerge", merged)(target, local, base)
    return torch.where(local == base, target, new) if kind == BUFFER else new


@define(eq=False)
class Piece:
    """Some values of a tensor.

    Attributes:
      local: them, flat; a view of the tensor if ``in_place``.
      shared: the same values in the shared arena.
      anchor: in the replica's anchor, flat; the new values go there, too.
      base: of the first merge.
      version: that they were merged to last.
    """

    tensor: SharedTensor
    local: torch.Tensor
    in_place: bool
    shared: Values
    anchor: Values
    base: torch.Tensor
    version: int | None = None


def pieces_of(
    tensor: SharedTensor, shared: Values, anchor: Values, base: torch.Tensor
) -> Iterator[Piece]:
    """Cut a tensor into pieces; one that has copies, or holes between its values, is one piece.

    Args:
      shared: its values in the arena, in any shape.
      anchor, base: see ``Piece``, of the whole tensor.
    """
    values = tensor.tensor
    if tensor.written or not (values.is_contiguous() and shared.flags.c_contiguous):
        yield Piece(tensor, values.reshape(-1), False, shared, anchor, base)
        return
    local, flat = values.view(-1), shared.reshape(-1)
    for start in range(0, len(flat), PIECE_COUNT):
        where = slice(start, start + PIECE_COUNT)
        yield Piece(tensor, local[where], True, flat[where], anchor[where], base[where])


def merge_pieces(pieces: Sequence[Piece], read: Read) -> int | None:
    """Merge all pieces, and return the version that they all have; None if there are none.

    Call it again to merge a newer version.

    Raises:
      NotWholeError: the fragment is being fetched; some pieces are merged.
    """
    scratch: Values = np.empty(max((piece.shared.size for piece in pieces), default=0), np.float32)
    version: int | None = None
    while any(piece.version is None or piece.version != version for piece in pieces):
        for piece in pieces:
            target = scratch[: piece.shared.size]
            version = read(lambda: np.copyto(target.reshape(piece.shared.shape), piece.shared))  # noqa: B023
            if piece.version != version:
                _merge_piece(piece, target)
                piece.version = version
    return version


def _merge_piece(piece: Piece, target: Values) -> None:
    """Set a piece to ``merged(target, local, base)``, and its anchor to what was written."""
    dtype = torch.float64 if piece.local.dtype == torch.float64 else torch.float32
    local, new_shared = piece.local.to(dtype), torch.from_numpy(target)
    base = piece.base if piece.version is None else torch.from_numpy(piece.anchor)
    new = merged_tensor(piece.tensor.spec.kind, new_shared, local, base)
    if piece.in_place:
        piece.local.copy_(new)
    else:
        piece.tensor.write(new)
        piece.local = piece.tensor.tensor.reshape(-1)
    np.copyto(piece.anchor, target)
    if piece.tensor.low_precision:
        # The anchor moves by the rounding, so that it does not count as training.
        np.add(piece.anchor, (piece.local.to(torch.float32) - new).numpy(), out=piece.anchor)
