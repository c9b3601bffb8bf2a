"""Predictions of ``holdfast config plan`` compared with production master and peers in virtual
time.

Every peer has a line of its own to all others. Chunks are small, as those of a large model are
beside its fragments: with a few chunks each owner has one more or less than the plan of a moment
before.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import trio
from attrs import evolve, frozen

from holdfast.membership.master.rounds.round_scheduler import ROUNDS_IN_FLIGHT_MAX
from holdfast.membership.planning.bandwidth import Bandwidth
from holdfast.membership.planning.predict import Conditions, Prediction, predict
from holdfast.membership.spec.spec import RunSpec
from holdfast.simulation.drifting_trainer import small_layout
from holdfast.simulation.swarm import Swarm

ROUNDS = 8  # that are measured; where two are in flight by turns, whole turns
# Before those: shares do not follow the lines yet, and who trained first, some steps ahead of the
# others, waits for every result until all are about in step.
SETTLED = 12
STEP_S = 0.1
WITHIN = 0.10


@frozen
class Case:
    """A spec and its network.

    Attributes:
      up_mbit, down_mbit: of each peer's line.
      delay_s: one way.
    """

    sync_every: int
    fragments: int
    overlap: int
    codecs: tuple[str, str]
    values: int
    up_mbit: float
    down_mbit: float
    peers: int = 3
    delay_s: float = 0.02

    @property
    def spec_toml(self) -> str:
        return f"""
[diloco]
sync_every = {self.sync_every}
fragments = {self.fragments}
overlap = {self.overlap}
[membership]
min_members = {self.peers}
[reduce]
codec_up = "{self.codecs[0]}"
codec_down = "{self.codecs[1]}"
chunk_bytes = 16384
"""

    @property
    def line(self) -> Bandwidth:
        return Bandwidth(self.up_mbit * 1e6 / 8, self.down_mbit * 1e6 / 8)

    def predicted(self) -> Prediction:
        conditions = Conditions(
            self.values, STEP_S, self.peers, self.line, self.delay_s, ROUNDS_IN_FLIGHT_MAX
        )
        return predict(RunSpec.parse(self.spec_toml), conditions)


@frozen
class Measured:
    """Measurements of a peer, averaged over all peers."""

    utilisation: float
    period_s: float
    sent_bytes: float  # in a round
    received_bytes: float


FP32, NF4 = ("fp32", "fp32"), ("nf4", "nf4")
CASES = {
    "blocking, far apart": Case(8, 1, 0, FP32, 200_000, 20, 20, delay_s=0.4),
    "blocking, slow uplinks": Case(8, 2, 0, ("nf4", "bf16"), 500_000, 5, 40),
    "overlapped": Case(12, 1, 4, ("bf16", "bf16"), 300_000, 8, 8),
    "overlapped, slow downlinks": Case(12, 3, 2, ("int8", "int8"), 500_000, 30, 8, peers=5),
    "hidden": Case(16, 4, 4, FP32, 300_000, 20, 20),
    "rounds that queue": Case(16, 4, 8, FP32, 400_000, 8, 8),
    "4 bits": Case(8, 2, 2, NF4, 800_000, 6, 6),
    "three in flight": Case(16, 4, 9, FP32, 300_000, 20, 20, delay_s=0.1),
    "two in flight, and a wait": Case(16, 4, 6, FP32, 300_000, 20, 20, delay_s=0.25),
    "too far for the next one to be open": Case(8, 4, 6, FP32, 300_000, 80, 80, delay_s=0.35),
}


async def measure(case: Case) -> Measured:
    """Measure some rounds, from commit to commit, once the lines' rates are known."""
    layout = small_layout((case.values // case.fragments,) * case.fragments, counters=0)
    names = [f"peer-{number}" for number in range(case.peers)]
    async with trio.open_nursery() as nursery:
        swarm = Swarm(
            nursery,
            case.spec_toml,
            layout=layout,
            step_s=STEP_S,
            delay_s=case.delay_s,
            bytes_per_s=math.inf,
            # Exact in every codec: what a codec leaves out is not what is measured here.
            delta=lambda _peer, _round, count: np.ones(count, np.float32),
        )
        for name in names:
            line = case.line
            swarm.world.share_line([name], up=line.up_bytes_per_s, down=line.down_bytes_per_s)
        await swarm.start_master()
        for name in names:
            swarm.add_peer(name)

        def now() -> tuple[float, float, dict[tuple[str, str], int]]:
            waited_s = sum(swarm.peers[name].trainer.waited_s for name in names)
            return trio.current_time(), waited_s, dict(swarm.world.sent_bytes)

        await swarm.when(lambda: swarm.committed >= SETTLED, within_s=3600)
        began_s, waited_before_s, sent_before = now()
        await swarm.when(lambda: swarm.committed >= SETTLED + ROUNDS, within_s=3600)
        ended_s, waited_s, sent = now()
        nursery.cancel_scope.cancel()
    wall_s = ended_s - began_s
    moved = {way: count - sent_before.get(way, 0) for way, count in sent.items()}
    each = ROUNDS * case.peers
    return Measured(
        utilisation=1 - (waited_s - waited_before_s) / case.peers / wall_s,
        period_s=wall_s / ROUNDS,
        sent_bytes=sum(n for (source, _), n in moved.items() if source in names) / each,
        received_bytes=sum(n for (_, target), n in moved.items() if target in names) / each,
    )


# The dearest ones; the others differ from each other as these do: codecs, lines, overlap.
DEAR = ("overlapped", "overlapped, slow downlinks", "4 bits")


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.nightly] * (name in DEAR)) for name in CASES],
)
async def test_a_prediction_is_what_happens(name: str) -> None:
    predicted, measured = CASES[name].predicted(), await measure(CASES[name])
    assert measured.utilisation == pytest.approx(predicted.utilisation, rel=WITHIN)
    assert measured.period_s == pytest.approx(predicted.period_s, rel=WITHIN)
    assert measured.sent_bytes == pytest.approx(predicted.round_bytes, rel=WITHIN)
    assert measured.received_bytes == pytest.approx(predicted.round_bytes, rel=WITHIN)
    mean_bits_per_s = 8 * measured.sent_bytes / measured.period_s
    assert mean_bits_per_s == pytest.approx(predicted.mean_bits_per_s, rel=WITHIN)


async def test_on_the_line_that_is_needed_nobody_waits_and_on_half_of_it_they_do() -> None:
    case = evolve(CASES["rounds that queue"], overlap=4)
    needed = case.predicted().needed_bits_per_s / 1e6
    assert needed > case.up_mbit
    for times, fewest, most in ((1.1, 0.99, 1.0), (0.5, 0.0, 0.7)):
        line = evolve(case, up_mbit=times * needed, down_mbit=times * needed)
        assert fewest <= (await measure(line)).utilisation <= most
