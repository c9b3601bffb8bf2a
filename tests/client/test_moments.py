"""Moments from one trainer's optimizer to another's: what arrives, and what is refused."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import nn

from holdfast.client.hook import attach
from holdfast.client.moments import PLAIN_VALUES_MAX, Moments, MomentsError
from holdfast.client.tensors import find_shared
from holdfast.protocol.messages import (
    GiveMoments,
    MomentsGiven,
    MomentsTaken,
    MomentsWanted,
    SetContributing,
    TakeMoments,
)
from tests.client.fake_daemon import FakeDaemon, talking

WIDTH = 100  # 6,400 weights, which are coded, and 64 biases, which are not

MAKERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3),
    "fused": lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=1e-3, amsgrad=True),
    "momentum": lambda p: torch.optim.SGD(p, lr=1e-3, momentum=0.9),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, momentum=0.9, centered=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-3),
    "adamax": lambda p: torch.optim.Adamax(p, lr=1e-3),
}


def make(
    kind: str = "adamw", width: int = WIDTH, dtype: torch.dtype = torch.float32
) -> tuple[nn.Linear, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = nn.Linear(width, 64).to(dtype)
    return model, MAKERS[kind](list(model.parameters()))


def train(model: nn.Linear, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for step in range(steps):
        torch.manual_seed(step)
        inputs = torch.randn(8, model.in_features).to(model.weight.dtype)
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()


def exchange(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> Moments:
    return Moments(str(path), optimizer, find_shared(model), background=lambda work: work())


def given(giver: Moments) -> str:
    """Have it give; what it says of that."""
    said: list[str] = []
    giver.give(said.append)
    (reason,) = said
    return reason


def hand_over(path: Path, giver: Moments) -> None:
    assert given(giver) == ""
    Path(f"{path}.given").rename(f"{path}.taken")


def off(value: torch.Tensor, wanted: torch.Tensor) -> float:
    value, wanted = value.detach().float(), wanted.detach().float()
    return float((value - wanted).norm() / wanted.norm())


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "moments"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", list(MAKERS))
def test_the_next_update_is_nearly_the_donors(path: Path, kind: str, dtype: torch.dtype) -> None:
    model, optimizer = make(kind, dtype=dtype)
    train(model, optimizer, 20)
    hand_over(path, exchange(path, model, optimizer))
    again, fresh = make(kind, dtype=dtype)
    again.load_state_dict(model.state_dict())
    exchange(path, again, fresh).take()
    for mine, its in zip(again.parameters(), model.parameters(), strict=True):
        assert fresh.state[mine].keys() == optimizer.state[its].keys()
        for name, wanted in optimizer.state[its].items():
            value = fresh.state[mine][name]
            if isinstance(wanted, torch.Tensor):
                assert value.dtype == wanted.dtype
                assert value.shape == wanted.shape
                large = wanted.numel() > PLAIN_VALUES_MAX
                assert off(value, wanted) < 0.02 if large else torch.equal(value, wanted)
            else:
                assert value == wanted
    before = model.weight.detach().clone()
    train(model, optimizer, 1)
    train(again, fresh, 1)
    if dtype is torch.float32:
        assert off(again.weight - before, model.weight - before) < 0.02


def test_a_moment_takes_little_more_than_a_byte_a_value(path: Path) -> None:
    model, optimizer = make()
    train(model, optimizer, 3)
    assert given(exchange(path, model, optimizer)) == ""
    with safe_open(f"{path}.given", framework="pt") as file:
        sizes = [file.get_tensor(key).nbytes for key in file.keys()]  # noqa: SIM118
    assert sum(sizes) < 2.2 * model.weight.numel() + 8 * 64 + 8
    assert Path(f"{path}.given").stat().st_mode & 0o777 == 0o600
    assert [each.name for each in path.parent.iterdir()] == ["moments.given"]


def test_what_is_given_is_what_it_was_at_the_boundary(path: Path) -> None:
    model, optimizer = make()
    train(model, optimizer, 5)
    wanted = optimizer.state[model.weight]["exp_avg"].clone()
    works: list[Callable[[], None]] = []
    said: list[str] = []
    giver = Moments(str(path), optimizer, find_shared(model), background=works.append)
    giver.give(said.append)
    giver.give(said.append)  # one that is still being written will do
    train(model, optimizer, 5)
    (work,) = works
    work()
    assert said == [""]
    Path(f"{path}.given").rename(f"{path}.taken")
    again, fresh = make()
    exchange(path, again, fresh).take()
    assert off(fresh.state[again.weight]["exp_avg"], wanted) < 0.02
    assert fresh.state[again.weight]["step"] == 5


@pytest.mark.parametrize(
    ("case", "why"),
    [
        ("width", "trains no 'weight'"),
        ("optimizer", "of the optimizer"),
        ("switch", "of the optimizer"),
        ("junk", "cannot be read"),
        ("cut", "cannot be read"),
        ("absent", "cannot be read"),
        ("scale", "cannot be read: a scale that no block can have"),
    ],
)
def test_what_does_not_fit_changes_nothing_and_is_said(path: Path, case: str, why: str) -> None:
    model, optimizer = make()
    train(model, optimizer, 2)
    hand_over(path, exchange(path, model, optimizer))
    taken = Path(f"{path}.taken")
    data = taken.read_bytes()
    match case:
        case "junk":
            taken.write_bytes(b"what is this")
        case "cut":
            taken.write_bytes(data[:-9])
        case "absent":
            taken.unlink()
        case "scale":
            with safe_open(taken, framework="pt") as file:
                scale = file.get_tensor("1.scales").numpy().tobytes()
            assert data.count(scale) == 1
            taken.write_bytes(data.replace(scale, b"\xff" * len(scale)))
    kind = {"optimizer": "adagrad", "switch": "amsgrad"}.get(case, "adamw")
    again, fresh = make(kind, WIDTH + 1 if case == "width" else WIDTH)
    before = {each: dict(entries) for each, entries in fresh.state.items()}  # Adagrad has some
    with pytest.raises(MomentsError, match=why):
        exchange(path, again, fresh).take()
    assert {each: dict(entries) for each, entries in fresh.state.items()} == before


def test_a_parameter_whose_state_nobody_knows_begins_anew(path: Path) -> None:
    model, optimizer = make()
    train(model, optimizer, 2)
    optimizer.state[model.weight]["secret"] = torch.zeros_like(model.weight)
    optimizer.state[model.bias]["secret"] = torch.ones(3)  # small: goes as it is
    with pytest.warns(UserWarning, match="what 'secret' of 'weight' is"):
        hand_over(path, exchange(path, model, optimizer))
    again, fresh = make()
    exchange(path, again, fresh).take()
    assert not fresh.state.get(again.weight)
    assert fresh.state[again.bias]["secret"].tolist() == [1, 1, 1]
    train(again, fresh, 2)


def test_what_is_not_finite_is_not_given(path: Path) -> None:
    model, optimizer = make()
    train(model, optimizer, 2)
    optimizer.state[model.weight]["exp_avg_sq"][3, 7] = float("nan")
    assert given(exchange(path, model, optimizer)) == "its optimizer's moments are not finite"
    assert not list(path.parent.iterdir())


def test_an_optimizer_without_a_state_has_nothing_to_give(path: Path) -> None:
    with pytest.raises(MomentsError, match="no state"):
        given(exchange(path, *make()))


# ---------------------------------------------------------------- in the loop


def joining(path: Path, daemon: FakeDaemon, *, hold_step: int) -> None:
    daemon.open_arenas(moments=str(path))
    daemon.found()
    daemon.load(step=200, hold_step=hold_step)
    daemon.say(SetContributing(True, ""))
    daemon.hear(MomentsWanted)


def test_a_joiner_asks_takes_them_and_needs_no_ramp(path: Path) -> None:
    donor, its = make()
    train(donor, its, 30)
    hand_over(path, exchange(path, donor, its))

    def script(daemon: FakeDaemon) -> None:
        joining(path, daemon, hold_step=202)
        daemon.say(TakeMoments())
        assert daemon.hear(MomentsTaken).reason == ""
        daemon.load(step=202, finished=True)  # a later load leaves them alone

    model, optimizer = make()
    with (
        talking(script, stay=True) as socket_path,
        attach(model, optimizer, socket_path=socket_path) as run,
    ):
        assert run.rate_scale < 1.0
        while not run.finished:
            train(model, optimizer, 1)
            run.step()
        assert run.rate_scale == 1.0
        assert optimizer.state[model.weight]["step"] >= 30


def test_one_that_came_too_late_or_does_not_fit_leaves_the_ramp(path: Path) -> None:
    donor, its = make(width=WIDTH + 1)
    train(donor, its, 3)
    hand_over(path, exchange(path, donor, its))

    def script(daemon: FakeDaemon) -> None:
        joining(path, daemon, hold_step=202)
        daemon.say(TakeMoments())
        assert "trains no 'weight'" in daemon.hear(MomentsTaken).reason
        daemon.round(1, 203, 0.0, hold_step=205)
        daemon.say(TakeMoments())
        assert daemon.hear(MomentsTaken).reason == "it has contributed meanwhile"
        daemon.say(GiveMoments())
        assert daemon.hear(MomentsGiven).reason == "its own optimizer has just begun"
        daemon.load(step=205, finished=True)

    model, optimizer = make()
    with (
        talking(script, stay=True) as socket_path,
        attach(model, optimizer, socket_path=socket_path) as run,
    ):
        while not run.finished:
            train(model, optimizer, 1)
            run.step()
        assert run.rate_scale < 1.0


def test_a_donor_gives_beside_its_steps_and_trains_on_the_same(path: Path) -> None:
    plain, its = make()
    train(plain, its, 1)
    train(plain, its, 6)
    over = threading.Event()

    def script(daemon: FakeDaemon) -> None:
        daemon.open_arenas(moments=str(path))
        daemon.found()
        daemon.load(hold_step=3)
        daemon.say(GiveMoments())
        assert daemon.hear(MomentsGiven).reason == ""
        over.set()
        daemon.load(step=3, finished=True)

    model, optimizer = make()
    train(model, optimizer, 1)  # it brings a state: no load clears that
    with (
        talking(script, stay=True) as socket_path,
        attach(model, optimizer, socket_path=socket_path) as run,
    ):
        for step in range(6):
            torch.manual_seed(step)
            optimizer.zero_grad()
            model(torch.randn(8, WIDTH)).square().mean().backward()
            optimizer.step()
            before = {name: each.clone() for name, each in model.state_dict().items()}
            run.step()
            model.load_state_dict(before)  # the load at the end is not what is looked at
    assert over.is_set()
    for name, wanted in its.state[plain.weight].items():
        assert torch.equal(optimizer.state[model.weight][name], wanted)


def test_a_script_that_attaches_without_its_optimizer_gives_none(path: Path) -> None:
    def script(daemon: FakeDaemon) -> None:
        daemon.open_arenas(moments=str(path))
        daemon.found()
        daemon.load(step=200, hold_step=201)
        daemon.say(SetContributing(True, ""))
        daemon.say(GiveMoments())
        assert "without its optimizer" in daemon.hear(MomentsGiven).reason
        daemon.load(step=201, finished=True)

    model, optimizer = make()
    with (
        talking(script, stay=True) as socket_path,
        attach(model, socket_path=socket_path) as run,
        warnings.catch_warnings(),
    ):
        while not run.finished:
            train(model, optimizer, 1)
            run.step()
