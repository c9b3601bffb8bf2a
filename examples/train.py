"""Train a small byte-level GPT on Python's own standard library, together with other machines.

    holdfast join INVITE -- python examples/train.py

It is an ordinary single-process PyTorch script. The lines for holdfast are marked with (*).
Shapes in comments: B batch, T context, C width, H heads, V vocabulary (the 256 bytes).
"""

from __future__ import annotations

import argparse
import math
import sysconfig
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional

import holdfast

CONTEXT = 64  # T: bytes that the model sees at once
WIDTH = 128  # C
LAYERS = 4
HEADS = 4  # H
VOCABULARY = 256  # V: a token is a byte, so no tokenizer is needed

LEARNING_RATE = 1e-3
WARMUP_STEPS = 100
GRADIENT_NORM_MAX = 1.0

CORPUS_BYTES_MAX = 16_000_000  # read in well under two seconds; enough for a model this small
HELD_OUT_SHARE = 0.05  # of the files, the last ones by name
VALIDATION_BATCHES = 20


# ---------------------------------------------------------------- data


def load_corpus() -> tuple[np.ndarray, np.ndarray]:
    """Read the library's sources as bytes: (training, held out), both uint8."""
    root = Path(sysconfig.get_path("stdlib"))
    paths = sorted(
        path
        for path in root.rglob("*.py")
        if not {"site-packages", "dist-packages"} & set(path.relative_to(root).parts)
    )
    held_out_from = len(paths) - math.ceil(len(paths) * HELD_OUT_SHARE)
    training = read_up_to(paths[:held_out_from], CORPUS_BYTES_MAX)
    held_out = read_up_to(paths[held_out_from:], CORPUS_BYTES_MAX // 10)
    return training, held_out


def read_up_to(paths: list[Path], bytes_max: int) -> np.ndarray:
    text = bytearray()
    for path in paths:
        if len(text) >= bytes_max:
            break
        text += path.read_bytes()
    return np.frombuffer(bytes(text[:bytes_max]), np.uint8)


def windows(corpus: np.ndarray, starts: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs and targets (the next byte), each (B, T), for windows that begin at
    ``starts``.
    """
    places = starts[:, None] + np.arange(CONTEXT + 1)  # (B, T + 1)
    tokens = torch.from_numpy(corpus[places].astype(np.int64))
    return tokens[:, :-1], tokens[:, 1:]


# ---------------------------------------------------------------- model


class Block(nn.Module):
    """Attention, then a feed-forward layer, each added to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(WIDTH, bias=False)
        self.attention_in = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.attention_out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.feed_norm = nn.LayerNorm(WIDTH, bias=False)
        self.feed_in = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.feed_out = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return a tensor of the input's shape, (B, T, C)."""
        batch, length, _ = x.shape
        mixed = self.attention_in(self.attention_norm(x))  # (B, T, 3C)
        mixed = mixed.view(batch, length, 3, HEADS, WIDTH // HEADS)
        query, key, value = mixed.permute(2, 0, 3, 1, 4)  # each (B, H, T, C/H)
        heads = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        heads = heads.transpose(1, 2).reshape(batch, length, WIDTH)  # (B, T, C)
        x = x + self.attention_out(heads)  # (B, T, C)
        wide = functional.gelu(self.feed_in(self.feed_norm(x)))  # (B, T, 4C)
        added: torch.Tensor = x + self.feed_out(wide)
        return added


class GPT(nn.Module):
    """A GPT of about 0.8 million parameters; the output layer is tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.token_embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.position_embedding = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH, bias=False)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.token_embedding.weight
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                # Layers that add to the stream start smaller, so that it keeps its size over depth.
                shrink = math.sqrt(2 * LAYERS) if name.endswith("_out.weight") else 1.0
                nn.init.normal_(parameter, std=0.02 / shrink)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the mean loss in nats per byte of predicting ``targets``, both (B, T)."""
        positions = torch.arange(tokens.shape[1])
        x = self.token_embedding(tokens) + self.position_embedding(positions)  # (B, T, C)
        for block in self.blocks:
            x = block(x)
        scores = self.head(self.norm(x))  # (B, T, V)
        return functional.cross_entropy(scores.view(-1, VOCABULARY), targets.reshape(-1))


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """Make an AdamW with weight decay for matrices only, as usual."""
    matrices = [parameter for parameter in model.parameters() if parameter.dim() >= 2]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    groups = [
        {"params": matrices, "weight_decay": 0.1},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=(0.9, 0.95), fused=True)


@torch.no_grad()
def validate(model: GPT, held_out: np.ndarray, batch: int, batches: int) -> float:
    """Return the loss on windows spread evenly over the held-out text, the same ones everywhere."""
    starts = np.linspace(0, len(held_out) - CONTEXT - 1, batch * batches).astype(np.int64)
    total = 0.0
    for some in np.split(starts, batches):
        total += model(*windows(held_out, some)).item()
    return total / batches


# ---------------------------------------------------------------- training


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--batch", type=int, default=12, help="windows per inner step")
    parser.add_argument("--validate-every", type=int, default=10, help="in rounds; 0: never")
    arguments = parser.parse_args()

    torch.set_num_threads(1)  # peers often share a machine; change it where yours has one alone
    torch.manual_seed(1)
    training, held_out = load_corpus()
    model = GPT()
    optimizer = make_optimizer(model)

    run = holdfast.attach(model, optimizer)  # (*) the model now holds the run's weights
    # Every peer draws different windows, and a restarted trainer does not draw the same ones again.
    chance = run.generator("numpy")
    run.log(validation_loss=validate(model, held_out, arguments.batch, VALIDATION_BATCHES))

    validated_round = 0
    while not run.finished:  # (*)
        # The schedule follows the run's steps. (*) A later joiner has a short warm-up of its own.
        rate = LEARNING_RATE * min(1.0, (run.global_step + 1) / WARMUP_STEPS) * run.rate_scale
        for group in optimizer.param_groups:
            group["lr"] = rate
        starts = chance.integers(len(training) - CONTEXT, size=arguments.batch)
        tokens, targets = windows(training, starts)
        loss = model(tokens, targets)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), GRADIENT_NORM_MAX)
        optimizer.step()

        run.step(loss=loss.item(), tokens=tokens.numel())  # (*)

        # Just after a merge all peers have the same model (with no overlap), so it is measured
        # then. A few batches are enough for a curve.
        every = arguments.validate_every
        if every and run.round_count >= validated_round + every and not run.finished:
            validated_round = run.round_count
            run.log(validation_loss=validate(model, held_out, arguments.batch, 4))  # (*)

    final_loss = validate(model, held_out, arguments.batch, VALIDATION_BATCHES)
    run.log(validation_loss=final_loss, final_validation_loss=final_loss)
    run.close()


if __name__ == "__main__":
    main()
