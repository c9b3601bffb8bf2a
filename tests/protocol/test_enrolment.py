"""Enrolment: a good invite gives a certificate; the token is shown to the run's master only."""

from __future__ import annotations

import base64
import datetime
import random
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio
from attrs import evolve
from cryptography import x509
from cryptography.hazmat.primitives import serialization

from holdfast.protocol import enrolment
from holdfast.protocol import messages as m
from holdfast.protocol.addresses import Address
from holdfast.protocol.connection_phases import NEWCOMER
from holdfast.protocol.enrolment import (
    Refusal,
    answer_newcomer,
    ask_for_certificate,
    enrol,
)
from holdfast.protocol.errors import EvictedError, RemoteProtocolError, UserError
from holdfast.protocol.network import sockets
from holdfast.protocol.network.interface import Channel
from holdfast.protocol.network.sockets import SocketNetwork
from holdfast.protocol.network.stream import MessageStream
from holdfast.protocol.trust.authority import Authority, Party, holder_of, load_certificate
from holdfast.protocol.trust.credentials import Credentials
from holdfast.protocol.trust.identity import Identity
from holdfast.protocol.trust.invite import Invite
from holdfast.simulation.memory_network import MemoryWorld
from tests.background import SOON_S, background
from tests.trust import admitted, anybody

TOKEN = "the-token-of-the-invite"
NO_LIMIT_S = 10_000.0


class Desk:
    """The master's side: its authority, its credentials, and the admitted newcomers."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.authority = Authority.load_or_create(directory / "authority", "demo")
        self.tokens_seen: list[str] = []
        self.admissions: list[tuple[str, str]] = []  # peer id and name
        self.disk_is_full = False

    def network(
        self, party: Party = Party.MASTER, now: datetime.datetime | None = None
    ) -> SocketNetwork:
        credentials = admitted(self.authority, self.directory, party, now=now)
        return SocketNetwork(credentials, newcomers=True, greeting_s=NO_LIMIT_S)

    async def admit(self, request: m.EnrolRequest, peer: str) -> None:
        self.tokens_seen.append(request.token)
        if request.token != TOKEN:
            raise Refusal(m.RefusalCode.TOKEN, "this invite was withdrawn")
        if self.disk_is_full:
            raise OSError("the disk is full")
        self.admissions.append((peer, request.name))

    async def check(self, messages: MessageStream, request: m.CheckRequest) -> None:
        raise AssertionError("no newcomer asks for a check here")

    def known(self, peer: str) -> bool:
        return any(known == peer for known, _name in self.admissions)

    async def on_channel(self, channel: Channel) -> None:
        assert channel.party is Party.NEWCOMER
        await answer_newcomer(
            channel, self.authority, self.admit, check=self.check, known=self.known
        )

    def invite(self, *addresses: Address, token: str = TOKEN) -> Invite:
        return Invite(
            self.authority.run_id,
            addresses,
            self.authority.fingerprint,
            token,
            m.Role.SPARE,
            2_000_000_000,
        )


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Desk:
    """Make a master that closes no connection because a busy machine makes it slow."""
    monkeypatch.setattr(sockets, "FIRST_BYTE_S", NO_LIMIT_S)
    return Desk(tmp_path / "desk")


@asynccontextmanager
async def serving(desk: Desk, network: SocketNetwork | None = None) -> AsyncIterator[Address]:
    network = network or desk.network()
    async with background() as nursery:
        bind = [Address("127.0.0.1", 0)]
        (address,) = await nursery.start(network.serve, bind, desk.on_channel, None)
        yield address


# ---------------------------------------------------------------- over real TLS


@pytest.mark.real_time
async def test_a_newcomer_gets_a_certificate_that_opens_every_door(
    desk: Desk, tmp_path: Path
) -> None:
    met: list[str] = []

    async def on_channel(channel: Channel) -> None:
        if channel.party is Party.NEWCOMER:
            await desk.on_channel(channel)
        else:
            met.append(channel.peer)

    identity = Identity.generate()
    async with background() as nursery:
        master = desk.network()
        (address,) = await nursery.start(master.serve, [Address("127.0.0.1", 0)], on_channel, None)
        invite = Invite.decode(desk.invite(address).encode(), now_s=0)
        certificate_pem, authority_pem = await enrol(invite, identity, "my laptop")
        assert authority_pem == desk.authority.certificate_pem
        credentials = Credentials(tmp_path / "me", identity, certificate_pem, authority_pem)
        channel = await SocketNetwork(credentials).dial(address, party=Party.MASTER)
        assert await channel.stream.receive_some() == b""
        await channel.stream.aclose()
    assert met == [identity.peer_id]
    assert desk.tokens_seen == [TOKEN]
    assert desk.admissions == [(identity.peer_id, "my laptop")]


@pytest.mark.real_time
async def test_who_was_admitted_gets_another_certificate_and_uses_nothing_up(desk: Desk) -> None:
    known = Identity.generate()
    async with serving(desk) as address:
        await enrol(desk.invite(address), known, "x")
        spent = desk.invite(address, token="used up")
        certificate_pem, _ = await enrol(spent, known, "x")
        assert holder_of(load_certificate(certificate_pem)).peer == known.peer_id
        with pytest.raises(EvictedError, match="this invite was withdrawn") as raised:
            await enrol(spent, Identity.generate(), "x")
        assert raised.value.code == m.RefusalCode.TOKEN.value
    assert desk.tokens_seen == [TOKEN, "used up"]
    assert len(desk.admissions) == 1


@pytest.mark.real_time
async def test_another_runs_master_never_sees_the_token(desk: Desk, tmp_path: Path) -> None:
    other = Desk(tmp_path / "other")  # its run has the same name
    async with serving(other) as address:
        with pytest.raises(RemoteProtocolError, match="not the master of the invite's run"):
            await enrol(desk.invite(address), Identity.generate(), "x")
    assert other.tokens_seen == []


@pytest.mark.fault(
    "somebody poses as the master", "authority, certificate, party", "never sees the token"
)
@pytest.mark.real_time
async def test_a_member_that_poses_as_the_master_never_sees_the_token(desk: Desk) -> None:
    async with serving(desk, desk.network(Party.PEER)) as address:
        with pytest.raises(RemoteProtocolError, match="is a peer of the run, not its master"):
            await enrol(desk.invite(address), Identity.generate(), "x")
    assert desk.tokens_seen == []


@pytest.mark.real_time
async def test_an_impostor_with_a_copied_authority_never_sees_the_token(
    desk: Desk, tmp_path: Path
) -> None:
    """The authority's certificate is public; only its signature on the TLS key counts."""
    other = Desk(tmp_path / "other")
    impostor = other.network()
    other.authority = desk.authority  # what it sends in EnrolAuthority
    async with serving(other, impostor) as address:
        with pytest.raises(RemoteProtocolError, match="did not sign"):
            await enrol(desk.invite(address), Identity.generate(), "x")
    assert other.tokens_seen == []


