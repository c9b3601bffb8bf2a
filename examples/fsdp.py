"""Train a small byte-level model that is sharded over several processes (FSDP2); together they are
one peer.

    holdfast join INVITE -- torchrun --nproc-per-node 2 examples/fsdp.py

It is an ordinary FSDP2 script, and also runs as one process. The lines for holdfast are marked with
(*). Shapes in comments: B batch, T context, C width, V vocabulary (the 256 bytes).
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional

import holdfast

CONTEXT = 16  # T: bytes before the one that is predicted
WIDTH = 64  # C
LAYERS = 4
VOCABULARY = 256  # V: a token is a byte
BATCH = 16  # B, in each process


class Model(nn.Module):
    """Predicts the next byte from the ones before it."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.first = nn.Linear(CONTEXT * WIDTH, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.embedding.weight = self.head.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return scores (B, V) of the byte that follows ``tokens`` (B, T)."""
        x = torch.tanh(self.first(self.embedding(tokens).flatten(1)))  # (B, C)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        scores: torch.Tensor = self.head(x)
        return scores


def save(model: nn.Module, path: str) -> None:
    """Write the whole model. All processes gather it; the first one writes."""
    whole = {
        name: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        for name, tensor in model.state_dict().items()
    }
    if not dist.is_initialized() or dist.get_rank() == 0:
        torch.save(whole, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--save", default="", help="write the whole model to this file at the end")
    parser.add_argument(
        "--meet", default="env://", help="where the processes meet: torch's init_method"
    )
    arguments = parser.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(1)
    text = Path(torch.__file__).read_bytes()  # some source code of a hundred kilobytes
    corpus = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    model = Model()
    world_size = int(os.environ.get("WORLD_SIZE", "1"))  # set by torchrun, as RANK
    if world_size > 1:
        rank = int(os.environ["RANK"])  # "nccl" on GPUs:
        dist.init_process_group("gloo", arguments.meet, rank=rank, world_size=world_size)
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    with holdfast.attach(model, optimizer) as run:  # (*) in every process, after sharding
        chance = run.generator()  # (*) every process of every peer draws samples of its own
        while not run.finished:  # (*)
            starts = torch.randint(len(corpus) - CONTEXT, (BATCH, 1), generator=chance)  # (B, 1)
            windows = corpus[starts + torch.arange(CONTEXT + 1)]  # (B, T + 1)
            loss = functional.cross_entropy(model(windows[:, :-1]), windows[:, -1])
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            run.step(loss=loss, tokens=BATCH)  # (*) its own tokens; the daemon adds them up
    if arguments.save:
        save(model, arguments.save)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
