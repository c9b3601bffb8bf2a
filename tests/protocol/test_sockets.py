"""The real network: admission, and resistance to unidentified connections, floods and shortages."""

from __future__ import annotations

import contextlib
import datetime
import gc
import os
import resource
import socket
import ssl
import struct
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import pytest
import trio
import trio.testing
from cryptography.hazmat.primitives import serialization

from holdfast.protocol.addresses import Address
from holdfast.protocol.errors import RemoteProtocolError, UserError
from holdfast.protocol.messages import Heartbeat
from holdfast.protocol.network import accept_limits, socket_options, sockets
from holdfast.protocol.network.interface import Channel, LaneFacts
from holdfast.protocol.network.lane import receive_preamble, send_preamble
from holdfast.protocol.network.sockets import SocketNetwork
from holdfast.protocol.network.stream import MessageStream
from holdfast.protocol.trust.authority import Authority, Party, load_certificate
from holdfast.protocol.trust.credentials import Credentials
from tests.background import SOON_S, background
from tests.lossy import drops_everything
from tests.protocol.test_network_contract import echo
from tests.trust import admitted, anybody

pytestmark = pytest.mark.real_time

ANY_PORT = [Address("127.0.0.1", 0)]
NO_LIMIT_S = 10_000.0
REFUSED = trio.BrokenResourceError if sys.version_info >= (3, 11, 3) else trio.EndOfChannel


class Run:
    """One run's authority, and nodes of it."""

    def __init__(self, directory: Path, name: str = "ours") -> None:
        self.directory = directory / name
        self.authority = Authority.load_or_create(self.directory / "authority", "demo")

    def credentials(
        self, party: Party = Party.PEER, now: datetime.datetime | None = None
    ) -> Credentials:
        return admitted(self.authority, self.directory, party, now=now)

    def network(self, party: Party = Party.PEER) -> SocketNetwork:
        """Make a node that closes no connection because a busy machine makes it slow."""
        return SocketNetwork(
            self.credentials(party), newcomers=party is Party.MASTER, greeting_s=NO_LIMIT_S
        )


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setattr(sockets, "FIRST_BYTE_S", NO_LIMIT_S)
    return Run(tmp_path)


async def say(channel: Channel) -> None:
    """Send bytes, and raise an error unless the other end answers."""
    messages = MessageStream(channel.stream)
    await messages.send(Heartbeat(7))
    assert await messages.receive() == Heartbeat(7)


@contextlib.asynccontextmanager
async def serving(
    network: SocketNetwork,
    on_channel: Callable[[Channel], Awaitable[None]] = echo,
    on_lane: Callable[[trio.abc.Stream], Awaitable[None]] | None = None,
) -> AsyncIterator[Address]:
    async with background() as nursery:
        (address,) = await nursery.start(network.serve, ANY_PORT, on_channel, on_lane)
        yield address


@contextlib.asynccontextmanager
async def dialled(run: Run, address: Address, party: Party = Party.PEER) -> AsyncIterator[Channel]:
    """Dial as a member, and hear an answer."""
    channel = await run.network().dial(address, party=party)
    await say(channel)
    yield channel
    await trio.aclose_forcefully(channel.stream)


async def close_all(*streams: trio.abc.Stream) -> None:
    for stream in streams:
        await trio.aclose_forcefully(stream)


async def expect_hang_up(stream: trio.abc.Stream) -> None:
    with trio.fail_after(SOON_S), contextlib.suppress(trio.BrokenResourceError):
        while await stream.receive_some():
            pass


# ---------------------------------------------------------------- who is believed


async def test_a_server_of_another_run_is_refused_by_the_dialer(tmp_path: Path) -> None:
    ours, theirs = Run(tmp_path), Run(tmp_path, "theirs")
    async with serving(theirs.network()) as address:
        with pytest.raises(RemoteProtocolError, match="no valid certificate of this run"):
            await ours.network().dial(address, party=Party.PEER)


async def test_a_dialer_of_another_run_is_refused_by_the_server(tmp_path: Path) -> None:
    """Also where clients without a certificate are accepted as newcomers."""
    ours, theirs = Run(tmp_path), Run(tmp_path, "theirs")
    for party in (Party.PEER, Party.MASTER):
        async with serving(ours.network(party)) as address:
            context = theirs.credentials().ssl_client_context()
            context.verify_mode = ssl.CERT_NONE
            tls = trio.SSLStream(await sockets.open_tcp(address), context)
            with pytest.raises(REFUSED):
                await say(Channel(tls, Party.PEER, "", b"", ""))
            await trio.aclose_forcefully(tls)


