"""Train a small byte-level model as a pipeline: each process holds some of the layers, and together
they are one peer.

    holdfast join INVITE -- torchrun --nproc-per-node 2 examples/pipeline.py

It is an ordinary script with torch.distributed.pipelining, and also runs as one process. The lines
for holdfast are marked with (*). Shapes in comments: B batch, T context, C width, V vocabulary (the
256 bytes).
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.nn import functional

import holdfast

CONTEXT = 16  # T: bytes before the one that is predicted
WIDTH = 64  # C
LAYERS = 4
VOCABULARY = 256  # V: a token is a byte
BATCH = 16  # B
MICROBATCHES = 4
SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}


class Model(nn.Module):
    """Predicts the next byte from the ones before it; the whole model, or one stage of it.

    Modules have the same names in a stage as in the whole.
    """

    def __init__(self, stage: int = 0, stages: int = 1) -> None:
        super().__init__()
        self.is_first, self.is_last = stage == 0, stage == stages - 1
        if self.is_first:
            self.embedding = nn.Embedding(VOCABULARY, WIDTH)
            nn.init.normal_(self.embedding.weight, std=WIDTH**-0.5)
            self.first = nn.Linear(CONTEXT * WIDTH, WIDTH)
        numbers = range(stage * LAYERS // stages, (stage + 1) * LAYERS // stages)
        self.layers = nn.ModuleDict({str(number): nn.Linear(WIDTH, WIDTH) for number in numbers})
        if self.is_last:
            self.head = nn.Linear(WIDTH, VOCABULARY)
        if stages == 1:
            self.embedding.weight = self.head.weight

    @property
    def tied(self) -> torch.Tensor | None:
        """This stage's copy of the weight (V, C) that the first and the last stage share."""
        if self.is_first:
            return self.embedding.weight
        return self.head.weight if self.is_last else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return scores (B, V) of the byte that follows tokens (B, T); between stages (B, C)."""
        if self.is_first:
            x = torch.tanh(self.first(self.embedding(x).flatten(1)))
        for layer in self.layers.values():
            x = x + torch.tanh(layer(x))
        return self.head(x) if self.is_last else x


def save(stage: nn.Module, path: str) -> None:
    """Write the whole model. All processes send their stages; the first one writes."""
    parts = [stage.state_dict()]
    if dist.is_initialized():
        parts *= dist.get_world_size()
        dist.all_gather_object(parts, stage.state_dict())
    if not dist.is_initialized() or dist.get_rank() == 0:
        torch.save({name: each for part in parts for name, each in part.items()}, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--schedule", choices=SCHEDULES, default="1f1b")
    parser.add_argument("--save", default="", help="write the whole model to this file at the end")
    parser.add_argument(
        "--meet", default="env://", help="where the processes meet: torch's init_method"
    )
    arguments = parser.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(1)
    text = Path(torch.__file__).read_bytes()  # some source code of a hundred kilobytes
    corpus = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    rank, stages = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if stages > LAYERS:
        parser.error(f"the model has {LAYERS} layers, too few for {stages} stages")
    # "nccl" on GPUs; one process, too, is a pipeline:
    dist.init_process_group("gloo", arguments.meet, rank=rank, world_size=stages)
    ends = dist.new_group(sorted({0, stages - 1}))  # the stages that share the tied weight
    stage = Model(rank, stages)
    with torch.device("meta"):
        whole = Model()  # (*) names and shapes only
    schedule = SCHEDULES[arguments.schedule](
        PipelineStage(stage, rank, stages, torch.device("cpu")),
        n_microbatches=MICROBATCHES,
        loss_fn=functional.cross_entropy,
    )
    optimizer = torch.optim.AdamW(stage.parameters(), lr=1e-3)

    with holdfast.attach(stage, optimizer, whole=whole) as run:  # (*) in every process
        chance = run.generator()  # (*) the same samples in all stages, others in other peers
        while not run.finished:  # (*)
            starts = torch.randint(len(corpus) - CONTEXT, (BATCH, 1), generator=chance)  # (B, 1)
            windows = corpus[starts + torch.arange(CONTEXT + 1)]  # (B, T + 1)
            losses: list[torch.Tensor] = []  # of the micro-batches, in the last stage
            optimizer.zero_grad()
            schedule.step(
                *([windows[:, :-1]] if stage.is_first else []),
                target=windows[:, -1] if stage.is_last else None,
                losses=losses if stage.is_last else None,
            )
            if stage.tied is not None:
                dist.all_reduce(stage.tied.grad, group=ends)  # the sum of both stages' gradients
            optimizer.step()
            loss = torch.stack(losses).mean() if losses else None
            run.step(loss=loss, tokens=BATCH)  # (*) all stages' tokens are the same ones: once
    if arguments.save:
        save(stage, arguments.save)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
