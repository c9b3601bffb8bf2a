"""Training scripts as people of other tools reported them: ``python reported_scripts.py NAME``.

Each function is a model and what its script does besides training; its docstring names reports of
it. ``test_reports.py`` says what becomes of it in a run of two peers.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import io
import logging.config
import multiprocessing
import os
import resource
import shutil
import signal
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import holdfast

INPUTS = 8
BATCH = 16

Batches = Iterator[torch.Tensor]


def tensors() -> Batches:
    while True:
        yield torch.randn(BATCH, INPUTS)


@dataclass
class Script:
    """One script: what it trains, on what, and what it does before, at each step and at the end."""

    model: nn.Module
    optimizer: torch.optim.Optimizer | None = None
    batches: Callable[[], Batches] = tensors
    at_start: Callable[[], object] = lambda: None
    at_step: Callable[[nn.Module], object] = lambda model: None
    inputs: Callable[[torch.Tensor], torch.Tensor] = lambda batch: batch


def linear() -> nn.Sequential:
    return nn.Sequential(nn.Linear(INPUTS, 8), nn.Tanh(), nn.Linear(8, 1))


# ---------------------------------------------------------------- the script's own processes


def workers_at_the_end() -> Script:
    """pytorch#43455, ultralytics#25024: workers of a loader die with the script, and that is its
    failure.
    """

    def loaded() -> Batches:
        loader = DataLoader(
            TensorDataset(torch.randn(4 * BATCH, INPUTS)),
            batch_size=BATCH,
            num_workers=2,
            persistent_workers=True,
        )
        globals()["kept"] = loader  # its workers live until the interpreter ends
        while True:
            for (batch,) in loader:
                yield batch

    return Script(linear(), batches=loaded)


def a_forked_child_exits() -> Script:
    """wandb#1927: a child of the script ends as Python does, with all that was registered for the
    end.
    """

    def child(_model: nn.Module) -> None:
        process = multiprocessing.get_context("fork").Process(target=sys.exit, args=(3,))
        process.start()
        process.join()

    return Script(linear(), at_step=child)


def its_own_signals() -> Script:
    """pytorch#67538, olmoearth_pretrain#604: libraries set handlers for SIGTERM, SIGINT and
    SIGCHLD.
    """

    def handlers() -> None:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD):
            signal.signal(number, lambda *_: None)

    return Script(linear(), at_start=handlers)


def a_step_from_a_thread() -> Script:
    """Megatron-Bridge#4375, PaddleX#1521: the loop is not in the main thread."""
    return Script(linear())


# ---------------------------------------------------------------- models


def parametrized() -> Script:
    """pytorch#61470, pytorch-lightning#1550: weights that are computed of other parameters, with
    buffers that change in training.
    """
    model = nn.Sequential(nn.Linear(INPUTS, 8), nn.Linear(8, 1))
    nn.utils.parametrizations.weight_norm(model[0])
    nn.utils.parametrizations.spectral_norm(model[1])
    return Script(model)


def sparse_gradients() -> Script:
    """OpenNMT-py#1015, transformers#30276: embeddings whose gradients are sparse."""
    model = nn.Sequential(nn.Embedding(32, 4, sparse=True), nn.Flatten(), nn.Linear(32, 1))
    split = torch.optim.SparseAdam(list(model[0].parameters()))
    return Script(model, split, inputs=lambda batch: batch.abs().long() % 32)


def odd_names() -> Script:
    """Names with signs that files, paths and pages take for something else."""
    model = linear()
    model[0].weights = nn.ParameterDict(
        {name: torch.ones(2) for name in ("a/b", "<i>é", " ", "%s")}
    )
    return Script(model)


# ---------------------------------------------------------------- what scripts do to the model


def copied() -> Script:
    """pytorch#82070, diffusers#1799: the wrapped model can no longer be copied or saved whole."""

    def copies(model: nn.Module) -> None:
        copy.deepcopy(model)
        torch.save(model, io.BytesIO())

    return Script(linear(), at_step=copies)


def moved_to_another_type() -> Script:
    """pytorch#7844, plenoptic#404: the model is moved to another type after it was wrapped, and the
    optimizer with it.
    """
    return Script(linear(), at_step=lambda model: model.double().float())


def another_default_type() -> Script:
    """pytorch#126533, thinc#674: the script changes the type of all new tensors."""
    return Script(
        linear(),
        at_start=lambda: torch.set_default_dtype(torch.float64),
        inputs=lambda batch: batch.float(),
    )


def another_default_device() -> Script:
    """deepmd-kit#3307: the script changes the device of all new tensors; here to one without
    memory.
    """
    return Script(
        linear(),
        at_start=lambda: torch.set_default_device("meta"),
        inputs=lambda batch: torch.ones(BATCH, INPUTS, device="cpu"),
    )


def without_gradients() -> Script:
    """Everything around the steps is under no_grad, as evaluation loops leave it."""
    return Script(linear(), at_start=lambda: torch.set_grad_enabled(False))


def deterministic_and_strict() -> Script:
    """Only deterministic operations, every warning an error, uninitialized memory filled."""

    def strict() -> None:
        torch.use_deterministic_algorithms(True)
        warnings.simplefilter("error")

    return Script(linear(), at_start=strict)


# ---------------------------------------------------------------- what scripts do to their process


def silent_logging() -> Script:
    """textflint#55, DeepCAVE#38: logging is configured anew, and what others log is switched
    off.
    """

    def silence() -> None:
        logging.config.dictConfig({"version": 1, "disable_existing_loggers": True})
        logging.disable(logging.CRITICAL)

    return Script(linear(), at_start=silence)


def a_folder_that_is_gone() -> Script:
    """The script's working directory changes, and is removed."""

    def leave() -> None:
        os.chdir(folder := tempfile.mkdtemp())
        shutil.rmtree(folder)

    return Script(linear(), at_start=leave)


def few_open_files() -> Script:
    """pytorch#973: few files may be open at a time."""
    return Script(linear(), at_start=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (48, 48)))


def an_empty_environment() -> Script:
    """A launcher within the script clears the environment."""
    return Script(linear(), at_start=os.environ.clear)


def asks_at_the_terminal() -> Script:
    """A library asks a question, and nobody is there to answer."""

    def ask() -> None:
        with contextlib.suppress(EOFError):
            input("choose 1, 2 or 3: ")

    return Script(linear(), at_start=ask)


def train(script: Script) -> None:
    model, batches = script.model, script.batches()
    optimizer = script.optimizer or torch.optim.SGD(model.parameters(), lr=0.01)
    script.at_start()
    with holdfast.attach(model, optimizer) as run:
        while not run.finished:
            with torch.enable_grad():
                output = model(script.inputs(next(batches)))
                loss = output.square().mean()
                optimizer.zero_grad()
                loss.backward()
            optimizer.step()
            script.at_step(model)
            run.step(loss=loss.item(), tokens=BATCH)
    digest = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        digest.update(name.encode() + tensor.cpu().contiguous().view(torch.uint8).numpy().tobytes())
    print(f"\nends with {digest.hexdigest()}", flush=True)


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    script = globals()[name := sys.argv[1]]()
    torch.manual_seed(os.getpid())  # other data at every peer
    if name == a_step_from_a_thread.__name__:
        thread = threading.Thread(target=train, args=(script,))
        thread.start()
        thread.join()
    else:
        train(script)


if __name__ == "__main__":
    main()
