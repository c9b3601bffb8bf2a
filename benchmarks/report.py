"""What was measured, as files: one JSON per section, and RESULTS.md made from all of them.

A section can be measured again by itself; its file is replaced, and RESULTS.md is made anew. Each
file says when, where and from which commit its figures come, so sections of several days or
machines can stand side by side without pretending to be one measurement.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from attrs import asdict, field, frozen

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"
RESULTS_MD = HERE / "RESULTS.md"

PREFACE = """\
# Results

Made by `make bench`; do not edit. Each section is measured by itself (`make bench ARGS='--only
lossy'`) and says when, where and from which commit. Where two things are compared they took turns
in one run, on one machine: compare ratios, not milliseconds of different days. Times are medians
of the counted rounds; the rounds before them, in which lanes open, pages are touched and TCP finds
its rate, are discarded, and each table says how many.

*T_LB* is the time below which no plan can end a reduction over the lines given: every line must
carry what its member sends and receives anyway, and all lines together every contribution and
every result. `W` in the lab's commands is `python benchmarks/wan_lab.py`, run as root.
"""


@frozen
class Table:
    """One table of RESULTS.md.

    Attributes:
      title: what it shows; a sentence without its full stop.
      commands: that made it, as one would type them.
      header: names of the columns; the first one's cells are left-aligned.
      rows: cells as they are shown.
      notes: what a reader must know to judge the figures.
    """

    title: str
    commands: Sequence[str]
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = ()


@frozen
class Record:
    """A section's file: ``tables`` as shown, ``raw`` with every figure that was read."""

    section: str
    title: str
    date: str  # UTC, to the minute
    commit: str
    machine: dict[str, str]
    tables: Sequence[Table]
    raw: Any = field(factory=dict)
    load_before: float | None = None  # processes that ran or wanted to, on average, before it began

    def save(self) -> Path:
        """Write it; a reader never sees half a file."""
        RESULTS.mkdir(exist_ok=True)
        path = RESULTS / f"{self.section}.json"
        scratch = path.with_suffix(".new")
        scratch.write_text(json.dumps(asdict(self), indent=1) + "\n")
        scratch.replace(path)
        return path

    @classmethod
    def load(cls, path: Path) -> Record:
        content = json.loads(path.read_text())
        content["tables"] = [Table(**table) for table in content["tables"]]
        return cls(**content)


def new_record(section: str, title: str, tables: Sequence[Table], raw: Any, load: float) -> Record:
    """A record of now and here."""
    date = datetime.now(UTC).strftime("%Y-%m-%d %H:%M")
    return Record(section, title, date, commit(), machine(), tables, raw, load)


def keep_json(figures: Any, path: Path | None) -> str:
    """Write figures to this file, if there is one; returns the text."""
    text = json.dumps(figures, indent=1)
    if path is not None:
        path.write_text(text + "\n")
    return text


def print_tables(tables: Sequence[Table]) -> None:
    """For who runs a benchmark by itself."""
    for table in tables:
        print(f"\n{table.title}")
        for row in (table.header, *table.rows):
            print(" | ".join(row))


# ---------------------------------------------------------------- where and from what


def machine() -> dict[str, str]:
    """What the figures depend on."""
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "processor": _processor(),
        "cores": str(len(os.sched_getaffinity(0))),
        "memory": f"{memory_bytes / 2**30:.0f} GiB",
        "kernel": platform.release(),
        "python": platform.python_version(),
        **{name: _installed(name) for name in ("numpy", "torch", "cryptography", "blake3")},
    }


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("model name", "Model"):
            return f"{value.strip()} ({platform.machine()})"
    return platform.machine()


def _installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "missing"


def commit() -> str:
    """The working tree's commit; a + says that the tree differs from it, results aside."""
    head = _git("rev-parse", "--short=10", "HEAD")
    changed = _git(
        "status", "--porcelain", "--", ":/", ":(exclude)results", f":(exclude){RESULTS_MD.name}"
    )
    return head + ("+" if changed else "") if head else "unknown"


def _git(*arguments: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(HERE), *arguments], capture_output=True, text=True, check=False
    )
    return done.stdout.strip()


# ---------------------------------------------------------------- as a page


def render(records: Sequence[Record]) -> str:
    """RESULTS.md, sections in the order given."""
    machines: list[dict[str, str]] = []
    for record in records:
        if record.machine not in machines:
            machines.append(record.machine)
    lines = [PREFACE]
    for number, each in enumerate(machines, 1):
        told = ", ".join(f"{name} {value}" for name, value in each.items())
        lines.append(f"Machine {number}: {told}.\n")
    for record in records:
        where = machines.index(record.machine) + 1
        lines.append(f"## {record.section}: {record.title}\n")
        lines.append(
            f"Measured {record.date} UTC, machine {where}, commit `{record.commit}`{_load(record)}.\n"
        )
        for table in record.tables:
            lines.append(_render_table(table))
    return "\n".join(lines)


def _load(record: Record) -> str:
    """How quiet the machine was; it may have had other work to do."""
    if record.load_before is None:
        return ""
    return f"; load average before: {record.load_before:.1f} on {record.machine['cores']} cores"


def _render_table(table: Table) -> str:
    lines = [f"**{table.title}**", ""]
    if table.commands:
        lines += ["```console", *table.commands, "```", ""]
    lines.append(_row(table.header))
    lines.append(_row(["---", *["---:"] * (len(table.header) - 1)]))
    lines += [_row(row) for row in table.rows]
    lines.append("")
    for note in table.notes:
        lines += [f"{note}", ""]
    return "\n".join(lines)


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"
