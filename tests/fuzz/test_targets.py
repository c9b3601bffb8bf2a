"""Every target accepts the corpus, and hypothesis's variations of its seeds, without an error."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fuzz import archive
from tests.fuzz.targets import TARGETS

EXAMPLES = 60


def edits(seeds: list[bytes]) -> st.SearchStrategy[bytes]:
    """Generate a seed with some bytes replaced, or any bytes."""

    def edit(seed: bytes, where: int, length: int, instead: bytes) -> bytes:
        start = where % (len(seed) + 1)
        return seed[:start] + instead + seed[start + length :]

    edited = st.builds(
        edit,
        st.sampled_from(seeds),
        st.integers(0, 4_096),
        st.integers(0, 8),
        st.binary(max_size=8),
    )
    return st.one_of(edited, st.binary(max_size=300))


@pytest.mark.filterwarnings("ignore::cryptography.utils.CryptographyDeprecationWarning")
@pytest.mark.parametrize("name", TARGETS)
def test_the_corpus_is_survived(name: str) -> None:
    found = archive.read(name)
    assert found
    for entry, data in found.items():
        try:
            TARGETS[name].run(data)
        except BaseException as error:
            error.add_note(f"again: python -m tests.fuzz --show {name} {entry}")
            raise


@pytest.mark.filterwarnings("ignore::cryptography.utils.CryptographyDeprecationWarning")
@pytest.mark.parametrize("name", TARGETS)
def test_edited_seeds_are_survived(name: str) -> None:
    target = TARGETS[name]

    @settings(max_examples=EXAMPLES)
    @given(edits(list(target.seeds())))
    def survives(data: bytes) -> None:
        target.run(data[: target.bytes_max])

    survives()


def test_no_corpus_is_left_without_its_target() -> None:
    assert archive.targets() == set(TARGETS)


def test_an_archive_depends_on_its_inputs_and_not_on_their_order(
    tmp_path: Path,
) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    archive.write("codec", {"a": b"first", "b": b"second"}, one)
    archive.write("codec", {"b": b"second"}, other)
    archive.write("codec", {**archive.read("codec", other), "a": b"first"}, other)
    assert archive.archive_of("codec", one).read_bytes() == (other / "codec.zip").read_bytes()


@pytest.mark.parametrize("name", TARGETS)
def test_writing_an_archive_again_changes_nothing(name: str, tmp_path: Path) -> None:
    archive.write(name, archive.read(name), tmp_path)
    assert archive.archive_of(name, tmp_path).read_bytes() == archive.archive_of(name).read_bytes()
