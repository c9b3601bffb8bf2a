"""The section about lanes: ``holdfast bench lanes`` over paths of several lengths and losses."""

from __future__ import annotations

import json
import subprocess

from benchmarks.commands import HOLDFAST, ROOT, run
from benchmarks.progress import say
from benchmarks.report import Table
from benchmarks.sections import Measured


def why_no_lanes() -> str:
    """Empty if this holdfast has the command."""
    argv = [*HOLDFAST, "bench", "lanes", "--help"]
    done = subprocess.run(argv, capture_output=True, check=False, cwd=ROOT)
    return "" if done.returncode == 0 else "there is no `holdfast bench lanes` yet"


def lanes() -> Measured:
    """Whatever rows the command reports, as they are: it decides what is worth comparing."""
    say("as the command says")
    raw = json.loads(run([*HOLDFAST, "bench", "lanes", "--json", "-"]))
    rows = raw["rows"]
    header = list(rows[0])
    table = Table(
        "Lanes of one link",
        ["holdfast bench lanes"],
        header,
        [[_cell(row[name]) for name in header] for row in rows],
    )
    return [table], raw


def _cell(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