async def test_a_certificate_must_name_this_run(run: Run) -> None:
    """Even if one authority was used for two runs."""
    there = run.credentials()
    run.authority.run_id = "another"
    async with serving(SocketNetwork(there)) as address:
        with pytest.raises(RemoteProtocolError, match="another run"):
            await run.network().dial(address, party=Party.PEER)


async def test_only_a_master_accepts_a_client_without_a_certificate(run: Run) -> None:
    parties: list[Party] = []

    async def on_channel(channel: Channel) -> None:
        parties.append(channel.party)
        assert channel.peer == ""
        await echo(channel)

    context = anybody()
    for party in (Party.MASTER, Party.PEER):
        async with serving(run.network(party), on_channel) as address:
            tls = trio.SSLStream(await sockets.open_tcp(address), context)
            channel = Channel(tls, party, "", b"", "")
            if party is Party.MASTER:
                await say(channel)
            else:
                with pytest.raises(REFUSED):
                    await say(channel)
            await trio.aclose_forcefully(tls)
    assert parties == [Party.NEWCOMER]


async def test_certificates_end_and_do_not_begin_too_early(run: Run) -> None:
    now = datetime.datetime.now(datetime.UTC)
    for days in (-3, 3):
        there = run.credentials(now=now + datetime.timedelta(days=days))
        async with serving(SocketNetwork(there)) as address:
            with pytest.raises(RemoteProtocolError, match=r"expired|not yet valid"):
                await run.network().dial(address, party=Party.PEER)


async def test_a_clock_that_is_hours_wrong_locks_no_peer_out(run: Run) -> None:
    now = datetime.datetime.now(datetime.UTC)
    for hours in (-23, 23):
        there = run.credentials(now=now + datetime.timedelta(hours=hours))
        async with serving(SocketNetwork(there)) as address:
            async with dialled(run, address):
                pass


async def test_a_renewed_certificate_is_used_from_the_next_connection_on(run: Run) -> None:
    old = datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=3)
    there = run.credentials(now=old)
    network, dialer = SocketNetwork(there), run.network()
    async with serving(network) as address:
        with pytest.raises(RemoteProtocolError):
            await dialer.dial(address, party=Party.PEER)
        pem = run.authority.issue(there.identity.request_pem(""), "", Party.PEER)
        there.replace_certificate(pem)
        channel = await dialer.dial(address, party=Party.PEER, peer=there.peer_id)
        assert channel.certificate_der == load_certificate(pem).public_bytes(
            serialization.Encoding.DER
        )
        await say(channel)
        await channel.stream.aclose()


async def test_nothing_older_than_tls_1_3_is_spoken(run: Run) -> None:
    async with serving(run.network()) as address:
        context = run.credentials().ssl_client_context()
        context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_2
        tls = trio.SSLStream(await sockets.open_tcp(address), context)
        with pytest.raises(trio.BrokenResourceError):
            await tls.do_handshake()
        await trio.aclose_forcefully(tls)


async def test_who_speaks_no_tls_is_no_node_of_this_run(run: Run) -> None:
    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")

    async def speak_http(stream: trio.SocketStream) -> None:
        await stream.receive_some()
        await stream.send_all(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    address = Address("127.0.0.1", listener.socket.getsockname()[1])
    async with background() as nursery:
        nursery.start_soon(trio.serve_listeners, speak_http, [listener])
        with pytest.raises(RemoteProtocolError, match="TLS"):
            await run.network().dial(address, party=Party.PEER)


async def test_a_hang_up_is_one_for_python_3_11_2_too() -> None:
    class Ended:
        async def do_handshake(self) -> None:
            raise trio.BrokenResourceError from ssl.SSLZeroReturnError()

    with pytest.raises(OSError, match="hung up"):
        await sockets.handshake(Ended(), "x")  # type: ignore[arg-type]


# ---------------------------------------------------------------- unidentified connections


@pytest.mark.fault(
    "unidentified connections at the port",
    "no certificate, first byte, deadline",
    "hung up on; members notice nothing",
)
@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\x16",
        b"\x16\x03\x01\xff\xff" + b"\xff" * 2_000,
        b"H",
        b"\x00" * 100,
        b"SSH-2.0-OpenSSH_9.9\r\n",
        b"",
    ],
    ids=["http", "half a hello", "bad hello", "lane", "zeros", "ssh", "nothing"],
)
async def test_unidentified_connections_are_closed_and_members_do_not_notice(
    run: Run, monkeypatch: pytest.MonkeyPatch, data: bytes
) -> None:
    network = run.network()
    async with serving(network) as address:
        async with dialled(run, address) as member:
            monkeypatch.setattr(network, "_greeting_s", 0.6)
            unidentified = await sockets.open_tcp(address)
            if data:
                await unidentified.send_all(data)
            await expect_hang_up(unidentified)
            await say(member)
            await unidentified.aclose()


