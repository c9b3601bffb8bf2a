"""An environment of its own for what is installed, so that nothing of this checkout is in sight."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path


def run(*command: str | Path, cwd: Path) -> str:
    """Run with nothing of this checkout in sight; the output, or a failure that shows it."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(
        command,
        cwd=cwd,
        env=kept,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def environment_with(folder: Path, *what: str | Path) -> Path:
    """The ``bin`` of a fresh environment with what pip installs; dependencies are borrowed from
    this one.

    A ``.pth`` file inside a folder that a ``.pth`` file names is not read, so the editable install
    of this checkout stays behind.
    """
    run(sys.executable, "-m", "venv", "--without-pip", folder, cwd=folder.parent)
    (site_packages,) = folder.glob("lib/python*/site-packages")
    (site_packages / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    pip = [sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python")]
    install = ["install", "--disable-pip-version-check", "--no-index", "--no-deps", "--quiet"]
    run(*pip, *install, "--no-build-isolation", *what, cwd=folder.parent)
    return folder / "bin"
