"""Detection of other masters of the same run: of two, the one with the lower term gives way
(``Succession``).

Masters tell each other their terms. That happens now and then at the run's other addresses, and
whenever another master connects here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

import trio

from ...membership.master.coordinator import Coordinator
from ...membership.master.state.master_effects import Decide
from ...protocol.addresses import Address
from ...protocol.connection_phases import CLAIM
from ...protocol.errors import HoldfastError
from ...protocol.messages import TermClaim
from ...protocol.network.interface import Channel, Network
from ...protocol.network.stream import MessageStream
from ...protocol.trust.authority import Party

CLAIM_DEADLINES = 3  # between two queries of the other masters
CLAIM_S = 10.0  # for one of these conversations
STREAM_ENDS = (trio.BrokenResourceError, trio.ClosedResourceError, trio.EndOfChannel)


class OtherMasters:
    """Compare this master's term with the terms of other masters."""

    def __init__(
        self,
        coordinator: Coordinator,
        network: Network,
        decide: Decide,
        bound: Callable[[], Sequence[Address]],
    ) -> None:
        self._coordinator = coordinator
        self._network = network
        self._decide = decide
        self._bound = bound

    async def run(self) -> None:
        context = self._coordinator.context
        while True:
            for text in context.history.masters.addresses:
                address = Address.parse(text)
                if address not in self._bound():
                    await self._query(address)
            await trio.sleep(CLAIM_DEADLINES * context.spec.membership.deadline_s)

    async def answer(self, channel: Channel) -> None:
        """Exchange terms with a master that has connected here."""
        stream = MessageStream(channel.stream, CLAIM)
        with trio.move_on_after(CLAIM_S):
            claim = await stream.receive_expected(TermClaim)
            await stream.send_final(self._own_claim())
            self._hear(claim, channel.remote_address)

    async def _query(self, address: Address) -> None:
        with suppress(OSError, HoldfastError, trio.TooSlowError, *STREAM_ENDS):
            with trio.fail_after(CLAIM_S):
                channel = await self._network.dial(address, party=Party.MASTER)
                try:
                    stream = MessageStream(channel.stream, CLAIM)
                    await stream.send(self._own_claim())
                    self._hear(await stream.receive_expected(TermClaim), str(address))
                finally:
                    await trio.aclose_forcefully(channel.stream)

    def _own_claim(self) -> TermClaim:
        context = self._coordinator.context
        followers = len(self._coordinator.succession.attached)
        return TermClaim(context.run_id, context.term, context.history.masters.nonce, followers)

    def _hear(self, claim: TermClaim, where: str) -> None:
        if claim.run_id == self._coordinator.context.run_id:
            name = f"the master at {where}"
            self._decide(partial(self._coordinator.met, claim, name))
