"""The reduction over virtual links: same bits everywhere and exact divisors, whenever a peer
dies.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial

import numpy as np
import pytest
import trio
from attrs import evolve
from hypothesis import event, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from holdfast.collectives.codecs.error_feedback import Residual
from holdfast.collectives.reduction import ReduceResult
from holdfast.membership.spec.spec import CODECS
from holdfast.protocol.errors import (
    BadContributionError,
    LocalProtocolError,
    PeerLostError,
    RemoteProtocolError,
)
from holdfast.protocol.messages import FragmentSize, OwnerRun, Reduce
from holdfast.protocol.network.lane import HEADER_BYTES, TAG_BYTES, FrameHeader, FrameKind
from holdfast.simulation.memory_network import MemoryWorld
from holdfast.simulation.virtual_time import run_virtually
from tests.collectives.net import peer_id, send_frame
from tests.collectives.swarm import (
    Counters,
    Node,
    Swarm,
    a_swarm,
    check_blamed,
    check_same_bits,
    give_input,
    make_order,
    plain,
    reduction_at,
    run,
    settled,
)

# ---------------------------------------------------------------- same bits everywhere


@pytest.mark.slow
@settings(max_examples=120)
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
    names = st.sampled_from(sorted(CODECS))
    codecs = data.draw(st.tuples(names, names), label="codecs")
    weights = data.draw(st.lists(st.integers(0, 10**6), min_size=count, max_size=count))
    weights[0] += 1
    scales = data.draw(
        st.lists(st.sampled_from([1.0, 1.0, 0.5, 0.3, 0.0]), min_size=count, max_size=count)
    )
    owners_too = data.draw(st.booleans(), label="owners beside the contributors")
    seed = data.draw(st.integers(0, 1000))
    event(f"{count} nodes, {contributing} contribute")

    async def main() -> None:
        async with a_swarm(count, MemoryWorld(random.Random(seed), jitter_s=0.02)) as swarm:
            give_input(swarm.nodes, size, seed)
            contributors = swarm.nodes[:contributing]
            order = swarm.order(
                size,
                list(zip(contributors, weights[:contributing], scales, strict=False)),
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

    run_virtually(main, seed=0)


async def test_many_rounds_at_once_over_the_same_links() -> None:
    size = FragmentSize(5_000, 0, 1)
    async with a_swarm(4, MemoryWorld(random.Random(0), bytes_per_s=1e6, jitter_s=0.05)) as swarm:
        give_input(swarm.nodes, size, 2)
        results: list[ReduceResult] = []
        everyone = [(node, 1 + node.number, 1.0) for node in swarm.nodes]

        async def reduce(node: Node, round_: int) -> None:
            # Nodes hear of the rounds in different orders.
            await trio.sleep(random.Random(node.number * 100 + round_).random())
            order = swarm.order(size, everyone, round_=round_)
            results.append(await run(reduction_at(node, order, size)))

        async with trio.open_nursery() as reductions:
            for node in swarm.nodes:
                for round_ in range(1, 7):
                    reductions.start_soon(reduce, node, round_)
        digest, _ = plain(swarm.order(size, everyone), size, swarm.nodes)
        assert [result.digest for result in results] == [digest] * 24


async def test_traffic_is_what_the_butterfly_costs() -> None:
    size = FragmentSize(8_000, 0, 0)
    async with a_swarm(4) as swarm:
        give_input(swarm.nodes, size, 1)
        await swarm.settle()
        await trio.sleep(1)  # until all lanes are open
        order = swarm.order(size, chunk_elements=1_000)
        before = [node.hub.sent_bytes for node in swarm.nodes]
        await swarm.reduce(order, size, swarm.nodes)
        check_same_bits(order, size, swarm.nodes)
        for node, before_bytes in zip(swarm.nodes, before, strict=True):
            # (1 - 1/4) of the input up, 1/4 of the result to three others, in twelve frames.
            payload_bytes = node.hub.sent_bytes - before_bytes - 12 * (HEADER_BYTES + TAG_BYTES)
            assert payload_bytes == 4 * (6_000 + 3 * 2_000)


# ---------------------------------------------------------------- death, cancellation, repair


async def play_master(swarm: Swarm, order: Reduce, size: FragmentSize, nodes: list[Node]) -> None:
    """Run an attempt, as far as it goes; a second after the first failure, stop it everywhere."""
    async with trio.open_nursery() as nursery:
        for node in nodes:
            nursery.start_soon(swarm.reduce_at, node, order, size)
        while any(node.error is None and node.result is None for node in nodes):
            if any(node.error is not None for node in nodes):
                await trio.sleep(1)
                for node in nodes:
                    node.reducing.cancel()
                return
            if all(n.result or n.reducing.cancelled_caught or n.scope.cancel_called for n in nodes):
                return
            await trio.sleep(0.01)


@pytest.mark.slow
def test_a_cancelled_attempt_harms_neither_links_nor_the_next_one() -> None:
    size = FragmentSize(2_000, 0, 1)

    async def main(seed: int) -> None:
        rng = random.Random(seed)
        async with a_swarm(4, MemoryWorld(random.Random(seed), bytes_per_s=20_000)) as swarm:
            await swarm.settle()
            give_input(swarm.nodes, size, seed)
            links = [link for node in swarm.nodes for link in node.hub.links.values()]
            contributors = [(n, 1, 1.0) for n in swarm.nodes[:3]]
            for attempt in (1, 2):
                order = swarm.order(size, contributors, attempt=attempt)
                with trio.move_on_after(rng.uniform(0, 0.6)):
                    await swarm.reduce(order, size, swarm.nodes)
            order = swarm.order(size, contributors, attempt=3)
            started_s = trio.current_time()
            await swarm.reduce(order, size, swarm.nodes)
            assert trio.current_time() - started_s < 2  # nobody waited for stale frames
            check_same_bits(order, size, swarm.nodes)
            assert not any(link.lost.is_set() for link in links)

    for seed in range(30):
        run_virtually(partial(main, seed), seed=seed)


async def test_a_contributor_that_dies_after_giving_everything_stays_in_the_mean() -> None:
    size = FragmentSize(1_000, 0, 0)
    async with settled(3, size) as swarm:
        # The last one owns nothing: once its part is there, nobody needs it.
        order = swarm.order(size, owners=swarm.nodes[:2])
        swarm.world.link("n0", "n1", bytes_per_s=2_000)
        async with swarm.reducing(order, size, *swarm.nodes):
            await trio.sleep(0.5)
            swarm.kill(swarm.nodes[2])
        assert swarm.nodes[2].result is None
        check_same_bits(order, size, swarm.nodes, at=swarm.nodes[:2])


async def test_the_next_attempt_sends_the_bytes_that_the_first_one_sent() -> None:
    size = FragmentSize(1_000, 0, 2)
    async with a_swarm(2) as swarm:
        give_input(swarm.nodes, size, 5)
        rng = np.random.default_rng(6)
        for node in swarm.nodes:  # what an earlier round left out
            node.residual = Residual(size.value_count)
            node.residual.values[:] = rng.standard_normal(size.value_count) * 0.01
        contributors = [(node, 3, 1.0) for node in swarm.nodes]
        codecs = ("nf4", "int8")
        order = swarm.order(size, contributors, codecs=codecs)
        await swarm.reduce(order, size, swarm.nodes)
        digests = [result.digest for result in swarm.results()]
        left = []
        for node in swarm.nodes:
            assert node.encoded_input is not None
            node.encoded_input.settle()
            assert node.residual is not None
            left.append(node.residual.values.copy())
        order = swarm.order(size, contributors, attempt=2, owners=swarm.nodes[1:], codecs=codecs)
        await swarm.reduce(order, size, swarm.nodes)
        assert [result.digest for result in swarm.results()] == digests
        for node, before in zip(swarm.nodes, left, strict=True):
            assert node.residual is not None
            assert node.residual.values.tobytes() == before.tobytes()


# ---------------------------------------------------------------- receivers that only listen


async def reduce_at_once(swarm: Swarm, order: Reduce, size: FragmentSize) -> None:
    """Reduce at the three contributors, which wait for nobody."""
    started_s = trio.current_time()
    await swarm.reduce(order, size, swarm.nodes[:3])
    assert trio.current_time() - started_s < 1


async def test_a_late_receiver_gets_the_result_and_no_peer_waits_for_it() -> None:
    size = FragmentSize(20_000, 0, 1)
    async with settled(4, size, buffer_bytes=4_096) as swarm:
        order = swarm.order(size, swarm.nodes[:3], chunk_elements=500)
        await reduce_at_once(swarm, order, size)
        await trio.sleep(6)
        await swarm.reduce(order, size, swarm.nodes[3:])
        check_same_bits(order, size, swarm.nodes)


async def test_a_receiver_that_never_registers_delays_no_peer() -> None:
    size = FragmentSize(20_000, 0, 1)
    async with settled(4, size, buffer_bytes=4_096) as swarm:
        contributors = [(n, 1, 1.0) for n in swarm.nodes[:3]]
        for round_ in (1, 2, 3):
            order = swarm.order(size, contributors, round_=round_)
            await reduce_at_once(swarm, order, size)
            check_same_bits(order, size, swarm.nodes[:3])
            swarm.nodes[3].hub.router.forget_through(round_, 1)
        await trio.sleep(1)
        assert swarm.nodes[3].hub.router.dropped_frames == 3 * 201
        assert len(swarm.nodes[3].hub.links) == 3


async def test_a_slow_receiver_lags_by_a_few_rounds_at_most() -> None:
    size = FragmentSize(20_000, 0, 0)
    async with settled(3, size, buffer_bytes=4_096) as swarm:
        swarm.world.link("n0", "n2", bytes_per_s=1_000)
        hub = swarm.nodes[0].hub
        for round_ in range(1, 11):
            order = swarm.order(size, swarm.nodes[:2], round_=round_)
            await swarm.reduce(order, size, swarm.nodes[:2])
            await trio.sleep(0.1)
            assert len(hub.trailing._by_peer[peer_id(2)]) == min(round_, 4)


# ---------------------------------------------------------------- shorter frames


def give_sparse_input(nodes: Sequence[Node], size: FragmentSize) -> None:
    """Values of which nine out of ten are 0, as those of a large vocabulary's embedding are."""
    give_input(nodes, size, 5)
    for node in nodes:
        assert node.values is not None
        node.values.reshape(-1, 1_000)[:, 100:] = 0


