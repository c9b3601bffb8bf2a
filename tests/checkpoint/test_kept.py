"""The shared state in a file: it comes back whole with the digests that it had, or not at all."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from blake3 import blake3
from safetensors.numpy import load_file, save_file

from holdfast.checkpoint import kept
from holdfast.checkpoint.kept import FILE_NAME, KeptStateError
from holdfast.checkpoint.state import SharedState
from holdfast.protocol import wire
from holdfast.protocol.messages import FragmentSize, Layout, TensorSpec
from tests.checkpoint.test_state import SIZE, SMALL, advance, content, founded, make_state

LAYOUT = Layout((TensorSpec("weight", (7,), "float32", "parameter"),))
LINEAGE = b"l" * 32
EMPTY = FragmentSize(0, 0, 0)


def keep(folder: Path, state: SharedState) -> kept.Manifest:
    manifest = kept.manifest_of(
        state, lineage=LINEAGE, term=3, nonce=b"n" * 80, step=400, layout=LAYOUT
    )
    kept.save(folder, state, manifest)
    return manifest


def back(folder: Path, *sizes: FragmentSize) -> SharedState:
    """What the file holds."""
    manifest = kept.find(folder, "run")
    assert manifest is not None
    state = make_state(*sizes)
    kept.load(folder, manifest, state)
    return state


def test_what_was_kept_comes_back_with_its_roots(tmp_path: Path) -> None:
    sizes = (SIZE, SMALL, EMPTY)
    state = founded(*sizes)
    advance(state)
    manifest = keep(tmp_path, state)
    assert kept.find(tmp_path, "run") == manifest
    again = back(tmp_path, *sizes)
    assert again.heads() == state.heads()
    assert [content(again, n) for n in range(3)] == [content(state, n) for n in range(3)]
    assert [p.name for p in tmp_path.iterdir()] == [FILE_NAME]
    assert (tmp_path / FILE_NAME).stat().st_mode & 0o777 == 0o600
    advance(again)  # and goes on
    assert again.head(0) != state.head(0)


def test_other_programs_can_read_it(tmp_path: Path) -> None:
    state = founded(SMALL)
    keep(tmp_path, state)
    found = load_file(tmp_path / FILE_NAME)
    assert np.array_equal(found["0.values"], state.values(0))
    assert np.array_equal(found["0.counters"], state.counters(0))


def test_only_the_newest_is_there(tmp_path: Path) -> None:
    state = founded(SMALL)
    keep(tmp_path, state)
    advance(state)
    keep(tmp_path, state)
    assert back(tmp_path, SMALL).heads() == state.heads()
    assert [p.name for p in tmp_path.iterdir()] == [FILE_NAME]


def test_fragments_that_are_not_whole_are_left_out(tmp_path: Path) -> None:
    state = make_state(SMALL, SMALL)
    whole = founded(SMALL, SMALL)
    values, counters = whole.values(1), whole.counters(1)
    state.load_initial(1, values, counters)
    manifest = keep(tmp_path, state)
    assert [head.fragment for head in manifest.heads] == [1]
    assert back(tmp_path, SMALL, SMALL).heads() == state.heads()


def test_there_may_be_none(tmp_path: Path) -> None:
    assert kept.find(tmp_path, "run") is None


def test_a_byte_changed_anywhere_is_refused_or_changes_nothing(tmp_path: Path) -> None:
    state = founded(SMALL)
    keep(tmp_path, state)
    path = tmp_path / FILE_NAME
    good = path.read_bytes()
    harmless = 0
    for at in range(len(good)):
        data = bytearray(good)
        data[at] ^= 1 << at % 8
        path.write_bytes(data)
        try:
            found = back(tmp_path, SMALL)
        except KeptStateError:
            continue
        harmless += 1
        assert found.heads() == state.heads(), at
        assert content(found) == content(state), at
    assert harmless < 50, "the header's padding, and names of metadata that nobody reads"


@pytest.mark.parametrize("length", [0, 1, 7, 8, 9, 100, -1])
def test_a_file_cut_short_or_too_long_is_refused(tmp_path: Path, length: int) -> None:
    keep(tmp_path, founded(SMALL))
    path = tmp_path / FILE_NAME
    good = path.read_bytes()
    path.write_bytes(good[:length] if length >= 0 else good + b"x")
    with pytest.raises(KeptStateError):
        back(tmp_path, SMALL)


def rewrite(folder: Path, **changes: object) -> None:
    """A file whose manifest says something else, with the right digest."""
    manifest = kept.find(folder, "run")
    assert manifest is not None
    text = json.dumps({**wire.to_plain(manifest), **changes})
    metadata = {kept.MANIFEST_KEY: text, kept.DIGEST_KEY: blake3(text.encode()).hexdigest()}
    save_file(load_file(folder / FILE_NAME), folder / FILE_NAME, metadata=metadata)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"format": 2}, "format 2"),
        ({"run_id": "other"}, "of run other"),
        ({"lineage": "x"}, "damaged"),
        ({"step": -1}, "below zero"),
        ({"sizes": []}, "not of its fragments"),
        ({"heads": [{"fragment": 0, "version": 1, "root": "0" * 64}]}, "root"),
        ({"heads": [{"fragment": 0, "version": 0, "root": "0" * 64}]}, "root"),
        ({"more": 1}, "unknown field"),
    ],
)
def test_a_manifest_that_says_something_else(
    tmp_path: Path, changes: dict[str, object], why: str
) -> None:
    keep(tmp_path, founded(SMALL))
    rewrite(tmp_path, **changes)
    with pytest.raises(KeptStateError, match=why):
        back(tmp_path, SMALL)


def test_a_state_of_other_sizes_does_not_take_it(tmp_path: Path) -> None:
    keep(tmp_path, founded(SMALL))
    with pytest.raises(KeptStateError, match="other arrays"):
        back(tmp_path, SIZE)


def test_where_nothing_can_be_written_the_one_of_before_stays(tmp_path: Path) -> None:
    state = founded(SMALL)
    keep(tmp_path, state)
    before = state.heads()
    advance(state)
    (tmp_path / f"{FILE_NAME}.new").mkdir()  # also root cannot write a file there
    with pytest.raises(KeptStateError, match="cannot keep"):
        keep(tmp_path, state)
    assert back(tmp_path, SMALL).heads() == before


def test_one_that_is_no_good_is_set_aside(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).write_bytes(b"what is this")
    with pytest.raises(KeptStateError):
        kept.find(tmp_path, "run")
    aside = kept.set_aside(tmp_path)
    assert aside.read_bytes() == b"what is this"
    assert kept.find(tmp_path, "run") is None
