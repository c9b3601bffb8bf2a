"""Measures of the whole tree, as ``tests/packaging/test_budget.py`` holds them: ``python
tools/house.py``.

Run it with the Python of the checkout that it measures. ``--round`` also counts the files of which
a function runs while one round of a simulated run goes from ``Open`` to the last ``Applied``.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from types import FrameType

import attrs

ROOT = Path(__file__).resolve().parents[1]
LONG_MODULE_LINES = 500
ATTRIBUTES_MAX = 20
ANSWER_MODULES = ("membership/shared/run_status.py", "daemon/status_records.py")


def python_files(*folders: str) -> list[Path]:
    """Return the Python files under these folders that git knows, or would."""
    command = ["git", "ls-files", "-co", "--exclude-standard", "--", *folders]
    named = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    paths = (ROOT / line for line in named.stdout.splitlines() if line.endswith(".py"))
    return sorted(path for path in paths if path.is_file())


def package_files() -> list[Path]:
    """Return the files of the package, as the wheel has them."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages = project["tool"]["setuptools"]["packages"]
    rooms = {name.split(".")[1] for name in packages if "." in name}
    return [ROOT / "__init__.py", ROOT / "__main__.py", *python_files(*sorted(rooms))]


def count_lines(paths: Iterable[Path]) -> int:
    """Count the lines of files, blank ones and comments included."""
    return sum(len(path.read_text().splitlines()) for path in paths)


def count_statements(paths: Iterable[Path]) -> int:
    """Count the statements of files: nodes of Python's grammar, so denser lines win nothing."""
    trees = (ast.parse(path.read_text()) for path in paths)
    return sum(isinstance(node, ast.stmt) for tree in trees for node in ast.walk(tree))


