"""The learning benchmark: arms by name, a tiny arm lived through for real, what is said of it."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve

from benchmarks import learning, learning_run
from benchmarks.learning import jobs_of, names_of, summary
from benchmarks.learning_arms import (
    DEFAULT,
    FOUND,
    OF_PRESET,
    STEP_S,
    Outcome,
    Recipe,
    arm_of,
    with_baselines,
)
from benchmarks.learning_trainer import Ended, Turns
from benchmarks.report import BenchError, run_main
from holdfast.membership.master.rounds.round_clock import RoundClock
from holdfast.membership.spec.preset import PRESETS
from holdfast.membership.spec.spec import RunSpec

Wait = Callable[[float], None]


@pytest.mark.nightly
@pytest.mark.slow
def test_four_real_models_learn_together_and_agree_though_one_is_killed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """``run_arm`` itself compares copies, roots and the trainers' weights."""
    paces: set[float] = set()
    answered = RoundClock.answered

    def heard(self: RoundClock, round_: Any, peer: str, step_s: float) -> None:
        paces.add(round(step_s, 6))
        answered(self, round_, peer, step_s)

    monkeypatch.setattr(RoundClock, "answered", heard)
    monkeypatch.setattr(learning_run, "REPLACED_AFTER_S", 0.5)
    arm = evolve(
        arm_of("diloco4@sync_every=8,fragments=2,overlap=1,min_members=3,pace=elastic"),
        kill_rounds=4,
    )
    found = learning_run.run_arm(arm, Recipe(steps=32, batch=1), validation_windows=64)

    assert found.loss < 4.5, "who knows nothing of 256 bytes has ln 256, 5.5"
    assert found.notes["rounds"] == 8
    assert found.notes["killed"] == 1
    assert found.notes["peers"] == 5, "another one trains in its place"
    assert 3 * 8 <= found.notes["contributions"] < 4 * 8
    assert found.speed is not None
    assert 0.5 < found.speed < 1.0
    assert found.tokens > 0.7 * 4 * 32 * 64
    assert found.round_bytes > 0
    assert paces == {STEP_S}, "by the virtual clock: what this machine needs is no matter"


def test_a_script_runs_in_its_turns_only() -> None:
    order: list[str] = []

    def script(wait: Wait) -> None:
        order.append("script")
        wait(0.5)
        order.append("script")
        wait(math.inf)
        raise ValueError("as scripts do")

    turns = Turns(script)
    order.append("before")
    waits = [turns.go_on()]
    order.append("between")
    waits.append(turns.go_on())
    assert order == ["before", "script", "between", "script"]
    assert waits == [0.5, math.inf]
    with pytest.raises(ValueError, match="as scripts do"):
        turns.go_on()
    turns.end()


def test_a_script_ends_with_its_machine_begun_or_not() -> None:
    heard: list[BaseException] = []

    def endless(wait: Wait) -> None:
        try:
            while True:
                wait(1.0)
        except BaseException as error:
            heard.append(error)
            raise

    for turns in (1, 0):
        killed = Turns(endless)
        for _turn in range(turns):
            killed.go_on()
        killed.end()
    assert list(map(type, heard)) == [Ended]


def parts(toml: str) -> list[object]:
    """What of a spec an arm is compared by; arms run in lockstep."""
    spec = RunSpec.parse(toml)
    return [evolve(spec.diloco, pace="elastic"), spec.reduce]


def test_arms_are_runs_that_the_spec_allows() -> None:
    names = [*DEFAULT, *with_baselines(FOUND)]
    assert len({json.dumps(arm_of(name).key) for name in names}) == len({*names})
    specs = [RunSpec.parse(arm_of(n).toml(500)) for n in DEFAULT if arm_of(n).distributed]
    assert {spec.run.rounds for spec in specs} == {25, 50, 125}
    assert [arm_of("dp-uneven3").batch(replica, 12) for replica in range(3)] == [12, 4, 1]
    paces = [arm_of("elastic3").slowness_of(replica) for replica in range(4)]
    assert paces == pytest.approx([1.0, 10 / 3, 10.0, 1.0])


def test_a_presets_figure_is_of_its_settings() -> None:
    assert sorted({*PRESETS, "allreduce"} - {*OF_PRESET}) == ["allreduce", "delayed"]
    for preset, name in OF_PRESET.items():
        arm = arm_of(name)
        assert parts(arm.toml(500)) == parts(f'[run]\npreset = "{preset}"'), preset
        assert PRESETS[preset].inner.lower() == arm.inner


def test_a_name_changes_settings_and_the_baseline_follows() -> None:
    changed = RunSpec.parse(arm_of("diloco4@sync_every=10,outer_lr=0.5").toml(500))
    assert (changed.diloco.sync_every, changed.diloco.outer_lr) == (10, 0.5)
    assert changed.run.rounds == 50
    same = arm_of("diloco4@inner=muon,sync_every=10,outer_lr=1.0")
    assert arm_of("muon4").key == same.key, "another name does not change what is run"
    assert same.baseline == "dp4@inner=muon"
    assert names_of("a,b@x=1,y=2,c") == ["a", "b@x=1,y=2", "c"]
    assert with_baselines(["dp", "streaming2", "diloco2"]) == ["dp", "diloco2", "streaming2"]
    jobs = jobs_of(["diloco2"], 2, Recipe(), 64, Path())
    assert [job.recipe.seed for job in jobs] == [0, 1, 0, 1], "the baseline's, too"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("diloco3", "no arm 'diloco3'"),
        ("diloco4@speed=3", "arm diloco4, speed"),
        ("diloco4@overlap=70", "arm diloco4"),
        ("dp@sync_every=3", "arm dp, sync_every"),
        ("diloco4@inner=sgd", "arm diloco4, inner"),
    ],
)
def test_an_arm_that_cannot_be_is_refused(name: str, words: str) -> None:
    with pytest.raises(BenchError, match=words):
        arm_of(name)


def test_an_arm_is_compared_over_the_seeds_that_both_have() -> None:
    def outcome(arm: str, seed: int, loss: float) -> Outcome:
        return Outcome(arm, seed, loss, [loss - 0.5, loss + 0.5], 10, 3.0, 1.0, "", 1.0)

    figures = summary(
        [
            *(outcome("dp", 0, 2.0), outcome("dp", 1, 2.2), outcome("dp", 2, 9.0)),
            *(
                outcome("diloco2", 0, 2.1),
                outcome("diloco2", 1, 2.12),
                outcome("diloco4", 0, 2.5),
            ),
        ]
    )
    assert figures["diloco2"]["ratio_to_baseline"] == pytest.approx(2.11 / 2.1)
    assert figures["diloco2"]["ratio_error"] == pytest.approx(0.0), "both find the same bytes easy"
    assert figures["diloco4"]["ratio_to_baseline"] is None


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--arms", "dillo"], "no arm 'dillo'; there are dp, diloco2"),
        (["--arms", "diloco2", "--steps", "30"], "30 steps are no whole number of rounds of 20"),
    ],
)
def test_a_wish_that_cannot_be_met_is_refused_in_a_sentence(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    words: str,
) -> None:
    monkeypatch.setattr(sys, "argv", ["learning", "--keep", str(tmp_path), *arguments])
    assert run_main("learning", learning.main) == 1
    assert words in capsys.readouterr().err
