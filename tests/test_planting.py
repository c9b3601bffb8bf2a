"""The recorded seed of a planted bug is tried first; a search follows if it shows nothing."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.planting import Bugs, told_to_record, what_shows


class Search:
    """Seeds that show a bug; what was tried, what was noted."""

    def __init__(self, *showing: int) -> None:
        self.showing = showing
        self.tried: list[int] = []
        self.noted: list[tuple[str, object]] = []

    def shows(self, seed: int) -> bool:
        self.tried.append(seed)
        return seed in self.showing

    def run(self, recorded: int | None, seeds: Sequence[int] = range(10)) -> int | None:
        return what_shows(
            recorded,
            self.shows,
            seeds,
            lambda name, value: self.noted.append((name, value)),
        )


@pytest.fixture(autouse=True)
def _no_search_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SEARCH", raising=False)


def test_what_is_recorded_is_tried_and_nothing_else() -> None:
    search = Search(3, 7)
    assert search.run(7) == 7
    assert (search.tried, search.noted) == ([7], [])


@pytest.mark.parametrize(("recorded", "tried"), [(7, [7, 0, 1, 2]), (None, [0, 1, 2])])
def test_what_shows_it_no_longer_is_searched_for_and_the_run_ends_with_what_to_record(
    recorded: int | None, tried: list[int]
) -> None:
    search = Search(2)
    assert search.run(recorded) == 2
    assert search.tried == tried
    assert told_to_record([_passed(search.noted)]) == [f"a.py::b: record 2 instead of {recorded}"]


def test_a_bug_that_nothing_shows_is_missed() -> None:
    search = Search()
    assert search.run(7) is None
    assert (search.tried, search.noted) == ([7, *range(10)], [])


def test_a_search_that_is_asked_for_leaves_what_is_recorded_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SEARCH", "1")
    search = Search(2, 7)
    assert search.run(7) == 2
    assert (search.tried, search.noted) == ([0, 1, 2], [])


def test_a_bug_stands_with_its_seed() -> None:
    bugs = Bugs()
    bugs.named("known", seed=0)(lambda patch: None)
    bugs.named("new")(lambda patch: None)
    assert (list(bugs), bugs.seeds) == (["known", "new"], {"known": 0})


def _passed(properties: list[tuple[str, object]]) -> pytest.TestReport:
    return pytest.TestReport(
        "a.py::b", ("a.py", 0, "b"), {}, "passed", None, "call", user_properties=properties
    )
