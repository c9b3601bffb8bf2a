"""A run's history on disk, for its tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.daemon.metrics_store import HISTORY_FILE, MetricsStore


class Kept:
    """A history in a folder, and its warnings."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / HISTORY_FILE
        self.warnings: list[str] = []
        self.history = MetricsStore(self.path, self.warnings.append)

    def reopen(self) -> None:
        self.history.close()
        self.history = MetricsStore(self.path, self.warnings.append)

    def count(self, table: str) -> int:
        count: int = self.history._db.execute(f"select count(*) from {table}").fetchone()[0]
        return count


@pytest.fixture
def kept(tmp_path: Path) -> Kept:
    return Kept(tmp_path)
