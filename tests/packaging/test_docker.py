"""The images and the compose file, as far as they can be tried without a container engine.

The linter's rules hold; compose names only what is there; and what an image would hold, put into a fresh
environment from exactly the files that its Dockerfile copies, runs with exactly the commands of compose.
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

from holdfast.daemon.cli.run_commands import master
from tests.packaging.environments import environment_with

ROOT = Path(__file__).resolve().parents[2]
DOCKER = ROOT / "docker"
DOCKERFILE = (DOCKER / "Dockerfile").read_text()
COMPOSE = yaml.safe_load((DOCKER / "compose.yaml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
WAIT_S = 60.0


def stage(name: str) -> str:
    found = re.search(rf"^FROM \S+ AS {name}\n(.*?)(?=^FROM |\Z)", DOCKERFILE, re.M | re.S)
    assert found is not None, name
    return found[1].replace("\\\n", " ")


def copied(name: str) -> list[str]:
    """Return the files that a stage copies from the repository."""
    lines = re.findall(r"^COPY (?!--from)(.+) \S+$", stage(name), re.M)
    return [word for line in lines for word in line.split()]


def test_the_linter_has_nothing_to_say() -> None:
    linter = Path(sys.executable).with_name("hadolint")
    done = subprocess.run([linter, DOCKER / "Dockerfile"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")


def test_what_is_copied_is_there_and_let_through() -> None:
    let_through = (ROOT / ".dockerignore").read_text().splitlines()
    for name in (*copied("build"), *copied("peer")):
        assert (ROOT / name).exists(), name
        assert f"!{name.partition('/')[0]}" in let_through, name


def test_prometheus_asks_by_a_name_that_the_master_answers_to() -> None:
    scraped = yaml.safe_load((DOCKER / "prometheus.yml").read_text())["scrape_configs"]
    targets = [
        each for job in scraped for group in job["static_configs"] for each in group["targets"]
    ]
    names = SERVICES["master"]["environment"]["HOLDFAST_MASTER_HTTP_HOST"].split()
    assert targets
    assert {target.partition(":")[0] for target in targets} <= set(names)


def test_nobody_is_root_and_state_is_a_volume() -> None:
    base = stage("base")
    assert re.search(r"^USER (\d+)$", base, re.M)
    assert "/state" in base[base.index("VOLUME") :]
    for name in ("master", "peer"):
        assert "HEALTHCHECK" in stage(name)
        assert "USER" not in stage(name)


def test_the_masters_image_installs_no_torch() -> None:
    assert "[train]" not in stage("build")
    assert ".[train]" in stage("build-peer")


def test_compose_names_only_what_is_there() -> None:
    targets = set(re.findall(r"^FROM \S+ AS (\S+)", DOCKERFILE, re.M))
    built = {each["image"] for each in SERVICES.values() if "build" in each}
    for name, service in SERVICES.items():
        if build := service.get("build"):
            assert build["target"] in targets
            assert (DOCKER / build["context"] / build["dockerfile"]).is_file()
        else:
            assert service["image"] in built or re.search(r":v?\d", service["image"]), name
        for volume in service.get("volumes", ()):
            source = volume.partition(":")[0]
            there = (
                (DOCKER / source).exists()
                if source.startswith(".")
                else source in COMPOSE["volumes"]
            )
            assert there, f"{name}: {volume}"
        assert set(service.get("depends_on", ())) <= set(SERVICES)
    assert {"master", "spare", "prometheus", "grafana"} <= set(SERVICES)


def test_the_second_master_uses_options_that_exist() -> None:
    both = yaml.safe_load((DOCKER / "compose.masters.yaml").read_text())
    options = {f"HOLDFAST_MASTER_{each.name}".upper() for each in master.params if each.name}
    for name in ("master", "master2"):
        service = both["services"][name]
        given = {each for each in service["environment"] if each.startswith("HOLDFAST_MASTER_")}
        assert given
        assert given <= options
        for volume in service.get("volumes", ()):
            source = volume.partition(":")[0]
            assert (
                (DOCKER / source).exists() if source.startswith(".") else source in both["volumes"]
            )
        assert set(service["depends_on"]) <= {*SERVICES, *both["services"]}
    assert (DOCKER / "prometheus.masters.yml").is_file()


def test_only_the_masters_own_port_is_open_to_others() -> None:
    ports = [port for service in SERVICES.values() for port in service.get("ports", ())]
    assert [port for port in ports if not port.startswith("127.0.0.1:")] == ["29700:29700"]


# ---------------------------------------------------------------- the same commands, without an engine


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The ``bin`` of an environment with what the images hold; dependencies are this one's."""
    folder = tmp_path_factory.mktemp("image")
    tree = folder / "src"
    for name in copied("build"):
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            tree.mkdir(exist_ok=True)
            shutil.copy(source, tree / name)
    return environment_with(folder / "venv", tree)


