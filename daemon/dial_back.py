"""Whether a peer can be dialled: the master dials back the addresses that it gives.

Whoever can be dialled is known after a round trip, and waits for no more. Whoever cannot is known to be
so when no address has answered in time; it need not wait for that again each time that it comes back.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

import trio

from ..protocol.addresses import Address
from ..protocol.errors import HoldfastError
from ..protocol.messages import MEMBERS_MAX
from ..protocol.network import Network, Party

PROBE_S = 5.0  # for all addresses of a peer, at once
RECLASS_S = 300.0  # between two times that a member is dialled back


class DialBack:
    """Classes peers.

    Args:
      members: of whom is to be looked at again: who it is, where, and how it was classed.
      classed: called when somebody's class was found anew.
    """

    def __init__(
        self,
        network: Network,
        members: Callable[[], Sequence[tuple[str, tuple[str, ...]]]],
        classed: Callable[[str, bool], None],
    ) -> None:
        self._network = network
        self._members = members
        self._classed = classed
        self._outbound: OrderedDict[str, tuple[str, ...]] = OrderedDict()
        self._again = trio.Event()

    async def reachable(self, peer: str, addresses: tuple[str, ...]) -> bool:
        """Whether it can be dialled at one of these; known at once if it could not be before."""
        if self._outbound.get(peer) == addresses:
            self._again.set()  # that may have changed; it is told if it has
            return False
        return await self._look(peer, addresses)

    def look_soon(self) -> None:
        """Somebody may be elsewhere by now."""
        self._again.set()

    async def run(self) -> None:
        """Look at members again: now and then, and soon after one has come back."""
        while True:
            with trio.move_on_after(RECLASS_S):
                await self._again.wait()
            self._again = trio.Event()
            for peer, addresses in self._members():
                self._classed(peer, await self._look(peer, addresses))

    async def _look(self, peer: str, addresses: tuple[str, ...]) -> bool:
        found = await self._dial_all(peer, addresses)
        self._outbound.pop(peer, None)
        if not found:
            self._outbound[peer] = addresses
            if len(self._outbound) > MEMBERS_MAX:
                self._outbound.popitem(last=False)
        return found

    async def _dial_all(self, peer: str, addresses: tuple[str, ...]) -> bool:
        reached = False
        with trio.move_on_after(PROBE_S):
            async with trio.open_nursery() as nursery:

                async def dial(text: str) -> None:
                    nonlocal reached
                    try:
                        back = await self._network.dial(
                            Address.parse(text), party=Party.PEER, peer=peer
                        )
                    except (OSError, HoldfastError):
                        return
                    reached = True
                    await trio.aclose_forcefully(back.stream)
                    nursery.cancel_scope.cancel()

                for text in addresses:
                    nursery.start_soon(dial, text)
        return reached
