"""Peers of several processes, under any parallelism, in one run with peers of one."""

from __future__ import annotations

import copy
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.processes.harness import Fleet, Status, contributing, in_sync, member, spec
from tests.processes.sharded_trainer import INNER_LR, NAN_STEPS, STAGES, Net, loss_of, samples

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
SCRIPT = HERE / "sharded_trainer.py"
LAUNCHER = HERE / "launch_ranks.py"
EXAMPLES = HERE.parents[1] / "examples"


SLOW = ("--pause", "0.03")
Tensors = dict[str, torch.Tensor]


def saved(fleet: Fleet, name: str) -> Path:
    return fleet.folder / f"{name}.safetensors"


def ranks_of(launcher: int) -> list[int]:
    """Return the ranks' processes, in the order of their numbers; none of a launcher that has
    ended.
    """
    try:
        text = Path(f"/proc/{launcher}/task/{launcher}/children").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return []
    return [int(pid) for pid in text.split()]


@contextmanager
def closing_fleet(folder: Path) -> Iterator[Fleet]:
    folder.mkdir()
    with Fleet(folder) as other:
        yield other


def join(
    fleet: Fleet, name: str, kind: str, ranks: int, *script: str, founder: bool = False
) -> None:
    """Start a peer whose trainer has so many ranks."""
    launch = [str(LAUNCHER), str(ranks)] if ranks > 1 else []
    fleet.join(
        name,
        *(
            "--kind",
            kind,
            "--peer",
            str(len(fleet.nodes)),
            "--save",
            str(saved(fleet, name)),
            *script,
        ),
        founder=founder,
        command=(sys.executable, *launch, str(SCRIPT)),
    )


SHARDED = {"plain": 1, "fsdp": 3, "tp": 2, "hsdp": 4, "fsdp-tp": 4}
PIPELINES = {"plain": 1, "pipe": 2, "pipe-fsdp": 4, "pipe-ddp": 4}

ROUNDS, STEPS = 20, 4
OUTER_LR, OUTER_MOMENTUM = 0.7, 0.9


def train(fleet: Fleet, kinds: Mapping[str, tuple[str, int]], *script: str) -> dict[str, Tensors]:
    """Run twenty rounds with these peers, by name, and return the weights in their trainers at the
    end.
    """
    count = len(kinds)
    fleet.start_master(
        spec(
            rounds=ROUNDS,
            sync_every=STEPS,
            contributors=count,
            min_members=count,
            pace="lockstep",
            outer_lr=OUTER_LR,
            outer_momentum=OUTER_MOMENTUM,
        )
    )
    for name, (kind, ranks) in kinds.items():
        join(fleet, name, kind, ranks, *script, founder=name == next(iter(kinds)))
    fleet.until_finished(*kinds)
    return {name: load_file(saved(fleet, name)) for name in kinds}


def learned_alone(count: int) -> Tensors:
    """Return what so many single processes learn in that run, computed here from the formula of
    DiLoCo.
    """
    torch.manual_seed(0)
    shared = Net()
    momentum = {name: torch.zeros_like(each) for name, each in shared.named_parameters()}
    for start in range(0, ROUNDS * STEPS, STEPS):
        peers = [copy.deepcopy(shared) for _ in range(count)]
        for number, model in enumerate(peers, 1):
            for step in range(start, start + STEPS):
                inputs = samples(number, step)
                trained = [each for each in model.parameters() if each.requires_grad]
                loss = loss_of(model, inputs)
                for each, gradient in zip(trained, torch.autograd.grad(loss, trained), strict=True):
                    each.data.sub_(INNER_LR * gradient)
        locals_of = [dict(model.named_parameters()) for model in peers]
        for name, each in shared.named_parameters():
            mean = torch.stack([each.data - local[name].data for local in locals_of]).mean(0)
            momentum[name].mul_(OUTER_MOMENTUM).add_(mean)
            each.data.sub_(OUTER_LR * (mean + OUTER_MOMENTUM * momentum[name]))
    shared.get_buffer("seen").fill_(ROUNDS * STEPS)
    return shared.state_dict()


