"""Standbys that keep a copy of the journal: what is acknowledged is there, and one that fails holds nobody up."""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgpack
import pytest
import trio

from holdfast.daemon.master.journal_base import (
    GrantRow,
    JournalAwayError,
    JournalBrokenError,
    JournalPosition,
)
from holdfast.daemon.master.journal_copies import (
    BEAT_S,
    COPYING_S,
    STANDBYS_MAX,
    STORED_S,
    JournalCopies,
)
from holdfast.daemon.master.journal_store import SCHEMA_VERSION, JournalStore
from holdfast.daemon.master.standby_copy import ENDS, SILENT_S, StandbyState, keep_copy
from holdfast.membership.master.state.journal import (
    JournalRecord,
    MastersKnown,
    RoundCommitted,
    RunCreated,
    TermStarted,
)
from holdfast.protocol.connection_phases import CLAIM, COPIED
from holdfast.protocol.errors import RemoteProtocolError, UserError
from holdfast.protocol.messages import (
    CopiedRow,
    JournalPart,
    JournalStored,
    JournalWanted,
    Role,
)
from holdfast.protocol.network.interface import Channel, Network
from holdfast.protocol.network.stream import MessageStream
from holdfast.protocol.trust.authority import Party
from holdfast.simulation.memory_network import MemoryWorld
from holdfast.simulation.scenario import MASTER
from holdfast.simulation.swarm import MASTER_ADDRESS, RUN_ID
from tests.swarm.test_swarm import a_swarm

MASTER_ID, STANDBY_ID = "f" * 32, "e" * 32


def journal(path: Path | str = ":memory:", *more: JournalRecord) -> JournalStore:
    store = JournalStore(path, now=lambda: 0.0)
    for record in (RunCreated(RUN_ID, '[run]\nname = "a"\n'), TermStarted(1), *more):
        store.append(record)
    return store


def known(number: int) -> MastersKnown:
    return MastersKnown((f"host{number}:29700",))


class Place:
    """A master's journal with its copies, and hosts for standbys."""

    def __init__(self, nursery: trio.Nursery, store: JournalStore, run_id: str = RUN_ID) -> None:
        self.nursery = nursery
        self.store = store
        self.notes: list[str] = []
        self.world = MemoryWorld(random.Random(1), delay_s=0.05, jitter_s=0.0, bytes_per_s=1e9)
        self.network = self.world.host("master", MASTER_ID, Party.MASTER)
        self.copies = JournalCopies(store, run_id, self.network, self.notes.append)
        self.states: list[StandbyState] = []
        self.failed: list[Exception] = []

    async def start(self) -> None:
        await self.nursery.start(self.network.serve, [MASTER_ADDRESS], self._on_channel, None)

    async def _on_channel(self, channel: Channel) -> None:
        stream = MessageStream(channel.stream, CLAIM)
        wanted = await stream.receive_expected(JournalWanted)
        await self.copies.serve(stream, wanted, channel.remote_address)

    def host(self, name: str) -> Network:
        return self.world.host(name, STANDBY_ID, Party.MASTER)

    def standby(
        self, store: JournalStore, name: str = "standby", run_id: str = RUN_ID
    ) -> StandbyState:
        state = StandbyState()
        self.states.append(state)
        self.nursery.start_soon(self._keep, self.host(name), store, run_id, state)
        return state

    async def _keep(
        self, network: Network, store: JournalStore, run_id: str, state: StandbyState
    ) -> None:
        channel = await network.dial(MASTER_ADDRESS, party=Party.MASTER)
        try:
            await keep_copy(channel, network, store, run_id, state)
        except (UserError, RemoteProtocolError, JournalBrokenError, *ENDS) as error:
            self.failed.append(error)

    async def ask(self, name: str) -> MessageStream:
        """Ask for the journal from a new host, which then does what the test wants."""
        channel = await self.host(name).dial(MASTER_ADDRESS, party=Party.MASTER)
        stream = MessageStream(channel.stream, COPIED)
        await stream.send(JournalWanted(RUN_ID, 0, b"", SCHEMA_VERSION))
        return stream

    async def write(self, *records: JournalRecord) -> float:
        """Append records as the master does; return how long it took."""
        began_s = trio.current_time()
        for record in records:
            self.store.append(record)
            await self.copies.replicated()
        return trio.current_time() - began_s


def contents(store: JournalStore) -> tuple[Any, ...]:
    invites = sorted(store.invites(), key=lambda row: str(row["id"]))
    return store.records(), store.granted(), invites


async def until_in_step(state: StandbyState) -> None:
    with trio.fail_after(60):
        while not state.in_step:
            await trio.sleep(0.1)


