"""Repair of a damaged journal: its readable beginning becomes a new journal.

A journal is valid up to its first record that is missing, unreadable, or does not fit its checksum.
All records from there on are cut off, readable or not, because a decision without the ones before
it means nothing. The damaged file is kept as ``journal.sqlite.damaged-N``.

    journal.sqlite(-wal) --copy--> journal.sqlite.damaged-N(-wal)
            |
            '--valid records--> .part --rename--> .new   from here on the old files do not count
                                                   '--rename--> journal.sqlite, its log removed

SQLite silently drops the damaged end of a write-ahead log. Therefore a small file beside the
journal (``JournalTip``) holds the number of the last acknowledged record, and the last term. It is
written after each record and not fsynced, so it never claims more than what is on disk.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack
from attrs import evolve, frozen
from blake3 import blake3

from ....membership.master.state import journal
from ....protocol import wire
from ....protocol.durable_files import put_in_place, sync_to_disk
from ....protocol.errors import RemoteProtocolError

CHECK_BYTES = 16
COPIES_MAX = 1_000  # of damaged journals
Row = tuple[int, str, bytes, float, bytes]


def check_of(number: int, kind: str, body: bytes) -> bytes:
    """Return a record's checksum, which also covers its number and kind."""
    return blake3(msgpack.packb([number, kind, body])).digest()[:CHECK_BYTES]


@frozen
class RepairedJournal:
    """The valid beginning of a journal.

    Attributes:
      rows, records: the valid records, in order.
      fault: what is wrong with the next record; empty at the journal's end.
    """

    rows: list[Row]
    records: list[journal.JournalRecord]
    fault: str


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


def read_row(found: RepairedJournal, row: tuple[Any, ...]) -> str:
    """Add the next row to what was found; return what is wrong with it, or an empty string."""
    if fault := _fault(len(found.rows) + 1, row):
        return fault
    number, kind, body, at_s, check = row
    try:
        record = wire.from_plain(journal.RECORDS[kind], msgpack.unpackb(body))
    except (KeyError, TypeError, ValueError, RemoteProtocolError) as error:
        return f"record {number} ({kind}) cannot be read: {error}"
    found.rows.append((number, kind, body, float(at_s), check))
    found.records.append(record)
    return ""


def _fault(expected: int, row: tuple[Any, ...]) -> str:
    number, kind, body, at_s, check = row
    if number != expected:
        return f"record {expected} is missing"
    if not (isinstance(kind, str) and isinstance(body, bytes) and isinstance(at_s, float | int)):
        return f"record {number} is damaged"
    if check != check_of(number, kind, body):
        return f"record {number} is damaged: its checksum does not fit"
    return ""


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


class JournalTip:
    """The number of the last acknowledged record and the last term, in a small file."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)

    def read(self) -> tuple[int, int]:
        """Return the number and the term; zeros if the file is missing or unreadable."""
        parts = os.pread(self._descriptor, 128, 0).split()
        if len(parts) != 3 or not (parts[0].isdigit() and parts[1].isdigit()):
            return 0, 0
        number, term = int(parts[0]), int(parts[1])
        return (number, term) if parts[2] == _tip_check(number, term) else (0, 0)

    def write(self, number: int, term: int) -> None:
        """Write both; after an OSError the file claims fewer records than there are."""
        check = _tip_check(number, term)
        os.pwrite(self._descriptor, b"%020d %020d %s\n" % (number, term, check), 0)

    def close(self) -> None:
        os.close(self._descriptor)


def _tip_check(number: int, term: int) -> bytes:
    return blake3(b"tip %d %d" % (number, term)).hexdigest()[:16].encode()
