"""A state that is too large for the machine is refused before a byte of it is fetched."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio

from holdfast.daemon.process import memory_check
from holdfast.daemon.process.exit_codes import ExitCode
from holdfast.daemon.process.memory_check import (
    MEMORY_LEFT_BYTES,
    check_room,
    machine_bytes,
    state_bytes,
)
from holdfast.protocol.errors import UserError
from holdfast.protocol.messages import FragmentSize
from holdfast.simulation.drifting_trainer import small_layout
from tests.swarm.test_swarm import a_swarm

GIB = 2**30
SIZES = tuple(FragmentSize(GIB // part, GIB // part, 2) for part in (4, 16, 8))


def test_what_a_state_takes() -> None:
    # 3.5 GiB of values and momentum, 1.75 of posted values, and the two larger fragments once more.
    assert state_bytes(SIZES) == pytest.approx(8.25 * GIB, rel=1e-6)
    assert state_bytes(()) < 2**20


def test_it_must_leave_something_to_the_others() -> None:
    needed = state_bytes(SIZES)
    check_room(SIZES, None)
    check_room(SIZES, needed + MEMORY_LEFT_BYTES)
    with pytest.raises(UserError) as caught:
        check_room(SIZES, needed + MEMORY_LEFT_BYTES - 1)
    assert caught.value.exit_code == ExitCode.MEMORY
    assert "8.3 GiB here, and of 9.3 GiB 1.0 GiB must stay free" in str(caught.value)
    assert "nothing was fetched" in caught.value.hint


def test_a_containers_limit_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(memory_check, "limit_files", lambda: [tmp_path / "none", limit])
    whole = machine_bytes()
    assert whole > 2**28
    limit.write_text("max\n")
    assert machine_bytes() == whole
    limit.write_text("104857600\n")
    assert machine_bytes() == 100 * 2**20


@pytest.mark.fault(
    "a state is larger than a joiner's memory",
    "its sizes, before the copy",
    "refused with what it takes; nothing is fetched",
)
async def test_a_joiner_without_the_memory_ends_and_fetches_nothing() -> None:
    async with a_swarm("abc", layout=small_layout((5_000,))) as swarm:
        late = swarm.add_peer("late", founder=False)
        late.service.config.memory_bytes = MEMORY_LEFT_BYTES + 5_000
        await swarm.until(lambda: late.ended is not None)
        assert isinstance(late.ended, UserError)
        assert "does not fit into this machine's memory" in str(late.ended)
        assert (late.service.state_service.received_bytes, late.service.state) == (0, None)
        await trio.sleep(30)
        assert swarm.in_sync("a")
