"""Leased samples in the real frameworks, without a daemon: what a trainer trains on, micro-batch by
micro-batch. Each test imports its framework, so that collecting them costs no worker seconds.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

import holdfast
from holdfast.client.attach_errors import MisuseError
from holdfast.client.frameworks.peer_data import draw_leased
from holdfast.client.hook import Run
from holdfast.client.standalone import STANDALONE_VARIABLE, STEPS_VARIABLE

LENGTH = 50
BATCH = 4
ACCUMULATED = 3  # neither divides the batches of an epoch: its last step has one micro-batch
STEPS = 12
WORKERS = pytest.mark.parametrize("workers", [0, 2])


class Numbers(Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"numbers": torch.tensor(index)}


class Model(nn.Module):
    """Remembers what it was trained on."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.seen: list[int] = []

    def forward(self, numbers: torch.Tensor) -> dict[str, torch.Tensor]:
        self.seen += numbers.tolist()
        return {"loss": (self.weight * numbers).mean()}


class Endless(IterableDataset[int]):
    """Data that are read in order."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(LENGTH))


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(STANDALONE_VARIABLE, "1")
    monkeypatch.setenv(STEPS_VARIABLE, str(STEPS))


def check(run: Run, seen: list[int]) -> None:
    """Each sample was trained once before any was trained again, and the run was told of all of
    them.
    """
    assert len(seen) > 2 * LENGTH
    for start in range(0, len(seen) - LENGTH, LENGTH):
        assert sorted(seen[start : start + LENGTH]) == list(range(LENGTH))
    assert len(set(seen[2 * LENGTH :])) == len(seen) - 2 * LENGTH
    assert run.epoch == (len(seen) - 1) // LENGTH
    assert run._machine.samples == len(seen)


@pytest.mark.slow
@WORKERS
def test_the_trainer_of_transformers_trains_on_each_sample_once(
    tmp_path: Path, workers: int
) -> None:
    from transformers import Trainer, TrainingArguments

    member = holdfast.TransformersCallback(leased=True)
    model = Model()
    arguments = TrainingArguments(
        str(tmp_path),
        per_device_train_batch_size=BATCH,
        gradient_accumulation_steps=ACCUMULATED,
        dataloader_num_workers=workers,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=Numbers(), callbacks=[member])
    trainer.train()
    assert trainer.state.global_step == STEPS
    check(member.run, model.seen)


# Of machines with Slurm, with few workers, of a newer torch, ...
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
@WORKERS
def test_the_trainer_of_lightning_trains_on_each_sample_once(workers: int) -> None:
    import lightning

    class Module(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = Model()

        def training_step(self, batch: dict[str, torch.Tensor], _index: int) -> torch.Tensor:
            return self.model(**batch)["loss"]  # type: ignore[no-any-return]

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), 1e-3)

    member = holdfast.LightningCallback(leased=True)
    module = Module()
    trainer = lightning.Trainer(
        accelerator="cpu",
        accumulate_grad_batches=ACCUMULATED,
        reload_dataloaders_every_n_epochs=2,
        callbacks=[member],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(
        module,
        DataLoader(
            Numbers(), BATCH, shuffle=True, num_workers=workers, persistent_workers=workers > 0
        ),
    )
    assert trainer.global_step == STEPS
    check(member.run, module.model.seen)


@WORKERS
def test_a_loop_of_accelerate_trains_on_each_sample_once(workers: int) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATED)
    plain = Model()
    sgd = torch.optim.SGD(plain.parameters(), 1e-3)
    model, optimizer, loader = accelerator.prepare(
        plain, sgd, DataLoader(Numbers(), BATCH, shuffle=True, num_workers=workers)
    )
    run = holdfast.AccelerateRun(accelerator, model, optimizer, loader=loader, leased=True)
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch)["loss"])
            optimizer.step()
            optimizer.zero_grad()
        run.step(0.0, tokens=BATCH)
        if run.finished:
            break
    run.close()
    check(run.run, plain.seen)


def test_what_cannot_be_leased_is_refused() -> None:
    run: Any = None  # which is not reached
    with pytest.raises(MisuseError, match="one process"):
        draw_leased(DataLoader(Numbers(), BATCH), run, 2)
    for loader in (
        DataLoader(Endless(), BATCH),
        DataLoader(Numbers(), batch_size=None),
        None,
    ):
        with pytest.raises(MisuseError, match="a DataLoader with a batch size"):
            draw_leased(loader, run, 1)
