"""The journal on disk: damaged files, and the tokens of invites. What all journals promise:
``test_journal_contract``.
"""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from holdfast.daemon.master.journal.journal_base import TokenError
from holdfast.daemon.master.journal.journal_store import JournalStore
from holdfast.daemon.process.exit_codes import ExitCode
from holdfast.membership.master.state.journal import (
    JournalRecord,
    PeerAdmitted,
    RootKnown,
    RoundCommitted,
    RunCreated,
    RunFinished,
    TermStarted,
)
from holdfast.protocol.errors import UserError
from holdfast.protocol.messages import Commit, Contributor, FragmentHead, Role

PEER = "ab" * 16
RECORDS: list[JournalRecord] = [
    RunCreated("cd" * 16, "[run]\nname = 'é'\n"),
    TermStarted(1),
    PeerAdmitted(PEER, "alder", 1, 2**62 - 1),
    RoundCommitted(Commit(1, 2, 0, 0, 100, (Contributor(PEER, 640, 0.25),), b"d" * 32)),
    RootKnown(FragmentHead(0, 1, b"r" * 32)),
    RunFinished(1),
]


class Clock:
    def __init__(self) -> None:
        self.now_s = 1_000_000.0

    def __call__(self) -> float:
        return self.now_s


def test_only_its_owner_reads_a_journal_whatever_the_umask(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    before = os.umask(0o022)
    try:
        store = JournalStore(path)
        store.append(RunCreated("run", ""))
        modes = {each.name: each.stat().st_mode & 0o777 for each in tmp_path.iterdir()}
        assert set(modes.values()) == {0o600}, modes
        assert f"{path.name}-wal" in modes
        store.close()
        path.chmod(0o644)  # as an older version left it
        JournalStore(path).close()
        assert path.stat().st_mode & 0o777 == 0o600
    finally:
        os.umask(before)


def test_a_record_is_synced_to_disk_before_append_returns(tmp_path: Path) -> None:
    store = JournalStore(tmp_path / "journal.sqlite")
    assert store._db.execute("pragma synchronous").fetchone()[0] == 2, "full: fsync per commit"
    assert store._db.execute("pragma journal_mode").fetchone()[0] == "wal"
    assert not store._db.in_transaction
    store.append(TermStarted(1))
    assert not store._db.in_transaction
    store.close()


def test_a_file_that_is_no_journal_is_refused_with_its_path(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    path.write_bytes(b"not a database, but long enough to be looked at" * 100)
    with pytest.raises(UserError, match=str(path)) as raised:
        JournalStore(path)
    assert raised.value.exit_code == ExitCode.CONFIG
    with pytest.raises(UserError, match="journal"):
        JournalStore(tmp_path)


@pytest.mark.parametrize("version", [4, 99])
def test_a_journal_of_another_version_is_refused(tmp_path: Path, version: int) -> None:
    path = tmp_path / "journal.sqlite"
    JournalStore(path).close()
    with sqlite3.connect(path) as db:
        db.execute(f"pragma user_version = {version}")
    db.close()
    with pytest.raises(UserError, match="another version of holdfast"):
        JournalStore(path)


# ---------------------------------------------------------------- invites


def test_a_token_expires_at_its_time() -> None:
    clock = Clock()
    store = JournalStore(":memory:", now=clock)
    token, expires_s = store.make_token(Role.CONTRIBUTOR, founder=False, uses=9, hours=0.5)
    assert expires_s == clock.now_s + 1800
    clock.now_s = expires_s - 1
    store.redeem(token, "b" * 32, "alder")
    clock.now_s = expires_s + 1
    with pytest.raises(TokenError, match="expired"):
        store.redeem(token, "c" * 32, "alder")


def test_a_withdrawn_token_admits_nobody_and_others_still_do() -> None:
    store = JournalStore(":memory:")
    tokens = [
        store.make_token(Role.CONTRIBUTOR, founder=False, uses=5, hours=1)[0] for _ in range(2)
    ]
    listed = [invite["id"] for invite in store.invites()]
    store.redeem(tokens[0], "d" * 32, "alder")
    assert not store.withdraw("nonsense")
    assert not store.withdraw("")
    assert store.withdraw(str(listed[0]).lower())
    withdrawn = [invite["withdrawn"] for invite in store.invites()]
    assert withdrawn == [1, 0]
    with pytest.raises(TokenError, match="withdrawn"):
        store.redeem(tokens[0], "e" * 32, "alder")
    store.redeem(tokens[1], "f" * 32, "alder")


def test_no_other_string_is_a_token() -> None:
    store = JournalStore(":memory:")
    token, _ = store.make_token(Role.CONTRIBUTOR, founder=False, uses=1, hours=1)

    @given(st.text(max_size=60))
    @example(token[:-1])
    def refused(text: str) -> None:
        with pytest.raises(TokenError, match="not known"):
            store.redeem(text, PEER, "alder")

    refused()
    store.redeem(token, PEER, "alder")
    store.close()


def test_the_token_itself_is_nowhere_on_disk(tmp_path: Path) -> None:
    store = JournalStore(tmp_path / "journal.sqlite")
    token, _ = store.make_token(Role.CONTRIBUTOR, founder=True, uses=3, hours=1)
    store.redeem(token, PEER, "alder")
    assert token not in repr(store.invites())
    for each in tmp_path.iterdir():  # the file and its write-ahead log
        assert token.encode() not in each.read_bytes(), each
    store.close()
    assert token.encode() not in (tmp_path / "journal.sqlite").read_bytes()