@pytest.mark.nightly
@pytest.mark.parametrize("kinds", [SHARDED, PIPELINES], ids=["sharded", "pipelines"])
def test_all_kinds_of_peers_learn_what_single_processes_learn(
    fleet: Fleet, kinds: dict[str, int]
) -> None:
    """Inner steps are plain SGD: only the order of sums in them differs."""
    mixed = train(fleet, {kind: (kind, ranks) for kind, ranks in kinds.items()})
    alone = learned_alone(len(kinds))
    for name, weights in mixed.items():
        assert weights.keys() == alone.keys()
        for key, tensor in weights.items():
            assert torch.equal(tensor, mixed["plain"][key]), (name, key)
            expected = alone[key].double()
            assert torch.allclose(tensor.double(), expected, rtol=1e-4, atol=1e-6), (name, key)


@pytest.mark.nightly
def test_a_pipeline_learns_exactly_what_one_process_learns_from_its_micro_batches(
    fleet: Fleet, tmp_path: Path
) -> None:
    """One peer trains alone, so that its updates are the run's, by either schedule."""
    (expected,) = train(fleet, {"alone": ("accumulated", 1)}).values()
    for schedule in ("gpipe", "1f1b"):
        with closing_fleet(tmp_path / schedule) as other:
            peers = {"alone": ("pipe", STAGES)}
            (weights,) = train(other, peers, "--schedule", schedule).values()
        assert weights.keys() == expected.keys()
        for key, tensor in weights.items():
            assert torch.equal(tensor, expected[key]), (schedule, key)


def reload_all(fleet: Fleet, kind: str) -> None:
    """Run a peer of two ranks, of which the second one's losses and weights become NaN."""
    fault = fleet.folder / "fault"
    fleet.start_master(spec(rounds=0) + f"[trainer]\nnan_steps = {NAN_STEPS}\n")
    join(fleet, "plain", "plain", 1, *SLOW, founder=True)
    join(fleet, "ranks", kind, 2, *SLOW, "--fault", str(fault), "--momentum", "0.5")
    fleet.until(lambda s: contributing(s, "plain", "ranks"), "both contribute")
    pid, moved = fleet.peer("ranks")["command_pid"], fleet.peer("ranks")["state_received_bytes"]
    text = "weights not finite: "  # losses tell of broken weights, or an update that comes first

    def reported(status: Status, count: int) -> bool:
        return sum(text in str(each["text"]) for each in status["events"]) == count

    for count, what in enumerate(("loss", "weights"), 1):
        whole = fault.with_suffix(".new")  # the rank may look at any moment
        whole.write_text(what)
        whole.rename(fault)
        fleet.until(partial(reported, count=count), f"{what}: it is reported")
        fleet.until_committed(2)
        fleet.until(lambda s: contributing(s, "plain", "ranks"), "both contribute again")
        status = fleet.peer("ranks")
        assert (status["command_pid"], status["trainer_restarts"]) == (pid, 0)
        assert status["state_received_bytes"] == moved, "its state came out of its daemon's memory"
    fleet.check_equal("plain", "ranks")
    goal = fleet.master()["committed"] + 3
    assert fleet.typed("resume", "--rounds", str(goal)).returncode == 0
    fleet.until_finished("plain", "ranks")
    ours, theirs = (load_file(saved(fleet, name)) for name in ("plain", "ranks"))
    for key, tensor in ours.items():
        assert torch.equal(theirs[key], tensor), key
        assert torch.isfinite(tensor).all(), key


@pytest.mark.fault(
    "the loss of one of a peer's processes is not finite",
    "the hook",
    "all its processes get the state again, at the same step",
)
def test_a_loss_that_is_not_finite_in_one_rank_reloads_all(fleet: Fleet) -> None:
    """Weights that one rank spoils are gathered by the others: then all losses are not finite."""
    reload_all(fleet, "fsdp")


@pytest.mark.nightly
def test_a_loss_that_is_not_finite_in_the_last_stage_reloads_all(fleet: Fleet) -> None:
    """No other stage has a loss."""
    reload_all(fleet, "pipe")


