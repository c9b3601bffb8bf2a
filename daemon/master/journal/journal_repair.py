"""Repair of a damaged journal: its readable beginning becomes a new journal.

A journal is valid up to its first record that is missing, unreadable, or does not fit its checksum.
All records from there on are cut off, readable or not, because a decision without the ones before
it means nothing. The damaged file is kept as ``journal.sqlite.damaged-N``.

    journal.sqlite(-wal) --copy--> journal.sqlite.damaged-N(-wal)
            |
            '--valid records--> .part --rename--> .new   from here on the old files do not count
                                                   '--rename--> journal.sqlite, its log removed
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from attrs import evolve

from ....protocol.durable_files import put_in_place, sync_to_disk
from .journal_base import RepairedJournal, read_row

COPIES_MAX = 1_000  # of damaged journals


def read_rows(db: sqlite3.Connection) -> RepairedJournal:
    """Read records in order up to the first damaged one."""
    found = RepairedJournal([], [], "")
    fault = ""
    try:
        for row in db.execute("select id, kind, body, at_s, chk from records order by id"):
            fault = read_row(found, row)
            if fault:
                break
    except (sqlite3.DatabaseError, OverflowError, UnicodeDecodeError) as error:
        fault = f"record {len(found.rows) + 1} cannot be read: {error}"
    return evolve(found, fault=fault)


def readable(db: sqlite3.Connection, query: str) -> Iterator[tuple[Any, ...]]:
    """Yield rows of another table up to the first unreadable one."""
    with contextlib.suppress(sqlite3.DatabaseError, OverflowError, UnicodeDecodeError):
        yield from db.execute(query)


def keep_aside(path: Path) -> Path:
    """Copy the journal and its log; return the path of the copy."""
    for number in range(1, COPIES_MAX):
        copy = path.with_name(f"{path.name}.damaged-{number}")
        if not copy.exists():
            break
    for suffix in ("", "-wal"):
        source = path.with_name(path.name + suffix)
        if source.exists():
            shutil.copy2(source, copy.with_name(copy.name + suffix))
    return copy


def finish_replacing(path: Path) -> None:
    """Move a new journal into its place if one is ready, perhaps since before a crash."""
    ready = path.with_name(f"{path.name}.new")
    if not ready.exists():
        return
    for suffix in (
        "-wal",
        "-shm",
    ):  # these belong to the old file and must never be read with the new one
        path.with_name(path.name + suffix).unlink(missing_ok=True)
    os.replace(ready, path)
    sync_to_disk(path.parent)


def make_ready(part: Path, path: Path) -> None:
    """Mark the new journal at ``part`` as complete; from now on it replaces the old one."""
    put_in_place(part, path.with_name(f"{path.name}.new"))
