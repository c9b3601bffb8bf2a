"""Print the first of the simulator's seeds that tests take for this commit: others for each commit.

python tools/rotating_start.py
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SPAN = 2_000_000_000  # of first seeds
SEEDS_FIXED_MAX = 20_000  # these were searched through; rotating ones lie beyond
WITHOUT_COMMIT = 1_000_003  # where this is no git checkout


def rotating_start() -> int:
    """The first seed, from the hash of the commit that is checked out."""
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
