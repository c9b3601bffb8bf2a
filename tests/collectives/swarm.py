"""Nodes with links between them, virtual or real, and the expected result of their reduction."""

from __future__ import annotations

import itertools
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import trio
from attrs import define, field
from blake3 import blake3
from numpy.typing import NDArray

from holdfast.collectives.codecs.codecs import parse_codec
from holdfast.collectives.codecs.error_feedback import Residual
from holdfast.collectives.encoded_input import EncodedInput
from holdfast.collectives.links.hub import LinkHub
from holdfast.collectives.reduction import ReduceResult, Reduction
from holdfast.collectives.reduction_context import ReductionContext
from holdfast.protocol import messages as m
from holdfast.protocol.errors import BadContributionError, HoldfastError, PeerLostError
from holdfast.protocol.network.interface import Network
from holdfast.simulation.memory_network import MemoryWorld
from tests.background import background
from tests.collectives.coding import Values, decode, encode
from tests.collectives.net import peer_id, real_nodes, start_hub, view

Counters = NDArray[np.int64]


@define(eq=False)
class Node:
    """One peer: its network, its hub, its input, and the result or error of its reduction."""

    number: int
    network: Network
    hub: LinkHub
    scope: trio.CancelScope = field(factory=trio.CancelScope)
    values: Values | None = None
    counters: Counters | None = None
    encoded_input: EncodedInput | None = None
    residual: Residual | None = None
    result: ReduceResult | None = None
    error: HoldfastError | None = None
    reducing: trio.CancelScope = field(factory=trio.CancelScope)

    @property
    def peer(self) -> str:
        return self.hub.me


def reduction_at(
    node: Node, order: m.Reduce, size: m.FragmentSize, *arrays: Any, **more: Any
) -> Reduction:
    """Make a node's part in a reduction, of its own values and counters unless others are given."""
    given = arrays or (node.values, node.counters)
    momentum, on_lost = more.pop("momentum", None), more.pop("on_lost", lambda _error: None)
    context = ReductionContext(order, node.peer, size, node.hub, *given, **more)
    return Reduction(context, node.network, momentum=momentum, on_lost=on_lost)


async def run(reduction: Reduction) -> ReduceResult:
    """Reduce until the result is whole and all that the round needs is sent; a loss ends it."""
    results: list[ReduceResult] = []
    failure: HoldfastError | None = None
    reduction._on_lost = reduction._fail

    whole = trio.Event()

    def take(result: ReduceResult) -> None:
        results.append(result)
        whole.set()

    async def end() -> None:
        await whole.wait()
        while reduction._running and reduction._running.nursery.child_tasks:
            await trio.sleep(0.1)
        nursery.cancel_scope.cancel()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(end)
        try:
            await reduction.serve(take)
        except HoldfastError as error:
            failure = error
            nursery.cancel_scope.cancel()
    if failure is not None:
        raise failure
    return results[-1]


