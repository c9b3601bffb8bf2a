"""Fuzzing guided by coverage: libFuzzer, through atheris, on every target of ``targets``.

    python -m tests.fuzz                             every target for a while, two at a time
    python -m tests.fuzz --seconds 600 message lane  these, longer
    python -m tests.fuzz --runs 1000000 message      so many inputs
    python -m tests.fuzz --show codec FILE           what one input does, without the fuzzer; or an
                                                     archive's entry
    python -m tests.fuzz --add codec FILE            put an input into the repository
    python -m tests.fuzz --keep                      also put what reached new code there, as `make
                                                     fuzz` does

What it finds is kept in ``build/fuzz`` and is gone on from the next time. An input that a target
does not survive is written there, too, and named together with the line that shows it again;
``--add`` it when it is mended. The exit status is 1 if there was one. What the repository has is in
archives, see ``archive``.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.fuzz import archive
from tests.fuzz.targets import TARGETS, Target

ROOT = Path(__file__).resolve().parents[2]
FOUND = ROOT / "build" / "fuzz"
SECONDS = 20.0
JOBS = 2
HANG_S = 10  # an input that takes longer is a finding
MEMORY_MB = 1_024  # one that takes more is, too
KEPT_MAX = 60  # inputs of one target in the repository


def found_before(name: str) -> Path:
    """Return the folder of a target's inputs found on this machine; the fuzzer adds to it."""
    found = FOUND / name
    found.mkdir(parents=True, exist_ok=True)
    for number, seed in enumerate(TARGETS[name].seeds()):
        (found / f"seed-{number}").write_bytes(seed)
    return found


def libfuzzer(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run it in a process of its own, which instruments what it imports."""
    command = [sys.executable, "-m", "tests.fuzz.libfuzzer", name, *arguments]
    return subprocess.run(
        command, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )


def fuzz(name: str, seconds: float, runs: int) -> dict[str, Any]:
    """Fuzz one target.

    Returns:
      ``inputs`` that it survived, ``covered`` edges, ``seconds``, and ``crash``: a file, or null.
    """
    found = found_before(name)
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="holdfast-fuzz-") as kept:
        archive.unpack(name, Path(kept))
        done = libfuzzer(
            name,
            str(found),
            kept,
            f"-max_len={TARGETS[name].bytes_max}",
            f"-max_total_time={seconds:.0f}" if not runs else f"-runs={runs}",
            f"-timeout={HANG_S}",
            f"-rss_limit_mb={MEMORY_MB}",
            f"-artifact_prefix={FOUND / name}-",
            "-print_final_stats=1",
        )
    counted = re.findall(r"number_of_executed_units: (\d+)", done.stderr)
    covered = re.findall(r"cov: (\d+)", done.stderr)
    crash = re.findall(r"Test unit written to (\S+)", done.stderr)
    if done.returncode and not crash:
        raise SystemExit(f"{name}: the fuzzer itself failed\n{done.stderr[-4_000:]}")
    return {
        "inputs": int(counted[-1]) if counted else 0,
        "covered": int(covered[-1]) if covered else 0,
        "seconds": round(time.monotonic() - began_s, 1),
        "crash": crash[-1] if crash else None,
        "said": done.stderr[-4_000:] if crash else "",
    }


def keep(name: str) -> int:
    """Put inputs that reached new code into the archive, the shortest first; return the number
    there.
    """
    kept = archive.read(name)
    there = set(kept.values())
    found = [path.read_bytes() for path in found_before(name).iterdir()]
    for data in sorted(found, key=lambda data: (len(data), data)):
        if len(there) < KEPT_MAX and data not in there:
            kept[archive.name_of(data)] = data
            there.add(data)
    archive.write(name, kept)
    return len(kept)


def show(name: str, where: str) -> None:
    """Run one input: a file, or an entry of the target's archive."""
    target: Target = TARGETS[name]
    data = archive.read(name).get(where)
    target.run(Path(where).read_bytes() if data is None else data)
    print(f"{name} takes {where} as it should")


def add(name: str, path: Path) -> None:
    """Add an input that failed to the archive, for good."""
    archive.write(name, {**archive.read(name), path.name: path.read_bytes()})
    print(f"{archive.archive_of(name).relative_to(ROOT)} has {path.name}")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=", ".join(TARGETS))
    parser.add_argument("--seconds", type=float, default=SECONDS, help="for each target")
    parser.add_argument("--runs", type=int, default=0, help="inputs for each, instead of a time")
    parser.add_argument("--jobs", type=int, default=JOBS)
    parser.add_argument("--keep", action="store_true")
    parser.add_argument("--show", nargs=2, metavar=("TARGET", "FILE"))
    parser.add_argument("--add", nargs=2, metavar=("TARGET", "FILE"))
    options = parser.parse_args()
    if options.show:
        show(*options.show)
        return 0
    if options.add:
        add(options.add[0], Path(options.add[1]))
        return 0
    names = options.targets or list(TARGETS)
    if unknown := [name for name in names if name not in TARGETS]:
        parser.error(f"no target {unknown[0]!r}; there are {', '.join(TARGETS)}")
    figures: dict[str, Any] = {}

    def work(name: str) -> None:
        figures[name] = done = fuzz(name, options.seconds, options.runs)
        kept = f", {keep(name)} kept" if options.keep else ""
        print(
            f"{name:14} {done['inputs']:>11,} inputs  {done['covered']:>5} edges"
            f"  {done['seconds']:>7.1f} s{kept}",
            flush=True,
        )
        if done["crash"]:
            print(f"{done['said']}\n  python -m tests.fuzz --show {name} {done['crash']}")

    with ThreadPoolExecutor(options.jobs) as pool:
        list(pool.map(work, names))
    total = sum(done["inputs"] for done in figures.values())
    crashes = [name for name, done in figures.items() if done["crash"]]
    print(
        f"{total:,} inputs in all; "
        + (f"not survived: {', '.join(crashes)}" if crashes else "all survived")
    )
    return 1 if crashes else 0


if __name__ == "__main__":
    sys.exit(main())