@pytest.mark.fault("unidentified connections at the port")
@pytest.mark.parametrize("said", [b"", b"\x16"], ids=["nothing", "a byte"])
async def test_filling_all_slots_keeps_no_member_out(
    run: Run, monkeypatch: pytest.MonkeyPatch, said: bytes
) -> None:
    """From four addresses, repeatedly; the member has not come before."""
    monkeypatch.setattr(accept_limits, "UNIDENTIFIED_MAX", 8)
    monkeypatch.setattr(accept_limits, "UNIDENTIFIED_PER_ADDRESS_MAX", 2)
    monkeypatch.setattr(accept_limits, "UNIDENTIFIED_SLOW_S", 0.0)
    network = run.network()
    async with serving(network) as address:
        holders = []
        for number in range(12):
            holders.append(await bound_at(address, f"127.0.0.{10 + number % 4}"))
            if said:
                await holders[-1].send_all(said)
        while sum(not place.silent for place in network._limits.unidentified._held) < 8 * len(said):
            await trio.sleep(0.01)
        assert len(network._limits.unidentified._held) == 8
        await say(channel := await dial_from(run, address, "127.0.0.2"))
        assert len(network._limits.unidentified._held) == 7, "one gave way"
        await close_all(*holders, channel.stream)


async def test_a_known_member_has_a_slot_when_all_others_are_full(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """400 addresses of one site, then 40 others; all have begun a handshake a moment ago."""
    monkeypatch.setattr(accept_limits, "UNIDENTIFIED_MAX", 16)
    monkeypatch.setattr(accept_limits, "UNIDENTIFIED_PER_ADDRESS_MAX", 4)
    monkeypatch.setattr(accept_limits, "UNIDENTIFIED_SLOW_S", NO_LIMIT_S)
    hosts: list[str] = []  # of connections to come; each accept takes the next
    monkeypatch.setattr(sockets, "_remote_address", lambda _stream: Address(hosts.pop(0), 1))
    held: list[trio.abc.Stream] = []
    network = run.network()
    async with serving(network) as address:

        async def crowd(addresses: list[str]) -> int:
            """Return the slots held once all of these addresses have begun a handshake."""
            for host in addresses:
                hosts.append(host)
                held.append(await sockets.open_tcp(address))
                with contextlib.suppress(trio.BrokenResourceError):
                    await held[-1].send_all(b"\x16")
                places = network._limits.unidentified._held
                while hosts or any(place.silent for place in places):
                    await trio.sleep(0.001)
            return len(network._limits.unidentified._held)

        async def member(host: str) -> None:
            hosts.append(host)
            await say(channel := await run.network().dial(address, party=Party.PEER))
            held.append(channel.stream)

        await member("2001:db8:7:1::1")
        assert await crowd([f"2001:db8:1:{number:x}::1" for number in range(400)]) == 8
        await member("2001:db8:8:1::1")  # who was never here
        assert await crowd([f"192.0.2.{number}" for number in range(40)]) == 16
        with pytest.raises(OSError, match="hung up"):
            await member("2001:db8:9:1::1")
        await member("2001:db8:7:1::2")
        await close_all(*held)


async def test_who_says_nothing_is_not_waited_for_long(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sockets, "FIRST_BYTE_S", 0.2)
    async with serving(run.network()) as address:
        silent = await sockets.open_tcp(address)
        await expect_hang_up(silent)
        await trio.aclose_forcefully(silent)


async def test_members_and_lanes_take_no_slot_of_unidentified_connections(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accept_limits, "UNIDENTIFIED_PER_ADDRESS_MAX", 2)
    monkeypatch.setattr(accept_limits, "LANES_UNPROVEN_PER_ADDRESS_MAX", 2)
    network = run.network()

    async def on_lane(stream: trio.abc.Stream) -> None:
        await receive_preamble(stream)
        network.prepare_lane(stream, "")
        await stream.send_all(b"hello")
        await trio.sleep_forever()

    async with serving(network, on_lane=on_lane) as address:
        dialer = run.network()
        streams: list[trio.abc.Stream] = []
        for _ in range(5):
            channel = await dialer.dial(address, party=Party.PEER)
            await say(channel)
            streams.append(channel.stream)
        for number in range(5):
            streams.append(await dialer.dial_lane(address))
            await send_preamble(streams[-1], bytes(16), number)
            assert await streams[-1].receive_some() == b"hello"
        await close_all(*streams)


@pytest.mark.fault("unidentified connections again and again")
async def test_lanes_that_show_no_keys_have_few_slots(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accept_limits, "LANES_UNPROVEN_PER_ADDRESS_MAX", 2)

    async def on_lane(stream: trio.abc.Stream) -> None:
        await receive_preamble(stream)
        await trio.sleep_forever()

    async with serving(run.network(), on_lane=on_lane) as address:
        lanes = [await run.network().dial_lane(address) for _ in range(3)]
        for number, stream in enumerate(lanes):
            await send_preamble(stream, bytes(16), number)
        await expect_hang_up(lanes[2])
        async with dialled(run, address):
            await close_all(*lanes)


async def bound_at(address: Address, host: str) -> trio.SocketStream:
    """Open a connection from another address of this machine."""
    sock = trio.socket.socket()
    await sock.bind((host, 0))
    await sock.connect((address.host, address.port))
    return trio.SocketStream(sock)


@pytest.mark.fault(
    "unidentified connections again and again",
    "what came of an address's connections",
    "it is hung up on unread, but for one a second; members notice nothing",
)
async def test_who_sends_junk_again_and_again_is_not_read_for_a_while(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accept_limits, "CREDIT_MAX", 3.0)
    monkeypatch.setattr(accept_limits, "CREDIT_PER_S", 0.0)
    async with serving(run.network()) as address:
        for _ in range(4):
            async with await bound_at(address, "127.0.0.9") as stream:
                with contextlib.suppress(trio.BrokenResourceError):
                    await stream.send_all(b"GET / HTTP/1.1\r\n\r\n")
                await expect_hang_up(stream)
        with pytest.raises(OSError, match="hung up"):
            await dial_from(run, address, "127.0.0.9")
        async with dialled(run, address):
            monkeypatch.setattr(accept_limits, "CREDIT_PER_S", 1e6)
            await say(again := await dial_from(run, address, "127.0.0.9"))
            await close_all(again.stream)


async def dial_from(run: Run, address: Address, host: str) -> Channel:
    """Dial as a member from another address of this machine."""
    stream = await bound_at(address, host)
    tls = trio.SSLStream(stream, run.credentials().ssl_client_context())
    try:
        await sockets.handshake(tls, address)
    except BaseException:
        await trio.aclose_forcefully(stream)
        raise
    return Channel(tls, Party.PEER, "", b"", "")


async def test_newcomers_have_slots_of_their_own(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accept_limits, "NEWCOMERS_PER_ADDRESS_MAX", 2)
    monkeypatch.setattr(accept_limits, "UNIDENTIFIED_PER_ADDRESS_MAX", 2)
    context = anybody()
    async with serving(run.network(Party.MASTER)) as address:
        newcomers = [trio.SSLStream(await sockets.open_tcp(address), context) for _ in range(2)]
        for newcomer in newcomers:
            await say(Channel(newcomer, Party.NEWCOMER, "", b"", ""))
        surplus = trio.SSLStream(await sockets.open_tcp(address), context)
        with trio.fail_after(SOON_S):
            await surplus.do_handshake()
        await expect_hang_up(surplus)
        async with dialled(run, address, Party.MASTER):
            await close_all(*newcomers, surplus)


@contextlib.contextmanager
def no_file_descriptors_left() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 256), hard))
    hoard: list[int] = []
    try:
        with contextlib.suppress(OSError):
            while True:
                hoard.append(os.dup(0))
        yield
    finally:
        for descriptor in hoard:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_running_out_of_file_descriptors_is_survived(run: Run) -> None:
    async with serving(run.network()) as address:
        early = trio.socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        with no_file_descriptors_left():
            await early.connect((address.host, address.port))  # the kernel takes it, we cannot
            await trio.sleep(2 * sockets.CAPACITY_PAUSE_S)
        async with dialled(run, address):
            early.close()