def momenta(file: Path) -> dict[str, torch.Tensor]:
    """Return the optimizer's momenta in a rank's local checkpoint; none before its first step."""
    if not file.exists():
        return {}
    return {key: each for key, each in load_file(file).items() if key.endswith(".momentum_buffer")}


def test_each_rank_keeps_its_part_of_the_optimizers_state_for_the_next_start(fleet: Fleet) -> None:
    kept = "[checkpoint]\nevery_rounds = 1\ntrainer = true\n"
    fleet.start_master(spec(rounds=0, min_members=1) + kept)
    join(fleet, "fsdp", "fsdp", 3, *SLOW, "--momentum", "0.5", founder=True)
    state = fleet.nodes["fsdp"].folder
    files = [state / f"trainer-{rank}-of-3.safetensors" for rank in range(3)]
    fleet.until(lambda _: all(map(momenta, files)), "all ranks have kept momenta")
    fleet.settle("fsdp")
    os.kill(ranks_of(fleet.peer("fsdp")["command_pid"])[1], signal.SIGKILL)
    told = "goes on with"
    fleet.until(lambda _: fleet.nodes["fsdp"].log.count(told) == len(files), "all ranks are back")
    for number, file in enumerate(files):  # no rank writes again before the run goes on
        tensors = momenta(file)
        total = 0.0
        for tensor in tensors.values():
            total += float(tensor.double().square().sum())
        line = f"rank {number} {told} {len(tensors)} states, {total.hex()}"
        assert line in fleet.nodes["fsdp"].log
    fleet.act("resume", {})
    fleet.until_committed(2)
    assert fleet.peer("fsdp")["trainer_restarts"] == 1


@pytest.mark.nightly
def test_a_gpu_that_fails_and_returns_changes_the_number_of_ranks(fleet: Fleet) -> None:
    """The peer stays in the run: its group is started again with fewer ranks, and with more."""
    gpus = fleet.folder / "gpus.txt"
    gpus.write_text("0\n1\n2\n")
    fleet.start_master(spec(rounds=0))
    join(fleet, "plain", "plain", 1, *SLOW, founder=True)
    fleet.join(
        "gpus",
        *("--kind", "fsdp", "--peer", "1", *SLOW),
        command=(sys.executable, str(LAUNCHER), "{gpus}", str(SCRIPT)),
        env={"HOLDFAST_GPUS": str(gpus)},
    )

    def ranks(count: int, text: str) -> None:
        def so(status: Status) -> bool:
            row = member(status, "gpus")
            return (
                contributing(status, "plain", "gpus")
                and row is not None
                and row["accelerators"] == text
                # what the master says is older than what the peer has just done
                and len(ranks_of(fleet.peer("gpus")["command_pid"])) == count
            )

        fleet.until(so, f"{count} ranks contribute")
        fleet.until_committed(2)
        fleet.check_equal("plain", "gpus")
        fleet.act("resume", {})

    def changed(what: str, restarts: int) -> None:
        gpus.write_text(what)
        began_s = time.monotonic()
        fleet.until(
            lambda _: fleet.peer("gpus")["trainer_restarts"] == restarts, "its group has ended"
        )
        ended_s = time.monotonic()
        fleet.until(lambda _: fleet.peer("gpus")["trainer_state"] == "running", "it trains again")
        seen_s, lost_s = ended_s - began_s, time.monotonic() - ended_s
        print(f"seen after {seen_s:.1f} s, then {lost_s:.1f} s without training")

    ranks(3, "3 of 3 GPUs")
    changed("0\n1 it has fallen off the bus\n2\n", 1)
    ranks(2, "2 of 3 GPUs")
    assert "GPU 1: it has fallen off the bus" in fleet.nodes["gpus"].log
    changed("0\n1\n2\n", 2)
    ranks(3, "3 of 3 GPUs")
    restarted = fleet.peer("gpus")
    assert (restarted["trainer_restarts"], restarted["trainer_state"]) == (2, "running")


