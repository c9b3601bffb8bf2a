"""What the port mapper asks of a router, whatever protocol it speaks."""

from __future__ import annotations

from abc import ABC, abstractmethod

from attrs import frozen

from ...protocol.addresses import Address, is_public


class MappingError(Exception):
    """The router maps no port; the text says why, for people."""


@frozen
class PortMapping:
    """A port of the router that leads to this machine.

    Attributes:
      address: at which other machines dial this one.
      lifetime_s: for so long from now, unless it is renewed.
      protocol: by which it was asked for, for people.
    """

    address: Address
    lifetime_s: float
    protocol: str


class Gateway(ABC):
    """A router that may be asked for mappings of one port of this machine, ``own``."""

    def __init__(self, router: str, own: Address) -> None:
        self._router = router
        self._own = own
        self._given: Address | None = None

    @abstractmethod
    async def map(self) -> PortMapping:
        """Ask for the mapping, or for a longer life of it; raise MappingError if there is none."""

    @abstractmethod
    async def unmap(self) -> None:
        """Give the mapping back, as far as the router listens."""


def check_public(host: str) -> None:
    """Raise MappingError if nobody outside can dial a router at this address."""
    if not is_public(host):
        raise MappingError(
            f"the router's own address {host} is not public: another router, perhaps the carrier's,"
            " is between it and the internet"
        )
