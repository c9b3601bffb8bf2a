"""Failure reports of a trainer, and its recovery where that is possible."""

from __future__ import annotations

import math
import subprocess
import sys
import threading
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

import holdfast
from holdfast.client.attach import attach
from holdfast.client.crash_report import REASON_CHARS_MAX, CrashReport, kind_of, text_of
from holdfast.client.daemon_connection import DaemonConnection
from holdfast.protocol import messages as m
from holdfast.protocol.arena import NOTHING_WHOLE, STEP_SLOT, WAITING_SLOT
from tests.client.fake_daemon import FakeDaemon, settled, talking, wait_for
from tests.client.plain_model import equals, line, step, train, weights


class OddError(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")


def from_cause(cause: Exception) -> Exception:
    error = RuntimeError("the step failed")
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ValueError("no"), m.FailureKind.CRASH),
        (MemoryError(), m.FailureKind.MEMORY),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate"), m.FailureKind.MEMORY),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), m.FailureKind.MEMORY),
        (RuntimeError("CUBLAS_STATUS_ALLOC_FAILED when calling"), m.FailureKind.MEMORY),
        (torch.AcceleratorError("device-side assert"), m.FailureKind.CUDA),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), m.FailureKind.CUDA),
        (ValueError("CUDA error"), m.FailureKind.CRASH),
        (from_cause(MemoryError()), m.FailureKind.MEMORY),
        (OddError(), m.FailureKind.CRASH),
    ],
)
def test_exceptions_are_told_apart(error: Exception, kind: m.FailureKind) -> None:
    assert kind_of(error) is kind


def test_exceptions_are_told_apart_by_a_torch_without_classes_for_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(torch, "OutOfMemoryError")
    monkeypatch.delattr(torch, "AcceleratorError")
    assert kind_of(RuntimeError("CUDA out of memory. Tried to allocate")) is m.FailureKind.MEMORY
    assert kind_of(RuntimeError("CUDA error: device-side assert")) is m.FailureKind.CUDA
    assert kind_of(ValueError("no")) is m.FailureKind.CRASH


def test_the_text_is_one_short_line() -> None:
    assert text_of(ValueError("two\n lines")) == "ValueError: two lines"
    assert len(text_of(ValueError("x" * 10_000))) == REASON_CHARS_MAX
    assert "OddError" in text_of(OddError())


def test_the_hook_of_before_still_hears_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[object] = []
    monkeypatch.setattr(sys, "excepthook", lambda *what: heard.append(what[1]))
    before = sys.excepthook
    said: list[tuple[m.FailureKind, str]] = []
    words = CrashReport(lambda kind, text: said.append((kind, text)))
    error = MemoryError("no")
    sys.excepthook(MemoryError, error, None)
    sys.excepthook(MemoryError, error, None)
    assert (said, heard) == ([(m.FailureKind.MEMORY, "MemoryError: no")], [error, error])
    words.withdraw()
    assert sys.excepthook is before
    silent = CrashReport(lambda kind, text: said.append((kind, text)))
    sys.excepthook(KeyboardInterrupt, KeyboardInterrupt(), None)
    assert len(said) == 1, "somebody's wish to stop is no failure"
    silent.withdraw()


# ---------------------------------------------------------------- a daemon that writes for long


