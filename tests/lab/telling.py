"""Runs lines of code against the benchmarks, which only the root of the repository can import."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
ONE_THREAD = {**os.environ, "OMP_NUM_THREADS": "1"}


def told(code: str, *arguments: str, seconds: float = 50) -> Any:
    """Run the lines in another process, and return what they print as JSON."""
    done = subprocess.run(
        [sys.executable, "-c", f"import json, sys\n{code}", *arguments],
        cwd=ROOT,
        env=ONE_THREAD,
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
