"""A training script to start from: put in your own model, data and optimizer.

    holdfast join INVITE -- python train.py

The lines with `holdfast` and `run` make it part of a run. It learns to predict the next byte of a text. The
text is Python's own standard library, so the script runs as it is, without a download.
"""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch
from torch import nn

import holdfast

CONTEXT = 32  # bytes that the model sees
WIDTH = 64
BATCH = 16


def load_text() -> torch.Tensor:
    """Read some megabytes. Whether machines have the same data or parts of it is up to your script."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = b"".join(file.read_bytes() for file in files)
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long()


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)  # only the founder's initial weights are used
    model = nn.Sequential(
        nn.Embedding(256, WIDTH),
        nn.Flatten(),
        nn.Linear(CONTEXT * WIDTH, 4 * WIDTH),
        nn.GELU(),
        nn.Linear(4 * WIDTH, 256),
    ).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loss_of = nn.CrossEntropyLoss()
    text = load_text()

    run = holdfast.attach(model, optimizer)  # from here on the model holds the run's weights
    # A joiner's rate begins low, while its optimizer has no state; let schedules follow the run's step.
    rates = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: run.rate_scale)
    random = run.generator()  # every machine draws different samples, also after a restart

    while not run.finished:
        starts = torch.randint(len(text) - CONTEXT, (BATCH,), generator=random)
        windows = torch.stack([text[start : start + CONTEXT + 1] for start in starts]).to(device)
        loss = loss_of(model(windows[:, :-1]), windows[:, -1])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        # The only call that waits for other machines or changes the weights. Tokens are the update's weight.
        run.step(loss=loss.item(), tokens=BATCH)
        rates.step()

    torch.save(model.state_dict(), "final.pt")  # the same weights at every machine
    print(f"finished after {run.round_count} rounds, loss {loss.item():.3f}", flush=True)
    run.close()


if __name__ == "__main__":
    main()
