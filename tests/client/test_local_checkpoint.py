"""A trainer's local checkpoint: a resumed trainer goes on as if it had never stopped."""

from __future__ import annotations

import random
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from holdfast.client.attach import attach
from holdfast.client.state.inner_optimizer import InnerOptimizer
from holdfast.client.state.local_checkpoint import LocalCheckpoint
from holdfast.protocol.messages import KeepState
from tests.client.fake_daemon import FakeDaemon, settled, talking

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),
    pytest.mark.usefixtures("group_of_one"),  # which ``ZeroRedundancyOptimizer`` needs
]


def sharded(parameters: list[nn.Parameter], **more: bool) -> torch.optim.Optimizer:
    from torch.distributed.optim import ZeroRedundancyOptimizer  # warns

    return ZeroRedundancyOptimizer(parameters, torch.optim.AdamW, lr=0.1, **more)


MAKERS: dict[str, Any] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "plain": lambda p: torch.optim.SGD(p, lr=0.1),
    "two groups": lambda p: torch.optim.AdamW(
        [{"params": [each], "lr": 0.1 * (i + 1)} for i, each in enumerate(p)]
    ),
    "sharded": sharded,
    "Muon": lambda p: torch.optim.Muon(each for each in p if each.ndim == 2),
} | {
    name: each
    for name, each in vars(torch.optim).items()
    if isinstance(each, type) and name not in ("Optimizer", "Muon")
}


def make(
    kind: str = "adamw", width: int = 3, dtype: torch.dtype = torch.float32
) -> tuple[nn.Linear, torch.optim.Optimizer]:
    model = nn.Linear(width, 2, dtype=dtype)
    nn.init.constant_(model.weight, 0.5)
    nn.init.constant_(model.bias, 0.25)
    return model, MAKERS[kind](list(model.parameters()))


