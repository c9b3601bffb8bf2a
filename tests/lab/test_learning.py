"""The learning benchmark: arms by name, a tiny arm lived through for real, what is said of it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.lab.telling import ROOT, told

STEP_S = 0.1  # the benchmark's


TINY = """
from attrs import asdict, evolve
from benchmarks import learning_run
from benchmarks.learning_arms import Recipe, arm_of
from holdfast.membership.master.rounds.round_clock import RoundClock
learning_run.REPLACED_AFTER_S = 0.5
paces, answered = set(), RoundClock.answered
def heard(self, round_, peer, step_s):
    paces.add(round(step_s, 6))
    answered(self, round_, peer, step_s)
RoundClock.answered = heard
arm = evolve(arm_of("churn4@sync_every=8,fragments=2,overlap=1"), kill_rounds=4)
outcome = learning_run.run_arm(arm, Recipe(steps=32, batch=1), validation_windows=64)
print(json.dumps({**asdict(outcome), "paces": sorted(paces)}))
"""


@pytest.mark.nightly
@pytest.mark.slow
def test_four_real_models_learn_together_and_agree_though_one_is_killed() -> None:
    """``run_arm`` itself compares copies, roots and the trainers' weights, and fails on a difference."""
    found = told(TINY, seconds=140)

    first, last = found["curve"][0], found["curve"][-1]
    assert first[0] == 0
    assert last == [32, found["loss"]]
    assert first[1] > 5.0, "nothing is known at first: 256 bytes, about ln 256"
    assert last[1] < first[1] - 1.0
    notes = found["notes"]
    assert notes["rounds"] == 8
    assert notes["killed"] == 1
    assert notes["peers"] == 5, "another one trains in its place"
    assert 3 * 8 <= notes["contributions"] < 4 * 8
    assert 0.5 < found["speed"] < 1.0
    assert found["tokens"] > 0.7 * 4 * 32 * 64
    assert 0 < found["round_bytes"] < found["socket_bytes"]
    assert found["paces"] == [STEP_S], "by the virtual clock: what this machine needs is no matter"


TURNS = """
import math, time
from benchmarks.learning_trainer import Ended, Turns
heard, order = [], []
def script(wait):
    order.append("script")
    wait(0.5)
    order.append("script")
    wait(math.inf)
    raise ValueError("as scripts do")
def endless(wait):
    try:
        while True:
            wait(1.0)
    except BaseException as error:
        heard.append(type(error).__name__)
        raise
turns = Turns(script)
order.append("before")
waits = [turns.go_on()]
order.append("between")
waits.append(turns.go_on())
try:
    turns.go_on()
except ValueError as error:
    heard.append(str(error))
turns.end()
killed = Turns(endless)
killed.go_on()
killed.end()
unbegun = Turns(endless)
unbegun.end()
print(json.dumps({"order": order, "waits": waits, "heard": heard}))
"""


def test_a_script_runs_in_its_turns_only_and_ends_with_its_machine() -> None:
    found = told(TURNS, seconds=140)

    assert found["order"] == ["before", "script", "between", "script"]
    assert found["waits"] == [0.5, float("inf")]
    assert found["heard"] == ["as scripts do", "Ended"]


