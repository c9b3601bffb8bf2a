"""Repairs of a running reduction, with the master's part played by its planner.

Contributions are 1, 2, 4, 8 in every element: each set of contributors has a mean of its own.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import trio
from attrs import define, field

from holdfast.collectives import result
from holdfast.collectives.arithmetic import ChunkLayout, MeanFactors
from holdfast.collectives.chunk_tracker import ChunkTracker
from holdfast.collectives.reduction import ReduceResult, Reduction
from holdfast.collectives.robust_rules import CLIP_STEPS
from holdfast.membership.master.rounds.repair import plan_repair
from holdfast.protocol import messages as m
from holdfast.protocol.errors import BadContributionError, PeerLostError, RemoteProtocolError
from holdfast.protocol.network.lane import FrameKind
from holdfast.simulation.memory_network import MemoryWorld
from holdfast.simulation.virtual_time import run_virtually
from tests.collectives.swarm import Node, Swarm, a_real_swarm, a_swarm, reduction_at, run, settled

SIZE = m.FragmentSize(2_000, 0, 1)
CHUNK = 200
WEIGHTS = (3, 5, 7, 11)


@define(eq=False)
class Serving:
    """One node's reduction, served until the end."""

    node: Node
    reduction: Reduction
    scope: trio.CancelScope = field(factory=trio.CancelScope)
    results: dict[int, ReduceResult] = field(factory=dict)  # by attempt
    lost: list[str] = field(factory=list)

    async def serve(self) -> None:
        def whole(result: ReduceResult) -> None:
            self.results[self.reduction.attempt] = result

        with self.scope:
            await self.reduction.serve(whole)


class Round:
    """A reduction at all nodes, and a master for it. Nodes that are not contributors only
    listen.
    """

    def __init__(self, swarm: Swarm, order: m.Reduce, size: m.FragmentSize = SIZE) -> None:
        self.swarm = swarm
        self.order = order
        self.attempt = order.attempt
        self.size = size
        self.lost: list[str] = []
        self.missed: list[str] = []  # listeners that hold what was made again
        self.owners = [run.peer for run in order.plan.owners for _ in range(run.chunk_count)]
        self.serving: dict[str, Serving] = {}
        self.repairs: list[m.Repair] = []
        contributors = [c.peer for c in order.contributors]
        for node in swarm.nodes:
            gives = node.peer in contributors
            reduction = reduction_at(
                node,
                order,
                size,
                np.full(size.value_count, 2.0**node.number, np.float32) if gives else None,
                np.array([node.number], np.int64) if gives else None,
                audited=True,
                on_lost=partial(self.note_loss, node.peer),
            )
            self.serving[node.peer] = Serving(node, reduction)
            swarm.nursery.start_soon(self.serving[node.peer].serve)

    def note_loss(self, me: str, error: PeerLostError) -> None:
        self.serving[me].lost.append(error.peer)

    def left(self) -> list[Serving]:
        gone = {*self.lost, *self.missed}
        return [serving for peer, serving in self.serving.items() if peer not in gone]

    def survivors(self) -> list[str]:
        return [c.peer for c in self.order.contributors if c.peer not in self.lost]

    def kill(self, peer: str) -> None:
        self.serving[peer].scope.cancel()
        self.swarm.kill(self.serving[peer].node)

    def repair(self, *lost: str) -> m.Repair:
        self.lost += lost
        self.attempt += 1
        held = {s.node.peer: s.reduction.flush(self.lost) for s in self.left()}
        assignments = plan_repair(
            self.owners, self.lost, self.survivors(), self.order.receivers, held
        )
        for a in assignments:
            stop = a.first_chunk + a.chunk_count
            self.owners[a.first_chunk : stop] = [a.owner] * a.chunk_count
        repair = m.Repair(self.order.round, self.attempt, tuple(self.lost), assignments)
        for serving in self.left():
            try:
                serving.reduction.repair(repair)
            except RemoteProtocolError:
                assert serving.node.peer not in self.survivors()
                serving.scope.cancel()
                self.missed.append(serving.node.peer)
        self.repairs.append(repair)
        return repair

    async def finish(self) -> list[ReduceResult]:
        """Wait for everybody's result under the last attempt; check that they are one."""
        with trio.fail_after(60):
            while not all(self.attempt in s.results for s in self.left()):
                await trio.sleep(0.01)
        results = [serving.results[self.attempt] for serving in self.left()]
        for each in results:
            assert each.digest == results[0].digest
            assert each.values.tobytes() == results[0].values.tobytes()
            assert each.counters.tolist() == results[0].counters.tolist()
            assert each.manifest == results[0].manifest
        self.check(results[0])
        return results

    def check(self, result: ReduceResult) -> None:
        """Check that every chunk is the mean of exactly the contributors that the manifest
        names.
        """
        names = [c.peer for c in self.order.contributors]
        sets: list[list[int]] = []
        for each in result.manifest:
            inside = [at for at in range(len(names)) if each.contributors[0] >> at & 1]
            sets += [inside] * each.chunk_count
        sets = sets or [list(range(len(names)))] * len(self.owners)
        assert len(sets) == len(self.owners)
        cuts = ChunkLayout.of(self.order.plan, self.size).cuts
        for cut, inside in zip(cuts, sets[:-1], strict=False):
            mean = expected(self.order.plan.combine, inside)
            part = result.values[cut.values]
            np.testing.assert_allclose(part, mean, rtol=1e-2)
            assert set(self.survivors()) <= {names[at] for at in inside}
        assert result.counters[0] == max(sets[-1])


