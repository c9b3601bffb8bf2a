"""Whole runs of real processes to their end: the arithmetic, unlike machines, addresses,
scripts.
"""

from __future__ import annotations

import subprocess
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn

from tests.processes.harness import (
    WITH_TORCH,
    Fleet,
    contributing,
    environment,
    member,
    spec,
)
from tests.processes.torch_trainer import make_model, train_step

pytestmark = pytest.mark.slow

Tensors = dict[str, NDArray[np.float32]]


def run_to_the_end(fleet: Fleet, names: str) -> list[Tensors]:
    """Wait until every peer has gone home by itself; the parameters that their trainers saved."""
    fleet.until(lambda s: s["state"] == "finished", "all rounds are committed")
    assert {name: fleet.nodes[name].wait() for name in names} == dict.fromkeys(names, 0)
    for name in names:
        assert "Traceback" not in fleet.nodes[name].log, name
    return [dict(np.load(fleet.folder / f"{name}.npz")) for name in names]


def join_all(fleet: Fleet, names: str, *script: str) -> None:
    for rank, name in enumerate(names):
        save = str(fleet.folder / f"{name}.npz")
        arguments = ("--rank", str(rank), "--save", save, *script)
        fleet.join(name, *arguments, founder=rank == 0, command=WITH_TORCH)


def same_bits(tensors: list[Tensors]) -> bool:
    first = tensors[0]
    return all(
        each.keys() == first.keys()
        and all(each[name].tobytes() == first[name].tobytes() for name in first)
        for each in tensors
    )


def parameters_of(model: nn.Module) -> Tensors:
    return {name: each.detach().numpy().copy() for name, each in model.named_parameters()}


# ---------------------------------------------------------------- unlike machines


def old_machine() -> dict[str, str]:
    """The environment in which numpy and torch behave as on a machine without vector extensions."""
    config: Any = np.show_config(mode="dicts")
    return {
        "NPY_DISABLE_CPU_FEATURES": " ".join(config["SIMD Extensions"].get("found", [])),
        "ATEN_CPU_CAPABILITY": "default",
    }


# What fp32 computes beside int8 is in int8, too: means, outer step, digests.
CODECS = ["int8", pytest.param("fp32", marks=pytest.mark.nightly)]


@pytest.mark.fault("unlike processors", "digests would differ", "they do not")
@pytest.mark.parametrize("codec", CODECS)
def test_unlike_processors_end_with_the_same_bits(fleet: Fleet, codec: str) -> None:
    names = "abc"
    toml = spec(rounds=8, sync_every=5, min_members=3, codec=codec)
    fleet.start_master(toml.replace("[reduce]", "[reduce]\naudit = 1.0"))  # and all checks agree
    for rank, name in enumerate(names):
        save = str(fleet.folder / f"{name}.npz")
        fleet.join(
            name,
            *("--rank", str(rank), "--save", save),
            founder=rank == 0,
            command=WITH_TORCH,
            env=old_machine() if name == "b" else None,
        )
    final = run_to_the_end(fleet, names)
    assert same_bits(final)
    status = fleet.master()
    assert status["audited"] >= 8
    assert status["revoked"] == {}
    assert status["committed"] == 8
    assert all(len(ended["contributors"]) == 3 for ended in status["past_rounds"])
    first = parameters_of(make_model(16))
    assert not same_bits([first, final[0]]), "it has trained"
    fleet.nodes["master"].process.terminate()
    assert fleet.nodes["master"].wait() == 0


# ---------------------------------------------------------------- data parallel


@torch.no_grad()
def load(model: nn.Module, values: Tensors) -> None:
    for name, parameter in model.named_parameters():
        parameter.copy_(torch.from_numpy(values[name]))


