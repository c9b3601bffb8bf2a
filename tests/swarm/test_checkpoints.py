"""All peers crash at once: the run continues from the checkpoints on their disks."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
import trio

from holdfast.checkpoint import checkpoints
from holdfast.checkpoint.checkpoint_store import FolderStore
from holdfast.checkpoint.checkpoints import Checkpoint, manifest_of
from holdfast.checkpoint.shared_state import SharedState
from holdfast.daemon.peer.volunteer_limits import DiskQuota
from holdfast.protocol.arena import Arena, Values, arena_bytes
from holdfast.protocol.messages import Commit
from holdfast.simulation.drifting_trainer import small_layout
from holdfast.simulation.swarm import Swarm
from holdfast.simulation.witnessed_services import WitnessedPeer
from tests.checkpoint.pins import pinned
from tests.swarm.test_swarm import a_swarm, settled, spec


def toml(table: str, *, fragments: int = 1) -> str:
    return f"{spec(fragments=fragments)}[checkpoint]\n{table}\n"


def saved(swarm: Swarm, name: str) -> list[checkpoints.Manifest]:
    """Return the checkpoints on a machine's disk, the newest first."""
    assert swarm.disks is not None
    place = FolderStore(swarm.disks / name)
    return [checkpoints.open_checkpoint(place, each).manifest for each in checkpoints.names(place)]


async def all_die(swarm: Swarm) -> None:
    """Crash all machines, then restart them."""
    swarm.crash_master()
    for name in swarm.peers:
        swarm.crash(name)
    await trio.sleep(5.0)
    await swarm.start_master()
    for name in list(swarm.peers):
        swarm.restart(name)


def oldest(swarm: Swarm) -> list[str]:
    """Return the members' names, the oldest member first."""
    return sorted(swarm.peers, key=lambda name: swarm.peers[name].service.report.number)


def versions(swarm: Swarm) -> list[int]:
    return list(swarm.coordinator.context.history.versions)


@pytest.mark.fault(
    "everybody is killed, in training or while checkpoints are written",
    "the same",
    "the run goes back to the newest whole checkpoint",
)
@pytest.mark.parametrize(("fragments", "seed"), [(1, 0), (2, 1), (3, 2)])
async def test_when_all_die_the_run_goes_on_from_the_newest_checkpoint(
    tmp_path: Path, fragments: int, seed: int
) -> None:
    text = toml("every_rounds = 3\nkeep_count = 2", fragments=fragments)
    layout = small_layout((5, 3, 4))
    async with a_swarm("abc", "d", text, disks=tmp_path, seed=seed, layout=layout) as swarm:
        await swarm.until(lambda: swarm.committed >= 8)
        newest = max((m for name in "abcd" for m in saved(swarm, name)), key=lambda m: m.rounds)
        assert 6 <= newest.rounds <= swarm.committed
        assert [len(saved(swarm, name)) for name in "abcd"] == [2] * 4
        before_s = trio.current_time()
        await all_die(swarm)
        await swarm.until(lambda: versions(swarm) == [h.version for h in newest.heads], within_s=20)
        history = swarm.coordinator.context.history
        assert history.step >= newest.step
        await settled(swarm, "abcd", more=3)
        assert trio.current_time() < before_s + 60, "nobody else can come: nobody is waited for"
        await swarm.until(
            lambda: all(saved(swarm, name)[0].rounds > newest.rounds for name in "abcd"), within_s=5
        )


async def test_when_all_die_ten_rounds_are_lost_at_most_unless_the_spec_says_otherwise(
    tmp_path: Path,
) -> None:
    async with a_swarm("abc", "", spec(), disks=tmp_path) as swarm:
        await swarm.until(lambda: swarm.committed >= 16)
        await all_die(swarm)
        history = swarm.coordinator.context.history
        await swarm.until(lambda: history.rewinds.count == 1)
        before, after = history.rewinds.last
        assert after == 10 <= 16 <= before
        await settled(swarm, "abc")


async def test_however_short_rounds_are_most_of_the_time_nothing_is_written(tmp_path: Path) -> None:
    text = toml("every_rounds = 1\nkeep_count = 100")
    async with a_swarm("abc", "", text, disks=tmp_path, disk_turn_s=0.05) as swarm:
        await swarm.until(lambda: swarm.committed >= 30)
        assert 1 < len(saved(swarm, "a")) < 10


async def test_a_newcomer_writes_first_at_the_next_multiple_of_rounds(tmp_path: Path) -> None:
    """All peers write the same states; and a copy of a large state has the disk for itself."""
    async with a_swarm("ab", "", toml("every_rounds = 5"), disks=tmp_path) as swarm:
        await swarm.until(lambda: swarm.committed >= 6)
        late = swarm.add_peer("late", founder=False)
        await swarm.until(lambda: bool(saved(swarm, "late")))
        assert [each.rounds % 5 for each in saved(swarm, "late")] == [0]
        assert late.ended is None


