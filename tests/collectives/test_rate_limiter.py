"""The upload cap, in virtual time: right on average, fair, and forgiving of cancellation."""

from __future__ import annotations

import pytest
import trio

from holdfast.collectives.links.rates.rate_limiter import BURST_S, RateLimiter
from holdfast.protocol.errors import LocalProtocolError


async def test_the_rate_is_kept_and_only_a_small_burst_is_free() -> None:
    limiter = RateLimiter(1_000)
    for _round in range(2):
        started_s = trio.current_time()
        for _taken in range(100):
            await limiter.take(50)
        assert trio.current_time() - started_s == pytest.approx(5 - BURST_S)
        await trio.sleep(10)  # an idle node saves up no more than the burst


async def test_takers_share_fairly_whatever_they_ask_for() -> None:
    limiter = RateLimiter(10_000)
    taken = [0, 0, 0]

    async def take(taker: int) -> None:
        while True:
            await limiter.take(100)
            taken[taker] += 100

    with trio.move_on_after(10):
        async with trio.open_nursery() as nursery:
            for taker in range(3):
                nursery.start_soon(take, taker)
    assert sum(taken) == pytest.approx(100_000, rel=0.02)
    assert max(taken) - min(taken) <= 200


async def test_what_a_cancelled_taker_reserved_goes_to_the_others() -> None:
    limiter = RateLimiter(1_000)
    await limiter.take(100)
    with trio.move_on_after(1) as scope:
        await limiter.take(1_000_000)
    assert scope.cancelled_caught
    started_s = trio.current_time()
    await limiter.take(500)
    assert trio.current_time() - started_s <= 0.5


@pytest.mark.parametrize("rate", [0, -1, float("inf"), float("nan")])
def test_a_cap_is_a_positive_number(rate: float) -> None:
    with pytest.raises(LocalProtocolError):
        RateLimiter(rate)
