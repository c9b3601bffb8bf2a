"""What the files test_deaths_*.py have in common: each lives through its share of the seeds.

They are files of their own so that they are spread over the machine's cores.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from holdfast.daemon.simulation.deaths import Deaths, simulate_deaths

BLOCK = 25
BLOCKS = 20  # of a shard


def shard(number: int) -> Callable[[int], None]:
    """The test of one shard; its seeds follow those of the shard before."""
    first = number * BLOCK * BLOCKS

    @pytest.mark.timeout(300)
    @pytest.mark.parametrize(
        "seed", range(first, first + BLOCK * BLOCKS, BLOCK), ids=lambda n: f"seeds-{n}-"
    )
    def test_a_run_survives_losses_in_the_middle_of_reductions(seed: int) -> None:
        histories = [simulate_deaths(each) for each in range(seed, seed + BLOCK)]
        check(histories)

    return test_a_run_survives_losses_in_the_middle_of_reductions


def check(histories: list[Deaths]) -> None:
    """A loss that leaves everything to do is repaired, if enough are left; nothing is run again."""
    for history in histories:
        if "before the first byte:" in history.loss:
            assert history.repairs or history.aborts, history
    assert sum(history.reruns for history in histories) <= 1