async def test_closing_does_not_wait_for_a_peer_that_does_not_read(run: Run) -> None:
    async def flood(channel: Channel) -> None:
        with trio.move_on_after(0.3):
            while True:
                await channel.stream.send_all(bytes(2**20))

    async with serving(run.network(), flood) as address:
        channel = await run.network().dial(address, party=Party.PEER)
        await trio.sleep(0.5)
        with trio.fail_after(SOON_S):
            await MessageStream(channel.stream).aclose()


def caps_retransmission() -> bool:
    """Return whether this kernel can limit its retransmission timeout."""
    with contextlib.suppress(OSError), socket.socket() as probe:
        return probe.getsockopt(socket.IPPROTO_TCP, socket_options.TCP_RTO_MAX_MS) > 0
    return False


@pytest.mark.skipif(not caps_retransmission(), reason="a kernel before Linux 6.15")
async def test_both_ends_try_again_soon_after_a_gap(run: Run) -> None:
    accepted: list[Channel] = []

    async def keep(channel: Channel) -> None:
        accepted.append(channel)
        await echo(channel)

    async with serving(run.network(), keep) as address:
        dialled = await run.network().dial(address, party=Party.PEER)
        await say(dialled)
        for end in (dialled, *accepted):
            assert isinstance(end.stream, trio.SSLStream)
            option = (socket.IPPROTO_TCP, socket_options.TCP_RTO_MAX_MS)
            most_ms = end.stream.transport_stream.socket.getsockopt(*option)
            assert most_ms == socket_options.RETRANSMIT_MS_MAX
    await trio.aclose_forcefully(dialled.stream)


