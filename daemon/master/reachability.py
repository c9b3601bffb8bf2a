"""Whether a peer can be dialled: the master dials back the addresses that it gives.

Whoever can be dialled is known after a round trip, and waits for no more. Whoever cannot is known to be
so when no address has answered in time; it need not wait for that again each time that it comes back.

A member may name other hosts than the one that it comes from: its name, an address of a network in which
the master is, too. What it learns of them is whether it is itself there, for only its own certificate
counts; and it is told that it is not after the same time, whether somebody there refused or nobody is.
"""

from __future__ import annotations

import ipaddress
import math
from collections import OrderedDict
from collections.abc import Callable, Sequence

import trio

from ...protocol.addresses import Address, host_of
from ...protocol.errors import HoldfastError
from ...protocol.messages import MEMBERS_MAX
from ...protocol.network.interface import Network
from ...protocol.trust.authority import Party

PROBE_S = 5.0  # for all addresses of a peer, at once
ADDRESSES_DIALLED_MAX = 4  # of a member, those that it calls the best; one listens at one or two
# Of these, host names that are looked up: a name server may take for ever. Addresses cost no thread.
NAMES_MAX = 2
RECLASS_S = 300.0  # between two times that a member is dialled back
AGAIN_S = 5.0  # at least; however often somebody comes back


class ReachabilityCheck:
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

    async def reachable(self, peer: str, addresses: tuple[str, ...], host: str) -> bool:
        """Whether it can be dialled at one of these; known at once if it could not be before.

        Args:
          host: where it comes from.
        """
        if self._outbound.get(peer) == addresses:
            self._again.set()  # that may have changed; it is told if it has
            return False
        began_s = trio.current_time()
        found = await self._look(peer, addresses)
        elsewhere = any(
            # With a zone, the same address may be in another network than the member's.
            host_of(text) != host or "%" in text
            for text in addresses[:ADDRESSES_DIALLED_MAX]
        )
        if not found and elsewhere:
            await trio.sleep_until(began_s + PROBE_S)
        return found

    def look_soon(self) -> None:
        """Somebody may be elsewhere by now."""
        self._again.set()

    async def run(self) -> None:
        """Look at members again: now and then, and soon after one has come back."""
        looked_s = -math.inf
        while True:
            with trio.move_on_after(RECLASS_S):
                await self._again.wait()
                await trio.sleep_until(max(trio.current_time(), looked_s + AGAIN_S))
            looked_s = trio.current_time()
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

                for text in _few_names(addresses)[:ADDRESSES_DIALLED_MAX]:
                    nursery.start_soon(dial, text)
        return reached


def _few_names(addresses: Sequence[str]) -> list[str]:
    """All but the names that are too many, in their order."""
    names = [text for text in addresses if _is_name(text)]
    return [text for text in addresses if text not in names[NAMES_MAX:]]


def _is_name(text: str) -> bool:
    try:
        ipaddress.ip_address(host_of(text))
    except ValueError:
        return True
    return False
