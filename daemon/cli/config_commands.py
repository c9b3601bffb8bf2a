"""``holdfast config``, ``holdfast init``: preparation of a run."""

from __future__ import annotations

import json
import re
import shlex
import sys
import tomllib
from pathlib import Path

import click
from attrs import asdict

from ...membership.spec.preset import PRESETS
from ...protocol.errors import UserError
from ..process.exit_codes import ExitCode
from ..process.paths import join_line
from .options import FOLDER, json_option
from .plan_command import plan

START = Path(__file__).resolve().parents[2] / "examples" / "start"
START_FILES = ("run.toml", "train.py")
NEXT_STEPS = """\
wrote {spec} and {script}; next, each line in a terminal of its own:
  holdfast master {spec}
  {alder}
  {birch}
  holdfast dashboard
holdfast1.... is what the master prints. Two peers on one machine need a --state each; on a machine
of its own a peer needs neither --state nor --name.
Alone, without a run: HOLDFAST_STANDALONE=1 HOLDFAST_STANDALONE_STEPS=2000 python {script}"""


@click.group()
def config() -> None:
    """Check a run.toml, or predict what it costs, without starting anything."""


config.add_command(plan)


@config.command()
@click.argument("run_toml", type=click.Path(path_type=Path))
@json_option
def check(run_toml: Path, as_json: bool) -> None:
    """List the errors in RUN_TOML, and warn of settings that are allowed but probably a mistake.

    The exit status is 3 if a master would refuse the file. Warnings do not change it.

    \b
    Examples:
      holdfast config check run.toml
      holdfast config check run.toml --json
    """
    from ...membership.spec.preset import format_preset
    from ...membership.spec.spec_faults import find_faults
    from ..spec_file import format_faults, read_text

    text = read_text(run_toml)
    errors, warnings = find_faults(text)
    if as_json:
        report = {
            "valid": not errors,
            "errors": [asdict(fault) for fault in errors],
            "warnings": [asdict(fault) for fault in warnings],
        }
        click.echo(json.dumps(report, indent=2))
    else:
        for kind, faults in (("error", errors), ("warning", warnings)):
            for line in format_faults(run_toml, kind, faults):
                click.echo(line)
        if not errors:
            click.echo(f"{run_toml} is valid" + (", with warnings" if warnings else ""))
            if preset := format_preset(tomllib.loads(text)):
                click.echo(preset)
    if errors:
        sys.exit(ExitCode.CONFIG)


@click.command()
@click.argument("folder", type=FOLDER, default=".")
@click.option("--force", is_flag=True, help="Overwrite existing files.")
@click.option("--preset", type=click.Choice(list(PRESETS)), help="Begin with measured settings.")
def init(folder: Path, force: bool, preset: str | None) -> None:
    """Write a sample run.toml and training script into FOLDER (default: the current folder).

    Both work unchanged: two peers on one small machine finish in about five minutes. Comments in
    them say what to adapt. The run gets the folder's name.

    \b
    Examples:
      holdfast init
      holdfast init my-run
      holdfast init my-run --preset streaming
    """
    there = [name for name in START_FILES if (folder / name).exists()]
    if there and not force:
        raise UserError(
            f"{folder / there[0]} already exists",
            exit_code=ExitCode.CONFIG,
            hint="give another folder, or --force to overwrite it",
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name in START_FILES:
            text = (START / name).read_text(encoding="utf-8")
            if name == "run.toml":
                text = _with_preset(_named(text, folder.resolve().name), preset)
            (folder / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(
            f"cannot write into {folder}: {error.strerror}", exit_code=ExitCode.CONFIG
        ) from error
    script = folder / "train.py"
    joins = {name: join_line("holdfast1....", script, folder / name) for name in ("alder", "birch")}
    spec = shlex.quote(str(folder / "run.toml"))
    click.echo(NEXT_STEPS.format(spec=spec, script=shlex.quote(str(script)), **joins))


def _named(toml_text: str, name: str) -> str:
    """Return the sample with a run's name in it; unchanged if no run may have that name."""
    from ...membership.spec.spec_faults import find_faults

    # A basic string of TOML has the escapes of JSON.
    line = f"name = {json.dumps(name, ensure_ascii=False)}"
    named = re.sub(r'^name = "my-run"', lambda _match: line, toml_text, count=1, flags=re.MULTILINE)
    return toml_text if find_faults(named)[0] else named


def _with_preset(toml_text: str, preset: str | None) -> str:
    """Return the sample with a preset; its settings stand behind a #, as all that hold anyway."""
    if preset is None:
        return toml_text
    text = toml_text.replace('# preset = ""', f'preset = "{preset}"', 1)
    for place, value in PRESETS[preset].items():
        key = place.partition(".")[2]
        line = f"# {key} = {json.dumps(value)}  # of the preset"
        text = re.sub(rf"^(# )?{key} = .*$", line, text, count=1, flags=re.MULTILINE)
    return text
