"""What a trainer tells to others than the daemon: TensorBoard, Weights & Biases, or code of the script's.

    Run.step --Step--> Watch --on_step, on_merge, on_log, on_end--> each Callback, on the script's thread

Nothing here imports what it writes to: the script makes the writer, as it would without holdfast, and
gives it to the callback. What a callback raises comes out of ``Run.step``, as the script's own errors do.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Protocol

from attrs import frozen

EVERY_STEPS = (
    10  # between two points of a curve; a point is the mean of the steps since the last one
)


@frozen
class StepDone:
    """One inner step that is done.

    Attributes:
      step: of the run, not of this process.
      loss: as the script said it; None: it did not.
      tokens: trained on in this step.
      step_s: since the last step, without waiting for the run.
      waited_s: for the run, at this step's end.
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
      version: of the fragment, after it.
      contributed: our own update is in it.
      round_count: rounds merged by this process so far, this one included.
    """

    step: int
    round: int
    fragment: int
    version: int
    contributed: bool
    round_count: int


class Callback:
    """What a training script may want to hear of; override what is of use."""

    def on_step(self, step: StepDone) -> None:
        """After every ``Run.step``; quick, please."""

    def on_merge(self, merge: Merge) -> None:
        """Within ``Run.step``, when the model has got a round's result."""

    def on_log(self, step: int, values: Mapping[str, float]) -> None:
        """The script has called ``Run.log``."""

    def on_end(self) -> None:
        """The run is left; last."""


class CallbackRunner:
    """Tells all callbacks of a run."""

    def __init__(self, callbacks: Sequence[Callback], now_s: float) -> None:
        self._callbacks = tuple(callbacks)
        self._last_s = now_s
        self._waited_s = 0.0
        self._over = False

    def begin(self, now_s: float, waited_s: float) -> None:
        """Attached: what comes now is the first step's time."""
        self._last_s, self._waited_s = now_s, waited_s

    def stepped(
        self, step: int, loss: float | None, tokens: int, now_s: float, waited_s: float
    ) -> None:
        """A step is done; ``waited_s`` is the sum over all steps."""
        waited = waited_s - self._waited_s
        told = StepDone(step, loss, tokens, now_s - self._last_s - waited, waited)
        self._last_s, self._waited_s = now_s, waited_s
        for callback in self._callbacks:
            callback.on_step(told)

    def merged(self, merge: Merge) -> None:
        for callback in self._callbacks:
            callback.on_merge(merge)

    def logged(self, step: int, values: Mapping[str, float]) -> None:
        for callback in self._callbacks:
            callback.on_log(step, values)

    def end(self) -> None:
        """Harmless twice."""
        if not self._over:
            self._over = True
            for callback in self._callbacks:
                callback.on_end()


# ---------------------------------------------------------------- curves


class Curves(Callback):
    """Figures by the run's step, a point every few steps; whoever inherits says where they go.

    Args:
      every: so many steps make a point.
    """

    def __init__(self, *, every: int = EVERY_STEPS) -> None:
        if every < 1:
            raise ValueError(f"every {every} steps makes no sense: it must be 1 or more")
        self._every = every
        self._tokens = 0  # since the process began
        self._steps: list[StepDone] = []

    def put(self, step: int, figures: Mapping[str, float]) -> None:
        """Write these down, by name."""
        raise NotImplementedError

    def on_step(self, step: StepDone) -> None:
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
    """As much of ``torch.utils.tensorboard.SummaryWriter``, and of tensorboardX's, as is needed."""

    def add_scalar(
        self, tag: str, scalar_value: float, global_step: int | None = None, /
    ) -> object: ...

    def flush(self) -> object: ...


class TensorBoard(Curves):
    """Curves for TensorBoard::

        writer = SummaryWriter("runs/alder")  # of torch.utils.tensorboard, or tensorboardX
        run = holdfast.attach(model, optimizer, callbacks=[holdfast.TensorBoard(writer)])

    The writer stays the script's: it is flushed at the end, not closed. A trainer that is started
    again writes on in the same folder.
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
    """As much of what ``wandb.init`` returns as is needed."""

    def log(self, data: dict[str, float], /) -> object: ...

    def define_metric(self, name: str, /, *, step_metric: str) -> object: ...


class Wandb(Curves):
    """Curves for Weights & Biases::

        experiment = wandb.init(project="many-machines", name=socket.gethostname())
        run = holdfast.attach(model, optimizer, callbacks=[holdfast.Wandb(experiment)])

    They are drawn by ``holdfast/step``, the run's step, so that curves of several machines lie over
    each other; wandb's own step, which may only grow by what one process logs, stays the script's.
    The experiment does, too: whoever began it finishes it.
    """

    def __init__(self, experiment: WandbRun, *, every: int = EVERY_STEPS) -> None:
        super().__init__(every=every)
        self._experiment = experiment
        experiment.define_metric("holdfast/*", step_metric="holdfast/step")

    def put(self, step: int, figures: Mapping[str, float]) -> None:
        self._experiment.log({"holdfast/step": float(step), **figures})
