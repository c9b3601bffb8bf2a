"""``holdfast config``, ``holdfast init``, ``holdfast completion``: preparation of a run."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click
from attrs import asdict
from click.shell_completion import get_completion_class

from ...protocol.errors import UserError
from ..exit_codes import ExitCode
from .options import FOLDER, json_option

START = Path(__file__).resolve().parents[2] / "examples" / "start"
START_FILES = ("run.toml", "train.py")
COMPLETE_VARIABLE = "_HOLDFAST_COMPLETE"


@click.group()
def config() -> None:
    """Check a run.toml without starting anything."""


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
    from ...membership.spec.spec_faults import find_faults
    from ..spec_file import read_text

    errors, warnings = find_faults(read_text(run_toml))
    if as_json:
        report = {
            "valid": not errors,
            "errors": [asdict(fault) for fault in errors],
            "warnings": [asdict(fault) for fault in warnings],
        }
        click.echo(json.dumps(report, indent=2))
    else:
        for kind, faults in (("error", errors), ("warning", warnings)):
            for fault in faults:
                where = f"{run_toml}:{fault.line}" if fault.line else str(run_toml)
                named = f"{fault.key}: " if fault.key else ""
                click.echo(f"{where}: {kind}: {named}{fault.text}")
        if not errors:
            click.echo(f"{run_toml} is valid" + (", with warnings" if warnings else ""))
    if errors:
        sys.exit(ExitCode.CONFIG)


@click.command()
@click.argument("folder", type=FOLDER, default=".")
@click.option("--force", is_flag=True, help="Overwrite existing files.")
def init(folder: Path, force: bool) -> None:
    """Write a sample run.toml and training script into FOLDER (default: the current folder).

    Both work unchanged; comments in them say what to adapt.

    \b
    Examples:
      holdfast init
      holdfast init my-run
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
            (folder / name).write_text((START / name).read_text())
    except OSError as error:
        raise UserError(
            f"cannot write into {folder}: {error.strerror}", exit_code=ExitCode.CONFIG
        ) from error
    click.echo(f"wrote {' and '.join(str(folder / name) for name in START_FILES)}; next:")
    click.echo(f"  holdfast master {folder / 'run.toml'}")
    click.echo(f"  holdfast join INVITE -- python {folder / 'train.py'}")


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print a script for shell completion of holdfast's commands and options.

    Save it where the shell looks for completions: ~/.local/share/bash-completion/completions/holdfast, ~/.zfunc/_holdfast
    or ~/.config/fish/completions/holdfast.fish.

    \b
    Examples:
      holdfast completion bash
      holdfast completion zsh
    """
    made = get_completion_class(shell)
    assert made is not None
    root = click.get_current_context().find_root().command
    click.echo(made(root, {}, "holdfast", COMPLETE_VARIABLE).source())
