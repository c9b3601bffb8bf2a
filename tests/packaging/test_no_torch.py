"""The daemon's side never loads torch: it starts fast, stays small, outlives a crash of CUDA."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

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

# One process for all rooms: its last line names the room where it ended.
IMPORT_ALL = """
import importlib, pkgutil
for name in sys.argv[1:]:
    print(name, flush=True)
    module = importlib.import_module(name)
    if name != "holdfast":
        for found in pkgutil.walk_packages(module.__path__, f"{name}."):
            importlib.import_module(found.name)
        print(sum(each.startswith(f"{name}.") or each == name for each in sys.modules))
"""


def run_guarded(
    script: str, *arguments: str, folder: Path = Path("/")
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", GUARD + script, *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )


def test_importing_every_module_loads_no_torch() -> None:
    rooms = [f"holdfast.{room}" for room in ROOMS_WITHOUT_TORCH]

    done = run_guarded(IMPORT_ALL, "holdfast", *rooms)

    said = done.stdout.split()
    assert done.returncode == 0, f"{said[-1]} loads torch:\n{done.stderr}"
    imported = dict(zip(said[1::2], map(int, said[2::2]), strict=True))
    assert imported.keys() == set(rooms)
    for name, count in imported.items():
        room = ROOT / name.removeprefix("holdfast.")
        assert count >= sum(1 for _ in room.rglob("*.py")), f"not every module of {name}"


def test_who_asks_the_command_line_for_little_waits_for_nothing_large() -> None:
    """Large packages are imported by the commands that need them; errors need none."""
    done = run_guarded(
        "import holdfast.daemon.cli.command_line\n"
        "holdfast.NoDaemonError, holdfast.AttachRefused\n"
        "print(sorted({'numpy', 'zstandard', 'fsspec'} & set(sys.modules)))"
    )

    assert done.stdout == "[]\n", done.stderr


def test_the_trainer_of_the_process_tests_loads_no_torch() -> None:
    trainer = str(ROOT / "tests" / "processes" / "tiny_trainer.py")

    done = run_guarded("import runpy\nrunpy.run_path(sys.argv[1])", trainer)

    assert done.returncode == 0, done.stderr


def test_the_room_that_loads_torch_is_named(tmp_path: Path) -> None:
    (tmp_path / "attic").mkdir()
    (tmp_path / "attic" / "__init__.py").touch()
    (tmp_path / "attic" / "late.py").write_text(
        "try:\n    import torch\nexcept ImportError:\n    pass\n"
    )

    done = run_guarded(IMPORT_ALL, "holdfast.diloco", "attic", folder=tmp_path)

    assert done.returncode == 77
    assert done.stdout.split()[-1] == "attic"
    assert "attic/late.py" in done.stderr
