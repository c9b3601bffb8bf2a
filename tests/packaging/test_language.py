"""Names and docstrings keep to the house's rules: one meaning a name, first lines that stand by
themselves.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ROOMS = sorted(path.parent for path in ROOT.glob("[a-z]*/__init__.py"))
FILES = sorted(path for room in ROOMS for path in room.rglob("*.py"))
# A first line of these words needs the function's name to make sense.
BEGINNINGS = re.compile(r"(Of|Who|Whom|Whose|It|They|Such|Those)\b")
# What comes back stands in a sentence, or below ``Returns:``.
ENDINGS = re.compile(r"; (True|False|None|empty):")


def trees() -> Iterator[tuple[str, ast.Module]]:
    for path in FILES:
        yield path.relative_to(ROOT).as_posix(), ast.parse(path.read_text())


def test_no_public_class_name_is_defined_twice() -> None:
    names = Counter(
        node.name
        for _path, tree in trees()
        for node in tree.body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    assert [name for name, count in names.items() if count > 1] == []


def test_no_file_name_stands_twice() -> None:
    names = Counter(path.name for path in FILES if path.name != "__init__.py")
    assert [name for name, count in names.items() if count > 1] == []


def test_first_lines_of_docstrings_stand_by_themselves() -> None:
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = [
        f"{path}: {getattr(node, 'name', 'the module')}: {line}"
        for path, tree in trees()
        for node in ast.walk(tree)
        if isinstance(node, kinds)
        for line in (ast.get_docstring(node) or "").splitlines()[:1]
        if BEGINNINGS.match(line) or ENDINGS.search(line)
    ]
    assert found == []
