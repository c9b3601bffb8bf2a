"""Print the first rotating simulator seed of this commit; each commit has another one.

python tools/rotating_start.py
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SPAN = 2_000_000_000  # number of possible first seeds
SEEDS_FIXED_MAX = 20_000  # all seeds below were run; rotating ones lie beyond
WITHOUT_COMMIT = 1_000_003  # outside a git checkout


def rotating_start() -> int:
    """Return the first seed, derived from the hash of the checked-out commit."""
    found = subprocess.run(
        ["git", "-C", str(ROOT), "rev-parse", "HEAD"],
        capture_output=True,
        text=True,
        check=False,
    )
    if found.returncode:
        return WITHOUT_COMMIT
    return SEEDS_FIXED_MAX + int(found.stdout, 16) % SPAN


if __name__ == "__main__":
    sys.stdout.write(f"{rotating_start()}\n")