@pytest.mark.parametrize("codec", ["fp32", "int8", "nf4"])
async def test_compression_saves_bytes_and_changes_no_bit(codec: str) -> None:
    size = FragmentSize(60_000, 0, 2)
    async with a_swarm(4) as swarm:
        give_sparse_input(swarm.nodes, size)
        digests, sent_bytes = set(), [0]
        for round_, name in enumerate((codec, f"{codec}+zstd")):
            for node in swarm.nodes:
                node.encoded_input = None
            order = swarm.order(
                size, swarm.nodes[:3], chunk_elements=10_240, codecs=(name, name), round_=round_
            )
            await swarm.reduce(order, size, swarm.nodes)
            check_same_bits(order, size, swarm.nodes)
            digests |= {result.digest for result in swarm.results()}
            sent_bytes.append(sum(node.hub.sent_bytes for node in swarm.nodes))
        assert len(digests) == 1
        assert sent_bytes[2] - sent_bytes[1] < sent_bytes[1] / 3


async def test_top_k_results_travel_at_their_own_length() -> None:
    size = FragmentSize(64_000, 0, 2)
    async with a_swarm(3) as swarm:
        give_input(swarm.nodes, size, 5)
        order = swarm.order(size, chunk_elements=10_240, codecs=("topk", "topk"))
        await swarm.reduce(order, size, swarm.nodes)
        check_same_bits(order, size, swarm.nodes)
        for node in swarm.nodes:
            # Two parts up and two results down, if chunks were dealt out evenly.
            assert node.hub.sent_bytes * 8 < 2 * 0.17 * size.value_count * 1.5


