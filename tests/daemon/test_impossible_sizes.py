"""A journal with impossible fragment sizes: its master ends with a clear error."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.daemon.process.exit_codes import ExitCode
from holdfast.membership.master.state.journal import RunFounded
from holdfast.protocol.errors import UserError
from holdfast.protocol.messages import FragmentHead, FragmentSize, ModelLayout, TensorSpec
from tests.daemon.loopback import a_master

SPEC = '[run]\nname = "first"\n[diloco]\nfragments = 1\n'


def found(folder: Path, value_count: int) -> None:
    """Write the record that an older version wrote."""
    master = a_master(folder, SPEC)
    layout = ModelLayout((TensorSpec("w", (4, 4), "float32", "parameter"),))
    sizes = (FragmentSize(value_count, 16, 0),)
    master.store.append(
        RunFounded(layout, sizes, b"L" * 32, (FragmentHead(0, 0, b"r" * 32),)),
    )
    master.store.close()


def test_sizes_that_an_older_version_recorded_are_named(tmp_path: Path) -> None:
    found(tmp_path, 2**50)
    with pytest.raises(
        UserError, match="founds the run on impossible sizes: its fragments"
    ) as raised:
        a_master(tmp_path, SPEC)
    assert raised.value.exit_code == ExitCode.CONFIG
    assert "--state" in raised.value.hint


def test_a_journal_with_the_layouts_own_sizes_is_taken_up(tmp_path: Path) -> None:
    found(tmp_path, 16)
    assert a_master(tmp_path, SPEC).coordinator.context.history.founded
