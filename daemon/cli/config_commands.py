"""``holdfast config``, ``holdfast init``, ``holdfast completion``: before there is a run."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click
from attrs import asdict
from click.shell_completion import get_completion_class

from ...protocol.errors import UserError
from ..exit_codes import ExitCode
from .options import json_option

START = Path(__file__).resolve().parents[2] / "examples" / "start"
START_FILES = ("run.toml", "train.py")
COMPLETE_VARIABLE = "_HOLDFAST_COMPLETE"


@click.group()
def config() -> None:
    """Look at a run.toml without starting anything."""


@config.command()
@click.argument("run_toml", type=click.Path(path_type=Path))
@json_option
def check(run_toml: Path, as_json: bool) -> None:
    """Name everything that is wrong with RUN_TOML, and what is allowed but probably not meant.

    The exit status is 3 if a master would refuse it. Warnings do not change it.

    \b
    Examples:
      holdfast config check run.toml
      holdfast config check run.toml --json
    """
    from ...membership.spec.spec_faults import find_faults
    from ..spec_file import read_text

    errors, warnings = find_faults(read_text(run_toml))
    if as_json:
        told = {
            "valid": not errors,
            "errors": [asdict(fault) for fault in errors],
            "warnings": [asdict(fault) for fault in warnings],
        }
        click.echo(json.dumps(told, indent=2))
    else:
        for kind, faults in (("error", errors), ("warning", warnings)):
            for fault in faults:
                where = f"{run_toml}:{fault.line}" if fault.line else str(run_toml)
                named = f"{fault.key}: " if fault.key else ""
                click.echo(f"{where}: {kind}: {named}{fault.text}")
        if not errors:
            click.echo(f"{run_toml} is good" + (", but see above" if warnings else ""))
    if errors:
        sys.exit(ExitCode.CONFIG)


@click.command()
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path), default=".")
@click.option("--force", is_flag=True, help="Write over files that are there.")
def init(folder: Path, force: bool) -> None:
    """Write a run.toml and a training script to start from into FOLDER (default: here).

    Both run as they are, and say in comments what to change.

    \b
    Examples:
      holdfast init
      holdfast init my-run
    """
    there = [name for name in START_FILES if (folder / name).exists()]
    if there and not force:
        raise UserError(
            f"{folder / there[0]} is there already",
            exit_code=ExitCode.CONFIG,
            hint="give another folder, or --force to write over it",
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
    """Print what lets a shell complete holdfast's commands and options.

    Put it where the shell looks: ~/.local/share/bash-completion/completions/holdfast, ~/.zfunc/_holdfast
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
