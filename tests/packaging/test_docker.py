"""What the Dockerfile and the compose files say: the linter's rules hold, and they name only what
is there.

``make images`` builds the images and runs compose's services (``tests/images``).
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

from holdfast.daemon.cli.master_commands import standby

ROOT = Path(__file__).resolve().parents[2]
DOCKER = ROOT / "docker"
DOCKERFILE = (DOCKER / "Dockerfile").read_text()
COMPOSE = yaml.safe_load((DOCKER / "compose.yaml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]


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
    assert "[train]" in stage("build-peer")


def check_volumes(service: dict[str, Any], named: dict[str, Any]) -> None:
    """Check that a service's volumes are files that are there, or among those that have a name."""
    for volume in service.get("volumes", ()):
        source = volume.partition(":")[0]
        there = (DOCKER / source).exists() if source.startswith(".") else source in named
        assert there, volume


def test_compose_names_only_what_is_there() -> None:
    targets = set(re.findall(r"^FROM \S+ AS (\S+)", DOCKERFILE, re.M))
    built = {each["image"] for each in SERVICES.values() if "build" in each}
    for name, service in SERVICES.items():
        if build := service.get("build"):
            assert build["target"] in targets
            assert (DOCKER / build["context"] / build["dockerfile"]).is_file()
        else:
            assert service["image"] in built or re.search(r":v?\d", service["image"]), name
        check_volumes(service, COMPOSE["volumes"])
        assert set(service.get("depends_on", ())) <= set(SERVICES)
    assert {"master", "spare", "prometheus", "grafana"} <= set(SERVICES)


def test_the_second_master_uses_options_that_exist() -> None:
    both = yaml.safe_load((DOCKER / "compose.masters.yaml").read_text())
    options = {f"HOLDFAST_STANDBY_{each.name}".upper() for each in standby.params if each.name}
    for name in ("master", "master2"):
        service = both["services"][name]
        given = {each for each in service["environment"] if each.startswith("HOLDFAST_STANDBY_")}
        assert given
        assert given <= options
        check_volumes(service, both["volumes"])
        assert set(service["depends_on"]) <= {*SERVICES, *both["services"]}
    assert (DOCKER / "prometheus.masters.yml").is_file()


def test_only_the_masters_own_port_is_open_to_others() -> None:
    ports = [port for service in SERVICES.values() for port in service.get("ports", ())]
    assert [port for port in ports if not port.startswith("127.0.0.1:")] == ["29700:29700"]
