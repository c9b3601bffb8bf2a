"""``holdfast checkpoint`` and ``holdfast export``: checkpoints on disk, without a daemon."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import click

from ....protocol.errors import UserError
from ....protocol.text import format_duration
from ...process.exit_codes import ExitCode
from ..options import FILE, FOLDER, json_option, tell

F = TypeVar("F", bound=Callable[..., object])


def place_options(function: F) -> F:
    state = click.option(
        "--state",
        type=FOLDER,
        help="A peer's state directory (default: that of the only peer here with checkpoints).",
    )
    where = click.option(
        "--checkpoints", "where", metavar="DIR|URL", help="As given to `holdfast join`."
    )
    return where(state(function))


@click.group()
def checkpoint() -> None:
    """List, check and delete checkpoints."""


@checkpoint.command("list")
@click.argument("name", required=False)
@place_options
@json_option
def list_them(name: str | None, where: str | None, state: Path | None, as_json: bool) -> None:
    """List checkpoints, the newest first, or the one whose name has NAME in it.

    \b
    Examples:
      holdfast checkpoint list
      holdfast checkpoint list 000000400 --checkpoints s3://bucket/run --json
    """
    from . import files  # imports numpy: slow

    with files.as_user_errors():
        place = files.find_place(where, state)
        rows = files.rows_of(files.named(place, name), partial(files.row_of, place))
    if as_json:
        click.echo(json.dumps({"place": str(place), "checkpoints": rows}, indent=2))
        return
    tell(str(place) if rows else f"{place}: none")
    for row in rows:
        if row["fault"]:
            tell(f"{row['name']}  {row['fault']}")
        else:
            age_s = max(0.0, time.time() - row["written_s"])
            tell(
                f"{row['name']}  step {row['step']}, {row['rounds']} rounds, "
                f"{row['values']} values, {row['bytes'] / 1e6:.1f} MB, {format_duration(age_s)} ago"
            )


@checkpoint.command()
@click.argument("name", required=False)
@place_options
@json_option
def verify(name: str | None, where: str | None, state: Path | None, as_json: bool) -> None:
    """Read checkpoints and check every byte; NAME may be any part of a name. Default: all.

    \b
    Examples:
      holdfast checkpoint verify
      holdfast checkpoint verify 000000400 --state /srv/peer
    """
    from . import files  # imports numpy: slow

    with files.as_user_errors():
        place = files.find_place(where, state)
        names = files.named(place, name)
        if not names:
            raise files.no_checkpoint(place)
        rows = files.rows_of(
            names, lambda each: {"name": each, "fault": files.fault_of(place, each)}
        )
    for row in () if as_json else rows:
        tell(f"{row['name']}  {row['fault'] or 'whole'}")
    if as_json:
        click.echo(json.dumps({"place": str(place), "checkpoints": rows}, indent=2))
    damaged = [row for row in rows if row["fault"]]
    if damaged:
        raise UserError(
            f"{len(damaged)} of {len(rows)} checkpoints are damaged",
            exit_code=ExitCode.FAILED,
            hint="peers skip them; `holdfast checkpoint delete` removes them",
        )


@checkpoint.command()
@click.argument("names", nargs=-1, required=True)
@place_options
@json_option
def delete(names: tuple[str, ...], where: str | None, state: Path | None, as_json: bool) -> None:
    """Delete checkpoints; each of NAMES may be any part of a checkpoint's name.

    \b
    Examples:
      holdfast checkpoint delete 0-000000400-000004
    """
    from . import files  # imports numpy: slow

    with files.as_user_errors():
        place = files.find_place(where, state)
        chosen = list(dict.fromkeys(each for name in names for each in files.named(place, name)))
        for name in chosen:
            place.delete(name)
    if as_json:
        click.echo(json.dumps({"place": str(place), "deleted": chosen}))
    else:
        for name in chosen:
            tell(f"deleted {name}")


@click.command()
@click.argument("out", type=FILE)
@click.option(
    "--format",
    "form",
    type=click.Choice(["safetensors", "torch"]),
    default="safetensors",
    help="torch: a state dict written by torch.save.",
)
@click.option("--name", help="The checkpoint, or any part of its name (default: the newest).")
@click.option("--force", is_flag=True, help="Replace OUT if it exists.")
@place_options
@json_option
def export(
    out: Path,
    form: str,
    name: str | None,
    force: bool,
    where: str | None,
    state: Path | None,
    as_json: bool,
) -> None:
    """Write a checkpoint's weights to OUT. The file loads into the plain model without holdfast.

    \b
    Examples:
      holdfast export model.safetensors
      holdfast export --format torch --checkpoints s3://bucket/run model.pt
    """
    from . import export as exporting
    from . import files  # imports numpy: slow

    if out.exists() and not force:
        raise UserError(
            f"{out} already exists",
            exit_code=ExitCode.USAGE,
            hint="give another name, or --force to replace it",
        )
    with files.as_user_errors():
        found = files.choose(files.find_place(where, state), name)
        write = exporting.export_torch if form == "torch" else exporting.export_safetensors
        write(found, out)
    facts: dict[str, Any] = {
        "out": str(out),
        "format": form,
        "bytes": out.stat().st_size,
        "tensors": len(found.manifest.layout.tensors),
        "checkpoint": found.name,
        "step": found.manifest.step,
    }
    if as_json:
        click.echo(json.dumps(facts))
    else:
        megabytes = facts["bytes"] / 1e6
        tell(f"{out}: {facts['tensors']} tensors of step {facts['step']}, {megabytes:.1f} MB")
