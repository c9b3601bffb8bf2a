"""Requests of members and HTTP clients occupy none of the threads that write the journal."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any, cast

import httpx
import pytest
import trio
import trio.testing
from starlette.applications import Starlette

from holdfast.daemon.master.reachability import NAMES_MAX, ReachabilityCheck
from holdfast.daemon.web.run_history import READERS_MAX, past_routes
from holdfast.protocol.addresses import Address
from holdfast.protocol.network.host_lookup import GROUPS, LOOKUPS_EACH
from holdfast.protocol.network.interface import Network
from holdfast.protocol.network.sockets import SocketNetwork, open_tcp
from tests.background import background

HOST = "203.0.113.7"  # where a member comes from
MANY = 60  # more than trio has threads
POLL_S = 0.01


class Stuck:
    """Whatever gets in here stays until the test lets it go."""

    def __init__(self) -> None:
        self.entered: list[object] = []
        self.go_on = threading.Event()

    def enter(self, what: object) -> None:
        self.entered.append(what)
        self.go_on.wait()

    async def until(self, count: int) -> None:
        while len(self.entered) < count:
            await trio.sleep(POLL_S)


@pytest.fixture
def stuck() -> Iterator[Stuck]:
    stuck = Stuck()
    yield stuck
    stuck.go_on.set()


@pytest.fixture
def names(stuck: Stuck, monkeypatch: pytest.MonkeyPatch) -> Stuck:
    """Names that end in ``.stuck`` are looked up for ever, others are loopback's; addresses are."""
    real = socket.getaddrinfo

    def getaddrinfo(host: Any, *more: Any, **named: Any) -> Any:
        text = host.decode() if isinstance(host, bytes) else str(host)
        flags = named.get("flags", more[4] if len(more) > 4 else 0)
        if flags & socket.AI_NUMERICHOST or text[0].isdigit():
            return real(host, *more, **named)
        if text.endswith(".stuck"):
            stuck.enter(text)
            raise socket.gaierror(socket.EAI_AGAIN, "gave up")
        return real("127.0.0.1", *more, **named)

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    return stuck


def a_network() -> Network:
    return SocketNetwork(cast(Any, None))  # nobody gets as far as a handshake


def others_lane(than: str) -> str:
    """A member whose names are looked up in another lane."""
    return next(each for each in map(str, range(100)) if (hash(each) - hash(than)) % GROUPS)


@pytest.mark.real_time
async def test_names_that_members_give_keep_nobody_from_the_journal(names: Stuck) -> None:
    network = a_network()
    looking = ReachabilityCheck(network, tuple, lambda _peer, _reachable: None)
    async with background() as nursery:
        for number in range(MANY):
            addresses = tuple(f"n{number}-{index}.stuck:7" for index in range(16))
            nursery.start_soon(looking.reachable, f"peer {number}", addresses, HOST)
        await names.until(LOOKUPS_EACH)
        await trio.testing.wait_all_tasks_blocked(POLL_S)
        assert await network.run_sync(lambda: "written") == "written"
        assert len(names.entered) <= GROUPS * LOOKUPS_EACH
        names.go_on.set()


@pytest.mark.real_time
async def test_a_members_bad_names_hold_up_no_other_members(names: Stuck) -> None:
    network, bad = a_network(), "bad"
    listener = socket.create_server(("127.0.0.1", 0))
    with listener:
        port = listener.getsockname()[1]
        async with background() as nursery:
            looking = ReachabilityCheck(network, tuple, lambda _peer, _reachable: None)
            for number in range(MANY):  # it says so again and again
                names_given = (f"n{number}.stuck:7", "m.stuck:7")
                nursery.start_soon(looking.reachable, bad, names_given, HOST)
            await names.until(LOOKUPS_EACH)
            good = await open_tcp(Address("good.example", port), others_lane(bad))
            ours = await open_tcp(Address("master.example", port))
            await good.aclose()
            await ours.aclose()
            await trio.testing.wait_all_tasks_blocked(POLL_S)
            assert len(names.entered) == LOOKUPS_EACH
            names.go_on.set()


async def test_of_a_hello_all_addresses_and_the_first_names_are_dialled() -> None:
    dialled = []

    class Noted:
        async def dial(self, address: Address, **_more: object) -> None:
            dialled.append(str(address))
            raise OSError

    given = (
        "a.example:1",
        "192.0.2.1:1",
        "b.example:1",
        "[2001:db8::1]:1",
        "c.example:1",
        "x",
        "y",
    )
    looking = ReachabilityCheck(cast(Any, Noted()), tuple, lambda _peer, _reachable: None)
    assert not await looking.reachable("p", given, HOST)
    assert NAMES_MAX == 2
    assert sorted(dialled) == sorted(given[:4])


@pytest.mark.real_time
async def test_queries_of_the_past_keep_nobody_from_the_journal(stuck: Stuck) -> None:
    class Slow:
        def rounds(self, *_query: object) -> list[bytes]:
            stuck.enter("rounds")
            return []

    network = a_network()
    app = Starlette(routes=past_routes(cast(Any, Slow()), network))
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        async with trio.open_nursery() as nursery:
            ask: Callable[[str], Any] = client.get
            for _ in range(MANY):
                nursery.start_soon(ask, "/api/rounds")
            await stuck.until(READERS_MAX)
            await trio.testing.wait_all_tasks_blocked(POLL_S)
            assert await network.run_sync(lambda: "written") == "written"
            assert len(stuck.entered) == READERS_MAX
            stuck.go_on.set()