def expected(rule: str, inside: Sequence[int]) -> float:
    """Return the result of the contributors in a chunk, which each gave one number everywhere."""
    values, weights = [2.0**at for at in inside], [float(WEIGHTS[at]) for at in inside]
    if rule == "mean":
        return statistics.fmean(values, weights)
    weights = [min(each, 5.0) for each in weights]  # the median of the order's weights
    centre = statistics.median(values)
    for _ in range(CLIP_STEPS):
        apart = [value - centre for value in values]
        bound = statistics.median(abs(each) for each in apart)
        shares = [min(1.0, bound / abs(each)) ** 2 if each else 1.0 for each in apart]
        steps = zip(weights, shares, apart, strict=True)
        centre += sum(math.prod(each) for each in steps) / sum(weights)
    return centre


def begin(
    swarm: Swarm,
    codec: str = "fp32",
    size: m.FragmentSize = SIZE,
    chunk_elements: int = CHUNK,
    combine: str = "mean",
    rng: random.Random | None = None,
) -> Round:
    """Begin a round with four contributors; the other nodes listen."""
    contributors = [(node, WEIGHTS[node.number], 1.0) for node in swarm.nodes[:4]]
    order = swarm.order(
        size,
        contributors,
        chunk_elements=chunk_elements,
        codecs=(codec, codec),
        combine=combine,
        rng=rng,
    )
    return Round(swarm, order, size)


def histories(
    count: int, harm: str, codec: str = "fp32", combine: str = "mean"
) -> list[tuple[int, int]]:
    """Losses at random instants; returns chunks (anew, spread) by history."""
    outcomes: list[tuple[int, int]] = []

    async def main(seed: int) -> None:
        rng = random.Random(seed)
        world = MemoryWorld(random.Random(seed), bytes_per_s=10_000, jitter_s=0.01)
        async with a_swarm(5, world) as swarm:
            await swarm.settle()
            chunks_of_units = random.Random(seed) if seed % 2 else None
            round_ = begin(swarm, codec, combine=combine, rng=chunks_of_units)
            await trio.sleep(rng.uniform(0, 0.7 if codec == "fp32" else 0.3))
            first, second = rng.sample(round_.survivors(), 2)
            lost = {"two": [[first, second]], "the successor too": [[first], [second]]}
            anew = spread = 0
            for peers in lost.get(harm, [[first]]):
                if harm != "cut off":  # then it goes on as if nothing had happened
                    for peer in peers:
                        round_.kill(peer)
                repair = round_.repair(*peers)
                anew += sum(a.chunk_count for a in repair.assignments if a.from_scratch)
                spread += sum(a.chunk_count for a in repair.assignments if not a.from_scratch)
                await trio.sleep(rng.uniform(0, 0.4))
            await round_.finish()
            outcomes.append((anew, spread))

    for seed in range(count):
        run_virtually(partial(main, seed), seed=seed)
    return outcomes


