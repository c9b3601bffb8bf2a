"""What the files test_deaths_*.py have in common: each lives through its share of the seeds.

They are files of their own so that they are spread over the machine's cores.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from holdfast.daemon.deaths import Deaths, simulate_deaths

SHARDS = 4
BLOCK = 25
BLOCKS = 20  # of a shard

# Whoever is cut off from the master alone still gives and gets everything; at the commit, or with
# one report to go, there may be nothing left to repair.
REPAIRED = ("before the first byte", "with its first result", "anywhere", "their link breaks")


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
    """Losses that can be repaired mostly were, and hardly anything was run again."""
    plain = [h for h in histories if any(f"{kind}:" in h.loss for kind in REPAIRED)]
    assert 2 * sum(h.repairs > 0 for h in plain) >= len(plain)
    assert sum(h.reruns for h in histories) <= 1