class Containers:
    """Processes with a compose service's command, each with folders for its volumes."""

    def __init__(self, folder: Path, image: Path) -> None:
        self.folder = folder
        self.image = image
        self.running: dict[str, subprocess.Popen[bytes]] = {}

    def _inside(self, service: str, text: str) -> str:
        """Paths in a container are paths in our folder; its names and ports are loopback's."""
        state = SERVICES[service].get("network_mode", "").removeprefix("service:") or service
        for path, here in (
            ("/etc/holdfast/run.toml", str(DOCKER / "run.toml")),
            ("/invite/", f"{self.folder}/invite/"),
            ("/state", f"{self.folder}/{state}"),
            ("$$", "$"),
            ("master:29700", "127.0.0.1"),
        ):
            text = text.replace(path, here)
        return text

    def _start(self, service: str, command: list[str]) -> subprocess.Popen[bytes]:
        for name in (service, "invite"):
            (self.folder / name).mkdir(exist_ok=True)
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("HOLDFAST_", "PYTHON"))}
        env = {
            **kept,
            "PATH": f"{self.image}:/usr/bin:/bin",
            "HOLDFAST_HOME": self._inside(service, "/state"),
            "HOLDFAST_MASTER_LISTEN": "127.0.0.1:0",
            "HOLDFAST_MASTER_HTTP": "127.0.0.1:0",
            "HOLDFAST_JOIN_LISTEN": "127.0.0.1:0",
            "OMP_NUM_THREADS": "1",
        }
        with (self.folder / f"{service}.log").open("ab") as log:
            return subprocess.Popen(
                [self._inside(service, word) for word in command],
                cwd=self.folder,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def up(self, service: str) -> None:
        entry = SERVICES[service].get("entrypoint") or json.loads(
            re.findall(r"^ENTRYPOINT (\[.*\])$", stage("base"), re.M)[0]
        )
        self.running[service] = self._start(
            service, [*entry, *SERVICES[service].get("command", ())]
        )

    def healthy(self, service: str, image: str) -> bool:
        found = re.search(r"HEALTHCHECK .*? CMD (\[.*\])", stage(image))
        assert found is not None
        return self._start(service, json.loads(found[1])).wait(WAIT_S) == 0

    def until_healthy(self, service: str, image: str) -> None:
        until_s = time.monotonic() + WAIT_S
        while not self.healthy(service, image):
            assert time.monotonic() < until_s, self.log(service)
            assert self.running[service].poll() is None, self.log(service)

    def log(self, service: str) -> str:
        return (self.folder / f"{service}.log").read_text()[-3_000:]

    def status(self) -> dict[str, Any]:
        (path,) = (self.folder / "master").rglob("control.json")
        state = str(path.parent)
        command = [str(self.image / "holdfast"), "status", "--json", "--state", state]
        told: dict[str, Any] = json.loads(subprocess.check_output(command))
        return told

    def down(self) -> None:
        for process in self.running.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@pytest.fixture
def containers(tmp_path: Path, image: Path) -> Iterator[Containers]:
    made = Containers(tmp_path, image)
    try:
        yield made
    finally:
        made.down()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_composes_commands_make_a_run(containers: Containers) -> None:
    containers.up("master")
    containers.until_healthy("master", "master")
    containers.up("invite")
    assert containers.running["invite"].wait(WAIT_S) == 0, containers.log("invite")
    shutil.copy(ROOT / "examples" / "train.py", containers.folder)  # as the peer's image does
    for name in ("peer1", "peer2"):
        containers.up(name)
    until_s = time.monotonic() + 2 * WAIT_S
    while (status := containers.status())["committed"] < 1:
        assert time.monotonic() < until_s, json.dumps(status) + containers.log("peer1")
        time.sleep(0.5)
    assert status["counts"]["contributed"] == 2
    assert containers.healthy("peer1", "peer")
