"""Newcomers that need the operator's approval, at a real master's port."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
from attrs import evolve

from holdfast.daemon.master import admission
from holdfast.daemon.master.journal.journal_store import JournalStore
from holdfast.daemon.peer.run_peer import Peer
from holdfast.protocol.addresses import Address
from holdfast.protocol.enrolment import enrol
from holdfast.protocol.errors import EvictedError, UserError
from holdfast.protocol.messages import RefusalCode, Role
from holdfast.protocol.network.sockets import SocketNetwork
from holdfast.protocol.trust.authority import Authority, Party, holder_of, load_certificate
from holdfast.protocol.trust.identity import Identity
from holdfast.protocol.trust.invite import Invite
from holdfast.simulation.swarm import RUN_ID
from tests.background import background
from tests.daemon.loopback import LOOPBACK, a_master, a_peer, a_service
from tests.trust import admitted

pytestmark = pytest.mark.real_time

SPEC = '[run]\nname = "gated"\n'


class Desk:
    """A master with its admission."""

    def __init__(self, folder: Path, spec: str) -> None:
        self.authority = Authority.load_or_create(folder / "authority", RUN_ID)
        self.store = JournalStore(folder / "journal.sqlite")
        credentials = admitted(self.authority, folder, Party.MASTER)
        network = SocketNetwork(credentials, newcomers=True)
        self.master = a_service(spec, self.store, network, [LOOPBACK], authority=self.authority)
        self.coordinator = self.master.coordinator
        self.gate = self.master.admission

    def invite(
        self,
        *,
        approve: bool = True,
        uses: int = 1,
        hours: float = 1.0,
        role: Role = Role.SPARE,
        founder: bool = False,
    ) -> Invite:
        token, expires_s = self.store.make_token(
            role, founder=founder, uses=uses, hours=hours, by_hand=approve
        )
        return Invite(
            RUN_ID,
            tuple(self.master.bound),
            self.authority.fingerprint,
            token,
            role,
            int(expires_s),
        )

    def uses_left(self) -> list[object]:
        return [row["uses_left"] for row in self.store.invites()]

    def told(self) -> list[str]:
        return [event.text for event in self.coordinator.context.events]


@asynccontextmanager
async def a_desk(folder: Path, spec: str = SPEC) -> AsyncIterator[Desk]:
    desk = Desk(folder, spec)
    async with background() as nursery:
        await nursery.start(desk.master.run)
        yield desk


async def refused(invite: Invite, identity: Identity, name: str = "alder") -> str:
    """Ask for admission; return the refusal's code."""
    with pytest.raises(EvictedError) as caught:
        await enrol(invite, identity, name)
    return caught.value.code


APPROVAL = RefusalCode.APPROVAL.value


@contextmanager
def held(store: JournalStore, name: str) -> Iterator[trio.MemoryReceiveChannel[None]]:
    """Hold calls of a method of the journal, in their threads, until the block ends.

    Yields:
      Has an item for each call that is held.
    """
    noting, calls = trio.open_memory_channel[None](9)
    released = threading.Event()
    token = trio.lowlevel.current_trio_token()
    original = getattr(store, name)

    def wait(*arguments: Any) -> None:
        token.run_sync_soon(noting.send_nowait, None)
        released.wait()
        original(*arguments)

    with calls, noting, pytest.MonkeyPatch.context() as patch:
        patch.setattr(store, name, wait)
        try:
            yield calls
        finally:
            released.set()


async def test_who_waits_is_listed_and_gets_in_when_approved(tmp_path: Path) -> None:
    async with a_desk(tmp_path) as desk:
        invite, identity = desk.invite(uses=2), Identity.generate()
        for _ in range(3):
            assert await refused(invite, identity) == APPROVAL
        (row,) = desk.gate.rows()
        assert (row.peer, row.name, row.role) == (identity.peer_id, "alder", "spare")
        assert row.host == "127.0.0.1"
        assert desk.uses_left() == [2], "asking uses nothing up"
        assert sum("asks to join" in text for text in desk.told()) == 1, "said once"
        assert desk.store.grant(identity.peer_id) is None
        answer = await desk.gate.approve(identity.peer_id[:6])
        assert answer == {"peer": identity.peer_id, "name": "alder", "approved": True}
        assert (desk.uses_left(), desk.gate.rows()) == ([1], ())
        pem, _ = await enrol(invite, identity, "alder")
        assert holder_of(load_certificate(pem)).peer == identity.peer_id
        assert desk.uses_left() == [1], "it was used up when it was approved"
        with pytest.raises(UserError, match="no pending newcomer"):
            await desk.gate.approve("alder")
        other = Identity.generate()
        assert await refused(invite, other) == APPROVAL, "the next one waits again"