ARMS = """
from attrs import evolve
from benchmarks.commands import BenchError
from benchmarks.learning import Outcome, jobs_of, names_of, summary
from benchmarks.learning_arms import DEFAULT, FOUND, OF_PRESET, Recipe, arm_of, with_baselines
from holdfast.membership.spec.preset import PRESETS
from holdfast.membership.spec.spec import RunSpec
def parts(toml):
    spec = RunSpec.parse(toml)
    return [evolve(spec.diloco, pace="elastic"), spec.reduce]
others = [name for name in [*PRESETS, "allreduce"] if name not in OF_PRESET]
unlike = [name for name, arm in OF_PRESET.items()
          if parts(arm_of(arm).toml(500)) != parts(f'[run]\\npreset = "{name}"')
          or PRESETS[name].inner.lower() != arm_of(arm).inner]
keys = {json.dumps(arm_of(name).key) for name in [*DEFAULT, *with_baselines(FOUND)]}
specs = [RunSpec.parse(arm_of(n).toml(500)) for n in DEFAULT if arm_of(n).distributed]
changed = RunSpec.parse(arm_of("diloco4@sync_every=10,outer_lr=0.5").toml(500))
refused = []
for name in ("diloco3", "diloco4@speed=3", "diloco4@outer_lr=700", "dp@sync_every=3",
             "diloco4@inner=sgd"):
    try:
        arm_of(name)
    except BenchError as error:
        refused.append(str(error))
def outcome(arm, seed, loss, speed=1.0):
    return Outcome(arm, seed, loss, [loss - 0.5, loss + 0.5], [(0, 5.0), (500, loss)], 10, 20, 3.0, speed, "", 1.0)
figures = summary([
    outcome("dp", 0, 2.0), outcome("dp", 1, 2.2), outcome("diloco2", 0, 2.1),
    outcome("diloco2", 1, 2.12), outcome("unequal2", 0, 2.0, 0.5), outcome("unequal2", 1, 2.0, 0.9),
    outcome("sparse2", 0, 2.2), outcome("sparse2", 1, 2.2), outcome("delta4", 0, 2.5)])
print(json.dumps({
    "rounds": [spec.run.rounds for spec in specs], "names": DEFAULT, "refused": refused,
    "unlike": unlike, "others": sorted(set(others)),
    "keys": [len(keys), len({*DEFAULT, *with_baselines(FOUND)})],
    "same": arm_of("muon4").key == arm_of("diloco4@inner=muon,sync_every=10,outer_lr=1.0").key,
    "batches": [arm_of("dp-uneven3").batch(replica, 12) for replica in range(3)],
    "slowness": [arm_of("elastic3").slowness_of(replica) for replica in range(4)],
    "changed": [changed.diloco.sync_every, changed.diloco.outer_lr, changed.run.rounds],
    "baseline": arm_of("diloco4@inner=muon,warm_steps=100").baseline,
    "warm": arm_of("diloco4@inner=muon,warm_steps=100").rounds(500),
    "split": names_of("a,b@x=1,y=2,c"), "baselines": with_baselines(["dp", "delta4", "diloco2"]),
    "seeds": [j.recipe.seed for j in jobs_of(["diloco2"], 2, Recipe(), 64, __import__("pathlib").Path("."))],
    "ratio": figures["diloco2"]["ratio_to_baseline"], "error": figures["diloco2"]["ratio_error"],
    "alone": figures["delta4"]["ratio_to_baseline"],
    "meets": {name: row["meets"] for name, row in figures.items()}}))
"""


def test_arms_are_runs_that_the_spec_allows_and_are_judged_by_what_is_asked() -> None:
    found = told(ARMS, seconds=140)

    assert found["names"][:9] == [
        *("dp", "diloco2", "diloco4", "streaming2", "streaming2-nf4", "sparse2", "delta4"),
        *("churn4", "unequal2"),
    ]
    assert set(found["rounds"]) == {25, 125, 50, 20}
    assert found["unlike"] == [], "a preset's figure is of its settings"
    assert found["others"] == ["allreduce", "delayed"]
    assert found["keys"][0] == found["keys"][1], "no two arms take each other's outcomes"
    assert found["same"] is True, "another name does not change what is run"
    assert found["batches"] == [12, 4, 1]
    assert found["slowness"] == pytest.approx([1.0, 10 / 3, 10.0, 1.0])
    assert found["changed"] == [10, 0.5, 50]
    assert [text.split(":")[0].split(";")[0] for text in found["refused"]] == [
        "no arm 'diloco3'",
        "arm diloco4, speed",
        "arm diloco4",
        "arm dp, sync_every",
        "arm diloco4, inner",
    ]
    assert found["baseline"] == "dp4@inner=muon"
    assert found["warm"] == 20
    assert found["split"] == ["a", "b@x=1,y=2", "c"]
    assert found["baselines"] == ["dp", "streaming2", "delta4", "diloco2"]
    assert found["seeds"] == [0, 1, 0, 1], "the baseline's, too"
    assert found["ratio"] == pytest.approx(2.11 / 2.1)
    assert found["error"] == pytest.approx(0.0), "both find the same bytes easy"
    assert found["alone"] is None
    assert found["meets"] == {
        "dp": None,
        "diloco2": True,
        "unequal2": False,
        "sparse2": False,
        "delta4": None,
    }


def test_a_wish_that_cannot_be_met_is_refused_in_a_sentence(tmp_path: Path) -> None:
    for arguments, words in (
        (["--arms", "dillo"], "no arm 'dillo'; there are dp, diloco2"),
        (["--arms", "diloco2", "--steps", "30"], "30 steps are no whole number of rounds of 20"),
    ):
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.learning", "--keep", str(tmp_path), *arguments],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=250,
            check=False,
        )
        assert done.returncode == 1
        assert words in done.stderr
        assert "Traceback" not in done.stderr


