"""The lists that must name the same rooms: folders, wheel, links for type checkers, lint rules."""

from __future__ import annotations

import functools
import importlib.metadata
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

import grimp
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import holdfast

ROOT = Path(__file__).resolve().parents[2]
ROOMS = {init.parent.name for init in ROOT.glob("[a-z]*/__init__.py")}
FOR_DEVELOPERS = {"simulation"}  # not in the wheel

# Rooms whose arithmetic or rules must stay easy to reason about; others may use any dependency.
THIRD_PARTY_ALLOWED = {"diloco": {"numpy"}, "membership": {"attr", "attrs", "msgspec"}}


def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_the_wheel_lists_every_package() -> None:
    packages = {"holdfast"}
    for room in ROOMS - FOR_DEVELOPERS:
        for module in (ROOT / room).rglob("*.py"):
            packages.add(".".join(("holdfast", *module.parent.relative_to(ROOT).parts)))

    assert sorted(project()["tool"]["setuptools"]["packages"]) == sorted(packages)


def test_type_checkers_find_every_room() -> None:
    links = ROOT / ".import" / "holdfast"

    assert {link.name for link in links.iterdir() if link.is_dir()} == ROOMS
    for link in links.iterdir():
        assert link.is_symlink(), f"{link} must be a link, or a copy of it would be checked"
        assert not link.readlink().is_absolute(), f"{link} must work in any clone"
        assert link.resolve() == ROOT / link.name


def test_no_room_can_be_imported_past_the_package() -> None:
    tidy_imports = project()["tool"]["ruff"]["lint"]["flake8-tidy-imports"]

    assert set(tidy_imports["banned-api"]) == ROOMS


def test_the_version_is_told_in_one_voice() -> None:
    version = project()["project"]["version"]

    assert holdfast.__version__ == version
    assert importlib.metadata.version("holdfast") == version


@functools.cache
def graph() -> grimp.ImportGraph:
    return grimp.build_graph("holdfast", include_external_packages=True, cache_dir=None)


def third_party_imports(room: str) -> dict[str, set[str]]:
    """Module -> what it imports that is neither ours nor the standard library's."""
    modules = {f"holdfast.{room}"} | graph().find_descendants(f"holdfast.{room}")
    imports = {}
    for module in modules:
        imported = graph().find_modules_directly_imported_by(module)
        names = {name.partition(".")[0] for name in imported}
        imports[module] = names - {"holdfast"} - set(sys.stdlib_module_names)
    return imports


@pytest.mark.parametrize("room", sorted(THIRD_PARTY_ALLOWED))
def test_a_core_room_stays_with_its_few_libraries(room: str) -> None:
    for module, names in third_party_imports(room).items():
        assert names <= THIRD_PARTY_ALLOWED[room], f"{module} imports {names}"


@pytest.mark.parametrize("room", sorted(ROOMS))
def test_what_is_imported_is_declared(room: str) -> None:
    """Else it works here, where torch and the tools bring it along, and not at a user's."""
    declared = {
        canonicalize_name(Requirement(text).name) for text in project()["project"]["dependencies"]
    }
    if room == "client":
        declared |= {
            canonicalize_name(name) for name in ("torch", "transformers", "lightning", "accelerate")
        }
    if room == "daemon":
        # An extra; ``master_commands`` says what to install.
        declared.add(canonicalize_name("psycopg"))
    provides = importlib.metadata.packages_distributions()
    for module, names in third_party_imports(room).items():
        for name in names:
            distributions = {canonicalize_name(found) for found in provides.get(name, [name])}
            assert distributions & declared, f"{module} imports {name}, which is not declared"


def test_nothing_is_unpickled() -> None:
    """Not by us, and not through a library that would."""
    for name in ("pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"):
        if name in graph().modules:
            assert not graph().find_modules_that_directly_import(name)
    for room in ROOMS:
        for path in (ROOT / room).rglob("*.py"):
            assert not re.search(r"\b(torch|np|numpy|pd)\.load\(", path.read_text()), path
