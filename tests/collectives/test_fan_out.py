"""Destinations take turns, frame by frame; no lane waits for long."""

from __future__ import annotations

import threading
import time

import pytest
import trio

from holdfast.collectives.links.fan_out import FLOWS_MAX, TURN_WAIT_S, FanOutLimit


class Uplink:
    """Lanes that send frames of a given length, one after another."""

    def __init__(self, gate: FanOutLimit) -> None:
        self.gate = gate
        self.flowing: dict[str, int] = {}
        self.sent: dict[str, int] = {}
        self.most = 0

    async def lane(self, peer: str, frame_s: float) -> None:
        while True:
            await self.gate.enter(peer)
            self.flowing[peer] = self.flowing.get(peer, 0) + 1
            self.most = max(self.most, sum(count > 0 for count in self.flowing.values()))
            try:
                await trio.sleep(frame_s)
                self.sent[peer] = self.sent.get(peer, 0) + 1
            finally:
                self.flowing[peer] -= 1
                self.gate.leave(peer)

    async def run(self, lanes: dict[str, float], seconds: float) -> None:
        with trio.move_on_after(seconds):
            async with trio.open_nursery() as nursery:
                for peer, frame_s in lanes.items():
                    for _ in range(2):
                        nursery.start_soon(self.lane, peer, frame_s)


async def test_a_few_destinations_have_the_uplink_at_once_and_all_get_their_turn() -> None:
    uplink = Uplink(FanOutLimit())
    await uplink.run({f"p{number}": 0.01 for number in range(10)}, 10)
    assert uplink.most == FLOWS_MAX
    assert len(uplink.sent) == 10
    assert max(uplink.sent.values()) < 1.2 * min(uplink.sent.values())


async def test_few_destinations_never_wait() -> None:
    uplink = Uplink(FanOutLimit())
    await uplink.run({f"p{number}": 0.01 for number in range(FLOWS_MAX)}, 10)
    assert all(sent >= 2 * 990 for sent in uplink.sent.values())


async def test_slow_destinations_do_not_starve_a_fast_one() -> None:
    uplink = Uplink(FanOutLimit())
    slow = {f"slow{number}": 60.0 for number in range(2 * FLOWS_MAX)}
    await uplink.run({**slow, "fast": 0.01}, 30)
    assert uplink.sent["fast"] >= 30 / (TURN_WAIT_S + 0.01)


async def test_who_is_cancelled_while_it_waits_leaves_nothing_behind() -> None:
    gate = FanOutLimit()
    for number in range(FLOWS_MAX):
        await gate.enter(f"p{number}")
    with trio.move_on_after(TURN_WAIT_S / 2) as scope:
        await gate.enter("late")
    assert scope.cancelled_caught
    for number in range(FLOWS_MAX):
        gate.leave(f"p{number}")
    assert not gate._flowing
    assert not gate._waiters


@pytest.mark.real_time
async def test_threads_take_turns_with_tasks() -> None:
    gate = FanOutLimit()
    together: set[str] = set()
    most = 0
    lock = threading.Lock()

    def work(peer: str) -> None:
        nonlocal most
        for _ in range(50):
            gate.enter_in_thread(peer)
            with lock:
                together.add(peer)
                most = max(most, len(together))
            time.sleep(0)  # lets others in
            with lock:
                together.discard(peer)
            gate.leave(peer)

    async with trio.open_nursery() as nursery:
        for number in range(FLOWS_MAX + 3):
            nursery.start_soon(trio.to_thread.run_sync, work, f"p{number}")
        for _ in range(50):
            await gate.enter("task")
            await trio.sleep(0)
            gate.leave("task")
    assert most >= 2
    assert not gate._flowing
    assert not gate._waiters