# ---------------------------------------------------------------- addresses


def has_ipv6() -> bool:
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET6) as probe:
        probe.bind(("::1", 0))
        return True
    return False


@pytest.mark.skipif(not has_ipv6(), reason="no IPv6 here")
async def test_ipv6_ipv4_and_names_all_lead_there_on_one_port(run: Run) -> None:
    bind = [Address("::1", 0), Address("127.0.0.1", 0)]
    async with background() as nursery:
        addresses = await nursery.start(run.network().serve, bind, echo, None)
        assert len({address.port for address in addresses}) == 1
        assert {address.host for address in addresses} == {"::1", "127.0.0.1"}
        port = addresses[0].port
        for host in ("::1", "127.0.0.1", "localhost"):
            async with dialled(run, Address(host, port)) as channel:
                assert channel.remote_address


@pytest.mark.parametrize("host", ["no-such-host.invalid", "x" * 70 + ".example", "192.0.2.1"])
async def test_addresses_that_cannot_be_bound_are_the_users_to_mend(run: Run, host: str) -> None:
    with pytest.raises(UserError, match="cannot listen on") as raised:
        await run.network().serve([Address(host, 0)], echo, None)
    assert raised.value.exit_code == 4


@pytest.mark.parametrize("host", ["no-such-host.invalid", "x" * 70 + ".example"])
async def test_names_that_lead_nowhere_are_an_os_error(run: Run, host: str) -> None:
    with pytest.raises(OSError, match=r"."):
        await run.network().dial(Address(host, 1), party=Party.PEER)


async def test_control_streams_do_not_wait_for_more_bytes(run: Run) -> None:
    async with serving(run.network()) as address:
        stream = await sockets.open_tcp(address)
        assert stream.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        await stream.aclose()


async def test_work_off_the_loop_runs_in_a_thread(run: Run) -> None:
    assert await run.network().run_sync(threading.get_ident) != threading.get_ident()


# ---------------------------------------------------------------- lanes' options


async def test_a_lane_uses_the_congestion_control_that_it_should_where_there_is_it(
    run: Run,
) -> None:
    network = run.network()
    available = Path("/proc/sys/net/ipv4/tcp_allowed_congestion_control").read_text().split()
    async with serving(network) as address:
        async with await sockets.open_tcp(address) as stream:
            usual = socket_options.congestion_of(stream.socket)
            assert usual
            for name in {*available} - {socket_options.PACED}:
                assert network.prepare_lane(stream, name).congestion == name
            before = socket_options.congestion_of(stream.socket)
            for nonsense in ("", "no-such-thing", "x" * 100):
                assert network.prepare_lane(stream, nonsense).congestion == before
            assert 0 < network.prepare_lane(stream, "").round_trip_s < 1


