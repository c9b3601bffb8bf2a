"""``holdfast checkpoint`` and ``holdfast export``: what lies on disk, without any daemon."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import click
from attrs import asdict

from ..checkpoint import checkpoints
from ..checkpoint.checkpoints import Checkpoint, CheckpointError
from ..checkpoint.place import FolderPlace, Place, PlaceError, place_at
from ..protocol.errors import UserError
from .cli_options import json_option, tell
from .exit_codes import ExitCode
from .places import CHECKPOINTS_FOLDER, data_home

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
    """See what checkpoints there are, check and delete them."""


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
    with told_plainly():
        place = find_place(where, state)
        rows = [_row(place, name) for name in checkpoints.names(place)]
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
                f"{row['bytes'] / 1e6:.1f} MB, {said_age(age_s)} ago"
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
    with told_plainly():
        found = choose(find_place(where, state), name)
    told = _shown(found)
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
    with told_plainly():
        place = find_place(where, state)
        names = checkpoints.names(place) if name is None else [_name(place, name)]
        if not names:
            raise _none(place)
        rows = [{"name": each, "fault": _fault(place, each)} for each in names]
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
    with told_plainly():
        place = find_place(where, state)
        chosen = list(dict.fromkeys(_name(place, name) for name in names))
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
    from . import export as exporting

    if out.exists() and not force:
        raise UserError(
            f"{out} is there already",
            exit_code=ExitCode.USAGE,
            hint="give another name, or --force to replace it",
        )
    with told_plainly():
        found = choose(find_place(where, state), name)
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


# ---------------------------------------------------------------- finding them


@contextmanager
def told_plainly() -> Iterator[None]:
    """What is wrong with a place or a checkpoint, as a person is told it."""
    try:
        yield
    except (CheckpointError, PlaceError) as error:
        raise UserError(
            str(error),
            exit_code=ExitCode.CONFIG,
            hint="`holdfast checkpoint list` shows what there is; --checkpoints says where",
        ) from error


def find_place(where: str | None, state: Path | None) -> Place:
    """The place that is meant, or the only one on this machine.

    Raises:
      UserError: there is none, or several.
      PlaceError: it cannot be used.
    """
    if where is not None and state is not None:
        raise click.UsageError("--checkpoints says where: leave out --state")
    if where is not None:
        return place_at(where)
    if state is not None:
        return FolderPlace(state / CHECKPOINTS_FOLDER)
    found = [FolderPlace(path) for path in data_home().glob(f"peers/*/{CHECKPOINTS_FOLDER}")]
    found = [place for place in found if checkpoints.names(place)]
    if len(found) == 1:
        return found[0]
    names = ", ".join(sorted(str(place) for place in found))
    raise UserError(
        f"several peers have checkpoints here: {names}"
        if found
        else "no peer has checkpoints here",
        exit_code=ExitCode.USAGE,
        hint="say which with --checkpoints DIR|URL, or --state DIR",
    )


def choose(place: Place, part: str | None) -> Checkpoint:
    """The one that is meant; without a word, the newest that says what it is.

    Raises:
      UserError: there is none such.
      CheckpointError, PlaceError: it cannot be read.
    """
    if part is not None:
        return checkpoints.open_checkpoint(place, _name(place, part))
    passed: list[str] = []
    found = next(checkpoints.newest(place, lambda _manifest: "", passed.append), None)
    for text in passed:
        click.echo(f"passed over: {text}", err=True)
    if found is None:
        raise _none(place)
    return found


def _name(place: Place, part: str) -> str:
    names = checkpoints.names(place)
    found = [part] if part in names else [name for name in names if part in name]
    if len(found) == 1:
        return found[0]
    raise UserError(
        f"{len(found)} checkpoints in {place} are called {part!r}",
        exit_code=ExitCode.USAGE,
        hint="`holdfast checkpoint list` shows their names",
    )


def _none(place: Place) -> UserError:
    return UserError(
        f"there is no checkpoint in {place}",
        exit_code=ExitCode.CONFIG,
        hint="say where they are with --checkpoints DIR|URL, or --state DIR",
    )


# ---------------------------------------------------------------- telling of them


def _row(place: Place, name: str) -> dict[str, Any]:
    row: dict[str, Any] = {"name": name, "bytes": place.size_bytes(name), "fault": ""}
    try:
        manifest = checkpoints.open_checkpoint(place, name).manifest
    except CheckpointError as error:
        return {**row, "fault": str(error)}
    said = {key: getattr(manifest, key) for key in ("run_id", "step", "rounds", "written_s")}
    return {**row, **said}


def _fault(place: Place, name: str) -> str:
    """What is wrong with a checkpoint, all of which is read; empty: nothing."""
    try:
        found = checkpoints.open_checkpoint(place, name)
        for number in range(len(found.manifest.sizes)):
            found.checked_parts(number)
    except CheckpointError as error:
        return str(error)
    return ""


def _shown(found: Checkpoint) -> dict[str, Any]:
    manifest = found.manifest
    return {
        "name": found.name,
        "place": str(found.place),
        "bytes": found.size_bytes,
        "run_id": manifest.run_id,
        "lineage": manifest.lineage,
        "step": manifest.step,
        "rounds": manifest.rounds,
        "term": manifest.term,
        "written_s": manifest.written_s,
        "tensors": len(manifest.layout.tensors),
        "values": sum(size.value_count for size in manifest.sizes),
        "heads": [
            {"fragment": number, **asdict(head), **asdict(size)}
            for number, (head, size) in enumerate(zip(manifest.heads, manifest.sizes, strict=True))
        ],
        "spec": manifest.spec_toml,
    }


def said_age(age_s: float) -> str:
    """A length of time, for people."""
    for unit, unit_s in (("days", 86_400.0), ("hours", 3_600.0), ("minutes", 60.0)):
        if age_s >= 2 * unit_s:
            return f"{age_s / unit_s:.0f} {unit}"
    return f"{age_s:.0f} seconds"
