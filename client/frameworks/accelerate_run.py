"""A run for training loops of Accelerate, which have no callbacks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from accelerate import Accelerator
from torch import nn

from ..callbacks import Callback
from ..hook import Run
from .optimizer_steps import OptimizerSteps, follow_step, join_run, plain_optimizer
from .peer_data import draw_apart, draw_leased


class AccelerateRun:
    """Makes a loop of Accelerate take part in a run::

        model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
        run = AccelerateRun(accelerator, model, optimizer, schedule, loader)
        while not run.finished:
            for batch in loader:
                with accelerator.accumulate(model):
                    ...
                    optimizer.step(); schedule.step(); optimizer.zero_grad()
                run.step(loss, tokens=n)
                if run.finished:
                    break
        run.close()

    Make it after ``accelerator.load_state``: the run's weights replace the checkpoint's.

    Args:
      model, optimizer, schedule, loader: as ``accelerator.prepare`` returned them. The schedule
        follows the run's step, the loader draws other samples than those of other peers; leave out
        what there is none of.
      leased: the run shares out the samples of the loader's data set, see ``Run.sampler``. ``for
        batch in loader`` then has no end of its own.
      trained_only: share the parameters that require a gradient and nothing else, as for LoRA.
      callbacks, total_steps: as ``attach`` takes them.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        schedule: object = None,
        loader: object = None,
        *,
        leased: bool = False,
        trained_only: bool = False,
        callbacks: Sequence[Callback] = (),
        total_steps: int | None = None,
    ) -> None:
        inner = plain_optimizer(optimizer)
        self._accelerator = accelerator
        self._schedule = schedule
        # It steps a schedule once for each process, unless they divide each batch.
        self._rate = 1 if accelerator.split_batches else accelerator.num_processes
        self.run: Run = join_run(
            model, inner, callbacks, trained_only=trained_only, alone_steps=total_steps
        )
        self._steps = OptimizerSteps(self.run, inner)
        if leased:
            count = accelerator.num_processes
            self._steps.batch_samples = draw_leased(loader, self.run, count)
        else:
            draw_apart(loader, self.run)
        self._follow()

    @property
    def finished(self) -> bool:
        """The run is over and the model holds its final weights; leave the loop."""
        return self.run.finished

    @property
    def is_leader(self) -> bool:
        """This peer, and of its processes this one, evaluates and saves for the run."""
        return bool(self.run.is_leader and self._accelerator.is_main_process)

    @property
    def global_step(self) -> int:
        """Optimizer steps of the run, not of this process."""
        return self.run.global_step

    def step(self, loss: torch.Tensor | float, *, tokens: int = 1) -> None:
        """Report a micro-batch as done; call it after each, below the ``accumulate`` block.

        The micro-batch at which Accelerate steps the optimizer makes ``Run.step``, which may wait.

        Args:
          loss: the mean over the micro-batch, as it was given to ``accelerator.backward``.
          tokens: that it averages over.
        """
        self._steps.add(loss, tokens, divided=False)
        if self._accelerator.sync_gradients:
            self._steps.finish(skipped=bool(self._accelerator.optimizer_step_was_skipped))
            self._follow()

    def close(self) -> None:
        """Leave the run; the model keeps its weights. Harmless twice."""
        self.run.close()

    def _follow(self) -> None:
        follow_step(self._schedule, self.run.global_step * self._rate)
