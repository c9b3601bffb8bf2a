"""Calls that a run does not take: each one clear error, and what the script did before stands."""

from __future__ import annotations

import multiprocessing
import os
import threading
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import holdfast
from holdfast.client.attach import attach
from holdfast.client.attach_errors import ModelError
from holdfast.client.hook import Run
from holdfast.client.state.trained_parameters import TrainedParameters
from holdfast.protocol.messages import SetRole

from .fake_daemon import FakeDaemon, talking
from .plain_model import line

pytestmark = pytest.mark.real_time


def new(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.zeros(shape))


@pytest.fixture
def run() -> Any:
    with talking(FakeDaemon.start, stay=True) as path, attach(line(), socket_path=path) as run:
        yield run


@pytest.mark.parametrize(
    ("tokens", "error", "words"),
    [
        *((each, ValueError, "tokens must not be negative, got -") for each in (-1, np.int64(-3))),
        (2**64, ValueError, r"tokens must be of one step, and at most 2\*\*40, got"),
        *(
            (each, TypeError, "tokens must be a whole number")
            for each in (1.5, 2.0, "8", None, torch.tensor(1.0))
        ),
    ],
)
def test_what_is_no_count_of_tokens_is_refused(
    run: Run, tokens: Any, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        run.step(tokens=tokens)
    assert run.global_step == 0


@pytest.mark.parametrize("tokens", [np.int64(7), torch.tensor(7), np.uint8(7), 2**40])
def test_whole_numbers_of_other_kinds_are_taken(run: Run, tokens: Any) -> None:
    run.step(tokens=tokens)
    assert run._machine.tokens == int(tokens)
    assert type(run._machine.tokens) is int


def test_a_loss_may_be_a_tensor_that_requires_gradients(run: Run) -> None:
    run.step(loss=torch.tensor(0.5, requires_grad=True))
    assert run._quiet.loss[0] == 0.5


def test_a_step_after_close(run: Run) -> None:
    run.close()
    with pytest.raises(holdfast.MisuseError, match=r"run.step was called after run.close\(\)"):
        run.step()
    with pytest.raises(holdfast.MisuseError, match=r"run.log was called after"):
        run.log(rate=1.0)
    assert "closed" in repr(run)


def test_a_step_from_a_second_thread(run: Run) -> None:
    raised: list[BaseException] = []

    def step() -> None:
        try:
            run.step()
        except holdfast.MisuseError as error:
            raised.append(error)

    thread = threading.Thread(target=step)
    thread.start()
    thread.join()
    assert "another thread" in str(raised[0])
    assert run.global_step == 0


def test_a_step_in_a_forked_child(run: Run) -> None:
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        text = "another error"
        try:
            run.step()
            text = "it was taken"
        except holdfast.MisuseError as error:
            text = f"{type(error).__name__}: {error}"
        finally:
            os.write(writing, text.encode())
            os._exit(0)
    os.waitpid(child, 0)
    assert (
        os.read(reading, 1000).decode().startswith("MisuseError: run.step was called in a forked")
    )
    os.close(reading)
    os.close(writing)
    run.step()
    assert run.global_step == 1


def test_model_and_optimizer_swapped() -> None:
    model: Any = line()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(TypeError, match="they are swapped"):
        holdfast.attach(optimizer, model)
    with pytest.raises(TypeError, match=r"model must be a torch.nn.Module, got list"):
        holdfast.attach([model], optimizer)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"optimizer must be a torch.optim.Optimizer, got float"):
        holdfast.attach(model, 0.1)  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_a_model_that_is_scripted() -> None:
    model = nn.Sequential(torch.jit.script(line()))
    with pytest.raises(ModelError, match="the model is scripted") as caught:
        holdfast.attach(model, socket_path="/nowhere")
    assert "attach the module that torch.jit.script was given" in str(caught.value.hint)


def test_one_process_where_the_environment_says_several(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "8")
    with pytest.raises(ModelError, match="WORLD_SIZE is 8, so") as caught:
        holdfast.attach(line(), socket_path="/nowhere")
    assert "for a single process unset WORLD_SIZE" in str(caught.value.hint)


