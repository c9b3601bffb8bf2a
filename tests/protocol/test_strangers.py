"""What an address may cost us: counted by line, back with time, and little is kept of it."""

from __future__ import annotations

import pytest

from holdfast.protocol import strangers
from holdfast.protocol.strangers import CREDIT_MAX, Credit, Places, line_of


class Clock:
    now_s = 1_000.0

    def __call__(self) -> float:
        return self.now_s


def test_credit_is_used_up_and_grows_back() -> None:
    clock = Clock()
    credit = Credit(clock)
    for _ in range(int(CREDIT_MAX)):
        assert credit.left("a") >= 1.0
        credit.charge("a")
    assert credit.left("a") < 1.0
    assert credit.left("b") == CREDIT_MAX, "nobody else pays"
    clock.now_s += 2.5
    assert credit.left("a") == 2.5
    clock.now_s += 1e6
    assert credit.left("a") == CREDIT_MAX


def test_what_is_kept_of_addresses_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strangers, "ADDRESSES_KNOWN_MAX", 10)
    credit = Credit(Clock())
    for _ in range(70):
        credit.charge("again and again")
    for number in range(9):
        credit.charge(f"{number}")
    credit.charge("again and again")
    for number in range(9):
        credit.charge(f"new {number}")
    assert len(credit._known) == 10
    assert credit.left("again and again") < 0.0, "who failed last is not who is forgotten"


def test_places_are_given_back_once() -> None:
    places = Places(3, 2)
    with places.place("a") as first, places.place("a") as second, places.place("a") as third:
        assert first is not None
        assert second is not None
        assert third is None, "two from one address"
        with places.place("b") as other, places.place("c") as surplus:
            assert other is not None
            assert surplus is None, "three in all"
        first()
        first()
        with places.place("b") as one, places.place("c") as two, places.place("d") as surplus:
            assert one is not None
            assert two is not None, "what was released is free"
            assert surplus is None, "once"
    with places.place("a") as again:
        assert again is not None


@pytest.mark.parametrize(
    ("host", "line"),
    [
        ("192.0.2.7", "192.0.2.7"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("2001:db8:1:2::9", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("::ffff:192.0.2.7", "192.0.2.7"),
        ("somebody who left", "somebody who left"),
    ],
)
def test_an_ipv6_line_is_one(host: str, line: str) -> None:
    assert line_of(host) == line
