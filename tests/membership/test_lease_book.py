"""A peer's book of leases: what goes to its trainer, what an update is made of, what comes back."""

from __future__ import annotations

import pytest

from holdfast.membership.peer.lease_book import LeaseBook
from holdfast.protocol.errors import RemoteProtocolError
from holdfast.protocol.messages import Leased, LeaseRange, LeasesWanted, RankSamples

LENGTH = 100


def leases(*ranges: tuple[int, int]) -> tuple[LeaseRange, ...]:
    return tuple(LeaseRange(start, stop) for start, stop in ranges)


def a_book() -> LeaseBook:
    made = LeaseBook()
    assert made.begin(LENGTH)
    made.leased(Leased(leases((0, 40)), length=LENGTH))
    return made


@pytest.fixture
def book() -> LeaseBook:
    return a_book()


def draw(book: LeaseBook, index: int, count: int, rank: int = 0) -> list[tuple[int, int]]:
    drawn = book.draw(rank, index, count, leased=True)
    return [(each.start, each.stop) for each in drawn]


def post(book: LeaseBook, number: int, lost: int, trained: int) -> object:
    return book.post(number, [RankSamples(0, lost, trained)])


def test_an_update_names_what_was_trained_and_not_what_was_drawn(book: LeaseBook) -> None:
    assert draw(book, 0, 20) == [(0, 20)]
    assert post(book, 1, 0, 12) == leases((0, 12))
    book.committed(1, contributed=True)
    assert post(book, 2, 0, 20) == leases((12, 20))


def test_what_a_round_did_not_take_is_in_the_next_update(book: LeaseBook) -> None:
    draw(book, 0, 20)
    post(book, 1, 0, 12)
    book.aborted(1)
    assert post(book, 2, 0, 16) == leases((0, 16))
    book.committed(2, contributed=False)
    assert post(book, 3, 0, 20) == leases((0, 20))


def test_what_a_load_drops_is_drawn_again(book: LeaseBook) -> None:
    draw(book, 0, 20)
    assert post(book, 1, 12, 20) == leases((12, 20))
    assert draw(book, 20, 12) == [(0, 12)]


def test_a_trainer_that_ended_leaves_its_samples_but_for_its_update(book: LeaseBook) -> None:
    draw(book, 0, 20)
    post(book, 1, 0, 8)
    book.trainer_gone()
    assert draw(book, 0, 16) == [(8, 24)]
    book.aborted(1)
    assert draw(book, 16, 8) == [(0, 8)]


def test_ranks_of_one_data_rank_draw_the_same_samples_and_others_others(book: LeaseBook) -> None:
    assert draw(book, 0, 8) == [(0, 8)]
    assert draw(book, 0, 8) == [(0, 8)]
    assert draw(book, 0, 8, rank=1) == [(8, 16)]
    assert book.post(1, [RankSamples(0, 0, 8), RankSamples(1, 0, 4)]) == leases((0, 12))


def test_leases_that_others_have_got_are_trained_through_and_not_contributed(
    book: LeaseBook,
) -> None:
    draw(book, 0, 20)
    book.leased(Leased(leases((10, 40)), all=True, length=LENGTH))
    assert book.barred({0: 19})
    assert isinstance(post(book, 1, 0, 20), str)
    assert not book.barred({0: 20})
    assert draw(book, 20, 10) == [(10, 20)]  # they are still leased, and were dropped
    assert post(book, 2, 20, 30) == leases((10, 20))


def test_a_spare_draws_samples_that_count_nowhere(book: LeaseBook) -> None:
    book.leased(Leased((), all=True, length=LENGTH))
    assert sum(each.stop - each.start for each in book.draw(0, 0, 8, leased=False)) == 8
    assert book.barred({0: 0})
    assert not book.barred({0: 8})


def test_a_trainer_cannot_have_trained_more_than_it_drew(book: LeaseBook) -> None:
    draw(book, 0, 8)
    assert isinstance(post(book, 1, 0, 9), str)
    with pytest.raises(RemoteProtocolError):
        draw(book, 9, 1)


def test_more_is_wanted_the_faster_the_trainer_is() -> None:
    book = LeaseBook()
    book.begin(10_000)
    first = book.want(0.0, 30.0)
    assert isinstance(first, LeasesWanted)
    assert book.want(1.0, 30.0) is None  # one request at a time
    book.leased(Leased(leases((0, first.count)), length=10_000))
    draw(book, 0, first.count)
    second = book.want(2.0, 30.0)
    assert isinstance(second, LeasesWanted)
    assert second.count == 2 * first.count


def test_a_request_that_a_lost_session_took_along_is_made_again() -> None:
    book = LeaseBook()
    book.begin(LENGTH)
    wanted = book.want(0.0, 30.0)
    assert wanted is not None
    assert book.claim() is None
    assert book.want(1.0, 30.0) == wanted


def test_nothing_is_wanted_of_a_run_with_another_data_set() -> None:
    book = LeaseBook()
    book.begin(7)
    assert book.want(0.0, 30.0) is not None
    book.leased(Leased((), length=LENGTH))
    assert book.want(9.0, 30.0) is None


def test_samplers_of_one_trainer_have_one_length(book: LeaseBook) -> None:
    assert not book.begin(LENGTH + 1)
    book.trainer_gone()
    assert book.begin(LENGTH + 1)
