"""Templates for rented and lent machines: their own tools' rules, and what they run, without a cluster.

Real Slurm and SkyPilot have taken these files by hand (docs/rented.md); CI has neither. What it has are the
linters, and processes that are started with the manifests' own arguments and with the batch scripts themselves.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from holdfast.daemon.cli.service_units import STOP_S
from tests.processes.harness import TRAINER, environment

ROOT = Path(__file__).resolve().parents[2]
TEMPLATES = ROOT / "templates"
SLURM = TEMPLATES / "slurm"
MANIFESTS = {
    manifest["kind"]: manifest
    for path in sorted((TEMPLATES / "kubernetes").glob("*.yaml"))
    for manifest in yaml.safe_load_all(path.read_text())
}
SKYPILOT = yaml.safe_load((TEMPLATES / "skypilot" / "peers.yaml").read_text())
TOOLS = Path(sys.executable).parent
KUBERNETES = ("1.30", "1.37")  # oldest and newest that are checked
WAIT_S = 120.0  # on a busy machine


def container(kind: str) -> dict[str, Any]:
    (only,) = MANIFESTS[kind]["spec"]["template"]["spec"]["containers"]
    return dict(only)


# ---------------------------------------------------------------- linters


@pytest.mark.parametrize("version", KUBERNETES)
def test_kubernetes_own_schemas_take_the_manifests(version: str) -> None:
    files = sorted((TEMPLATES / "kubernetes").glob("*.yaml"))
    done = subprocess.run(
        [TOOLS / "kubernetes-validate", "--strict", "-k", version, *files],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_validator_would_find_a_wrong_key(tmp_path: Path) -> None:
    wrong = (TEMPLATES / "kubernetes" / "peers.yaml").read_text()
    (tmp_path / "wrong.yaml").write_text(wrong.replace("replicas:", "replica:", 1))
    done = subprocess.run(
        [TOOLS / "kubernetes-validate", "--strict", tmp_path / "wrong.yaml"],
        capture_output=True,
        text=True,
    )
    assert done.returncode != 0


def test_shellcheck_has_nothing_to_say(tmp_path: Path) -> None:
    scripts = sorted(SLURM.glob("*.sbatch"))
    for part in ("setup", "run"):
        script = tmp_path / f"sky-{part}.sh"
        script.write_text(f"#!/usr/bin/env bash\n{SKYPILOT[part]}")
        scripts.append(script)
    for script in scripts:
        done = subprocess.run(
            [TOOLS / "shellcheck", "--shell=bash", script], capture_output=True, text=True
        )
        assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.skipif(shutil.which("sbatch") is None, reason="no Slurm here")
@pytest.mark.parametrize("script", ["peers", "master"])
def test_sbatch_takes_the_scripts(script: str) -> None:
    if subprocess.run(["sinfo"], capture_output=True).returncode:
        pytest.skip("no Slurm controller answers")
    subprocess.run(["sbatch", "--test-only", SLURM / f"{script}.sbatch"], check=True)


# ---------------------------------------------------------------- what they ask for


def test_a_peer_that_is_told_to_stop_has_the_time_that_a_drain_takes() -> None:
    grace_s = MANIFESTS["Deployment"]["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
    assert grace_s > STOP_S
    script = (SLURM / "peers.sbatch").read_text()
    (before_s,) = re.findall(r"^#SBATCH --signal=B:TERM@(\d+)$", script, re.M)
    assert int(before_s) >= STOP_S
    for last in (script.splitlines()[-2], SKYPILOT["run"].splitlines()[-1]):
        assert last.startswith("exec holdfast join "), "signals must reach the peer itself"


def test_no_variable_is_one_that_holdfast_would_refuse() -> None:
    """Unknown variables with holdfast's prefix are an error of every command."""
    for path in TEMPLATES.rglob("*.*"):
        assert set(re.findall(r"HOLDFAST_\w+", path.read_text())) <= {
            "HOLDFAST_",
            "HOLDFAST_MASTER_HTTP_HOST",
        }


def test_manifests_fit_together() -> None:
    master, service, peers = (
        MANIFESTS[kind]["spec"] for kind in ("StatefulSet", "Service", "Deployment")
    )
    labels = master["template"]["metadata"]["labels"]
    assert master["selector"]["matchLabels"] == service["selector"] == labels
    assert peers["selector"]["matchLabels"] == peers["template"]["metadata"]["labels"] != labels
    assert master["serviceName"] == MANIFESTS["Service"]["metadata"]["name"]
    assert f"{master['serviceName']}:29700" in container("StatefulSet")["args"]
    assert (master["replicas"], labels["app.kubernetes.io/component"]) == (1, "master")
    for kind in ("StatefulSet", "Deployment"):
        pod = MANIFESTS[kind]["spec"]["template"]["spec"]
        volumes = {each["name"] for each in pod["volumes"]}
        claims = MANIFESTS[kind]["spec"].get("volumeClaimTemplates", ())
        volumes |= {each["metadata"]["name"] for each in claims}
        assert {each["name"] for each in container(kind)["volumeMounts"]} == volumes
        assert pod["securityContext"]["runAsUser"] == 10001, "the image's user"