async def test_what_a_run_has_given_up_is_not_what_it_goes_on_from(tmp_path: Path) -> None:
    """A checkpoint after a rewind is newer than an abandoned one with more rounds."""
    text = toml("every_rounds = 1\nkeep_count = 100")
    async with a_swarm("abc", "", text, disks=tmp_path) as swarm:
        await swarm.until(lambda: swarm.committed >= 8)
        given_up = max(m.rounds for m in saved(swarm, "a"))
        for name in "abc":  # as if they had lost the last rounds' checkpoints
            place = FolderStore(tmp_path / name)
            for each in checkpoints.names(place):
                if checkpoints.open_checkpoint(place, each).manifest.rounds > given_up - 2:
                    place.delete(each)
        await all_die(swarm)
        await swarm.until(lambda: versions(swarm)[0] == given_up - 2, within_s=20)
        await swarm.until(lambda: all(saved(swarm, n)[0].branch == 1 for n in "abc"), within_s=20)
        assert min(m.rounds for m in saved(swarm, "a") if m.branch == 1) == given_up - 2
        await settled(swarm, "abc")


def branch_off(found: Checkpoint) -> None:
    """Write a second checkpoint beside it, one round later, as under a superseded master."""
    manifest = found.manifest
    arena = Arena(bytearray(arena_bytes(manifest.sizes)), manifest.sizes)
    state = SharedState(manifest.sizes, arena, manifest.run_id)
    found.load(state)
    size, head = manifest.sizes[0], manifest.fragment_heads()[0]
    counters = np.zeros(size.counter_count, np.int64)

    def step(values: Values, _momentum: Values) -> None:
        values -= 9

    state.apply(0, head.version + 1, counters, step)
    later = manifest_of(
        state,
        lineage=bytes.fromhex(manifest.lineage),
        term=manifest.term,
        nonce=bytes.fromhex(manifest.nonce),
        branch=manifest.branch,
        step=manifest.step + 4,
        layout=manifest.layout,
        spec_toml=manifest.spec_toml,
        now_s=manifest.written_s,
    )
    assert later is not None
    for _piece in checkpoints.write(found.place, state, later, reader="", writer="x"):
        pass


@pytest.mark.fault(
    "the newest checkpoint is of no history that the journal knows",
    "its roots",
    "the run goes back to an older one, read from the disk",
)
@pytest.mark.parametrize("fragments", [1, 2])
async def test_a_newest_checkpoint_that_the_journal_does_not_know_gives_way_to_an_older_one(
    tmp_path: Path, fragments: int
) -> None:
    text = toml("every_rounds = 2\nkeep_count = 4", fragments=fragments)
    async with a_swarm("abc", "", text, disks=tmp_path, layout=small_layout((5, 3, 4))) as swarm:
        await swarm.until(lambda: swarm.committed >= 9)
        good = saved(swarm, "a")[1]  # the roots of the rounds after it are all known
        for name in "abc":
            place = FolderStore(tmp_path / name)
            for each in checkpoints.names(place):
                if checkpoints.open_checkpoint(place, each).manifest.rounds > good.rounds:
                    place.delete(each)
            assert saved(swarm, name)[0].same_state(good)
            branch_off(checkpoints.open_checkpoint(place, good.name))
            assert [m.rounds - good.rounds for m in saved(swarm, name)][:2] == [1, 0]
        await all_die(swarm)
        await swarm.until(lambda: versions(swarm) == [h.version for h in good.heads], within_s=20)
        await settled(swarm, "abc", more=3)
        assert [swarm.peers[n].service.state_service.received_bytes for n in "abc"] == [0, 0, 0]
        assert [swarm.peers[n].service.state_service.kept for n in "abc"] == [[], [], []]


def lag(service: WitnessedPeer) -> None:
    """Its outer steps of fragment 0 take longer than those of the others, which come after."""
    apply = service._apply

    async def later(commit: Commit) -> None:
        await trio.sleep(0.5 if commit.fragment == 0 else 0.0)
        await apply(commit)

    service._apply = later  # type: ignore[method-assign]


async def test_what_is_written_is_what_some_commit_left(tmp_path: Path) -> None:
    text = toml("every_rounds = 1\nkeep_count = 100", fragments=3)
    text = text.replace("sync_every = 4", "sync_every = 12\noverlap = 11")  # rounds side by side
    layout = small_layout((5, 3, 4))
    async with a_swarm("abc", "", text, disks=tmp_path, layout=layout) as swarm:
        for sim in swarm.peers.values():
            lag(sim.service)
        await swarm.commit(12, within_s=60)
        states, at = {(0, 0, 0)}, [0, 0, 0]
        for commit in swarm.witness.commits:
            at[commit.fragment] = commit.version + 1
            states.add((at[0], at[1], at[2]))
        found = {tuple(h.version for h in m.heads) for name in "abc" for m in saved(swarm, name)}
        assert len(found) >= 4
        assert found <= states


