"""Reachability of peers: the master dials back the addresses that they give.

A peer that can be dialled is known to be so after a round trip. For any other peer the check takes
until the timeout; a peer that comes back with the same addresses does not wait for that again.

A peer may name other hosts than the one that it connects from: its host name, or an address in one
of the master's networks. It must not use this to scan those hosts. It learns only whether it is
there itself, because the dialled host must show its certificate, and a failure takes the full
timeout whether the host refused or is absent.
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
ADDRESSES_DIALLED_MAX = 4  # the first ones of a peer; it listens at one or two
# Host names among these: a lookup takes a thread, and a name server may never answer.
NAMES_MAX = 2
RECLASS_S = 300.0  # between two checks of all members
AGAIN_S = 5.0  # between two checks at least, however often peers come back


class ReachabilityCheck:
    """Class ``members`` as reachable or not; ``classed`` is told the result of each later check."""

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
        """Return whether a peer whose connection comes from ``host`` can be dialled.

        A peer that was not reachable at the same addresses before is not checked now, but soon.
        """
        if self._outbound.get(peer) == addresses:
            self._again.set()  # this may have changed; the peer is told if it has
            return False
        began_s = trio.current_time()
        found = await self._look(peer, addresses)
        elsewhere = any(
            # With a zone, the same address may be another machine in another network.
            host_of(text) != host or "%" in text
            for text in addresses[:ADDRESSES_DIALLED_MAX]
        )
        if not found and elsewhere:
            await trio.sleep_until(began_s + PROBE_S)
        return found

    def look_soon(self) -> None:
        """Check all members soon: one of them may have moved."""
        self._again.set()

    async def run(self) -> None:
        """Check members every ``RECLASS_S``, and soon after one has come back, until cancelled."""
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
    few, name_count = [], 0
    for text in addresses:
        name_count += (named := _is_name(text))
        if not named or name_count <= NAMES_MAX:
            few.append(text)
    return few


def _is_name(text: str) -> bool:
    try:
        ipaddress.ip_address(host_of(text))
    except ValueError:
        return True
    return False
