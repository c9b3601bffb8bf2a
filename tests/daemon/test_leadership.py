"""The lease of one master of several, beside a table in memory and in virtual time.

Each planted bug takes out one rule, which the test that stands beside it must miss.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest
import trio

from holdfast.daemon.master import leadership
from holdfast.daemon.master.journal.journal_base import JournalAwayError
from holdfast.daemon.master.journal.lease import Lease, MasterRow
from holdfast.daemon.master.leadership import Leadership
from holdfast.simulation.virtual_time import run_virtually
from tests.planting import Patch

T = TypeVar("T")
LEASE_S = 3.0
DEADLINE_S = 10.0
ME, OTHER = (MasterRow(name, (f"{name}:1",), "", name == "me", 0.0) for name in ("me", "other"))


class Table:
    """A ``LeaseTable`` that always gives the lease, until ``taken``; and the way to it."""

    def __init__(self, *rows: MasterRow) -> None:
        self.rows = rows
        self.trip_s = 0.0
        self.away = self.taken = False
        self.free: list[float] = []  # what was asked for, by ``take_lease``
        self.released: list[Lease] = []

    async def call(self, work: Callable[[], T], /) -> T:
        await trio.sleep(self.trip_s)
        if self.away:
            raise JournalAwayError("no answer")
        return work()

    def take_lease(self, holder: str, _lease_s: float, free_s: float) -> Lease | None:
        self.free.append(free_s)
        return Lease(holder, len(self.free))

    def renew(self, _lease: Lease, _lease_s: float) -> bool:
        return not self.taken

    def release(self, lease: Lease) -> None:
        self.released.append(lease)

    def register(self, _holder: str, _addresses: Sequence[str], _page: str) -> None: ...

    def masters(self, _seen_s: float) -> list[MasterRow]:
        return list(self.rows)


class FakeLeader:
    """A ``Leader`` that no member reaches, if ``alone``; it serves for so many seconds."""

    def __init__(self, *, alone: bool = False, members: bool = True, serves_s: float = 60) -> None:
        membership, began_s = SimpleNamespace(deadline_s=DEADLINE_S), trio.current_time()
        context = SimpleNamespace(spec=SimpleNamespace(membership=membership))
        self.ended = trio.Event()
        self.told: list[Sequence[str]] = []
        self.serves_s = serves_s
        self.service: Any = SimpleNamespace(
            has_members=members,
            cut_off_s=lambda: trio.current_time() - began_s if alone else 0.0,
            coordinator=SimpleNamespace(context=context),
            stand_down=lambda _why: self.ended.set(),
        )

    async def run(self) -> None:
        with trio.move_on_after(self.serves_s):
            await self.ended.wait()

    def know_others(self, addresses: Sequence[str]) -> None:
        self.told.append(addresses)

    def whereabouts(self) -> tuple[Sequence[str], str] | None:
        return ["me:1"], ""


def master(table: Table) -> Leadership:
    return Leadership(table, "me", LEASE_S, call=table.call, clock=trio.current_time)


async def lead(one: Leadership, leader: Callable[[], FakeLeader] = FakeLeader) -> str:
    async def begin() -> FakeLeader:
        return leader()

    return await one.lead(await one.take(lambda: None), begin)


async def test_a_lease_lasts_from_the_question() -> None:
    table = Table()
    table.trip_s = 1.0
    one = master(table)
    await one.take(lambda: None)
    assert one.is_held()
    await trio.sleep(LEASE_S - 0.9)
    assert not one.is_held()


async def test_who_lost_the_lease_ends() -> None:
    table = Table()
    table.taken = True
    one = master(table)
    assert "another master has taken" in await lead(one)
    assert trio.current_time() < LEASE_S
    assert not one.is_held()
    assert table.released == []


async def test_a_short_outage_costs_nothing() -> None:
    table = Table()
    with trio.move_on_after(2 * LEASE_S) as until:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(lead, master(table))
            await trio.sleep(0.1)
            table.away = True
            await trio.sleep(0.8 * LEASE_S)
            table.away = False
    assert until.cancelled_caught, "it led until then"


async def test_who_ends_gives_the_lease_back() -> None:
    table = Table()
    one = master(table)
    assert await lead(one, partial(FakeLeader, serves_s=1)) == ""
    assert len(table.released) == 1
    assert not one.is_held()


async def test_who_is_alone_gives_way_to_another_only() -> None:
    assert await lead(master(Table(ME)), partial(FakeLeader, alone=True)) == ""
    began_s = trio.current_time()
    one = master(Table(ME, OTHER))
    assert "no member is heard of" in await lead(one, partial(FakeLeader, alone=True))
    assert 4.0 <= trio.current_time() - began_s <= 5.0


async def test_who_gave_way_lets_others_go_first() -> None:
    table = Table(ME, OTHER)
    one = master(table)
    await lead(one, partial(FakeLeader, alone=True))
    await one.take(lambda: None)
    await trio.sleep(3 * LEASE_S)
    await one.take(lambda: None)
    assert table.free == [0.0, LEASE_S / 2, 0.0]


async def test_it_waits_longer_each_time_in_vain() -> None:
    one = master(Table(ME, OTHER))
    lasted = []
    for members in (False, False, False, True, False):
        began_s = trio.current_time()
        await lead(one, partial(FakeLeader, alone=True, members=members))
        lasted.append(trio.current_time() - began_s)
    assert [round(each / DEADLINE_S, 1) for each in lasted] == [1.0, 2.0, 4.0, 0.4, 2.0]


async def test_members_hear_of_the_other_masters() -> None:
    leader = FakeLeader(serves_s=2)
    await lead(master(Table(ME, OTHER)), lambda: leader)
    assert leader.told[0] == ("other:1",)


# ---------------------------------------------------------------- planted


async def from_the_answer(self: Leadership, _looked: object) -> Lease:
    lease = await self._call(self._look)
    assert lease is not None
    self._good_until_s = trio.current_time() + LEASE_S
    return lease


async def nothing(*_: object) -> None: ...


to_itself = property(lambda self: self.known)
BUGS: dict[str, tuple[tuple[object, str, object], Callable[[], Awaitable[None]]]] = {
    "from the answer": (
        (Leadership, "take", from_the_answer),
        test_a_lease_lasts_from_the_question,
    ),
    "deaf to the fence": ((Leadership, "_renew", lambda *_: True), test_who_lost_the_lease_ends),
    "tries once": ((leadership, "AGAIN_S", LEASE_S), test_a_short_outage_costs_nothing),
    "never released": ((Leadership, "_release", nothing), test_who_ends_gives_the_lease_back),
    "yields to itself": (
        (Leadership, "others", to_itself),
        test_who_is_alone_gives_way_to_another_only,
    ),
    "takes it again": ((leadership, "MODEST_LEASES", 0), test_who_gave_way_lets_others_go_first),
    "never patient": ((leadership, "IN_VAIN_MAX", 0), test_it_waits_longer_each_time_in_vain),
    "names nobody": ((Leadership, "others", ()), test_members_hear_of_the_other_masters),
}


@pytest.mark.planted
@pytest.mark.parametrize("name", BUGS)
def test_a_rule_that_is_taken_out_is_missed(name: str, monkeypatch: Patch) -> None:
    rule, missing = BUGS[name]
    monkeypatch.setattr(*rule)
    with pytest.raises((AssertionError, BaseExceptionGroup)):
        run_virtually(missing, seed=0)
