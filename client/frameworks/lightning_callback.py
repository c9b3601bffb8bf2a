"""A callback of Lightning's ``Trainer``.

Trainer                                        run
on_fit_start         -                         attach: weights, before data are loaded
on_train_start       no end of its own         step, schedule
on_train_epoch_start leased samples            Run.sampler
on_train_batch_end   after an optimizer step   Run.step; validation and saving by the leader; the
                     end
on_validation_end    figures                   Run.log
teardown             -                         close
"""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import Callback as PluginBase
from lightning.pytorch import LightningModule, Trainer

from ...protocol.messages import METRICS_MAX
from ..attach_errors import MisuseError
from .optimizer_steps import (
    OptimizerSteps,
    TrainerPlugin,
    follow_step,
    join_run,
)
from .peer_data import draw_leased, is_leased


class LightningCallback(TrainerPlugin, PluginBase):  # type: ignore[misc]
    """Makes a ``lightning.pytorch.Trainer`` take part in a run::

        trainer = Trainer(max_steps=8000, callbacks=[LightningCallback()])
        trainer.fit(module, loader)

    The run decides how long it trains, whatever ``max_steps`` and ``max_epochs`` are.
    ``trainer.global_step`` and schedules with ``interval="step"`` follow the run's steps, and the
    leader alone validates and writes checkpoints. Weights of a checkpoint given as ``ckpt_path``
    are replaced by the run's.

    Args:
      leased: the run shares out the samples of the training loader's data set, see ``Run.sampler``.
      trained_only: share the parameters that require a gradient and nothing else, as for LoRA.
      tokens: counts what the loss of a batch averages over; by default labels or tokens of a
        mapping as Transformers names them, else samples.
      callbacks: of the run, as ``attach`` takes them.
    """

    BEGINS = "trainer.fit()"
    _seen_step = 0  # the trainer's, at the last report
    _scale = 0.0  # of gradients in float16
    _validated: Any = 1.0  # the script's ``limit_val_batches``

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Attach before there are data, with the weights of the trainer's checkpoint loaded."""
        if not pl_module.automatic_optimization or len(trainer.optimizers) != 1:
            raise MisuseError(
                "LightningCallback needs automatic optimization with one optimizer",
                hint="call holdfast.attach and run.step in the module itself",
            )
        (optimizer,) = trainer.optimizers
        self._run = join_run(
            pl_module,
            optimizer,
            self._callbacks,
            trained_only=self._trained_only,
            alone_steps=trainer.max_steps if trainer.max_steps > 0 else None,
        )
        self._steps = OptimizerSteps(self._run, optimizer)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Go to the run's step, whatever a checkpoint said; the run decides the end."""
        loop = trainer.fit_loop
        loop.min_epochs, loop.max_epochs = 0, -1
        loop.epoch_loop.min_steps, loop.epoch_loop.max_steps = None, -1
        self._validated = trainer.limit_val_batches
        self._scale = self._gradient_scale(trainer)
        self._follow(trainer)
        self._save_as_leader(trainer)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Lease samples, if the trainer has made its loader since the last epoch."""
        loader = trainer.train_dataloader
        if self._leased and not is_leased(loader):
            assert self._steps is not None
            self._steps.batch_samples = draw_leased(loader, self.run, trainer.world_size)
            iter(trainer.fit_loop._data_fetcher)  # in place of the iterator that it has made of it

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Report the optimizer step, if this micro-batch ended one."""
        assert self._steps is not None
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        self._steps.add(loss, self._count(batch), divided=True)
        if trainer.global_step == self._seen_step:
            return
        scale = self._gradient_scale(trainer)
        skipped, self._scale = scale < self._scale, scale
        self._steps.finish(skipped=skipped)
        self._follow(trainer)
        if self.run.finished:
            trainer.should_stop = True

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Report what was measured."""
        if not trainer.sanity_checking and self._run is not None:
            figures = {name: float(value) for name, value in trainer.callback_metrics.items()}
            self._run.log(**dict(list(figures.items())[:METRICS_MAX]))

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Leave the run."""
        if self._run is not None:
            self._run.close()

    # ------------------------------------------------------------ parts

    def _follow(self, trainer: Trainer) -> None:
        step = self._seen_step = self.run.global_step
        loop = trainer.fit_loop.epoch_loop
        progress = loop.automatic_optimization.optim_progress.optimizer.step.total
        progress.ready = progress.completed = step
        # The step of loggers, which counts this one next.
        loop._batches_that_stepped = max(step - 1, 0)
        for config in trainer.lr_scheduler_configs:
            if config.interval == "step":
                follow_step(config.scheduler, step // config.frequency)
        trainer.limit_val_batches = self._validated if self.run.is_leader else 0

    def _save_as_leader(self, trainer: Trainer) -> None:
        """Make the trainer write other callbacks' checkpoints only while this peer leads."""
        save = trainer.save_checkpoint

        def save_if_leader(*arguments: Any, **options: Any) -> None:
            if self.run.is_leader:
                save(*arguments, **options)

        trainer.save_checkpoint = save_if_leader

    @staticmethod
    def _gradient_scale(trainer: Trainer) -> float:
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        return float(scaler.get_scale()) if isinstance(scaler, torch.amp.GradScaler) else 0.0
