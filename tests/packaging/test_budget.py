"""The budget of the house: a feature that needs more names what goes.

Each number is what was reached, rounded up. Lower it whenever the count falls. Statements are
counted beside lines, so denser lines win nothing. ``python tools/house.py`` prints all counts.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tools import house

PACKAGE = house.package_files()
LINES = {"simulation": 5_804, "tests": 57_921, "benchmarks": 7_264}
PACKAGE_LINES, PACKAGE_STATEMENTS = 59_031, 34_388
MESSAGES, KEYS, COMMANDS, OPTIONS, DEPENDENCIES = 106, 43, 28, 72, 19
LARGE_CLASSES, LONG_MODULES = 0, 0


def test_the_package_is_no_larger_than_agreed() -> None:
    assert house.count_lines(PACKAGE) <= PACKAGE_LINES
    assert house.count_statements(PACKAGE) <= PACKAGE_STATEMENTS


@pytest.mark.parametrize("folder", LINES)
def test_what_stands_beside_the_package_is_no_larger_than_agreed(folder: str) -> None:
    assert house.count_lines(house.python_files(folder)) <= LINES[folder]


def test_the_outside_is_no_wider_than_agreed() -> None:
    assert house.count_messages() <= MESSAGES
    assert house.count_settings() <= KEYS
    commands, options = house.count_commands()
    assert commands <= COMMANDS
    assert options <= OPTIONS
    assert house.count_dependencies() <= DEPENDENCIES


def test_no_more_classes_and_modules_are_large_than_agreed() -> None:
    large, long = house.large_classes(PACKAGE), house.long_modules(PACKAGE)
    assert len(large) <= LARGE_CLASSES, large
    assert len(long) <= LONG_MODULES, long


def test_attributes_and_statements_are_counted(tmp_path: Path) -> None:
    """Attributes that are declared and that are set; two statements in one line."""
    source = "class A:\n    x: int\n    def f(self):\n        self.y, self.z = 1, 2; self.y += 1\n"
    path = tmp_path / "measured.py"
    path.write_text(source)
    assert house.count_lines([path]) == 4
    assert house.count_statements([path]) == 5
    (definition,) = ast.parse(source).body
    assert isinstance(definition, ast.ClassDef)
    assert house.attributes_of(definition) == {"x", "y", "z"}
