"""Repairs of a running reduction over virtual links, with the master's part played by its planner.

Contributions are 1, 2, 4, 8 in every element: each set of contributors has a mean of its own.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial

import numpy as np
import pytest
import trio
from attrs import define, field

from holdfast.collectives import allreduce
from holdfast.collectives.allreduce import ReduceResult, Reduction
from holdfast.collectives.arithmetic import Factors
from holdfast.membership.repair import plan_repair
from holdfast.protocol.errors import BadContributionError, PeerLostError, RemoteProtocolError
from holdfast.protocol.memory import MemoryWorld
from holdfast.protocol.messages import FragmentSize, Reduce, Repair
from tests.collectives.test_allreduce import Node, Swarm, ending, in_virtual_time, make_order

SIZE = FragmentSize(2_000, 0, 1)
CHUNK = 200


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
    """A reduction at all nodes, and a master for it."""

    def __init__(self, swarm: Swarm, order: Reduce, weights: Sequence[int]) -> None:
        self.swarm = swarm
        self.order = order
        self.attempt = order.attempt
        self.weights = weights
        self.lost: list[str] = []
        self.owners = [run.peer for run in order.plan.owners for _ in range(run.chunk_count)]
        self.serving: dict[str, Serving] = {}
        for node in swarm.nodes:
            node.values = np.full(SIZE.value_count, 2.0**node.number, np.float32)
            node.counters = np.array([node.number], np.int64)
            gives = node.peer in [c.peer for c in order.contributors]
            reduction = Reduction(
                order,
                node.peer,
                SIZE,
                node.hub,
                node.network,
                node.values if gives else None,
                node.counters if gives else None,
                on_lost=partial(self.note_loss, node.peer),
            )
            self.serving[node.peer] = Serving(node, reduction)
            swarm.nursery.start_soon(self.serving[node.peer].serve)

    def note_loss(self, me: str, error: PeerLostError) -> None:
        self.serving[me].lost.append(error.peer)

    def left(self) -> list[Serving]:
        return [s for peer, s in self.serving.items() if peer not in self.lost]

    def survivors(self) -> list[str]:
        return [c.peer for c in self.order.contributors if c.peer not in self.lost]

    def kill(self, peer: str) -> None:
        self.serving[peer].scope.cancel()
        self.swarm.kill(self.serving[peer].node)

    def repair(self, *lost: str) -> Repair:
        self.lost += lost
        self.attempt += 1
        held = {s.node.peer: s.reduction.flush(self.lost) for s in self.left()}
        assignments = plan_repair(
            self.owners, self.lost, self.survivors(), self.order.receivers, held
        )
        for a in assignments:
            for chunk in range(a.first_chunk, a.first_chunk + a.chunk_count):
                self.owners[chunk] = a.owner
        repair = Repair(self.order.round, self.attempt, tuple(self.lost), assignments)
        for s in self.left():
            s.reduction.repair(repair)
        return repair

    async def finish(self) -> list[ReduceResult]:
        """Wait for everybody's result under the last attempt; check that they are one."""
        with trio.fail_after(60):
            while not all(self.attempt in s.results for s in self.left()):
                await trio.sleep(0.01)
        results = [s.results[self.attempt] for s in self.left()]
        for result in results:
            assert result.digest == results[0].digest
            assert bytes(result.encoded) == bytes(results[0].encoded)
            assert result.values.tobytes() == results[0].values.tobytes()
            assert result.counters.tolist() == results[0].counters.tolist()
            assert result.manifest == results[0].manifest
        self.check(results[0])
        return results

    def check(self, result: ReduceResult) -> None:
        """Every chunk is the mean of exactly those whom the manifest names."""
        names = [c.peer for c in self.order.contributors]
        sets: list[list[int]] = []
        for run in result.manifest:
            inside = [at for at in range(len(names)) if run.contributors[0] >> at & 1]
            sets += [inside] * run.chunk_count
        sets = sets or [list(range(len(names)))] * len(self.owners)
        assert len(sets) == len(self.owners)
        for chunk, inside in enumerate(sets[:-1]):
            weight = sum(self.weights[at] for at in inside)
            mean = sum(self.weights[at] * 2.0**at for at in inside) / weight
            part = result.values[chunk * CHUNK : (chunk + 1) * CHUNK]
            np.testing.assert_allclose(part, mean, rtol=1e-5)
            assert set(self.survivors()) <= {names[at] for at in inside}
        assert result.counters[0] == max(sets[-1])


def begin(swarm: Swarm, weights: Sequence[int] = (3, 5, 7, 11)) -> Round:
    """Four contributors and a listener."""
    contributors = [(node, weights[node.number], 1.0) for node in swarm.nodes[:4]]
    order = make_order(SIZE, contributors, swarm.nodes, chunk_elements=CHUNK)
    return Round(swarm, order, weights)


