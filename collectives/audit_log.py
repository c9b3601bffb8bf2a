"""What a reduction whose contributions are sealed keeps, until its round is over.

At an owner: all that it added up, as it came. Of a fragment that is one encoding in all, beside the
encoded result that every receiver holds anyway. At everybody: which result it holds, so that it can
say whether what an owner shows makes that.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from ..protocol.errors import RemoteProtocolError
from ..protocol.messages import Plan, Reduce
from ..protocol.network.lane import Buffer
from ..protocol.trust.notary import SEAL_BYTES, Notary
from .arithmetic import ChunkLayout
from .chunk_tracker import ChunkTracker
from .encoded_input import EncodedInput
from .evidence import ChunkEvidence, present_in, sealed, statement_of_sum, write_proof
from .result import RoundResult

SHOWN_MIN = (
    8  # chunks that one peer is shown in a round, whatever the chance is that they are drawn
)
SHOWN_TIMES = 4  # as many as that chance makes of ours


class AuditLog:
    """See the top of this file.

    Args:
      encoded_input: ours, encoded in all chunks that we made; None: we give none.

    Attributes:
      notary: signs for us.
      proofs: of what we call wrong, by chunk.
    """

    def __init__(
        self,
        order: Reduce,
        layout: ChunkLayout,
        notary: Notary,
        tracker: ChunkTracker,
        result: RoundResult,
        me: str,
        encoded_input: EncodedInput | None,
    ) -> None:
        self.notary = notary
        self._shown: Counter[str] = Counter()  # chunks, by peer
        self._own_count = sum(cut.owner == me for cut in layout.cuts)
        self.proofs: dict[int, bytes] = {}
        self._order = order
        self._layout = layout
        self._tracker = tracker
        self._result = result
        self._me = me
        self._encoded_input = encoded_input

    def may_see(self, peer: str, share: float) -> bool:
        """Whether a peer may be shown one more chunk, if this share of all is audited.

        We do not know what the master has drawn; who asks for much more wants our line busy.
        """
        self._shown[peer] += 1
        return self._shown[peer] <= SHOWN_MIN + SHOWN_TIMES * share * self._own_count

    def show(self, index: int) -> list[Buffer] | None:
        """What we added to a chunk, each with its seal, then ours; None: we did not make it."""
        if index >= len(self._layout.cuts) or not self._tracker.has_added(index):
            return None
        pieces: dict[str, Buffer] = {**self._tracker.contributions(index)}
        if self._encoded_input is not None:
            own = self._encoded_input.chunk(index)
            pieces[self._me] = sealed(self.notary, self._order, index, own)
        shown = [pieces[c.peer] for c in self._order.contributors if c.peer in pieces]
        return [*shown, self.notary.seal(statement_of_sum(self._order, index, shown))]

    def evidence(self, index: int) -> ChunkEvidence | None:
        """A chunk that somebody else made, as it is in our result, which is whole; None: no such."""
        owner = self._tracker.part(index).parent if index < len(self._layout.cuts) else None
        if owner is None:
            return None
        present = present_in(self._result.present(index), len(self._order.contributors))
        digest = self._result.digests()[index]
        return ChunkEvidence(self._order, self._layout, index, owner, present, digest)

    def piece_bytes_max(self, index: int) -> int:
        """How long a contribution to a chunk can be, with its seal."""
        return self._layout.cuts[index].up_bytes + SEAL_BYTES

    def prove(self, index: int, shown: Sequence[memoryview]) -> None:
        """Keep what shows that a chunk of our result, which is whole, is wrong."""
        self.proofs[index] = write_proof(self._result.digests(), shown)


def notary_for(plan: Plan, notary: Notary | None) -> Notary | None:
    """The one that a plan needs; None: it wants no seals.

    Raises:
      RemoteProtocolError: it wants what cannot be.
    """
    if not plan.sealed:
        return None
    if plan.sites:
        raise RemoteProtocolError("the plan wants seals in a tree, whose sums have none")
    if notary is None:
        raise RemoteProtocolError("the plan wants seals, and this node makes none")
    return notary