def test_a_peer_without_enough_gpus_is_a_spare_until_they_are_back(fleet: Fleet) -> None:
    gpus = fleet.folder / "gpus.txt"
    gpus.write_text("0\n1 ECC errors\n")
    fleet.start_master(spec(rounds=0, min_members=1))
    join(fleet, "plain", "plain", 1, *SLOW, founder=True)
    fleet.join(
        "gpus",
        *("--kind", "plain", "--peer", "1", *SLOW),
        more=("--require-gpus", "2"),
        command=(sys.executable, str(SCRIPT)),
        env={"HOLDFAST_GPUS": str(gpus)},
    )
    fleet.until(lambda s: in_sync(s, "gpus"), "it keeps a copy")
    assert fleet.peer("gpus")["trainer_state"] == "waits: 1 of 2 GPUs, 2 needed (GPU 1: ECC errors)"
    gpus.write_text("0\n1\n")
    fleet.until(lambda s: contributing(s, "plain", "gpus"), "it contributes")


def test_ranks_that_do_not_make_the_model_whole_are_sent_away(fleet: Fleet) -> None:
    fleet.start_master(spec(rounds=2))
    join(fleet, "odd", "odd", 2, founder=True)
    assert fleet.nodes["odd"].wait() != 0
    assert "ranks 0 and 1 have different models" in fleet.nodes["odd"].log


def train_on_one_device(fleet: Fleet, kind: str, device: str) -> None:
    """Run rounds with two ranks on a device and one process beside them; check that all have the
    same bits.

    ``tests/client/gpu_check.py`` does this on a GPU.
    """
    script = str(HERE / "device_ranks.py")
    fleet.start_master(spec(rounds=8, sync_every=3, contributors=2, pace="lockstep"))
    for name, how, where in (("plain", "plain", "cpu"), ("ranks", kind, device)):
        launch = [str(LAUNCHER), "2"] if how != "plain" else []
        fleet.join(
            name,
            *("--kind", how, "--device", where, "--save", str(fleet.folder / name)),
            founder=name == "plain",
            command=(sys.executable, *launch, script),
        )
    fleet.until_finished("plain", "ranks")
    whole = load_file(fleet.folder / "plain-0")
    parts = [load_file(path) for path in sorted(fleet.folder.glob("ranks-[01]"))]
    assert len(parts) == (1 if kind == "plain" else 2)
    for key, tensor in whole.items():
        if kind == "rows":
            assert torch.equal(torch.cat([part[key] for part in parts]), tensor), key
        else:
            assert all(torch.equal(part[key], tensor) for part in parts), key


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["rows", "ddp"])
def test_two_ranks_on_one_device_train_beside_a_single_process(
    fleet: Fleet, kind: str, tmp_path: Path
) -> None:
    """Where the inner step is the same for each value, so is the result: that of two single
    processes.
    """
    train_on_one_device(fleet, kind, "cpu")
    if kind == "rows":
        with closing_fleet(tmp_path / "alone") as other:
            train_on_one_device(other, "plain", "cpu")
            alone = load_file(other.folder / "plain-0")
        mixed = load_file(fleet.folder / "plain-0")
        assert all(torch.equal(mixed[key], tensor) for key, tensor in alone.items())


def test_the_examples_train_as_shards_and_as_a_pipeline_beside_one_process(fleet: Fleet) -> None:
    fleet.start_master(spec(rounds=3, sync_every=4, contributors=3, pace="lockstep"))
    launch = (str(LAUNCHER), "2")
    peers = {"single": ((), "fsdp.py"), "sharded": (launch, "fsdp.py")}
    peers["pipeline"] = (launch, "pipeline.py")
    for name, (how, script) in peers.items():
        fleet.join(
            name,
            "--save",
            str(fleet.folder / f"{name}.pt"),
            *("--meet", "{meeting}"),
            founder=name == "single",
            command=(sys.executable, *how, str(EXAMPLES / script)),
        )
    fleet.until_finished(*peers)
    assert "copies of" not in fleet.nodes["pipeline"].log, "the tied gradients are added up"
    single, *others = (torch.load(fleet.folder / f"{name}.pt") for name in peers)
    for weights in others:
        assert single.keys() == weights.keys()
        assert all(torch.equal(single[key], tensor) for key, tensor in weights.items())
