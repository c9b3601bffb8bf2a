"""A training script to start from: put in your own model, data and optimizer.

    holdfast join INVITE -- python train.py                                   as a part of a run
    HOLDFAST_STANDALONE=1 HOLDFAST_STANDALONE_STEPS=2000 python train.py      alone, to try it

The lines with `holdfast` and `run` make it part of a run. It learns to predict the next byte of a
text. The text is Python's own standard library, so the script runs as it is, without a download.
"""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch
from torch import nn

import holdfast

CONTEXT = 32  # bytes that the model sees
WIDTH = 64
HIDDEN = 512
BATCH = 32
HELD_OUT = 100_000  # bytes at the end of the text that are not trained on
TOLD_EVERY = 200  # steps between two lines in the terminal


def load_text() -> torch.Tensor:
    """Read some megabytes. Whether machines have the same data or parts of it is up to your
    script.
    """
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = b"".join(file.read_bytes() for file in files)
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long()


def windows_at(text: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
    """Return the bytes from each start on: ``CONTEXT`` that the model sees, and the one that
    follows.
    """
    return text[starts[:, None] + torch.arange(CONTEXT + 1, device=text.device)]


def main() -> None:
    torch.set_num_threads(1)  # two peers may share this machine; for a larger model take more
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)  # only the founder's initial weights are used
    model = nn.Sequential(
        nn.Embedding(256, WIDTH),
        nn.Flatten(),
        nn.Linear(CONTEXT * WIDTH, HIDDEN),
        nn.GELU(),
        nn.Linear(HIDDEN, 256),
    ).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loss_of = nn.CrossEntropyLoss()
    text = load_text().to(device)
    trained, held_out = text[:-HELD_OUT], text[-HELD_OUT:]

    run = holdfast.attach(model, optimizer)  # from here on the model holds the run's weights

    def rate(_step: int) -> float:
        """Lower the rate over the run's steps; a joiner's begins low, while its optimizer has no
        state.
        """
        done = run.global_step / run.total_steps if run.total_steps else 0.0
        return run.rate_scale * (1.0 - 0.9 * min(1.0, done))

    rates = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    random = run.generator()  # every machine draws different samples, also after a restart

    @torch.no_grad()
    def validate() -> float:
        """Return the loss on the text held back, which no machine trains on."""
        windows = windows_at(held_out, torch.arange(0, HELD_OUT - CONTEXT, CONTEXT, device=device))
        return float(loss_of(model(windows[:, :-1]), windows[:, -1]))

    while not run.finished:
        starts = torch.randint(len(trained) - CONTEXT, (BATCH,), generator=random).to(device)
        windows = windows_at(trained, starts)
        loss = loss_of(model(windows[:, :-1]), windows[:, -1])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        # The only call that waits for other machines or changes the weights. Tokens are the
        # update's weight.
        run.step(loss=loss.item(), tokens=BATCH)
        rates.step()
        if run.global_step % TOLD_EVERY == 0:
            run.log(validation_loss=validate())  # the page draws it, `holdfast status` lists it
            of = f" of {run.total_steps}" if run.total_steps else ""
            print(f"step {run.global_step}{of}: loss {loss.item():.3f}", flush=True)

    # The same weights at every machine, so the same loss.
    print(f"finished, loss on the text held back {validate():.3f}", flush=True)
    if run.is_leader:  # one machine saves for all
        torch.save(model.state_dict(), "final.pt")
        print("the final weights are in final.pt", flush=True)
    run.close()


if __name__ == "__main__":
    main()
