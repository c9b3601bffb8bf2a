"""What a person at the terminal sees while benchmarks run."""

from __future__ import annotations

import sys
import time

_began_s = time.monotonic()


def say(what: str) -> None:
    """One line, with the time since the start, on standard error."""
    print(f"[{time.monotonic() - _began_s:6.1f} s] {what}", file=sys.stderr, flush=True)
