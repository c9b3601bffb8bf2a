"""What ``make test`` leaves to ``make nightly`` costs no promise, and no planted bug is lost."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

from tools.reference import faults_of

TESTS = Path(__file__).resolve().parents[1]
PLANTED = TESTS / "planted_bugs.txt"
# Shown by real routers only, for which tests need root and namespaces.
ROUTERS_ONLY = {
    "a machine is behind a home's router",
    "a router forgets idle connections",
}


def is_nightly(module: ast.Module, test: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    marks = [ast.unparse(mark) for mark in test.decorator_list]
    for statement in module.body:
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "pytestmark":
            marks.append(ast.unparse(statement.value))
    return any("pytest.mark.nightly" in mark for mark in marks)


def test_every_fault_has_a_test_that_is_not_nightly() -> None:
    every: set[str] = set()
    shown: set[str] = set()
    for path in TESTS.rglob("test_*.py"):
        module = ast.parse(path.read_text())
        for node in ast.walk(module):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                names = {fault for fault, *_more in faults_of(node)}
                every |= names
                shown |= set() if is_nightly(module, node) else names

    assert len(every) > 100
    assert every - shown == ROUTERS_ONLY


def test_no_planted_bug_is_lost() -> None:
    """The list may only grow: add a line for each new one, whose test is marked ``planted``."""
    listed = PLANTED.read_text().splitlines()
    files = [
        path for path in TESTS.rglob("test_*.py") if "@pytest.mark.planted" in path.read_text()
    ]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-q", "-n0", "-m", "planted", *files],
        cwd=TESTS.parent,
        env={name: value for name, value in os.environ.items() if name != "DURATIONS"},
        capture_output=True,
        text=True,
        check=False,
    )
    found = [line for line in done.stdout.splitlines() if "::" in line]

    assert done.returncode == 0, done.stdout
    assert sorted(found) == listed
