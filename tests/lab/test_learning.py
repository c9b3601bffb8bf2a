"""The learning benchmark: arms by name, a tiny arm that is measured, what is said of it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks import learning
from benchmarks.learning import DEFAULT, FOUND, TUNED, Arm, against, names_of
from benchmarks.report import run_main
from holdfast.membership.spec.preset import PRESETS
from holdfast.membership.spec.spec import RunSpec


@pytest.mark.nightly
@pytest.mark.slow
def test_a_tiny_arm_is_measured_with_its_baseline_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(learning, "commit", lambda: "abc")
    options = ["--arms=diloco2", "--seeds=1", "--steps=40", "--batch=2", f"--keep={tmp_path}"]
    monkeypatch.setattr(sys, "argv", ["learning", *options, "--json=-"])
    assert run_main("learning", learning.main) == 0
    found = json.loads(capsys.readouterr().out)
    assert list(found) == ["dp2", "diloco2"]
    ((baseline,), (replicas,)) = found.values()
    assert baseline["tokens"] == replicas["tokens"] == 2 * 40 * 2 * 64
    assert 2 < baseline["loss"] < 5.5, "who knows nothing of 256 bytes has ln 256, 5.5"
    assert 2 < replicas["loss"] < 5.5
    monkeypatch.setattr(Arm, "measure", None)
    assert run_main("learning", learning.main) == 0
    assert json.loads(capsys.readouterr().out) == found, "of the same commit"


def test_arms_are_presets_with_their_optimizer() -> None:
    for name in (*DEFAULT, *FOUND, *TUNED):
        arm = Arm.of(name)
        assert arm.spec is None or arm.trial(500).peers == arm.peers
        assert Arm.of(arm.baseline).inner == arm.inner
        assert Arm.of(arm.baseline).trial(500).peers == 1
    for preset in PRESETS:
        inner = learning.PRESET_INNER.get(preset, "AdamW")
        if inner in learning.INNER:
            arm = Arm.of(f"{preset}3")
            assert (arm.peers, arm.inner) == (3, inner)
            assert arm.spec == RunSpec.parse(f'[run]\npreset = "{preset}"')


def test_a_name_changes_settings_and_the_baseline_follows() -> None:
    arm = Arm.of('diloco4@sync_every=10,outer_lr=0.5,codec_up="nf4",inner=Muon')
    assert arm.spec is not None
    assert (arm.spec.diloco.sync_every, arm.spec.diloco.outer_lr) == (10, 0.5)
    assert arm.spec.reduce.codec_up == "nf4"
    assert arm.trial(500).spec.run.rounds == 50
    assert arm.baseline == "dp4@inner=Muon"
    assert Arm.of("muon2@rate=4e-3").baseline == "dp2@inner=Muon,rate=4e-3"
    assert names_of("a,b@x=1,y=2,c") == ["a", "b@x=1,y=2", "c"]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("dilloco3", "no arm 'dilloco3'"),
        ("diloco", "no arm 'diloco'"),
        ("diloco4@speed=3", "diloco4@speed=3: run.toml has no speed"),
        ("dp4@sync_every=3", "dp has no other setting"),
        ("diloco4@inner=sgd", "inner is one of AdamW, Muon"),
        ("diloco4@overlap=70", "overlap"),
    ],
)
def test_an_arm_that_cannot_be_is_refused_in_a_sentence(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
    words: str,
) -> None:
    monkeypatch.setattr(sys, "argv", ["learning", f"--keep={tmp_path}", f"--arms={name}"])
    assert run_main("learning", learning.main) == 1
    assert words in capsys.readouterr().err


def test_an_arm_is_compared_seed_by_seed() -> None:
    baseline = [{"loss": 2.0}, {"loss": 4.0}]
    share, error = against([{"loss": 2.2}, {"loss": 4.4}], baseline)
    assert share == pytest.approx(0.1)
    assert error == pytest.approx(0.0)
    assert against([{"loss": 2.2}, {"loss": 4.8}], baseline)[1] == pytest.approx(0.05)
    figures = {"seed": 0, "tokens": 1_000, "round_bytes": 1e6, "commit": "abc"}
    found = {name: [{**figures, "loss": loss}] for name, loss in (("dp2", 2.0), ("diloco2", 2.1))}
    told = learning.table(found, "command").rows
    assert told[1] == ["`diloco2`", "2.1000", "", "+5.00%", "`dp2`", "1", "1.000"]
