"""A port of the router for this machine, asked for when it is needed, renewed, and given back.

    idle --other machines cannot dial this one--> asking --PortMapping--> mapped --half its life-->
    asking
                                                    |  ^
                                                    '--'  no router maps the port: again, later

It is needed when the master cannot dial this machine, or when this machine and another member need
a relay or hole punching. Mappings stay until this machine leaves.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence

import trio

from ...protocol.addresses import Address
from .gateway import Gateway, MappingError, PortMapping

log = logging.getLogger("holdfast.peer")

AGAIN_S = 600.0  # after no router mapped the port: another one may be there by then
ASKED_AGAIN_S = 30.0  # between two requests at least, however often the need is told
RENEWED_MIN_S = 10.0
GIVE_BACK_S = 3.0  # for all routers, as this machine leaves

FindGateways = Callable[[], Sequence[Sequence[Gateway]]]


class PortMapper:
    """Keep a port of the router mapped to this machine's.

    Args:
      find: returns, by family, the gateways to ask in turn.
      changed: called when ``addresses`` have changed.

    Attributes:
      mappings: what routers gave.
      why_not: why there is none; empty before any was needed, and while there is one.
    """

    def __init__(self, find: FindGateways, changed: Callable[[], None]) -> None:
        self.mappings: list[PortMapping] = []
        self.why_not = ""
        self._find = find
        self._changed = changed
        self._gateways: Sequence[Sequence[Gateway]] = ()
        self._need = trio.Event()

    @property
    def addresses(self) -> tuple[Address, ...]:
        """At which other machines may dial this one, thanks to routers."""
        return tuple(mapping.address for mapping in self.mappings)

    @property
    def said(self) -> str:
        """What there is, for people; empty before any was needed."""
        given = (f"{each.address} by {each.protocol}" for each in self.mappings)
        return ", ".join(given) or (f"none: {self.why_not}" if self.why_not else "")

    def need(self) -> None:
        """Note that other machines could not dial this one."""
        self._need.set()

    async def run(self) -> None:
        await self._need.wait()
        try:
            while True:
                self._need = trio.Event()
                wait_s = await self._ask()
                await trio.sleep(min(wait_s, ASKED_AGAIN_S))
                with trio.move_on_after(max(0.0, wait_s - ASKED_AGAIN_S)):
                    await self._need.wait()
        finally:
            with trio.move_on_after(GIVE_BACK_S, shield=True):
                await self._give_back()

    async def _ask(self) -> float:
        """Ask all routers; return after how many seconds to ask again."""
        before, reasons, wait_s = self.addresses, [], math.inf
        if not self.mappings:
            self._gateways = self._find()
        found: list[PortMapping] = []
        kept: list[list[Gateway]] = []
        for gateways in self._gateways:
            mapping, gateway, why = await self._first_of(gateways)
            if mapping is None or gateway is None:
                reasons.append(why)
                kept.append(list(gateways))
                continue
            found.append(mapping)
            # The one that mapped the port is asked first from now on.
            kept.append([gateway, *(each for each in gateways if each is not gateway)])
            wait_s = min(wait_s, max(RENEWED_MIN_S, mapping.lifetime_s / 2))
        self._gateways, self.mappings = kept, found
        self.why_not = "" if found else "; ".join(reasons) or "there is no router to ask"
        if self.addresses != before:
            log.info("ports of the router: %s", self.said)
            self._changed()
        return wait_s if found else AGAIN_S

    async def _first_of(
        self, gateways: Sequence[Gateway]
    ) -> tuple[PortMapping | None, Gateway | None, str]:
        """Return the first mapping that a gateway gives, and its gateway; or why none does."""
        reasons: list[str] = []
        for gateway in gateways:
            try:
                return await gateway.map(), gateway, ""
            except MappingError as error:
                reasons.append(str(error))
        return None, None, ", ".join(reasons)

    async def _give_back(self) -> None:
        async with trio.open_nursery() as nursery:
            for gateways in self._gateways:
                for gateway in gateways:
                    nursery.start_soon(gateway.unmap)
