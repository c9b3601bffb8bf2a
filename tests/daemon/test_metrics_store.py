"""A run's history on disk: restarts, merging of old points, and damaged files."""

from __future__ import annotations

import json
import random
import sqlite3
from pathlib import Path

import pytest

from holdfast.daemon import curves
from holdfast.daemon import metrics_store as module
from holdfast.daemon.curves import COLUMNS, Point, as_columns
from holdfast.daemon.metrics_store import HISTORY_FILE, MetricsStore, PastEvent
from tests.daemon.kept_history import Kept, kept

__all__ = ["kept"]


def point(at: float, loss: float | None = None, **more: object) -> Point:
    given = {"step": int(at), "loss": loss, "loss_min": loss, "loss_max": loss, **more}
    return Point(at, **given)  # type: ignore[arg-type]


def event(number: int, kind: str = "join", text: str = "", name: str = "") -> PastEvent:
    return PastEvent(number, 1e9 + number, kind, "ab" * 16, name, text or f"event {number}")


def column(history: MetricsStore, name: str, count: int = 600, *span: float) -> list[object]:
    from_at, to_at = span or (None, None)
    return as_columns(history.points(count, from_at, to_at))[name]


# ---------------------------------------------------------------- what comes back


def test_sums_of_what_members_claim_are_kept_however_large(kept: Kept) -> None:
    """Two members that claim 2**63 - 1 sent bytes each must not end the master's thread."""
    most = 2**63 - 1
    kept.history.write([point(1e9, 1.0, sent_bytes=2 * most, saved_bytes=-2 * most)])
    last = kept.history.last_point()
    assert last is not None
    assert (last.sent_bytes, last.saved_bytes) == (most, -most)
    assert kept.warnings == []


def test_rows_survive_a_restart(kept: Kept) -> None:
    points = [point(1e9 + i, 3.0 - i / 100, members=4, sent_bytes=i) for i in range(50)]
    rounds = [(i, json.dumps({"round": i}).encode()) for i in range(1, 31)]
    kept.history.write(points, rounds, [event(i) for i in range(1, 41)])
    kept.reopen()
    history = kept.history
    assert history.last_point() == points[-1]
    assert history.last_event_id() == 40
    assert column(history, "loss") == [point.loss for point in points]
    assert column(history, "at", 600, 1e9 + 10, 1e9 + 12) == [1e9 + 10, 1e9 + 11, 1e9 + 12]
    assert [json.loads(row)["round"] for row in history.rounds(3, None)] == [30, 29, 28]
    assert [json.loads(row)["round"] for row in history.rounds(3, 28)] == [27, 26, 25]
    assert history.events(2, None) == [event(40), event(39)]
    assert history.events(2, 39) == [event(38), event(37)]
    assert kept.warnings == []


def test_an_empty_history_has_no_rows(kept: Kept) -> None:
    history = kept.history
    assert (history.last_point(), history.last_event_id()) == (None, 0)
    assert (history.points(10, None, None), history.rounds(10, None)) == ([], [])
    assert history.events(10, None) == []


def test_events_are_found_by_kind_and_by_text(kept: Kept) -> None:
    kept.history.write(
        events=[
            event(1, "join", "alder joined", "alder"),
            event(2, "leave", "it is gone: 100% of its disk is full", "Alder"),
            event(3, "round", "round 100_000 was aborted"),
        ]
    )

    def found(*kinds: str, text: str = "") -> list[int]:
        return [each.id for each in kept.history.events(10, None, kinds, text)]

    assert found("join", "leave") == [2, 1]
    assert found(text="ALDER") == [2, 1], "also by the name of who it is about"
    assert found("join", text="alder") == [1]
    assert (found(text="100%"), found(text="100_"), found(text="\\")) == ([2], [3], [])


# ---------------------------------------------------------------- thinning


def test_a_thinned_curve_keeps_its_extremes(kept: Kept) -> None:
    losses = [2.0] * 5_000
    losses[1_234], losses[3_210] = 9.0, 0.5
    kept.history.write([point(1e9 + i, loss) for i, loss in enumerate(losses)])
    for count in (10, 100, 600):
        rows = kept.history.points(count, None, None)
        assert len(rows) <= count
        columns = as_columns(rows)
        assert max(columns["loss_max"]) == 9.0
        assert min(columns["loss_min"]) == 0.5
        assert columns["at"] == sorted(columns["at"])
        assert columns["step"][-1] == int(1e9 + 4_999), "the newest counts as it is"