def test_a_worker_that_imports_a_script_without_a_main_guard(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(multiprocessing.current_process(), "_inheriting", True, raising=False)
    with pytest.raises(holdfast.MisuseError, match="by a worker process") as caught:
        holdfast.attach(line(), socket_path="/nowhere")
    assert "__main__" in str(caught.value.hint)


def test_a_parameter_that_is_replaced_after_attach() -> None:
    model = line()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def script(daemon: FakeDaemon) -> None:
        daemon.start(step_limit=2)  # where a trainer looks even if no round is due

    with talking(script, stay=True) as path, attach(model, optimizer, socket_path=path) as run:
        run.step()
        model.weight = nn.Parameter(torch.zeros(1, 3))
        with pytest.raises(
            holdfast.ModelError, match=r"trains the old 'weight' since attach"
        ) as found:
            run.step()
        assert "copy_" in found.value.hint


class Tied(nn.Module):
    """A layer, one that is frozen at first, a head tied to the first, and parameters beside the
    model.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = (nn.Linear(2, 2, bias=False) for _ in range(3))
        self.head.weight = self.first.weight
        self.second.weight.requires_grad_(False)
        self.register_buffer("mean", torch.zeros(2))
        self.beside = [torch.zeros(5, requires_grad=True), torch.zeros(6)]


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda m, _: m.add_module("new", nn.Linear(2, 3)), r"'new\.weight' came after attach"),
        (lambda m, _: m.add_module("first", nn.Linear(2, 2)), r"'first\.weight' came after"),
        (lambda m, _: m.head.register_parameter("weight", new(2, 2)), r"'head\.weight' came after"),
        (
            lambda m, _: m.second.register_parameter("weight", m.first.weight),
            "'first.*'second.*tied",
        ),
        (
            lambda _, o: o.add_param_group({"params": [new(7)]}),
            r"trains a new .* \(7,\) since attach",
        ),
        (lambda m, _: m.beside[1].requires_grad_(), r"trains a new .* \(6,\) since attach"),
    ],
    ids=["head", "layer", "untied", "tied", "group", "unfrozen"],
)
def test_what_comes_after_attach_is_named(change: Any, error: str) -> None:
    model = Tied()
    optimizer = torch.optim.SGD([*model.parameters(), *model.beside], lr=0.1)
    trained = TrainedParameters(model, optimizer)
    model.second.weight.requires_grad_(True)  # it is shared all the time
    model.mean = torch.ones(2)
    optimizer.param_groups[0]["params"][1] = model.second.weight = new(2, 2)
    model.third = model.second  # another name of what is shared
    trained.check()
    change(model, optimizer)
    with pytest.raises(holdfast.ModelError, match=error):
        trained.check()


def test_a_hint_is_part_of_the_traceback() -> None:
    with pytest.raises(holdfast.NoDaemonError, match="holdfast join INVITE -- python") as found:
        holdfast.attach(line())
    assert found.value.__notes__ == [found.value.hint]
    assert "HOLDFAST_STANDALONE=1" in found.value.hint


# ---------------------------------------------------------------- what a run says of itself


def test_who_leads_and_how_long_the_run_is() -> None:
    def script(daemon: FakeDaemon) -> None:
        daemon.open_arenas()
        daemon.found()
        daemon.say(SetRole(True, "", True, 400))
        daemon.load(step_limit=2)
        daemon.say(SetRole(True, "", False, 800))
        daemon.open_round(1, at_step=3, step_limit=5)

    with talking(script, stay=True) as path, attach(line(), socket_path=path) as run:
        assert run.is_leader
        assert run.total_steps == 400
        assert repr(run) == "<holdfast.Run at step 0 of 400, 0 rounds, contributing, leader>"
        run.step()
        run.step()  # waits at the limit for what comes next
        assert not run.is_leader
        assert run.total_steps == 800


def test_the_package_shows_what_a_script_needs() -> None:
    assert {"attach", "Run", "Step", "Merge", "Callback"} <= set(dir(holdfast))
    for name in holdfast.__all__:
        assert getattr(holdfast, name) is not None
