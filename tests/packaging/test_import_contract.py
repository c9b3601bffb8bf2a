"""The import contract breaks where a room reaches for what is not its own.

``make imports``, a part of ``make check``, checks that the real package keeps it.
"""

from __future__ import annotations

import shutil
import tomllib
from pathlib import Path
from typing import Any

import pytest
from grimp.adaptors.packagefinder import ImportLibPackageFinder
from importlinter import configuration
from importlinter.application import use_cases
from importlinter.application.ports.reporting import Report

ROOT = Path(__file__).resolve().parents[2]

configuration.configure()

DOWNWARDS = "imports go downwards, and every room has its place"
TORCH = "only the client imports torch"
PURE = "rules and messages touch no clock, network, thread, file or chance"

PLANTS = [
    ("protocol", "from ..membership import planted", DOWNWARDS),
    ("protocol", "from ..diloco import planted", DOWNWARDS),
    ("membership", "from ..daemon import planted", DOWNWARDS),
    ("collectives", "from ..checkpoint import planted", DOWNWARDS),
    ("diloco", "from ..client import planted", DOWNWARDS),
    ("daemon", "from ..client import planted", DOWNWARDS),
    ("client", "from ..daemon import planted", DOWNWARDS),
    ("membership", "from ..diloco import planted", DOWNWARDS),
    ("collectives", "from ..membership import planted", "collectives imports protocol only"),
    (
        "checkpoint",
        "from ..membership import planted",
        "checkpoint imports protocol and collectives only",
    ),
    ("diloco", "from ..protocol import planted", "diloco imports nothing of ours"),
    ("client", "from ..collectives import planted", "client imports protocol and diloco only"),
    ("daemon", "import torch", TORCH),
    ("daemon", "def late():\n    import torch.nn", TORCH),
    ("protocol", "from torch import Tensor", TORCH),
    ("membership", "import trio", PURE),
    ("membership", "from time import monotonic", PURE),
    ("membership", "import random", PURE),
    ("membership", "from ..protocol.network.interface import planted", PURE),
    ("protocol/messages", "import socket", PURE),
    ("protocol/trust/planted", "from ..network import planted", "inside protocol:"),
    ("membership/planning/planted", "from ..master import planted", "inside membership:"),
    ("membership/peer/planted", "from ..master import planted", "inside membership:"),
    (
        "membership/master/rounds/planted",
        "from ..coordinator import planted",
        "inside the master's",
    ),
    ("collectives/links/planted", "from ..codecs import planted", "inside collectives:"),
    ("daemon/web/planted", "from ..cli import planted", "inside daemon:"),
    ("daemon/master/planted", "from ..peer import planted", "inside daemon:"),
    ("checkpoint/donor", "from .joiner import planted", "no circle of files or rooms"),
]
ALLOWED = [
    ("client", "import torch"),
    ("client", "from ..diloco import planted"),
    ("daemon", "from .. import __version__"),
    ("daemon", "from ..checkpoint import planted"),
    ("checkpoint", "from ..collectives import planted"),
    ("membership/planning/planted", "from ...protocol.messages import planted"),
    ("membership/master/rounds/planted", "from ..sync import planted"),
    ("daemon/peer/planted", "from ..web import planted"),
    ("protocol", "import trio"),
]


def broken_contracts(package: Path, monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Return the names of the contracts that a copy of the package breaks.

    The checker runs in this process: starting it takes longer than checking. It looks for packages
    on the import path, where ``holdfast`` is the clone, so it is told where the copy is.
    """
    reports: list[Report] = []
    monkeypatch.setattr(use_cases, "render_report", reports.append)
    monkeypatch.setattr(
        ImportLibPackageFinder,
        "determine_package_directories",
        lambda finder, package_name, file_system: {str(package)},
    )
    kept = use_cases.lint_imports(
        str(package.parent / "pyproject.toml"), cache_dir=None, is_debug_mode=True, no_logo=True
    )
    (report,) = reports
    assert not report.could_not_run, report.invalid_contract_options
    assert kept != report.contains_failures
    modules = report.graph.modules
    assert "holdfast.checkpoint.joiner" in modules, "another package was checked"
    assert "holdfast.daemon.cli.command_line" not in modules, "the clone was checked"
    return {
        contract.name for contract, check in report.get_contracts_and_checks() if not check.kept
    }


def named_modules(config: dict[str, Any]) -> set[str]:
    """All modules of ours that the contracts name."""
    names: set[str] = set()
    for contract in config["tool"]["importlinter"]["contracts"]:
        for key in ("source_modules", "forbidden_modules"):
            names.update(name for name in contract.get(key, []) if name.startswith("holdfast."))
        for container in contract.get("containers", []):
            for layer in contract["layers"]:
                names.update(f"{container}.{name.strip()}" for name in layer.split("|"))
    return names


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """An empty copy of the package: all rooms, no code, the root with a lazy way to the client."""
    package = tmp_path / "holdfast"
    for top in sorted(path.parent for path in ROOT.glob("[a-z]*/__init__.py")):
        for room in sorted(path.parent for path in top.rglob("__init__.py")):
            (package / room.relative_to(ROOT)).mkdir(parents=True)
            (package / room.relative_to(ROOT) / "__init__.py").touch()
    config = tomllib.loads((ROOT / "pyproject.toml").read_text())
    for name in named_modules(config):
        path = tmp_path / Path(*name.split("."))
        if not path.is_dir():
            path.with_suffix(".py").touch()
    (package / "protocol" / "network" / "interface.py").write_text("import trio\n")
    (package / "checkpoint" / "joiner.py").write_text("from . import donor\n")
    (package / "client" / "hook.py").write_text("import torch\n")
    (package / "__init__.py").write_text("def lazy():\n    from .client import hook\n")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return package


def plant(package: Path, where: str, line: str) -> None:
    """Put ``line`` into the room or module ``where``, and what it asks for where it looks."""
    if "/" in where:
        (package / where).with_suffix(".py").write_text(f"{line}\n")
    else:
        (package / where / "planted.py").write_text(f"{line}\n")
    if line.startswith("from .."):
        asked = line.split()[1]
        name = asked.lstrip(".")
        inside = (package / where).parent if "/" in where else package / where
        for _dot in range(len(asked) - len(name) - 1):
            inside = inside.parent
        if name and (inside / name.replace(".", "/")).is_dir():
            (inside / name.replace(".", "/") / "planted.py").touch()


@pytest.mark.parametrize(("where", "line", "contract"), PLANTS)
def test_a_planted_import_is_found(
    package: Path, where: str, line: str, contract: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(package, where, line)

    broken = broken_contracts(package, monkeypatch)

    assert any(name.startswith(contract) for name in broken), broken


@pytest.mark.parametrize(("where", "line"), ALLOWED)
def test_a_proper_import_is_let_through(
    package: Path, where: str, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(package, where, line)

    assert broken_contracts(package, monkeypatch) == set()


def test_a_room_outside_the_table_is_found(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (package / "attic").mkdir()
    (package / "attic" / "__init__.py").touch()

    assert DOWNWARDS in broken_contracts(package, monkeypatch)
