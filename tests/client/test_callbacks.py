"""Callbacks of a run, and the curves in TensorBoard and Weights & Biases."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import tensorboardX
from tensorboardX.proto import event_pb2
from torch import nn

import holdfast
from holdfast.client.callbacks import Callback, Curves, Merge, Step
from holdfast.client.daemon_connection import DaemonConnection
from holdfast.client.hook import Run
from holdfast.client.state.trained_parameters import TrainedParameters
from holdfast.protocol.arena import WAITING_SLOT
from tests.client.fake_daemon import FakeDaemon, settled, talking


class Clock:
    """A clock that stands still until a test moves it."""

    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class Notes(Callback):
    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.merges: list[Merge] = []
        self.logs: list[tuple[int, Mapping[str, float]]] = []
        self.ends = 0

    def on_step(self, step: Step) -> None:
        self.steps.append(step)

    def on_merge(self, merge: Merge) -> None:
        self.merges.append(merge)

    def on_log(self, step: int, values: Mapping[str, float]) -> None:
        self.logs.append((step, values))

    def on_end(self) -> None:
        self.ends += 1


def joined(path: str, clock: Clock, *callbacks: Callback) -> Run:
    model = nn.Linear(3, 1, bias=False)
    return Run(DaemonConnection.open(path), TrainedParameters(model, None), clock, callbacks)


def test_steps_merges_figures_and_the_end_are_told() -> None:
    clock, notes = Clock(), Notes()

    def script(daemon: FakeDaemon) -> None:
        daemon.open_arenas()
        daemon.share(0, 7, None)
        daemon.load(step=40)
        daemon.open_round(5, 42)
        daemon.hear_posted()
        settled(lambda: bool(daemon.posted.slots[WAITING_SLOT]))
        daemon.hears_nothing()
        clock.now_s += 3.0
        daemon.commit(5, 0.0, step=42)

    with talking(script, stay=True) as path, joined(path, clock, notes) as run:
        clock.now_s += 0.5
        run.step(loss=2.0, tokens=10)
        clock.now_s += 0.25
        while not notes.merges:
            run.step(loss=1.0, tokens=20)
        run.log(accuracy=0.5, broken=math.nan)
    run.close()
    assert notes.steps[0] == Step(41, 2.0, 10, 0.5, 0.0)
    assert notes.steps[1].step == 42
    waiting = notes.steps[-1]
    assert (waiting.step_s, waiting.waited_s) == (0.25 * (len(notes.steps) == 2), 3.0)
    assert notes.merges == [Merge(waiting.step, 5, 0, 8, True, 1)]
    assert notes.logs == [(waiting.step, {"accuracy": 0.5})]
    assert notes.ends == 1


def test_what_a_callback_raises_comes_out_of_the_step() -> None:
    class Full(Callback):
        def on_step(self, step: Step) -> None:
            raise OSError("no space left")

    with talking(FakeDaemon.start, stay=True) as path:
        run = joined(path, Clock(), Full())
        with pytest.raises(OSError, match="no space left"):
            run.step()
        run.close()


class Points(Curves):
    def __init__(self, every: int) -> None:
        super().__init__(every=every)
        self.points: list[tuple[int, Mapping[str, float]]] = []

    def put(self, step: int, figures: Mapping[str, float]) -> None:
        self.points.append((step, figures))


def test_a_point_is_the_mean_of_its_steps() -> None:
    curves = Points(every=2)
    curves.on_step(Step(1, 2.0, 10, 0.5, 0.0))
    assert curves.points == []
    curves.on_step(Step(2, 4.0, 30, 1.5, 2.0))
    curves.on_step(Step(3, math.nan, 8, 4.0, 0.0))
    curves.on_end()
    first, last = curves.points
    assert first == (
        2,
        {
            "holdfast/tokens": 40.0,
            "holdfast/step_s": 1.0,
            "holdfast/waited_s": 2.0,
            "holdfast/loss": 3.0,
            "holdfast/tokens_per_s": 10.0,
        },
    )
    assert last[0] == 3
    assert last[1] == {
        "holdfast/tokens": 48.0,
        "holdfast/step_s": 4.0,
        "holdfast/waited_s": 0.0,
        "holdfast/tokens_per_s": 2.0,
    }, "a loss that is not finite is no point of a curve"
    with pytest.raises(ValueError, match="1 or more"):
        Points(every=0)


def tell(curves: Curves) -> None:
    for number in range(1, 5):
        curves.on_step(Step(number, 1.0 / number, 10, 0.1, 0.0))
    curves.on_merge(Merge(4, 2, 1, 3, True, 2))
    curves.on_log(4, {"accuracy": 0.5})
    curves.on_end()


def test_tensorboard_reads_what_was_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = tensorboardX.SummaryWriter(str(tmp_path))
    flushed: list[int] = []
    monkeypatch.setattr(writer, "flush", lambda: flushed.append(1))
    tell(holdfast.TensorBoard(writer, every=2))
    assert flushed == [1]
    writer.close()  # its thread writes on until then, whatever flush says
    (file,) = tmp_path.iterdir()
    data, found = file.read_bytes(), []
    while data:
        size = int.from_bytes(data[:8], "little")
        event = event_pb2.Event.FromString(data[12 : 12 + size])
        found += [(v.tag, event.step, round(v.simple_value, 6)) for v in event.summary.value]
        data = data[16 + size :]
    assert ("holdfast/loss", 2, 0.75) in found
    assert ("holdfast/rounds", 4, 2.0) in found
    assert ("holdfast/fragment_1/version", 4, 3.0) in found
    assert ("accuracy", 4, 0.5) in found


class Experiment:
    """The object of ``wandb.init``, as wandb's reference describes it.

    wandb itself brings a dozen packages along, so no test has it; 0.31 took what ``Wandb`` writes,
    offline.
    """

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []
        self.metrics: list[tuple[str, Any]] = []

    def log(self, data: dict[str, float], step: int | None = None) -> None:
        assert step is None, "wandb's own step is the script's"
        self.rows.append(data)

    def define_metric(self, name: str, step_metric: str | None = None) -> None:
        self.metrics.append((name, step_metric))


def test_wandb_gets_rows_with_the_runs_step() -> None:
    experiment = Experiment()
    tell(holdfast.Wandb(experiment, every=2))
    assert experiment.metrics == [("holdfast/*", "holdfast/step")]
    assert experiment.rows[0]["holdfast/step"] == 2.0
    assert experiment.rows[0]["holdfast/loss"] == 0.75
    assert experiment.rows[-1] == {"holdfast/step": 4.0, "accuracy": 0.5}
