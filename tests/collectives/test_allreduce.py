"""The reduction over virtual links: same bits everywhere, exact divisors, whoever dies when."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import trio
import trio.testing
from attrs import define, evolve, field
from blake3 import blake3
from hypothesis import event, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from holdfast.collectives import allreduce
from holdfast.collectives.allreduce import Reduction, ReduceResult
from holdfast.collectives.arithmetic import EncodedInput, decode_result
from holdfast.collectives.codecs import get_codec
from holdfast.collectives.hub import LinkHub
from holdfast.protocol.addresses import Address
from holdfast.protocol.authority import Authority
from holdfast.protocol.credentials import Credentials
from holdfast.protocol.errors import (
    BadContributionError,
    HoldfastError,
    LocalProtocolError,
    PeerLostError,
    RemoteProtocolError,
)
from holdfast.protocol.identity import Identity
from holdfast.protocol.lane import FrameHeader, FrameKind
from holdfast.protocol.memory import MemoryNetwork, MemoryWorld
from holdfast.protocol.messages import (
    Contributor,
    FragmentSize,
    MemberInfo,
    OwnerRun,
    Plan,
    Reduce,
    Role,
)
from holdfast.protocol.network import Network, Party
from holdfast.protocol.sockets import SocketNetwork

Values = NDArray[np.float32]
Counters = NDArray[np.int64]

PORT = 7_700


def peer_id(number: int) -> str:
    return f"{number:032x}"


@define(eq=False)
class Node:
    """One peer: its network, its hub, what it would contribute, and how its reduction went."""

    number: int
    network: Network
    hub: LinkHub
    scope: trio.CancelScope = field(factory=trio.CancelScope)
    values: Values | None = None
    counters: Counters | None = None
    encoded_input: EncodedInput | None = None
    result: ReduceResult | None = None
    error: HoldfastError | None = None
    reducing: trio.CancelScope = field(factory=trio.CancelScope)

    @property
    def peer(self) -> str:
        return self.hub.me


class Swarm:
    """Nodes on virtual links, all in one view."""

    def __init__(
        self, nursery: trio.Nursery, world: MemoryWorld | None = None, stall_s: float = 20.0
    ) -> None:
        self.nursery = nursery
        self.world = world or MemoryWorld(random.Random(0))
        self.nodes: list[Node] = []
        self.stall_s = stall_s

    async def add(self, count: int) -> None:
        for number in range(len(self.nodes), len(self.nodes) + count):
            network = self.world.host(f"n{number}", peer_id(number))
            hub = LinkHub(network, peer_id(number), stall_s=self.stall_s)
            node = Node(number, network, hub)
            self.nodes.append(node)
            await self.nursery.start(self._live, node)
        self.tell_view(self.nodes)

    async def _live(self, node: Node, task_status: trio.TaskStatus[None]) -> None:
        with node.scope:
            async with trio.open_nursery() as nursery:
                serve = partial(
                    node.network.serve,
                    [Address("::", PORT)],
                    node.hub.handle_channel,
                    node.hub.handle_lane,
                )
                await nursery.start(serve)
                await nursery.start(node.hub.run)
                task_status.started()

    def tell_view(self, nodes: Sequence[Node]) -> None:
        members = [
            MemberInfo(
                peer=node.peer,
                name=f"n{node.number}",
                number=node.number,
                addresses=(f"n{node.number}:{PORT}",),
                role=Role.CONTRIBUTOR,
                in_sync=True,
            )
            for node in nodes
        ]
        for node in nodes:
            node.hub.set_members(members)

    async def settle(self) -> None:
        """Wait until every pair has its link."""
        for a, b in itertools.permutations(self.nodes, 2):
            await a.hub.link(b.peer)

    def kill(self, node: Node) -> None:
        node.scope.cancel()
        node.reducing.cancel()
        self.world.crash(f"n{node.number}")

    async def reduce(self, order: Reduce, size: FragmentSize, nodes: Sequence[Node]) -> None:
        """Run the order at these nodes; what came of it is in the nodes."""
        async with trio.open_nursery() as nursery:
            for node in nodes:
                nursery.start_soon(self.reduce_at, node, order, size)

    async def reduce_at(self, node: Node, order: Reduce, size: FragmentSize) -> None:
        node.result = node.error = None
        node.reducing = trio.CancelScope()
        with node.reducing:
            reduction = Reduction(
                order,
                node.peer,
                size,
                node.hub,
                node.network,
                node.values,
                node.counters,
                encoded_input=node.encoded_input,
            )
            node.encoded_input = reduction.encoded_input
            try:
                node.result = await reduction.run()
            except (PeerLostError, BadContributionError) as error:
                node.error = error


@contextmanager
def ending(nursery: trio.Nursery) -> Iterator[None]:
    yield
    nursery.cancel_scope.cancel()


def make_order(
    size: FragmentSize,
    contributors: Sequence[tuple[Node, int, float]],
    receivers: Sequence[Node],
    *,
    chunk_elements: int = 100,
    owners: Sequence[Node] | None = None,
    codecs: tuple[str, str] = ("fp32", "fp32"),
    round_: int = 1,
    attempt: int = 1,
    rng: random.Random | None = None,
) -> Reduce:
    """An order whose chunks are dealt to ``owners``, in turn or at random."""
    chunk_count = -(-size.value_count // chunk_elements) + (size.counter_count > 0)
    pool = list(owners) if owners is not None else [node for node, _, _ in contributors]
    dealt = [
        (rng.choice(pool) if rng is not None else pool[index % len(pool)])
        for index in range(chunk_count)
    ]
    runs = tuple(
        OwnerRun(peer, len(list(chunks)))
        for peer, chunks in itertools.groupby(node.peer for node in dealt)
    )
    return Reduce(
        round=round_,
        attempt=attempt,
        fragment=3,
        version=0,
        view=1,
        contributors=tuple(Contributor(node.peer, w, scale) for node, w, scale in contributors),
        receivers=tuple(node.peer for node in receivers),
        plan=Plan(chunk_elements, runs, codecs[0], codecs[1]),
    )


def plain(order: Reduce, size: FragmentSize, nodes: Sequence[Node]) -> tuple[bytes, Values]:
    """The same result by plain numpy, from the documented formula: wire bytes and values."""
    up, down = get_codec(order.plan.codec_up), get_codec(order.plan.codec_down)
    by_peer = {node.peer: node for node in nodes}
    heaviest = max(c.weight for c in order.contributors)
    wire, pieces = b"", [np.empty(0, np.float32)]
    for start in range(0, size.value_count, order.plan.chunk_elements):
        end = min(start + order.plan.chunk_elements, size.value_count)
        total, divisor = np.zeros(end - start, np.float32), np.float32(0)
        for c in order.contributors:
            values = by_peer[c.peer].values
            assert values is not None
            x = through(up, values[start:end])[1]
            coefficient = np.float32(c.weight / heaviest)
            total = total + np.float32(float(coefficient) * c.scale) * x
            divisor = np.float32(divisor + coefficient)
        data, decoded = through(down, (total / divisor).astype(np.float32))
        wire += data
        pieces.append(decoded)
    if size.counter_count:
        rows = [by_peer[c.peer].counters for c in order.contributors]
        wire += np.max(np.array(rows), axis=0).astype("<i8").tobytes()
    return wire, np.concatenate(pieces)


def through(codec: allreduce.Layout | object, values: Values) -> tuple[bytes, Values]:
    real = get_codec(codec.name)  # type: ignore[attr-defined]
    data = bytearray(real.encoded_bytes(values.size))
    real.encode(np.ascontiguousarray(values), memoryview(data))
    out = np.empty_like(values)
    real.decode(data, out)
    return bytes(data), out


def give_input(nodes: Sequence[Node], size: FragmentSize, seed: int) -> None:
    rng = np.random.default_rng(seed)
    for node in nodes:
        node.values = (rng.standard_normal(size.value_count) * 0.01).astype(np.float32)
        node.counters = rng.integers(-(2**62), 2**62, size.counter_count)
        node.encoded_input = None


def check_same_bits(order: Reduce, size: FragmentSize, nodes: Sequence[Node]) -> None:
    wire, values = plain(order, size, nodes)
    for node in nodes:
        if node.peer not in order.receivers:
            continue
        assert node.error is None
        assert node.result is not None
        assert bytes(node.result.encoded) == wire
        assert node.result.digest == blake3(wire).digest()
        assert node.result.values.tobytes() == (values + np.float32(0)).tobytes() or (
            node.result.values.tobytes() == values.tobytes()
        )
        again = decode_result(node.result.encoded, order.plan, size)
        assert again[0].tobytes() == node.result.values.tobytes()
        assert again[1].tobytes() == node.result.counters.tobytes()


# ---------------------------------------------------------------- same bits everywhere


@settings(max_examples=120, deadline=None)
@given(st.data())
def test_every_receiver_has_the_bits_of_the_plain_formula(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 6), label="nodes")
    contributing = data.draw(st.integers(1, count), label="contributors")
    size = FragmentSize(
        value_count=data.draw(st.sampled_from([0, 1, 2, 99, 100, 101, 730, 2_000])),
        momentum_count=0,
        counter_count=data.draw(st.sampled_from([0, 1, 5])),
    )
    chunk_elements = data.draw(st.sampled_from([1, 7, 100, 300]))
    if size.value_count > 200:
        chunk_elements = max(chunk_elements, 100)
    codecs = data.draw(st.sampled_from([(a, b) for a in ("fp32", "int8") for b in ("fp32", "int8")]))
    weights = data.draw(st.lists(st.integers(0, 10**6), min_size=count, max_size=count))
    weights[0] += 1
    scales = data.draw(
        st.lists(st.sampled_from([1.0, 1.0, 0.5, 0.3, 0.0]), min_size=count, max_size=count)
    )
    owners_too = data.draw(st.booleans(), label="owners beside the contributors")
    seed = data.draw(st.integers(0, 1000))
    event(f"{count} nodes, {contributing} contribute")

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            with ending(nursery):
                swarm = Swarm(nursery, MemoryWorld(random.Random(seed), jitter_s=0.02))
                await swarm.add(count)
                give_input(swarm.nodes, size, seed)
                contributors = swarm.nodes[:contributing]
                order = make_order(
                    size,
                    list(zip(contributors, weights[:contributing], scales, strict=False)),
                    swarm.nodes,
                    chunk_elements=chunk_elements,
                    owners=swarm.nodes if owners_too else None,
                    codecs=codecs,
                    rng=random.Random(seed),
                )
                before = [(n.values.tobytes(), n.counters.tobytes()) for n in swarm.nodes]  # type: ignore[union-attr]
                await swarm.reduce(order, size, swarm.nodes)
                check_same_bits(order, size, swarm.nodes)
                for node, (values, counters) in zip(swarm.nodes, before, strict=True):
                    assert node.values is not None
                    assert node.counters is not None
                    assert (node.values.tobytes(), node.counters.tobytes()) == (values, counters)

    in_virtual_time(main)


def in_virtual_time(main: object) -> None:
    async def bounded() -> None:
        with trio.fail_after(3_600):
            await main()  # type: ignore[operator]

    trio.run(bounded, clock=trio.testing.MockClock(autojump_threshold=0))