@pytest.mark.parametrize(
    ("codec", "payload", "said"),
    [
        ("int8+zstd", b"nonsense", "zstd"),
        ("int8+zstd", b"", "sent 0 bytes for a chunk of 102"),
        ("int8+zstd", bytes(103), "sent 103 bytes for a chunk of 102"),
        ("int8", b"nonsense", "sent 8 bytes for a chunk of 102"),
        ("topk", b"nonsense", "topk"),
        ("topk", bytes(21), "sent 21 bytes for a chunk of 20"),
    ],
)
@pytest.mark.parametrize("kind", [FrameKind.CONTRIBUTION, FrameKind.RESULT])
async def test_short_frames_that_are_no_encoding_name_their_sender(
    codec: str, payload: bytes, said: str, kind: FrameKind
) -> None:
    size = FragmentSize(1_000, 0, 0)
    async with a_swarm(2) as swarm:
        give_input(swarm.nodes, size, 5)
        owner = swarm.nodes[0] if kind is FrameKind.RESULT else swarm.nodes[1]
        order = swarm.order(size, owners=[owner], codecs=(codec, codec))

        async with swarm.reducing(order, size, swarm.nodes[1]):
            link = await swarm.nodes[0].hub.link(peer_id(1))
            # All chunks are the honest one's: the bad one among ten is enough.
            for index in range(10 if kind is FrameKind.CONTRIBUTION else 1):
                header = FrameHeader(kind, 1, 1, index, 3, len(payload))
                await send_frame(link, header, payload)
        check_blamed(swarm.nodes[1], swarm.nodes[0], said)


