"""A member that lies to the master of a live run: real sockets, real TLS."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
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
from holdfast.protocol.network.sockets import SocketNetwork
from holdfast.protocol.network.stream import MessageStream
from holdfast.protocol.trust.authority import Authority, Party
from holdfast.protocol.trust.credentials import Credentials
from holdfast.simulation.drifting_trainer import SimTrainer, small_layout
from holdfast.simulation.swarm import RUN_ID
from holdfast.simulation.witness import Witness
from tests.background import background
from tests.daemon.loopback import LOOPBACK, a_service
from tests.trust import admitted

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

    def hello(self) -> m.Hello:
        return m.Hello(m.VERSION_MAX, m.VERSION_MAX, RUN_ID, "x", (), 1, None, (), b"", ())


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


async def speak(run: Run, name: str, message: m.Message) -> m.Message:
    """Connect to the master as a member, send a message, and return the answer."""
    network = SocketNetwork(run.admitted(name))
    channel = await network.dial(run.port, party=Party.MASTER)
    stream = MessageStream(channel.stream)
    try:
        await stream.send(message)
        with trio.fail_after(HANGS_S):
            return await stream.receive()
    finally:
        await trio.aclose_forcefully(channel.stream)


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