@pytest.mark.parametrize(("round_trip_s", "paced"), [(0.0004, False), (0.0006, True)])
async def test_bbr_is_used_over_long_paths_only(
    run: Run, monkeypatch: pytest.MonkeyPatch, round_trip_s: float, paced: bool
) -> None:
    allowed = Path("/proc/sys/net/ipv4/tcp_allowed_congestion_control").read_text().split()
    if socket_options.PACED not in allowed:
        pytest.skip("this kernel has no BBR for this process")
    monkeypatch.setattr(socket_options, "shortest_round_trip_s", lambda _sock: round_trip_s)
    network = run.network()
    async with serving(network) as address:
        async with await sockets.open_tcp(address) as stream:
            chosen = network.prepare_lane(stream, socket_options.PACED).congestion
            assert (chosen == socket_options.PACED) is paced
            assert paced or chosen in socket_options.UNPACED


async def test_without_the_kernels_word_nothing_is_claimed(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(socket, "TCP_INFO")
    monkeypatch.delattr(socket, "TCP_CONGESTION")
    async with serving(run.network()) as address:
        async with await sockets.open_tcp(address) as stream:
            assert run.network().prepare_lane(stream, "bbr") == LaneFacts()


async def test_bytes_that_were_lost_on_the_way_are_counted_as_retransmitted() -> None:
    assert socket_options.counts_retransmissions()
    listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
    async with (
        listeners[0],
        await trio.testing.open_stream_to_socket_listener(listeners[0]) as here,
    ):
        async with await listeners[0].accept() as there:
            await here.send_all(bytes(10_000))
            received_bytes = len(await there.receive_some())
            assert socket_options.retransmitted_bytes(here.socket) == 0
            sent = struct.unpack_from("@Q", tcp_info(here), socket_options.RETRANSMITTED_OFFSET - 8)
            assert sent == (10_000,), "the number before it is the number of sent bytes"
            with drops_everything(there.socket), trio.fail_after(SOON_S):
                await here.send_all(bytes(777))
                while (lost_bytes := socket_options.retransmitted_bytes(here.socket)) == 0:
                    await trio.sleep(0.01)
            assert lost_bytes % 777 == 0
            while received_bytes < 10_777:
                received_bytes += len(await there.receive_some())
            assert socket_options.retransmitted_bytes(there.socket) == 0
    assert socket_options.retransmitted_bytes(here.socket) == 0, "it is closed"


def tcp_info(stream: trio.SocketStream) -> bytes:
    return stream.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 512)


def test_where_the_kernel_does_not_count_retransmissions_none_are_claimed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    socket_options.counts_retransmissions.cache_clear()
    monkeypatch.setattr(
        socket_options, "RETRANSMITTED_OFFSET", 4_096
    )  # as if the report ended before
    try:
        assert not socket_options.counts_retransmissions()
        with socket.socket() as sock:
            assert socket_options.retransmitted_bytes(sock) == 0
    finally:
        socket_options.counts_retransmissions.cache_clear()


def test_a_congestion_control_is_tried_without_a_connection() -> None:
    usual = socket_options.obtainable_congestion("no-such-thing")
    assert usual == socket_options.obtainable_congestion("")
    assert socket_options.obtainable_congestion(usual) == usual
    assert socket_options.obtainable_congestion("reno") == "reno", "which every kernel has"


async def test_ended_connections_do_not_pile_up(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is a reference cycle and much more memory than the collector sees."""
    monkeypatch.setattr(sockets, "TLS_UNCOLLECTED_MAX", 5)
    dialer = run.network()
    gc.collect()
    gc.disable()
    try:
        async with serving(run.network()) as address:
            for _ in range(30):
                channel = await dialer.dial(address, party=Party.PEER)
                await trio.aclose_forcefully(channel.stream)
            left = sum(type(each) is ssl.SSLObject for each in gc.get_objects())
    finally:
        gc.enable()
    assert left <= 4 * sockets.TLS_UNCOLLECTED_MAX  # both ends, of which some may yet be open
