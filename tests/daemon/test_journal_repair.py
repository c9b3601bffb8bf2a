"""Repair of damaged journals: the rest is always a beginning, and a cut is always reported."""

from __future__ import annotations

import gc
import random
import shutil
import sqlite3
from pathlib import Path
from typing import Any, cast
from unittest.mock import Mock

import pytest

from holdfast.daemon.master.journal.journal_base import GrantRow, JournalAwayError
from holdfast.daemon.master.journal.journal_store import JournalStore, back_up
from holdfast.daemon.master.operator_commands import OperatorCommands
from holdfast.daemon.process.exit_codes import ExitCode
from holdfast.membership.master.state.journal import (
    JournalRecord,
    RoundNumbered,
    RunCreated,
    RunFounded,
    TermStarted,
)
from holdfast.protocol import messages as m
from holdfast.protocol.errors import UserError

PEER = "ab" * 16
FOUNDED = RunFounded(
    m.ModelLayout((m.TensorSpec("w", (4, 4), "float32", "parameter"),)),
    (m.FragmentSize(16, 16, 0),),
    b"L" * 32,
    (m.FragmentHead(0, 0, b"r" * 32),),
)
RECORDS: list[JournalRecord] = [
    RunCreated("cd" * 16, "[run]\n"),
    TermStarted(1),
    FOUNDED,
    *(RoundNumbered(number) for number in range(1, 150)),
]
DAMAGES = 25


def write_authority(state: Path) -> None:
    (state / "authority").mkdir(parents=True)
    for name in ("authority.key", "authority.pem"):
        (state / "authority" / name).write_bytes(b"secret")


def write(folder: Path, *, log: bool = True) -> Path:
    """Make the journal of a killed master, with half of it or nothing in the write-ahead log."""
    source = folder / "source"
    write_authority(source)
    store = JournalStore(source / "journal.sqlite")
    store._db.execute("pragma synchronous = off")  # for speed
    for record in RECORDS:
        store.append(record)
        if record == RoundNumbered(100):
            store._db.execute("pragma wal_checkpoint(truncate)")
    store.admit(PEER, GrantRow(m.Role.SPARE, False, "alder"))
    if not log:
        store._db.execute("pragma wal_checkpoint(truncate)")
    state = folder / "state"
    shutil.copytree(source, state)
    store.close()
    return state / "journal.sqlite"


def test_an_open_journal_keeps_no_record_in_memory(tmp_path: Path) -> None:
    def count() -> int:
        return sum(type(each) is RoundNumbered for each in gc.get_objects())

    path, before = write(tmp_path), count()
    store = JournalStore(path)
    assert count() == before
    store.close()


@pytest.mark.fault(
    "the journal's end is damaged or lost",
    "checksums, the number of the last record",
    "cut at the last whole record, loudly; what a majority holds is adopted",
)
@pytest.mark.parametrize("where", ["", "-wal"])
@pytest.mark.parametrize("how", ["flip", "truncate", "page"])
def test_whatever_is_damaged_the_beginning_is_left_and_it_is_said(
    tmp_path: Path, where: str, how: str
) -> None:
    whole = write(tmp_path, log=bool(where))
    rng = random.Random(f"{where}{how}")
    found = {"cut": 0, "whole": 0, "refused": 0}
    for case in range(DAMAGES):
        state = tmp_path / f"case{case}"
        shutil.copytree(whole.parent, state)
        path = state / "journal.sqlite"
        damaged = Path(f"{path}{where}")
        content = bytearray(damaged.read_bytes())
        at = rng.randrange(len(content))
        if how == "flip":
            content[at] ^= 1 << rng.randrange(8)
        elif how == "truncate":
            del content[at:]
        else:
            start = at // 4096 * 4096
            content[start : start + 4096] = rng.randbytes(len(content[start : start + 4096]))
        damaged.write_bytes(content)
        try:
            store = JournalStore(path)
        except UserError as error:
            assert error.exit_code == ExitCode.CONFIG  # noqa: PT017
            found["refused"] += 1
            continue
        records = store.records()
        assert records == RECORDS[: len(records)], "not the beginning of what was written"
        if len(records) == len(RECORDS):
            found["whole"] += 1
        else:
            found["cut"] += 1
            assert store.cut is not None, "records were skipped in silence"
            assert store.cut.count == len(RECORDS) - len(records)
            assert store.cut.copy.exists()
            assert f"{store.cut.count} records" in str(store.cut)
            store.append(TermStarted(7))
            store.close()
            store = JournalStore(path)  # from here on it is a journal like any other
            assert store.cut is None
            assert store.records() == [*records, TermStarted(7)]
        store.close()
        shutil.rmtree(state)
    assert found["cut"] > DAMAGES // 10, found