# ---------------------------------------------------------------- what must not be added


@pytest.mark.parametrize("codec", ["fp32", "int8"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, 3e38])
async def test_a_contribution_that_cannot_be_added_is_refused_and_named(
    codec: str, bad: float
) -> None:
    size = FragmentSize(1_000, 0, 0)
    async with a_swarm(3) as swarm:
        give_input(swarm.nodes, size, 5)
        for node in swarm.nodes[1:] if bad == 3e38 else swarm.nodes[2:]:
            assert node.values is not None
            node.values[150] = bad  # in a chunk that the second one owns
        swarm.nodes[2].values[150] *= 1.1  # type: ignore[index]
        order = swarm.order(size, codecs=(codec, "int8"))
        await play_master(swarm, order, size, swarm.nodes)
        errors = [node.error for node in swarm.nodes if node.error is not None]
        assert errors
        for error in errors:
            assert isinstance(error, BadContributionError)
            guilty = {peer_id(2)} if codec == "fp32" else {peer_id(1), peer_id(2)}
            assert error.peer in guilty


async def test_a_result_that_is_not_finite_names_its_owner() -> None:
    size = FragmentSize(1_000, 0, 0)
    async with a_swarm(2) as swarm:
        give_input(swarm.nodes, size, 5)
        order = swarm.order(size, owners=swarm.nodes[:1])

        async with swarm.reducing(order, size, swarm.nodes[1]):
            link = await swarm.nodes[0].hub.link(peer_id(1))
            payload = np.full(100, np.nan, "<f4").tobytes()
            await send_frame(link, FrameHeader(FrameKind.RESULT, 1, 1, 0, 3, 400), payload)
        check_blamed(swarm.nodes[1], swarm.nodes[0])


