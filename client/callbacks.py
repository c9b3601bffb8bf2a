"""Callbacks of a run: TensorBoard, Weights & Biases, or the script's own.

    Run.step --> CallbackRunner --on_step, on_merge, on_log, on_end--> each Callback, on the
    script's thread

Nothing here imports TensorBoard or wandb: the script makes the writer, as it would without
holdfast, and gives it to the callback. An exception of a callback propagates from ``Run.step``, as
the script's own do.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Protocol

from attrs import frozen

EVERY_STEPS = 10  # per point of a curve, which is the mean over these steps


@frozen
class Step:
    """One finished inner step.

    Attributes:
      step: the run's global step, not this process's.
      loss: as the script gave it, if it did.
      tokens: trained on in this step.
      step_s: seconds since the last step, without waiting for the run.
      waited_s: seconds of waiting for the run, at this step's end.
    """

    step: int
    loss: float | None
    tokens: int
    step_s: float
    waited_s: float


@frozen
class Merge:
    """A committed round whose result is in the model now.

    Attributes:
      version: the fragment's, after the round.
      contributed: this peer's update is in the result.
      round_count: rounds merged by this process so far, this one included.
    """

    step: int
    round: int
    fragment: int
    version: int
    contributed: bool
    round_count: int


class Callback:
    """Base class of callbacks; override the methods that you need."""

    def on_step(self, step: Step) -> None:
        """Called after every ``Run.step``; must be quick."""

    def on_merge(self, merge: Merge) -> None:
        """Called within ``Run.step``, when the model has got a round's result."""

    def on_log(self, step: int, values: Mapping[str, float]) -> None:
        """Called when the script has called ``Run.log``."""

    def on_end(self) -> None:
        """Called last, when the script leaves the run."""


class CallbackRunner:
    """Calls all callbacks of a run."""

    def __init__(self, callbacks: Sequence[Callback], now_s: float) -> None:
        self._callbacks = tuple(callbacks)
        self._last_s = now_s
        self._waited_s = 0.0
        self._over = False

    def begin(self, now_s: float, waited_s: float) -> None:
        """Start the first step's time, once attached."""
        self._last_s, self._waited_s = now_s, waited_s

    def stepped(
        self, step: int, loss: float | None, tokens: int, now_s: float, waited_s: float
    ) -> None:
        """Report a finished step; ``waited_s`` is the sum over all steps."""
        waited = waited_s - self._waited_s
        done = Step(step, loss, tokens, now_s - self._last_s - waited, waited)
        self._last_s, self._waited_s = now_s, waited_s
        for callback in self._callbacks:
            callback.on_step(done)

    def merged(self, merge: Merge) -> None:
        for callback in self._callbacks:
            callback.on_merge(merge)

    def logged(self, step: int, values: Mapping[str, float]) -> None:
        for callback in self._callbacks:
            callback.on_log(step, values)

    def end(self) -> None:
        """Report the end of the run. Harmless twice."""
        if not self._over:
            self._over = True
            for callback in self._callbacks:
                callback.on_end()


# ---------------------------------------------------------------- curves


class Curves(Callback):
    """Figures by the run's step, a point every few steps; a subclass writes them.

    Args:
      every: steps per point.
    """

    def __init__(self, *, every: int = EVERY_STEPS) -> None:
        if every < 1:
            raise ValueError(f"every {every} steps makes no sense: it must be 1 or more")
        self._every = every
        self._tokens = 0  # since the process began
        self._steps: list[Step] = []

    def put(self, step: int, figures: Mapping[str, float]) -> None:
        """Write figures, by name."""
        raise NotImplementedError

    def on_step(self, step: Step) -> None:
        self._tokens += step.tokens
        self._steps.append(step)
        if len(self._steps) >= self._every:
            self._point()

    def _point(self) -> None:
        steps, self._steps = self._steps, []
        took_s = sum(each.step_s for each in steps)
        whole_s = took_s + sum(each.waited_s for each in steps)
        losses = [s.loss for s in steps if s.loss is not None and math.isfinite(s.loss)]
        figures = {
            "holdfast/tokens": float(self._tokens),
            "holdfast/step_s": took_s / len(steps),
            "holdfast/waited_s": whole_s - took_s,
        }
        if losses:
            figures["holdfast/loss"] = sum(losses) / len(losses)
        if whole_s > 0:
            figures["holdfast/tokens_per_s"] = sum(each.tokens for each in steps) / whole_s
        self.put(steps[-1].step, figures)

    def on_merge(self, merge: Merge) -> None:
        figures = {
            "holdfast/rounds": float(merge.round_count),
            f"holdfast/fragment_{merge.fragment}/version": float(merge.version),
            f"holdfast/fragment_{merge.fragment}/contributed": float(merge.contributed),
        }
        self.put(merge.step, figures)

    def on_log(self, step: int, values: Mapping[str, float]) -> None:
        self.put(step, values)

    def on_end(self) -> None:
        if self._steps:
            self._point()


class SummaryWriter(Protocol):
    """The used part of the ``SummaryWriter`` of ``torch.utils.tensorboard`` and of tensorboardX."""

    def add_scalar(
        self, tag: str, scalar_value: float, global_step: int | None = None, /
    ) -> object: ...

    def flush(self) -> object: ...


class TensorBoard(Curves):
    """Curves for TensorBoard::

        writer = SummaryWriter("runs/alder")  # of torch.utils.tensorboard, or tensorboardX
        run = holdfast.attach(model, optimizer, callbacks=[holdfast.TensorBoard(writer)])

    The writer belongs to the script: it is flushed at the end, not closed. A restarted trainer goes
    on writing to the same folder.
    """

    def __init__(self, writer: SummaryWriter, *, every: int = EVERY_STEPS) -> None:
        super().__init__(every=every)
        self._writer = writer

    def put(self, step: int, figures: Mapping[str, float]) -> None:
        for name, value in figures.items():
            self._writer.add_scalar(name, value, step)

    def on_end(self) -> None:
        super().on_end()
        self._writer.flush()


class WandbRun(Protocol):
    """The used part of the object that ``wandb.init`` returns."""

    def log(self, data: dict[str, float], /) -> object: ...

    def define_metric(self, name: str, /, *, step_metric: str) -> object: ...


class Wandb(Curves):
    """Curves for Weights & Biases::

        experiment = wandb.init(project="many-machines", name=socket.gethostname())
        run = holdfast.attach(model, optimizer, callbacks=[holdfast.Wandb(experiment)])

    The x axis is ``holdfast/step``, the run's step, so that the curves of several machines lie over
    each other. wandb's own step, which counts one process's calls, is not used. The script finishes
    the experiment that it began.
    """

    def __init__(self, experiment: WandbRun, *, every: int = EVERY_STEPS) -> None:
        super().__init__(every=every)
        self._experiment = experiment
        experiment.define_metric("holdfast/*", step_metric="holdfast/step")

    def put(self, step: int, figures: Mapping[str, float]) -> None:
        self._experiment.log({"holdfast/step": float(step), **figures})
