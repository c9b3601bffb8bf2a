"""Partial copies on disk: found again after any end, and used only if their digest is right."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import trio
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.checkpoint import blocks
from holdfast.checkpoint.joiner import Joiner
from holdfast.checkpoint.partial_copy import FragmentPartialCopy, PartialCopies
from holdfast.checkpoint.state_transfer import FetchReport
from holdfast.simulation.drifting_trainer import small_layout
from tests.checkpoint.test_shared_state import content
from tests.checkpoint.test_state_transfer import (
    BLOCK_BYTES,
    BLOCK_COUNT,
    STATE_BYTES,
    Faults,
    a_world,
    make_state,
    trained,
)
from tests.swarm.test_swarm import a_swarm

BLOCKS = [bytes([index]) * (20 + index) for index in range(5)]
DIGESTS = [blake3(block).digest() for block in BLOCKS]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "partial" / "0.blocks"


def filled(path: Path) -> None:
    kept = FragmentPartialCopy(path)
    for digest, block in zip(DIGESTS, BLOCKS, strict=True):
        kept.put(digest, block)
    kept.close()


def found(path: Path) -> list[int]:
    kept = FragmentPartialCopy(path)
    there = [kept.find(digest) for digest in DIGESTS]
    kept.close()
    assert all(data in (None, block) for data, block in zip(there, BLOCKS, strict=True))
    return [index for index, data in enumerate(there) if data is not None]


def test_what_was_put_is_found_by_the_next_process(path: Path) -> None:
    filled(path)
    assert found(path) == [0, 1, 2, 3, 4]
    filled(path)  # known blocks are not written twice
    assert path.stat().st_size == sum(36 + len(block) for block in BLOCKS)
    assert path.stat().st_mode & 0o077 == path.parent.stat().st_mode & 0o077 == 0


def test_no_more_is_kept_than_its_machines_owner_gives(tmp_path: Path) -> None:
    """The limit is for all fragments together, with the blocks that an earlier process left."""
    limit_bytes = 2 * 36 + len(BLOCKS[0]) + len(BLOCKS[1])
    copies = PartialCopies(tmp_path / "partial", limit_bytes=limit_bytes)
    copies.fragment(0).put(DIGESTS[0], BLOCKS[0])
    copies.fragment(1).put(DIGESTS[1], BLOCKS[1])
    copies.fragment(1).put(DIGESTS[2], BLOCKS[2])
    copies.close()
    sizes = [path.stat().st_size for path in (tmp_path / "partial").iterdir()]
    assert sum(sizes) == limit_bytes
    again = PartialCopies(tmp_path / "partial", limit_bytes=limit_bytes)
    assert again.fragment(0).find(DIGESTS[0]) == BLOCKS[0]
    assert again.fragment(1).find(DIGESTS[2]) is None
    again.fragment(0).put(DIGESTS[3], BLOCKS[3])
    assert again.fragment(0).find(DIGESTS[3]) is None


def test_a_file_that_was_cut_at_any_byte_gives_the_records_before(tmp_path: Path) -> None:
    path = tmp_path / "0.blocks"
    filled(path)
    whole = path.read_bytes()
    ends = [sum(36 + len(block) for block in BLOCKS[:count]) for count in range(6)]
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        assert found(path) == list(range(sum(end <= length for end in ends) - 1))
        kept = FragmentPartialCopy(path)  # and it goes on behind them
        kept.put(DIGESTS[4], BLOCKS[4])
        kept.close()
        assert 4 in found(path)


@pytest.mark.fault("that disk is full, or lies")
@settings(max_examples=60, deadline=None)
@given(at=st.integers(0, sum(36 + len(block) for block in BLOCKS) - 1), bit=st.integers(0, 7))
def test_a_bit_changed_anywhere_is_a_block_less_and_never_another_one(
    at: int, bit: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("copies") / "0.blocks"
    filled(path)
    data = bytearray(path.read_bytes())
    data[at] ^= 1 << bit
    path.write_bytes(data)
    assert len(found(path)) < 5


def test_what_is_mostly_of_another_version_is_dropped(path: Path) -> None:
    filled(path)
    kept = FragmentPartialCopy(path)
    kept.drop_unless(set(DIGESTS[2:]))
    assert kept.find(DIGESTS[0]), "half of it is of use"
    kept.drop_unless(set(DIGESTS[4:]))
    assert kept.find(DIGESTS[4]) is None
    assert path.stat().st_size == 0
    kept.put(DIGESTS[3], BLOCKS[3])
    kept.drop_unless({DIGESTS[3]})
    assert kept.find(DIGESTS[3])
    kept.close()


@pytest.mark.fault(
    "that disk is full, or lies", "its errors, digests", "the copy goes on without it"
)
def test_a_disk_that_fails_ends_the_keeping_only(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kept = FragmentPartialCopy(path)
    kept.put(DIGESTS[0], BLOCKS[0])
    with mock.patch("os.pwritev", side_effect=OSError(28, "No space left")):
        kept.put(DIGESTS[1], BLOCKS[1])
    kept.put(DIGESTS[2], BLOCKS[2])
    assert [kept.find(digest) for digest in DIGESTS] == [None] * 5
    assert "No space left" in caplog.text
    path.parent.chmod(0o700)
    nowhere = PartialCopies(path / "under a file")
    nowhere.fragment(0).put(DIGESTS[0], BLOCKS[0])
    assert nowhere.fragment(0).find(DIGESTS[0]) is None
    nowhere.clear()


# ---------------------------------------------------------------- copies


@pytest.fixture
def small_blocks() -> Iterator[None]:
    with mock.patch.object(blocks, "BLOCK_BYTES", BLOCK_BYTES):
        yield


async def fetch(folder: Path, *, frames: int, valid: bool = False) -> FetchReport | None:
    """A process that copies with what is on disk; None: its donor gave no more, and it ends."""
    source, target = trained(), trained(seed=9) if valid else make_state()
    report = None
    async with a_world(target) as world:
        world.joiner = joiner = Joiner(
            target, world.hub, world.network, partial_copies=PartialCopies(folder, after_s=0.0)
        )
        await world.add_donor(1, source, Faults(frames_max=frames))
        with trio.move_on_after(5):
            report = await world.fetch(source.heads()[0])
            assert content(target) == content(source)
            await joiner.clear_partial()
    return report


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("valid", [False, True])
async def test_the_next_process_fetches_what_is_not_on_disk(tmp_path: Path, valid: bool) -> None:
    folder = tmp_path / "partial"
    assert await fetch(folder, frames=20, valid=valid) is None
    assert len(list(folder.iterdir())) == 1
    assert await fetch(folder, frames=10, valid=valid) is None
    report = await fetch(folder, frames=BLOCK_COUNT, valid=valid)
    assert report is not None
    # 30 are on disk, one of them the short one at the values' end.
    assert report.received_bytes == STATE_BYTES - (29 * BLOCK_BYTES + 12)
    assert not folder.exists(), "it is whole: nothing is left on disk"


@pytest.mark.fault(
    "a machine loses its power in the middle of a copy",
    "its disk",
    "it fetches what is not there, and believes no byte unchecked",
)
async def test_a_machine_that_loses_its_power_in_a_copy_goes_on_where_it_was(
    tmp_path: Path,
) -> None:
    with mock.patch.object(blocks, "BLOCK_BYTES", 4_096):
        async with a_swarm("abc", layout=small_layout((40_000,), counters=1)) as swarm:
            await swarm.come_to_rest("abc")
            for name in "abc":
                swarm.world.link(name, "late", delay_s=0.02, bytes_per_s=3_000.0)
            late = swarm.add_peer("late", founder=False)
            late.service.config.partial = tmp_path / "partial"
            await swarm.until(lambda: late.service.state_service.received_bytes > 200_000)
            swarm.crash("late")
            again = swarm.restart("late")
            again.service.config.partial = tmp_path / "partial"
            await swarm.until(lambda: swarm.in_sync("late"))
            # What came in the first seconds is not kept: 9,000 bytes each.
            assert again.service.state_service.received_bytes < 320_008 - 200_000 + 11 * 9_000
            await trio.sleep(1)
            assert not (tmp_path / "partial").exists()


async def test_what_an_earlier_life_left_goes_when_nothing_is_missing(tmp_path: Path) -> None:
    filled(tmp_path / "partial" / "0.blocks")
    async with a_swarm("ab") as swarm:
        late = swarm.add_peer("late", founder=False)
        late.service.config.partial = tmp_path / "partial"
        await swarm.until(lambda: swarm.in_sync("late"))
        state = late.service.state
        assert state is not None
        state._fragments[0].kept[b"of a copy that was given up"] = np.zeros(9, np.uint8)
        late.service.state_service._copying = True
        swarm.crash("b")  # the view is another
        await trio.sleep(5)
        assert not (tmp_path / "partial").exists()
        assert not state._fragments[0].kept
