"""Reachability checks: the addresses that the master dials for a member, and the answers."""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import Any

import pytest
import trio
import trio.testing

from holdfast.daemon.master.reachability import (
    ADDRESSES_DIALLED_MAX,
    AGAIN_S,
    PROBE_S,
    ReachabilityCheck,
)
from holdfast.protocol.addresses import Address
from holdfast.protocol.errors import RemoteProtocolError
from holdfast.protocol.network.interface import Channel
from holdfast.protocol.trust.authority import Party
from tests.background import background

PEER = "ab" * 16
HOST = "203.0.113.7"


class FakeNetwork:
    def __init__(self, lead: Callable[[Address], Exception | None]) -> None:
        self.dialled: list[Address] = []
        self._lead = lead

    async def dial(self, address: Address, *, party: Party, peer: str) -> Channel:
        self.dialled.append(address)
        if (error := self._lead(address)) is not None:
            raise error
        if address.port == 9:
            await trio.sleep_forever()
        return Channel(trio.testing.memory_stream_pair()[0], party, peer, b"", str(address))


def reachability(network: Any) -> ReachabilityCheck:
    return ReachabilityCheck(
        network, lambda: [(PEER, (f"{HOST}:1",))], lambda _peer, _reached: None
    )


@pytest.mark.parametrize(
    "there",
    [
        OSError(errno.ECONNREFUSED, "refused"),
        OSError("no such name"),
        RemoteProtocolError("it is no peer of this run"),
        None,
    ],
    ids=["refused", "unknown", "another service", "filtered"],
)
async def test_what_is_at_another_host_is_not_told_by_when_it_is_said(
    there: Exception | None,
) -> None:
    looking = reachability(FakeNetwork(lambda _address: there))
    assert not await looking.reachable(PEER, ("internal.example:9",), HOST)
    assert trio.current_time() == PROBE_S


async def test_who_refuses_at_its_own_host_is_not_waited_for() -> None:
    refused = OSError(errno.ECONNREFUSED, "refused")
    looking = reachability(FakeNetwork(lambda _address: refused))
    assert not await looking.reachable(PEER, (f"{HOST}:1",), HOST)
    assert trio.current_time() == 0.0


async def test_the_same_address_in_a_zone_may_be_another_host() -> None:
    refused = OSError(errno.ECONNREFUSED, "refused")
    looking = reachability(FakeNetwork(lambda _address: refused))
    assert not await looking.reachable(PEER, ("[fe80::7%eth1]:9",), "fe80::7")
    assert trio.current_time() == PROBE_S


async def test_few_of_many_addresses_are_dialled() -> None:
    refused = OSError(errno.ECONNREFUSED, "refused")
    network = FakeNetwork(lambda _address: refused)
    addresses = tuple(f"10.0.0.{number}:22" for number in range(16))
    assert not await reachability(network).reachable(PEER, addresses, HOST)
    assert len(network.dialled) == ADDRESSES_DIALLED_MAX


async def test_who_comes_back_all_the_time_has_nobody_dialled_all_the_time() -> None:
    network = FakeNetwork(lambda _address: None)
    looking = reachability(network)
    async with background() as nursery:
        nursery.start_soon(looking.run)
        for _ in range(600):
            looking.look_soon()
            await trio.sleep(0.1)
    assert len(network.dialled) <= 60 / AGAIN_S + 1
