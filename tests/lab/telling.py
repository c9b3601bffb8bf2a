"""What a few lines make of the benchmarks, which are a package of the repository's root only."""

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
    """What the lines print as JSON, in a process of their own."""
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