class Swarm:
    """Nodes on virtual links, all in one view."""

    def __init__(self, nursery: trio.Nursery, world: MemoryWorld | None = None) -> None:
        self.nursery = nursery
        self.world = world or MemoryWorld(random.Random(0))
        self.nodes: list[Node] = []

    async def add(self, count: int) -> None:
        for number in range(len(self.nodes), len(self.nodes) + count):
            network = self.world.host(f"n{number}", peer_id(number))
            hub = LinkHub(network, peer_id(number))
            node = Node(number, network, hub)
            self.nodes.append(node)
            await self.nursery.start(self._live, node)
        self.tell_view(self.nodes)

    async def _live(self, node: Node, task_status: trio.TaskStatus[None]) -> None:
        with node.scope:
            async with trio.open_nursery() as nursery:
                await start_hub(nursery, node.hub, node.network)
                task_status.started()

    def tell_view(self, nodes: Sequence[Node]) -> None:
        for node in nodes:
            node.hub.set_members(view(*(each.number for each in nodes)))

    def order(
        self,
        size: m.FragmentSize,
        contributors: Sequence[Node | tuple[Node, int, float]] = (),
        **options: Any,
    ) -> m.Reduce:
        """Make an order that all nodes receive; all contribute unless some are named."""
        return make_order(size, contributors or self.nodes, self.nodes, **options)

    def results(self) -> list[ReduceResult]:
        """Return the results of all nodes, each of which has one."""
        found = [node.result for node in self.nodes if node.result is not None]
        assert len(found) == len(self.nodes)
        return found

    @asynccontextmanager
    async def reducing(
        self, order: m.Reduce, size: m.FragmentSize, *nodes: Node
    ) -> AsyncIterator[None]:
        """Run the order at these nodes beside the block, and to its end after it."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.reduce, order, size, nodes)
            yield

    async def settle(self) -> None:
        """Wait until every pair has its link."""
        for a, b in itertools.permutations(self.nodes, 2):
            await a.hub.link(b.peer)

    def kill(self, node: Node) -> None:
        node.scope.cancel()
        node.reducing.cancel()
        self.world.crash(f"n{node.number}")

    async def reduce(self, order: m.Reduce, size: m.FragmentSize, nodes: Sequence[Node]) -> None:
        """Run the order at these nodes, and store results and errors in the nodes."""
        async with trio.open_nursery() as nursery:
            for node in nodes:
                nursery.start_soon(self.reduce_at, node, order, size)

    async def reduce_at(self, node: Node, order: m.Reduce, size: m.FragmentSize) -> None:
        node.result = node.error = None
        node.reducing = trio.CancelScope()
        with node.reducing:
            reduction = reduction_at(
                node,
                order,
                size,
                encoded_input=node.encoded_input,
                residual=node.residual,
            )
            node.encoded_input = reduction.encoded_input
            try:
                node.result = await run(reduction)
            except (PeerLostError, BadContributionError) as error:
                node.error = error


@asynccontextmanager
async def a_swarm(count: int, world: MemoryWorld | None = None) -> AsyncIterator[Swarm]:
    async with background() as nursery:
        swarm = Swarm(nursery, world)
        await swarm.add(count)
        yield swarm


@asynccontextmanager
async def settled(count: int, size: m.FragmentSize, **line: Any) -> AsyncIterator[Swarm]:
    """Nodes with all their links and some input, on lines with these options."""
    async with a_swarm(count, MemoryWorld(random.Random(0), **line)) as swarm:
        await swarm.settle()
        give_input(swarm.nodes, size, 5)
        yield swarm


@asynccontextmanager
async def a_real_swarm(count: int, directory: Path) -> AsyncIterator[Swarm]:
    """Nodes of this process with loopback sockets between them."""
    async with real_nodes(directory, count) as found, a_swarm(0) as swarm:
        for number, each in enumerate(found):
            swarm.nodes.append(Node(number, each.network, each.hub))
        yield swarm


def make_order(
    size: m.FragmentSize,
    contributors: Sequence[Node | tuple[Node, int, float]],
    receivers: Sequence[Node],
    *,
    chunk_elements: int = 100,
    owners: Sequence[Node] | None = None,
    codecs: tuple[str, str] = ("fp32", "fp32"),
    round_: int = 1,
    attempt: int = 1,
    rng: random.Random | None = None,
    combine: str = "mean",
) -> m.Reduce:
    """An order whose chunks are dealt to ``owners``: one unit each, in turn, or at random.

    Args:
      contributors: with weights and clip factors, or nodes of which each counts the same.
    """
    weighed = [each if isinstance(each, tuple) else (each, 1, 1.0) for each in contributors]
    chunk_count = -(-size.value_count // chunk_elements) + (size.counter_count > 0)
    pool = list(owners) if owners is not None else [node for node, _, _ in weighed]
    dealt = [pool[index % len(pool)] for index in range(chunk_count)]
    if rng is not None:
        for index in range(chunk_count):
            dealt[index] = dealt[index - 1] if rng.random() < 0.5 else rng.choice(pool)
    runs = []
    for peer, chunks in itertools.groupby(node.peer for node in dealt):
        units = rng.choice([1, 2, 3]) if rng is not None else 1
        large, small = divmod(len(list(chunks)) - 1, units)
        runs += [m.OwnerRun(peer, large, units)] if large else []
        runs.append(m.OwnerRun(peer, small + 1))
    return m.Reduce(
        round=round_,
        attempt=attempt,
        fragment=3,
        version=0,
        view=1,
        contributors=tuple(m.Contributor(node.peer, w, scale) for node, w, scale in weighed),
        receivers=tuple(node.peer for node in receivers),
        plan=m.Plan(chunk_elements, tuple(runs), codecs[0], codecs[1], combine=combine),
    )


def plain(order: m.Reduce, size: m.FragmentSize, nodes: Sequence[Node]) -> tuple[bytes, Values]:
    """The same result by plain numpy, from the documented formula: its digest and values."""
    up, down = parse_codec(order.plan.codec_up)[0], parse_codec(order.plan.codec_down)[0]
    by_peer = {node.peer: node for node in nodes}
    heaviest = max(c.weight for c in order.contributors)
    digests, pieces = b"", [np.empty(0, np.float32)]
    units = [run.chunk_units for run in order.plan.owners for _ in range(run.chunk_count)]
    ends = order.plan.chunk_elements * np.cumsum([0, *units])
    for start, end in itertools.pairwise(np.minimum(ends, size.value_count)):
        if start == end:  # the counters' chunk
            continue
        total, divisor = np.full(end - start, -0.0, np.float32), np.float32(0)  # -0.0 + x is x
        for c in order.contributors:
            values = by_peer[c.peer].values
            assert values is not None
            x = decode(up, encode(up, values[start:end]), end - start)
            coefficient = np.float32(c.weight / heaviest)
            total = total + np.float32(float(coefficient) * c.scale) * x
            divisor = np.float32(divisor + coefficient)
        data = encode(down, (total / divisor).astype(np.float32))
        digests += blake3(data).digest()
        pieces.append(decode(down, data, end - start))
    if size.counter_count:
        rows = [by_peer[c.peer].counters for c in order.contributors]
        largest = np.max(np.array(rows), axis=0).astype("<i8").tobytes()
        digests += blake3(largest).digest()
    return blake3(digests).digest(), np.concatenate(pieces)


def encode_all(encoded: EncodedInput) -> None:
    for index in range(len(encoded._layout.cuts)):
        encoded.encode(index)


def give_input(nodes: Sequence[Node], size: m.FragmentSize, seed: int) -> None:
    rng = np.random.default_rng(seed)
    for node in nodes:
        node.values = (rng.standard_normal(size.value_count) * 0.01).astype(np.float32)
        node.counters = rng.integers(-(2**62), 2**62, size.counter_count)
        node.encoded_input = None


def check_blamed(
    node: Node, culprit: Node, said: str = "", kind: type[HoldfastError] = BadContributionError
) -> None:
    """Check that a node's reduction ended because of another node."""
    assert isinstance(node.error, kind)
    assert getattr(node.error, "peer", None) == culprit.peer
    assert said in str(node.error)


def check_same_bits(
    order: m.Reduce, size: m.FragmentSize, nodes: Sequence[Node], at: Sequence[Node] | None = None
) -> None:
    digest, values = plain(order, size, nodes)
    contributors = {contributor.peer for contributor in order.contributors}
    for node in nodes if at is None else at:
        if node.peer not in order.receivers:
            continue
        assert node.error is None
        assert node.result is not None
        assert node.result.digest == digest
        assert node.result.values.tobytes() == values.tobytes()
        if size.counter_count:
            rows = [n.counters for n in nodes if n.peer in contributors]
            assert (node.result.counters == np.max(np.array(rows), axis=0)).all()