# ---------------------------------------------------------------- what they run


class Machines:
    """Processes with a template's commands; paths in a container are paths in a folder here."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        (folder / "script").mkdir()
        shutil.copy(TRAINER, folder / "script" / "train.py")
        spec = MANIFESTS["ConfigMap"]["data"]["run.toml"]
        # The script's model has two layers.
        (folder / "run.toml").write_text(f"{spec}\n[diloco]\nfragments = 2\n")

    def inside(self, word: str, name: str) -> str:
        for path, here in (
            ("/etc/holdfast/", f"{self.folder}/"),
            ("/invite/", f"{self.folder}/"),
            ("/script/", f"{self.folder}/script/"),
            ("$(POD_NAME)", name),
            ("$(POD_IP):29701", "127.0.0.1"),
            ("holdfast-master:29700", "127.0.0.1"),
        ):
            word = word.replace(path, here)
        return sys.executable if word == "python" else word

    def start(self, name: str, *command: str | Path, **more: str) -> None:
        env = environment(
            {
                "PATH": f"{TOOLS}:{self.folder}:/usr/bin:/bin",
                "HOLDFAST_HOME": str(self.folder / name),
                "HOLDFAST_MASTER_LISTEN": "127.0.0.1:0",
                "HOLDFAST_MASTER_HTTP": "127.0.0.1:0",
                "HOLDFAST_JOIN_LISTEN": "127.0.0.1:0",
                **more,
            }
        )
        with (self.folder / f"{name}.log").open("ab") as log:
            self.running[name] = subprocess.Popen(
                command,
                cwd=self.folder,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def start_container(self, name: str, kind: str) -> None:
        args = [self.inside(word, name) for word in container(kind)["args"]]
        self.start(name, TOOLS / "holdfast", *args)

    def ask(self, *words: str) -> str:
        (control,) = (self.folder / "master").rglob("control.json")
        command = [str(TOOLS / "holdfast"), *words, "--state", str(control.parent)]
        done = subprocess.run(command, env=environment(), capture_output=True, text=True)
        return done.stdout

    def until(self, what: str, wanted: Any) -> None:
        until_s = time.monotonic() + WAIT_S
        while not wanted():
            assert time.monotonic() < until_s, what + "".join(map(self.log, self.running))
            time.sleep(0.2)

    def committed(self) -> int:
        return int(json.loads(self.ask("status", "--json") or '{"committed": 0}')["committed"])

    def log(self, name: str) -> str:
        return f"\n{name}:\n" + (self.folder / f"{name}.log").read_text()[-2_000:]

    def stop(self, name: str) -> int:
        self.running[name].send_signal(signal.SIGTERM)
        return self.running[name].wait(WAIT_S)

    def down(self) -> None:
        for process in self.running.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Machines]:
    made = Machines(tmp_path)
    try:
        yield made
    finally:
        made.down()


@pytest.mark.timeout(300)
def test_the_manifests_commands_and_the_batch_script_make_a_run(machines: Machines) -> None:
    machines.start_container("master", "StatefulSet")
    machines.until("a control file", lambda: list(machines.folder.rglob("control.json")))
    (asked,) = re.findall(
        r"holdfast (invite .*) \|$", (TEMPLATES / "kubernetes" / "peers.yaml").read_text(), re.M
    )
    machines.until("an answer", lambda: machines.ask("status", "--json"))
    (machines.folder / "invite").write_text(machines.ask(*asked.split()))
    machines.start_container("pod", "Deployment")
    machines.start(
        "slurm",
        *("bash", SLURM / "peers.sbatch"),
        INVITE_FILE=str(machines.folder / "invite"),
        PEERS_FOLDER=str(machines.folder / "peers"),
        TRAIN_COMMAND=f"{sys.executable} {TRAINER}",
        SLURM_JOB_ID="8",
        SLURM_ARRAY_JOB_ID="7",
        SLURM_ARRAY_TASK_ID="1",
    )
    machines.until("two rounds", lambda: machines.committed() >= 2)
    assert machines.stop("slurm") == 0
    assert "left the run" in machines.log("slurm")
    assert list((machines.folder / "peers" / "slurm-7-1" / "checkpoints").iterdir())
    assert machines.stop("pod") == 0
    assert machines.stop("master") == 0


@pytest.mark.timeout(300)
def test_the_masters_batch_script_writes_an_invite_and_passes_the_signal_on(
    machines: Machines,
) -> None:
    more = {
        "RUN_FOLDER": str(machines.folder),
        "INVITE_FILE": str(machines.folder / "invite"),
        "MASTER_PORT": "0",
    }
    machines.start("job", "bash", SLURM / "master.sbatch", **more)
    machines.until("an invite", (machines.folder / "invite").exists)
    assert (machines.folder / "invite").stat().st_mode & 0o077 == 0
    first = (machines.folder / "invite").read_text()
    assert first.startswith("holdfast1.")
    assert machines.stop("job") == 0
    machines.start("job", "bash", SLURM / "master.sbatch", **more)  # requeued
    machines.until("its second term", lambda: "resuming run" in machines.log("job"))
    assert machines.stop("job") == 0
    assert (machines.folder / "invite").read_text() == first
