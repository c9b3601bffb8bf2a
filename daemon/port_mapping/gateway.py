"""What the port mapper asks of a router, whatever protocol it speaks."""

from __future__ import annotations

import ipaddress
from abc import ABC, abstractmethod

from attrs import frozen

from ...protocol.addresses import Address

# Nobody outside can dial these: of private networks, and of a carrier's own translation (RFC 6598).
NOT_PUBLIC = tuple(
    map(
        ipaddress.ip_network,
        (
            "0.0.0.0/8",
            "10.0.0.0/8",
            "100.64.0.0/10",
            "127.0.0.0/8",
            "169.254.0.0/16",
            "172.16.0.0/12",
            "192.168.0.0/16",
            "::/127",
            "fc00::/7",
            "fe80::/10",
        ),
    )
)


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
    """A router that may be asked for mappings of one port of this machine."""

    @abstractmethod
    async def map(self) -> PortMapping:
        """Ask for the mapping, or for a longer life of it.

        Raises:
          MappingError: there is none.
        """

    @abstractmethod
    async def unmap(self) -> None:
        """Give the mapping back, as far as the router listens."""


def is_public(host: str) -> bool:
    """Return whether an IP address can be one that machines everywhere dial."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    return not any(
        address in network for network in NOT_PUBLIC if network.version == address.version
    )


def check_public(host: str) -> None:
    """Raise MappingError if nobody outside can dial a router at this address."""
    if not is_public(host):
        raise MappingError(
            f"the router's own address {host} is not public: another router, perhaps the carrier's, "
            "is between it and the internet"
        )
