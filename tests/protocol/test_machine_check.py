"""The machine check: a newcomer learns whether it is reachable, and nothing about other
machines.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import Any

import pytest
import trio
import trio.testing

from holdfast.protocol.addresses import Address
from holdfast.protocol.enrolment import Refusal
from holdfast.protocol.machine_check import CHECKED_PORTS_MAX, DIAL_BACK_S, Checkups
from holdfast.protocol.messages import CheckAnswer, CheckRequest
from holdfast.protocol.network.stream import MessageStream
from tests.background import background

HOST = "203.0.113.7"
NONCE = bytes(range(32))
NEEDS = CheckAnswer(0.0, "", (), 0, 1, 0, 0, 0)


async def looked_at() -> None:
    """Accept the token."""


class FakeNetwork:
    """A network whose dials lead where the test sets, and which records them."""

    def __init__(self, lead: Callable[[Address], bytes | OSError | None]) -> None:
        self.dialled: list[Address] = []
        self._lead = lead

    async def dial_lane(self, address: Address) -> trio.abc.Stream:
        self.dialled.append(address)
        said = self._lead(address)
        if said is None:
            await trio.sleep_forever()
        if isinstance(said, OSError):
            raise said
        near, far = trio.testing.memory_stream_pair()
        await far.send_all(said or b"")
        await far.send_eof()
        return near


async def ask(network: Any, addresses: tuple[str, ...], host: str = HOST) -> tuple[str, ...]:
    """Return the faults that the master finds."""
    checkups = Checkups(network, lambda _token: looked_at(), lambda: NEEDS)
    ours, theirs = (MessageStream(stream) for stream in trio.testing.memory_stream_pair())
    async with background() as nursery:
        nursery.start_soon(checkups.answer, ours, CheckRequest("t", addresses, NONCE), host)
        answer = await theirs.receive_expected(CheckAnswer)
    return answer.faults


async def test_it_is_dialled_where_it_comes_from_at_the_ports_that_it_names() -> None:
    network = FakeNetwork(lambda address: NONCE if address.port == 29700 else b"")
    faults = await ask(network, ("10.0.0.5:22", "internal.example:29700", "[::1]:29700", "junk"))
    assert sorted(network.dialled, key=lambda each: each.port) == [
        Address(HOST, 22),
        Address(HOST, 29700),
    ]
    assert [bool(fault) for fault in faults] == [True, False, False, True]


async def test_only_few_ports_are_dialled() -> None:
    network = FakeNetwork(lambda _address: NONCE)
    faults = await ask(network, tuple(f"a:{port}" for port in range(1, 5)))
    assert len(network.dialled) == CHECKED_PORTS_MAX
    assert ["not checked" in fault for fault in faults] == [False] * 2 + [True] * 2


async def test_who_comes_from_nowhere_is_not_dialled() -> None:
    network = FakeNetwork(lambda _address: NONCE)
    await ask(network, ("a:1",), host="")
    assert network.dialled == []


@pytest.mark.parametrize(
    "there",
    [
        OSError(errno.ECONNREFUSED, "refused"),
        OSError(errno.EHOSTUNREACH, "no route"),
        OSError("no such name"),
        None,  # filtered
        b"SSH-2.0-OpenSSH_9.9 and more than a nonce's length",
        b"",
    ],
    ids=["refused", "unreachable", "unknown", "filtered", "another service", "a mute one"],
)
async def test_the_answer_does_not_depend_on_what_listens_there_instead(
    there: bytes | OSError | None,
) -> None:
    """Neither the text nor its time tells."""
    began_s = trio.current_time()
    (fault,) = await ask(FakeNetwork(lambda _address: there), ("a:25",))
    assert fault == f"this machine did not answer at {HOST}:25"
    assert trio.current_time() - began_s == DIAL_BACK_S


async def test_one_invite_does_not_keep_the_others_out() -> None:
    network: Any = FakeNetwork(lambda _address: None)
    checkups = Checkups(network, lambda _token: looked_at(), lambda: NEEDS)
    busy: list[str] = []

    async def check(token: str) -> None:
        ours, _theirs = (MessageStream(stream) for stream in trio.testing.memory_stream_pair())
        try:
            await checkups.answer(ours, CheckRequest(token, ("a:1",), NONCE), HOST)
        except Refusal:
            busy.append(token)

    for tokens in (["greedy"] * 6 + ["modest"], ["greedy"] * 5):  # the second: after the first
        async with background() as nursery:
            for token in tokens:
                nursery.start_soon(check, token)
            await trio.testing.wait_all_tasks_blocked()
    assert busy == ["greedy"] * 3
