"""Parts of all adapters: one ``Run.step`` for an optimizer step of several micro-batches, and
schedules that follow the run's step.

    framework, for each micro-batch --> OptimizerSteps.add(loss, tokens)
    framework, after optimizer.step --> OptimizerSteps.finish() --> Run.step, once
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau

from ..attach import attach
from ..attach_errors import MisuseError
from ..callbacks import Callback
from ..hook import Run
from ..standalone import steps_from_environment

IGNORED_LABEL = -100  # of a token that the loss leaves out; Transformers and torch agree on it

# The steps that a framework is told to train for: it must not end before the run does. Small enough
# for Transformers' Trainer, which counts the steps that an iterable data set does not have one by
# one.
STEPS_MAX = 10_000_000


class OptimizerSteps:
    """Makes one inner step of a run of the micro-batches of an optimizer step.

    Args:
      optimizer: torch's own; its rate is multiplied by ``Run.rate_scale`` within each of its steps.

    Attributes:
      batch_samples: leased samples of a micro-batch; None: this trainer chooses its samples itself.
    """

    def __init__(self, run: Run, optimizer: torch.optim.Optimizer) -> None:
        self.batch_samples: int | None = None
        self._run = run
        self._batches = 0  # micro-batches that were added since the last step
        self._losses: list[tuple[float | torch.Tensor, int | torch.Tensor | None]] = []
        self._tokens: int | torch.Tensor = 0
        self._sum, self._count = 0.0, 0  # of the losses of finished steps
        self._rates: list[Any] = []  # of the groups, while a step of the optimizer runs
        optimizer.register_step_pre_hook(self._scale_rates)
        optimizer.register_step_post_hook(self._restore_rates)

    def add(
        self, loss: float | torch.Tensor | None, tokens: int | torch.Tensor, *, divided: bool
    ) -> None:
        """Add a micro-batch.

        Args:
          loss: a mean over this micro-batch, or, if ``divided``, its part of the whole step's mean.
          tokens: that the loss averages over.
        """
        if loss is not None:
            loss = loss.detach() if isinstance(loss, torch.Tensor) else loss
            self._losses.append((loss, None if divided else tokens))
        self._tokens = self._tokens + tokens
        self._batches += 1

    def finish(
        self, *, skipped: bool = False, loss: float | None = None, batches: int | None = None
    ) -> None:
        """Report the optimizer step to the run; may wait, and change weights.

        Args:
          skipped: the optimizer left its step out because a gradient was infinite.
          loss: of the step, if its micro-batches had none.
          batches: micro-batches of the step; None: as many as were added.
        """
        batches = self._batches if batches is None else batches
        samples = None if self.batch_samples is None else batches * self.batch_samples
        tokens = int(self._tokens)
        if self._losses:
            loss = float(
                sum(
                    part if weight is None else part * weight / max(tokens, 1)
                    for part, weight in self._losses
                )
            )
            self._sum, self._count = self._sum + loss, self._count + 1
        self._losses, self._tokens, self._batches = [], 0, 0
        self._run.step(loss=loss, tokens=0 if skipped else tokens, samples=samples)

    @property
    def losses(self) -> tuple[float, int]:
        """The sum of the losses of all finished steps, and how many had one."""
        return self._sum, self._count

    def _scale_rates(self, optimizer: torch.optim.Optimizer, *_arguments: object) -> None:
        scale = self._run.rate_scale
        if scale != 1.0:
            self._rates = [group["lr"] for group in optimizer.param_groups]
            for group in optimizer.param_groups:
                group["lr"] = group["lr"] * scale

    def _restore_rates(self, optimizer: torch.optim.Optimizer, *_arguments: object) -> None:
        for group, rate in zip(optimizer.param_groups, self._rates, strict=False):
            group["lr"] = rate
        self._rates = []


def join_run(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    callbacks: Sequence[Callback],
    *,
    trained_only: bool,
    alone_steps: int | None,
) -> Run:
    """Attach a framework's model.

    Args:
      trained_only: share the parameters that require a gradient, and nothing else (LoRA).
      alone_steps: the end of a standalone run, if the environment gives none.
    """
    shared = model
    if trained_only:
        trained = {name: each for name, each in model.named_parameters() if each.requires_grad}
        # A ParameterDict takes no dots.
        shared = nn.ParameterDict({name.replace(".", "/"): each for name, each in trained.items()})
    run = attach(
        shared,
        optimizer,
        callbacks=callbacks,
        total_steps=steps_from_environment() or alone_steps,
    )
    # Shuffling without a generator, workers and dropout draw from the global one. Scripts seed it
    # for equal first weights, and would train all peers on the same samples.
    torch.manual_seed(run.generator().initial_seed())
    return run


def plain_optimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return the optimizer that Accelerate has wrapped."""
    inner = getattr(optimizer, "optimizer", optimizer)
    assert isinstance(inner, torch.optim.Optimizer)
    return inner


def follow_step(scheduler: object, step: int) -> None:
    """Move a schedule to a step of the run, at which it already is unless this process began later.

    A ``LambdaLR`` goes to any step, others forwards only. ``ReduceLROnPlateau`` has no steps.
    """
    schedule = getattr(scheduler, "scheduler", scheduler)  # Accelerate wraps it
    if isinstance(schedule, ReduceLROnPlateau) or not isinstance(schedule, LRScheduler):
        return
    if schedule.last_epoch == step:
        return
    with warnings.catch_warnings():  # that the optimizer has made no step yet is true and no fault
        warnings.simplefilter("ignore", UserWarning)
        if isinstance(schedule, LambdaLR):
            schedule.last_epoch = step - 1
            schedule.step()
        while schedule.last_epoch < step:
            schedule.step()


def count_tokens(batch: object) -> int | torch.Tensor:
    """Count what a batch's loss averages over: labels, else tokens, else samples."""
    if isinstance(batch, Mapping):
        labels, ids = batch.get("labels"), batch.get("input_ids")
        if isinstance(labels, torch.Tensor) and labels.dim() > 1 and not labels.is_floating_point():
            return (labels != IGNORED_LABEL).sum()
        if isinstance(ids, torch.Tensor):
            return ids.numel()
        batch = tuple(batch.values())
    if isinstance(batch, torch.Tensor):
        return batch.shape[0] if batch.dim() else 1
    if isinstance(batch, Sequence) and not isinstance(batch, str):
        for each in batch:
            if isinstance(each, torch.Tensor | Mapping | Sequence) and not isinstance(each, str):
                return count_tokens(each)
    return 1


Counter = Callable[[Any], int | torch.Tensor]


class TrainerPlugin:
    """The settings of a callback of a trainer, and its run.

    Attributes:
      BEGINS: the trainer's method that attaches.
    """

    BEGINS = ""
    _run: Run | None = None
    _steps: OptimizerSteps | None = None

    def __init__(
        self,
        *,
        leased: bool = False,
        trained_only: bool = False,
        tokens: Counter = count_tokens,
        callbacks: Sequence[Callback] = (),
    ) -> None:
        self._leased = leased
        self._trained_only = trained_only
        self._count = tokens
        self._callbacks = callbacks

    @property
    def run(self) -> Run:
        """The run, once training has begun.

        Raises:
          MisuseError: it has not begun.
        """
        if self._run is None:
            raise MisuseError(
                "the trainer has not attached to a run yet",
                hint=f"use the callback's run after {self.BEGINS} has begun",
            )
        return self._run
