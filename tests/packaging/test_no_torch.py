"""The daemon's side never loads torch: it starts fast, stays small, outlives a crash of CUDA."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ROOMS_WITHOUT_TORCH = sorted(
    init.parent.name for init in ROOT.glob("[a-z]*/__init__.py") if init.parent.name != "client"
)

# An attempt ends the process, even one inside `try: import torch`; its traceback names the culprit.
GUARD = """
import sys, traceback

class Guard:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "transformers", "lightning", "accelerate"):
            traceback.print_stack()
            sys.stderr.flush()
            import os
            os._exit(77)

sys.meta_path.insert(0, Guard())
"""

IMPORT_ALL = """
import importlib, pkgutil
for name in sys.argv[1:]:
    module = importlib.import_module(name)
    if name != "holdfast":
        for found in pkgutil.walk_packages(module.__path__, f"{name}."):
            importlib.import_module(found.name)
print(sum(name.startswith("holdfast.") for name in sys.modules))
"""


def run_guarded(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", GUARD + script, *arguments],
        cwd="/",
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("room", ["", *ROOMS_WITHOUT_TORCH])
def test_importing_every_module_loads_no_torch(room: str) -> None:
    done = run_guarded(IMPORT_ALL, f"holdfast.{room}".rstrip("."))

    assert done.returncode == 0, done.stderr
    modules_count = sum(1 for _ in (ROOT / room).rglob("*.py")) if room else 0
    assert int(done.stdout) >= modules_count, "not every module of the room was imported"


def test_the_command_line_loads_no_torch() -> None:
    run_main = (
        "import runpy\nsys.argv[0] = 'holdfast'\nrunpy.run_module('holdfast', run_name='__main__')"
    )

    done = run_guarded(run_main, "--help")

    assert done.returncode == 0, done.stderr
    assert "join" in done.stdout


def test_who_asks_the_command_line_for_little_waits_for_nothing_large() -> None:
    """Large packages are imported by the commands that need them."""
    done = run_guarded(
        "import holdfast.daemon.cli\n"
        "print(sorted({'numpy', 'zstandard', 'fsspec', 'highspy'} & set(sys.modules)))"
    )

    assert done.stdout == "[]\n", done.stderr


def test_the_trainer_of_the_process_tests_loads_no_torch() -> None:
    trainer = str(ROOT / "tests" / "processes" / "tiny_trainer.py")

    done = run_guarded("import runpy\nrunpy.run_path(sys.argv[1])", trainer)

    assert done.returncode == 0, done.stderr


def test_the_guard_itself_works() -> None:
    done = run_guarded("try:\n    import torch\nexcept ImportError:\n    pass")

    assert done.returncode == 77
    assert "import torch" in done.stderr or "<string>" in done.stderr
