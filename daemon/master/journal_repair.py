"""Damaged journals: what can still be read of one in order, and a new journal made of it.

A journal is good up to its first record that is missing, unreadable, or not what its checksum says.
Everything from there on is cut, also what could be read behind it: a decision without those before
it means nothing. What was there is kept beside it as ``journal.sqlite.damaged-N``.

    journal.sqlite(-wal) --copy--> journal.sqlite.damaged-N(-wal)
            |
            '--whole records--> .part --rename--> .new   from here on the old files do not count
                                                   '--rename--> journal.sqlite, its log removed

SQLite itself drops the end of a write-ahead log that is damaged, without a word. So the number of the
last record that was acknowledged, and the last term, are kept in a small file beside the journal
(``JournalTip``): it is written after each record, not fsynced, and so never claims more than what is on
disk.
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
from attrs import frozen
from blake3 import blake3

from ...membership.master.state import journal
from ...protocol import wire
from ...protocol.durable_files import sync_to_disk
from ...protocol.errors import RemoteProtocolError

CHECK_BYTES = 16
COPIES_MAX = 1_000  # of damaged journals; nobody has that many
Row = tuple[int, str, bytes, float, bytes]


def check_of(number: int, kind: str, body: bytes) -> bytes:
    """A record's checksum; it covers where the record stands and what it is called."""
    return blake3(msgpack.packb([number, kind, body])).digest()[:CHECK_BYTES]


@frozen
class RepairedJournal:
    """What was read of a journal.

    Attributes:
      rows, records: the whole ones, in order.
      fault: why there are no more; empty: the journal ends there.
    """

    rows: list[Row]
    records: list[journal.JournalRecord]
    fault: str


def read_rows(db: sqlite3.Connection) -> RepairedJournal:
    """Read records in order as far as they are whole."""
    rows: list[Row] = []
    records: list[journal.JournalRecord] = []
    fault = ""
    try:
        for row in db.execute("select id, kind, body, at_s, chk from records order by id"):
            fault = _fault(len(rows) + 1, row)
            if fault:
                break
            number, kind, body, at_s, check = row
            try:
                record = wire.from_plain(journal.RECORDS[kind], msgpack.unpackb(body))
            except (KeyError, TypeError, ValueError, RemoteProtocolError) as error:
                fault = f"record {number} ({kind}) cannot be read: {error}"
                break
            rows.append((number, kind, body, float(at_s), check))
            records.append(record)
    except (sqlite3.DatabaseError, OverflowError, UnicodeDecodeError) as error:
        fault = f"record {len(rows) + 1} cannot be read: {error}"
    return RepairedJournal(rows, records, fault)


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
    """Rows of another table, as far as they can be read."""
    with contextlib.suppress(sqlite3.DatabaseError, OverflowError, UnicodeDecodeError):
        yield from db.execute(query)


def keep_aside(path: Path) -> Path:
    """Copy the journal and its log; returns where the copy is."""
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
    """Put a new journal into its place, if one is ready: also after a crash in the middle."""
    ready = path.with_name(f"{path.name}.new")
    if not ready.exists():
        return
    for suffix in ("-wal", "-shm"):  # the old one's; they must never be read with the new file
        path.with_name(path.name + suffix).unlink(missing_ok=True)
    os.replace(ready, path)
    sync_to_disk(path.parent)


def make_ready(part: Path, path: Path) -> None:
    """The new journal at ``part`` is complete: it counts from now on."""
    sync_to_disk(part)
    os.replace(part, path.with_name(f"{path.name}.new"))
    sync_to_disk(path.parent)


class JournalTip:
    """The number of the last record that was acknowledged and the last term, in a file of its own.

    A missing or unreadable file says nothing: zeros.
    """

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)

    def read(self) -> tuple[int, int]:
        parts = os.pread(self._descriptor, 128, 0).split()
        if len(parts) != 3 or not (parts[0].isdigit() and parts[1].isdigit()):
            return 0, 0
        number, term = int(parts[0]), int(parts[1])
        return (number, term) if parts[2] == _tip_check(number, term) else (0, 0)

    def write(self, number: int, term: int) -> None:
        """Raises OSError: it cannot be written; then it only says less than it could."""
        check = _tip_check(number, term)
        os.pwrite(self._descriptor, b"%020d %020d %s\n" % (number, term, check), 0)

    def close(self) -> None:
        os.close(self._descriptor)


def _tip_check(number: int, term: int) -> bytes:
    return blake3(b"tip %d %d" % (number, term)).hexdigest()[:16].encode()
