"""Generator of the docs/reference pages: ``python tools/reference.py``.

``make docs`` makes them before it builds the site. Git ignores all but ``faults.md``, which a test
compares.
"""

from __future__ import annotations

import ast
import json
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import attrs
import click

from holdfast.daemon.cli.command_line import commands
from holdfast.membership.spec.spec import RunSpec
from holdfast.protocol import messages
from holdfast.protocol.wire import MESSAGES

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "docs" / "reference"
MEANINGS = tomllib.loads((ROOT / "tools" / "spec_keys.toml").read_text(encoding="utf-8"))
ROOMS = (
    "protocol",
    "diloco",
    "membership",
    "collectives",
    "checkpoint",
    "client",
    "daemon",
    "simulation",
)


def run_toml() -> str:
    lines = [
        "# run.toml",
        "",
        (
            "The settings that the run's operator decides. Every key has a default. Unknown tables"
            " and keys are"
        ),
        (
            "refused; the error names the most similar one. Peers get all settings from the master"
            " when they attach."
        ),
        (
            "A master that is started again with a changed file uses the changed values, except for"
            " `fragments`"
        ),
        (
            "and `groups`, which belong to the state: there a change is refused. `holdfast config"
            " check run.toml`"
        ),
        "prints what a master would refuse, and warnings.",
    ]
    spec = RunSpec()
    for table in attrs.fields(RunSpec):
        values = getattr(spec, table.name)
        lines += [
            "",
            f"## [{table.name}]",
            "",
            "| key | default | meaning |",
            "| --- | --- | --- |",
        ]
        for key in attrs.fields(type(values)):
            default = json.dumps(getattr(values, key.name))
            meaning = MEANINGS[table.name][key.name]
            lines.append(f"| `{key.name}` | `{default}` | {meaning} |")
    return "\n".join(lines) + "\n"


# ---------------------------------------------------------------- commands


def command_pages() -> str:
    lines = [
        "# Commands",
        "",
        (
            "`holdfast COMMAND --help` prints the same. Every option but `--json` can be set by a"
            " variable"
        ),
        (
            "`HOLDFAST_COMMAND_OPTION`, such as `HOLDFAST_JOIN_MAX_UPLOAD=6`; command-line options"
            " take precedence."
        ),
        "Exit statuses are listed in [Commands at a glance](../cli.md).",
    ]
    for name, command in sorted(commands.commands.items()):
        lines += _command(f"holdfast {name}", command)
    return "\n".join(lines) + "\n"


def _command(path: str, command: click.Command) -> Iterator[str]:
    context = click.Context(command, info_name=path, show_default=True)
    arguments = " ".join(
        parameter.make_metavar(context)
        for parameter in command.params
        if isinstance(parameter, click.Argument)
    )
    yield from ("", f"## {path}", "", "```text", f"{path} {arguments}".strip(), "```", "")
    text, _, examples = (command.help or "").partition("\b")
    yield "\n\n".join(" ".join(part.split()) for part in text.strip().split("\n\n"))
    if shown := [line.strip() for line in examples.splitlines() if "holdfast " in line]:
        yield from ("", "```sh", *shown, "```")
    options = [each for each in command.params if isinstance(each, click.Option)]
    if options:
        yield from ("", "| option | meaning |", "| --- | --- |")
    for option in options:
        record = option.get_help_record(context)
        if record is not None:
            spelled, meaning = (" ".join(part.split()).replace("|", "/") for part in record)
            yield f"| `{spelled}` | {meaning} |"
    if isinstance(command, click.Group):
        for name, each in sorted(command.commands.items()):
            yield from _command(f"{path} {name}", each)


# ---------------------------------------------------------------- messages


