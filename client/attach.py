"""``attach``: how a training script joins the run that its process was started for."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Sequence

import torch
from torch import nn

from .attach_errors import MisuseError, ModelError, NoDaemonError
from .callbacks import Callback
from .daemon_connection import DaemonConnection
from .data.first_batches import FirstBatches
from .hook import Run
from .ranks import part_of
from .standalone import STANDALONE_VARIABLE, StandaloneRun, steps_from_environment
from .state.trained_parameters import TrainedParameters

SOCKET_VARIABLE = "HOLDFAST_SOCKET"  # set by the daemon: the path of its Unix socket


def attach(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    socket_path: str | None = None,
    callbacks: Sequence[Callback] = (),
    standalone: bool = False,
    total_steps: int | None = None,
    data_rank: int | None = None,
    whole: nn.Module | None = None,
) -> Run:
    """Join the run that this process was started for; returns with the run's weights in the model.

    Every parameter and persistent buffer becomes part of the run's shared state. Gradients and the
    optimizer's state stay local. They are not touched, with three exceptions. A state that an
    optimizer without one gathered in dropped steps is cleared (a spare takes a step, to be warm
    when its turn comes). So is the state behind losses, or an update, that are not finite. Known
    copies of the weights in it (``inner_optimizer``) take over the weights of each round.

    A script of several processes (``torchrun``) calls ``attach`` in each of them, after
    ``torch.distributed.init_process_group`` and after the model is sharded, and ``Run.step`` as
    often in each. They are one peer.

    Args:
      model: on any device, in float32, float64, bfloat16 or float16; may be wrapped by
        DistributedDataParallel or torch.compile, or sharded (``fully_shard``,
        ``parallelize_module``).
      optimizer: the inner optimizer; one that has a state of this run already needs no ramp of its
        rate (``Run.rate_scale``).
      socket_path: of the daemon; by default the environment variable ``HOLDFAST_SOCKET``.
      callbacks: called at steps, merges, logged figures and the end: ``TensorBoard``, ``Wandb``, or
        the script's own ``Callback``.
      standalone: run alone on this machine, without a daemon; so does the environment variable
        ``HOLDFAST_STANDALONE=1``. A script that a daemon started joins its run.
      total_steps: the step at which a standalone run is finished; by default the environment
        variable ``HOLDFAST_STANDALONE_STEPS``, else it has no end.
      data_rank: of several processes, the same number for those that train on the same samples;
        tokens count once for each. By default those of a tensor parallel mesh, without FSDP2, do,
        and the stages of a pipeline.
      whole: for a pipeline, whose processes hold different tensors: ``model`` is this process's
        stage, and this the whole model, of which only names, shapes, dtypes and ties are read. It
        may be on the meta device. The stage's tensors have the names that they have in it.

    Raises:
      NoDaemonError: the script was not started by ``holdfast join``.
      AttachRefused: the run does not take this model; the text gives the reason.
      ModelError: a tensor cannot be shared, or the optimizer trains other tensors; or ``model`` is
        no stage of ``whole``.
      DaemonGone: the daemon ended meanwhile.
      TypeError: ``model`` or ``whole`` is no module, or ``optimizer`` no optimizer.
    """
    _check_types(model, optimizer)
    if whole is not None and not isinstance(whole, nn.Module):
        raise TypeError(f"whole must be a torch.nn.Module, got {type(whole).__name__}")
    path = socket_path or os.environ.get(SOCKET_VARIABLE)
    if path:
        trained = TrainedParameters(model, optimizer, whole)
        part = part_of(model, trained.tensors, data_rank, stage=whole is not None)
        connection, batches = DaemonConnection.open(path), FirstBatches(model)
        return Run(connection, trained, time.monotonic, callbacks, part, path, batches)
    if standalone or os.environ.get(STANDALONE_VARIABLE, "0") not in ("", "0"):
        if total_steps is None:
            total_steps = steps_from_environment()
        return StandaloneRun(TrainedParameters(model, optimizer, whole), callbacks, total_steps)
    raise NoDaemonError(
        "this process has no holdfast daemon",
        hint=(
            "start the script with `holdfast join INVITE -- python train.py`, or, to try it alone,"
            f" with {STANDALONE_VARIABLE}=1; the daemon's address is in the environment, which"
            " scripts must keep"
        ),
    )


def _check_types(model: object, optimizer: object) -> None:
    if isinstance(model, torch.optim.Optimizer) and isinstance(optimizer, nn.Module):
        raise TypeError("attach takes the model first, then the optimizer: they are swapped")
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise MisuseError(
            "holdfast.attach was called by a worker process, which imports the script as it starts",
            hint='put all that the script does under `if __name__ == "__main__":`',
        )
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(
            f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}"
        )
    if any(isinstance(each, torch.jit.ScriptModule) for each in model.modules()):
        raise ModelError(
            "the model is scripted, and its parameters cannot be reached",
            hint="attach the module that torch.jit.script was given, and train that one",
        )
