"""A trainer of one process, or of ranks that share one device, and call no collective that gloo
lacks on GPUs.

NCCL refuses two ranks on one GPU, and gloo has for tensors on GPUs only what
DistributedDataParallel needs. So "rows" makes the parts that ``fully_shard`` would make by hand,
and trains each of them where it is.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import holdfast

ROWS = 65  # uneven over two ranks
DECAY = 0.25  # of the gradient of a weight that only shrinks
BATCH = 8


def divide(model: nn.Module, mesh: DeviceMesh) -> None:
    """Replace each parameter by this rank's rows of it."""
    rank, count = mesh.get_local_rank(), mesh.size()
    for module in model.modules():
        for name, whole in list(module.named_parameters(recurse=False)):
            each = -(-len(whole) // count)
            local = whole.detach()[rank * each : (rank + 1) * each].clone()
            part = DTensor.from_local(
                local, mesh, [Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride()
            )
            setattr(module, name, nn.Parameter(part))


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kind", choices=("plain", "rows", "ddp"), default="plain")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--save", required=True, help="each rank writes what it has to SAVE-RANK")
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    inner = nn.Sequential(nn.Linear(16, ROWS), nn.Tanh(), nn.Linear(ROWS, 16)).to(options.device)
    model: nn.Module = inner
    rank = 0
    if options.kind != "plain":
        rank, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        meeting = os.environ["RANKS_MEET_AT"]
        dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=count)
        if options.kind == "rows":
            divide(inner, init_device_mesh(options.device, (count,)))
        else:
            model = nn.parallel.DistributedDataParallel(inner)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with holdfast.attach(model, optimizer) as run:
        chance = run.generator()
        while not run.finished:
            if options.kind == "ddp":
                x = torch.randn(BATCH, 16, generator=chance).to(options.device)
                loss = (model(x) - x.sin()).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            else:
                for parameter in inner.parameters():
                    parameter.grad = DECAY * parameter.detach()
                optimizer.step()
            run.step()
    parts = {name: local_part(p.detach()).cpu() for name, p in inner.named_parameters()}
    save_file({name: part.contiguous() for name, part in parts.items()}, f"{options.save}-{rank}")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
