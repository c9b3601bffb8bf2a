"""A training script over several hosts with nothing to compute: boxes are all that moves.

    torchrun --nnodes 2 --node-rank 0 --master-addr ADDRESS hosts_script.py --mib 64 --step-s 0.05

Each process holds its part of every tensor (FSDP2) and changes some of its values in each step;
there is no forward pass, so nothing but boxes crosses the site's network.
"""

from __future__ import annotations

import argparse
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import holdfast

CHANGED_VALUES = 2**14  # by a step


class Values(nn.Module):
    """So many float32 zeros, in tensors of equal size."""

    def __init__(self, count: int, tensor_count: int) -> None:
        super().__init__()
        zeros = (nn.Parameter(torch.zeros(count // tensor_count)) for _ in range(tensor_count))
        self.values = nn.ParameterList(zeros)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mib", type=int, default=64)
    parser.add_argument("--tensors", type=int, default=8)
    parser.add_argument("--step-s", type=float, default=0.05)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    model = Values(options.mib * 2**20 // 4, options.tensors)
    fully_shard(model)
    with holdfast.attach(model) as run:
        while not run.finished:
            time.sleep(options.step_s)
            for parameter in model.values.parameters():
                assert isinstance(parameter, DTensor)
                parameter.to_local().detach()[:CHANGED_VALUES] += 1e-3
            run.step(loss=1.0)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