@pytest.mark.parametrize("harm", ["one", "two", "the successor too", "cut off"])
def test_a_loss_at_any_instant_is_repaired_to_one_exact_result(harm: str) -> None:
    outcomes = histories(20, harm)
    assert sum(anew > 0 for anew, _ in outcomes) >= 6, outcomes
    assert sum(spread > 0 for _, spread in outcomes) >= 3, outcomes


@pytest.mark.fault("some contributors post lies of a usual length")
def test_after_a_loss_a_robust_rule_is_about_those_who_are_in_a_chunk() -> None:
    outcomes = histories(20, "one", combine="clipped")
    assert sum(anew > 0 for anew, _ in outcomes) >= 6, outcomes


@pytest.mark.parametrize("codec", ["int8", "bf16+zstd"])
def test_what_is_spread_after_a_loss_is_what_its_owner_made(codec: str) -> None:
    outcomes = histories(12, "cut off", codec)
    assert sum(spread > 0 for _, spread in outcomes) >= 2, outcomes


async def cut_off_for_a_while(at_s: float) -> None:
    """Deliver a lost peer's frames when the round is over; they may change nothing."""
    async with settled(5, SIZE, bytes_per_s=10_000) as swarm:
        round_ = begin(swarm)
        await trio.sleep(at_s)
        for other in ("n0", "n2", "n3", "n4"):
            swarm.world.partition("n1", other)
        round_.repair(swarm.nodes[1].peer)
        results = await round_.finish()
        before = [each.values.tobytes() for each in results]
        for other in ("n0", "n2", "n3", "n4"):
            swarm.world.heal("n1", other)
        await trio.sleep(5)
        assert await round_.finish() == results
        assert [each.values.tobytes() for each in results] == before


def test_nothing_of_the_lost_is_accepted_after_the_flush() -> None:
    for step in range(12):
        run_virtually(partial(cut_off_for_a_while, 0.04 * step), seed=0)


async def test_a_repair_before_anything_was_sent() -> None:
    async with settled(5, SIZE, bytes_per_s=10_000) as swarm:
        round_ = begin(swarm)
        repair = round_.repair(swarm.nodes[1].peer)
        assert all(assignment.from_scratch for assignment in repair.assignments)
        results = await round_.finish()
        (run,) = results[0].manifest
        assert run.contributors[0] == 0b1101


async def test_only_one_contributor_is_left() -> None:
    async with settled(5, SIZE, bytes_per_s=10_000) as swarm:
        round_ = begin(swarm)
        await trio.sleep(0.2)
        for node in swarm.nodes[:3]:
            round_.kill(node.peer)
        round_.repair(*(node.peer for node in swarm.nodes[:3]))
        results = await round_.finish()
        assert results[0].values[-1] == 8.0


async def test_orders_that_do_not_fit_are_refused() -> None:
    async with a_swarm(5) as swarm:
        round_ = begin(swarm)
        await trio.sleep(0.1)
        reduction = round_.left()[0].reduction
        successor, lost = swarm.nodes[0].peer, swarm.nodes[1].peer
        wrong = (
            m.Assignment(99, 1, successor, True, b""),  # no such chunk
            m.Assignment(1, 1, "f" * 32, True, b""),  # no such peer
            m.Assignment(0, 1, successor, True, b""),  # a chunk whose owner lives
        )
        for attempt, assignment in enumerate(wrong, 2):
            with pytest.raises(RemoteProtocolError):
                reduction.repair(m.Repair(1, attempt, (lost,), (assignment,)))