async def test_rounds_go_on_while_a_checkpoint_is_written(tmp_path: Path) -> None:
    text = toml("every_rounds = 1")
    async with a_swarm("abc", "", text, disks=tmp_path, disk_turn_s=1.0) as swarm:
        service = swarm.peers["a"].service
        await swarm.until(lambda: service.checkpointer.writing)
        state = service.state
        assert state is not None
        (version,) = pinned(state, 0)
        committed = swarm.committed
        await swarm.until(lambda: version not in pinned(state, 0), within_s=20)
        assert swarm.committed > committed + 2
        await swarm.until(lambda: version in [m.rounds for m in saved(swarm, "a")], within_s=5)
        await settled(swarm, "abc")


@pytest.mark.parametrize(("peers", "count"), [('"every"', 4), ("2", 2), ("1", 1), ('"asked"', 0)])
async def test_who_writes(tmp_path: Path, peers: str, count: int) -> None:
    text = toml(f"peers = {peers}\nevery_rounds = 2")
    async with a_swarm("abc", "d", text, disks=tmp_path) as swarm:
        await settled(swarm, "abcd", more=6)
        await trio.sleep(1.0)  # the last ones come to their end
        assert {name for name in "abcd" if saved(swarm, name)} == set(oldest(swarm)[:count])


async def test_when_a_writer_dies_the_next_one_writes(tmp_path: Path) -> None:
    text = toml("peers = 1\nevery_rounds = 2")
    async with a_swarm("abc", "", text, disks=tmp_path) as swarm:
        await settled(swarm, "abc", more=4)
        first, second, third = oldest(swarm)
        assert not saved(swarm, second)
        swarm.crash(first)
        swarm.resume()
        await settled(swarm, second + third, more=6)
        await swarm.until(lambda: bool(saved(swarm, second)), within_s=5)
        assert saved(swarm, second)[0].rounds > saved(swarm, first)[0].rounds


async def test_by_the_clock(tmp_path: Path) -> None:
    text = toml("every_rounds = 0\nevery_s = 10.0\nkeep_count = 10")
    async with a_swarm("ab", "", text, disks=tmp_path) as swarm:
        await trio.sleep(35.0)
        times = [manifest.written_s for manifest in saved(swarm, "a")][::-1]
        assert len(times) == 3
        assert all(10.0 <= later - before < 12.0 for before, later in itertools.pairwise(times))


@pytest.mark.fault(
    "the place of checkpoints cannot be written",
    "the file system's error",
    "told; rounds go on, tried again when the next is due",
)
async def test_a_disk_that_is_full_costs_checkpoints_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("not a folder")
    async with a_swarm("bc", "", toml("every_rounds = 2"), disks=tmp_path) as swarm:
        swarm.add_peer("d")
        checkpointer = swarm.peers["d"].service.checkpointer
        checkpointer.place = FolderStore(tmp_path / "a")
        await settled(swarm, "bcd", more=6)
        assert "a" in checkpointer.error
        assert sum("no checkpoint" in text for text in swarm.peers["d"].service.report.notices) == 1
        assert saved(swarm, "b")


@pytest.mark.fault(
    "its disk has no room that it gives",
    "sizes, before a checkpoint is written",
    "fewer are kept, or none, and that is said; rounds go on",
)
async def test_who_gives_little_of_its_disk_keeps_few_or_none_and_says_so(tmp_path: Path) -> None:
    """Two at a time, while the next one is written; with room for less, none."""
    text = toml("every_rounds = 1\nkeep_count = 5")
    async with a_swarm("ae", "", text, disks=tmp_path) as swarm:
        await swarm.until(lambda: bool(saved(swarm, "a")))
        for name, allowed in (("b", 1.9), ("c", 2.9), ("d", 4.9)):
            service = swarm.add_peer(name, founder=False).service
            state = swarm.peers["a"].service.state
            assert state is not None
            service.config.disk_quota = DiskQuota(int(allowed * state.size_bytes(0)))
        most = dict.fromkeys("bcd", 0)
        goal = swarm.committed + 12

        def look() -> bool:
            for name in most:
                folder = tmp_path / name
                files = list(folder.iterdir()) if folder.exists() else []
                most[name] = max(most[name], len(files))
            return swarm.committed >= goal

        await swarm.until(look)
        await settled(swarm, "abcde")
        assert most["b"] == 0
        told = swarm.peers["b"].service.report.notices
        assert sum("do not fit into --max-disk" in each for each in told) == 1
        assert (most["c"] <= 2, len(saved(swarm, "c"))) == (True, 1)
        assert (most["d"] <= 4, len(saved(swarm, "d"))) == (True, 3)
        assert len(saved(swarm, "a")) == 5
