"""Ports that routers map: messages, one router that answers over UDP, and the mapper in virtual
time.
"""

from __future__ import annotations

import itertools
import socket
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
import trio
from attrs import frozen
from hypothesis import given
from hypothesis import strategies as st

from holdfast.daemon.port_mapping import gateway_search, port_mapper, upnp_gateway
from holdfast.daemon.port_mapping.gateway import Gateway, MappingError, PortMapping
from holdfast.daemon.port_mapping.pcp_gateway import WAITS_S, PcpGateway
from holdfast.daemon.port_mapping.pcp_messages import (
    NONCE_BYTES,
    MapAnswer,
    MapRequest,
    pcp_request,
    read_pcp_answer,
)
from holdfast.daemon.port_mapping.port_mapper import (
    AGAIN_S,
    ASKED_AGAIN_S,
    GIVE_BACK_S,
    PortMapper,
)
from holdfast.protocol.addresses import Address, is_public
from tests.background import background

NONCE = bytes(range(NONCE_BYTES))
OWN = Address("192.168.1.7", 29_701)
GIVEN = Address("203.0.113.9", 40_001)
REQUEST = MapRequest(OWN, NONCE, 7_200)
V4 = bytes(10) + b"\xff\xff"

# ---------------------------------------------------------------- messages


def pcp_answer(
    result: int = 0, *, nonce: bytes = NONCE, own_port: int = OWN.port, version: int = 2
) -> bytes:
    """An answer as RFC 6887, figures 3 and 10, has it."""
    head = bytes([version, 0x81, 0, result]) + (3_600).to_bytes(4, "big") + (77).to_bytes(4, "big")
    ports = own_port.to_bytes(2, "big") + GIVEN.port.to_bytes(2, "big")
    return head + bytes(12) + nonce + bytes([6, 0, 0, 0]) + ports + V4 + bytes([203, 0, 113, 9])


def test_a_request_of_pcp_has_the_bytes_of_the_rfc() -> None:
    """RFC 6887, figures 2 and 9."""
    data = pcp_request(REQUEST)
    assert data[:8] == bytes([2, 1, 0, 0]) + (7_200).to_bytes(4, "big")
    assert data[8:24] == V4 + bytes([192, 168, 1, 7])
    assert data[24:40] == NONCE + bytes([6, 0, 0, 0])
    assert data[40:44] == OWN.port.to_bytes(2, "big") * 2
    assert data[44:] == V4 + bytes(4)
    again = pcp_request(MapRequest(OWN, NONCE, 0, GIVEN))
    assert again[42:44] == GIVEN.port.to_bytes(2, "big")
    assert again[44:] == V4 + bytes([203, 0, 113, 9])
    assert again[4:8] == bytes(4), "given back"
    six = pcp_request(MapRequest(Address("2001:db8::7", 1), NONCE, 1))
    assert (six[8:24], six[44:]) == (socket.inet_pton(socket.AF_INET6, "2001:db8::7"), bytes(16))


def test_an_answer_of_pcp_is_read() -> None:
    expected = MapAnswer(GIVEN.host, GIVEN.port, 3_600)
    assert read_pcp_answer(pcp_answer(), REQUEST) == expected


@pytest.mark.parametrize(
    "data",
    [b"", pcp_request(REQUEST), pcp_answer(nonce=bytes(NONCE_BYTES)), pcp_answer(own_port=1)],
    ids=["empty", "a request", "another nonce", "another port"],
)
def test_what_answers_another_request_is_passed_over(data: bytes) -> None:
    assert read_pcp_answer(data, REQUEST) is None


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (bytes([0, 0x80 | 1, 0, 1]) + bytes(4), "version"),
        (pcp_answer(1), "version"),
        (pcp_answer(2), "allow nobody"),
        (pcp_answer(8)[:24], "no room"),
        (pcp_answer(99), "error 99"),
    ],
    ids=["NAT-PMP", "version", "not authorised", "short", "unknown"],
)
def test_a_refusal_of_pcp_says_why(data: bytes, text: str) -> None:
    with pytest.raises(MappingError, match=text):
        read_pcp_answer(data, REQUEST)


@given(st.binary(max_size=80))
def test_no_datagram_does_more_than_refuse(data: bytes) -> None:
    with suppress(MappingError):
        assert isinstance(read_pcp_answer(data, REQUEST), MapAnswer | None)


def test_addresses_that_everybody_can_dial_are_told_apart() -> None:
    assert all(map(is_public, ("8.8.8.8", "203.0.113.9", "2a00::1")))
    others = ["100.64.3.2", "192.168.0.1", "8.8.8.8%\x1b[2J", "239.255.255.250", "255.255.255.255"]
    others += ["fe80::1%eth0", "fd00::1", "2a00::1%eth0", "ff02::1", "::ffff:192.168.0.1", "a.com"]
    assert not [host for host in others if is_public(host)]


