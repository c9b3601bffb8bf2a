"""``holdfast checkpoint`` and ``holdfast export``: what lies on disk; only ``now`` asks a daemon."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from ...protocol.errors import UserError
from ..exit_codes import ExitCode
from .options import json_option, state_option, tell

F = TypeVar("F", bound=Callable[..., object])


def place_options(function: F) -> F:
    """Where the checkpoints are: the same two options for all."""
    state = click.option(
        "--state",
        type=click.Path(file_okay=False, path_type=Path),
        help="A peer's state directory (default: the only one here that has checkpoints).",
    )
    where = click.option(
        "--checkpoints", "where", metavar="DIR|URL", help="As it was given to `holdfast join`."
    )
    return where(state(function))


@click.group()
def checkpoint() -> None:
    """See what checkpoints there are, check and delete them; have one written."""


@checkpoint.command()
@state_option
@json_option
def now(state: Path | None, as_json: bool) -> None:
    """Have those who keep checkpoints write one at once, of the newest state (at the master).

    Says who will; `holdfast events` says when each is written. Training goes on meanwhile.

    \b
    Examples:
      holdfast checkpoint now
      holdfast checkpoint now --json | jq .peers
    """
    from ..paths import find_control
    from .daemon_client import HTTP_S, call

    answer = call(find_control(state, "master"), "checkpoint", {}, timeout_s=3 * HTTP_S)
    if as_json:
        click.echo(json.dumps(answer, indent=2))
        return
    tell(answer["text"])
    for row in answer["peers"]:
        if not row["writes"]:
            tell(f"not {row['name']} ({row['peer'][:8]}): {row['why']}")


@checkpoint.command("list")
@place_options
@json_option
def list_them(where: str | None, state: Path | None, as_json: bool) -> None:
    """List checkpoints, the newest first.

    \b
    Examples:
      holdfast checkpoint list
      holdfast checkpoint list --checkpoints s3://bucket/run --json
    """
    from . import checkpoint_files as files  # and numpy: not for other commands

    with files.told_plainly():
        place = files.find_place(where, state)
        rows = [files.row_of(place, name) for name in files.named(place, None)]
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
                f"{row['bytes'] / 1e6:.1f} MB, {format_age(age_s)} ago"
            )


@checkpoint.command()
@click.argument("name", required=False)
@place_options
@json_option
def show(name: str | None, where: str | None, state: Path | None, as_json: bool) -> None:
    """Show what is in a checkpoint; NAME may be any part of one. Default: the newest.

    \b
    Examples:
      holdfast checkpoint show
      holdfast checkpoint show 000000400 --json
    """
    from . import checkpoint_files as files  # and numpy: not for other commands

    with files.told_plainly():
        found = files.choose(files.find_place(where, state), name)
    told = files.facts_of(found)
    if as_json:
        click.echo(json.dumps(told, indent=2))
        return
    for key in ("name", "place", "run_id", "lineage", "step", "rounds", "term", "bytes"):
        tell(f"{key:<12}{told[key]}")
    tell(f"{'written':<12}{time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(told['written_s']))}")
    tell(f"{'model':<12}{told['tensors']} tensors, {told['values']} values")
    for head in told["heads"]:
        tell(f"fragment {head['fragment']:<3}version {head['version']}, root {head['root'][:32]}")


@checkpoint.command()
@click.argument("name", required=False)
@place_options
@json_option
def verify(name: str | None, where: str | None, state: Path | None, as_json: bool) -> None:
    """Read checkpoints and check every byte; NAME may be any part of one. Default: all.

    \b
    Examples:
      holdfast checkpoint verify
      holdfast checkpoint verify 000000400 --state /srv/peer
    """
    from . import checkpoint_files as files  # and numpy: not for other commands

    with files.told_plainly():
        place = files.find_place(where, state)
        names = files.named(place, name)
        if not names:
            raise files.no_checkpoint(place)
        rows = [{"name": each, "fault": files.fault_of(place, each)} for each in names]
    for row in () if as_json else rows:
        tell(f"{row['name']}  {row['fault'] or 'whole'}")
    if as_json:
        click.echo(json.dumps({"place": str(place), "checkpoints": rows}, indent=2))
    damaged = [row for row in rows if row["fault"]]
    if damaged:
        raise UserError(
            f"{len(damaged)} of {len(rows)} checkpoints are damaged",
            exit_code=ExitCode.FAILED,
            hint="peers pass over them; `holdfast checkpoint delete` makes room",
        )


@checkpoint.command()
@click.argument("names", nargs=-1, required=True)
@place_options
@json_option
def delete(names: tuple[str, ...], where: str | None, state: Path | None, as_json: bool) -> None:
    """Delete checkpoints; each of NAMES may be any part of one.

    \b
    Examples:
      holdfast checkpoint delete 0-000000400-000004
    """
    from . import checkpoint_files as files  # and numpy: not for other commands

    with files.told_plainly():
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
@click.argument("out", type=click.Path(dir_okay=False, path_type=Path))
@click.option(
    "--format",
    "form",
    type=click.Choice(["safetensors", "torch"]),
    default="safetensors",
    show_default=True,
    help="torch: what torch.save makes of a state dict.",
)
@click.option("--name", help="Which checkpoint, or any part of its name (default: the newest).")
@click.option("--force", is_flag=True, help="Replace OUT if it is there.")
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
    """Write a checkpoint's weights to OUT, for the plain model: no holdfast is needed to load it.

    \b
    Examples:
      holdfast export model.safetensors
      holdfast export --format torch --checkpoints s3://bucket/run model.pt
    """
    from . import checkpoint_files as files  # and numpy: not for other commands
    from . import export as exporting

    if out.exists() and not force:
        raise UserError(
            f"{out} is there already",
            exit_code=ExitCode.USAGE,
            hint="give another name, or --force to replace it",
        )
    with files.told_plainly():
        found = files.choose(files.find_place(where, state), name)
        tensors = exporting.tensors_of(found)
        write = exporting.export_torch if form == "torch" else exporting.export_safetensors
        write(tensors, out)
    told: dict[str, Any] = {
        "out": str(out),
        "format": form,
        "bytes": out.stat().st_size,
        "tensors": len(tensors),
        "checkpoint": found.name,
        "step": found.manifest.step,
    }
    if as_json:
        click.echo(json.dumps(told))
    else:
        tell(
            f"{out}: {told['tensors']} tensors of step {told['step']}, {told['bytes'] / 1e6:.1f} MB"
        )


def format_age(age_s: float) -> str:
    """A length of time, for people."""
    for unit, unit_s in (("days", 86_400.0), ("hours", 3_600.0), ("minutes", 60.0)):
        if age_s >= 2 * unit_s:
            return f"{age_s / unit_s:.0f} {unit}"
    return f"{age_s:.0f} seconds"
