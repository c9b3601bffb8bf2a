"""Certificates, network and link hub for a benchmark's ranks, which have no master."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

import trio
from attrs import frozen

from ...collectives.links.hub import LinkHub
from ...collectives.links.rate_limiter import RateLimiter
from ...protocol.addresses import Address
from ...protocol.messages import MemberInfo, Role
from ...protocol.network.sockets import SocketNetwork
from ...protocol.trust.authority import Authority, Party
from ...protocol.trust.credentials import Credentials
from ...protocol.trust.identity import Identity
from .rendezvous import Rendezvous

N = TypeVar("N", bound=SocketNetwork)


@frozen
class BenchRank(Generic[N]):
    """One rank with a serving network, a running hub and the list of all ranks."""

    network: N
    hub: LinkHub
    members: list[MemberInfo]  # by rank


async def become_member(
    rendezvous: Rendezvous,
    rank: int,
    directory: Path,
    nursery: trio.Nursery,
    make_network: Callable[[Credentials], N],
    *,
    upload: RateLimiter | None = None,
    download: RateLimiter | None = None,
) -> BenchRank[N]:
    """Get a certificate from rank 0, listen, and learn the other ranks' addresses.

    Links come up after a call of ``hub.set_members(members)``.

    Args:
      directory: folder for the authority's key, used at rank 0.
    """
    identity = Identity.generate()
    name = f"rank-{rank}"
    requests = await rendezvous.exchange({"request": identity.request_pem(name).decode()})
    issued: dict[str, Any] = {}
    if rank == 0:
        authority = Authority.load_or_create(directory / "authority", "bench")
        issued["authority"] = authority.certificate_pem.decode()
        issued["certificates"] = [
            authority.issue(each["request"].encode(), f"rank-{number}", Party.PEER).decode()
            for number, each in enumerate(requests)
        ]
    issued = (await rendezvous.exchange(issued))[0]
    certificate = issued["certificates"][rank].encode()
    credentials = Credentials(directory, identity, certificate, issued["authority"].encode())
    network = make_network(credentials)
    hub = LinkHub(network, identity.peer_id, upload=upload, download=download)
    bound: Sequence[Address] = await nursery.start(
        network.serve, [Address(rendezvous.host, 0)], hub.handle_channel, hub.handle_lane
    )
    await nursery.start(hub.run)
    everyone = await rendezvous.exchange({"peer": identity.peer_id, "address": str(bound[0])})
    members = [
        MemberInfo(
            each["peer"], f"rank-{number}", number, (each["address"],), Role.CONTRIBUTOR, True
        )
        for number, each in enumerate(everyone)
    ]
    return BenchRank(network, hub, members)
