"""The assertions of test files are rewritten once for all workers of a run.

pytest rewrites each file that it imports, which takes as long as all the rest of a collection, and
keeps the result beside the file. Workers that start in a fresh clone import the same files at the
same time, so each would rewrite all of them. Instead each first rewrites its share.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from _pytest.assertion import rewrite


def share(config: pytest.Config) -> list[Path]:
    """Return the test files that a worker is to rewrite, of those that are asked for."""
    given: dict[str, str | int] = getattr(config, "workerinput", {})
    if not given or sys.dont_write_bytecode:
        return []
    number = int(str(given["workerid"]).removeprefix("gw"))
    return sorted(set(_asked_for(config)))[number :: int(given["workercount"])]


def _asked_for(config: pytest.Config) -> Iterator[Path]:
    for argument in config.args:
        path = config.invocation_params.dir / argument.partition("::")[0]
        yield from path.rglob("test_*.py") if path.is_dir() else [path]


def rewrite_share(config: pytest.Config) -> None:
    """Rewrite a worker's share of test files, but for those that are kept already."""
    state = config.stash[rewrite.assertstate_key]
    for path in share(config):
        folder = rewrite.get_cache_dir(path)
        kept = folder / (path.name.removesuffix(".py") + rewrite.PYC_TAIL)
        if rewrite._read_pyc(path, kept, state.trace) is None and rewrite.try_makedirs(folder):
            source_hash, code = rewrite._rewrite_test(path, config)
            rewrite._write_pyc(state, code, source_hash, kept)
