"""Simulator seeds that follow from the commit, run last by ``make test``.

python -m tests.swarm.rotating           the commit's seeds; those that fail are judged by the base
python -m tests.swarm.rotating 17 18     these; exit status 1 if one fails
python -m tests.swarm.rotating --known   those that failed at a base; exit status 1 if one still
                                         does

A seed that was never run may show a bug that has been there for long. So one that fails is run
again on what the change is based on, in a temporary work tree. If it fails there too, it is printed
and noted in ``build/known-seeds``, or in the file that ``KNOWN_SEEDS`` names, which the nightly run
reads; the exit status is 0. If it passes there, the change has broken it: the exit status is 1.
Where there is no base, or one that cannot be run, it is the change's, too.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import holdfast
from holdfast.simulation.batch import collect_rarely
from tests.swarm.simulation import KNOWN, outcome_of
from tools.rotating_start import rotating_start

ROOT = Path(__file__).resolve().parents[2]
COUNT = 100  # the nightly run has 20,000
SEED_S_MAX = 420  # for what hangs; a seed takes a third of a second
WHAT_CHARS_MAX = 400  # of an error's text
MAINS = ("origin/main", "main")


# ---------------------------------------------------------------- run seeds


def failing(seeds: Sequence[int]) -> dict[int, str]:
    """Run seeds on all cores; return the errors of those that fail."""
    jobs = max(1, min(len(seeds), len(os.sched_getaffinity(0))))
    fork = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(jobs, fork, initializer=collect_rarely) as pool:
        errors = pool.map(error_of, seeds)
        return {seed: error for seed, error in zip(seeds, errors, strict=True) if error}


def error_of(seed: int) -> str:
    """Run a seed; return what went wrong, or an empty string."""
    signal.signal(signal.SIGALRM, _hangs)
    signal.alarm(SEED_S_MAX)
    try:
        outcome_of(seed)
    except (Exception, BaseExceptionGroup) as error:  # noqa: BLE001 - whatever it is, it fails
        first: BaseException = error
        while isinstance(first, BaseExceptionGroup):
            first = first.exceptions[0]
        text = " ".join(str(first).split())
        return f"{type(first).__name__}: {text}"[:WHAT_CHARS_MAX]
    finally:
        signal.alarm(0)
    return ""


def _hangs(number: int, frame: object) -> None:
    raise TimeoutError(f"it takes more than {SEED_S_MAX} s")


def check_package() -> None:
    """Exit if the imported package is another tree's: an editable install points to one clone
    only.
    """
    imported = Path(holdfast.__file__).resolve().parent
    if imported != ROOT:
        raise SystemExit(f"holdfast is imported from {imported}, not from {ROOT}: set PYTHONPATH")


# ---------------------------------------------------------------- the base


def git(*arguments: str) -> str | None:
    """Return what a git command prints, or None if it fails."""
    done = subprocess.run(
        ["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=False
    )
    return None if done.returncode else done.stdout.strip()


def find_base() -> str | None:
    """Return the commit that a change is judged against, or None.

    ``BASE`` names it where somebody knows, as for several commits that were pushed to main
    together. On a branch it is where the branch left main. Where HEAD is main's, as in a fresh
    clone, it is what landed before: HEAD's first parent, or HEAD itself below changes that are not
    committed.
    """
    if given := os.environ.get("BASE"):
        return git("rev-parse", "--verify", "--quiet", f"{given}^{{commit}}")
    head = git("rev-parse", "HEAD")
    for main in MAINS:
        left = git("merge-base", "HEAD", main)
        if left is None:
            continue
        if left != head or git("status", "--porcelain", "--untracked-files=no"):
            return left
        break
    return git("rev-parse", "--verify", "--quiet", "HEAD^1")


@contextmanager
def work_tree(commit: str) -> Iterator[Path]:
    """Check a commit out into a temporary folder whose name is the package's, so that it can be
    imported.
    """
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder).resolve() / "holdfast"
        if git("worktree", "add", "--quiet", "--detach", str(tree), commit) is None:
            raise SystemExit(f"git cannot check out {commit}")
        try:
            yield tree
        finally:
            git("worktree", "remove", "--force", str(tree))


def failing_at(commit: str, seeds: Iterable[int]) -> dict[int, str] | None:
    """Run seeds on another commit by its own code; None if it has no such program or it breaks."""
    with work_tree(commit) as tree:
        dropped = ("DURATIONS", "BASE", "KNOWN_SEEDS")
        kept = {name: value for name, value in os.environ.items() if name not in dropped}
        done = subprocess.run(
            [sys.executable, "-m", "tests.swarm.rotating", "--json", *map(str, seeds)],
            cwd=tree,
            env={**kept, "PYTHONPATH": str(tree.parent)},
            stdout=subprocess.PIPE,
            text=True,
            check=False,
        )
        if done.returncode:
            return None
        told = json.loads(done.stdout)
        if Path(told["package"]).resolve() != tree:
            raise SystemExit(f"the base ran with the package in {told['package']}, not in {tree}")
        return {int(seed): error for seed, error in told["failed"].items()}


# ---------------------------------------------------------------- judge and note


def known_file() -> Path:
    return Path(os.environ.get("KNOWN_SEEDS") or ROOT / "build" / "known-seeds")


def known_seeds() -> list[int]:
    """Return the seeds that were noted, and those that the repository knows."""
    noted = known_file().read_text().splitlines() if known_file().exists() else []
    return sorted({*KNOWN, *(int(line.split()[0]) for line in noted)})


def note(seed: int, commit: str, error: str) -> None:
    """Add a seed that fails at a base to the known ones."""
    if seed not in known_seeds():
        known_file().parent.mkdir(parents=True, exist_ok=True)
        with known_file().open("a") as out:
            out.write(f"{seed} fails at {commit}: {error}\n")


def again(seed: int) -> str:
    return f"  again: .venv/bin/python -m tests.swarm.rotating {seed}"


def judge(failed: dict[int, str]) -> int:
    """Print whose fault each failing seed is; return how many are the change's."""
    if not failed:
        return 0
    base = find_base()
    before = failing_at(base, failed) if base is not None else None
    why = "passes" if before is not None else "cannot be run"
    own = 0
    for seed, error in failed.items():
        if base is not None and before is not None and seed in before:
            print(f"seed {seed} fails at {base[:10]} already, so it fails nothing here: {error}")
            print(f"  noted in {known_file()}, for `make nightly`")
            note(seed, base[:10], before[seed])
        else:
            own += 1
            where = f"at {base[:10]} it {why}" if base is not None else "there is no base"
            print(f"seed {seed} fails by this change ({where}): {error}")
        print(again(seed), flush=True)
    return own