def train(model: nn.Linear, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
    """Take steps that draw from all three generators."""
    losses = []

    def closure() -> float:
        optimizer.zero_grad()
        loss = (model(inputs) - target).square().mean()
        loss.backward()
        if isinstance(optimizer, torch.optim.SparseAdam):
            for each in model.parameters():
                assert each.grad is not None
                each.grad = each.grad.to_sparse()
        return float(loss.item())

    for _ in range(steps):
        inputs = torch.randn(4, model.in_features) + float(np.random.standard_normal())
        inputs, target = inputs.to(model.weight.dtype), random.random()
        losses.append(optimizer.step(closure))
    return [*losses, *model.weight.flatten().tolist()]


def kept(path: Path, optimizer: torch.optim.Optimizer, step: int) -> LocalCheckpoint:
    own = LocalCheckpoint(path, optimizer)
    own.keep(step)
    own.close()
    return own


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "trainer.safetensors"


@pytest.mark.fault(
    "a trainer starts again",
    "its own file",
    "with `checkpoint.trainer`, moments and random numbers as at the last checkpoint; what does not"
    " fit is not used",
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("kind", list(MAKERS))
def test_it_goes_on_as_if_it_had_never_stopped(path: Path, kind: str, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    model, optimizer = make(kind, dtype=dtype)
    train(model, optimizer, 3)
    own = LocalCheckpoint(path, optimizer)
    own.keep(3)
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    wanted = train(model, optimizer, 4)  # while it is written
    own.close()
    torch.manual_seed(2)
    random.seed(2)
    np.random.seed(2)
    again, fresh = make(kind, dtype=dtype)
    again.load_state_dict(weights)
    assert LocalCheckpoint(path, fresh).restore(3) == (kind not in ("plain", "SGD"))
    assert train(again, fresh, 4) == wanted
    assert path.stat().st_mode & 0o777 == 0o600
    assert [each.name for each in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize("kind", list(MAKERS))
def test_a_cleared_optimizer_goes_on_as_a_new_one(kind: str) -> None:
    """Its state came from losses, or made an update, that were not finite."""
    model, optimizer = make(kind)
    inner = InnerOptimizer(optimizer)
    train(model, optimizer, 3)
    inner.mark_spoilt()
    inner.renew(3, first=False)
    model.load_state_dict(make()[0].state_dict())
    runs = []
    for each in ((model, optimizer), make(kind)):
        torch.manual_seed(1)
        random.seed(1)
        np.random.seed(1)
        runs.append(train(*each, 4))
    assert runs[0] == runs[1]


def test_the_scripts_settings_are_not_kept(path: Path) -> None:
    _model, optimizer = make()
    kept(path, optimizer, 0)
    _model, fresh = make()
    fresh.param_groups[0]["lr"] = 0.007
    LocalCheckpoint(path, fresh).restore(0)
    assert fresh.param_groups[0]["lr"] == 0.007


def test_a_state_that_the_script_brings_stays(path: Path) -> None:
    model, optimizer = make()
    train(model, optimizer, 2)
    own = kept(path, optimizer, 2)
    train(model, optimizer, 1)
    before = torch.get_rng_state()
    assert not own.restore(3)
    assert optimizer.state[model.weight]["step"] == 3
    assert torch.equal(torch.get_rng_state(), before)


def test_without_one_nothing_is_restored(path: Path) -> None:
    assert not LocalCheckpoint(path, make()[1]).restore(10)


@pytest.mark.fault("a trainer starts again")
@pytest.mark.parametrize("damage", ["junk", "cut", "other", "later", "format"])
def test_what_does_not_fit_is_left_alone_and_said(path: Path, damage: str) -> None:
    model, optimizer = make()
    train(model, optimizer, 2)
    kept(path, optimizer, 20 if damage == "later" else 2)
    data = path.read_bytes()
    if damage == "junk":
        path.write_bytes(b"what is this")
    elif damage == "cut":
        path.write_bytes(data[:-9])
    elif damage == "format":
        path.write_bytes(data.replace(b'\\"format\\": 1', b'\\"format\\": 2'))
    fresh = make(width=4)[1] if damage == "other" else make()[1]
    with pytest.warns(UserWarning, match="is not used"):
        assert not LocalCheckpoint(path, fresh).restore(10)
    assert not fresh.state


def test_a_state_that_cannot_be_stored_warns_and_the_previous_one_stays(path: Path) -> None:
    model, optimizer = make()
    train(model, optimizer, 2)
    own = kept(path, optimizer, 2)
    before = path.read_bytes()
    optimizer.state[model.weight]["history"] = [torch.zeros(3), {}]
    with pytest.warns(UserWarning, match="'optimizer.0.history.1' is a dict"):
        own.keep(3)
    own.close()
    assert path.read_bytes() == before


def test_what_cannot_be_kept_is_said_at_the_start(path: Path) -> None:
    with pytest.warns(UserWarning, match=r"not kept: pass the optimizer to holdfast\.attach"):
        LocalCheckpoint(path, None)
    hidden = sharded(list(nn.Linear(2, 2).parameters()), overlap_with_ddp=True)
    with pytest.warns(UserWarning, match="not kept: ZeroRedundancyOptimizer hides it"):
        own = LocalCheckpoint(path, hidden)
    with pytest.warns(UserWarning, match="not kept: .* fully initialized"):
        own.keep(1)


@pytest.mark.parametrize(("step", "used"), [(6, True), (7, False)])
def test_a_file_of_a_later_step_than_the_run_goes_to_is_not_used(
    path: Path, step: int, used: bool
) -> None:
    """The run went back to a checkpoint that is older than the file."""
    model, optimizer = make()
    train(model, optimizer, 3)
    kept(path, optimizer, step)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert LocalCheckpoint(path, make()[1]).restore(6) == used
    assert ["the run goes to 6 now" in str(each.message) for each in caught] == [True] * (not used)


def test_where_nothing_can_be_written_it_is_said(tmp_path: Path) -> None:
    own = LocalCheckpoint(tmp_path / "none" / "trainer.safetensors", make()[1])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        own.keep(1)
        own.close()
    assert any("cannot be written" in str(each.message) for each in caught)


def test_the_daemon_asks_for_it_and_the_next_trainer_has_it(path: Path) -> None:
    def first(daemon: FakeDaemon) -> None:
        daemon.start(local_checkpoint=str(path), step_limit=4)
        daemon.say(KeepState())
        settled(path.exists)
        daemon.load(step=4)

    model, optimizer = make()
    with (
        talking(first, stay=True) as socket_path,
        attach(model, optimizer, socket_path=socket_path) as run,
    ):
        for _ in range(5):
            train(model, optimizer, 1)
            run.step()

    def second(daemon: FakeDaemon) -> None:
        daemon.open_arenas(local_checkpoint=str(path))
        daemon.found()
        daemon.load(step=200)

    again, fresh = make()
    with (
        talking(second, stay=True) as socket_path,
        attach(again, fresh, socket_path=socket_path) as run,
    ):
        assert 0 < fresh.state[again.weight]["step"] <= 5  # that many were made
        assert run.rate_scale == 1.0, "it needs no ramp"
