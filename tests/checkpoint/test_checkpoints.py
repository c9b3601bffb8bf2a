"""Checkpoints: the state of one instant comes back whole with the digests it had, or not at all."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from attrs import evolve
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from holdfast.checkpoint import checkpoints
from holdfast.checkpoint.checkpoint_store import CheckpointStore, FolderStore, StoreError, place_at
from holdfast.checkpoint.checkpoints import CheckpointError
from holdfast.checkpoint.shared_state import SharedState
from holdfast.protocol import wire
from holdfast.protocol.errors import LocalProtocolError
from holdfast.protocol.messages import FragmentHead, FragmentSize
from tests.checkpoint.pins import pinned
from tests.checkpoint.saving import LAYOUT, LINEAGE, READER, manifest_of, save
from tests.checkpoint.test_checkpoint_store import LookedAtPlace
from tests.checkpoint.test_shared_state import SIZE, SMALL, advance, content, founded, make_state

EMPTY = FragmentSize(0, 0, 0)


def back(place: CheckpointStore, *sizes: FragmentSize) -> SharedState:
    """Return the state in the newest checkpoint."""
    state = make_state(*sizes)
    checkpoints.open_checkpoint(place, checkpoints.names(place)[0]).load(state)
    return state


@pytest.fixture
def place(tmp_path: Path) -> FolderStore:
    return FolderStore(tmp_path)


def test_what_was_written_comes_back_with_its_roots(place: FolderStore) -> None:
    sizes = (SIZE, SMALL, EMPTY)
    state = founded(*sizes)
    advance(state)
    manifest = save(place, state)
    (name,) = checkpoints.names(place)
    assert name == manifest.name
    found = checkpoints.open_checkpoint(place, name)
    assert found.manifest == manifest
    assert [found.parts(n)[0].values.tobytes() for n in range(3)] == [
        state.fragments[n].parts.values.tobytes() for n in range(3)
    ]
    again = back(place, *sizes)
    assert again.heads() == state.heads() == manifest.fragment_heads()
    assert [content(again, n) for n in range(3)] == [content(state, n) for n in range(3)]
    assert (place.root / name).stat().st_mode & 0o777 == 0o600
    advance(again)  # and goes on
    assert again.head(0) != state.head(0)


def test_other_programs_can_read_it(place: FolderStore) -> None:
    state = founded(SMALL, SIZE)
    name = save(place, state).name
    found = load_file(place.root / name)
    for number in range(2):
        assert np.array_equal(found[f"{number}.values"], state.fragments[number].parts.values)
        assert np.array_equal(found[f"{number}.momentum"], state.fragments[number].parts.momentum)
        assert np.array_equal(found[f"{number}.counters"], state.fragments[number].parts.counters)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.sampled_from(["write", "0", "1", "2"]), max_size=40))
def test_it_is_of_one_instant_whatever_is_applied_meanwhile(effects: list[str]) -> None:
    sizes = (SMALL, EMPTY, SMALL)
    state, twin = founded(*sizes), founded(*sizes)
    for each in (state, twin):
        advance(each, 2)
    place = place_at(f"memory://instant-{id(effects)}")
    manifest = manifest_of(state)
    assert checkpoints.pin(state, manifest, READER)
    writing = checkpoints.write(place, state, manifest, reader=READER, writer="me")
    for effect in effects:
        if effect == "write":
            next(writing, None)
        else:
            advance(state, int(effect))
    for _written in writing:
        pass
    assert [content(back(place, *sizes), n) for n in range(3)] == [
        content(twin, n) for n in range(3)
    ]
    assert [pinned(state, n) for n in range(3)] == [()] * 3, "nothing is held for it any more"
    place.delete(manifest.name)


def test_what_is_not_there_any_more_cannot_be_pinned() -> None:
    state = founded(SMALL, SMALL)
    manifest = manifest_of(state)
    advance(state, 1)
    assert not checkpoints.pin(state, manifest, READER)
    assert pinned(state, 0) == pinned(state, 1) == ()


def test_a_state_that_is_not_whole_has_none() -> None:
    state, whole = make_state(SMALL, SMALL), founded(SMALL, SMALL)
    state.load_initial(1, whole.fragments[1].parts.values, whole.fragments[1].parts.counters)
    assert (
        checkpoints.manifest_of(
            state,
            lineage=LINEAGE,
            term=1,
            nonce=b"",
            branch=0,
            step=1,
            layout=LAYOUT,
            spec_toml="",
            now_s=0,
        )
        is None
    )


def test_the_newest_is_the_one_that_went_furthest(place: FolderStore) -> None:
    state = founded(SMALL)
    wanted = [save(place, state, step=9).name]
    advance(state)
    wanted += [save(place, state, step=step).name for step in (9, 10, 1000)]
    wanted += [save(place, founded(SMALL), step=10, branch=b).name for b in (1, 2, 10_000_000)]
    (place.root / "notes.txt").write_text("not ours")
    (place.root / f"{wanted[0]}.me.part").write_text("half")
    assert checkpoints.names(place) == wanted[::-1]


def test_what_is_there_already_is_not_written_again(place: FolderStore) -> None:
    state = founded(SMALL)
    save(place, state)
    assert not list(
        checkpoints.write(place, state, manifest_of(state), reader=READER, writer="other")
    )


# ---------------------------------------------------------------- deaths and damage


@pytest.mark.fault(
    "a process or its disk dies at any byte of a checkpoint",
    "the name is given last",
    "the one before is whole",
)
@pytest.mark.fault("everybody is killed, in training or while checkpoints are written")
def test_a_kill_at_any_instant_leaves_the_last_one_whole(tmp_path: Path) -> None:
    root, seen = tmp_path / "place", list[tuple[FragmentHead, ...]]()
    state = founded(SMALL, SMALL)
    place = LookedAtPlace(root)
    place.stride = 11

    def look(instant: str) -> None:
        heads = back(FolderStore(root), SMALL, SMALL).heads()
        assert heads in (before, state.heads()), instant
        seen.append(heads)

    place.look = lambda _instant: None
    save(place, state)
    before = state.heads()
    advance(state)
    place.look = look
    save(place, state, step=500)
    assert seen == sorted(seen, key=lambda heads: heads == state.heads())
    assert set(seen) == {before, state.heads()}
    assert len(seen) > 100


@pytest.mark.fault("a process or its disk dies at any byte of a checkpoint")
def test_a_disk_that_fails_at_any_instant_leaves_the_last_one_whole(tmp_path: Path) -> None:
    place = LookedAtPlace(tmp_path)
    place.stride = 100
    place.look = lambda _instant: None
    state = founded(SMALL)
    save(place, state)
    before = state.heads()
    advance(state)
    count = fails_at = 0

    def look(instant: str) -> None:
        nonlocal count
        count += 1
        if count == fails_at:
            raise OSError(5, f"Input/output error, {instant}")

    place.look = look
    failed = True
    while failed:
        count, fails_at, failed = 0, fails_at + 1, False
        try:
            save(place, state, step=500)
        except StoreError:
            failed = True
        assert [name for name in place.names() if name.endswith(".part")] == []
        assert back(place, SMALL).heads() in (before, state.heads())
    assert fails_at > 20
    assert back(place, SMALL).heads() == state.heads()


@pytest.mark.fault(
    "a checkpoint is damaged",
    "its digests",
    "said, passed over for the one before, healed from others",
)
def test_a_byte_changed_anywhere_is_refused_or_changes_nothing(place: FolderStore) -> None:
    state = founded(SMALL)
    path = place.root / save(place, state).name
    good = path.read_bytes()
    harmless = 0
    for at in range(len(good)):
        data = bytearray(good)
        data[at] ^= 1 << at % 8
        path.write_bytes(data)
        try:
            found = back(place, SMALL)
        except CheckpointError:
            continue
        harmless += 1
        assert found.heads() == state.heads(), at
        assert content(found) == content(state), at
    assert harmless < 10, "the header's padding"


@pytest.mark.parametrize("length", [0, 1, 7, 8, 9, 100, -1])
def test_a_file_cut_short_or_too_long_is_refused(place: FolderStore, length: int) -> None:
    path = place.root / save(place, founded(SMALL)).name
    good = path.read_bytes()
    path.write_bytes(good[:length] if length >= 0 else good + b"x")
    with pytest.raises(CheckpointError):
        back(place, SMALL)


def rewrite(place: FolderStore, **changes: object) -> None:
    """A file whose manifest says something else, with the right digest."""
    (name,) = checkpoints.names(place)
    manifest = checkpoints.open_checkpoint(place, name).manifest
    text = json.dumps({**wire.to_plain(manifest), **changes})
    digest = blake3(text.encode()).hexdigest()
    metadata = {checkpoints.MANIFEST_KEY: text, checkpoints.DIGEST_KEY: digest}
    save_file(load_file(place.root / name), place.root / name, metadata=metadata)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"format": 2}, "format 2"),
        ({"run_id": "other"}, "root"),
        ({"lineage": "x"}, "damaged"),
        ({"step": -1}, "is negative"),
        ({"sizes": []}, "differs from the number of fragments"),
        ({"heads": [{"version": 1, "root": "0" * 64}]}, "root"),
        ({"heads": [{"version": 0, "root": "0" * 64}]}, "root"),
        ({"sizes": [{"value_count": 6, "momentum_count": 4, "counter_count": 2}]}, "shape"),
        ({"more": 1}, "unknown field"),
    ],
)
def test_a_manifest_that_says_something_else(
    place: FolderStore, changes: dict[str, object], why: str
) -> None:
    save(place, founded(SMALL))
    rewrite(place, **changes)
    with pytest.raises(CheckpointError, match=why):
        checkpoints.open_checkpoint(place, checkpoints.names(place)[0]).parts(0)


def test_a_state_of_other_sizes_does_not_take_it(place: FolderStore) -> None:
    save(place, founded(SMALL))
    with pytest.raises(LocalProtocolError, match="values and"):
        back(place, SIZE)


def test_of_several_the_newest_that_is_whole(place: FolderStore) -> None:
    state = founded(SMALL)
    manifests = [save(place, state, step=step) for step in (1, 2, 3)]
    (place.root / manifests[2].name).write_bytes(b"what is this")
    told: list[str] = []
    found = checkpoints.newest(place, lambda _manifest: "", told.append)
    assert [each.manifest.step for each in found] == [2, 1]
    (word,) = told
    assert manifests[2].name in word
    assert "damaged" in word


# ---------------------------------------------------------------- keeping


@pytest.mark.parametrize(
    ("keep_count", "keep_s", "left"),
    [(1, 0, [4]), (3, 0, [4, 3, 2]), (9, 0, [4, 3, 2, 1, 0]), (9, 25, [4, 3, 2]), (2, 25, [4, 3])],
)
def test_kept_by_count_and_by_age(
    place: FolderStore, keep_count: int, keep_s: float, left: list[int]
) -> None:
    state = founded(SMALL)
    for step in range(5):
        save(place, state, step=step, now_s=10.0 * step)
    checkpoints.prune(place, "run", keep_count=keep_count, keep_s=keep_s, now_s=40.0)
    found = [checkpoints.open_checkpoint(place, name) for name in checkpoints.names(place)]
    assert [each.manifest.step for each in found] == left


def test_the_newest_stays_however_old(place: FolderStore) -> None:
    save(place, founded(SMALL))
    assert checkpoints.prune(place, "run", keep_count=1, keep_s=1.0, now_s=1e9) == []
    assert len(checkpoints.names(place)) == 1


def test_what_is_damaged_or_anothers_is_left_alone(place: FolderStore) -> None:
    damaged = save(place, founded(SMALL), step=1).name
    (place.root / damaged).write_bytes(b"what is this")
    other = save(place, founded(SMALL, run_id="other"), step=2).name
    save(place, founded(SMALL), step=3)
    assert checkpoints.prune(place, "run", keep_count=1, keep_s=0, now_s=0) == []
    assert {damaged, other} <= set(checkpoints.names(place))


def test_false_names_take_no_checkpoints_place(place: FolderStore) -> None:
    """Whoever may write into a shared place cannot have others' checkpoints deleted by names."""
    genuine = [save(place, founded(SMALL), step=step).name for step in (1, 2)]
    newer = f"{manifest_of(founded(SMALL), step=3).name}.other.part"
    (place.root / newer).write_bytes(b"being written")
    for number in range(5):
        name = f"9-00000000{number}-000009-{genuine[0].rpartition('-')[2]}"
        (place.root / name).write_bytes((place.root / genuine[0]).read_bytes())
        (place.root / f"9-00000001{number}-000009-{genuine[0].rpartition('-')[2]}").write_bytes(b"")
    assert checkpoints.prune(place, "run", keep_count=2, keep_s=0, now_s=0) == []
    assert {*genuine, newer} <= set(place.names())
    third = save(place, founded(SMALL), step=3).name
    assert checkpoints.prune(place, "run", keep_count=2, keep_s=0, now_s=0) == [genuine[0]]
    assert third in place.names()


def test_what_died_writers_left_goes_when_there_is_a_newer_one(place: FolderStore) -> None:
    manifests = [manifest_of(founded(SMALL), step=step) for step in (1, 2, 3)]
    save(place, founded(SMALL), step=2)
    for manifest in manifests:
        (place.root / f"{manifest.name}.dead.part").write_bytes(b"half")
    checkpoints.prune(place, "run", keep_count=1, keep_s=0, now_s=0)
    assert [name for name in place.names() if name.endswith(".part")] == [
        f"{manifests[1].name}.dead.part",
        f"{manifests[2].name}.dead.part",
    ]


def test_names_tell_states_apart() -> None:
    state = founded(SMALL)
    manifest = manifest_of(state)
    others = [
        evolve(manifest, step=401),
        evolve(manifest, branch=1),
        evolve(manifest, lineage="0" * 64),
        evolve(manifest, heads=(evolve(manifest.heads[0], root="0" * 64),)),
    ]
    assert len({manifest.name, *(each.name for each in others)}) == 5
    assert evolve(manifest, term=4, written_s=1.0).name == manifest.name


@pytest.fixture(autouse=True)
def _memory_is_empty() -> Iterator[None]:
    import fsspec

    yield
    fsspec.filesystem("memory").store.clear()
