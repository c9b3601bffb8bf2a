"""A trainer of one process or of several, which holds the same model under the parallelism that it
is asked for.

Every peer trains on samples of its own, the same ones under every parallelism, by plain SGD.
"""

from __future__ import annotations

import argparse
import math
import os
import time
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import holdfast

BATCH = 12  # divisible by the ranks of all groups that are tested
INNER_LR = 0.05
STAGES = 2
MICROBATCHES = 3
NAN_STEPS = 3  # losses in a row that are not finite, until the weights are loaded again
WIDE = 65  # uneven over 2, 3 and 4 ranks


class Net(nn.Module):
    """Tied, frozen, 0-dimensional, integer and float64 tensors; and one of fewer rows than
    ranks.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, WIDE)
        self.second = nn.Linear(WIDE, 6)
        self.up, self.down = (
            nn.Linear(6, 8),
            nn.Linear(8, 6),
        )  # tensor parallel takes even parts only
        self.tied = nn.Linear(6, 6, bias=False)
        self.same = nn.Linear(6, 6, bias=False)
        self.same.weight = self.tied.weight
        self.few = nn.Parameter(torch.zeros(2, 6))
        self.frozen = nn.Linear(6, 6)
        for parameter in self.frozen.parameters():
            parameter.requires_grad_(False)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scale", torch.ones(3, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.second(torch.tanh(self.first(x)))
        x = x + self.down(torch.tanh(self.up(x)))
        x = self.same(torch.tanh(self.tied(x))) + self.frozen(x)
        out: torch.Tensor = x + self.few.sum(0)
        return out


class Stage(nn.Module):
    """The first or the last part of the net; each has a copy of the tied weight."""

    def __init__(self, net: Net, number: int) -> None:
        super().__init__()
        if number == 0:
            self.first, self.second, self.up, self.down = net.first, net.second, net.up, net.down
            self.tied = net.tied
        else:
            self.same, self.few, self.frozen = net.same, net.few, net.frozen
            for name, buffer in net.named_buffers(recurse=False):
                self.register_buffer(name, buffer)
        self.is_first = number == 0

    def forward(
        self, x: torch.Tensor, tied: torch.Tensor | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        if self.is_first:
            x = self.second(torch.tanh(self.first(x)))
            x = x + self.down(torch.tanh(self.up(x)))
            return x, torch.tanh(self.tied(x))
        out: torch.Tensor = self.same(tied) + self.frozen(x) + self.few.sum(0)
        return out

    @property
    def tied_gradient(self) -> torch.Tensor:
        gradient = (self.tied if self.is_first else self.same).weight.grad
        assert gradient is not None
        return gradient.to_local() if isinstance(gradient, DTensor) else gradient


class Pipeline:
    """A stage in this process, of one of the copies of the net.

    Args:
      kind: "pipe", "pipe-fsdp" or "pipe-ddp", the last two with copies.
    """

    def __init__(self, net: Net, kind: str, schedule: str) -> None:
        count = dist.get_world_size()
        names = ("stages", "copies")
        mesh = init_device_mesh("cpu", (STAGES, count // STAGES), mesh_dim_names=names)
        number = mesh.get_local_rank("stages")
        self.copy = mesh.get_local_rank("copies")
        self.group = mesh["stages"].get_group()
        self.stage = Stage(net, number)
        self.module: nn.Module = self.stage
        if kind == "pipe-fsdp":
            fully_shard(self.stage, mesh=mesh["copies"])
        elif kind == "pipe-ddp":
            group = mesh["copies"].get_group()
            self.module = nn.parallel.DistributedDataParallel(self.stage, process_group=group)
        # Imports torch's compiler; tests that import this file do not need it.
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

        stage = PipelineStage(self.module, number, STAGES, torch.device("cpu"), group=self.group)
        kinds = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
        self.schedule = kinds[schedule](stage, MICROBATCHES, loss_fn=error_of)

    def train(self, inputs: torch.Tensor) -> torch.Tensor | None:
        """Compute gradients, and return the loss in the last stage."""
        losses: list[torch.Tensor] = []
        if self.stage.is_first:
            self.schedule.step(inputs)
        else:
            self.schedule.step(target=torch.sin(inputs), losses=losses)
        dist.all_reduce(self.stage.tied_gradient, group=self.group)
        return torch.stack(losses).mean() if losses else None


def accumulate(net: Net, inputs: torch.Tensor) -> torch.Tensor:
    """Compute the gradients of a pipeline in one process, in the order of its sums; return the
    loss.
    """
    stages, losses, cuts = [Stage(net, number) for number in range(STAGES)], [], []
    for each in inputs.chunk(MICROBATCHES):
        sent = stages[0](each)
        cut = [tensor.detach().requires_grad_() for tensor in sent]
        losses.append(error_of(stages[1](*cut), torch.sin(each)))
        torch.autograd.backward(losses[-1])
        cuts.append((sent, [tensor.grad for tensor in cut]))
    last, net.tied.weight.grad = net.tied.weight.grad, None
    for sent, gradients in cuts:
        torch.autograd.backward(sent, gradients)
    for parameter in net.parameters():
        if parameter.grad is not None:
            parameter.grad.div_(MICROBATCHES)
    assert net.tied.weight.grad is not None
    assert last is not None
    net.tied.weight.grad.add_(last.div_(MICROBATCHES))
    return torch.stack(losses).mean()


def samples(peer: int, step: int) -> torch.Tensor:
    """Return a step's inputs of a peer, of all its ranks together."""
    return torch.randn(BATCH, 6, generator=torch.Generator().manual_seed(1000 * peer + step))


