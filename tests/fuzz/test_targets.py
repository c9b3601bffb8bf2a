"""Every target takes the corpus, and what hypothesis makes of its seeds, as it should."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fuzz.targets import TARGETS

CORPUS = Path(__file__).with_name("corpus")
EXAMPLES = 60


def edits(seeds: list[bytes]) -> st.SearchStrategy[bytes]:
    """A seed with some bytes left out at one place and others put there; or any bytes at all."""

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
    found = sorted((CORPUS / name).iterdir())
    assert found
    for path in found:
        TARGETS[name].run(path.read_bytes())


@pytest.mark.filterwarnings("ignore::cryptography.utils.CryptographyDeprecationWarning")
@pytest.mark.parametrize("name", TARGETS)
def test_edited_seeds_are_survived(name: str) -> None:
    target = TARGETS[name]

    @settings(max_examples=EXAMPLES, deadline=None)
    @given(edits(list(target.seeds())))
    def survives(data: bytes) -> None:
        target.run(data[: target.bytes_max])

    survives()


def test_no_corpus_is_left_without_its_target() -> None:
    assert {path.name for path in CORPUS.iterdir()} == set(TARGETS)
