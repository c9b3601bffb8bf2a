"""Which hosts of a peer take part in its training command, in virtual time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import trio
from attrs import define, field

from holdfast.daemon.peer.trainer.host_places import FEWER_S, HINT, STOP_S, HostPlaces, fill
from holdfast.protocol.messages import FailureKind, HostEnded, HostHello, HostStart, HostStop

FLEXIBLE = ("torchrun", "--nnodes={hosts}", "--node-rank={host}", "--master-addr={head}", "a.py")
FIXED = ("torchrun", "--nnodes=3", "--node-rank={host}", "--master-addr={head}", "a.py")
MEMBER = "a" * 32


@define(eq=False)
class Host:
    peer: str
    hello: HostHello
    versions: dict[int, int] = field(factory=dict)
    told: list[Any] = field(factory=list)

    def tell(self, message: Any) -> None:
        self.told.append(message)


def host(name: str, gpus: int = 0) -> Host:
    return Host(name, HostHello(name, gpus, gpus))


class Site:
    """A head's places, and what it said and did."""

    def __init__(self, command: tuple[str, ...] = FLEXIBLE, wanted: int = 3, least: int = 1):
        self.said: list[str] = []
        self.failed: list[str] = []
        self.places = HostPlaces(
            wanted, least, command, MEMBER, "10.0.0.1", self.said.append, lambda: None
        )
        self.places.fail = lambda _kind, reason, _sick_s: self.failed.append(reason)

    async def started(self, *hosts: Host) -> None:
        for each in hosts:
            self.places.came(each)
        await self.places.enough()
        self.places.start("one")


async def ends(wait: Callable[[], Any], within_s: float = 1.0) -> Any:
    """Return what an awaitable call returns in time, or None."""
    with trio.move_on_after(within_s):
        return await wait()


async def test_a_command_is_started_at_all_hosts_with_their_numbers() -> None:
    site = Site()
    birch, cedar = host("birch"), host("cedar")
    await site.started(birch, cedar)
    assert birch.told == [HostStart(1, 3, "10.0.0.1", MEMBER, "one")]
    assert cedar.told == [HostStart(2, 3, "10.0.0.1", MEMBER, "one")]
    assert site.places.filled(FLEXIBLE) == fill(FLEXIBLE, 0, 3, "10.0.0.1")
    assert fill(FLEXIBLE, 2, 3, "10.0.0.1")[1:4] == [
        "--nnodes=3",
        "--node-rank=2",
        "--master-addr=10.0.0.1",
    ]


async def test_a_command_begins_without_hosts_that_miss_for_long_if_it_can() -> None:
    for command, begins in ((FLEXIBLE, True), (FIXED, False)):
        site = Site(command)
        site.places.came(host("birch"))
        assert await ends(site.places.enough, FEWER_S - 1) is None
        assert site.places.why_waiting == "2 of 3 hosts"
        assert f"2 of 3 hosts: {HINT}" in site.said
        with trio.move_on_after(10 * FEWER_S) as scope:
            await site.places.enough()
        assert scope.cancelled_caught is not begins


async def test_with_fewer_hosts_than_required_the_command_waits() -> None:
    site = Site(least=2)
    with trio.move_on_after(10 * FEWER_S) as scope:
        await site.places.enough()
    assert scope.cancelled_caught
    site.places.came(host("birch"))
    await site.places.enough()


async def test_a_host_that_goes_begins_the_command_again_with_those_that_are_left() -> None:
    site = Site()
    birch, cedar = host("birch"), host("cedar")
    await site.started(birch, cedar)
    assert await ends(site.places.change) is None
    site.places.boundary()
    site.places.went(birch, "it broke")
    assert await ends(site.places.change) == "host birch is gone (it broke): 2 of 3 hosts"
    await site.places.enough()
    site.places.start("two")
    assert cedar.told[-1] == HostStart(1, 2, "10.0.0.1", MEMBER, "two")


async def test_a_host_that_comes_takes_part_after_the_next_round() -> None:
    site = Site()
    await site.started(host("birch"), host("cedar"))
    site.places.boundary()
    site.places.went(site.places._present[0], "it broke")
    await site.places.enough()
    site.places.start("two")
    site.places.came(host("birch"))
    assert await ends(site.places.change) is None, "its round is not over"
    site.places.boundary()
    assert await ends(site.places.change) == "host birch takes part: 3 of 3 hosts"


async def test_another_number_of_gpus_at_a_host_begins_the_command_again() -> None:
    site = Site()
    birch = host("birch", gpus=4)
    await site.started(birch, host("cedar", gpus=2))
    assert site.places.shown(2, 2) == "3 of 3 hosts (with birch, cedar), 8 of 8 GPUs"
    birch.hello = HostHello("birch", 3, 4)
    site.places.changed()
    assert "GPUs" in await ends(site.places.change)
    assert site.places.shown(1, 2) == "3 of 3 hosts (with birch, cedar), 6 of 8 GPUs"


def test_names_of_hosts_that_are_long_are_left_out() -> None:
    site = Site()
    assert site.places.shown(0, 0) == "1 of 3 hosts"
    site.places.came(host("a" * 30))
    assert site.places.shown(0, 0) == f"2 of 3 hosts (with {'a' * 30})"
    site.places.came(host("b" * 30))
    assert site.places.shown(0, 0) == "3 of 3 hosts"


async def test_the_command_fails_where_it_fails_at_a_host_and_not_by_being_ended() -> None:
    site = Site()
    birch, cedar = host("birch"), host("cedar")
    await site.started(birch, cedar)
    site.places.ended(birch, HostEnded("one", FailureKind.CRASH, "exit status 1"))
    assert site.failed == ["on host birch: exit status 1"]
    async with trio.open_nursery() as nursery:
        nursery.start_soon(lambda: site.places.stop(finished=False))
        await trio.sleep(0.1)
        assert isinstance(cedar.told[-1], HostStop)
        site.places.ended(cedar, HostEnded("one", FailureKind.CRASH, "it was stopped"))
    assert len(site.failed) == 1


async def test_a_host_that_does_not_end_its_command_is_not_waited_for_long() -> None:
    site = Site()
    await site.started(host("birch"), host("cedar"))
    began_s = trio.current_time()
    await site.places.stop(finished=False)
    assert trio.current_time() == began_s + STOP_S


async def test_no_more_hosts_are_taken_than_there_are_places() -> None:
    site = Site(wanted=2)
    assert site.places.why_full("other") == ""
    site.places.came(host("birch"))
    assert site.places.why_full("other").startswith(
        "this peer has its 2 hosts already (the head, birch)"
    )
    assert site.places.why_full("birch") == "", "it comes back before its end was noticed"


async def test_the_end_of_another_start_is_no_failure_of_this_one() -> None:
    site = Site()
    birch = host("birch")
    await site.started(birch, host("cedar"))
    site.places.ended(birch, HostEnded("zero", FailureKind.CRASH, "late"))
    assert site.failed == []
    await site.places.stop(finished=True)
    site.places.ended(birch, HostEnded("one", FailureKind.CRASH, "torchrun lost its store"))
    assert site.failed == [], "the command has ended well"


async def test_a_host_that_goes_before_the_start_is_not_waited_for() -> None:
    site = Site()
    birch, cedar = host("birch"), host("cedar")
    for each in (birch, cedar):
        site.places.came(each)
    await site.places.enough()
    site.places.went(birch, "it broke")
    site.places.start("one")
    site.places.ended(cedar, HostEnded("one", FailureKind.CRASH, ""))
    began_s = trio.current_time()
    await site.places.stop(finished=False)
    assert trio.current_time() == began_s
