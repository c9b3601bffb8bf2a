"""Several ranks as one trainer, over the bridge's real socket and memory."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np
import pytest
from attrs import evolve

from holdfast.client.attach_errors import DaemonGone
from holdfast.client.daemon_connection import DaemonConnection
from holdfast.daemon.peer.trainer import bridge as module
from holdfast.daemon.peer.trainer.bridge import UnixBridge
from holdfast.protocol import messages as m
from holdfast.protocol.arena import (
    LOSS_SLOT,
    MAIL_SLOT,
    SAMPLES_SLOT,
    STEP_SLOT,
    TOKENS_SLOT,
    WAITING_SLOT,
    Arena,
)
from tests.background import until

from .test_bridge import folder, on_thread, serving

__all__ = ["folder"]

pytestmark = pytest.mark.real_time

M = TypeVar("M", bound=m.Message)

LAYOUT = m.ModelLayout((m.TensorSpec("weight", (4,), "float32", "parameter"),))
SIZES = (m.FragmentSize(4, 4, 0),)
OPENED = m.ArenaOpened(((0,),), SIZES, 0)
LOAD = m.Load(0, 10, False)


_dialled: list[DaemonConnection] = []


@pytest.fixture(autouse=True)
def _closed_at_the_end() -> Iterator[None]:
    yield
    while _dialled:
        _dialled.pop().close()


def part(rank: int, count: int = 2, data_rank: int | None = None) -> m.RankPart:
    box = m.TensorBox((4 // count * rank,), (4 // count,))
    return m.RankPart(rank, count, rank if data_rank is None else data_rank, (box,))


def dial(bridge: UnixBridge, held: m.RankPart, layout: m.ModelLayout = LAYOUT) -> DaemonConnection:
    connection = DaemonConnection.open(str(bridge.path))
    _dialled.append(connection)
    connection.send(m.TrainerHello(m.VERSION_MAX, 100 + held.rank, layout, held))
    return connection


async def got(connection: DaemonConnection, kind: type[M]) -> M:
    message = await on_thread(connection.receive)
    assert isinstance(message, kind), message
    return message


async def closed(connection: DaemonConnection) -> None:
    with pytest.raises(DaemonGone):
        await on_thread(connection.receive)


async def group(bridge: UnixBridge, parts: Sequence[m.RankPart]) -> list[DaemonConnection]:
    """Ranks that have loaded the shared state and train."""
    ranks = [dial(bridge, each) for each in parts]
    for rank in ranks:
        await got(rank, m.RankWrites)
    return ranks


async def handed(ranks: Sequence[DaemonConnection], count: int) -> list[list[m.Message]]:
    """The messages that each rank is handed at once."""
    found = []
    for rank in ranks:
        assert (await got(rank, m.RankOrders)).count == count
        found.append([await on_thread(rank.receive) for _ in range(count)])
        for descriptor in rank.take_descriptors():
            os.close(descriptor)
    return found


async def loaded(bridge: UnixBridge, ranks: Sequence[DaemonConnection]) -> tuple[Arena, Arena]:
    arenas = bridge.open_arenas(SIZES)
    bridge.tell(OPENED)
    assert await handed(ranks, 1) == [[OPENED]] * len(ranks)
    for rank in ranks:
        rank.send(m.RankWaits(0, True))
    bridge.tell(LOAD)
    assert await handed(ranks, 1) == [[LOAD]] * len(ranks)
    for rank in ranks:
        rank.send(m.RankTrainsOn())
    return arenas


async def test_all_ranks_are_one_trainer_which_leaves_once_and_another_can_come(
    folder: Path,
) -> None:
    async with serving(folder) as (bridge, events):
        for number in (1, 2):
            ranks = await group(bridge, [part(0), part(1)])
            assert await events.until(m.ModelLayout, number) == LAYOUT
            assert bridge.attached_pid == 100
            ranks[1].close()
            await closed(ranks[0])
            ranks[0].close()
            assert (await events.until(str, number)).startswith("rank 1: ")
        assert len(events.seen) == 4


async def test_messages_wait_for_all_ranks_to_stand_at_one_step(folder: Path) -> None:
    async with serving(folder) as (bridge, _events):
        ranks = await group(bridge, [part(0), part(1)])
        shared, posted = await loaded(bridge, ranks)
        posted.rank_slots(0)[STEP_SLOT] = 5
        opened = m.RoundOpened(1, 0, 0, 9, 10)
        bridge.tell(opened)
        await until(lambda: int(shared.slots[1]) == 6)
        ranks[0].send(m.RankWaits(6, False))
        posted.rank_slots(1)[STEP_SLOT] = 7  # it has missed the name
        posted.rank_slots(0)[STEP_SLOT] = 6
        await got(ranks[0], m.RankPassOn)
        await until(lambda: int(shared.slots[1]) == 9)
        for rank in ranks:
            rank.send(m.RankWaits(9, False))
        assert await handed(ranks, 1) == [[opened]] * 2
        assert int(shared.slots[MAIL_SLOT]) == 3


async def test_posts_are_one_and_tokens_count_once_for_each_data_rank(folder: Path) -> None:
    async with serving(folder) as (bridge, events):
        held = [part(rank, 4, rank // 2) for rank in range(4)]
        ranks = await group(bridge, held)
        await loaded(bridge, ranks)
        for rank, (tokens, step_s) in zip(
            ranks, ((5, 0.1), (5, 0.4), (7, 0.2), (6, 0.3)), strict=True
        ):
            rank.send(m.Posted(8, 0, 3, 1, 4, 0.0))  # of a round that is given up
            first_batches = b"%d" % tokens
            rank.send(m.Posted(9, 0, 3, tokens, 4, step_s, (), first_batches))
        assert (await events.until(m.Posted, 2)) == m.Posted(9, 0, 3, 12, 4, 0.4, (), b"5")
        assert (await events.until(m.Posted)).round == 8


async def test_ranks_without_a_sampler_do_not_hold_up_those_that_have_one(folder: Path) -> None:
    """A stage of a pipeline that reads no data; of the others the slowest counts."""
    async with serving(folder) as (bridge, _events):
        held = [part(rank, 4, rank // 3) for rank in range(4)]
        _, posted = await loaded(bridge, await group(bridge, held))
        assert bridge.samples() == {0: 0, 1: 0}
        for rank, count in enumerate((9, 0, 8, 5)):
            posted.rank_slots(rank)[SAMPLES_SLOT] = count
        assert bridge.samples() == {0: 8, 1: 5}


async def test_a_group_that_trained_no_tokens_counts_as_one(folder: Path) -> None:
    async with serving(folder) as (bridge, events):
        ranks = await group(bridge, [part(0), part(1)])
        await loaded(bridge, ranks)
        for rank in ranks:
            rank.send(m.Posted(9, 0, 3, 0, 4, 0.1))
        assert (await events.until(m.Posted)).tokens == 1


async def test_initial_weights_are_posted_once(folder: Path) -> None:
    async with serving(folder) as (bridge, events):
        ranks = await group(bridge, [part(0), part(1)])
        bridge.tell(m.PostInitial())
        await handed(ranks, 1)
        ranks[0].send(m.InitialPosted())
        ranks[0].send(m.Metrics(0, {"a": 1.0}))
        await events.until(m.Metrics)
        ranks[1].send(m.InitialPosted())
        await events.until(m.InitialPosted)
        assert sum(isinstance(each, m.InitialPosted) for each in events.seen) == 1


async def test_the_slots_are_sums_over_the_ranks(folder: Path) -> None:
    async with serving(folder) as (bridge, _events):
        ranks = await group(bridge, [part(rank, 4, rank // 2) for rank in range(4)])
        shared, posted = await loaded(bridge, ranks)
        figures = ((5, 50, 1.0), (4, 40, math.nan), (6, 30, 0.0), (6, 2**64 - 1, 2.0))
        for number, (step, tokens, loss) in enumerate(figures):
            slots = posted.rank_slots(number)
            slots[LOSS_SLOT : LOSS_SLOT + 1].view(np.float64)[0] = loss
            slots[TOKENS_SLOT], slots[STEP_SLOT] = tokens, step
        await until(lambda: float(posted.loss[0]) == 1.0)
        assert int(posted.slots[STEP_SLOT]) == 4
        posted.rank_slots(3)[TOKENS_SLOT] = 20
        await until(lambda: int(posted.slots[TOKENS_SLOT]) == 80)
        assert int(posted.slots[WAITING_SLOT]) == 0
        for rank in ranks[:3]:
            rank.send(m.RankWaits(6, True))
        ranks[3].send(m.RankWaits(6, True))
        await until(lambda: int(posted.slots[WAITING_SLOT]) == 1 + int(shared.slots[MAIL_SLOT]))


async def test_a_step_beyond_all_numbers_does_not_end_the_daemon(folder: Path) -> None:
    async with serving(folder) as (bridge, events):
        ranks = await group(bridge, [part(0), part(1)])
        _, posted = await loaded(bridge, ranks)
        posted.rank_slots(1)[STEP_SLOT] = 2**64 - 1
        bridge.tell(m.RoundOpened(1, 0, 0, 9, 10))
        ranks[0].send(m.Metrics(0, {"a": 1.0}))
        await events.until(m.Metrics)


async def test_a_rank_that_does_not_come_ends_the_wait(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "HELLO_S", 0.3)
    async with serving(folder) as (bridge, _events):
        alone = dial(bridge, part(0, 4))
        reason = (await got(alone, m.Rejected)).reason
        assert reason.startswith("rank 1, 2, 3 did not attach within")
        alone.close()
        await until(lambda: not bridge._busy)
        await group(bridge, [part(0), part(1)])


async def test_a_rank_that_dies_while_others_attach_is_named_to_them(folder: Path) -> None:
    async with serving(folder) as (bridge, events):
        first = dial(bridge, part(0, 4))
        second = dial(bridge, part(1, 4))
        await until(lambda: bridge.group is not None and len(bridge.group.ranks) == 2)
        second.close()
        assert "rank 1 did not stay" in (await got(first, m.Rejected)).reason
        first.close()
        await until(lambda: not bridge._busy)
        assert events.seen == []


@pytest.mark.parametrize(
    "wrong",
    [part(0), part(1, 4), m.RankPart(), evolve(part(0), rank=5)],
    ids=["twice", "world size", "alone", "number"],
)
async def test_only_the_rank_that_does_not_fit_is_sent_away(
    folder: Path, wrong: m.RankPart
) -> None:
    async with serving(folder) as (bridge, _events):
        first = dial(bridge, part(0))
        await until(lambda: bridge.group is not None and bridge.group.ranks)
        culprit = dial(bridge, wrong)
        assert module.ANOTHER in (await got(culprit, m.Rejected)).reason
        second = dial(bridge, part(1))
        await got(first, m.RankWrites)
        await got(second, m.RankWrites)


async def test_another_model_in_one_rank_is_sent_away(folder: Path) -> None:
    async with serving(folder) as (bridge, _events):
        dial(bridge, part(0))
        await until(lambda: bridge.group is not None and bridge.group.ranks)
        other = m.ModelLayout((m.TensorSpec("bias", (4,), "float32", "parameter"),))
        reason = (await got(dial(bridge, part(1), other), m.Rejected)).reason
        assert reason.startswith("ranks 0 and 1 have different models")


@pytest.mark.parametrize("box", [m.TensorBox((0,), (2,)), m.TensorBox((0, 0), (2,))])
async def test_parts_that_are_not_the_model_are_sent_away_all(
    folder: Path, box: m.TensorBox
) -> None:
    async with serving(folder) as (bridge, _events):
        ranks = [dial(bridge, part(0)), dial(bridge, evolve(part(1), boxes=(box,)))]
        reasons = [(await got(rank, m.Rejected)).reason for rank in ranks]
        assert reasons[0] == reasons[1]
        assert "'weight'" in reasons[0]


@pytest.mark.parametrize(
    "message", [m.Metrics(0, {"a": 1.0}), m.RankWaits(3, False), m.Posted(1, 0, 0, 1, 1, 0.1)]
)
async def test_a_message_before_all_ranks_have_come_ends_the_group(
    folder: Path, message: m.Message
) -> None:
    async with serving(folder) as (bridge, events):
        other = dial(bridge, part(0, 4))
        await until(lambda: bridge.group is not None and bridge.group.ranks)
        early = dial(bridge, part(1, 4))
        early.send(message)
        reason = (await got(other, m.Rejected)).reason
        assert "rank 1 did not stay: the training process broke the protocol" in reason
        await closed(early)
        assert events.seen == []


async def test_a_crash_report_of_the_first_rank_is_the_reason(folder: Path) -> None:
    async with serving(folder) as (bridge, events):
        ranks = await group(bridge, [part(0), part(1)])
        ranks[1].send(m.Failing(m.FailureKind.CRASH, "ValueError: first"))
        ranks[1].close()
        await closed(ranks[0])
        ranks[0].close()
        assert await events.until(str) == "ValueError: first"
        report = await bridge.crash_report()
        assert report is not None
        assert report.reason == "ValueError: first"


async def test_losses_that_are_not_finite_in_all_ranks_are_one_report_until_the_next_load(
    folder: Path,
) -> None:
    async with serving(folder) as (bridge, events):
        ranks = await group(bridge, [part(0), part(1)])
        await loaded(bridge, ranks)
        for again in (1, 2):
            for count, rank in enumerate(ranks, 1):
                rank.send(m.Failing(m.FailureKind.NAN, "nan"))
                rank.send(m.Metrics(0, {"a": 1.0}))
                await events.until(m.Metrics, 2 * again - 2 + count)
                assert sum(isinstance(each, m.Failing) for each in events.seen) == again
                if count == 1:  # as the daemon does at once
                    bridge.tell(LOAD)
            for rank in ranks:
                rank.send(m.RankWaits(again, True))
            await handed(ranks, 1)
            for rank in ranks:
                rank.send(m.RankTrainsOn())


async def test_posts_of_weights_that_are_about_to_be_replaced_are_dropped(folder: Path) -> None:
    """They would be refused as well, and be taken for another failure."""
    async with serving(folder) as (bridge, events):
        ranks = await group(bridge, [part(0), part(1)])
        await loaded(bridge, ranks)
        bridge.tell(evolve(LOAD, spoilt=True))
        for rank in ranks:
            rank.send(m.Posted(1, 0, 0, 1, 1, 0.1))
            rank.send(m.Failing(m.FailureKind.NAN, "nan"))
            rank.send(m.RankWaits(1, True))
        await handed(ranks, 1)
        for rank in ranks:
            rank.send(m.Posted(2, 0, 0, 1, 2, 0.1))
        assert (await events.until(m.Posted)).round == 2
        assert not any(isinstance(each, m.Failing) for each in events.seen)


async def test_a_group_that_is_ended_by_the_daemon_is_cut_at_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "RANKS_GO_S", math.inf)
    async with serving(folder) as (bridge, events):
        ranks = await group(bridge, [part(0), part(1)])
        await loaded(bridge, ranks)
        bridge.end(m.FailureKind.HANG, "no step for 5 s", 5.0)
        assert await events.until(str) == "no step for 5 s"
        for rank in ranks:
            await closed(rank)


async def test_a_rank_that_takes_no_messages_is_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "QUEUE_COUNT_MAX", 2)
    monkeypatch.setattr(module, "RANKS_GO_S", 0.1)
    async with serving(folder) as (bridge, events):
        _ranks = await group(bridge, [part(0), part(1)])
        for _ in range(9):
            bridge.tell(m.PostInitial())
            group_now = bridge.group
            assert group_now is not None
            for number in range(2):
                group_now.took(number, m.RankWaits(0, True))
        assert "does not take its messages" in await events.until(str)
