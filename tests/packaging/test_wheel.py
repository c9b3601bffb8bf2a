"""A wheel built from this tree holds everything, and starts where there is no checkout."""

from __future__ import annotations

import re
import shutil
import sys
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest

import holdfast
from tests.packaging.environments import environment_with, run

ROOT = Path(__file__).resolve().parents[2]
FOR_DEVELOPERS = {"simulation"}
ROOMS = sorted({init.parent.name for init in ROOT.glob("[a-z]*/__init__.py")} - FOR_DEVELOPERS)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy under another name: no leftover of an earlier build can get in."""
    tree = tmp_path_factory.mktemp("wheel") / "some-clone"
    leave = shutil.ignore_patterns(".*", "__pycache__", "build", "dist", "*.egg-info", "tests")
    shutil.copytree(ROOT, tree, ignore=leave)
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", "out", cwd=tree)
    (built,) = (tree / "out").glob("*.whl")
    return built


@pytest.fixture(scope="module")
def bin_folder(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh environment with the wheel."""
    return environment_with(tmp_path_factory.mktemp("fresh") / "venv", wheel)


def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        return Parser().parsestr(archive.read(name).decode())


def test_the_wheel_holds_every_file_of_every_room(wheel: Path) -> None:
    wanted = {"holdfast/__init__.py", "holdfast/__main__.py", "holdfast/py.typed"}
    for folder in (*ROOMS, "examples"):
        for path in (ROOT / folder).rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts:
                wanted.add(f"holdfast/{path.relative_to(ROOT)}")
    wanted.add("holdfast/examples/train.py")

    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}

    assert wanted - held == set(), "missing from the wheel"
    assert held - wanted == set(), "has no place in the wheel"


def test_the_wheel_says_what_it_needs(wheel: Path) -> None:
    about = metadata(wheel)

    assert about["Version"] == holdfast.__version__
    assert about["License-Expression"] == "MIT"
    needed = [need for need in about.get_all("Requires-Dist", []) if "extra ==" not in need]
    assert not [need for need in needed if need.startswith(("torch", "pytest"))]
    assert [need for need in needed if need.startswith("trio")]
    with zipfile.ZipFile(wheel) as archive:
        assert [name for name in archive.namelist() if name.endswith("licenses/LICENSE")]


def test_the_wheel_says_what_it_is(wheel: Path) -> None:
    about = metadata(wheel)

    assert len(about["Summary"]) < 200
    assert about["Author"]
    assert len(about["Keywords"].split(",")) > 5
    assert about["Description-Content-Type"] == "text/markdown"
    assert about.get_payload() == (ROOT / "README.md").read_text()
    classifiers = about.get_all("Classifier", [])
    assert "Typing :: Typed" in classifiers
    # The license is an expression; a classifier beside it is refused by package indexes.
    assert not [each for each in classifiers if each.startswith("License ::")]
    versions = re.findall(r"Programming Language :: Python :: (3\.\d+)", "\n".join(classifiers))
    assert about["Requires-Python"] == f">={versions[0]}"
    tested = (ROOT / "docs" / "compatibility.md").read_text()
    assert [each for each in versions if f"| Python {each}" not in tested] == []


def test_the_command_starts_from_the_wheel(bin_folder: Path, tmp_path: Path) -> None:
    assert holdfast.__version__ in run(bin_folder / "holdfast", "--version", cwd=tmp_path)
    assert "join" in run(bin_folder / "holdfast", "--help", cwd=tmp_path)
    assert "join" in run(bin_folder / "python", "-m", "holdfast", "--help", cwd=tmp_path)


def test_every_room_is_imported_from_the_wheel(bin_folder: Path, tmp_path: Path) -> None:
    script = (
        "import importlib, sys\nfor n in sys.argv[1:]: print(importlib.import_module(n).__file__)"
    )
    names = ["holdfast", *(f"holdfast.{room}" for room in ROOMS)]

    files = run(bin_folder / "python", "-c", script, *names, cwd=tmp_path).split()

    assert len(files) == len(names)
    for path in files:
        assert Path(path).is_relative_to(bin_folder.parent), path