def test_a_year_is_a_bounded_number_of_rows(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(curves, "LEVEL_POINTS", 32)
    monkeypatch.setattr(curves, "MERGED_SHARE", 4)
    monkeypatch.setattr(curves, "LEVELS", 6)
    losses = [float(i % 100) for i in range(4_000)]
    for start in range(0, 4_000, 10):
        some = range(start, start + 10)
        kept.history.write([point(1e9 + i, losses[i], tokens_per_s=7.0) for i in some])
    columns = as_columns(kept.history.points(10_000, None, None))
    levels = kept.history._db.execute("select level, count(*) from points group by level")
    counts = dict(levels.fetchall())
    assert set(counts) == set(range(6))
    assert max(counts.values()) < 32 + 8 + 10
    assert columns["at"] == sorted(columns["at"])
    young = [float(at) for at in columns["at"][-30:]]
    assert young == [1e9 + i for i in range(3_970, 4_000)], "the newest are all there"
    old = columns["at"][0]
    assert 1e9 + 1_500 < old < 1e9 + 3_000, "the oldest of all are forgotten"
    assert set(columns["tokens_per_s"]) == {7.0}
    spreads = [
        high - low for low, high in zip(columns["loss_min"], columns["loss_max"], strict=True)
    ]
    assert set(spreads[:20]) <= {31.0, 99.0}, "each of the oldest stands for 32"
    assert 99.0 in spreads[:20]
    assert set(spreads[-30:]) == {0.0}


def test_time_without_a_master_is_a_gap(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(curves, "LEVEL_POINTS", 64)
    for began, loss in ((0, 1.0), (5_000, 2.0)):
        for start in range(began, began + 400, 20):
            kept.history.write([point(1e9 + i, loss) for i in range(start, start + 20)])
    for count in (20, 1_000):
        rows = kept.history.points(count, None, None)
        (hole,) = [at for at, row in enumerate(rows) if row[1:] == (None,) * (len(COLUMNS) - 1)]
        losses = [row[COLUMNS.index("loss")] for row in rows]
        assert set(losses[:hole]) == {1.0}
        assert set(losses[hole + 1 :]) == {2.0}
        assert len(rows) <= count
    # A short one is no hole.
    kept.history.write([point(1e9 + 5_410, 2.0)])
    assert len([row for row in kept.history.points(20, None, None) if row[1] is None]) == 1


def test_rounds_and_events_are_bounded(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ROUNDS_MAX", 100)
    monkeypatch.setattr(module, "EVENTS_MAX", 50)
    for number in range(1, 401):
        kept.history.write(rounds=[(number, b"{}")], events=[event(number)])
    kept_rounds = kept.count("rounds")
    assert 90 <= kept_rounds <= 100
    assert len(kept.history.rounds(1_000, None)) == kept_rounds
    assert [each.id for each in kept.history.events(1_000, None)] == list(range(400, 350, -1))


def test_rounds_of_many_members_are_bounded_by_their_bytes(
    kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "ROUNDS_BYTES_MAX", 20_000)
    for number in range(1, 60):
        body = json.dumps([hash((number, i)) for i in range(200)]).encode()
        kept.history.write(rounds=[(number, body)])
    total = kept.history._db.execute("select sum(length(body)) from rounds").fetchone()[0]
    assert 10_000 < total <= 20_000
    assert kept.history.rounds(1, None), "the newest stay"


# ---------------------------------------------------------------- what goes wrong


@pytest.mark.fault(
    "the history is damaged",
    "SQLite's check at the start, its errors later",
    "set aside; a new one begins, an event says so",
)
def test_a_file_that_is_none_is_set_aside(tmp_path: Path) -> None:
    (tmp_path / HISTORY_FILE).write_bytes(b"no database at all, " * 500)
    kept = Kept(tmp_path)
    kept.history.write([point(1e9, 1.0)])
    assert column(kept.history, "loss") == [1.0]
    (warning,) = kept.warnings
    assert f"now {tmp_path / HISTORY_FILE}.damaged-1" in warning
    assert (tmp_path / f"{HISTORY_FILE}.damaged-1").read_bytes().startswith(b"no database")


@pytest.mark.fault("the history is damaged")
def test_pages_that_rot_while_it_is_open_cost_the_past_only(kept: Kept) -> None:
    kept.history.write(
        [point(1e9 + i, 1.0) for i in range(3_000)], [(i, b"{}") for i in range(500)]
    )
    kept.history._db.execute("pragma wal_checkpoint(truncate)")
    kept.history.close()
    content = bytearray(kept.path.read_bytes())
    for page in range(1, len(content) // 4096):
        content[page * 4096 : (page + 1) * 4096] = b"\x5a" * 4096
    # As if the disk did this behind our back: the check at the start would find it.
    kept.history._db = module._connect(kept.path)
    kept.path.write_bytes(content)
    assert kept.history.points(100, None, None) == []
    assert len(kept.warnings) == 1
    kept.history.write([point(2e9, 2.0)])
    assert column(kept.history, "loss") == [2.0]
    kept.reopen()
    assert column(kept.history, "loss") == [2.0]


def test_damage_is_found_at_the_start(kept: Kept) -> None:
    kept.history.write([point(1e9 + i, 1.0) for i in range(3_000)])
    kept.history._db.execute("pragma wal_checkpoint(truncate)")
    kept.history.close()
    content = bytearray(kept.path.read_bytes())
    content[8 * 4096 : 9 * 4096] = b"\x5a" * 4096
    kept.path.write_bytes(content)
    kept.reopen()
    assert "damaged" in kept.warnings[0]
    assert kept.history.last_point() is None


def test_a_history_of_another_version_is_renamed_unchanged(kept: Kept) -> None:
    kept.history.close()
    with sqlite3.connect(kept.path) as db:
        db.execute("pragma user_version = 99")
    db.close()
    kept.reopen()
    assert "version 99" in kept.warnings[0]


@pytest.mark.fault(
    "history cannot be written",
    "their errors",
    "said once; the run goes on, and once there is room the rounds come from the journal",
)
def test_a_full_disk_leaves_a_hole_and_is_said_once(kept: Kept) -> None:
    kept.history.write([point(1e9, 1.0)], [(1, b"{}")])
    pages = kept.history._db.execute("pragma page_count").fetchone()[0]
    kept.history._db.execute(f"pragma max_page_count = {pages}")
    for number in range(5):
        # What does not fit is not kept in part.
        kept.history.write(
            [point(1e9 + 1, 2.0)], [(2 + number, random.Random(number).randbytes(100_000))]
        )
    assert column(kept.history, "loss") == [1.0]
    assert len(kept.history.rounds(10, None)) == 1
    assert len(kept.warnings) == 1
    assert "full" in kept.warnings[0]
    kept.history._db.execute("pragma max_page_count = 100000")
    kept.history.write([point(1e9 + 9, 3.0)])
    assert column(kept.history, "loss") == [1.0, 3.0]