async def test_a_node_says_whose_contributions_and_results_it_lacks() -> None:
    async with settled(5, SIZE, bytes_per_s=10_000) as swarm:
        silent, owner = swarm.nodes[0].peer, swarm.nodes[1].peer
        swarm.world.partition("n0", "n1", one_way=True)  # what it owes this owner never comes
        round_ = begin(swarm)
        await trio.sleep(5)
        said = {s.node.peer: s.reduction.diagnosis() for s in round_.left()}
        assert (said[owner].contributions, said[owner].results) == ((silent,), (silent,))
        for peer, diagnosis in said.items():
            if peer != owner:
                assert (diagnosis.contributions, diagnosis.results) == ((), (owner,))
                assert owner not in {made.maker for made in diagnosis.made}
                assert diagnosis.attempt == 1


async def test_a_peer_that_waits_for_results_is_not_named_beside_one_that_owes_frames() -> None:
    """Others send no more than some chunks beyond the results that come back."""
    with mock.patch("holdfast.collectives.chunk_sender.CONTRIBUTIONS_BYTES_MAX", 0):
        async with settled(5, SIZE, bytes_per_s=1e6) as swarm:
            silent, owner = swarm.nodes[0].peer, swarm.nodes[1].peer
            swarm.world.partition("n0", "n1", one_way=True)
            round_ = begin(swarm, size=m.FragmentSize(40 * CHUNK, 0, 1))
            await trio.sleep(5)
            said = {s.node.peer: s.reduction.diagnosis() for s in round_.left()}
            assert said[owner].contributions == (silent,)
            for peer, diagnosis in said.items():
                assert set(diagnosis.contributions) <= ({silent} if peer == owner else {owner})


async def test_all_nodes_report_equal_digests_by_maker_before_and_after_a_repair() -> None:
    for kill in (False, True):
        async with settled(5, SIZE, bytes_per_s=10_000) as swarm:
            round_ = begin(swarm)
            if kill:
                await trio.sleep(0.2)
                round_.kill(swarm.nodes[1].peer)
                round_.repair(swarm.nodes[1].peer)
            await round_.finish()
            said = [s.reduction.diagnosis() for s in round_.left()]
            assert len({diagnosis.made for diagnosis in said}) == 1
            assert said[0].made
            assert not any(diagnosis.contributions or diagnosis.results for diagnosis in said)


@pytest.mark.slow
@pytest.mark.real_time
@pytest.mark.parametrize("codec", ["fp32", "int8"])
async def test_repairs_while_threads_work_the_lanes(tmp_path: Path, codec: str) -> None:
    """Real sockets: frames are delivered in threads while the event loop shuts peers out."""
    size = m.FragmentSize(2**20, 0, 1)
    for seed in range(4):
        directory = tmp_path / str(seed)
        directory.mkdir()
        async with a_real_swarm(5, directory) as swarm:
            await swarm.settle()
            round_ = begin(swarm, codec, size, chunk_elements=2**14)
            rng = random.Random(seed)
            for peer in rng.sample(round_.survivors(), 2):
                await trio.sleep(rng.uniform(0, 0.03))
                round_.repair(peer)
            await round_.finish()


# ---------------------------------------------------------------- do these tests see anything?


def accept_after_flush(patch: pytest.MonkeyPatch) -> None:
    """A repair names new owners, but lost peers are not shut out."""
    original = ChunkTracker.shut_out

    def shut_out(self: ChunkTracker, peers: Sequence[str]) -> list[int]:
        complete = original(self, peers)
        self._shut -= set(peers)
        return complete

    patch.setattr(ChunkTracker, "shut_out", shut_out)


def wrong_divisor(patch: pytest.MonkeyPatch) -> None:
    original = MeanFactors.of

    def of(
        contributors: Sequence[m.Contributor], present: Sequence[bool] | None = None
    ) -> MeanFactors:
        whole = original(contributors)
        if present is None:
            return whole
        kept = tuple(f for f, here in zip(whole.factors, present, strict=True) if here)
        return MeanFactors(kept, whole.divisor)

    patch.setattr(MeanFactors, "of", of)


