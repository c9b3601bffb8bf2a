"""The demo's model in any size on a GPU, and how fast it trains: alone, or in a run.

    holdfast join INVITE -- python -m benchmarks.cuda_trainer --seconds 30 --log speed.json
    python -m benchmarks.cuda_trainer --alone --seconds 30 --log speed.json

Matrix products are in bfloat16 under autocast, weights and optimizer in float32. Nothing waits for the
GPU but the loss of every tenth step, so what the hook costs is what the GPU does not do meanwhile. It trains
on after its figures are written, as the other process still measures; whoever started it ends it.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch

import holdfast
from examples import train

LOSS_EVERY = 10
WARM_S = 5.0  # until kernels are chosen and memory is pinned


@contextmanager
def _no_run() -> Iterator[None]:
    yield None


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=20.0, help="that count, after a warm-up")
    parser.add_argument("--alone", action="store_true", help="without a run")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--log", type=Path, required=True)
    options = parser.parse_args()
    train.WIDTH, train.LAYERS, train.HEADS = options.width, options.layers, options.heads
    train.CONTEXT = options.context
    cuda = options.device.startswith("cuda")
    corpus, _ = train.load_corpus()
    torch.manual_seed(1)
    with torch.device(options.device):
        model = train.GPT()
    optimizer = train.make_optimizer(model)
    chance = np.random.default_rng()
    params = sum(each.numel() for each in model.parameters())
    calls_us: list[float] = []
    steps = rounds = 0
    waited_s = 0.0
    began_s: float | None = None
    told = False

    def ready_s() -> float:
        if cuda:
            torch.cuda.synchronize()
        return time.monotonic()

    with _no_run() if options.alone else holdfast.attach(model, optimizer) as run:
        first_s = ready_s()
        shown: float | None = None
        while run is None or not run.finished:
            starts = chance.integers(len(corpus) - options.context, size=options.batch)
            tokens, targets = (
                each.to(options.device, non_blocking=True) for each in train.windows(corpus, starts)
            )
            with (
                torch.device(options.device),
                torch.autocast(options.device.partition(":")[0], dtype=torch.bfloat16),
            ):
                loss = model(tokens, targets)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), train.GRADIENT_NORM_MAX)
            optimizer.step()
            steps += 1
            if steps % LOSS_EVERY == 0:
                shown = loss.item()
            if run is not None:
                before_s = time.perf_counter()
                run.step(loss=shown, tokens=tokens.numel())
                calls_us.append(1e6 * (time.perf_counter() - before_s))
            now_s = time.monotonic()
            if began_s is None and now_s - first_s > WARM_S:
                began_s, steps = ready_s(), 0
                calls_us.clear()
                if run is not None:
                    rounds, waited_s = run.round_count, run.waited_s
            elif began_s is not None and not told and now_s - began_s > options.seconds:
                told = True
                took_s = ready_s() - began_s
                found = {
                    "params": params,
                    "steps": steps,
                    "seconds": took_s,
                    "steps_per_s": steps / took_s,
                    "loss": loss.item(),
                    "gpu_bytes_max": torch.cuda.max_memory_allocated() if cuda else 0,
                }
                if run is not None:
                    quiet, slow = np.quantile(calls_us, [0.5, 0.99])
                    found |= {
                        "rounds": run.round_count - rounds,
                        "waited_s": run.waited_s - waited_s,
                        "call_us_median": quiet,
                        "call_us_p99": slow,
                        "call_us_max": max(calls_us),
                    }
                partial = options.log.with_suffix(".part")
                partial.write_text(json.dumps(found))
                partial.rename(options.log)


if __name__ == "__main__":
    main()
