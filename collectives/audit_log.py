"""The data that a node keeps for audits of a round with sealed contributions, until its end.

An owner keeps all that it added up, as it came. That is as large as one encoding of the fragment,
beside the encoded result that every receiver holds anyway. Every receiver keeps the digests of its
result, with which it checks whether the contributions that an owner shows make that result.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from ..protocol.network.lane import Buffer
from ..protocol.trust.notary import SEAL_BYTES, Notary
from .contributor_sets import unpack_bits
from .evidence import ChunkEvidence, sealed, statement_of_sum, write_proof
from .reduction_context import ReductionContext

# A peer may be shown this many chunks in a round, however few of ours are likely to be audited,
SHOWN_MIN = 8
# or this many times the number that is likely.
SHOWN_TIMES = 4


class AuditLog:
    """The chunks that this node can show in an audit, and can ask other owners to show.

    Args:
      notary: signs for this node.

    Attributes:
      proofs: by chunk, what proves that its owner made it wrong.
    """

    def __init__(self, context: ReductionContext, notary: Notary) -> None:
        self.notary = notary
        self.proofs: dict[int, bytes] = {}
        self._context = context
        self._shown: Counter[str] = Counter()  # chunks, by peer
        self._own_count = sum(cut.owner == context.me for cut in context.layout.cuts)

    def may_see(self, peer: str, share: float) -> bool:
        """Return whether a peer may be shown one more chunk, if this share of all is audited.

        Only the master knows which chunks were drawn. A peer that asks for many more than are likely
        to be drawn only keeps this node's line busy.
        """
        self._shown[peer] += 1
        return self._shown[peer] <= SHOWN_MIN + SHOWN_TIMES * share * self._own_count

    def show(self, index: int) -> list[Buffer] | None:
        """Return what this node added to a chunk, each with its seal, then this node's own seal.

        Returns:
          None if this node did not make the chunk.
        """
        context = self._context
        if index >= len(context.layout.cuts) or not context.tracker.has_added(index):
            return None
        pieces: dict[str, Buffer] = {**context.tracker.contributions(index)}
        if context.encoded_input is not None:
            own = context.own_chunk(index)
            pieces[context.me] = sealed(self.notary, context.order, index, own)
        shown = [pieces[peer] for peer in context.contributors if peer in pieces]
        return [*shown, self.notary.seal(statement_of_sum(context.order, index, shown))]

    def evidence(self, index: int) -> ChunkEvidence | None:
        """Return what this node holds of a chunk that another peer made; the result is whole.

        Returns:
          None if there is no such chunk.
        """
        context = self._context
        layout, result = context.layout, context.result
        if index >= len(layout.cuts) or (owner := context.tracker.owner(index)) == context.me:
            return None
        present = tuple(unpack_bits(result.present(index), len(context.contributors)))
        return ChunkEvidence(context.order, layout, index, owner, present, result.digests()[index])

    def piece_bytes_max(self, index: int) -> int:
        """Return how long a contribution to a chunk can be, with its seal."""
        return self._context.layout.cuts[index].up_bytes + SEAL_BYTES

    def prove(self, index: int, shown: Sequence[memoryview]) -> None:
        """Store the proof that a chunk is wrong, of what its owner showed; the result is whole."""
        self.proofs[index] = write_proof(self._context.result.digests(), shown)
