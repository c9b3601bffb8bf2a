"""Certificates, network and link hub for a benchmark's ranks, which have no master."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
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
from .rank_processes import RankSeat
from .rendezvous import Rendezvous

LINK_S = 60.0  # limit for a link with its lanes to come up

N = TypeVar("N", bound=SocketNetwork)


@frozen
class BenchRank(Generic[N]):
    """One rank with a serving network, a running hub and the list of all ranks."""

    seat: RankSeat
    rendezvous: Rendezvous
    nursery: trio.Nursery
    network: N
    hub: LinkHub
    members: list[MemberInfo]  # by rank

    async def link_all(self) -> None:
        """Link to all other ranks."""
        self.hub.set_members(self.members)
        for member in self.members:
            if member.peer != self.hub.me:
                await self.hub.link(member.peer, LINK_S)


@asynccontextmanager
async def joined(
    seat: RankSeat,
    make_network: Callable[[Credentials], N],
    *,
    upload_mbit: float | None = None,
) -> AsyncGenerator[BenchRank[N]]:
    """Meet the other ranks, get a certificate from rank 0, listen, and learn all addresses.

    Links come up after a call of ``hub.set_members(members)``.
    """
    upload = None if upload_mbit is None else RateLimiter(upload_mbit * 1e6 / 8)
    async with Rendezvous.open(seat) as rendezvous, trio.open_nursery() as nursery:
        with tempfile.TemporaryDirectory(prefix="holdfast-bench-") as folder:
            credentials = await _credentials(seat.rank, rendezvous, Path(folder))
            network = make_network(credentials)
            hub = LinkHub(network, credentials.identity.peer_id, upload=upload)
            bound: Sequence[Address] = await nursery.start(
                network.serve, [Address(rendezvous.host, 0)], hub.handle_channel, hub.handle_lane
            )
            await nursery.start(hub.run)
            everyone = await rendezvous.exchange({"peer": hub.me, "address": str(bound[0])})
            members = [
                MemberInfo(
                    each["peer"], f"rank-{rank}", rank, (each["address"],), Role.CONTRIBUTOR, True
                )
                for rank, each in enumerate(everyone)
            ]
            yield BenchRank(seat, rendezvous, nursery, network, hub, members)
        nursery.cancel_scope.cancel()


async def _credentials(rank: int, rendezvous: Rendezvous, folder: Path) -> Credentials:
    """Get a certificate from rank 0, which makes a certificate authority in the folder."""
    identity = Identity.generate()
    request = identity.request_pem(f"rank-{rank}").decode()
    requests = await rendezvous.exchange({"request": request})
    issued: dict[str, Any] = {}
    if rank == 0:
        authority = Authority.load_or_create(folder / "authority", "bench")
        issued["authority"] = authority.certificate_pem.decode()
        issued["certificates"] = [
            authority.issue(each["request"].encode(), f"rank-{number}", Party.PEER).decode()
            for number, each in enumerate(requests)
        ]
    issued = (await rendezvous.exchange(issued))[0]
    certificate = issued["certificates"][rank].encode()
    return Credentials(folder, identity, certificate, issued["authority"].encode())
