"""Limits on the connections that an address may make: counted by network, restored with time,
bounded.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import trio

from holdfast.protocol.network import accept_limits
from holdfast.protocol.network.accept_limits import (
    CREDIT_MAX,
    CREDIT_PER_S,
    CREDIT_PER_SITE,
    SLOTS_PER_SITE,
    AcceptLimits,
    AcceptSlots,
    AddressCredit,
    AddressGroup,
    address_group,
)


async def test_credit_is_used_up_and_grows_back() -> None:
    credit = AddressCredit()
    for _ in range(int(CREDIT_MAX)):
        assert credit.left("a") >= 1.0
        credit.charge("a")
    assert credit.left("a") < 1.0
    assert credit.left("b") == CREDIT_MAX, "nobody else pays"
    await trio.sleep(2.5)
    assert credit.left("a") == 2.5
    await trio.sleep(2 * CREDIT_MAX / CREDIT_PER_S)
    assert credit.left("a") == CREDIT_MAX


async def test_the_memory_for_addresses_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accept_limits, "ADDRESSES_KNOWN_MAX", 10)
    credit = AddressCredit()
    for _ in range(70):
        credit.charge("again and again")
    for number in range(9):
        credit.charge(f"{number}")
    credit.charge("again and again")
    for number in range(9):
        credit.charge(f"new {number}")
    assert len(credit._known) == 10
    assert credit.left("again and again") < 0.0, "who failed last is not who is forgotten"


async def test_the_credit_of_a_site_is_bounded_too() -> None:
    limits = AcceptLimits()
    count = int(CREDIT_PER_SITE * CREDIT_MAX)
    for number in range(count):  # each address once
        group = address_group(f"2001:db8:1:{number:x}::1")
        assert limits.admits(group)
        limits.charge(group)
    last = address_group("2001:db8:1:ffff::1")
    assert not limits.admits(last)
    assert limits.admits(address_group("2001:db8:2::1")), "another site"
    assert limits.admits(address_group("192.0.2.1"))
    limits.add_member(last)
    assert limits.admits(last), "members come from there"


A, B, C, D = map(AddressGroup, "abcd")


@contextmanager
def held(room: AcceptSlots, *groups: AddressGroup, silent: bool = False) -> Iterator[Any]:
    """Hold a slot for each of these; connections that have begun to speak give way later."""
    with ExitStack() as stack:
        found = [stack.enter_context(room.slot(group)) for group in groups]
        for slot in found:
            assert slot is not None
            slot.silent = silent
        yield found


def is_full(room: AcceptSlots, group: AddressGroup) -> bool:
    with room.slot(group) as slot:
        return slot is None


async def test_slots_are_given_back_once() -> None:
    room = AcceptSlots(3, 2, slow_s=2.0)
    with held(room, A, A) as (first, _second):
        assert is_full(room, A), "two from one address"
        with held(room, B):
            assert is_full(room, C), "three in all"
        first.release()
        first.release()
        with held(room, B, C):  # what was released is free
            assert is_full(room, D), "once"
    assert not room._held
    assert not room._by_group


async def test_the_oldest_silent_connection_gives_way_and_then_a_slow_one() -> None:
    room = AcceptSlots(3, 3, slow_s=2.0)
    with held(room, A, B, C, silent=True) as (first, second, third):
        first.silent = False
        with held(room, D):
            assert [each.gave_way for each in (first, second, third)] == [0, 1, 0]
            third.silent = False
            assert is_full(room, D), "all have begun a moment ago"
            await trio.sleep(2.0)
            with held(room, D):
                assert first.gave_way
                assert not third.gave_way


async def test_an_address_that_fills_its_slots_closes_only_its_own_connections() -> None:
    room = AcceptSlots(4, 2, slow_s=2.0)
    with held(room, A, B, B, silent=True) as (quiet, one, _two), held(room, B):
        assert one.gave_way
        assert not quiet.gave_way


async def test_some_slots_are_for_networks_from_which_members_came() -> None:
    room = AcceptSlots(2, 2, slow_s=2.0)
    with held(room, A, B):
        assert is_full(room, C)
        with room.slot(C, known=True) as member:
            assert member is not None


async def test_a_site_cannot_take_all_slots() -> None:
    room = AcceptSlots(100, 3, slow_s=2.0)
    groups = [address_group(f"2001:db8:1:{number:x}::1") for number in range(10)]
    with ExitStack() as stack:
        held = [stack.enter_context(room.slot(group)) for group in groups]
        for each in held:
            assert each is not None
        assert len(room._held) == 3 * SLOTS_PER_SITE
        assert stack.enter_context(room.slot(address_group("2001:db8:2::1"))) is not None
        assert len(room._held) == 3 * SLOTS_PER_SITE + 1
        assert stack.enter_context(room.slot(groups[0], known=True)) is not None
        assert len(room._held) == 3 * SLOTS_PER_SITE + 2, "nobody gave way to a member's network"


@pytest.mark.parametrize(
    ("host", "group"),
    [
        ("192.0.2.7", AddressGroup("192.0.2.7")),
        ("2001:db8:1:2:3:4:5:6", AddressGroup("2001:db8:1:2::/64", "2001:db8:1::/48")),
        ("2001:db8:1:2::9", AddressGroup("2001:db8:1:2::/64", "2001:db8:1::/48")),
        ("fe80::1%eth0", AddressGroup("fe80::/64", "fe80::/48")),
        ("::ffff:192.0.2.7", AddressGroup("192.0.2.7")),
        ("a closed connection", AddressGroup("a closed connection")),
    ],
)
def test_an_ipv6_network_counts_as_one_address_in_a_site(host: str, group: AddressGroup) -> None:
    assert address_group(host) == group