# ---------------------------------------------------------------- one router, over UDP


@asynccontextmanager
async def a_router(
    *answers: Callable[[bytes], bytes | None],
) -> AsyncIterator[tuple[int, list[bytes]]]:
    """Answer the n-th datagram by the n-th function, and later ones by the last; yield port and
    requests.
    """
    heard: list[bytes] = []
    with trio.socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp:
        await udp.bind(("127.0.0.1", 0))

        async def serve() -> None:
            while True:
                data, sender = await udp.recvfrom(1_100)
                heard.append(data)
                answer = answers[min(len(heard), len(answers)) - 1](data)
                if answer is not None:
                    await udp.sendto(answer, sender)

        async with background() as nursery:
            nursery.start_soon(serve)
            yield udp.getsockname()[1], heard


def grants(request: bytes) -> bytes:
    """What a router that speaks PCP answers."""
    nonce, own_port = request[24:36], int.from_bytes(request[40:42], "big")
    return pcp_answer(nonce=nonce, own_port=own_port)


def gateway(port: int) -> PcpGateway:
    return PcpGateway("127.0.0.1", Address("127.0.0.1", OWN.port), port)


@pytest.mark.real_time
@pytest.mark.parametrize(
    "answers",
    [[grants], [lambda _: None, grants], [lambda _: b"noise", grants]],
    ids=["at once", "a lost datagram", "noise"],
)
async def test_a_router_maps_the_port_and_takes_it_back(
    answers: list[Callable[[bytes], bytes | None]],
) -> None:
    async with a_router(*answers) as (port, heard):
        router = gateway(port)
        assert await router.map() == PortMapping(GIVEN, 3_600, "PCP")
        count = len(heard)
        assert await router.map() == PortMapping(GIVEN, 3_600, "PCP"), "renewed"
        assert heard[count][-16:] != heard[0][-16:], "suggests what it has"
        await router.unmap()
        assert heard[-1][4:8] == bytes(4)
        count = len(heard)
        await router.unmap()
        assert len(heard) == count, "there is nothing to give back any more"


@pytest.mark.real_time
async def test_a_router_that_refuses_or_is_no_such_router_is_said_to() -> None:
    async with a_router(lambda request: pcp_answer(2, nonce=request[24:36])) as (port, _heard):
        with pytest.raises(MappingError, match="allow nobody"):
            await gateway(port).map()
    with pytest.raises(MappingError, match="does not speak PCP"):
        await gateway(port).map()


@pytest.mark.real_time
@pytest.mark.parametrize(
    ("at", "mapped", "why"),
    [(56, bytes([100, 64, 3, 2]), r"100\.64\.3\.2 is not public"), (42, bytes(2), "no port")],
)
async def test_a_mapping_that_nobody_can_dial_is_of_no_use(
    at: int, mapped: bytes, why: str
) -> None:
    def careless(request: bytes) -> bytes:
        answer = grants(request)
        return answer[:at] + mapped + answer[at + len(mapped) :]

    async with a_router(careless) as (port, _heard):
        with pytest.raises(MappingError, match=why):
            await gateway(port).map()


@pytest.mark.real_time
async def test_a_silent_router_is_given_up() -> None:
    async with a_router(lambda _: None) as (port, heard):
        with pytest.raises(MappingError, match="does not answer PCP"):
            await gateway(port).map()
        assert len(heard) == len(WAITS_S)


# ---------------------------------------------------------------- one router, by UPnP


@frozen
class Home:
    """A router that has mapped the wanted port already, and maps others for ever; or what poses as
    one.
    """

    location: str = "http://127.0.0.1:{}/root.xml"
    control: str = "/control"
    outside: str = GIVEN.host
    endless: bytes = b""

    def reply(self, request: str) -> Iterable[bytes]:
        kind = "<serviceType>urn:schemas-upnp-org:service:WANIPConnection:1</serviceType>"
        answer = f"{kind}<SCPDURL>/x.xml</SCPDURL><controlURL>{self.control}</controlURL>"
        if "GetExternalIPAddress" in request:
            answer = f"<NewExternalIPAddress>{self.outside}</NewExternalIPAddress>"
        elif "u:AddPortMapping" in request:
            ever, taken = "Duration>0<" in request, f"ExternalPort>{OWN.port}<" in request
            error = f"<errorCode>{718 if ever else 725}</errorCode>"
            answer = error if taken or not ever else "<u:AddPortMappingResponse>"
        return itertools.repeat(self.endless) if self.endless else [answer.encode()]


