"""What a master prints about its run: what it takes up, how the run ended, its first invite."""

from __future__ import annotations

import time
from pathlib import Path

from ...membership.master.run_end import ends_by_epochs, how_to_go_on
from ...membership.master.state.history import RunHistory
from ...membership.master.state.journal import RoundCommitted
from ...membership.spec.spec import RunSpec
from ...protocol.text import format_duration, plural
from ..process.paths import join_line
from ..status_records import Ending
from .journal.journal_base import Journal

NAMES_MAX = 8  # peers named in one sentence


def format_resumed(history: RunHistory, store: Journal) -> str:
    """Return what the journal holds of a run: its rounds, and when the last one was committed."""
    if not history.founded:
        return "it has no weights yet"
    text = f"{plural(history.commit_count, 'round')} committed"
    last_s = store.written_at(RoundCommitted)
    return text if last_s is None else f"{text}, last on {format_minute(last_s)}"


def format_end(history: RunHistory, spec: RunSpec, ending: Ending) -> list[str]:
    """Return lines about a finished run: its figures, its final weights, how to go on."""
    figures = [f"all {plural(history.commit_count, 'round')} committed"]
    if ends_by_epochs(history, spec):
        epochs = f"all {plural(spec.data.epochs, 'epoch')}"
        figures = [f"{epochs} and {plural(history.commit_count, 'round')} committed"]
    if ending.duration_s is not None:
        figures[0] += f" in {format_duration(ending.duration_s)}"
    if ending.loss_end is not None:
        figures.append(f"loss {ending.loss_end:.3f}")
    figures.append(plural(history.token_count // max(1, history.fragment_count), "token"))
    names = ending.weights_at
    command, goal = how_to_go_on(history, spec)
    more = f" and {len(names) - NAMES_MAX} more" if len(names) > NAMES_MAX else ""
    return [
        f"run {spec.run.name} is finished: {', '.join(figures)}",
        f"its final weights are in the last checkpoints of {', '.join(names[:NAMES_MAX])}{more}: "
        "`holdfast export OUT --state DIR` there makes a file of them",
        f"{command} lets the run go on to {goal}; then its peers join again",
        "status and dashboard work until Ctrl+C",
    ]


def format_first_invite(invite: str, uses: int, run_toml: Path | None) -> list[str]:
    """Return the lines that say how to join, with the script beside the run.toml if it is there."""
    beside = Path() if run_toml is None else run_toml.with_name("train.py")
    script = beside if beside.is_file() else Path("train.py")
    told = f"on each machine that takes part ({uses} at most), run:"
    return [told, f"  {join_line(invite, script)}"]


def format_minute(at_s: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(at_s))