async def test_a_copy_gets_everything_and_what_is_written_later_before_anybody_hears_of_it() -> (
    None
):
    async with trio.open_nursery() as nursery:
        place = Place(nursery, journal(":memory:", *map(known, range(3_000))))
        await place.start()
        for number in range(40):
            place.store.admit(f"{number:032x}", GrantRow(Role.SPARE, False, f"n{number}"))
        token, _ = place.store.make_token(Role.CONTRIBUTOR, founder=True, uses=3, hours=1.0)
        copy = JournalStore(":memory:", now=lambda: 0.0)
        state = place.standby(copy)
        await until_in_step(state)
        assert contents(copy) == contents(place.store)
        assert copy.offers(token) == place.store.offers(token)

        place.store.redeem(token)  # used once at the master, too
        took_s = await place.write(known(1), TermStarted(7))
        assert contents(copy) == contents(place.store)
        assert copy.last_term == 7
        assert 0.1 <= took_s < STORED_S, "a round trip for each record"
        place.store.admit("a" * 32, GrantRow(Role.RELAY, False, "late"))
        await place.copies.replicated()
        assert copy.grant("a" * 32) == place.store.grant("a" * 32)
        assert len(place.notes) == 1
        assert "has the whole journal" in place.notes[0]
        (row,) = place.copies.rows()
        assert (row.records, row.in_step) == (len(place.store.records()), True)
        nursery.cancel_scope.cancel()


async def test_a_copy_that_was_away_gets_only_what_it_lacks() -> None:
    async with trio.open_nursery() as nursery:
        place = Place(nursery, journal())
        await place.start()
        copy = journal()
        place.store.append(known(1))
        numbers: list[int] = []
        take = copy.take_copied

        def taken(rows: Sequence[tuple[str, Sequence[Any]]]) -> None:
            numbers.extend(row[0] for table, row in rows if table == "records")
            take(rows)

        copy.take_copied = taken  # type: ignore[method-assign]
        await until_in_step(place.standby(copy))
        assert numbers == [3]
        nursery.cancel_scope.cancel()


@pytest.mark.fault(
    "a standby that keeps a copy freezes",
    "it has stored nothing for STORED_S",
    "it is dropped, and said; the run goes on",
)
async def test_a_standby_that_stores_nothing_is_waited_for_once() -> None:
    async with trio.open_nursery() as nursery:
        place = Place(nursery, journal())
        await place.start()
        stream = await place.ask("frozen")
        part = await stream.receive_expected(JournalPart)
        assert await place.write(known(1)) < 0.01, "nobody waits for one that is not in step"
        await stream.send(JournalStored(part.serial))
        while not (part := await stream.receive_expected(JournalPart)).in_step:
            await stream.send(JournalStored(part.serial))
        assert STORED_S <= await place.write(known(2)) < STORED_S + 1
        assert await place.write(known(3)) == 0
        assert place.copies.rows() == ()
        assert "has stored nothing for 3 s: its copy lacks what follows record" in place.notes[-1]
        nursery.cancel_scope.cancel()


async def test_a_standby_that_ends_is_not_waited_for() -> None:
    async with trio.open_nursery() as nursery:
        place = Place(nursery, journal())
        await place.start()
        state = place.standby(JournalStore(":memory:"))
        await until_in_step(state)
        place.world.crash("standby")
        assert await place.write(known(1)) < 1.0
        assert place.copies.rows() == ()
        assert "its connection ended" in place.notes[-1]
        nursery.cancel_scope.cancel()


async def test_a_standby_that_stops_while_it_copies_ends() -> None:
    async with trio.open_nursery() as nursery:
        place = Place(nursery, journal(":memory:", *map(known, range(20_000))))
        await place.start()
        await place.ask("frozen")
        await trio.sleep(COPYING_S + 5)
        assert place.copies.rows() == ()
        assert place.notes == [], "it was never in step"
        nursery.cancel_scope.cancel()


