"""The recipes of docs/recipes as a user runs them: a real master, real peers, Python's sources as
data.

Each page's script runs as it is printed. Where two peers show nothing that one does not, it has
one.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
import torch

from tests.packaging.test_docs import ROOT, blocks
from tests.processes.harness import WAIT_S, Fleet, Status, contributing, run_command, spec

pytestmark = pytest.mark.slow

RECIPES = ROOT / "docs" / "recipes"
PEERS = ("alder", "birch")
ROUNDS = 4
SYNC_EVERY = 5
BATCH = 16  # windows in a step of most pages
MODEL = {"0.weight", "2.weight", "2.bias"}  # of most pages

# What a kernel does with a notebook: one cell after the other, in one namespace.
RUN_CELLS = """
import json, sys
names = {"__name__": "__main__"}
for cell in json.load(open(sys.argv[1]))["cells"]:
    if cell["cell_type"] == "code":
        exec("".join(cell["source"]), names)
"""


def script_of(page: str) -> str:
    (script,) = blocks(RECIPES / page, "python")
    return script


def changed(script: str, before: str, after: str) -> str:
    """A script with one line changed; fails if the page has no such line any more."""
    assert script.count(before) == 1, before
    return script.replace(before, after)


def train(
    fleet: Fleet,
    script: str,
    *peers: str,
    rounds: int = ROUNDS,
    more: dict[str, tuple[str, ...]] | None = None,
) -> Status:
    """Run a script at each peer until it ends, well; return the master's status at the end.

    Args:
      more: options of the script, by peer.
    """
    (fleet.folder / "train.py").write_text(script)
    fleet.start_master(spec(rounds=rounds, sync_every=SYNC_EVERY, min_members=len(peers)))
    for name in peers:
        command = (sys.executable, "train.py")
        fleet.join(name, *(more or {}).get(name, ()), founder=name == peers[0], command=command)
    fleet.check_exits(*peers)
    return fleet.master()


def weights(status: Status) -> list[dict[str, int]]:
    """For each committed round the weight of each peer's contribution, by name."""
    names = {each["peer"]: each["name"] for each in status["departed"]}
    committed = [each for each in status["past_rounds"] if each["outcome"] == "committed"]
    return [{names[c["peer"]]: c["weight"] for c in each["contributors"]} for each in committed]


def printed(fleet: Fleet, pattern: str) -> list[str]:
    """What scripts have printed that matches, peer by peer."""
    logs = [fleet.nodes[name].log for name in PEERS if name in fleet.nodes]
    return [found for log in logs for found in re.findall(pattern, log)]


def loaded(path: Path) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = torch.load(path)
    return tensors


def export(fleet: Fleet, name: str) -> dict[str, torch.Tensor]:
    """Return the run's weights from a peer's newest checkpoint, as ``holdfast export`` writes
    them.
    """
    out = fleet.folder / f"{name}.pt"
    done = run_command("export", "--format", "torch", out, state=fleet.folder / name)
    assert done.returncode == 0, done.stdout + done.stderr
    return loaded(out)


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return set(one) == set(other) and all(torch.equal(one[name], other[name]) for name in one)


def test_every_recipe_is_run_here() -> None:
    here = Path(__file__).read_text()
    pages = sorted(path.name for path in RECIPES.glob("*.md"))
    assert len(pages) > 8
    assert [page for page in pages if f'"{page}"' not in here] == []


@pytest.mark.nightly
def test_workers_of_two_peers_load_different_samples(fleet: Fleet) -> None:
    step = "inputs, targets = next(batches)"
    script = changed(script_of("data-loader.md"), step, f"{step}; print('got', targets.tolist())")

    status = train(fleet, script, *PEERS)

    assert all(set(each) == set(PEERS) for each in weights(status))
    batches = [re.findall(r"got (.*)", fleet.nodes[name].log) for name in PEERS]
    assert min(map(len, batches)) > SYNC_EVERY
    assert set(batches[0]) & set(batches[1]) == set()


@pytest.mark.nightly
def test_accumulated_steps_weigh_what_they_average_over(fleet: Fleet) -> None:
    small = ("--batch", "32", "--micro-batch", "8")

    status = train(fleet, script_of("accumulation.md"), *PEERS, more={"birch": small})

    sizes = {"alder": 64, "birch": 32}
    steps = [each[name] / sizes[name] for each in weights(status) for name in PEERS]
    assert set(steps) <= set(range(1, SYNC_EVERY + 1))


@pytest.mark.nightly
def test_bfloat16_on_a_cpu_needs_no_scaler(fleet: Fleet) -> None:
    status = train(fleet, script_of("mixed-precision.md"), "alder")

    assert weights(status) == [{"alder": BATCH * SYNC_EVERY}] * ROUNDS


@pytest.mark.nightly
def test_steps_that_the_scaler_skips_weigh_nothing(fleet: Fleet) -> None:
    script = changed(
        script_of("mixed-precision.md"),
        'half = device == "cuda" and not torch.cuda.is_bf16_supported()',
        "half = True",
    )
    script = changed(script, "enabled=half)", "enabled=half, init_scale=2.0**18)")

    status = train(fleet, script, "alder")

    first, *_, last = weights(status)
    assert 0 < first["alder"] < BATCH * SYNC_EVERY
    assert last == {"alder": BATCH * SYNC_EVERY}


