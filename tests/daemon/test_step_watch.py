"""Detection of a trainer that hangs."""

from __future__ import annotations

from holdfast.daemon.peer.trainer_service import (
    FIRST_STEP_DEADLINES,
    LOOK_S_MAX,
    StepSample,
    StepWatch,
)

DEADLINE_S = 10.0


def sees(watch: StepWatch, seconds: list[float], **what: int | None) -> list[float]:
    """The times at which it calls the trainer hanging."""
    seen = {"step": 1, "tokens": 1, "heard_count": None, "sent_count": 0, **what}
    look = StepSample(**seen)  # type: ignore[arg-type]
    return [at for at in seconds if watch.look(at, look, DEADLINE_S)]


def every_second(start: int, count: int) -> list[float]:
    return [float(start + at) for at in range(count)]


def test_a_step_is_a_sign_of_life() -> None:
    watch = StepWatch()
    for step in range(100):
        assert not sees(watch, every_second(9 * step, 9), step=step)


def test_without_one_it_hangs_after_the_deadline() -> None:
    assert sees(StepWatch(), every_second(0, 12)) == [11.0]


def test_the_first_step_may_take_longer() -> None:
    watch = StepWatch()
    late = FIRST_STEP_DEADLINES * DEADLINE_S
    assert sees(watch, every_second(0, 60), tokens=0)[0] == late + 1
    assert not sees(watch, [60.0], tokens=1)
    assert sees(watch, every_second(61, 12), tokens=1)[0] == 71.0


def test_waiting_is_no_hanging_while_there_is_nothing_to_hear() -> None:
    watch = StepWatch()
    assert not sees(watch, every_second(0, 100), heard_count=7, sent_count=7)
    assert sees(watch, every_second(100, 30), heard_count=7, sent_count=8)[0] == 110.0


def test_a_daemon_that_stood_still_itself_blames_nobody() -> None:
    watch = StepWatch()
    assert not sees(watch, [0.0, 1.0, 3600.0])
    assert watch.still_s == 1.0 + LOOK_S_MAX
    assert sees(watch, [7200.0, 7201.0])
