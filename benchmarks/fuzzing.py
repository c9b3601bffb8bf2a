"""The section about fuzzing: how many inputs every parser has taken, guided by coverage."""

from __future__ import annotations

import json
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

from benchmarks.commands import run
from benchmarks.progress import say
from benchmarks.report import Table
from benchmarks.sections import Measured

SECONDS = 40  # for each target, two at a time


def why_no_fuzzer() -> str:
    return "" if find_spec("atheris") else "atheris is not installed (`make fuzz` does it)"


def fuzzing() -> Measured:
    say(f"every parser, {SECONDS} s each")
    with tempfile.TemporaryDirectory(prefix="holdfast-bench-") as directory:
        path = Path(directory) / "fuzz.json"
        command = ["-m", "tests.fuzz", f"--seconds={SECONDS}", f"--json={path}"]
        run([sys.executable, *command])
        raw = json.loads(path.read_text())
    rows = [
        [name, f"{done['inputs']:,}", f"{done['covered']:,}", f"{done['seconds']:.0f}"]
        for name, done in sorted(raw["targets"].items())
    ]
    rows.append(["all", f"{raw['inputs']:,}", "", ""])
    table = Table(
        "Inputs that every parser, and the master's rules behind them, have survived",
        [f"make fuzz ARGS='--seconds {SECONDS}'"],
        ["target", "inputs", "branches reached", "seconds"],
        rows,
        [
            "libFuzzer through atheris, two targets at a time, from the corpus in tests/fuzz/corpus. An "
            "exception that is not documented, ten seconds or a gigabyte for one input would have ended "
            "this with an error. *conversation* is whole dialogues between a master and strangers, some "
            "hundreds a second at best; tests/fuzz/targets.py says what each target is."
        ],
    )
    return [table], raw
