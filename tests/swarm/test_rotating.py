"""A rotating seed that fails is the change's only if it passes on what the change is based on."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.swarm import rotating

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = ("tests/swarm/rotating.py", "tools/rotating_start.py")
# What the program takes from the package and from the tests, without a simulator.
STANDS_IN = {
    "__init__.py": "",
    "simulation/__init__.py": "",
    "simulation/batch.py": "def collect_rarely() -> None: ...\n",
    "tests/swarm/simulation.py": "KNOWN = {}\ndef outcome_of(seed):\n    return seed\n",
}
BROKEN = 41  # the seed that the planted bug breaks
BUG = f"""
    if seed == {BROKEN}:
        raise ValueError("planted")
"""


def git(clone: Path, *arguments: str) -> str:
    names = ["-c", "user.name=planter", "-c", "user.email=planter@example.org"]
    done = subprocess.run(
        ["git", "-C", str(clone), *names, *arguments], capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def commit(clone: Path, said: str) -> str:
    git(clone, "add", "--all")
    git(clone, "commit", "--quiet", "--allow-empty", "--message", said)
    return git(clone, "rev-parse", "HEAD")


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A repository of one commit: the program as it is here, and what it imports."""
    clone = tmp_path / "holdfast"
    texts = STANDS_IN | {name: (ROOT / name).read_text() for name in PROGRAM}
    for name, text in texts.items():
        (clone / name).parent.mkdir(parents=True, exist_ok=True)
        (clone / name).write_text(text)
    git(clone.parent, "init", "--quiet", "--initial-branch=main", str(clone))
    (clone / ".gitignore").write_text("__pycache__/\nbuild/\n")
    commit(clone, "Base")
    return clone


def plant(clone: Path) -> None:
    """Plant a bug that one seed shows."""
    path = clone / "tests/swarm/simulation.py"
    path.write_text(path.read_text().replace(":\n", f":{BUG}", 1))


def run(clone: Path, *arguments: str, **variables: str) -> tuple[int, str]:
    """Run the program on the broken seed."""
    seeds = arguments or ("--start", str(BROKEN), "--count", "1")
    done = subprocess.run(
        [sys.executable, "-m", "tests.swarm.rotating", *seeds],
        cwd=clone,
        env={**os.environ, "PYTHONPATH": str(clone.parent), **variables},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


def test_a_bug_of_this_change_fails_it_and_the_line_that_repeats_it_is_told(clone: Path) -> None:
    git(clone, "switch", "--quiet", "--create", "desk")
    plant(clone)
    commit(clone, "Plant a bug")

    status, said = run(clone)

    assert status == 1, said
    assert (
        f"seed {BROKEN} fails by this change (at {git(clone, 'rev-parse', 'main')[:10]} it pass"
        in said
    )
    assert f"again: .venv/bin/python -m tests.swarm.rotating {BROKEN}" in said
    assert not (clone / "build").exists()
    assert git(clone, "worktree", "list").count("\n") == 0, "the base's work tree is left"


def test_a_bug_that_the_base_has_is_named_noted_once_and_fails_nothing(clone: Path) -> None:
    plant(clone)
    base = commit(clone, "Plant a bug")
    commit(clone, "Change something else")  # on main: what landed before is the first parent

    for _again in range(2):
        status, said = run(clone)
        assert status == 0, said
        assert f"seed {BROKEN} fails at {base[:10]} already" in said
        assert f"again: .venv/bin/python -m tests.swarm.rotating {BROKEN}" in said
    noted = (clone / "build" / "known-seeds").read_text().splitlines()
    assert [line.split(":")[0] for line in noted] == [f"{BROKEN} fails at {base[:10]}"]

    status, said = run(clone, "--known")
    assert (status, f"seed {BROKEN} fails: " in said) == (1, True)


def test_a_bug_is_the_changes_where_there_is_no_base_or_it_cannot_be_run(clone: Path) -> None:
    plant(clone)
    git(clone, "add", "--all")
    git(clone, "commit", "--quiet", "--amend", "--no-edit")

    status, said = run(clone)
    assert (status, "(there is no base)" in said) == (1, True), said

    git(clone, "rm", "--quiet", "tests/swarm/rotating.py")
    git(clone, "commit", "--quiet", "--message", "Without the program")
    git(clone, "checkout", "--quiet", "HEAD^", "--", "tests/swarm/rotating.py")
    commit(clone, "With the program")

    status, said = run(clone)
    assert (status, "it cannot be run)" in said) == (1, True), said


def test_the_package_of_another_clone_is_refused(clone: Path) -> None:
    status, said = run(clone, PYTHONPATH=str(ROOT))

    assert status == 1
    assert f"not from {clone}: set PYTHONPATH" in said


def test_the_base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a branch left main; on main what landed before, below changes that are not
    committed.
    """
    monkeypatch.delenv("BASE", raising=False)
    ours, fresh = tmp_path / "ours", tmp_path / "fresh"
    git(tmp_path, "init", "--quiet", "--initial-branch=main", str(ours))
    commits = []
    for number in range(3):
        (ours / "file").write_text(str(number))
        commits.append(commit(ours, str(number)))
    git(tmp_path, "clone", "--quiet", str(ours), str(fresh))

    def base_of(clone: Path) -> str | None:
        monkeypatch.setattr(rotating, "ROOT", clone)
        return rotating.find_base()

    assert base_of(fresh) == commits[1]
    (fresh / "file").write_text("changed")
    assert base_of(fresh) == commits[2]
    commit(fresh, "on main, not pushed")
    commit(fresh, "nor this")
    assert base_of(fresh) == commits[2]
    git(ours, "switch", "--quiet", "--create", "desk")
    commit(ours, "one")
    commit(ours, "two")
    assert base_of(ours) == commits[2]
    monkeypatch.setenv("BASE", commits[0])
    assert base_of(ours) == commits[0]
    monkeypatch.setenv("BASE", "0" * 40)
    assert base_of(ours) is None
    monkeypatch.delenv("BASE")
    git(tmp_path, "clone", "--quiet", "--depth=1", f"file://{ours}", str(tmp_path / "shallow"))
    assert base_of(tmp_path / "shallow") is None
