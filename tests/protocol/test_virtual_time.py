"""Alarms, beside trio's own deadlines."""

from __future__ import annotations

import math

import pytest
import trio
import trio.testing

from holdfast.simulation.virtual_time import Alarm, run_virtually


def test_alarms_and_deadlines_come_in_the_order_of_their_time() -> None:
    seen: list[tuple[str, float]] = []

    async def note(name: str, at_s: float, alarm: Alarm | None) -> None:
        await (trio.sleep_until(at_s) if alarm is None else alarm.wait(at_s))
        seen.append((name, trio.current_time()))

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            for name, at_s in (("c", 3.0), ("a", 1.0), ("d", 4.0), ("b", 2.0)):
                nursery.start_soon(note, name, at_s, Alarm() if name in "ac" else None)

    run_virtually(main, seed=1)
    assert seen == [("a", 1.0), ("b", 2.0), ("c", 3.0), ("d", 4.0)]


def test_an_alarm_can_be_brought_forward_and_not_put_off() -> None:
    async def main() -> None:
        alarm = Alarm()
        began_s = trio.current_time()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(alarm.wait, began_s + 1000)
            await trio.testing.wait_all_tasks_blocked()
            alarm.bring_forward(began_s + 0.02)
            alarm.bring_forward(began_s + 500)
        took_s = trio.current_time() - began_s
        assert took_s == pytest.approx(0.02)

    run_virtually(main, seed=1)


def test_an_alarm_that_was_not_set_rings_when_it_is_set() -> None:
    async def main() -> None:
        alarm = Alarm()
        alarm.ring()  # nobody waits: nothing is kept of it
        async with trio.open_nursery() as nursery:
            nursery.start_soon(alarm.wait, math.inf)
            await trio.testing.wait_all_tasks_blocked()
            assert nursery.child_tasks
            alarm.ring()
            alarm.ring()

    run_virtually(main, seed=1)


def test_who_gave_up_waiting_is_not_woken_and_the_next_waits_its_own_time() -> None:
    async def main() -> None:
        alarm = Alarm()
        began_s = trio.current_time()
        with trio.move_on_after(0.01) as scope:
            await alarm.wait(began_s + 0.02)
        assert scope.cancelled_caught
        alarm.ring()
        await alarm.wait(began_s + 0.05)
        assert trio.current_time() >= began_s + 0.05

    run_virtually(main, seed=1)