# ---------------------------------------------------------------- lies

POISON = """
import numpy as np
from benchmarks.commands import BenchError
from benchmarks.poison import summary, table
from benchmarks.poison_arms import CAUGHT, DEFAULT, LIES, SCALE, arm_of
from benchmarks.learning_arms import Outcome
from holdfast.membership.master.rounds.round import NORM_CLIP, NORM_REFUSE
from holdfast.membership.spec.spec import RunSpec
specs = [RunSpec.parse(arm_of(name).toml(160)) for name in DEFAULT]
honest = np.array([3.0, -4.0, 0.0, 0.0], np.float32)
sent = {}
for name, lie in LIES.items():
    update = honest.copy()
    lie(2.0, 7, 1, update)
    sent[name] = [float(each) for each in update]
refused = []
for name in ("median", "mean-flipped3", "mean-flipped2@steps=3"):
    try:
        arm_of(name)
    except BenchError as error:
        refused.append(str(error))
def outcome(arm, loss, last=8):
    notes = {"contributors_at_last": last, "rounds": 16, "commit": "c"}
    return Outcome(arm, 0, loss, [loss], [], 1, 1, 1.0, None, "", 60.0, notes)
figures = summary([outcome("mean", 2.0), outcome("clipped-flipped2", 2.05),
                   outcome("clipped-flipped1", 2.03), outcome("mean-flipped2", 3.0),
                   outcome("mean-flipped2@scale=30", 2.01, 6)])
print(json.dumps({
    "combine": [spec.reduce.combine for spec in specs], "names": DEFAULT, "sent": sent,
    "scales": [SCALE < NORM_CLIP, CAUGHT > NORM_REFUSE], "refused": refused,
    "liars": [arm_of("clipped-random2@scale=4").lie_of(replica) is not None for replica in range(8)],
    "scale": arm_of("clipped-random2@scale=4,combine=clipped:0.1").scale,
    "meets": {name: row["meets"] for name, row in figures.items()},
    "rows": table(figures).rows}))
"""


def test_who_lies_how_is_in_an_arms_name() -> None:
    found = told(POISON, seconds=140)

    assert len(found["names"]) == 2 + 4 * 2 * 2 + 2
    assert found["combine"][:2] == ["mean", "clipped"]
    assert found["sent"]["flipped"] == [-6.0, 8.0, 0.0, 0.0]
    assert found["sent"]["scaled"] == [6.0, -8.0, 0.0, 0.0]
    assert found["sent"]["constant"] == [5.0] * 4
    assert sum(each**2 for each in found["sent"]["random"]) == pytest.approx(100.0)
    assert found["scales"] == [True, True]
    assert found["liars"] == [False] * 6 + [True] * 2
    assert found["scale"] == 4.0
    assert [text.partition(";")[0] for text in found["refused"]] == [
        "no arm 'median'",
        "no arm 'mean-flipped3'",
        "arm mean-flipped2: 'steps' is neither scale nor combine",
    ]
    assert found["meets"]["clipped-flipped1"] is True
    assert found["meets"]["clipped-flipped2"] is False
    assert found["meets"]["mean-flipped2"] is None
    row = next(row for row in found["rows"] if row[0].startswith("flipped, 2 of 8: minus"))
    assert row[1:] == ["3.0000 (+50.0%)", "2.0500 (+2.5%) (MISSED)"]
    assert found["rows"][-1][1] == "2.0100 (+0.5%, 2 left out)"


LYING = """
from attrs import asdict, evolve
from benchmarks import learning_run
from benchmarks.learning_arms import Recipe
from benchmarks.poison_arms import arm_of
arm = evolve(arm_of("mean-flipped1@scale=30"), peers=4)
arm = evolve(arm, settings={**arm.settings, "sync_every": 4, "min_members": 3})
outcome = learning_run.run_arm(arm, Recipe(steps=20, batch=1), validation_windows=64)
print(json.dumps(asdict(outcome)))
"""


@pytest.mark.nightly
@pytest.mark.slow
def test_a_real_liar_that_the_norm_check_sees_is_left_out_and_the_others_agree() -> None:
    found = told(LYING, seconds=140)
    assert found["notes"]["rounds"] == 5
    assert found["notes"]["contributors_at_last"] == 3
    assert found["loss"] < found["curve"][0][1]
