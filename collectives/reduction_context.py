"""The order of a reduction, checked and laid out, with the state that its parts share."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import numpy as np

from ..protocol.errors import BadContributionError, LocalProtocolError, RemoteProtocolError
from ..protocol.messages import FragmentSize, Plan, Reduce
from .arithmetic import ChunkLayout, Counters, MeanFactors, Values
from .chunk_tracker import ChunkTracker
from .codecs.error_feedback import Residual
from .combine import radius_of
from .encoded_input import EncodedInput
from .links.buffer_pool import BufferPool
from .links.hub import LinkHub
from .result import RoundResult


class ReductionContext:
    """The constants of one reduction, and the objects that its parts share.

    The attributes never change; any thread may read them. ``tracker``, ``result`` and
    ``encoded_input`` may be used by any thread.

    Args:
      order: the master's. Contributors and owners must be receivers.
      me: this node's peer id, one of the receivers.
      size: of the fragment, as this node knows it.
      hub: where the links are; running.
      values: shape ``(value_count,)``, float32, C-contiguous; None if this node does not contribute
        or gives ``encoded_input``. Only read; they must not change until the round is over, however
        this reduction ends, for chunks are encoded when they are sent, perhaps again.
      counters: shape ``(counter_count,)``, int64; None as for ``values``, or when there are none.
      encoded_input: that of an earlier order of the same round; used if it fits.
      residual: of this node's earlier contributions, if there is error feedback; it changes only
        by ``encoded_input.settle()``.
      audited: chunks of the result may be checked (see ``Reduction.audit``).

    Attributes:
      contributors: peer ids, in the order's order.
      others: the other receivers, in the order's order.
      needed: the peers that the round depends on: contributors and chunk owners.
      factors: of all contributors.
      encoded_input: this node's contribution; None if it does not contribute.

    Raises:
      RemoteProtocolError: the order contradicts itself, the fragment's size or this node's id.
      LocalProtocolError: wrong dtype, rank or length.
    """

    def __init__(
        self,
        order: Reduce,
        me: str,
        size: FragmentSize,
        hub: LinkHub,
        values: Values | None,
        counters: Counters | None,
        *,
        encoded_input: EncodedInput | None = None,
        residual: Residual | None = None,
        audited: bool = False,
    ) -> None:
        self.order = order
        self.me = me
        self.hub = hub
        self.audited = audited
        self.layout = ChunkLayout.of(order.plan, size)
        self.radius = radius_of(order.plan, order.contributors)
        self.contributors = [contributor.peer for contributor in order.contributors]
        self.factors = MeanFactors.of(order.contributors)
        owners = [cut.owner for cut in self.layout.cuts]
        _check_order(order, me, self.contributors, owners)
        self.others = tuple(peer for peer in order.receivers if peer != me)
        self.needed = {*self.contributors, *owners}
        self.encoded_input: EncodedInput | None = None
        if me in self.contributors:
            plan = order.plan
            if encoded_input is None or not encoded_input.fits(plan, size):
                feedback = residual if self.layout.codec_up.lossy else None
                encoded_input = _make_input(plan, size, values, counters, feedback, hub.buffers)
            self.encoded_input = encoded_input
        self.result = RoundResult(self.layout, len(self.contributors), hub.buffers)
        self.tracker = ChunkTracker(
            self.layout,
            self.contributors,
            me,
            order.attempt,
            order.fragment,
            self.result,
            hub.buffers,
        )

    def own_chunk(self, index: int) -> memoryview:
        """Return this node's contribution to a chunk, encoded now.

        Raises:
          BadContributionError: the values cannot be encoded.
        """
        assert self.encoded_input is not None
        try:
            return self.encoded_input.encode(index)
        except ValueError as error:
            raise BadContributionError(self.me, str(error)) from error

    def rotated(self, peers: Iterable[str]) -> list[str]:
        """Sort ``peers`` by the order's receivers, beginning after this node; it is left out.

        Every node so begins to send to another peer.
        """
        receivers = self.order.receivers
        after = receivers.index(self.me)
        wanted = set(peers)
        return [p for p in (*receivers[after + 1 :], *receivers[:after]) if p in wanted]


def _make_input(
    plan: Plan,
    size: FragmentSize,
    values: Values | None,
    counters: Counters | None,
    residual: Residual | None,
    pool: BufferPool,
) -> EncodedInput:
    if counters is None and size.counter_count == 0:
        counters = np.empty(0, np.int64)
    if values is None or counters is None:
        raise LocalProtocolError("this node contributes, but has nothing to contribute")
    return EncodedInput(plan, size, values, counters, pool, residual)


def _check_order(
    order: Reduce, me: str, contributors: Collection[str], owners: Collection[str]
) -> None:
    receivers = set(order.receivers)
    if len(set(contributors)) != len(contributors):
        raise RemoteProtocolError("the order names a contributor twice")
    if len(receivers) != len(order.receivers):
        raise RemoteProtocolError("the order names a receiver twice")
    missing = {*contributors, *owners} - receivers
    if missing:
        raise RemoteProtocolError(f"peer {min(missing)[:8]} takes part but does not receive")
    if me not in receivers:
        raise RemoteProtocolError("the order does not name this node")
