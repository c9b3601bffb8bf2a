"""``init``, ``config check`` and completion in a shell: what stands before a run."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import attrs
import pytest

from holdfast.daemon.process.exit_codes import ExitCode
from holdfast.membership.spec.preset import PRESETS
from holdfast.membership.spec.spec import RunSpec
from holdfast.membership.spec.spec_faults import find_faults
from tests.processes.harness import Fleet, environment, run_command

README = (Path(__file__).resolve().parents[2] / "README.md").read_text()


def run(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return run_command(*arguments, cwd=folder)


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("start")
    done = run("init", "my-run", folder=folder)
    assert (done.returncode, done.stderr) == (0, "")
    shown = re.findall(r"^  (holdfast .*)$", done.stdout, re.MULTILINE)
    readme = re.findall(
        r"^(holdfast (?:master|join|dashboard).*?)(?:  +#.*)?$", README, re.MULTILINE
    )
    assert shown == readme, "what the first page says, letter by letter"
    return folder / "my-run"


# ---------------------------------------------------------------- init


def test_every_setting_is_in_the_file_with_its_default(started: Path) -> None:
    text = (started / "run.toml").read_text()
    assert find_faults(text) == ([], [])
    live = RunSpec.parse(text)
    spelt = RunSpec.parse(re.sub(r"^# (\w+ = )", r"\1", text, flags=re.MULTILINE))
    assert spelt == live
    for table in attrs.fields(RunSpec):
        for key in attrs.fields(type(getattr(live, table.name))):
            assert re.search(rf"^(# )?{key.name} = ", text, re.MULTILINE), key.name


def test_nothing_is_written_over(started: Path) -> None:
    (started / "train.py").write_text("my own")
    done = run("init", ".", folder=started)
    assert done.returncode == ExitCode.CONFIG
    assert "already exists" in done.stderr
    assert (started / "train.py").read_text() == "my own"
    assert run("init", "--force", folder=started).returncode == 0
    assert "holdfast.attach" in (started / "train.py").read_text()


@pytest.mark.parametrize(
    ("folder", "name"),
    [("my run", "my run"), ('a "b" \\c', 'a "b" \\c'), ("x" * 65, "my-run"), ("ä", "ä")],
)
def test_a_run_is_named_after_its_folder(folder: str, name: str, tmp_path: Path) -> None:
    done = run("init", folder, folder=tmp_path)
    assert RunSpec.parse((tmp_path / folder / "run.toml").read_text()).run.name == name
    for line in done.stdout.splitlines():
        if line.startswith("  holdfast master"):
            assert shlex.split(line)[-1] == f"{folder}/run.toml"


@pytest.mark.parametrize("preset", PRESETS)
def test_a_run_may_begin_with_a_preset(preset: str, tmp_path: Path) -> None:
    assert run("init", ".", "--preset", preset, folder=tmp_path).returncode == 0
    text = (tmp_path / "run.toml").read_text()
    spec = RunSpec.parse(text)
    alone = RunSpec.parse(f'[run]\npreset = "{preset}"\n')
    assert (spec.diloco, spec.reduce) == (alone.diloco, alone.reduce)
    checked = run("config", "check", "run.toml", folder=tmp_path)
    assert f'preset "{preset}" sets ' in checked.stdout


def test_the_run_takes_minutes_and_needs_two_peers(started: Path) -> None:
    spec = RunSpec.parse((started / "run.toml").read_text())
    assert spec.membership.min_members == 2
    # A step takes 10 to 16 ms of one core.
    assert spec.diloco.fragments == 1
    assert 180 <= 0.01 * spec.run.rounds * spec.diloco.sync_every <= 360
    assert 5 <= 0.01 * spec.diloco.sync_every <= 10


@pytest.mark.slow
def test_what_it_writes_runs_as_it_is(started: Path, tmp_path: Path) -> None:
    run("init", "--force", folder=started)
    text = (started / "run.toml").read_text()
    text = re.sub(r"^rounds = \d+", "rounds = 4", text, flags=re.MULTILINE)
    text = re.sub(r"^sync_every = \d+", "sync_every = 20", text, flags=re.MULTILINE)
    with Fleet(tmp_path) as fleet:
        fleet.start_master(text)
        command = (sys.executable, str(started / "train.py"))
        nodes = [fleet.join(name, founder=True, command=command) for name in ("alder", "birch")]
        status = fleet.until(lambda s: s["state"] == "finished", "all of its rounds")
        assert [node.wait() for node in nodes] == [0, 0]
        ends = [re.findall(r"^finished, loss .* (\d\.\d+)$", n.log, re.MULTILINE) for n in nodes]
        assert ends[0] == ends[1], "the same weights at both"
        assert len(ends[0]) == 1
        assert status["warnings"] == [], "two peers of one operator are an ordinary run"
        assert [("in final.pt" in node.log) for node in nodes].count(True) == 1
        assert (tmp_path / "final.pt").exists()


@pytest.mark.slow
def test_the_script_trains_alone(started: Path, tmp_path: Path) -> None:
    run("init", "--force", folder=started)
    alone = {"HOLDFAST_STANDALONE": "1", "HOLDFAST_STANDALONE_STEPS": "400"}
    done = subprocess.run(
        [sys.executable, str(started / "train.py")],
        cwd=tmp_path,
        env=environment(alone),
        capture_output=True,
        text=True,
        check=True,
    )
    steps = re.findall(r"^step (\d+) of 400: loss", done.stdout, re.MULTILINE)
    assert steps == ["200", "400"]
    final = re.search(r"^finished, loss .* (\d\.\d+)$", done.stdout, re.MULTILINE)
    assert final is not None
    assert float(final[1]) < 3.2, "it began at 5.5"
    assert (tmp_path / "final.pt").exists()


# ---------------------------------------------------------------- config check


def test_errors_have_the_file_and_the_line(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text("[run]\nnam = 'x'\n[membership]\nquorum = 2\n")
    done = run("config", "check", "run.toml", folder=tmp_path)
    assert done.returncode == ExitCode.CONFIG
    assert done.stdout.splitlines() == [
        "run.toml:2: error: run.nam: unknown key (did you mean 'name'?)",
        "run.toml:4: error: membership.quorum: quorum must be from 0 to 1, got 2",
    ]
    (tmp_path / "run.toml").write_text("[membership]\nquorum = 0.2\n")
    done = run("config", "check", "run.toml", "--json", folder=tmp_path)
    told = json.loads(done.stdout)
    assert (done.returncode, told["valid"], told["errors"]) == (0, True, [])
    assert [(w["line"], w["key"]) for w in told["warnings"]] == [(2, "membership.quorum")]
    (tmp_path / "run.toml").write_text("[run]\nnam = 'x'\n[membership]\nquorum = 2\n")
    checked = run("config", "check", "run.toml", folder=tmp_path)
    refused = run("master", "run.toml", folder=tmp_path)
    assert refused.returncode == ExitCode.CONFIG
    head, *lines = refused.stderr.splitlines()
    assert head == "holdfast: run.toml has 2 errors"
    assert [line.strip() for line in lines] == checked.stdout.splitlines(), "what the check prints"
    done = run("config", "check", "none.toml", folder=tmp_path)
    assert (done.returncode, "cannot read none.toml" in done.stderr) == (ExitCode.CONFIG, True)


# ---------------------------------------------------------------- completion


def test_bash_completes_commands_and_options(tmp_path: Path) -> None:
    """In a real bash, as it does when somebody presses the tabulator."""
    command = tmp_path / "holdfast"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m holdfast "$@"\n')
    command.chmod(0o755)
    script = """
    eval "$(_HOLDFAST_COMPLETE=bash_source holdfast)"
    complete -p holdfast
    ask() {
        COMP_WORDS=("$@") COMP_CWORD=$(($# - 1)) COMPREPLY=()
        _holdfast_completion holdfast
        echo "${COMPREPLY[@]}"
    }
    ask holdfast do
    ask holdfast events --kind le
    """
    done = subprocess.run(
        ["bash", "-c", script],
        env={**environment(), "PATH": f"{tmp_path}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stderr == ""
    registered, *answers = done.stdout.splitlines()
    assert registered.endswith("holdfast")
    assert answers == ["doctor", "leave"]