def error_of(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (outputs - targets).square().mean()


def loss_of(model: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    return error_of(model(inputs), torch.sin(inputs))


def parallel(model: Net, kind: str) -> nn.Module:
    """Return the model under a parallelism over all ranks."""
    count = dist.get_world_size() if dist.is_initialized() else 1
    if kind == "fsdp":
        for module in (model.first, model.second):
            fully_shard(module)
        fully_shard(model)
        return model
    if kind == "hsdp":
        mesh = init_device_mesh("cpu", (2, count // 2), mesh_dim_names=("replicas", "shards"))
        fully_shard(model, mesh=mesh)
        return model
    if kind == "tp":
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        return parallelize_module(model, init_device_mesh("cpu", (count,)), plan)
    if kind == "fsdp-tp":
        mesh = init_device_mesh("cpu", (2, count // 2), mesh_dim_names=("data", "tensor"))
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(model, mesh["tensor"], plan)
        fully_shard(model, mesh=mesh["data"])
        return model
    if kind == "odd" and dist.get_rank():
        model.register_buffer("more", torch.zeros(1))
    if kind == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    return model


def save(model: nn.Module, path: str, stages: dist.ProcessGroup | None = None) -> None:
    """Write the unsharded tensors to a file; all ranks gather, the first one writes."""
    whole: dict[str, torch.Tensor] = {
        name: (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()
        for name, tensor in model.state_dict().items()
    }
    if stages is not None:
        parts = [whole] * STAGES
        dist.all_gather_object(parts, whole, group=stages)
        whole = {name: tensor for part in parts for name, tensor in part.items()}
    if not dist.is_initialized() or dist.get_rank() == 0:
        save_file(whole, path)


class Fault:
    """What one rank does wrong when the file says so: a loss that is reported as NaN, or weights
    that are.

    A "loss" is reported so ``NAN_STEPS`` times.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._left = 0

    def spoil(self, model: nn.Module) -> bool:
        """Do what the file says, once; return whether this step's loss is to be reported as NaN."""
        with suppress(FileNotFoundError):
            kind = self._file.read_text()
            self._file.unlink()
            if kind == "loss":
                self._left = NAN_STEPS
            else:
                first = next(model.parameters()).detach()
                local = first.to_local() if isinstance(first, DTensor) else first
                local.fill_(math.nan)
        spoilt = self._left > 0
        self._left -= spoilt
        return spoilt


def momenta(optimizer: torch.optim.Optimizer) -> str:
    """Return a figure of the optimizer's state in this rank, exact to the last bit."""
    total = 0.0
    for each in optimizer.state.values():
        value = each["momentum_buffer"]
        assert isinstance(value, DTensor)
        total += float(value.to_local().double().square().sum())
    return f"{len(optimizer.state)} states, {total.hex()}"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--momentum", type=float, default=0.0)
    parser.add_argument("--fault", type=Path, help="what rank 1 does wrong")
    parser.add_argument("--kind", default="plain")
    parser.add_argument("--schedule", default="1f1b")
    parser.add_argument("--pause", type=float, default=0.0)
    parser.add_argument("--peer", type=int, default=0)
    parser.add_argument("--save", default="")
    options = parser.parse_args()
    if "RANK" in os.environ:
        dist.init_process_group(
            "gloo",
            init_method=os.environ.get("RANKS_MEET_AT", "env://"),
            rank=int(os.environ["RANK"]),
            world_size=int(os.environ["WORLD_SIZE"]),
        )
    torch.manual_seed(0)
    torch.set_num_threads(1)
    net = Net()
    inner: nn.Module = net
    model, whole, pipeline = parallel(net, options.kind), None, None
    if options.kind.startswith("pipe"):
        pipeline = Pipeline(net, options.kind, options.schedule)
        inner, model = pipeline.stage, pipeline.module
        with torch.device("meta"):
            whole = Net()
    optimizer = torch.optim.SGD(
        [p for p in model.parameters() if p.requires_grad], lr=INNER_LR, momentum=options.momentum
    )
    count, rank = 1, 0  # all ranks see the whole batch
    if options.kind in ("fsdp", "hsdp", "ddp"):
        count, rank = dist.get_world_size(), dist.get_rank()
    elif options.kind == "fsdp-tp":
        count, rank = 2, dist.get_rank() // (dist.get_world_size() // 2)
    elif pipeline is not None:
        count, rank = dist.get_world_size() // STAGES, pipeline.copy
    faulty = options.fault is not None and dist.get_rank() == 1
    fault = Fault(options.fault) if faulty else None
    with holdfast.attach(model, optimizer, whole=whole) as run:
        if optimizer.state:
            print(f"rank {dist.get_rank()} goes on with {momenta(optimizer)}", flush=True)
        seen = dict(inner.named_buffers()).get("seen")
        while not run.finished:
            x = samples(options.peer, run.global_step)
            mine = x[rank * BATCH // count : (rank + 1) * BATCH // count]
            optimizer.zero_grad()
            loss: torch.Tensor | None
            if pipeline is not None:
                loss = pipeline.train(mine)
            elif options.kind == "accumulated":
                loss = accumulate(net, mine)
            else:
                loss = loss_of(model, mine)
                torch.autograd.backward(loss)
            optimizer.step()
            if seen is not None:
                seen.add_(1)
            time.sleep(options.pause)
            if fault is not None and fault.spoil(model) and loss is not None:
                loss = loss * math.nan
            run.step(loss=loss, tokens=len(mine))
    if options.save:
        save(inner, options.save, None if pipeline is None else pipeline.group)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
