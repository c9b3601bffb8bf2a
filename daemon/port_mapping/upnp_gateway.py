"""A router that speaks UPnP IGD, which most do: by miniupnpc, in a thread."""

from __future__ import annotations

import importlib
from contextlib import suppress
from typing import Any

import trio

from ...protocol.addresses import PORT_MAX, Address
from .gateway import Gateway, MappingError, PortMapping, check_public

DISCOVER_MS = 2_000  # routers answer a search within this
LIFETIME_S = 3_600
FOREVER_S = 86_400.0  # of a mapping that some routers keep until it is given back
TRIED_PORTS = 10  # the port may be another machine's already
DESCRIPTION = "holdfast"
# Answers of a router, as miniupnpc words them.
ONLY_PERMANENT = "OnlyPermanentLeasesSupported"
TAKEN = "Conflict"  # in the mapping entry, or with another mechanism


class UpnpGateway(Gateway):
    """The router that answers in this network first.

    Args:
      own: this machine's address towards it, and the port to be mapped.
    """

    def __init__(self, own: Address) -> None:
        self._own = own
        self._client: Any = None
        self._given: Address | None = None
        self._lifetime_s = LIFETIME_S

    async def map(self) -> PortMapping:
        return await trio.to_thread.run_sync(self._map, abandon_on_cancel=True)

    async def unmap(self) -> None:
        if self._given is not None:
            await trio.to_thread.run_sync(self._unmap, abandon_on_cancel=True)
            self._given = None

    def _map(self) -> PortMapping:
        client = self._client = self._client or self._find()
        try:
            self._given = Address(client.externalipaddress(), self._add(client))
        except MappingError:
            raise
        except Exception as error:  # noqa: BLE001  miniupnpc has no class of its own
            self._client = None  # look for the router again
            raise MappingError(f"the router refuses by UPnP: {error}") from None
        check_public(self._given.host)
        return PortMapping(self._given, self._lifetime_s or FOREVER_S, "UPnP")

    def _find(self) -> Any:
        try:
            client = importlib.import_module("miniupnpc").UPnP()
        except ImportError:
            raise MappingError(
                "UPnP cannot be used without miniupnpc: pip install miniupnpc"
            ) from None
        client.discoverdelay = DISCOVER_MS
        try:
            client.discover()
            client.selectigd()
        except Exception:  # noqa: BLE001
            raise MappingError("no router answers by UPnP") from None
        return client

    def _add(self, client: Any) -> int:
        """Have the port mapped; return the router's port."""
        wanted = self._own.port if self._given is None else self._given.port
        for port in range(wanted, min(wanted + TRIED_PORTS, PORT_MAX + 1)):
            try:
                self._add_one(client, port)
            except Exception as error:
                if TAKEN in str(error):
                    continue
                if ONLY_PERMANENT in str(error) and self._lifetime_s:
                    self._lifetime_s = 0
                    return self._add(client)
                raise
            return port
        raise MappingError(f"the router's ports from {wanted} on lead to other machines")

    def _add_one(self, client: Any, port: int) -> None:
        own, lifetime_s = self._own, self._lifetime_s
        client.addportmapping(port, "TCP", own.host, own.port, DESCRIPTION, "", lifetime_s)

    def _unmap(self) -> None:
        if self._client is not None and self._given is not None:
            with suppress(Exception):  # the router is gone, or has lost it
                self._client.deleteportmapping(self._given.port, "TCP")
