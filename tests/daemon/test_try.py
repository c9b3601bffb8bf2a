"""``holdfast try``: what is tried, and what comes of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from attrs import evolve
from click.testing import CliRunner

from holdfast.daemon.cli.command_line import commands
from holdfast.daemon.cli.trial import Outcome, replicas, script_alone
from holdfast.daemon.cli.trial_report import Comparison, draw, show
from holdfast.daemon.cli.try_command import _trials
from holdfast.membership.spec.spec import RunSpec
from holdfast.protocol.errors import UserError

LINE = 12.5e6  # bytes per second: 100 Mbit/s
BLOCKING, STREAMING = (
    RunSpec.parse(f'[run]\npreset = "{name}"\n[reduce]\nlanes = 3')
    for name in ("diloco", "streaming")
)
ALONE = script_alone(STREAMING, 1600, 20)


def outcome(label: str, end: float, spec: RunSpec | None = None, **changed: Any) -> Outcome:
    trial = ALONE if spec is None else replicas(label, spec, 4, 400)
    steps = trial.steps
    curve = [(0.0, 5.5), (0.2 * steps, 3.0), (0.9 * steps, end + 0.01), (1.0 * steps, end - 0.01)]
    made = Outcome(
        trial,
        tokens=16_000,
        seconds=60.0,
        step_s=0.2,
        round_bytes=1e6,
        value_count=1_000_000,
        curves={"loss": curve},
    )
    return evolve(made, **changed)


def compared(*outcomes: Outcome) -> Comparison:
    return Comparison.of(outcomes, LINE, 0.05)


# ---------------------------------------------------------------- what is tried


def test_the_script_alone_takes_as_many_steps_as_all_replicas() -> None:
    alone, _diloco, streaming = _trials(4, 400, [], grid=False)
    assert (alone.steps, alone.peers) == (1600, 1)
    assert (alone.spec.diloco.outer_lr, alone.spec.diloco.outer_momentum) == (1.0, 0.0)
    assert (streaming.steps, streaming.peers) == (400, 4), "whole rounds of each fragment"
    assert streaming.spec.run.rounds == 100
    assert streaming.spec.membership.min_members == 4
    assert RunSpec.parse(streaming.spec.toml_text) == streaming.spec
    assert streaming.spec.reduce.codec_up == "nf4"


def test_a_grid_is_of_presets_and_of_steps_between_rounds(tmp_path: Path) -> None:
    labels = [trial.label for trial in _trials(2, 500, [], grid=True)]
    assert labels[0] == "alone"
    assert len(labels) == 7
    assert labels[1] == "2 x diloco, every 20"
    assert labels[-1] == "2 x streaming, every 100"
    path = tmp_path / "own.toml"
    path.write_text("[run]\nname = 'own'\njournal = 'postgresql://h/d'\n[diloco]\nouter_lr = 0.3\n")
    alone, *own = _trials(2, 500, [path], grid=True)
    assert [trial.spec.diloco.sync_every for trial in own] == [20, 50, 100]
    assert {trial.spec.diloco.outer_lr for trial in own} == {0.3}
    assert own[0].spec.run.journal == "", "nothing but settings is taken"
    assert alone.spec.diloco.sync_every == 100, "it counts whole rounds, too"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--steps", "99"], "--steps must be a multiple of 20, for 5 rounds or more, e.g. 100"),
        (["--steps", "410"], "a multiple of 20, for 5 rounds or more, e.g. 420"),
        (["--run-toml", "run.toml"], "outer_rl"),
        (["--run-toml", "slow.toml", "--grid"], "slow.toml, every 20: overlap"),
        (["--peers", "1"], "--peers"),
    ],
)
def test_what_cannot_be_tried_is_said_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[str], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("holdfast.daemon.cli.trial.Fleet", None)
    Path("train.py").touch()
    Path("run.toml").write_text("[diloco]\nouter_rl = 1")
    Path("slow.toml").write_text("[diloco]\nsync_every = 100\noverlap = 100")
    result = CliRunner().invoke(commands, ["try", "train.py", *options])
    assert isinstance(result.exception, UserError | SystemExit)
    assert said in f"{result.output} {result.exception}"


def test_a_script_that_is_not_there_is_named() -> None:
    result = CliRunner().invoke(commands, ["try", "nowhere.py"])
    assert "nowhere.py" in str(result.exception)


# ---------------------------------------------------------------- what comes of it


def test_the_least_loss_when_the_first_have_ended_is_to_be_taken(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = compared(
        outcome("alone", 2.0),
        outcome("blocking", 2.1, BLOCKING),
        outcome("streaming", 2.2, STREAMING),
        outcome("coarse", 2.4, STREAMING),
    )
    best = found.best()
    assert best is not None
    assert best.label == "streaming", "the blocking one is not done yet: it waits for its rounds"
    assert [row.against for row in found.rows] == pytest.approx([0.0, 0.05, 0.1, 0.2])
    alone, blocking, streaming, _coarse = found.rows
    assert alone.time_s == pytest.approx(320)
    assert blocking.utilisation < 0.98 <= streaming.utilisation
    assert blocking.time_s == pytest.approx(80 / blocking.utilisation)
    show(found)
    said = capsys.readouterr().out
    assert "+10.0%" in said
    assert said.splitlines()[-1] == "take: streaming"
    assert blocking.loss_at(streaming.time_s) == 3.0
    fast = Comparison.of([row.outcome for row in found.rows], 1_000 * LINE, 0.0).best()
    assert fast is not None
    assert fast.label == "blocking"


def test_a_figure_is_compared_only_if_all_logged_it_at_the_end() -> None:
    late, early = {"eval_loss": [(1600.0, 3.0)]}, {"eval_loss": [(300.0, 3.3)]}
    alone = outcome("alone", 2.0, curves=late)
    found = compared(alone, outcome("r", 2.1, STREAMING, curves={"eval_loss": [(400.0, 3.3)]}))
    assert found.figure == "eval_loss"
    assert found.rows[1].against == pytest.approx(0.1)
    both = {**late, **outcome("alone", 2.0).curves}
    losses = outcome("r", 2.1, STREAMING).curves
    stale = outcome("r", 2.1, STREAMING, curves={**early, **losses})
    found = compared(outcome("alone", 2.0, curves=both), stale)
    assert found.figure == "loss"
    assert found.rows[1].against == pytest.approx(0.05)


def test_without_any_loss_there_is_nothing_to_take(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = compared(outcome("a", 2.0, curves={}), outcome("b", 2.0, STREAMING, curves={}))
    assert found.best() is None
    draw(found, tmp_path / "try.svg")
    show(found)
    assert "the script reports no loss" in capsys.readouterr().out


def test_the_picture_has_both_axes_and_every_trial(tmp_path: Path) -> None:
    draw(compared(outcome("", 2.0), outcome("a < b & c", 2.1, STREAMING)), tmp_path / "try.svg")
    picture = ElementTree.parse(tmp_path / "try.svg").getroot()
    lines = [
        [tuple(map(float, point.split(","))) for point in each.get("points", "").split()]
        for each in picture.iter()
        if each.tag.endswith("polyline")
    ]
    assert [len(points) for points in lines] == [4] * 4
    alone, replicas = lines[:2]
    assert alone[-1][0] == replicas[-1][0] == 368, "the same tokens"
    assert lines[3][-1][0] < lines[2][-1][0], "four machines are faster"
    assert 0 < replicas[-1][1] < alone[-1][1] == 224, "less is lower"
    assert alone[1][1] < replicas[2][1] == 0, "the first losses would flatten the rest"
    texts = [each.text for each in picture]
    assert {"a < b & c", "16000 tokens", "320 s computed"} <= {*texts}