def test_a_trainer_waits_in_load_for_a_daemon_that_writes_for_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its daemon may apply a round to a large fragment just then."""
    monkeypatch.setattr("holdfast.client.daemon_connection.PAUSE_S", 0.0)
    looked, model, look_s = threading.Event(), line(1.0), [0.0]
    pause = DaemonConnection.pause

    def counted(connection: DaemonConnection) -> None:
        look_s[0] += 0.001
        if look_s[0] > 60.0:
            looked.set()
        pause(connection)

    monkeypatch.setattr(DaemonConnection, "pause", counted)

    def script(daemon: FakeDaemon) -> None:
        daemon.start(step_limit=1)
        settled(lambda: bool(daemon.posted.slots[WAITING_SLOT]))
        with daemon.shared.writing(0, 5):
            daemon.shared.values(0)[:] = 9.0
            daemon.load(step=4, step_limit=9)
            wait_for(looked)

    with talking(script, stay=True) as path, attach(model, socket_path=path) as run:
        run.step()
        assert (run.global_step, weights(model)) == (4, [9.0] * 3)


def test_a_load_that_a_transfer_has_overtaken_waits_for_the_next_one() -> None:
    model = line(1.0)

    def script(daemon: FakeDaemon) -> None:
        daemon.start(step_limit=1)
        settled(lambda: bool(daemon.posted.slots[WAITING_SLOT]))
        daemon.share(0, NOTHING_WHOLE)  # a transfer has begun
        daemon.load(step=4, step_limit=9)
        # Since then it has heard the arenas' opening, its founding and two loads.
        settled(lambda: daemon.posted.slots[WAITING_SLOT] == 1 + 4)
        daemon.share(0, 6, 7)
        daemon.load(step=8, step_limit=9)

    with talking(script, stay=True) as path, attach(model, socket_path=path) as run:
        step(run, model, 0.5)
        assert (run.global_step, weights(model)) == (8, [7.0] * 3)


def test_a_run_that_ends_before_its_last_weights_are_here_says_so() -> None:
    def script(daemon: FakeDaemon) -> None:
        daemon.start(step_limit=1)
        settled(lambda: bool(daemon.posted.slots[WAITING_SLOT]))
        daemon.share(0, NOTHING_WHOLE)
        daemon.say(m.Finished())

    with talking(script, stay=True) as path, attach(line(), socket_path=path) as run:
        with pytest.raises(holdfast.AttachRefused, match="holdfast export"):
            run.step()
        assert not run.finished


def test_a_daemon_that_dies_while_it_writes_is_gone_for_its_trainer() -> None:
    killed = ExitStack()  # what it was in stays as it is

    def script(daemon: FakeDaemon) -> None:
        daemon.start(step_limit=1)
        settled(lambda: bool(daemon.posted.slots[WAITING_SLOT]))
        killed.enter_context(daemon.shared.writing(0, 1))
        daemon.load()
        daemon.load()  # so that there is something left to read when it is dead
        settled(lambda: daemon.posted.slots[WAITING_SLOT] == 1 + 4)

    with killed, talking(script) as path, attach(line(), socket_path=path) as run:
        with pytest.raises(holdfast.DaemonGone):
            run.step()


SCRIPT = """
import sys, torch, holdfast
model = torch.nn.Linear(3, 1, bias=False)
run = holdfast.attach(model, socket_path=sys.argv[1])
run.step()
{fails}
"""


@pytest.mark.parametrize(
    ("fails", "kind", "reason"),
    [
        ("raise torch.OutOfMemoryError('CUDA out of memory')", m.FailureKind.MEMORY, "CUDA out"),
        ("with run: raise ValueError('wrong shape')", m.FailureKind.CRASH, "wrong shape"),
        ("bytearray(2**60)", m.FailureKind.MEMORY, "MemoryError"),
    ],
)
def test_a_script_that_ends_by_an_exception_says_so_and_keeps_its_traceback(
    tmp_path: Path, fails: str, kind: m.FailureKind, reason: str
) -> None:
    train_script = tmp_path / "train.py"
    train_script.write_text(SCRIPT.format(fails=fails))
    heard: list[m.Failing] = []

    def script(daemon: FakeDaemon) -> None:
        daemon.start()
        heard.append(daemon.hear(m.Failing))

    with talking(script) as path:
        ended = subprocess.run(
            [sys.executable, str(train_script), path],
            capture_output=True,
            text=True,
            timeout=250,
            check=False,
        )
    assert ended.returncode == 1
    assert "Traceback" in ended.stderr
    assert heard[0].kind is kind
    assert reason in heard[0].reason


@pytest.mark.fault("its loss is not finite", "the hook", "reloaded, in the end restarted")
def test_losses_that_are_not_finite_are_answered_by_the_shared_weights() -> None:
    model = line(1.0)
    optimizer = torch.optim.AdamW(model.parameters())

    def script(daemon: FakeDaemon) -> None:
        daemon.start(nan_steps=3)
        said = daemon.hear(m.Failing)
        assert said.kind is m.FailureKind.NAN
        assert "3 times in a row" in said.reason
        assert daemon.hears_nothing(), "it waits, and trains on nothing"
        daemon.load(step=40, spoilt=True)
        daemon.load(step=41, finished=True)

    with talking(script) as path, attach(model, optimizer, socket_path=path) as run:
        run.step(loss=math.nan)
        run.step(loss=math.inf)
        run.step(loss=1.0)  # not in a row
        run.step(loss=math.nan)
        run.step(loss=math.nan)
        model.weight.grad = torch.full_like(model.weight, math.nan)
        optimizer.step()
        assert not math.isfinite(weights(model)[0])
        run.step(loss=-math.inf)
        assert run.global_step in (40, 41)
        assert equals(model, 1.0)
        assert not optimizer.state, "its moments were not finite either"
        train(run)


@pytest.mark.fault("an update is not finite", "its daemon's norm", "its weights are replaced")
@pytest.mark.parametrize("overlap_steps", [0, 5])
@pytest.mark.parametrize("place", ["weight", "buffer"])
def test_an_update_that_is_not_finite_is_answered_by_the_shared_weights(
    overlap_steps: int, place: str
) -> None:
    """The script tells no losses, and `nan_steps` is 0: the daemon alone finds it."""
    model = line(1.0)
    model.register_buffer("scale", torch.ones(2))
    optimizer = torch.optim.AdamW(model.parameters())
    updates: list[list[float]] = []

    def script(daemon: FakeDaemon) -> None:
        daemon.start(overlap_steps=overlap_steps, step_limit=2)
        for number in (1, 2):
            daemon.open_round(number, at_step=2, step_limit=4)
            daemon.hear_posted()
            updates.append(daemon.posted.values(0).tolist())
            if number == 1:
                daemon.load(step=0, step_limit=4, spoilt=True)
        daemon.load(step=3, finished=True)

    states: list[bool] = []
    with talking(script) as path, attach(model, optimizer, socket_path=path) as run:
        while not run.finished:
            model.weight.grad = torch.ones_like(model.weight)
            if not states:
                spoilt = model.weight.grad if place == "weight" else model.get_buffer("scale")
                spoilt.fill_(math.nan)
            optimizer.step()
            run.step()
            if run.global_step == 0:
                states.append(bool(optimizer.state))
    assert not all(map(math.isfinite, updates[0]))
    assert all(map(math.isfinite, updates[1])), updates[1]
    assert states == [False], "its moments may be not finite either"
    assert all(bool(tensor.isfinite().all()) for tensor in model.state_dict().values())


def test_losses_may_be_anything_where_the_spec_says_so() -> None:
    with talking(FakeDaemon.start, stay=True) as path, attach(line(), socket_path=path) as run:
        for _step in range(100):
            run.step(loss=math.nan)
        assert run.global_step == 100


# ---------------------------------------------------------------- the master is away


def test_an_extended_step_limit_ends_the_wait_at_the_old_one() -> None:
    model = line()

    def script(daemon: FakeDaemon) -> None:
        daemon.start(step_limit=5)
        daemon.say(m.ExtendStepLimit(12))
        settled(lambda: daemon.posted.slots[STEP_SLOT] == 12)
        assert daemon.hears_nothing(), "it waits there"
        posted = daemon.post_round(1, at_step=5, step_limit=10)
        assert (posted.step, posted.tokens) == (12, 12)
        daemon.commit(1, daemon.shared.values(0) + 100, step=5, step_limit=10)
        # It is past that; the next round comes at once and wants something to have been trained.
        second = daemon.post_round(2, at_step=10, step_limit=15)
        assert (second.step, second.tokens) == (13, 1)
        daemon.load(step=second.step, finished=True)

    with talking(script) as path, attach(model, socket_path=path) as run:
        train(run, model)


@pytest.mark.parametrize("overlap_steps", [0, 2])
@pytest.mark.parametrize("committed", [True, False])
def test_a_round_whose_end_the_master_owes_is_not_waited_for_and_counted_once(
    overlap_steps: int, committed: bool
) -> None:
    model = line()
    trained: list[float] = []

    def script(daemon: FakeDaemon) -> None:
        daemon.start(overlap_steps=overlap_steps, step_limit=20)
        posted = daemon.post_round(1, at_step=5, step_limit=10)
        assert daemon.posted.values(0).tolist() == [-posted.tokens] * 3
        daemon.say(m.ExtendStepLimit(m.COUNT_MAX))
        settled(lambda: daemon.posted.slots[STEP_SLOT] >= 40)  # it trains on
        # The run made something else of it: 100 in place of what was posted.
        if committed:
            daemon.share(0, 1, daemon.shared.values(0) + 100)
        daemon.end_round(1, committed=committed, step=5, step_limit=10)
        if not committed:  # nothing came of it, and the master may still be away
            heard = daemon.posted.slots[STEP_SLOT] + 2000
            settled(lambda: daemon.posted.slots[STEP_SLOT] >= heard)
        second = daemon.post_round(2, at_step=10, step_limit=10_000_000)
        # What was trained since is there, once, whatever became of the round.
        since = second.tokens
        assert since == second.step - (posted.step if committed else 0)
        assert daemon.posted.values(0).tolist() == [-since] * 3
        trained.append(100.0 * committed + since)
        daemon.say(m.Load(second.step, m.COUNT_MAX, True))

    with talking(script) as path, attach(model, socket_path=path) as run:
        train(run, model)
    assert trained


def test_waiting_and_stepping_are_timed_apart() -> None:
    seen: list[list[float]] = []

    def script(daemon: FakeDaemon) -> None:
        daemon.start(step_limit=3)
        assert daemon.hears_nothing(0.3)
        daemon.load(step=3, step_limit=10)
        assert daemon.hears_nothing(0.1)
        seen.append(daemon.posted.seconds.tolist())
        assert daemon.posted.slots[WAITING_SLOT] > 0, "it waits"
        daemon.load(finished=True)

    with talking(script) as path, attach(line(), socket_path=path) as run:
        train(run)
    waited_s, stepped_s = seen[0]
    assert waited_s >= 0.25
    assert 0.0 < stepped_s < 5.0