def two_owners(patch: pytest.MonkeyPatch) -> None:
    """Every node that is left takes itself for the successor."""
    original = Reduction.repair

    def repair(self: Reduction, order: m.Repair) -> None:
        mine = tuple(
            m.Assignment(a.first_chunk, a.chunk_count, self._context.me, a.from_scratch, a.lacking)
            for a in order.assignments
        )
        original(self, m.Repair(order.round, order.attempt, order.lost, mine))

    patch.setattr(Reduction, "repair", repair)


def waits_for_lost_peers(patch: pytest.MonkeyPatch) -> None:
    def shut_out(self: ChunkTracker, peers: Sequence[str]) -> list[int]:
        self._shut |= set(peers)
        return []

    patch.setattr(ChunkTracker, "shut_out", shut_out)


def manifest_lies(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(result, "pack_set", lambda present: b"\x07")


@pytest.mark.planted
@pytest.mark.parametrize(
    "plant",
    [
        accept_after_flush,
        wrong_divisor,
        two_owners,
        waits_for_lost_peers,
        manifest_lies,
    ],
)
def test_a_planted_bug_is_found(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    with pytest.raises((BaseExceptionGroup, AssertionError, BadContributionError)):
        histories(30, "cut off")


# ---------------------------------------------------------------- frames that come at once


async def test_a_chunk_that_threads_complete_while_a_reduction_begins_is_spread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Lanes' threads bring frames as soon as the keys are registered, before any task has begun."""
    async with a_swarm(3) as swarm:
        owner, contributor, listener = swarm.nodes
        contributors = [(owner, 1, 1.0), (contributor, 1, 1.0)]
        order = swarm.order(SIZE, contributors, owners=[owner])
        values = np.ones(SIZE.value_count, np.float32)
        counters = np.zeros(1, np.int64)

        def begun_at(node: Node) -> Reduction:
            given = (None, None) if node is listener else (values, counters)
            return reduction_at(node, order, SIZE, *given)

        at_owner, at_contributor = begun_at(owner), begun_at(contributor)

        def bring(_round: int) -> None:
            for index in range(21):
                frame = at_contributor._sender.contribution_load(index, 1)()
                assert frame is not None
                sink = owner.hub.router._sinks[FrameKind.CONTRIBUTION, 1, 1]
                place = sink.place(contributor.peer, frame[0])
                assert place is not None
                place[:] = frame[1]
                sink.deliver(contributor.peer, frame[0], place)

        monkeypatch.setattr(owner.hub.trailing, "stop", bring)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(run, at_owner)
            with trio.fail_after(60):
                result = await run(begun_at(listener))
        assert (result.values == 1).all()


class Completing(trio.abc.Instrument):
    """Says that a thread has completed a reduction, as one may at any moment, when all its tasks
    have ended.
    """

    def __init__(self, reductions: Sequence[Reduction]) -> None:
        self.reductions = reductions
        self.errors: list[Exception] = []

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        for reduction in self.reductions:
            running = reduction._running
            if running is None or running.nursery.child_tasks:
                continue
            try:
                reduction._became_complete()
            except RuntimeError as error:
                self.errors.append(error)


def test_a_chunk_that_is_completed_while_a_reduction_ends_starts_nothing() -> None:
    async def main() -> None:
        async with a_swarm(5, MemoryWorld(random.Random(1))) as swarm:
            await swarm.settle()
            round_ = begin(swarm)
            await round_.finish()
            completing = Completing([each.reduction for each in round_.serving.values()])
            trio.lowlevel.add_instrument(completing)
            for each in round_.serving.values():
                each.scope.cancel()
            await trio.sleep(1)
            trio.lowlevel.remove_instrument(completing)
            assert completing.errors == []

    run_virtually(main, seed=1)
