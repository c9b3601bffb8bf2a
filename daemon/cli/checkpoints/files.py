"""Selection of checkpoints on the command line, and reports of their contents.

Separate from ``commands`` because it imports numpy, for which no other command should
wait.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import click
from attrs import asdict

from ....checkpoint import checkpoints
from ....checkpoint.checkpoint_store import (
    CheckpointStore,
    FileGoneError,
    FolderStore,
    StoreError,
    place_at,
)
from ....checkpoint.checkpoints import Checkpoint, CheckpointError
from ....protocol.errors import UserError
from ....protocol.text import escaped
from ...process.exit_codes import ExitCode
from ...process.paths import CHECKPOINTS_FOLDER, data_home


@contextmanager
def as_user_errors() -> Iterator[None]:
    """Turn errors of a store or a checkpoint into a UserError with a hint."""
    try:
        yield
    except (CheckpointError, StoreError) as error:
        raise UserError(
            str(error),
            exit_code=ExitCode.CONFIG,
            hint=(
                "`holdfast checkpoint list` lists the checkpoints; --checkpoints sets the location"
            ),
        ) from error


def find_place(where: str | None, state: Path | None) -> CheckpointStore:
    """Return the store of the options, or the only one here; raise UserError or StoreError."""
    if where is not None and state is not None:
        raise click.UsageError("--checkpoints sets the location: omit --state")
    if where is not None:
        return place_at(where)
    if state is not None:
        return FolderStore(state / CHECKPOINTS_FOLDER)
    found = [FolderStore(path) for path in data_home().glob(f"peers/*/{CHECKPOINTS_FOLDER}")]
    found = [place for place in found if checkpoints.names(place)]
    if len(found) == 1:
        return found[0]
    names = ", ".join(sorted(str(place) for place in found))
    raise UserError(
        f"several peers have checkpoints here: {names}"
        if found
        else "no peer has checkpoints here",
        exit_code=ExitCode.USAGE,
        hint="select one with --checkpoints DIR|URL, or --state DIR",
    )


def choose(place: CheckpointStore, part: str | None) -> Checkpoint:
    """Return the checkpoint with ``part`` in its name; without it, the newest readable one."""
    if part is not None:
        (name,) = named(place, part)
        return checkpoints.open_checkpoint(place, name)
    skipped: list[str] = []
    found = next(checkpoints.newest(place, lambda _manifest: "", skipped.append), None)
    for text in skipped:
        click.echo(escaped(f"skipped: {text}"), err=True)
    if found is None:
        raise no_checkpoint(place)
    return found


def named(place: CheckpointStore, part: str | None) -> list[str]:
    """Return the one name with ``part`` in it, or raise UserError; without it all, newest first."""
    names = checkpoints.names(place)
    if part is None:
        return names
    found = [part] if part in names else [name for name in names if part in name]
    if len(found) == 1:
        return found
    raise UserError(
        f"{len(found)} checkpoints in {place} match {part!r}",
        exit_code=ExitCode.USAGE,
        hint="`holdfast checkpoint list` shows their names",
    )


def no_checkpoint(place: CheckpointStore) -> UserError:
    return UserError(
        f"there is no checkpoint in {place}",
        exit_code=ExitCode.CONFIG,
        hint="give their location with --checkpoints DIR|URL, or --state DIR",
    )


# ---------------------------------------------------------------- reports


def rows_of(
    names: Iterable[str], describe: Callable[[str], dict[str, Any]]
) -> list[dict[str, Any]]:
    """Return what ``describe`` says of each checkpoint that no writer deletes meanwhile."""
    rows = []
    for name in names:
        with suppress(FileGoneError):
            rows.append(describe(name))
    return rows


def row_of(place: CheckpointStore, name: str) -> dict[str, Any]:
    """Return what a checkpoint's manifest says, or why it cannot be read."""
    row: dict[str, Any] = {"name": name, "bytes": place.size_bytes(name), "fault": ""}
    try:
        manifest = checkpoints.open_checkpoint(place, name).manifest
    except CheckpointError as error:
        return {**row, "fault": str(error)}
    heads = enumerate(zip(manifest.heads, manifest.sizes, strict=True))
    return {
        **row,
        "run_id": manifest.run_id,
        "lineage": manifest.lineage,
        "step": manifest.step,
        "rounds": manifest.rounds,
        "term": manifest.term,
        "written_s": manifest.written_s,
        "tensors": len(manifest.layout.tensors),
        "values": sum(size.value_count for size in manifest.sizes),
        "heads": [
            {"fragment": number, **asdict(head), **asdict(size)} for number, (head, size) in heads
        ],
        "spec": manifest.spec_toml,
    }


def fault_of(place: CheckpointStore, name: str) -> str:
    """Read all of a checkpoint and return its first fault, or an empty string if there is none."""
    try:
        found = checkpoints.open_checkpoint(place, name)
        for number in range(len(found.manifest.sizes)):
            for _place, _data in found.blocks(number):
                pass
    except CheckpointError as error:
        return str(error)
    return ""
