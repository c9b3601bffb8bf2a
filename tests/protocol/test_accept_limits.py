"""Limits on the connections that an address may make: counted by network, restored with time,
bounded.
"""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from holdfast.protocol.network import accept_limits
from holdfast.protocol.network.accept_limits import (
    CREDIT_MAX,
    CREDIT_PER_SITE,
    SLOTS_PER_SITE,
    AcceptLimits,
    AcceptSlots,
    AddressCredit,
    AddressGroup,
    address_group,
)


class Clock:
    now_s = 1_000.0

    def __call__(self) -> float:
        return self.now_s


def test_credit_is_used_up_and_grows_back() -> None:
    clock = Clock()
    credit = AddressCredit(clock)
    for _ in range(int(CREDIT_MAX)):
        assert credit.left("a") >= 1.0
        credit.charge("a")
    assert credit.left("a") < 1.0
    assert credit.left("b") == CREDIT_MAX, "nobody else pays"
    clock.now_s += 2.5
    assert credit.left("a") == 2.5
    clock.now_s += 1e6
    assert credit.left("a") == CREDIT_MAX


def test_the_memory_for_addresses_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accept_limits, "ADDRESSES_KNOWN_MAX", 10)
    credit = AddressCredit(Clock())
    for _ in range(70):
        credit.charge("again and again")
    for number in range(9):
        credit.charge(f"{number}")
    credit.charge("again and again")
    for number in range(9):
        credit.charge(f"new {number}")
    assert len(credit._known) == 10
    assert credit.left("again and again") < 0.0, "who failed last is not who is forgotten"


def test_the_credit_of_a_site_is_bounded_too() -> None:
    limits = AcceptLimits()
    limits._credit._now = limits._site_credit._now = Clock()
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


def slots(count_max: int, per_group_max: int, clock: Clock) -> AcceptSlots:
    return AcceptSlots(count_max, per_group_max, 2.0, clock)


def test_slots_are_given_back_once() -> None:
    room = slots(3, 2, Clock())
    with room.slot(A) as first, room.slot(A) as second:
        assert first is not None
        assert second is not None
        first.silent = second.silent = False
        with room.slot(A) as third:
            assert third is None, "two from one address"
        with room.slot(B) as other:
            assert other is not None
            other.silent = False
            with room.slot(C) as surplus:
                assert surplus is None, "three in all"
        first.release()
        first.release()
        with room.slot(B) as one, room.slot(C) as two:
            assert one is not None
            assert two is not None, "what was released is free"
            one.silent = two.silent = False
            with room.slot(D) as surplus:
                assert surplus is None, "once"
    assert not room._held
    assert not room._by_group


def test_the_oldest_silent_connection_gives_way_and_then_a_slow_one() -> None:
    clock = Clock()
    room = slots(3, 3, clock)
    with room.slot(A) as first, room.slot(B) as second, room.slot(C) as third:
        assert first is not None
        assert second is not None
        assert third is not None
        first.silent = False
        with room.slot(D) as fourth:
            assert fourth is not None
            assert [each.gave_way for each in (first, second, third)] == [0, 1, 0]
            third.silent = fourth.silent = False
            with room.slot(D) as surplus:
                assert surplus is None, "all have begun a moment ago"
            clock.now_s += 2.0
            with room.slot(D) as late:
                assert late is not None
                assert first.gave_way
                assert not third.gave_way


def test_an_address_that_fills_its_slots_closes_only_its_own_connections() -> None:
    room = slots(4, 2, Clock())
    with room.slot(A) as quiet, room.slot(B) as one, room.slot(B) as two, room.slot(B) as three:
        assert None not in (quiet, one, two, three)
        assert quiet is not None
        assert one is not None
        assert one.gave_way
        assert not quiet.gave_way


def test_some_slots_are_for_networks_from_which_members_came() -> None:
    room = slots(2, 2, Clock())
    with room.slot(A) as one, room.slot(B) as two:
        assert one is not None
        assert two is not None
        one.silent = two.silent = False
        with room.slot(C) as unidentified, room.slot(C, known=True) as member:
            assert unidentified is None
            assert member is not None


def test_a_site_cannot_take_all_slots() -> None:
    room = slots(100, 3, Clock())
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
