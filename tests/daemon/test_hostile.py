"""Unidentified connections and broken members at the ports of a live run: real sockets, real
TLS.
"""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
import trio
from attrs import evolve

from holdfast.daemon.master.journal.journal_base import GrantRow
from holdfast.daemon.master.journal.journal_store import JournalStore
from holdfast.daemon.peer.peer_config import PeerConfig
from holdfast.daemon.peer.peer_service import PeerService
from holdfast.protocol import messages as m
from holdfast.protocol.addresses import Address
from holdfast.protocol.network.lane import MAGIC
from holdfast.protocol.network.sockets import SocketNetwork
from holdfast.protocol.network.stream import MessageStream
from holdfast.protocol.trust.authority import Authority, Party
from holdfast.protocol.trust.credentials import Credentials
from holdfast.protocol.trust.identity import Identity
from holdfast.simulation.drifting_trainer import SimTrainer, small_layout
from holdfast.simulation.swarm import RUN_ID
from holdfast.simulation.witness import Witness
from tests.background import background
from tests.daemon.loopback import LOOPBACK, a_service
from tests.trust import admitted, anybody

pytestmark = pytest.mark.real_time

HANGS_S = 120.0  # for what hangs

SPEC = """
[run]
name = "hostile"
[diloco]
sync_every = 4
[membership]
min_members = 2
deadline_s = 5
grace_s = 5
"""


class Run:
    """A master and two peers on loopback, in this process."""

    def __init__(self, folder: Path, nursery: trio.Nursery) -> None:
        self.folder = folder
        self.nursery = nursery
        self.authority = Authority.load_or_create(folder / "authority", RUN_ID)
        self.witness = Witness()
        self.store = JournalStore(folder / "journal.sqlite")
        credentials = admitted(self.authority, folder, Party.MASTER)
        network = SocketNetwork(credentials, newcomers=True)
        self.master = a_service(SPEC, self.store, network, [LOOPBACK], authority=self.authority)
        self.peers: list[PeerService] = []

    def admitted(self, name: str) -> Credentials:
        credentials = admitted(self.authority, self.folder)
        self.store.admit(credentials.peer_id, GrantRow(m.Role.CONTRIBUTOR, True, name))
        return credentials

    def start_peer(self, name: str) -> None:
        credentials = self.admitted(name)
        config = PeerConfig(credentials.peer_id, name, RUN_ID, [self.port], [LOOPBACK])
        trainer = SimTrainer(
            credentials.peer_id, small_layout(), self.witness, step_s=0.005, delta=None
        )
        peer = PeerService(config, SocketNetwork(credentials), trainer)
        self.peers.append(peer)
        self.nursery.start_soon(peer.run)

    @property
    def port(self) -> Address:
        return self.master.bound[0]

    async def goes_on(self, rounds: int = 5) -> None:
        history = self.master.coordinator.context.history
        target = history.commit_count + rounds
        with trio.fail_after(HANGS_S):
            while history.commit_count < target:
                await trio.sleep(0.01)

    def hello(self, version: int = m.VERSION_MAX) -> m.Hello:
        return m.Hello(version, version, RUN_ID, "x", (), 1, None, (), b"", ())


@asynccontextmanager
async def a_run(folder: Path) -> AsyncIterator[Run]:
    async with background() as nursery:
        run = Run(folder, nursery)
        await nursery.start(run.master.run)
        run.start_peer("a")
        run.start_peer("b")
        await run.goes_on(1)
        members = [peer.replica.view for peer in run.peers]
        yield run
        await run.goes_on()
        assert [peer.replica.view for peer in run.peers] == members, "nobody else was touched"


async def ends(stream: trio.abc.Stream) -> None:
    """Check that the other side closes the connection."""
    with trio.fail_after(HANGS_S), suppress(trio.BrokenResourceError):
        while await stream.receive_some(65_536):
            pass


GARBAGE = (
    b"GET / HTTP/1.1\r\n\r\n",
    b"\xff" * 4_096,
    b"\x16\x03\x01\xff\xff" + b"\x00" * 4_096,  # a broken hello of TLS
    bytes([MAGIC]) + b"\x00" * 64,  # a lane of no link
    bytes([MAGIC]) + b"\xff" * 64,
)