@pytest.mark.parametrize("uses", [1, 2])
async def test_a_machine_that_asks_while_its_approval_is_written_waits_on(
    tmp_path: Path, uses: int
) -> None:
    async with a_desk(tmp_path) as desk:
        invite, identity = desk.invite(uses=uses), Identity.generate()
        for each in [identity, *(Identity.generate() for _ in range(uses - 1))]:
            assert await refused(invite, each) == APPROVAL
        async with trio.open_nursery() as nursery:
            with held(desk.store, "_write") as calls:
                nursery.start_soon(desk.gate.approve, identity.peer_id)
                await calls.receive()
                assert await refused(invite, identity) == APPROVAL
                with pytest.raises(UserError, match="no pending newcomer"):
                    await desk.gate.approve(identity.peer_id)
        pem, _ = await enrol(invite, identity, "alder")
        assert holder_of(load_certificate(pem)).peer == identity.peer_id
        assert desk.uses_left() == [uses - 1]


async def test_a_machine_that_asks_twice_at_once_uses_its_invite_once(tmp_path: Path) -> None:
    async with a_desk(tmp_path) as desk:
        invite, identity = desk.invite(approve=False, uses=2), Identity.generate()
        async with trio.open_nursery() as nursery:
            with held(desk.store, "redeem") as calls:
                for _ in range(2):
                    nursery.start_soon(enrol, invite, identity, "alder")
                    await calls.receive()
        assert desk.uses_left() == [1]


@pytest.mark.fault(
    "an invite came into other hands",
    "the run's operator, where newcomers are approved by hand",
    "refused, for good",
)
async def test_who_is_refused_comes_in_with_no_invite(tmp_path: Path) -> None:
    async with a_desk(tmp_path) as desk:
        identity = Identity.generate()
        assert await refused(desk.invite(), identity) == APPROVAL
        await desk.gate.refuse("alder", "who is that?")
        plain = desk.invite(approve=False)
        with pytest.raises(EvictedError, match="who is that") as caught:
            await enrol(plain, identity, "alder")
        assert caught.value.code == RefusalCode.KICKED.value
        assert desk.uses_left()[-1] == 1, "and costs the invite nothing"
        await enrol(plain, Identity.generate(), "birch")


@pytest.mark.fault(
    "a key that was removed comes with another invite",
    "the journal",
    "no certificate, no use of the invite",
)
async def test_who_was_kicked_gets_no_certificate_any_more(tmp_path: Path) -> None:
    async with a_desk(tmp_path) as desk:
        plain, identity = desk.invite(approve=False, uses=5), Identity.generate()
        await enrol(plain, identity, "alder")
        desk.master.decide(lambda now_s: desk.coordinator.kick(identity.peer_id, "noise", now_s))
        assert await refused(plain, identity) == RefusalCode.KICKED.value
        assert desk.uses_left() == [4]


async def test_the_spec_can_require_approval_for_all_invites(tmp_path: Path) -> None:
    async with a_desk(tmp_path, SPEC + "[membership]\napprove = true\n") as desk:
        assert await refused(desk.invite(approve=False), Identity.generate()) == APPROVAL


async def test_a_token_that_expired_meanwhile_admits_no_machine(tmp_path: Path) -> None:
    async with a_desk(tmp_path) as desk:
        invite, identity = desk.invite(), Identity.generate()
        assert await refused(invite, identity) == APPROVAL
        desk.store.withdraw(str(desk.store.invites()[0]["id"]))
        with pytest.raises(UserError, match="withdrawn"):
            await desk.gate.approve("alder")
        assert await refused(invite, identity) == RefusalCode.TOKEN.value
        assert desk.gate.rows() == ()


async def test_pending_machines_are_limited_and_gone_ones_make_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "PENDING_MAX", 2)
    async with a_desk(tmp_path) as desk:
        invite = desk.invite(uses=9)
        first, second, third = (Identity.generate() for _ in range(3))
        assert await refused(invite, first, "a") == APPROVAL
        assert await refused(invite, second, "b") == APPROVAL
        assert await refused(invite, third, "c") == RefusalCode.BUSY.value
        assert await refused(invite, first, "a") == APPROVAL, "it keeps its place"
        monkeypatch.setattr(admission, "PENDING_S", 0.05)
        await trio.sleep(0.1)
        assert await refused(invite, third, "c") == APPROVAL
        monkeypatch.undo()  # on a busy machine the third one would be gone by now
        assert [row.name for row in desk.gate.rows()] == ["c"]


