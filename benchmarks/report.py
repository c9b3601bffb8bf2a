"""What was measured: tables at the terminal, JSON in ``build/bench``, and sections of RESULTS.md.

RESULTS.md is the record. A section can be measured again by itself: then only its text is replaced.
Each section says when, where and from which commit its figures come, so sections of several days or
machines can stand side by side without pretending to be one measurement.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from attrs import frozen

from holdfast.protocol.errors import UserError

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
RESULTS_MD = HERE / "RESULTS.md"
BUILD = ROOT / "build" / "bench"
HEADING = "## "

_began_s = time.monotonic()


class BenchError(UserError):
    """Something could not be measured; what a program said of it is above."""


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


Measured = tuple[list[Table], Any]  # tables as shown, and every figure that was read


# ---------------------------------------------------------------- at the terminal


def say(what: str) -> None:
    """Print one line on standard error, with the time since the start."""
    print(f"[{time.monotonic() - _began_s:6.1f} s] {what}", file=sys.stderr, flush=True)


def bench_parser(module: str, about: str | None) -> argparse.ArgumentParser:
    """Return a parser with what all benchmarks have in common; ``about`` is the module's
    docstring.
    """
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks.{module}", description=(about or "").partition("\n")[0]
    )
    parser.add_argument("--json", metavar="FILE", help="write the figures there; - prints them")
    return parser


def listed(text: str) -> list[str]:
    """Return the parts of an option that is a list with commas."""
    return [each for each in text.split(",") if each]


def tell(measured: Measured, options: argparse.Namespace) -> int:
    """Show the tables, and write the figures where ``--json`` says; return an exit status."""
    tables, raw = measured
    keep_json(raw, options.json)
    if options.json != "-":
        print("\n".join(map(_render, tables)))
    return 0


def keep_json(figures: Any, where: str | Path | None) -> None:
    """Write figures to this file, if there is one; ``-`` prints them."""
    text = json.dumps(figures, indent=1)
    if where == "-":
        print(text)
    elif where is not None:
        Path(where).write_text(text + "\n")


def run_main(name: str, body: Callable[[], int]) -> int:
    """Run a benchmark's command and return its exit status; SIGTERM ends it as Ctrl+C does."""
    signal.signal(signal.SIGTERM, _stop)
    try:
        return body()
    except UserError as error:
        print(f"{name}: {error}\n{error.hint}".rstrip(), file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"{name}: stopped", file=sys.stderr)
        return 130


def _stop(_number: int, _frame: object) -> None:
    raise KeyboardInterrupt


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
    """The working tree's commit; a + says that the tree differs from it, RESULTS.md aside."""
    head = _git("rev-parse", "--short=10", "HEAD")
    changed = _git("status", "--porcelain", "--", ":/", f":(exclude){RESULTS_MD.name}")
    return head + ("+" if changed else "") if head else "unknown"


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(HERE), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


# ---------------------------------------------------------------- as a section of RESULTS.md


def keep_section(name: str, title: str, measured: Measured, load: float) -> None:
    """Keep a section's figures in ``build/bench``, and put its text into RESULTS.md.

    Args:
      load: processes that ran or wanted to, on average, before it began.
    """
    tables, raw = measured
    where = {"date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M"), "commit": commit()}
    BUILD.mkdir(parents=True, exist_ok=True)
    keep_json({**where, "machine": machine(), "load": load, "raw": raw}, BUILD / f"{name}.json")
    told = ", ".join(f"{key} {value}" for key, value in machine().items())
    lines = [
        f"{HEADING}{name}: {title}\n",
        (
            f"Measured {where['date']} UTC, commit `{where['commit']}`; load average before:"
            f" {load:.1f}."
        ),
        f"{told[0].upper()}{told[1:]}.\n",
        *map(_render, tables),
    ]
    RESULTS_MD.write_text(with_section(RESULTS_MD.read_text(), name, "\n".join(lines)))


def with_section(page: str, name: str, section: str) -> str:
    """Return the page with this text in place of the section of that name, or at its end."""
    parts = page.split(f"\n{HEADING}")
    text = section.removeprefix(HEADING).rstrip("\n") + "\n"
    for at, part in enumerate(parts):
        if at and part.startswith(f"{name}: "):
            parts[at] = text
            break
    else:
        parts.append(text)
    return f"\n{HEADING}".join(parts)


def _render(table: Table) -> str:
    lines = [f"**{table.title}**", ""]
    if table.commands:
        lines += ["```console", *table.commands, "```", ""]
    lines.append(_row(table.header))
    lines.append(_row(["---", *["---:"] * (len(table.header) - 1)]))
    lines += [_row(row) for row in table.rows]
    lines.append("")
    for note in table.notes:
        lines += [note, ""]
    return "\n".join(lines)


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"