def histories(rounds: int, harm: str) -> list[tuple[int, int]]:
    """Losses at random instants; returns chunks (anew, spread) by history."""
    outcomes: list[tuple[int, int]] = []

    async def main(seed: int) -> None:
        rng = random.Random(seed)
        async with trio.open_nursery() as nursery:
            with ending(nursery):
                world = MemoryWorld(random.Random(seed), bytes_per_s=10_000, jitter_s=0.01)
                swarm = Swarm(nursery, world)
                await swarm.add(5)
                await swarm.settle()
                round_ = begin(swarm)
                await trio.sleep(rng.uniform(0, 0.7))
                first, second = rng.sample(round_.survivors(), 2)
                lost = [[first, second]] if harm == "two" else [[first], [second]]
                if harm == "one" or harm == "cut off":
                    lost = [[first]]
                anew = spread = 0
                for peers in lost:
                    if harm != "cut off":  # then it goes on as if nothing had happened
                        for peer in peers:
                            round_.kill(peer)
                    repair = round_.repair(*peers)
                    anew += sum(a.chunk_count for a in repair.assignments if a.anew)
                    spread += sum(a.chunk_count for a in repair.assignments if not a.anew)
                    await trio.sleep(rng.uniform(0, 0.4))
                await round_.finish()
                outcomes.append((anew, spread))

    for seed in range(rounds):
        in_virtual_time(partial(main, seed))
    return outcomes


@pytest.mark.parametrize("harm", ["one", "two", "the repairer too", "cut off"])
def test_a_loss_at_any_instant_is_repaired_to_one_exact_result(harm: str) -> None:
    outcomes = histories(30, harm)
    assert sum(anew > 0 for anew, _ in outcomes) >= 8, outcomes
    assert sum(spread > 0 for _, spread in outcomes) >= 4, outcomes


async def test_nothing_of_the_lost_is_accepted_after_the_flush() -> None:
    """A peer that is only cut off from the master goes on sending; late frames change nothing."""
    async with trio.open_nursery() as nursery:
        with ending(nursery):
            swarm = Swarm(nursery, MemoryWorld(random.Random(0), bytes_per_s=10_000))
            await swarm.add(5)
            await swarm.settle()
            round_ = begin(swarm)
            lost = swarm.nodes[1].peer
            for other in ("n0", "n2", "n3", "n4"):
                swarm.world.partition("n1", other)
            await trio.sleep(0.3)
            round_.repair(lost)
            for other in ("n0", "n2", "n3", "n4"):
                swarm.world.heal("n1", other)
            results = await round_.finish()
            await trio.sleep(5)
            assert results == await round_.finish()
            (run,) = results[0].manifest
            assert run.contributors[0] == 0b1101


async def test_what_we_gave_to_a_chunk_without_us_is_told() -> None:
    async with trio.open_nursery() as nursery:
        with ending(nursery):
            swarm = Swarm(nursery, MemoryWorld(random.Random(0), bytes_per_s=10_000))
            await swarm.add(5)
            await swarm.settle()
            round_ = begin(swarm)
            round_.repair(swarm.nodes[1].peer)
            results = await round_.finish()
            assert all(all(r.included) and not r.left_out for r in results[:3])
            assert not any(results[3].included)  # the listener gave nothing
            assert not results[3].left_out


async def test_an_order_to_repair_what_does_not_exist_is_refused() -> None:
    async with trio.open_nursery() as nursery:
        with ending(nursery):
            swarm = Swarm(nursery)
            await swarm.add(5)
            round_ = begin(swarm)
            await trio.sleep(0.1)
            wrong = plan_repair(
                ["x"] * 99, {"x"}, [swarm.nodes[0].peer], [], {swarm.nodes[0].peer: b""}
            )
            with pytest.raises(RemoteProtocolError):
                round_.left()[0].reduction.repair(Repair(1, 2, (), wrong))


# ---------------------------------------------------------------- do these tests see anything?


def accept_after_flush(patch: pytest.MonkeyPatch) -> None:
    """A repair gives new owners, but who is lost is not shut out."""
    original = Reduction._shut_out

    def shut_out(self: Reduction, peer: str) -> None:
        original(self, peer)
        del self._shut[peer]

    patch.setattr(Reduction, "_shut_out", shut_out)


def wrong_divisor(patch: pytest.MonkeyPatch) -> None:
    original = Factors.of

    def of(contributors: Sequence[object], present: Sequence[bool] | None = None) -> Factors:
        whole = original(contributors)  # type: ignore[arg-type]
        if present is None:
            return whole
        kept = tuple(f for f, here in zip(whole.factors, present, strict=True) if here)
        return Factors(kept, whole.divisor)

    patch.setattr(Factors, "of", of)


def two_owners(patch: pytest.MonkeyPatch) -> None:
    """Whoever is left believes that it is the one to add up."""
    original = Reduction._begin_anew

    def begin_anew(self: Reduction, index: int, maker: str) -> None:
        self._owner[index] = self._me
        original(self, index, self._me)

    patch.setattr(Reduction, "_begin_anew", begin_anew)


def waits_for_the_lost(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Reduction, "_shut_out", lambda self, peer: None)


def manifest_lies(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(allreduce, "pack_set", lambda present: b"\x0f" + bytes(7))


@pytest.mark.parametrize(
    "plant", [accept_after_flush, wrong_divisor, two_owners, waits_for_the_lost, manifest_lies]
)
def test_a_planted_bug_is_found(plant: object, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)  # type: ignore[operator]
    with pytest.raises((BaseExceptionGroup, AssertionError, BadContributionError)):
        histories(30, "cut off")
