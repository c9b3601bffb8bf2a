"""A small real model on real text at a fixed pace: the training script under chaos.

    holdfast join INVITE -- python chaos_trainer.py --step-s 0.025

It predicts the next byte of Python's own sources from the sixteen before it. Six of these share two
cores, so a step is not as fast as it can be: it takes ``--step-s``, of which it computes a tenth
and sleeps the rest, as a script does that waits for its accelerator. A slot that is missed is lost,
not made up for: what the run makes a trainer wait shows in its tokens.

Shapes in comments: B batch, C context, V vocabulary (the 256 bytes).
"""

from __future__ import annotations

import argparse
import sysconfig
import time
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional

import holdfast

CONTEXT = 16  # C
VOCABULARY = 256  # V
WIDTH = 16
HIDDEN = 128
BATCH = 64
LEARNING_RATE = 0.1
MOMENTUM = 0.9
GRADIENT_NORM_MAX = 1.0
CORPUS_BYTES = 3_000_000
HELD_OUT_BYTES = 200_000
VALIDATION_WINDOWS = 8_192

Bytes = NDArray[np.uint8]


class NextByte(nn.Module):
    """About 70,000 parameters: an embedding, a hidden layer, scores of the next byte."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.hidden = nn.Linear(CONTEXT * WIDTH, HIDDEN)
        self.scores = nn.Linear(HIDDEN, VOCABULARY)

    def forward(self, before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
        """Mean loss in nats per byte; ``before`` is (B, C), ``after`` (B,)."""
        seen = self.embedding(before).flatten(1)  # (B, C * WIDTH)
        return functional.cross_entropy(self.scores(torch.tanh(self.hidden(seen))), after)


def load_corpus() -> tuple[Bytes, Bytes]:
    """The library's sources as bytes: (training, held out)."""
    text = bytearray()
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text += path.read_bytes()
        if len(text) >= CORPUS_BYTES + HELD_OUT_BYTES:
            break
    corpus = np.frombuffer(bytes(text[: CORPUS_BYTES + HELD_OUT_BYTES]), np.uint8)
    return corpus[:-HELD_OUT_BYTES], corpus[-HELD_OUT_BYTES:]


def windows(corpus: Bytes, starts: NDArray[np.int64]) -> tuple[torch.Tensor, torch.Tensor]:
    """What precedes, (B, C), and what follows, (B,), of windows that begin at ``starts``."""
    tokens = torch.from_numpy(corpus[starts[:, None] + np.arange(CONTEXT + 1)].astype(np.int64))
    return tokens[:, :-1], tokens[:, -1]


@torch.no_grad()
def validation_loss(values: NDArray[np.float32], held_out: Bytes) -> float:
    """Loss on windows spread evenly over the held-out text, of parameters in the run's order."""
    model = NextByte()
    start = 0
    for parameter in model.parameters():
        part = values[start : start + parameter.numel()]
        parameter.copy_(torch.from_numpy(part).view_as(parameter))
        start += parameter.numel()
    if start != len(values):
        raise ValueError(f"{len(values)} values for {start} parameters")
    last = len(held_out) - CONTEXT - 1
    starts = np.linspace(0, last, VALIDATION_WINDOWS).astype(np.int64)
    return float(model(*windows(held_out, starts)))


def train_step(
    model: NextByte, momenta: list[torch.Tensor], before: torch.Tensor, after: torch.Tensor
) -> float:
    """One step of SGD with momentum; its loss. (torch's optimizers import torch's compiler.)"""
    loss: torch.Tensor = model(before, after)
    model.zero_grad(set_to_none=True)
    loss.backward()  # type: ignore[no-untyped-call]
    nn.utils.clip_grad_norm_(model.parameters(), GRADIENT_NORM_MAX)
    with torch.no_grad():
        for parameter, momentum in zip(model.parameters(), momenta, strict=True):
            assert parameter.grad is not None
            momentum.mul_(MOMENTUM).add_(parameter.grad)
            parameter.sub_(momentum, alpha=LEARNING_RATE)
    return loss.item()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--step-s", type=float, default=0.025)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(1)
    training, _ = load_corpus()
    model = NextByte()
    momenta = [torch.zeros_like(parameter) for parameter in model.parameters()]
    with holdfast.attach(model) as run:
        chance = np.random.default_rng((run.seed, run.global_step))
        due_s = time.monotonic()
        while not run.finished:
            starts = chance.integers(len(training) - CONTEXT, size=BATCH)
            loss = train_step(model, momenta, *windows(training, starts))
            due_s += options.step_s
            time.sleep(max(0.0, due_s - time.monotonic()))
            due_s = max(due_s, time.monotonic())
            run.step(loss=loss, tokens=BATCH)
            due_s = max(due_s, time.monotonic())


if __name__ == "__main__":
    main()