async def test_junk_from_a_peer_without_a_part_only_costs_its_link() -> None:
    size = FragmentSize(1_000, 0, 0)
    async with settled(3, size, bytes_per_s=4_000) as swarm:
        order = swarm.order(size, swarm.nodes[:2])
        link = await swarm.nodes[2].hub.link(peer_id(0))
        header = FrameHeader(FrameKind.CONTRIBUTION, 1, 1, 0, 3, 400)
        async with swarm.reducing(order, size, *swarm.nodes[:2]):
            await send_frame(link, header, bytes(400))
            await link.lost.wait()
        check_same_bits(order, size, swarm.nodes[:2])


@pytest.mark.fault(
    "bytes of a lane are changed", "AES-GCM", "that link is made anew, no bit changes"
)
async def test_a_tampered_lane_loses_the_link_and_changes_no_bit() -> None:
    size = FragmentSize(1_000, 0, 0)
    async with settled(3, size) as swarm:
        contributors = [(n, 1, 1.0) for n in swarm.nodes]
        order = swarm.order(size, contributors)
        swarm.world.corrupt_next_lane_frame("n0", "n1")
        await play_master(swarm, order, size, swarm.nodes)
        check_blamed(swarm.nodes[1], swarm.nodes[0], "not authentic", PeerLostError)
        order = swarm.order(size, contributors, attempt=2)
        await swarm.reduce(order, size, swarm.nodes)  # over a new link
        check_same_bits(order, size, swarm.nodes)


async def test_orders_that_make_no_sense_are_refused_before_anything_is_sent() -> None:
    size = FragmentSize(1_000, 0, 1)
    async with a_swarm(3) as swarm:
        give_input(swarm.nodes, size, 5)
        a, b, c = swarm.nodes
        good = swarm.order(size, [(a, 1, 1.0), (b, 1, 1.0)])

        def refused(order: Reduce, why: str, node: Node = a) -> None:
            with pytest.raises(RemoteProtocolError, match=why):
                reduction_at(node, order, size)

        refused(evolve(good, receivers=good.receivers[1:]), "takes part but does not receive")
        refused(evolve(good, receivers=(a.peer, b.peer)), "does not name this node", c)
        refused(evolve(good, receivers=(*good.receivers, a.peer)), "receiver twice")
        refused(evolve(good, contributors=good.contributors[:1] * 2), "contributor twice")
        refused(evolve(good, contributors=()), "without any weight")
        refused(swarm.order(size, [(a, 0, 1.0)]), "without any weight")
        refused(swarm.order(size, [(a, 1, 1e300)]), "clip factor")
        pair = [(a, 0, 1.0), (b, 0, 1.0)]
        refused(swarm.order(size, pair, combine="median"), "combines by")
        refused(swarm.order(size, pair, combine="clipped"), "without any weight")
        plan = good.plan
        refused(evolve(good, plan=evolve(plan, codec_up="zip")), "no codec 'zip'")
        refused(evolve(good, plan=evolve(plan, owners=plan.owners[1:])), "chunks")
        huge = (OwnerRun(a.peer, 2**62),)
        refused(evolve(good, plan=evolve(plan, owners=huge)), "chunks")
        big = FragmentSize(2**24, 0, 0)
        order = make_order(big, [(a, 1, 1.0)], [a], chunk_elements=2**24)
        with pytest.raises(RemoteProtocolError, match="fit a frame"):
            reduction_at(a, order, big, None, None)


async def test_wrong_arrays_are_our_own_fault() -> None:
    size = FragmentSize(10, 0, 1)
    async with a_swarm(1) as swarm:
        node = swarm.nodes[0]
        order = make_order(size, [(node, 1, 1.0)], [node])
        counters = np.zeros(1, np.int64)
        wrong: list[tuple[NDArray[np.float32] | None, Counters | None]] = [
            (None, counters),
            (np.zeros(10, np.float32), None),
            (np.zeros(9, np.float32), counters),
            (np.zeros(20, np.float32)[::2], counters),
            (np.zeros(10, np.float64), counters),
            (np.zeros(10, np.float32), np.zeros(2, np.int64)),
        ]
        for values, given_counters in wrong:
            with pytest.raises(LocalProtocolError):
                reduction_at(node, order, size, values, given_counters)
