"""A callback of Transformers' ``Trainer``, and of trainers made of it, such as ``SFTTrainer``.

Trainer                                     run
on_init_end    no end of its own            -
on_train_begin -                            attach: weights, step, schedule
forward hook   loss and tokens              -
on_step_end    after each optimizer step    Run.step; evaluation and saving by the leader; the end
on_log         figures                      Run.log
on_train_end   -                            close
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sized
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.hooks import RemovableHandle
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.optimization import get_scheduler

from ...protocol.messages import METRICS_MAX
from ..attach_errors import MisuseError
from .optimizer_steps import (
    STEPS_MAX,
    OptimizerSteps,
    TrainerPlugin,
    follow_step,
    join_run,
    plain_optimizer,
)
from .peer_data import draw_apart, draw_leased


class TransformersCallback(TrainerPlugin, TrainerCallback):  # type: ignore[misc]
    """Makes a ``Trainer`` take part in a run::

        trainer = Trainer(model, args, train_dataset=data, callbacks=[TransformersCallback()])
        trainer.train()

    The run decides how long it trains: ``max_steps`` and ``num_train_epochs`` only tell the
    schedule how long a run without an end is. Steps, evaluation, saving and the schedule follow the
    run's steps, and the leader alone evaluates and saves. Weights of a checkpoint that the
    ``Trainer`` resumes are replaced by the run's.

    Args:
      leased: the run shares out the samples of ``train_dataset``, see ``Run.sampler``.
      trained_only: share the parameters that require a gradient and nothing else, as for LoRA.
      tokens: counts what the loss of a model's keyword arguments averages over; by default the
        labels that are not -100, else the input's tokens, else samples.
      callbacks: of the run, as ``attach`` takes them.
    """

    BEGINS = "trainer.train()"
    _open = False
    _hook: RemovableHandle | None = None
    _own_steps: int | None = None  # as the script set ``max_steps``
    _schedule_given = False
    _first_step = 0
    _substeps = 0  # micro-batches of this optimizer step that were not its last
    _logged = (0.0, 0)  # ``OptimizerSteps.losses`` at the last log
    _logged_loss: float | None = None

    def on_init_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **parts: Any
    ) -> None:
        """Take the end out of the trainer's hands."""
        self._own_steps = args.max_steps
        self._schedule_given = parts.get("lr_scheduler") is not None
        args.max_steps = STEPS_MAX
        args.ignore_data_skip = True  # no machine goes on in the order of another one's samples

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **parts: Any
    ) -> None:
        """Attach, after the trainer has loaded a checkpoint of its own."""
        if self._own_steps is None:
            raise MisuseError(
                "the callback came after the trainer was made",
                hint="pass it as Trainer(..., callbacks=[...])",
            )
        self._leave()  # an earlier training of this trainer
        model, loader = parts["model"], parts.get("train_dataloader")
        optimizer = plain_optimizer(parts["optimizer"])
        own_length = self._own_length(args, loader)
        run = self._run = join_run(
            model,
            optimizer,
            self._callbacks,
            trained_only=self._trained_only,
            alone_steps=own_length,
        )
        self._open = True
        self._steps = OptimizerSteps(run, optimizer)
        self._hook = model.register_forward_hook(self._after_forward, with_kwargs=True)
        self._substeps = 0
        if self._leased:
            self._steps.batch_samples = draw_leased(loader, run, args.world_size)
        else:
            draw_apart(loader, run)
        length = run.total_steps or own_length
        if length is not None:
            state.compute_steps(args, length)  # intervals given as parts of the whole
            self._fit_schedule(args, parts["lr_scheduler"], optimizer, length)
        self._first_step = run.global_step
        self._follow(state, parts["lr_scheduler"])

    def on_substep_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **parts: Any
    ) -> None:
        """Count a micro-batch that others follow before the optimizer's step."""
        self._substeps += 1

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **parts: Any
    ) -> None:
        """Report the optimizer step; then everything goes by the run's step."""
        assert self._steps is not None
        skipped = bool(getattr(parts["optimizer"], "step_was_skipped", False))
        batches, self._substeps = self._substeps + 1, 0
        self._steps.finish(skipped=skipped, loss=self._logged_loss, batches=batches)
        self._follow(state, parts["lr_scheduler"])
        if self.run.finished:
            control.should_training_stop = True
            # Strategies by epoch follow at the epoch's end, which is now.
            control.should_evaluate |= args.eval_strategy == "steps"
            control.should_save |= args.save_strategy == "steps"
        self._leave_to_leader(control)

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **parts: Any
    ) -> None:
        """Leave what the end of an epoch brings to the leader."""
        self._leave_to_leader(control)

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **parts: Any
    ) -> None:
        """Report figures to the run, with means over this process's steps: the trainer divides by
        the run's.
        """
        logs = parts["logs"]
        if not self._open or self._steps is None:
            return
        (total, count), (before, count_before) = self._steps.losses, self._logged
        if "loss" in logs and count > count_before:
            self._logged = total, count
            logs["loss"] = (total - before) / (count - count_before)
        if "train_runtime" in logs:  # the trainer's summary
            self._correct_summary(args, logs)
        state.log_history[-1].update(logs)
        self._logged_loss = logs.get("loss", self._logged_loss)
        figures = {
            name: float(value)
            for name, value in logs.items()
            if isinstance(value, int | float) and name not in ("loss", "epoch", "total_flos")
        }
        self.run.log(**dict(list(figures.items())[:METRICS_MAX]))

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **parts: Any
    ) -> None:
        """Leave the run."""
        self._leave()

    # ------------------------------------------------------------ parts

    def _leave(self) -> None:
        if self._hook is not None:
            self._hook.remove()
        if self._run is not None:
            self._run.close()
        self._open = False

    def _own_length(self, args: TrainingArguments, loader: object) -> int | None:
        """Return the steps that the script asked for, or None if its data have no length."""
        if self._own_steps is not None and self._own_steps > 0:
            return self._own_steps
        try:
            batches = len(loader) if isinstance(loader, Sized) else 0
        except TypeError:
            batches = 0  # of an iterable data set
        steps = math.ceil(batches / args.gradient_accumulation_steps)
        return math.ceil(args.num_train_epochs * steps) or None

    def _fit_schedule(
        self,
        args: TrainingArguments,
        schedule: object,
        optimizer: torch.optim.Optimizer,
        length: int,
    ) -> None:
        """Stretch the schedule that the trainer made for its own length over the run's."""
        if self._schedule_given or not isinstance(schedule, LambdaLR):
            return
        made_by = {
            getattr(getattr(each, "func", each), "__module__", "") for each in schedule.lr_lambdas
        }
        if made_by != {get_scheduler.__module__}:
            return  # a subclass of the trainer made it
        fitted = get_scheduler(
            args.lr_scheduler_type,
            optimizer=optimizer,
            num_warmup_steps=args.get_warmup_steps(length),
            num_training_steps=length,
            scheduler_specific_kwargs=args.lr_scheduler_kwargs,
        )
        schedule.lr_lambdas = fitted.lr_lambdas
        schedule.last_epoch = -1  # so that the rate is computed again

    def _follow(self, state: TrainerState, schedule: object) -> None:
        run = self.run
        state.global_step = run.global_step
        # The trainer ends at ``max_steps``, and the run may repeat rounds.
        state.max_steps = max(run.total_steps or STEPS_MAX, run.global_step + 1)
        if run.finished:
            state.max_steps = run.global_step
        follow_step(schedule, run.global_step)

    def _correct_summary(self, args: TrainingArguments, logs: dict[str, float]) -> None:
        """Replace means over the run's steps, or over the most possible, by this process's."""
        steps = self.run.global_step - self._first_step
        samples = steps * args.train_batch_size * args.gradient_accumulation_steps * args.world_size
        logs["train_steps_per_second"] = round(steps / logs["train_runtime"], 3)
        logs["train_samples_per_second"] = round(samples / logs["train_runtime"], 3)
        if self._steps is not None and self._steps.losses[1]:
            logs["train_loss"] = self._steps.losses[0] / self._steps.losses[1]

    def _leave_to_leader(self, control: TrainerControl) -> None:
        if not self.run.is_leader:
            control.should_evaluate = control.should_save = False

    def _after_forward(
        self, model: nn.Module, _arguments: object, batch: dict[str, Any], output: object
    ) -> None:
        if not model.training or not torch.is_grad_enabled() or self._steps is None:
            return  # an evaluation, or a second look for figures
        loss = output.get("loss") if isinstance(output, Mapping) else None
        # With ``num_items_in_batch`` the model divides by what all micro-batches hold together.
        divided = batch.get("num_items_in_batch") is not None
        self._steps.add(loss, self._count(batch), divided=divided)
