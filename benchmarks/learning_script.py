"""The training script of ``learning``: the GPT of ``examples/train.py``, with a seed and an inner
optimizer, a warm-up and a cosine; it validates the shared parameters at the end.
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path

import torch
from torch import nn

import holdfast

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from examples.train import (
    CONTEXT,
    GPT,
    GRADIENT_NORM_MAX,
    load_corpus,
    make_optimizer,
    validate,
    windows,
)

RATE_END = 0.1  # of the highest rate, at the last step
WARM_UP_SHARE = 0.1  # of the steps
WEIGHT_DECAY = 0.1
VALIDATION_BATCH, VALIDATION_BATCHES = 64, 64  # 262,144 bytes


def rate_share(step: int, steps: int) -> float:
    """Return a step's share of the highest rate: warm-up, then a cosine down to ``RATE_END``."""
    warm_up = WARM_UP_SHARE * steps
    if step < warm_up:
        return (step + 1) / warm_up
    share = min(1.0, (step - warm_up) / (steps - warm_up))
    return RATE_END + 0.5 * (1 - RATE_END) * (1 + math.cos(math.pi * share))


def make_optimizers(model: GPT, inner: str) -> list[torch.optim.Optimizer]:
    """``AdamW``: as in the example. ``Muon``: Muon for the layers' matrices, at AdamW's rates."""
    if inner == "AdamW":
        return [make_optimizer(model)]
    matrices = [each for each in model.blocks.parameters() if each.dim() == 2]
    own = {id(each) for each in matrices}
    others = [each for each in model.parameters() if id(each) not in own]
    groups = [
        {"params": [each for each in others if each.dim() >= 2], "weight_decay": WEIGHT_DECAY},
        {"params": [each for each in others if each.dim() < 2], "weight_decay": 0.0},
    ]
    muon = torch.optim.Muon(
        matrices, weight_decay=WEIGHT_DECAY, adjust_lr_fn="match_rms_adamw", momentum=0.95
    )
    return [torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=True), muon]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0, help="of the first weights")
    parser.add_argument("--batch", type=int, default=12, help="windows of a step")
    parser.add_argument("--inner", choices=("AdamW", "Muon"), default="AdamW")
    parser.add_argument("--rate", type=float, default=1e-3, help="of the optimizer, at its highest")
    arguments = parser.parse_args()
    torch.manual_seed(arguments.seed)
    training, held_out = load_corpus()
    model = GPT()
    optimizers = make_optimizers(model, arguments.inner)
    run = holdfast.attach(model, optimizers[0])
    chance = run.generator("numpy")
    while not run.finished:
        starts = chance.integers(len(training) - CONTEXT, size=arguments.batch)
        tokens, targets = windows(training, starts)
        loss = model(tokens, targets)
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), GRADIENT_NORM_MAX)
        rate = arguments.rate * rate_share(run.global_step, run.total_steps or 1) * run.rate_scale
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
        run.step(loss=loss.item(), tokens=tokens.numel())
    # By the end all peers hold the same weights; it is enough if one of them judges them.
    if run.is_leader:
        run.log(validation_loss=validate(model, held_out, VALIDATION_BATCH, VALIDATION_BATCHES))
    run.close()


if __name__ == "__main__":
    main()
