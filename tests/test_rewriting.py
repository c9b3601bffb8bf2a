"""Workers of a run rewrite the assertions of test files once, each its share."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from _pytest.assertion import rewrite

from tests.rewriting import rewrite_share


def test_each_worker_rewrites_its_share_as_pytest_reads_it(
    tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = [tmp_path / name for name in ("test_a.py", "test_b.py", "test_c.py")]
    for path in files:
        path.write_text("def test_it() -> None:\n    assert 1 + 1 == 2\n")
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    monkeypatch.setattr(sys, "pycache_prefix", None)
    monkeypatch.setattr(request.config, "args", [str(tmp_path), f"{files[0]}::test_it"])
    folder = rewrite.get_cache_dir(files[0])
    kept = [folder / (path.stem + rewrite.PYC_TAIL) for path in files]
    shares = []
    for worker in range(2):
        given = {"workerid": f"gw{worker}", "workercount": 2}
        monkeypatch.setattr(request.config, "workerinput", given, raising=False)
        rewrite_share(request.config)
        shares.append([path.exists() for path in kept])
    assert shares == [[True, False, True], [True, True, True]]
    for path, pyc in zip(files, kept, strict=True):
        code = rewrite._read_pyc(path, pyc)
        assert code is not None
        assert "@pytest_ar" in code.co_names  # what a rewritten assertion calls
