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


def samples(peer: int, step: int) -> torch.Tensor:
    """Return a step's inputs of a peer, of all its ranks together."""
    return torch.randn(BATCH, 6, generator=torch.Generator().manual_seed(1000 * peer + step))


def loss_of(model: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = (model(inputs) - torch.sin(inputs)).square().mean()
    return loss


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


def save(model: nn.Module, path: str) -> None:
    """Write the unsharded tensors to a file; all ranks gather, the first one writes."""
    whole = {
        name: (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()
        for name, tensor in model.state_dict().items()
    }
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
    inner = Net()
    model = parallel(inner, options.kind)
    optimizer = torch.optim.SGD(
        [p for p in model.parameters() if p.requires_grad], lr=INNER_LR, momentum=options.momentum
    )
    count, rank = 1, 0  # all ranks see the whole batch
    if options.kind in ("fsdp", "hsdp", "ddp"):
        count, rank = dist.get_world_size(), dist.get_rank()
    elif options.kind == "fsdp-tp":
        count, rank = 2, dist.get_rank() // (dist.get_world_size() // 2)
    faulty = options.fault is not None and dist.get_rank() == 1
    fault = Fault(options.fault) if faulty else None
    with holdfast.attach(model, optimizer) as run:
        if optimizer.state:
            print(f"rank {dist.get_rank()} goes on with {momenta(optimizer)}", flush=True)
        seen = inner.get_buffer("seen")
        while not run.finished:
            x = samples(options.peer, run.global_step)
            mine = x[rank * BATCH // count : (rank + 1) * BATCH // count]
            loss = loss_of(model, mine)
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            optimizer.step()
            seen.add_(1)
            time.sleep(options.pause)
            if fault is not None and fault.spoil(model):
                loss = loss * math.nan
            run.step(loss=loss, tokens=len(mine))
    if options.save:
        save(inner, options.save)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