def test_with_one_step_a_round_it_is_data_parallel_training(fleet: Fleet) -> None:
    """Inner SGD: averaged gradients at every step."""
    steps, rate = 12, 0.1
    run = f'[run]\nrounds = {steps}\npreset = "allreduce"\n'
    fleet.start_master(f"{run}[membership]\nmin_members = 2\n")
    join_all(fleet, "ab", "--optimizer", "sgd", "--rate", str(rate))
    final = run_to_the_end(fleet, "ab")
    assert same_bits(final)

    models = [make_model(16), make_model(16)]
    theta = parameters_of(models[0])
    for step in range(steps):
        for rank, model in enumerate(models):
            load(model, theta)
            # A step of rate 1 leaves the gradient as the difference.
            train_step(model, torch.optim.SGD(model.parameters(), lr=0.0), rank, step)
        for name, value in theta.items():
            gradients = [dict(m.named_parameters())[name].grad for m in models]
            theta[name] = value - rate * sum(g.numpy() for g in gradients if g is not None) / 2
    for name, value in theta.items():
        np.testing.assert_allclose(final[0][name], value, rtol=0, atol=1e-6)


# ---------------------------------------------------------------- addresses


def test_ipv6_names_and_advertised_addresses_work_together(fleet: Fleet, free_port: int) -> None:
    more = ("--listen", "127.0.0.1:0")
    fleet.start_master(spec(rounds=5, min_members=3), listen="[::1]:0", more=more)
    assert [address.rpartition(":")[0] for address in fleet.master()["addresses"]] == [
        "127.0.0.1",
        "[::1]",
    ]
    scripts = {
        n: ("--rank", str(r), "--save", f"{fleet.folder}/{n}.npz") for r, n in enumerate("abc")
    }
    fleet.join("a", *scripts["a"], listen="[::1]:0", founder=True)
    fleet.join("b", *scripts["b"], listen="localhost:0")
    fleet.join(
        "c",
        *scripts["c"],
        listen=f"0.0.0.0:{free_port}",
        more=("--advertise", f"localhost:{free_port}"),
    )
    status = fleet.until(lambda s: len(s["members"]) == 3, "all have joined")
    listed = {name: (member(status, name) or {})["addresses"] for name in "abc"}
    assert listed["a"][0].startswith("[::1]:")
    assert listed["c"] == [f"localhost:{free_port}"]
    assert same_bits(run_to_the_end(fleet, "abc"))


# ---------------------------------------------------------------- scripts that do not fit


@pytest.mark.fault("another model in the script", "layout", "refused, with the first difference")
def test_a_script_with_other_shapes_is_refused_by_name_and_touches_nobody(fleet: Fleet) -> None:
    fleet.start_master(spec())
    for rank, name in enumerate("ab"):
        fleet.join(name, "--rank", str(rank), founder=rank == 0)
    fleet.until(lambda s: contributing(s, *"ab"), "a and b train")
    odd = fleet.join("odd", "--width", "17")
    assert odd.wait() == 7
    difference = "'0.weight' has shape [17, 8] where the run has [16, 8]"
    lines = odd.log.splitlines()
    assert [line for line in lines if line.startswith("holdfast: ") and difference in line]
    assert [line for line in lines if "AttachRefused: " in line and difference in line], (
        "the script's own last line says it, too"
    )
    assert "checkpoint" not in odd.log, "it has had no part in the run"
    before = {name: fleet.peer(name)["trainer_pid"] for name in "ab"}
    fleet.until_committed(3)
    assert before == {name: fleet.peer(name)["trainer_pid"] for name in "ab"}
    assert not [r for r in fleet.master()["past_rounds"] if r["outcome"] != "committed"]


def test_a_script_without_a_daemon_says_what_to_do() -> None:
    done = subprocess.run(WITH_TORCH, capture_output=True, text=True, env=environment())
    assert done.returncode == 1
    # A traceback shows where in the script; its last line says what to do about it.
    last = done.stderr.strip().splitlines()[-1]
    assert "holdfast join INVITE -- python train.py" in last