@pytest.mark.real_time
async def test_a_wrong_clock_is_reported(desk: Desk) -> None:
    now = datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=5)
    async with serving(desk, desk.network(now=now)) as address:
        with pytest.raises(UserError, match="by this machine's clock") as raised:
            await enrol(desk.invite(address), Identity.generate(), "x")
        assert "clock" in raised.value.hint
    assert desk.tokens_seen == []


@pytest.mark.real_time
async def test_the_next_address_is_tried(desk: Desk, tmp_path: Path) -> None:
    identity = Identity.generate()
    with trio.socket.socket() as closed:
        await closed.bind(("127.0.0.1", 0))
        nobody = Address("127.0.0.1", closed.getsockname()[1])
        other = Desk(tmp_path / "other")
        async with serving(other) as other_master, serving(desk) as address:
            pem, _ = await enrol(desk.invite(nobody, other_master, address), identity, "x")
            assert holder_of(load_certificate(pem)).peer == identity.peer_id
            with pytest.raises(RemoteProtocolError):
                await enrol(desk.invite(nobody, other_master), identity, "x")
            with pytest.raises(OSError, match="connect"):
                await enrol(desk.invite(nobody), identity, "x")


@pytest.mark.real_time
async def test_a_newcomer_can_do_nothing_but_enrol(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(enrolment, "ENROL_S", NO_LIMIT_S)
    context = anybody()
    async with serving(desk) as address:
        for attempt in (m.Heartbeat(1), m.EnrolRequest(TOKEN, b"", "x"), None):
            tcp = await trio.open_tcp_stream(address.host, address.port)
            tls = trio.SSLStream(tcp, context)
            messages = MessageStream(tls)
            if attempt is None:
                await tls.send_all((NEWCOMER.frame_bytes_max + 1).to_bytes(4, "big"))
            else:
                await messages.send(attempt)
            with (
                trio.fail_after(SOON_S),
                pytest.raises((trio.EndOfChannel, trio.BrokenResourceError)),
            ):
                await messages.receive()
            await trio.aclose_forcefully(tls)
    assert desk.tokens_seen == []


# ---------------------------------------------------------------- the conversation alone


HELLO = m.EnrolHello(m.VERSION_MIN, m.VERSION_MAX)


async def converse(desk: Desk, *said: m.Message) -> list[m.Message]:
    """Say this as the newcomer on the virtual network, and return the master's answer."""
    world = MemoryWorld(random.Random(0))
    master = world.host("master", "a" * 32, Party.MASTER)
    newcomer = world.host("newcomer", "", Party.NEWCOMER)
    heard: list[m.Message] = []
    async with background() as nursery:
        await nursery.start(master.serve, [Address("master", 1)], desk.on_channel, None)
        channel = await newcomer.dial(Address("master", 1), party=Party.MASTER)
        messages = MessageStream(channel.stream)
        for each in said:
            await messages.send(each)
        try:
            while True:
                heard.append(await messages.receive())
        except (trio.EndOfChannel, trio.BrokenResourceError):
            pass
    return heard


async def test_a_master_tells_a_newcomer_of_another_version(desk: Desk) -> None:
    (refused,) = await converse(desk, m.EnrolHello(m.VERSION_MAX + 1, m.VERSION_MAX + 2))
    assert isinstance(refused, m.Refused)
    assert refused.code is m.RefusalCode.VERSION
    assert f"you speak {m.VERSION_MAX + 1}" in refused.reason


def request_of_another_version() -> bytes:
    """Make a request whose version, at its beginning in DER, is not 0."""
    request = x509.load_pem_x509_csr(Identity.generate().request_pem("x"))
    der = request.public_bytes(serialization.Encoding.DER)
    odd = base64.encodebytes(der.replace(b"\x02\x01\x00", b"\x02\x01\x05", 1))
    name = b"CERTIFICATE REQUEST-----\n"
    return b"-----BEGIN " + name + odd + b"-----END " + name


@pytest.mark.parametrize("request_pem", [b"junk", request_of_another_version()])
async def test_a_bad_request_does_not_use_up_the_token(desk: Desk, request_pem: bytes) -> None:
    (served,) = await converse(desk, HELLO, m.EnrolRequest(TOKEN, request_pem, "x"))
    assert isinstance(served, m.EnrolAuthority)
    assert desk.tokens_seen == []


async def test_who_falls_silent_is_not_waited_for(desk: Desk) -> None:
    (served,) = await converse(desk, HELLO)
    assert isinstance(served, m.EnrolAuthority)
    assert 10 < trio.current_time() < 60


async def test_the_certificate_is_written_down_before_it_is_sent(desk: Desk) -> None:
    requests = [m.EnrolRequest(TOKEN, Identity.generate().request_pem("x"), "x") for _ in range(2)]
    _, enrolled = await converse(desk, HELLO, requests[0])
    assert isinstance(enrolled, m.Enrolled)
    desk.disk_is_full = True
    heard = await converse(desk, HELLO, requests[1])
    assert [type(message) for message in heard] == [m.EnrolAuthority]


async def ask(desk: Desk, answers: list[m.Message], leaf_der: bytes | None = None) -> None:
    """Play the master on the virtual network, to a newcomer that believes its TLS."""
    world = MemoryWorld(random.Random(0))
    master = world.host("master", "a" * 32, Party.MASTER)
    newcomer = world.host("newcomer", "", Party.NEWCOMER)
    if leaf_der is None:
        pem = desk.authority.issue(Identity.generate().request_pem(""), "", Party.MASTER)
        leaf_der = ssl.PEM_cert_to_DER_cert(pem.decode())

    async def on_channel(channel: Channel) -> None:
        messages = MessageStream(channel.stream)
        for answer in answers:
            await messages.receive()
            await messages.send(answer)
        await messages.receive()

    failures: list[Exception] = []
    async with background() as nursery:
        await nursery.start(master.serve, [Address("master", 1)], on_channel, None)
        channel = await newcomer.dial(Address("master", 1), party=Party.MASTER)
        try:
            await ask_for_certificate(
                evolve(channel, certificate_der=leaf_der),
                desk.invite(Address("master", 1)),
                Identity.generate(),
                "x",
            )
        except (RemoteProtocolError, EvictedError) as error:
            failures.append(error)
    raise failures[0]


async def test_a_newcomer_checks_what_it_gets(desk: Desk, tmp_path: Path) -> None:
    foreign = Authority.load_or_create(tmp_path / "foreign", "demo")
    served = m.EnrolAuthority("demo", desk.authority.certificate_pem)
    theirs, pem = (
        each.issue(Identity.generate().request_pem(""), "", Party.PEER)
        for each in (desk.authority, foreign)
    )
    cases: list[tuple[list[m.Message], str]] = [
        ([served, m.Enrolled(theirs)], "certificate of another peer"),
        ([served, m.Enrolled(pem)], "did not sign"),
        ([served, m.Enrolled(b"junk")], "not a certificate"),
        ([m.Heartbeat(1)], "Heartbeat instead of"),
        ([m.EnrolAuthority("another", desk.authority.certificate_pem)], "not the master"),
    ]
    for answers, said in cases:
        with pytest.raises(RemoteProtocolError, match=said):
            await ask(desk, answers)
    with pytest.raises(RemoteProtocolError, match="showed no certificate"):
        await ask(desk, [served], b"")
    with pytest.raises(EvictedError, match="go away"):
        await ask(desk, [m.Refused(m.RefusalCode.FULL, "go away")])
