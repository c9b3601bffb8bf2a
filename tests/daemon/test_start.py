"""``init``, ``config check`` and ``completion``: what stands before a run."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import attrs
import pytest

from holdfast.daemon.exit_codes import ExitCode
from holdfast.membership.spec.spec import RunSpec
from holdfast.membership.spec.spec_faults import find_faults
from tests.processes.harness import Fleet, environment

HOLDFAST = (sys.executable, "-m", "holdfast")


def run(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*HOLDFAST, *arguments],
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("start")
    done = run("init", "mine", folder=folder)
    assert (done.returncode, done.stderr) == (0, "")
    assert "holdfast master mine/run.toml" in done.stdout
    return folder / "mine"


# ---------------------------------------------------------------- init


def test_every_setting_is_in_the_file_with_its_default(started: Path) -> None:
    text = (started / "run.toml").read_text()
    assert find_faults(text) == ([], [])
    live = RunSpec.parse(text)
    spelt = RunSpec.parse(re.sub(r"^# (\w+ = )", r"\1", text, flags=re.MULTILINE))
    assert attrs.evolve(spelt, toml_text="") == attrs.evolve(live, toml_text="")
    for table in attrs.fields(RunSpec):
        if table.name != "toml_text":
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


@pytest.mark.slow
def test_what_it_writes_runs_as_it_is(started: Path, tmp_path: Path) -> None:
    run("init", "--force", folder=started)
    fleet = Fleet(tmp_path)
    try:
        fleet.start_master((started / "run.toml").read_text())
        script = str(started / "train.py")
        node = fleet.join("alder", founder=True, command=(sys.executable, script))
        fleet.until(lambda s: s["state"] == "finished", "all of its rounds", 60)
        assert node.wait() == 0
        assert "finished after 20 rounds, loss" in node.log
        assert (tmp_path / "final.pt").exists()
    finally:
        fleet.stop_all()


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
    done = run("config", "check", "none.toml", folder=tmp_path)
    assert (done.returncode, "cannot read none.toml" in done.stderr) == (ExitCode.CONFIG, True)


# ---------------------------------------------------------------- completion


def test_bash_completes_commands_and_options(tmp_path: Path) -> None:
    """In a real bash, as it does when somebody presses the tabulator."""
    command = tmp_path / "holdfast"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m holdfast "$@"\n')
    command.chmod(0o755)
    script = """
    eval "$(holdfast completion bash)"
    complete -p holdfast
    ask() {
        COMP_WORDS=("$@") COMP_CWORD=$(($# - 1)) COMPREPLY=()
        _holdfast_completion holdfast
        echo "${COMPREPLY[@]}"
    }
    ask holdfast do
    ask holdfast config ""
    ask holdfast bench transfer --js
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
    assert answers == ["doctor", "check", "--json", "leave"]


@pytest.mark.parametrize(("shell", "begins"), [("zsh", "#compdef holdfast"), ("fish", "function ")])
def test_other_shells_have_theirs(shell: str, begins: str, tmp_path: Path) -> None:
    done = run("completion", shell, folder=tmp_path)
    assert done.stdout.startswith(begins)
    assert "_HOLDFAST_COMPLETE" in done.stdout