@pytest.mark.nightly
def test_a_compiled_model_is_saved_under_its_plain_names(fleet: Fleet) -> None:
    status = train(fleet, script_of("compile.md"), "alder")

    assert len(weights(status)) == ROUNDS
    assert set(loaded(fleet.folder / "final.pt")) == MODEL


@pytest.mark.nightly
def test_the_leader_alone_evaluates_and_saves_the_runs_weights(fleet: Fleet) -> None:
    status = train(fleet, script_of("evaluation.md"), *PEERS)

    assert len(weights(status)) == ROUNDS
    assert len(printed(fleet, r"final validation loss [\d.]+")) == 1
    saved = loaded(fleet.folder / "final.pt")
    assert all(equal(export(fleet, name), saved) for name in PEERS)


@pytest.mark.nightly
def test_all_peers_have_one_average(fleet: Fleet) -> None:
    train(fleet, script_of("ema.md"), *PEERS)

    averages = printed(fleet, r"validation loss: average ([\d.]+), last")
    lasts = printed(fleet, r"last weights ([\d.]+)")
    assert len(averages) == len(lasts) == len(PEERS)
    assert len(set(averages)) == len(set(lasts)) == 1
    assert set(averages) != set(lasts)
    assert set(loaded(fleet.folder / "average.pt")) == MODEL


@pytest.mark.nightly
def test_only_adapters_are_shared(fleet: Fleet) -> None:
    status = train(fleet, script_of("lora.md"), *PEERS)

    adapters = loaded(fleet.folder / "adapters.pt")
    assert set(adapters) == {f"{n}.{part}.weight" for n in (2, 4) for part in ("down", "up")}
    assert status["value_count"] == sum(each.numel() for each in adapters.values()) == 9_216
    assert adapters["2.up.weight"].any()  # it began as zeros
    exported = {name.replace("/", "."): each for name, each in export(fleet, "birch").items()}
    assert equal(exported, adapters)


@pytest.mark.nightly
def test_frozen_layers_that_are_attached_keep_their_bits(fleet: Fleet) -> None:
    script = changed(script_of("lora.md"), "attach(shared,", "attach(model,")
    script = changed(
        script, "run = holdfast", "first = model[2].frozen.weight.clone()\nrun = holdfast"
    )
    script += "print('same', torch.equal(first, model[2].frozen.weight), flush=True)\n"

    status = train(fleet, script, "alder")

    assert status["value_count"] == 681_728
    assert printed(fleet, r"same (\w+)") == ["True"]


@pytest.mark.nightly
def test_all_peers_stop_at_the_same_step_after_the_leader_has_died(fleet: Fleet) -> None:
    """The best score so far is in the shared state, so the next leader goes on from it."""
    script = script_of("early-stopping.md")
    script = changed(script, "run.log(validation", "print('leads', flush=True); run.log(validation")
    script = changed(script, "progress[STOP] = 1", "progress[STOP] = int(Path('stop').exists())")
    (fleet.folder / "train.py").write_text(script)
    fleet.start_master(spec(rounds=0, sync_every=SYNC_EVERY, min_members=2))
    names = (*PEERS, "cedar")
    for name in names:
        fleet.join(name, founder=name == "alder", command=(sys.executable, "train.py"))
    fleet.until(lambda s: s["committed"] > 1 and contributing(s, *names), "all train")
    leader = next(name for name in names if "leads" in fleet.nodes[name].log)

    fleet.kill(leader)
    (fleet.folder / "stop").touch()

    left = [fleet.nodes[name] for name in names if name != leader]
    assert [node.wait(WAIT_S) for node in left] == [0, 0]
    steps = {step for node in left for step in re.findall(r"stopped at step (\d+)", node.log)}
    assert len(steps) == 1
    stop, best_step, _ = loaded(fleet.folder / "final.pt")["progress"].tolist()
    assert (stop, best_step > 0) == (1, True)


@pytest.mark.nightly
def test_the_rate_falls_to_a_tenth_by_the_runs_end(fleet: Fleet) -> None:
    train(fleet, script_of("schedules.md"), "alder")

    assert printed(fleet, r"the last rate is (\S+)") == ["1.0e-04"]


@pytest.mark.nightly
def test_a_notebook_attaches_from_two_cells(fleet: Fleet) -> None:
    notebook = RECIPES / "notebook.ipynb"
    cells = json.loads(notebook.read_text())["cells"]
    code = ["".join(each["source"]) + "\n" for each in cells if each["cell_type"] == "code"]
    assert code == blocks(RECIPES / "notebook.md", "python")
    fleet.start_master(spec(rounds=ROUNDS, sync_every=SYNC_EVERY, min_members=1))
    command = (sys.executable, "-c", RUN_CELLS, str(notebook))
    fleet.join("alder", founder=True, command=command)

    assert fleet.nodes["alder"].wait(WAIT_S) == 0

    assert printed(fleet, r"finished: (True|False)") == ["False", "True"]
    assert len(weights(fleet.master())) == ROUNDS
    assert set(loaded(fleet.folder / "final.pt")) == MODEL