async def test_two_machines_with_one_name_are_told_apart_by_their_ids(tmp_path: Path) -> None:
    async with a_desk(tmp_path) as desk:
        invite = desk.invite(uses=2)
        for _ in range(2):
            assert await refused(invite, Identity.generate(), "twin") == APPROVAL
        with pytest.raises(UserError, match="several pending newcomers"):
            await desk.gate.approve("twin")
        await desk.gate.approve(desk.gate.rows()[0].peer)
        assert len(desk.gate.rows()) == 1


async def test_an_invite_has_no_more_who_wait_than_it_admits(tmp_path: Path) -> None:
    async with a_desk(tmp_path) as desk:
        single, other = desk.invite(), desk.invite(uses=2)
        assert await refused(single, Identity.generate()) == APPROVAL
        for _ in range(3):
            assert await refused(single, Identity.generate()) == RefusalCode.BUSY.value
        assert [await refused(other, Identity.generate()) for _ in range(3)] == [
            APPROVAL,
            APPROVAL,
            RefusalCode.BUSY.value,
        ]
        assert len(desk.gate.rows()) == 3


async def test_what_is_shown_is_what_is_granted(tmp_path: Path) -> None:
    async with a_desk(tmp_path) as desk:
        low = desk.invite(role=Role.SPARE)
        high = desk.invite(role=Role.CONTRIBUTOR, founder=True)
        identity = Identity.generate()
        assert await refused(low, identity, "alder") == APPROVAL
        assert await refused(high, identity, "the-owners-laptop") == APPROVAL
        (row,) = desk.gate.rows()
        assert (row.name, row.role, row.founder) == ("alder", "spare", False)
        await desk.gate.approve(identity.peer_id)
        granted = desk.store.grant(identity.peer_id)
        assert granted is not None
        assert (granted.name, granted.role, granted.founder) == ("alder", Role.SPARE, False)
        # Who is to be a founder is said, too.
        second = Identity.generate()
        assert await refused(high, second, "birch") == APPROVAL
        assert desk.gate.rows()[0].founder is True
        assert "asks to join as contributor and founder" in desk.told()[-1]


async def test_an_expired_invite_gives_way_to_another(tmp_path: Path) -> None:
    async with a_desk(tmp_path) as desk:
        old, identity = desk.invite(), Identity.generate()
        assert await refused(old, identity, "alder") == APPROVAL
        desk.store.withdraw(str(desk.store.invites()[0]["id"]))
        assert await refused(desk.invite(role=Role.CONTRIBUTOR), identity, "alder") == APPROVAL
        assert [row.role for row in desk.gate.rows()] == ["contributor"]


async def test_a_name_made_of_anothers_id_gets_nobody_in(tmp_path: Path) -> None:
    async with a_desk(tmp_path) as desk:
        invite = desk.invite(uses=2)
        honest, poser = Identity.generate(), Identity.generate()
        assert await refused(invite, honest, "alder") == APPROVAL
        assert await refused(invite, poser, honest.peer_id[:8]) == APPROVAL
        assert (await desk.gate.approve(honest.peer_id[:8]))["peer"] == honest.peer_id
        with pytest.raises(UserError, match="no pending newcomer"):
            await desk.gate.approve(honest.peer_id[:8])
        assert [row.peer for row in desk.gate.rows()] == [poser.peer_id]
        # Known first is the id and where it comes from; what it says of itself comes last.
        assert desk.told()[-2].startswith(f"{poser.peer_id[:8]} at 127.0.0.1 asks to join as spare")


async def test_where_masters_are_is_in_later_invites_and_known_after_a_restart(
    tmp_path: Path,
) -> None:
    elsewhere, gone, told = Address("127.0.0.1", 2), Address("127.0.0.1", 1), tmp_path / "masters"
    async with background() as nursery:
        master = a_master(tmp_path, '[run]\nname = "moving"\n')
        nursery.start_soon(master.run)
        peer = await a_peer(master, tmp_path)
        async with background() as first:
            first.start_soon(peer.run)
            master.know_others([str(elsewhere)])
            while not told.exists() or str(elsewhere) not in told.read_text():
                await trio.sleep(0.02)
        master.know_others([])
        later = Invite.decode(master.invites.make(Role.SPARE, False, 1, 1.0))
        assert later.addresses == (*peer.options.invite.addresses, elsewhere)
        peer.options.invite = evolve(later, addresses=(gone,))
        assert peer.options.known_invite().addresses == (gone, *later.addresses)
        again = Peer(peer.options, print)
        nursery.start_soon(again.run)
        while not hasattr(again, "service") or not again.service.session.connected:
            await trio.sleep(0.02)