@asynccontextmanager
async def upnp(
    home: Home, monkeypatch: pytest.MonkeyPatch, router: str = "127.0.0.1"
) -> AsyncIterator[tuple[upnp_gateway.UpnpGateway, list[str]]]:
    """Yield a gateway at a router, and what it asks for over HTTP."""
    heard: list[str] = []

    async def serve(stream: trio.SocketStream) -> None:
        heard.append(bytes(await stream.receive_some()).decode())
        with suppress(trio.BrokenResourceError):
            for part in home.reply(heard[-1]):
                await stream.send_all(part)
                await trio.sleep(0.001)

    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    found = f"Location: {home.location}\r\n".format(listener.socket.getsockname()[1]).encode()
    async with background() as nursery, a_router(lambda _: found) as (port, _searches):
        nursery.start_soon(trio.serve_listeners, serve, [listener])
        monkeypatch.setattr(upnp_gateway, "SEARCHED", ("127.0.0.1", port))
        yield upnp_gateway.UpnpGateway(router, Address("127.0.0.1", OWN.port)), heard


@pytest.mark.real_time
async def test_a_port_is_mapped_by_upnp_and_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    async with upnp(Home(), monkeypatch) as (router, heard):
        mapping = PortMapping(Address(GIVEN.host, OWN.port + 1), upnp_gateway.FOREVER_S, "UPnP")
        assert await router.map() == mapping
        heard.clear()
        assert await router.map() == mapping
        await router.unmap()
        calls = ("GetExternalIPAddress", "AddPortMapping", "DeletePortMapping")
        for call, text in zip(calls, heard, strict=True):  # renewed without a search
            assert f'WANIPConnection:1#{call}"' in text
            assert "IPAddress" in call or f"<NewExternalPort>{OWN.port + 1}<" in text


@pytest.mark.real_time
@pytest.mark.parametrize(
    ("home", "router", "why"),
    [
        (Home("http://127.0.0.2:{}/"), "127.0.0.1", "names another machine"),
        (Home("http://127.0.0.1:99999/"), "127.0.0.1", "does not answer"),
        (Home(), "127.0.0.2", "does not answer"),
        (Home(control="http://127.0.0.2/"), "127.0.0.1", "names another machine"),
        (Home(outside="8.8.8.8%\x1b[2J"), "127.0.0.1", "is not public"),
        (Home(outside="10.0.0.1"), "127.0.0.1", r"10\.0\.0\.1 is not public"),
        (Home(endless=b" " * 65_536), "127.0.0.1", "maps no ports"),
        (Home(endless=b" "), "127.0.0.1", "maps no ports"),
    ],
)
async def test_a_hostile_machine_of_the_network_gets_nothing(
    home: Home, router: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upnp_gateway, "WAITS_S", (0.1 if router == "127.0.0.2" else 1_000.0,))
    monkeypatch.setattr(upnp_gateway, "ANSWER_S", 0.1 if home.endless == b" " else 1_000.0)
    async with upnp(home, monkeypatch, router) as (gateway, _heard):
        with pytest.raises(MappingError, match=why):
            await gateway.map()


# ---------------------------------------------------------------- which routers


def test_the_next_hop_is_read_from_linux_own_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    v4, v6 = tmp_path / "route", tmp_path / "ipv6_route"
    v4.write_text(
        "Iface\tDestination\tGateway\tFlags\tRefCnt\tUse\tMetric\tMask\n"
        "wlan0\t00000000\t0101A8C0\t0003\t0\t0\t600\t00000000\n"
        "eth0\t00000000\t0100000A\t0003\t0\t0\t100\t00000000\n"
        "eth0\t0000000A\t00000000\t0001\t0\t0\t0\t00FFFFFF\n"
    )
    zeros = "0" * 32
    v6.write_text(
        f"20010db8000000000000000000000000 40 {zeros} 00 {zeros} 00000100 1 0 00000001 eth0\n"
        f"{zeros} 00 {zeros} 00 fe800000000000000000000000000001 00000400 1 0 00000003 eth0\n"
    )
    monkeypatch.setattr(gateway_search, "ROUTES", v4)
    monkeypatch.setattr(gateway_search, "ROUTES_6", v6)
    assert gateway_search.routers(socket.AF_INET) == ["10.0.0.1"]
    assert gateway_search.routers(socket.AF_INET6) == ["fe80::1%eth0"]
    monkeypatch.setattr(gateway_search, "ROUTES", tmp_path / "none")
    assert gateway_search.routers(socket.AF_INET) == []


def test_nobody_is_asked_for_a_loopback_or_public_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway_search, "routers", lambda _family: ["192.168.7.1"])
    for host in ("127.0.0.1", "::1", "203.0.113.9"):
        assert gateway_search.find_gateways([Address(host, 1)]) == []
    (asked,) = gateway_search.find_gateways([Address("192.168.7.7", 1)])
    assert type(asked[-1]).__name__ == "UpnpGateway", "after those that the default route names"


# ---------------------------------------------------------------- the mapper, in virtual time