@pytest.mark.parametrize(
    "damage",
    [
        "update records set body = substr(body, 1, 5) where id = 50",
        "update records set body = cast('text' as text) where id = 50",
        "update records set kind = 'RunFinished' where id = 50",
        "update records set chk = x'00' where id = 50",
        "delete from records where id = 50",
        "update records set id = 1000 where id = 50",
    ],
)
def test_a_changed_record_cuts_the_journal(tmp_path: Path, damage: str) -> None:
    path = write(tmp_path)
    with sqlite3.connect(path) as db:
        db.execute(damage)
    db.close()
    store = JournalStore(path)
    assert store.records() == RECORDS[:49]
    assert store.cut is not None
    assert store.grant(PEER) == GrantRow(m.Role.SPARE, False, "alder")
    store.close()


def test_a_journal_without_the_runs_beginning_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path)
    with sqlite3.connect(path) as db:
        db.execute("update records set body = x'00' where id = 3")
    db.close()
    with pytest.raises(UserError, match="cannot be rebuilt") as raised:
        JournalStore(path)
    assert "backup" in raised.value.hint


def test_a_crash_between_the_old_journal_and_the_new_one_costs_nothing(tmp_path: Path) -> None:
    path = write(tmp_path)
    other = tmp_path / "other"
    back_up(path.parent, other)
    shutil.copy(other / "journal.sqlite", f"{path}.new")  # ready, and not in its place yet
    store = JournalStore(path)
    assert store.records() == RECORDS
    assert not Path(f"{path}.new").exists()
    store.close()


def fill(store: JournalStore) -> None:
    for number in range(10_000):
        store.append(RoundNumbered(1_000 + number))


@pytest.mark.fault("the journal's disk is full")
def test_a_full_disk_leaves_the_journal_as_it_was(tmp_path: Path) -> None:
    path = write(tmp_path)
    store = JournalStore(path)
    pages = store._db.execute("pragma page_count").fetchone()[0]
    store._db.execute(f"pragma max_page_count = {pages}")
    with pytest.raises(JournalAwayError, match="full"):
        fill(store)
    written = store.records()[len(RECORDS) :]
    assert written == [RoundNumbered(1_000 + number) for number in range(len(written))]
    store._db.execute("pragma max_page_count = 100000")
    store.append(RoundNumbered(5_000))
    store.close()
    again = JournalStore(path)
    assert again.cut is None
    assert again.records()[-1] == RoundNumbered(5_000)
    again.close()


@pytest.mark.fault("the journal's disk is full")
async def test_a_withdrawal_that_cannot_be_stored_is_refused_with_the_reason(
    tmp_path: Path,
) -> None:
    store = JournalStore(write(tmp_path))
    store.make_token(m.Role.SPARE, founder=False, uses=1, hours=1.0)
    store._db.execute("pragma query_only = on")
    commands = OperatorCommands(cast("Any", Mock()), store, cast("Any", None), lambda: None)
    with pytest.raises(UserError, match="the withdrawal cannot be stored") as caught:
        await commands.actions()["withdraw"]({"id": str(store.invites()[0]["id"])})
    assert "free some space" in caught.value.hint
    assert store.invites()[0]["withdrawn"] == 0
    store.close()


def test_a_copy_of_a_live_journal_is_whole_and_can_be_repeated(tmp_path: Path) -> None:
    state = tmp_path / "state"
    write_authority(state)
    live = JournalStore(state / "journal.sqlite")
    for record in RECORDS[:50]:
        live.append(record)
    assert back_up(state, tmp_path / "copy") == 50
    live.append(RECORDS[50])
    assert back_up(state, tmp_path / "copy") == 51
    copy = JournalStore(tmp_path / "copy" / "journal.sqlite")
    assert copy.records() == RECORDS[:51]
    assert copy.cut is None
    key = tmp_path / "copy" / "authority" / "authority.key"
    assert key.read_bytes() == b"secret"
    assert key.stat().st_mode & 0o077 == 0
    copy.close()
    live.close()
    with pytest.raises(UserError, match="no run"):
        back_up(tmp_path / "nowhere", tmp_path / "copy")
