"""Dialling one of several addresses: which is taken, when, and what is said if none answers."""

from __future__ import annotations

import pytest
import trio

from holdfast.collectives.links.dialling.staggered_dial import DIAL_S, STAGGER_S, dial_first
from holdfast.protocol.addresses import Address

ADDRESSES = ("10.0.0.7:1", "203.0.113.7:2", "[2001:db8::7]:3")


class Net:
    """Hosts by port: seconds until one answers; refused at once if negative, silent if absent."""

    def __init__(self, answers_s: dict[int, float]) -> None:
        self.answers_s = answers_s
        self.dialled: list[tuple[int, float]] = []
        self.closed: list[int] = []

    async def dial(self, address: Address) -> int:
        self.dialled.append((address.port, trio.current_time()))
        wait_s = self.answers_s.get(address.port)
        if wait_s is None:
            await trio.sleep_forever()
        elif wait_s < 0:
            raise ConnectionRefusedError(f"{address} refuses")
        else:
            await trio.sleep(wait_s)
        return address.port

    async def close(self, connection: int) -> None:
        self.closed.append(connection)


@pytest.mark.parametrize(
    ("answers_s", "taken", "after_s", "dialled"),
    [
        ({1: 0.1, 2: 0.0}, 1, 0.1, 1),
        ({2: 0.1}, 2, STAGGER_S + 0.1, 2),
        ({1: -1, 2: 0.1}, 2, 0.1, 2),
        ({1: 0.45, 2: 0.4}, 1, 0.45, 2),
        ({1: -1, 2: -1, 3: 3.0}, 3, 3.0, 3),
    ],
    ids=["first", "second beside a silent one", "second at once", "slow first", "last"],
)
async def test_the_first_that_answers_is_taken(
    answers_s: dict[int, float], taken: int, after_s: float, dialled: int
) -> None:
    net, began_s = Net(answers_s), trio.current_time()
    address, connection = await dial_first(ADDRESSES, net.dial, net.close)
    assert (address.port, connection) == (taken, taken)
    assert trio.current_time() - began_s == pytest.approx(after_s)
    assert len(net.dialled) == dialled


async def test_of_two_that_answer_at_once_one_is_closed() -> None:
    net = Net({1: STAGGER_S + 0.1, 2: 0.1})
    _address, connection = await dial_first(ADDRESSES, net.dial, net.close)
    assert [connection, *net.closed] in ([1], [2], [1, 2], [2, 1])


@pytest.mark.parametrize(
    ("answers_s", "error", "text"),
    [
        ({}, TimeoutError, "did not answer within 5 s"),
        (dict.fromkeys((1, 2, 3), -1.0), ConnectionRefusedError, "2001:db8::7"),
        ({1: -1, 3: -1}, TimeoutError, "203.0.113.7:2"),
    ],
    ids=["silent", "refused", "the last one to fail"],
)
async def test_if_none_answers_the_last_error_is_raised(
    answers_s: dict[int, float], error: type[Exception], text: str
) -> None:
    net, began_s = Net(answers_s), trio.current_time()
    with pytest.raises(error, match=text.replace(".", r"\.")):
        await dial_first(ADDRESSES, net.dial, net.close)
    assert trio.current_time() - began_s <= DIAL_S + 2 * STAGGER_S


async def test_a_member_without_an_address_is_not_reached() -> None:
    net = Net({})
    with pytest.raises(OSError, match="it has no address"):
        await dial_first((), net.dial, net.close)
