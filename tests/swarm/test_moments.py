"""Moments for who joins: the bytes of one trainer come to another, whatever befalls the donors."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import trio
from attrs import evolve

from holdfast.daemon import moments
from holdfast.daemon.moments import MomentsExchange
from holdfast.daemon.simulation.swarm import Swarm
from tests.swarm.test_swarm import a_swarm, settled, spec

SIZE_BYTES = 100_000


def toml(inner_state: str = "int8", *, contributors: int = 0, sync_every: int = 200) -> str:
    text = spec(contributors=contributors)
    return text.replace(
        "sync_every = 4", f'sync_every = {sync_every}\ninner_state = "{inner_state}"'
    )


def events(swarm: Swarm) -> list[str]:
    assert swarm.master is not None
    status = swarm.master.coordinator.status(trio.current_time())
    return [e["text"] for e in status["events"] if "'s optimizer" in e["text"]]


def make_large(swarm: Swarm, names: str) -> None:
    """So that their moments take a while on the way."""
    for name in names:
        trainer = swarm.peers[name].trainer
        trainer.moments = trainer.moments.ljust(SIZE_BYTES)


def donor_of(swarm: Swarm, name: str) -> str:
    """Whose moments its trainer has."""
    whose = swarm.peers[name].trainer.moments.split()
    assert whose[:1] == [b"of"], "it has none"
    return next(n for n, sim in swarm.peers.items() if sim.peer.encode() == whose[1])


async def test_a_joiner_gets_a_contributors_moments(tmp_path: Path) -> None:
    async with a_swarm("abc", "", toml(), disks=tmp_path) as swarm:
        make_large(swarm, "abc")
        swarm.add_peer("d", founder=False)
        await swarm.until(lambda: bool(events(swarm)), within_s=30)
        donor = donor_of(swarm, "d")
        assert donor in "abc"
        trainers = {name: sim.trainer for name, sim in swarm.peers.items()}
        assert trainers["d"].moments == trainers[donor].moments
        assert f"d ({swarm.peers['d'].peer[:8]})'s optimizer goes on" in events(swarm)[0]
        assert f"moments of {donor} (" in events(swarm)[0]
        assert "0.1 MB" in events(swarm)[0]
        await settled(swarm, "abcd", more=1)
        await trio.sleep(moments.KEPT_S + moments.STALL_S)
        assert not list(tmp_path.glob("*.moments*")), "nothing of it is left on a disk"
        assert len(events(swarm)) == 1


async def test_several_joiners_cost_a_donor_one_copy(tmp_path: Path) -> None:
    async with a_swarm("ab", "", toml(), disks=tmp_path) as swarm:
        copies: list[str] = []
        for name in "ab":
            trainer = swarm.peers[name].trainer
            tell = trainer.tell

            def heard(message: object, name: str = name, tell: object = tell) -> None:
                if type(message).__name__ == "GiveMoments":
                    copies.append(name)
                tell(message)  # type: ignore[operator]

            trainer.tell = heard  # type: ignore[method-assign]
        for name in "cdef":
            swarm.add_peer(name, founder=False)
        await swarm.until(lambda: len(events(swarm)) == 4, within_s=30)
        donors = [donor_of(swarm, name) for name in "cdef"]
        assert sorted(copies) == sorted(set(donors)) != sorted(donors)


@pytest.mark.parametrize("fault", ["dies", "damages", "keeps silent"])
async def test_a_donor_that_fails_half_way_is_replaced_by_another(
    tmp_path: Path, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(moments, "PIECE_BYTES", 1_000)
    monkeypatch.setattr(moments, "STALL_S", 2.0)
    async with a_swarm("abc", "", toml(), disks=tmp_path) as swarm:
        make_large(swarm, "abc")
        donors: list[str] = []
        give = MomentsExchange._give

        async def failing(self: MomentsExchange, peer: str, transfer: int, gift: Any) -> None:
            name = self._parts.config.name
            donors.append(name)
            if len(donors) > 1:
                await give(self, peer, transfer, gift)
            elif fault == "dies":
                swarm.change_lines(name, delay_s=None, bytes_per_s=25_000.0)
                swarm.nursery.start_soon(dies, name)
                await give(self, peer, transfer, gift)
            elif fault == "damages":
                path = tmp_path / "other"
                path.write_bytes(bytes(gift.size_bytes))
                other = moments._File(os.open(path, os.O_RDONLY))
                await give(self, peer, transfer, evolve(gift, file=other))

        async def dies(name: str) -> None:
            await trio.sleep(2.0)
            received_bytes.append(swarm.peers["d"].service.hub.received_bytes)
            swarm.crash(name)

        received_bytes: list[int] = []
        monkeypatch.setattr(MomentsExchange, "_give", failing)
        swarm.add_peer("d", founder=False)
        await swarm.until(lambda: bool(events(swarm)), within_s=30)
        assert len(donors) == 2
        assert donor_of(swarm, "d") == donors[1] != donors[0]
        assert swarm.peers["d"].trainer.moments == swarm.peers[donors[1]].trainer.moments
        assert all(SIZE_BYTES / 4 < each < SIZE_BYTES * 3 / 4 for each in received_bytes)
        assert bool(received_bytes) == (fault == "dies")


async def test_where_nobody_has_any_it_goes_on_without(tmp_path: Path) -> None:
    async with a_swarm("abc", "", toml(), disks=tmp_path) as swarm:
        for name in "abc":
            swarm.peers[name].trainer.moments = b""
        swarm.add_peer("d", founder=False)
        await swarm.until(lambda: bool(events(swarm)), within_s=30)
        assert "begins anew, its rate ramps" in events(swarm)[0]
        assert events(swarm)[0].count("it knows nothing itself") == 3
        await settled(swarm, "abcd", more=1)


async def test_who_contributes_before_they_come_needs_them_no_more(tmp_path: Path) -> None:
    async with a_swarm("abc", "", toml(sync_every=40), disks=tmp_path) as swarm:
        for name in "abc":
            swarm.peers[name].trainer.moments = bytes(300_000)
        swarm.add_peer("d", founder=False)
        swarm.change_lines("d", delay_s=None, bytes_per_s=20_000.0)
        await swarm.until(lambda: bool(events(swarm)), within_s=60)
        assert "its first contribution was due before they came" in events(swarm)[0]
        await settled(swarm, "abcd", more=2)


async def test_nothing_goes_where_the_spec_does_not_say_so(tmp_path: Path) -> None:
    async with a_swarm("abc", "", toml("none", sync_every=20), disks=tmp_path) as swarm:
        swarm.add_peer("d", founder=False)
        await swarm.until(lambda: swarm.in_sync("d"))
        await settled(swarm, "abcd", more=3)
        assert not events(swarm)
        a, d = (swarm.peers[name].service.moments for name in "ad")
        with pytest.raises(moments.NothingToGetError, match="this peer gives none"):
            await d._fetch_from(a._parts.config.me)  # a member that asks all the same


async def test_a_promoted_spare_asks_when_its_steps_begin_to_count(tmp_path: Path) -> None:
    async with a_swarm("abc", "d", toml(contributors=3), disks=tmp_path) as swarm:
        assert not events(swarm)
        swarm.crash("b")
        await swarm.until(lambda: bool(events(swarm)), within_s=30)
        assert donor_of(swarm, "d") in "ac"
