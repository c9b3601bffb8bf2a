"""The papers say what the code says: keys and defaults, commands, exit statuses, limits, tests,
links.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import attrs
import click
import pytest

from holdfast.daemon.cli.command_line import commands
from holdfast.daemon.process.exit_codes import ExitCode
from holdfast.membership.master.coordinator import Coordinator
from holdfast.membership.spec import spec as spec_module
from holdfast.membership.spec.spec import RunSpec
from tests.packaging.test_docs import MADE, PAGES, blocks
from tests.plain import describe
from tools import reference

ROOT = Path(__file__).resolve().parents[2]
PAPERS = ("ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")
README = (ROOT / "README.md").read_text()
COMMANDS = (ROOT / "docs" / "cli.md").read_text()
STATUS = (ROOT / "docs" / "status.md").read_text()
ARCHITECTURE = (ROOT / "ARCHITECTURE.md").read_text()


def rows(text: str) -> list[list[str]]:
    """The cells of all tables' rows."""
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def spec_keys() -> Iterator[str]:
    spec = RunSpec()
    for table in attrs.fields(RunSpec):
        values = getattr(spec, table.name)
        if attrs.has(type(values)):
            for key in attrs.fields(type(values)):
                yield f"{table.name}.{key.name}"


# ---------------------------------------------------------------- README


def test_every_key_of_the_spec_is_explained() -> None:
    explained = {f"{table}.{key}" for table, keys in reference.MEANINGS.items() for key in keys}
    assert explained == set(spec_keys())


def test_every_codec_is_named() -> None:
    line = next(row for row in rows(reference.run_toml()) if row[0] == "`codec_up`")
    assert set(re.findall(r'`"([\w+]+)"`', line[2])) == set(spec_module.CODECS)


def test_every_exit_status_is_listed() -> None:
    told = {(row[0], row[1].strip("`")) for row in rows(COMMANDS) if row[0].isdecimal()}
    assert told == {(str(code.value), code.name) for code in ExitCode}


def test_every_command_is_listed_with_its_options() -> None:
    told = {
        match.group(1): row[2]
        for row in rows(COMMANDS)
        if (match := re.match(r"`holdfast (\w+)", row[0]))
    }
    assert set(told) == set(commands.commands)
    for name, command in commands.commands.items():
        for option in command.params:
            if isinstance(option, click.Option):
                names = [*option.opts, *option.secondary_opts]
                assert any(f"`{each}" in told[name] for each in names), f"{name} {option.opts}"


def test_every_part_of_the_masters_status_is_explained() -> None:
    told = {name for row in rows(STATUS) for name in re.findall(r"`(\w+)`", row[0])}
    status = describe(Coordinator(RunSpec(), "5" * 32, 1), 0.0)
    assert set(status) <= told


def test_the_hook_example_is_short() -> None:
    (script,) = blocks(ROOT / "README.md", "python")
    assert "run.step(" in script
    assert "holdfast.attach(" in script
    assert len([line for line in script.splitlines() if line]) <= 20


def test_the_readme_stays_short() -> None:
    assert len(README.encode()) <= 8_192


# ---------------------------------------------------------------- ARCHITECTURE


@pytest.mark.parametrize("paper", ["docs/reference/faults.md", "docs/security.md"])
def test_quoted_tests_exist(paper: str) -> None:
    quoted = set(re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", (ROOT / paper).read_text()))
    assert len(quoted) > 20
    for path, name in quoted:
        tree = ast.parse((ROOT / path).read_text())
        functions = (ast.FunctionDef, ast.AsyncFunctionDef)
        defined = {node.name for node in ast.walk(tree) if isinstance(node, functions)}
        assert name in defined, f"{path} has no {name}"


def test_the_rooms_are_listed() -> None:
    told = {
        name for row in rows(ARCHITECTURE) for name in re.findall(r"^\[(\w+)/\]\(\1\)$", row[0])
    }
    assert told == {init.parent.name for init in ROOT.glob("[a-z]*/__init__.py")}


def test_the_core_map_names_files_that_exist_and_about_their_lines() -> None:
    text = (ROOT / "docs" / "design" / "core-map.md").read_text()
    told = {row[0].strip("`"): int(row[1]) for row in rows(text) if row[1].isdecimal()}
    lines = {path: len((ROOT / path).read_text().splitlines()) for path in told}
    (total,) = re.findall(r"about ([\d,]+) lines", text)
    for stated in (int(total.replace(",", "")), sum(told.values())):
        assert abs(stated - sum(lines.values())) <= 0.1 * stated


# ---------------------------------------------------------------- all of them


def anchors(text: str) -> set[str]:
    """Return the anchors of a text: its headings as GitHub spells them."""
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    kept = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings)
    return {heading.replace(" ", "-") for heading in kept}


@pytest.mark.parametrize(
    "paper", [*PAGES, *(ROOT / name for name in PAPERS)], ids=lambda paper: paper.name
)
def test_links_within_the_repository_lead_somewhere(paper: Path) -> None:
    text = paper.read_text()
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        file = paper.parent / path if path else paper
        assert file.exists(), target
        assert file.resolve() not in MADE, f"{target} is not in git"
        if anchor:
            assert anchor in anchors(file.read_text()), target