def attributes_of(definition: ast.ClassDef) -> set[str]:
    """Return the names of a class's attributes: fields that it declares, and what methods set."""
    names = {
        node.target.id
        for node in definition.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    for node in ast.walk(definition):
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        for target in targets:
            for each in target.elts if isinstance(target, ast.Tuple) else [target]:
                if not isinstance(each, ast.Attribute) or not isinstance(each.value, ast.Name):
                    continue
                if each.value.id == "self":
                    names.add(each.attr)
    return names


def is_answer(path: Path, definition: ast.ClassDef) -> bool:
    """Return whether a class is an answer of the HTTP API, as a record.

    Such a record is as wide as the answer: its fields are the keys that clients read, and none can
    move to another object. It stands in one of ``ANSWER_MODULES``, is frozen, takes keywords only
    and has no methods, so nothing but the answer makes it grow.
    """
    decorators = [ast.unparse(each) for each in definition.decorator_list]
    fields_only = all(isinstance(each, ast.AnnAssign | ast.Expr) for each in definition.body)
    named = any(path == ROOT / module for module in ANSWER_MODULES)
    return named and fields_only and decorators == ["frozen(kw_only=True)"]


def large_classes(paths: Iterable[Path]) -> dict[str, int]:
    """Return the classes with more attributes than ``ATTRIBUTES_MAX``, by name.

    Records of messages count; answers of the HTTP API do not, see ``is_answer``.
    """
    found = {}
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and not is_answer(path, node):
                count = len(attributes_of(node))
                if count > ATTRIBUTES_MAX:
                    found[node.name] = count
    return found


def long_modules(paths: Iterable[Path]) -> dict[str, int]:
    """Return the modules that are longer than ``LONG_MODULE_LINES``, by path."""
    lengths = {str(path.relative_to(ROOT)): count_lines([path]) for path in paths}
    return {path: lines for path, lines in lengths.items() if lines > LONG_MODULE_LINES}


def fullest_folders(paths: Iterable[Path]) -> dict[str, int]:
    """Return the five folders with the most files, by path."""
    counts = Counter(str(path.parent.relative_to(ROOT)) for path in paths)
    return dict(counts.most_common(5))


def count_commands() -> tuple[int, int]:
    """Return the numbers of top-level commands, and of different options of all commands."""
    import click

    from holdfast.daemon.cli.command_line import commands

    def options(command: click.Command, path: str) -> set[str]:
        found = {
            f"{path} {parameter.name}"
            for parameter in command.params
            if isinstance(parameter, click.Option)
        }
        for name, inner in getattr(command, "commands", {}).items():
            found |= options(inner, f"{path} {name}")
        return found

    return len(commands.commands), len({each.split()[-1] for each in options(commands, "")})


def count_settings() -> int:
    """Return the number of keys of ``run.toml``."""
    from holdfast.membership.spec.spec import TABLES

    return sum(len(attrs.fields(kind)) for kind in TABLES.values())


def count_messages() -> int:
    """Return the number of types of messages, those between daemon and trainer included."""
    from holdfast.protocol.wire import MESSAGES

    return len(MESSAGES)


def count_records() -> int:
    """Return the number of types of journal records."""
    from holdfast.membership.master.state.journal import RECORDS

    return len(RECORDS)


def count_dependencies() -> int:
    """Return the number of packages that the package needs."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return len(project["dependencies"])


def files_of_a_round() -> list[str]:
    """Return the package's files of which a function runs during one round of a simulated run.

    Three contributors and a spare in virtual time; the round begins with the master's ``Open`` and
    ends when all have applied it. Real sockets, lanes' threads and the trainer's hook are not part
    of such a run.
    """
    import trio

    from holdfast.protocol.messages import Role
    from holdfast.simulation.swarm import Swarm  # type: ignore[import-not-found, unused-ignore]
    from holdfast.simulation.virtual_time import run_virtually  # type: ignore[import-not-found, unused-ignore]

    files: set[str] = set()
    toml = "[diloco]\nsync_every = 4\n[membership]\ncontributors = 3\nmin_members = 2\n"

    def note(frame: FrameType, _event: str, _argument: object) -> None:
        files.add(frame.f_code.co_filename)

    async def live() -> None:
        async with trio.open_nursery() as nursery:
            swarm = Swarm(nursery, toml)
            await swarm.start_master()
            for name in "abc":
                swarm.add_peer(name)
            swarm.add_peer("d", role=Role.SPARE)
            await swarm.until(
                lambda: swarm.committed >= 3 and all(swarm.in_sync(n) for n in "abcd")
            )
            sys.setprofile(note)
            await swarm.until(
                lambda: swarm.committed >= 4 and all(swarm.in_sync(n) for n in "abcd")
            )
            sys.setprofile(None)
            nursery.cancel_scope.cancel()

    run_virtually(live, seed=0)
    ours = {str(path) for path in package_files()}
    return sorted(str(Path(each).relative_to(ROOT)) for each in files & ours)


def measures() -> dict[str, object]:
    """Return all measures but the files of a round."""
    package = package_files()
    commands, options = count_commands()
    rooms = Counter({path.relative_to(ROOT).parts[0]: 0 for path in package if path.parent != ROOT})
    statements = Counter(rooms)
    for path in package:
        if path.parent != ROOT:
            room = path.relative_to(ROOT).parts[0]
            rooms[room] += count_lines([path])
            statements[room] += count_statements([path])
    beside = {name: python_files(name) for name in ("simulation", "tests", "benchmarks", "tools")}
    return {
        "package lines": count_lines(package),
        "package statements": count_statements(package),
        "package files": len(package),
        "lines by room": dict(rooms),
        "statements by room": dict(statements),
        **{f"{name} lines": count_lines(paths) for name, paths in beside.items()},
        **{f"{name} statements": count_statements(paths) for name, paths in beside.items()},
        "fullest folders": fullest_folders(package),
        "messages": count_messages(),
        "journal records": count_records(),
        "keys of run.toml": count_settings(),
        "top-level commands": commands,
        "options": options,
        "classes over 20 attributes": large_classes(package),
        "modules over 500 lines": long_modules(package),
        "runtime dependencies": count_dependencies(),
    }


if __name__ == "__main__":
    said = measures()
    if "--round" in sys.argv:
        said["files of a round"] = len(files_of_a_round())
    sys.stdout.write(json.dumps(said, indent=2) + "\n")