def message_page() -> str:
    lines = [
        "# Messages",
        "",
        (
            f"All messages of a control stream, in protocol version {messages.VERSION_MAX}. The"
            " limits of the fields"
        ),
        "are their validators in `protocol/messages/`.",
        "",
        "| message | meaning | fields |",
        "| --- | --- | --- |",
    ]
    for name, kind in sorted(MESSAGES.items()):
        meaning = (kind.__doc__ or "").strip().partition("\n\n")[0]
        fields = ", ".join(f"`{field}`" for field in attrs.fields_dict(kind))  # type: ignore[arg-type]
        lines.append(f"| `{name}` | {_flat(meaning)} | {fields} |")
    return "\n".join(lines) + "\n"


def _flat(text: str) -> str:
    return re.sub(r"``([^`]*)``", r"`\1`", " ".join(text.split())).replace("|", "\\|")


# ---------------------------------------------------------------- limits


def limits() -> str:
    """Return a table of the package's named numbers, with the comments that stand beside them."""
    lines = [
        "# Limits",
        "",
        (
            "Every number that bounds something has a name, and a comment that says what it is for."
            " Those of seconds,"
        ),
        "bytes and shares are listed with the rest.",
    ]
    for path in sorted(path for room in ROOMS for path in (ROOT / room).rglob("*.py")):
        if found := list(_constants(path)):
            name = path.relative_to(ROOT).as_posix()
            lines += ["", f"## {name}", "", "| limit | value | meaning |", "| --- | --- | --- |"]
            lines += [f"| `{name}` | `{value}` | {_flat(text)} |" for name, value, text in found]
    return "\n".join(lines) + "\n"


def _constants(path: Path) -> Iterator[tuple[str, str, str]]:
    """Yield name, value and comment of each number that a module names at its top."""
    source = path.read_text()
    lines = source.splitlines()
    for node in ast.parse(source).body:
        if not isinstance(node, ast.Assign) or not isinstance(node.targets[0], ast.Name):
            continue
        name, value = node.targets[0].id, ast.unparse(node.value)
        if not re.fullmatch(r"[A-Z][A-Z0-9_]*", name) or not re.fullmatch(
            r"[\d._*/+\-() einf]+", value
        ):
            continue
        if comment := _comment(lines, node.lineno - 1, node.end_lineno or node.lineno):
            yield name, value, comment


def _comment(lines: list[str], first: int, end: int) -> str:
    """Return the comment beside a statement, or the lines of comment above it."""
    beside = [line.partition("  # ")[2] for line in lines[first:end] if "  # " in line]
    above: list[str] = []
    while first and lines[first - 1].startswith("# "):
        first -= 1
        above.insert(0, lines[first].removeprefix("# "))
    return " ".join([*above, *beside] if not beside or not above else beside)


# ---------------------------------------------------------------- faults


def faults() -> str:
    """Return a table of the faults that tests are marked with: detection and effect of each."""
    marks: dict[str, tuple[str, str]] = {}
    shown: dict[str, list[str]] = {}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                for fault, *more in faults_of(node):
                    place = f"`{path.relative_to(ROOT).as_posix()}::{node.name}`"
                    shown.setdefault(fault, []).append(place)
                    if more:
                        marks[fault] = more[0], more[1]
    lines = [
        "# Faults",
        "",
        (
            "What is done about each fault, and the tests that show it. Made by `make reference`"
            " from the tests'"
        ),
        "`fault` marks.",
        "",
        "| fault | detected by | effect | shown by |",
        "| --- | --- | --- | --- |",
    ]
    for fault, (detected, effect) in sorted(marks.items()):
        lines.append(f"| {fault} | {detected} | {effect} | {', '.join(shown[fault])} |")
    return "\n".join(lines) + "\n"


def faults_of(node: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[list[str]]:
    for mark in node.decorator_list:
        if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.fault":
            yield [str(ast.literal_eval(argument)) for argument in mark.args]


FAULTS = FOLDER / "faults.md"  # kept in git, because it is read with the tests
PAGES = {
    FOLDER / "run-toml.md": run_toml,
    FOLDER / "commands.md": command_pages,
    FOLDER / "messages.md": message_page,
    FOLDER / "limits.md": limits,
    FAULTS: faults,
}


def write_pages() -> None:
    for path, make in PAGES.items():
        path.write_text(make())


if __name__ == "__main__":
    write_pages()
