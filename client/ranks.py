"""The ranks of a trainer: which part of the model this process holds, and its word with the daemon.

A trainer of several processes (``torchrun``) holds one model in parts, each as a ``DTensor``
(FSDP2, tensor parallel, HSDP), in stages (pipelines), or copies of it (DistributedDataParallel), or
all of these. Each rank declares its
parts as boxes of the unsharded tensors, and copies these boxes between its device and shared
memory: nothing is gathered. The daemon hands its messages to all ranks at one step
(``membership.peer.rank_gate``); here is a rank's side.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch import nn

from ..protocol import messages as m
from ..protocol.errors import RemoteProtocolError
from .attach_errors import AttachRefused, ModelError
from .daemon_connection import DaemonConnection
from .state.tensors import SharedTensor, is_sharded

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

WORLD_SIZE_VARIABLE = "WORLD_SIZE"  # set by torchrun


def part_of(
    model: nn.Module,
    tensors: Sequence[SharedTensor],
    data_rank: int | None = None,
    *,
    stage: bool = False,
) -> m.RankPart:
    """Return what this process holds of the model.

    Args:
      data_rank: the same for ranks that train on the same samples; None: by the model's meshes.
      stage: ``model`` is a stage of a pipeline.

    Raises:
      ModelError: the process is one of several that are not connected, or of too many; or it is
        alone with a stage; or ``data_rank`` is no rank.
    """
    if not (dist.is_available() and dist.is_initialized()):
        named = os.environ.get(WORLD_SIZE_VARIABLE, "1")
        if named != "1":
            raise ModelError(
                f"{WORLD_SIZE_VARIABLE} is {named}, so this is one of several processes, and they"
                " are not connected yet",
                hint=(
                    "call torch.distributed.init_process_group() before holdfast.attach; "
                    f"for a single process unset {WORLD_SIZE_VARIABLE}"
                ),
            )
        return _alone(tensors)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if world_size == 1:
        return _alone(tensors)
    if world_size > m.RANKS_MAX:
        raise ModelError(f"{world_size} processes are one peer; at most {m.RANKS_MAX} can be")
    if data_rank is None:
        data_rank = _data_rank(model, rank, stage=stage)
    elif not 0 <= data_rank < world_size:
        raise ModelError(f"data_rank is {data_rank}; it must be from 0 to {world_size - 1}")
    boxes = tuple(_box(tensor) for tensor in tensors)
    whole = all(tensor.box is None for tensor in tensors)
    return m.RankPart(rank, world_size, data_rank, () if whole else boxes)


def _alone(tensors: Sequence[SharedTensor]) -> m.RankPart:
    absent = next((each.spec.name for each in tensors if each.absent), None)
    if absent is not None:
        raise ModelError(
            f"this process is alone and its stage lacks {absent!r} of the whole model",
            hint="start as many processes as the pipeline has stages (`torchrun --nproc-per-node`)",
        )
    return m.RankPart()


def _box(tensor: SharedTensor) -> m.TensorBox:
    shape = tensor.spec.shape
    return m.TensorBox((0,) * len(shape), shape) if tensor.box is None else tensor.box


def _data_rank(model: nn.Module, rank: int, *, stage: bool) -> int:
    """Return a number that only ranks share which train on the same samples.

    The ranks of a tensor parallel mesh do, and the stages of a pipeline; those of an FSDP2 mesh,
    and copies of a model or of a stage, do not.
    """
    for module in model.modules():
        mesh = _fsdp_mesh(module)
        if mesh is not None:
            place = 0
            for coordinate, size in zip(mesh.get_coordinate() or (), mesh.shape, strict=True):
                place = place * size + coordinate
            return place
        if stage and isinstance(module, nn.parallel.DistributedDataParallel):
            return dist.get_rank(module.process_group)
    if stage:
        return 0
    for parameter in model.parameters():
        if is_sharded(parameter):
            return int(parameter.device_mesh.mesh.min())  # type: ignore[attr-defined]
    return rank


def _fsdp_mesh(module: nn.Module) -> DeviceMesh | None:
    state_of = getattr(module, "_get_fsdp_state", None)
    if state_of is None:
        return None
    state = state_of()
    groups = getattr(state, "_fsdp_param_groups", None)  # since torch 2.10; before, there was one
    group = groups[0] if groups else getattr(state, "_fsdp_param_group", None)
    return None if group is None else group.mesh_info.mesh


def script_digest() -> bytes:
    """Return the digest of this process's script, by which ranks know that it is the same one."""
    path = getattr(sys.modules.get("__main__"), "__file__", None)
    try:
        return b"" if path is None else hashlib.sha256(Path(path).read_bytes()).digest()
    except OSError:
        return b""


class RankWord:
    """A rank's side of ``RankGate``: it says that it waits, and is given messages or passed on."""

    def __init__(self, connection: DaemonConnection) -> None:
        self._connection = connection
        self._handling = False

    def wait(self, step: int, *, must: bool) -> Sequence[m.Message] | None:
        """Wait at a step for the daemon's word.

        Returns:
          The messages to handle, all of them; None: train on, as nothing is to be handled here.

        Raises:
          AttachRefused: the daemon does not take these ranks.
          DaemonGone: the daemon closed the connection.
        """
        self._connection.send(m.RankWaits(step, must))
        self._handling = False
        return self.receive()

    def receive(self) -> Sequence[m.Message] | None:
        """Wait as ``wait`` does, for a rank of which the daemon knows that it waits."""
        match self._connection.receive():
            case m.RankPassOn():
                return None
            case m.RankOrders(count=count):
                self._handling = True
                return [self._connection.receive() for _ in range(count)]
            case m.Rejected() as message:
                raise AttachRefused(f"the run does not take this trainer: {message.reason}")
            case other:
                raise RemoteProtocolError(f"the daemon sent a {type(other).__name__}")

    def train_on(self) -> None:
        """Say that all messages are handled, if there were any since the last word."""
        if self._handling:
            self._handling = False
            self._connection.send(m.RankTrainsOn())
