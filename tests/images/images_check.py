"""Both images are built, and compose's services run from them: ``make images``.

What a service is (image, command, volumes, ports, user, read-only or not) is read from compose.yaml
and from the built image's configuration, as an engine reads it. pytest does not collect this file.
"""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.images import base
from tests.images.engine import WAIT_S, Builder, Container, Network, told, until

pytestmark = pytest.mark.timeout(1800)

DOCKER = base.ROOT / "docker"
COMPOSE = yaml.safe_load((DOCKER / "compose.yaml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
TARGETS = {each["image"]: each["build"]["target"] for each in SERVICES.values() if "build" in each}
UID = 10001
HOLDFAST_MB_MAX = 120  # of the master's image; torch has no such limit
Status = dict[str, Any]


@pytest.fixture(scope="module")
def builder() -> Iterator[Builder]:
    assert not base.why_not(), base.why_not()
    folder = base.BUILD
    folder.mkdir(parents=True, exist_ok=True)
    made = Builder(folder)
    try:
        made.provide_base(DOCKER / "Dockerfile")
        for tag, target in TARGETS.items():
            began_s = time.monotonic()
            made.build(DOCKER / "Dockerfile", base.ROOT, target, tag)
            print(f"{tag} built in {time.monotonic() - began_s:.0f} s")
        yield made
    finally:
        made.drop()


class Composition:
    """The services of compose.yaml as containers, each with an address, and its volumes as
    folders.
    """

    def __init__(self, builder: Builder, folder: Path, network: Network) -> None:
        self.folder = folder
        self.builder = builder
        self.network = network
        self.containers: dict[str, Container] = {}
        self._hosts = folder / "hosts"
        self._hosts.write_text(self.network.table())

    def create(self, name: str) -> Container:
        """Make a container of a service; one that was there before is replaced, its volumes
        stay.
        """
        service = SERVICES[name]
        shared_with = service.get("network_mode", "").removeprefix("service:")
        volumes = {"/etc/hosts:ro": str(self._hosts)}
        for text in service.get("volumes", ()):
            source, _, inside = text.partition(":")
            volumes[inside] = (
                str(DOCKER / source) if source.startswith(".") else self._volume(source)
            )
        made = self.containers[name] = Container(
            self.builder,
            service["image"],
            self.network.namespace(shared_with or name),
            self.folder / f"{name}.log",
            volumes,
            service.get("tmpfs", ()),
            service.get("read_only", False),
        )
        return made

    def _volume(self, name: str) -> str:
        path = self.folder / "volumes" / name
        if not path.exists():
            path.mkdir(parents=True)
            os.chown(path, UID, UID)  # an engine copies what is there in the image, its owner too
        return str(path)

    def up(self, name: str) -> Container:
        service = SERVICES[name]
        config = self.builder.config(service["image"])
        entry = service.get("entrypoint") or config["Entrypoint"]
        command = service.get("command") or ([] if "entrypoint" in service else config["Cmd"])
        words = [word.replace("$$", "$") for word in (*entry, *command)]
        made = self.create(name)
        made.start(words, service.get("environment", {}))
        return made

    def healthy(self, name: str) -> bool:
        kind, *command = self.builder.config(SERVICES[name]["image"])["Healthcheck"]["Test"]
        assert kind == "CMD"
        return self.containers[name].execute(command).returncode == 0

    def until_healthy(self, name: str) -> float:
        """Wait for the health check's success, and return the seconds that it took."""
        began_s = time.monotonic()
        until(f"{name} is healthy", lambda: self.healthy(name), self.containers[name].log)
        return time.monotonic() - began_s

    def holdfast(self, name: str, *arguments: str) -> str:
        done = self.containers[name].execute(["holdfast", *arguments])
        assert done.returncode == 0, done.stderr
        return done.stdout

    def status(self, name: str = "master") -> Status:
        told: Status = json.loads(self.holdfast(name, "status", "--json"))
        return told

    def until_committed(self, more: int) -> None:
        goal = self.status()["committed"] + more
        until(f"{more} rounds", lambda: self.status()["committed"] >= goal, self.logs)

    def logs(self) -> str:
        return "\n".join(f"---- {name}\n{each.log()}" for name, each in self.containers.items())

    def get(self, url: str, host: str) -> int:
        """Return the HTTP status that one outside the containers gets, who calls the server
        ``host``.
        """
        code = (
            "import http.client, sys, urllib.parse; url = urllib.parse.urlsplit(sys.argv[1]);"
            "there = http.client.HTTPConnection(url.netloc, timeout=10);"
            "there.request('GET', url.path, headers={'Host': sys.argv[2]});"
            "print(there.getresponse().status)"
        )
        command = [
            "ip",
            "netns",
            "exec",
            self.network.outside,
            sys.executable,
            "-c",
            code,
            url,
            host,
        ]
        return int(told(*command))

    def down(self) -> None:
        for each in self.containers.values():
            each.kill()


@pytest.fixture
def composition(tmp_path: Path, builder: Builder) -> Iterator[Composition]:
    ours = [name for name, each in SERVICES.items() if each["image"] in TARGETS]
    with Network([name for name in ours if "network_mode" not in SERVICES[name]]) as network:
        made = Composition(builder, tmp_path, network)
        try:
            yield made
        finally:
            made.down()


def test_the_images_are_small_and_hold_no_tools_of_their_build(builder: Builder) -> None:
    for tag in TARGETS:
        root = Path(builder("mount", builder("from", "--pull=never", tag)))
        total, ours = (
            int(told("du", "-sm", path).split()[0]) for path in (root, root / "opt/holdfast")
        )
        print(f"{tag}: {total} MB, of which /opt/holdfast has {ours}")
        (packages,) = (root / "opt/holdfast/lib").glob("python3*/site-packages")
        there = {path.name for path in packages.iterdir()}
        assert "pip" not in there
        assert ("torch" in there) == (TARGETS[tag] == "peer")
        if TARGETS[tag] == "master":
            assert "setuptools" not in there, "torch asks for it"
            assert ours <= HOLDFAST_MB_MAX


def test_compose_publishes_ports_and_mounts_volumes_that_the_images_declare(
    builder: Builder,
) -> None:
    for service in SERVICES.values():
        if service["image"] not in TARGETS:
            continue
        config = builder.config(service["image"])
        assert config["User"] == str(UID)
        published = {port.rpartition(":")[2] for port in service.get("ports", ())}
        assert published <= {port.removesuffix("/tcp") for port in config["ExposedPorts"]}
        mounted = {text.split(":")[1] for text in service.get("volumes", ()) if text[0] != "."}
        assert mounted <= set(config["Volumes"])


def test_compose_runs_and_a_killed_contributor_returns(composition: Composition) -> None:
    master = composition.up("master")
    print(f"the master is healthy after {composition.until_healthy('master'):.1f} s")
    invite = composition.up("invite")
    assert invite.wait() == 0, invite.log()
    for name in ("peer1", "peer2"):
        composition.up(name)
    until("a round", lambda: composition.status()["committed"], composition.logs, 4 * WAIT_S)
    assert composition.status()["counts"]["contributed"] == 2
    for name in ("peer1", "peer2"):
        assert composition.healthy(name), composition.logs()
    _look_inside(composition)

    identity = composition.status("peer2")["peer"]
    composition.containers["peer2"].kill()
    assert not composition.healthy("peer2")
    assert composition.healthy("master")
    composition.up("peer2")  # another container, with the same volume
    composition.until_healthy("peer2")
    assert composition.status("peer2")["peer"] == identity
    composition.until_committed(3)

    composition.holdfast("master", "pause")
    until("equal digests", lambda: _agreed(composition.status()), composition.logs)

    for name in ("peer1", "peer2"):
        assert composition.containers[name].stop() == 0, composition.logs()
    assert master.stop() == 0, master.log()


def _agreed(status: Status) -> bool:
    """Return whether the run is idle and both peers hold its last version, with one digest."""
    heads = [head for member in status["members"] for head in member["heads"]]
    last = {(head["state"], head["version"]) for head in heads} == {("held", status["committed"])}
    return (
        not status["rounds"]
        and len(status["members"]) == 2
        and last
        and len({head["root"] for head in heads}) == 1
    )


def _look_inside(composition: Composition) -> None:
    """Check what compose and the Dockerfile ask of running containers."""
    for name in ("master", "peer1"):
        container = composition.containers[name]
        pid = container.pid()
        assert pid is not None
        facts = dict(
            line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines()
        )
        assert facts["Uid"].split() == [str(UID)] * 4
        assert int(facts["CapEff"], 16) == int(facts["CapBnd"], 16) == 0
        compiled = "import json, pathlib; assert pathlib.Path(json.__cached__).exists()"
        assert container.execute(["python", "-c", compiled]).returncode == 0
        writable = container.execute(["touch", "/home/holdfast/new"]).returncode == 0
        assert writable == (not SERVICES[name].get("read_only", False))
        assert container.execute(["touch", "/state/new"]).returncode == 0
    for path in SERVICES["master"]["tmpfs"]:
        assert composition.containers["master"].execute(["touch", f"{path}/new"]).returncode == 0
    read_only = composition.containers["peer1"].execute(["touch", "/invite/new"])
    assert read_only.returncode != 0
    keys = composition.folder / "volumes" / "peer1"
    (identity,) = keys.rglob("identity.key")
    assert stat.S_IMODE(identity.stat().st_mode) == 0o600

    address = composition.network.addresses["master"]
    for port in (text.split(":")[-1] for text in SERVICES["master"]["ports"]):
        reached = ["ip", "netns", "exec", composition.network.outside, "bash", "-c"]
        subprocess.run([*reached, f"exec 3<>/dev/tcp/{address}/{port}"], check=True)
    scraped = yaml.safe_load((DOCKER / "prometheus.yml").read_text())["scrape_configs"]
    target: str = scraped[0]["static_configs"][0]["targets"][0]
    metrics = f"http://{address}:{target.partition(':')[2]}/metrics"
    assert composition.get(metrics, target) == 200
    assert composition.get(metrics, "127.0.0.1:29780") == 200, "as a browser calls it"
    assert composition.get(metrics, "elsewhere.example:29780") != 200