async def test_garbage_ends_only_the_connection_that_sent_it(tmp_path: Path) -> None:
    async with a_run(tmp_path) as run:
        peer_port = run.peers[0].bound[0]
        for words, port in itertools.product(GARBAGE, (run.port, peer_port)):
            async with await trio.open_tcp_stream(port.host, port.port) as stream:
                with suppress(trio.BrokenResourceError):
                    await stream.send_all(words)
                await ends(stream)
            await run.goes_on(1)


async def test_a_certificate_of_another_authority_is_worth_nothing(tmp_path: Path) -> None:
    async with a_run(tmp_path) as run:
        other = Authority.load_or_create(tmp_path / "other", RUN_ID)
        identity = Identity.generate()
        certificate = other.issue(identity.request_pem("x"), "x", Party.PEER)
        (tmp_path / "x").mkdir()
        context = anybody()
        chain = tmp_path / "x" / "chain.pem"
        key = tmp_path / "x" / "key.pem"
        identity.save(key)
        chain.write_bytes(certificate)
        context.load_cert_chain(chain, key)
        bare = await trio.open_tcp_stream(run.port.host, run.port.port)
        tls = trio.SSLStream(bare, context, server_hostname="x")
        # With TLS 1.3 the refusal may show only at the first read.
        with pytest.raises((trio.BrokenResourceError, trio.EndOfChannel)):
            await converse(MessageStream(tls), run.hello())
        await trio.aclose_forcefully(bare)


async def converse(stream: MessageStream, message: m.Message) -> m.Message:
    await stream.send(message)
    return await stream.receive()


async def speak(run: Run, name: str, *messages: m.Message, raw: bytes = b"") -> m.Message:
    """Connect to the master as a member, send bytes, and return its last message."""
    network = SocketNetwork(run.admitted(name))
    channel = await network.dial(run.port, party=Party.MASTER)
    stream = MessageStream(channel.stream)
    try:
        for message in messages:
            await stream.send(message)
        if raw:
            await channel.stream.send_all(raw)
        with trio.fail_after(HANGS_S):
            return await stream.receive()
    finally:
        await trio.aclose_forcefully(channel.stream)


async def test_an_old_peer_is_refused_with_a_sentence(tmp_path: Path) -> None:
    async with a_run(tmp_path) as run:
        answer = await speak(run, "old", run.hello(version=0))
        assert isinstance(answer, m.Refused)
        assert "version" in answer.reason or "reach" in answer.reason


async def test_nobody_can_end_a_master_by_inventing_a_later_one(tmp_path: Path) -> None:
    async with a_run(tmp_path) as run:
        other = Authority.load_or_create(tmp_path / "other", RUN_ID)
        for term in (1, 99):
            for nonce in (b"", b"n" * 80, other.begin_term(term), run.authority.begin_term(98)):
                hello = evolve(run.hello(), term=term, nonce=nonce)
                if (term, nonce) == (1, b""):
                    continue  # what this master is
                answer = await speak(run, f"liar-{term}-{nonce.hex()[:8]}", hello)
                assert isinstance(answer, m.Refused)
                assert f"no master of term {term}" in answer.reason


async def test_junk_from_an_admitted_identity_ends_it(tmp_path: Path) -> None:
    async with a_run(tmp_path) as run:
        # A frame that is too large, one that is not msgpack, and one that is no message.
        for raw in (b"\xff\xff\xff\xff", b"\x00\x00\x00\x05abcde", b"\x00\x00\x00\x01\xc0"):
            with suppress(trio.EndOfChannel, trio.BrokenResourceError):
                assert isinstance(await speak(run, f"junk-{raw.hex()}", raw=raw), m.Refused)


async def test_a_message_that_is_not_a_peers_to_send_ends_it(tmp_path: Path) -> None:
    async with a_run(tmp_path) as run:
        with suppress(trio.EndOfChannel, trio.BrokenResourceError):
            answer = await speak(run, "forger", m.Abort(1, "because I say so"))
            assert isinstance(answer, m.Refused)
        with suppress(trio.EndOfChannel, trio.BrokenResourceError):
            await speak(run, "forger2", m.TrainerLost("before any hello"))


async def test_an_identity_that_was_never_admitted_is_refused(tmp_path: Path) -> None:
    async with a_run(tmp_path) as run:
        network = SocketNetwork(admitted(run.authority, tmp_path))  # signed, but not in the book
        channel = await network.dial(run.port, party=Party.MASTER)
        stream = MessageStream(channel.stream)
        await stream.send(run.hello())
        answer = await stream.receive_expected(m.Refused)
        assert "never admitted" in answer.reason
        await stream.aclose()