class Router(Gateway):
    """Maps ports while ``fault`` is empty."""

    def __init__(
        self, address: Address = GIVEN, fault: str = "", lifetime_s: float = 100.0
    ) -> None:
        self.address, self.fault, self.lifetime_s = address, fault, lifetime_s
        self.asked_s: list[float] = []
        self.given_back = 0

    async def map(self) -> PortMapping:
        self.asked_s.append(trio.current_time())
        await trio.sleep(0)
        if self.fault:
            raise MappingError(self.fault)
        return PortMapping(self.address, self.lifetime_s, "PCP")

    async def unmap(self) -> None:
        self.given_back += 1


@asynccontextmanager
async def a_mapper(
    *families: Sequence[Gateway], needed: bool = True
) -> AsyncIterator[tuple[PortMapper, list[tuple[Address, ...]]]]:
    """Run a mapper; yield it and what it told of its addresses."""
    told: list[tuple[Address, ...]] = []
    mapper = PortMapper(lambda: families, lambda: told.append(mapper.addresses))
    async with background() as nursery:
        nursery.start_soon(mapper.run)
        if needed:
            mapper.need()
            while not mapper.said:
                await trio.sleep(0.01)
        yield mapper, told


async def test_no_router_is_asked_unless_it_is_needed() -> None:
    router = Router()
    async with a_mapper([router], needed=False) as (mapper, told):
        await trio.sleep(3 * AGAIN_S)
        assert (router.asked_s, mapper.said, told) == ([], "", [])
    assert router.given_back == 0


async def test_a_mapping_is_told_once_renewed_at_half_its_life_and_given_back() -> None:
    router = Router()
    async with a_mapper([router]) as (mapper, told):
        began_s = router.asked_s[0]
        assert mapper.said == "203.0.113.9:40001 by PCP"
        await trio.sleep(170)
        assert [round(at_s - began_s) for at_s in router.asked_s] == [0, 50, 100, 150]
        assert told == [(GIVEN,)]
        assert router.given_back == 0
    assert router.given_back == 1


async def test_the_next_router_is_asked_and_then_asked_first() -> None:
    first, second = Router(fault="it is switched off"), Router()
    async with a_mapper([first, second]) as (mapper, told):
        await trio.sleep(120)
        assert (len(first.asked_s), len(second.asked_s)) == (1, 3)
        assert (mapper.why_not, told) == ("", [(GIVEN,)])


async def test_each_family_has_its_own() -> None:
    six = Address("2001:db8::7", 29_701)
    async with a_mapper([Router()], [Router(six)]) as (mapper, _told):
        assert mapper.addresses == (GIVEN, six)
    async with a_mapper([Router(fault="no")], [Router(six)]) as (mapper, _told):
        assert (mapper.addresses, mapper.why_not) == ((six,), "")


async def test_without_a_mapping_it_says_why_and_asks_again_later_or_when_it_is_needed() -> None:
    router = Router(fault="it is told to allow nobody that")
    async with a_mapper([router]) as (mapper, told):
        assert mapper.said == "none: it is told to allow nobody that"
        await trio.sleep(AGAIN_S - 1)
        assert (len(router.asked_s), told) == (1, [])
        await trio.sleep(2)
        assert len(router.asked_s) == 2
        for _ in range(100):
            mapper.need()
            await trio.sleep(1)
        assert 3 <= len(router.asked_s) <= 2 + 100 / ASKED_AGAIN_S + 1
        router.fault = ""
        mapper.need()
        await trio.sleep(ASKED_AGAIN_S)
        assert told == [(GIVEN,)]


async def test_a_mapping_that_is_lost_is_told_and_asked_for_soon() -> None:
    router = Router()
    async with a_mapper([router]) as (mapper, told):
        router.fault = "it was restarted"
        await trio.sleep(60)
        assert (told[-1], mapper.said) == ((), "none: it was restarted")
        router.fault = ""
        mapper.need()
        await trio.sleep(ASKED_AGAIN_S + 1)
        assert told[-1] == (GIVEN,)


async def test_a_machine_without_a_router_says_so() -> None:
    async with a_mapper() as (mapper, _told):
        assert mapper.said == "none: there is no router to ask"


async def test_a_router_that_hangs_does_not_keep_a_leaving_peer() -> None:
    class Hanging(Router):
        async def unmap(self) -> None:
            await trio.sleep_forever()

    began_s = trio.current_time()
    async with a_mapper([Hanging()]):
        pass
    assert trio.current_time() - began_s <= GIVE_BACK_S + 1


async def test_a_lifetime_of_nothing_does_not_flood_the_router() -> None:
    router = Router(lifetime_s=0.0)
    async with a_mapper([router]):
        await trio.sleep(100)
        assert len(router.asked_s) <= 100 / port_mapper.RENEWED_MIN_S + 1
