"""Ranks of a model under FSDP2 of which the second one reads the shared state only while no gate is
shut.

gated_ranks.py SOCKET GATE SAVED: the gate is a file; at the end the first rank writes the whole
weights.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import holdfast
from holdfast.protocol.arena import Arena

PAUSE_S = 0.01


def wait_at(gate: Path) -> None:
    """Make all reads wait while the gate is shut."""
    read = Arena.read

    def read_late(arena: Arena, *arguments: Any) -> int:
        while gate.exists():
            time.sleep(PAUSE_S)
        return read(arena, *arguments)

    Arena.read = read_late  # type: ignore[method-assign, assignment]


def main() -> None:
    path, gate, saved = sys.argv[1:]
    rank, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    meeting = os.environ["RANKS_MEET_AT"]
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=count)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = nn.Linear(4, 6)
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if rank == 1:
        wait_at(Path(gate))
    with holdfast.attach(model, optimizer, socket_path=path) as run:
        while not run.finished:
            loss = model(torch.ones(2, 4)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            time.sleep(PAUSE_S)
            run.step(loss=loss)
            if rank == 0:
                run.log(loss=loss)  # it has handled what was due at this step
    whole = {
        name: (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()
        for name, tensor in model.state_dict().items()
    }
    if rank == 0:
        save_file(whole, saved)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