def run_given(seeds: Sequence[int]) -> int:
    """Run these seeds and print which fail."""
    failed = failing(seeds)
    for seed, error in failed.items():
        print(f"seed {seed} fails: {error}\n{again(seed)}")
        print(
            f"  smaller, and traced: .venv/bin/python -m holdfast.simulation --start {seed} --seeds"
            " 1 --trace"
        )
    print(f"{len(seeds)} seeds, {len(failed)} fail")
    return 1 if failed else 0


def run_rotating(start: int, count: int) -> int:
    """Run the seeds from ``start`` on, and judge those that fail."""
    failed = failing(range(start, start + count))
    took = os.times()
    seconds = took.children_user + took.children_system
    own = judge(failed)
    print(
        f"{count} rotating seeds from {start}: {own} fail by this change, {len(failed) - own} did"
        f" before; {seconds / count:.2f} processor seconds each"
    )
    return 1 if own else 0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.swarm.rotating")
    parser.add_argument("seeds", nargs="*", type=int, help="run these instead")
    parser.add_argument("--known", action="store_true", help="run those that failed at a base")
    parser.add_argument("--json", action="store_true", help="print the failing ones for a program")
    parser.add_argument("--start", type=int, help="the first seed, instead of the commit's")
    parser.add_argument("--count", type=int, default=COUNT, help="how many from there")
    options = parser.parse_args(arguments)
    check_package()
    if options.json:
        found = {"package": str(Path(holdfast.__file__).parent), "failed": failing(options.seeds)}
        print(json.dumps(found))
        return 0
    if options.known or options.seeds:
        return run_given(options.seeds or known_seeds())
    start = rotating_start() if options.start is None else options.start
    return run_rotating(start, options.count)


if __name__ == "__main__":
    sys.exit(main())
