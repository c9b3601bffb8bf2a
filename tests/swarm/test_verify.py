"""Comparison of all peers' memories by the production master and peers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import trio

from holdfast.checkpoint import blocks
from holdfast.protocol.errors import UserError
from holdfast.simulation.drifting_trainer import small_layout
from holdfast.simulation.swarm import Swarm
from tests.swarm.test_swarm import a_swarm, settled, spec

LAYOUT = small_layout((5_000,), counters=1)  # five blocks of values, five of momentum, one more


@pytest.fixture(autouse=True, scope="module")
def small_blocks() -> Iterator[None]:
    with mock.patch.object(blocks, "BLOCK_BYTES", 4_096):
        yield


async def verified(swarm: Swarm) -> dict[str, Any]:
    assert swarm.master is not None
    return await swarm.master.verifier.run()


def damage(swarm: Swarm, name: str) -> None:
    """Flip a bit of a peer's memory without changing its remembered digests."""
    state = swarm.peers[name].service.state
    assert state is not None
    state.parts(0).values.view("uint8")[4_096 * 2 + 7] ^= 1
    state.parts(0).momentum.view("uint8")[0] ^= 1


async def test_equal_memories_are_equal_while_rounds_go_on() -> None:
    async with a_swarm("abc", layout=LAYOUT) as swarm:
        for _ in range(3):
            answer = await verified(swarm)
            assert (answer["same"], answer["differences"]) == (True, [])
            assert sorted(row["name"] for row in answer["peers"]) == ["a", "b", "c"]
            assert all("same bytes" in row["text"] for row in answer["peers"])
        await settled(swarm, "abc")


@pytest.mark.fault(
    "a bit of a peer's memory falls over",
    "`holdfast verify`; the next round's root",
    "named with its blocks; healed by the round",
)
async def test_a_memory_that_differs_is_named_with_its_blocks() -> None:
    async with a_swarm("abc", layout=LAYOUT) as swarm:
        await swarm.come_to_rest("abc")
        await trio.sleep(1)  # until the last commit is applied everywhere
        heads = swarm.peers["b"].service.replica.heads()
        damage(swarm, "b")
        answer = await verified(swarm)
        assert swarm.peers["b"].service.replica.heads() == heads, "what it remembers is right"
        assert not answer["same"]
        (found,) = answer["differences"]
        assert (found["name"], found["fragment"], found["blocks"]) == ("b", 0, [2, 5])
        assert found["text"].startswith("blocks 2, 5 of 11, compared with ")
        assert found["expected"] == heads[0].root.hex() != found["root"]
        same = {row["name"] for row in answer["peers"] if row["text"].startswith("same bytes")}
        assert same == {"a", "c"}
        damage(swarm, "b")  # the same bits, back again
        assert (await verified(swarm))["same"]


async def test_who_does_not_answer_is_said_and_is_not_waited_for_once_it_is_gone() -> None:
    async with a_swarm("abc", layout=LAYOUT) as swarm:
        await swarm.come_to_rest("abc")
        await trio.sleep(1)  # until the last commit is applied everywhere
        swarm.world.freeze("c")
        answer = await verified(swarm)
        assert not answer["same"]
        assert answer["differences"] == []
        assert {row["name"]: row["text"] for row in answer["peers"]}["c"] == "no answer"
        deadline_s = swarm.spec.membership.deadline_s
        assert trio.current_time() < 60 + 4 * deadline_s, "the silent one was out by then"


async def test_one_verification_at_a_time_and_none_of_nothing() -> None:
    async with trio.open_nursery() as nursery:
        swarm = Swarm(nursery, spec())
        await swarm.start_master()
        with pytest.raises(UserError, match="no state yet"):
            await verified(swarm)
        nursery.cancel_scope.cancel()
    async with a_swarm("abc", layout=LAYOUT) as swarm:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(verified, swarm)
            await trio.sleep(0.001)
            with pytest.raises(UserError, match="is running"):
                await verified(swarm)
        assert (await verified(swarm))["same"]