@pytest.mark.fault(
    "the disk of a standby that keeps a copy is full",
    "writing fails",
    "it is dropped, says so, and copies the rest when there is space",
)
async def test_a_full_disk_at_the_standby_holds_nobody_up() -> None:
    async with trio.open_nursery() as nursery:
        place = Place(nursery, journal())
        await place.start()
        copy = JournalStore(":memory:", now=lambda: 0.0)
        state = place.standby(copy)
        await until_in_step(state)
        take = copy.take_copied

        def fails(rows: Sequence[tuple[str, Sequence[Any]]]) -> None:
            raise JournalAwayError("database or disk is full")

        copy.take_copied = fails  # type: ignore[method-assign]
        assert STORED_S <= await place.write(known(1)) < STORED_S + 1
        await trio.sleep(2)
        assert (state.trouble, state.in_step) == ("database or disk is full", False)
        copy.take_copied = take  # type: ignore[method-assign]
        await trio.sleep(5)
        await until_in_step(place.standby(copy, "again"))
        assert contents(copy) == contents(place.store)
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize(
    ("what", "why"),
    [
        ("went on by itself", "it continued by itself"),
        ("has more", "it continued by itself"),
        ("another run", "is of another run"),
        ("schema", "its tables have version"),
        ("too many", "which is the limit"),
        ("shared", "the journal is in a database"),
    ],
)
async def test_what_cannot_be_continued_is_refused(
    what: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with trio.open_nursery() as nursery:
        place = Place(nursery, journal(":memory:", known(1)))
        await place.start()
        copy = journal()
        if what == "went on by itself":
            copy.append(known(2))
        if what == "has more":
            for number in (1, 2):
                copy.append(known(number))
        if what == "schema":
            module = "holdfast.daemon.master.standby_copy.SCHEMA_VERSION"
            monkeypatch.setattr(module, SCHEMA_VERSION + 1)
        if what == "too many":
            for number in range(STANDBYS_MAX):
                place.standby(journal(), f"standby{number}")
            await trio.sleep(1)
        if what == "shared":
            monkeypatch.setattr(place.store, "is_shared", True, raising=False)
        place.standby(copy, run_id="9" * 32 if what == "another run" else RUN_ID)
        await trio.sleep(1)
        (error,) = place.failed
        assert isinstance(error, UserError)
        assert why in str(error)
        assert "holdfast backup" in error.hint
        nursery.cancel_scope.cancel()


@pytest.mark.fault("a master sends a standby what is no journal", "checksums", "nothing is written")
@pytest.mark.parametrize("what", ["a hole", "changed", "no row", "another table", "no array"])
async def test_a_copy_takes_nothing_that_does_not_fit(what: str) -> None:
    store = journal(":memory:", known(1))
    (_table, row), *_ = store.rows_since(JournalPosition(2, 0))[0]
    number, kind, body, at_s, check = row
    rows: list[tuple[str, bytes]] = [("records", msgpack.packb(row))]
    rows.append(
        {
            "a hole": ("records", msgpack.packb((number + 2, kind, body, at_s, check))),
            "changed": ("records", msgpack.packb((number + 1, kind, body + b"x", at_s, check))),
            "no row": ("grants", msgpack.packb(("a" * 32, "spare"))),
            "another table": ("sqlite_master", msgpack.packb((1, 2, 3, 4, 5))),
            "no array": ("grants", b"\xc1"),
        }[what]
    )
    copy = journal()
    before = contents(copy)
    async with trio.open_nursery() as nursery:
        place = Place(nursery, store)

        async def lie(channel: Channel) -> None:
            stream = MessageStream(channel.stream, CLAIM)
            await stream.receive_expected(JournalWanted)
            stream.phase = COPIED
            copied = tuple(CopiedRow(table, data) for table, data in rows)
            await stream.send(JournalPart(1, copied, True, True))
            await trio.sleep(SILENT_S / 2)

        await nursery.start(place.network.serve, [MASTER_ADDRESS], lie, None)
        place.standby(copy)
        await trio.sleep(1)
        assert isinstance(place.failed[0], JournalBrokenError | RemoteProtocolError)
        assert contents(copy) == before
        nursery.cancel_scope.cancel()


async def test_a_new_invite_is_copied_within_a_beat() -> None:
    async with trio.open_nursery() as nursery:
        place = Place(nursery, journal())
        await place.start()
        copy = JournalStore(":memory:", now=lambda: 0.0)
        await until_in_step(place.standby(copy))
        place.store.make_token(Role.CONTRIBUTOR, founder=False, uses=1, hours=1.0)
        await trio.sleep(BEAT_S + 0.2)
        assert contents(copy) == contents(place.store)
        nursery.cancel_scope.cancel()


# ---------------------------------------------------------------- whole runs


@pytest.mark.fault(
    "the master of a run with a standby that keeps a copy dies",
    "its connections end",
    "the copy has every round of which a peer has heard",
)
@pytest.mark.parametrize("after_s", [0.31, 0.74, 1.13, 1.58, 2.02, 2.47])
async def test_a_copy_lacks_nothing_of_which_a_peer_has_heard(after_s: float) -> None:
    heard, copied = await heard_and_copied(after_s)
    assert len(heard) >= 3
    assert heard <= copied


async def test_without_waiting_for_the_standby_a_copy_lacks_rounds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def at_once(_copies: JournalCopies) -> None:
        await trio.lowlevel.checkpoint()

    monkeypatch.setattr(JournalCopies, "replicated", at_once)
    heard, copied = await heard_and_copied(0.31)
    assert not heard <= copied


async def heard_and_copied(after_s: float) -> tuple[set[int], set[int]]:
    """Crash a master whose standby is far away; return whose commits peers heard, and the copy has."""
    async with a_swarm("abc") as swarm:
        copy, state = JournalStore(":memory:", now=lambda: 0.0), StandbyState()
        network = swarm.world.host("standby", STANDBY_ID, Party.MASTER)
        swarm.world.link("standby", MASTER, delay_s=0.2)  # it hears of all later than peers

        async def keep() -> None:
            channel = await network.dial(MASTER_ADDRESS, party=Party.MASTER)
            with suppress(*ENDS):
                await keep_copy(channel, network, copy, RUN_ID, state)

        swarm.nursery.start_soon(keep)
        await until_in_step(state)
        heard: set[int] = set()
        for sim in swarm.peers.values():
            session = sim.service.session
            handle = session._handle

            def hear(message: Any, handle: Any = handle) -> None:
                if type(message).__name__ == "Commit":
                    heard.add(message.round)
                handle(message)

            session._handle = hear
        await trio.sleep(5.0 + after_s)
        swarm.crash_master()
        await trio.sleep(1.0)
        copied = {each.commit.round for each in copy.records() if isinstance(each, RoundCommitted)}
        return heard, copied
    raise AssertionError
