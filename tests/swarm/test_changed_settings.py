"""Every setting that may change is changed during a run, and changed back, by restarts of the master."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise

import attrs
import pytest
import trio

from holdfast.membership.master.state.journal import RoundCommitted, SpecChanged
from holdfast.membership.spec.spec import TABLES, RunSpec
from holdfast.simulation.swarm import Swarm

SPEC = """
[run]
rounds = 1000
[diloco]
sync_every = 8
fragments = 2
[membership]
contributors = 3
min_members = 2
deadline_s = 3.0
grace_s = 1.0
"""
# The master refuses another value; it says what other keys are; the trainers or the run's place decide.
FIXED = {"run.name", "diloco.fragments", "diloco.groups"}
FIXED |= {"run.preset", "run.journal", "data.samples"}
# Numbers that are not here are halved, or 1 instead of 0.
OTHER = {
    "diloco.sync_every": 21,
    "diloco.pace": "lockstep",
    "membership.contributors": 2,
    "membership.spares": 0,
    "reduce.codec_up": "int8",
    "reduce.codec_down": "bf16",
    "reduce.combine": "clipped",
    "reduce.congestion": "",
    "checkpoint.peers": 1,
    "data.epochs": 900,
}
KEYS = {f"{name}.{each.name}" for name, kind in TABLES.items() for each in attrs.fields(kind)}
NAMES = ("oak", "elm", "ash")


def changed(spec: RunSpec, key: str) -> RunSpec:
    name, attribute = key.split(".")
    table = getattr(spec, name)
    value = getattr(table, attribute)
    if key in OTHER:
        value = OTHER[key]
    elif isinstance(value, bool):
        value = not value
    else:
        value = type(value)(value / 2) or type(value)(1)
    return attrs.evolve(spec, **{name: attrs.evolve(table, **{attribute: value})})


@asynccontextmanager
async def running(jitter_s: float = 0.0) -> AsyncIterator[Swarm]:
    """A run of three peers, whose copies are equal at the end."""
    async with trio.open_nursery() as nursery:
        swarm = Swarm(nursery, SPEC, strict=True, samples=997, jitter_s=jitter_s)
        await swarm.start_master()
        for name in NAMES:
            swarm.add_peer(name)
        await swarm.until(lambda: swarm.committed >= 3)
        yield swarm
        await swarm.come_to_rest(NAMES)
        swarm.check_final(NAMES)
        nursery.cancel_scope.cancel()


async def change(swarm: Swarm, spec: RunSpec) -> list[int]:
    """Restart the master with other settings; return the steps of the commits from just before on."""
    swarm.crash_master()
    swarm.spec = spec
    swarm.store.append(SpecChanged(spec.toml_text))
    await swarm.start_master()
    target = swarm.committed + 5
    await swarm.until(lambda: swarm.committed >= target)
    commits = [r.commit for r in swarm.store.records() if isinstance(r, RoundCommitted)]
    return [commit.at_step for commit in commits[-6:]]


@pytest.mark.slow
@pytest.mark.parametrize("key", sorted(KEYS - FIXED))
async def test_a_setting_changes_during_a_run_and_back(key: str) -> None:
    async with running() as swarm:
        swarm.witness.coarse = key.startswith("reduce.codec")
        swarm.witness.knows_contributions = key != "reduce.combine"
        before = swarm.spec
        for spec in (changed(before, key), before):
            assert changed(before, key) != before
            steps = await change(swarm, spec)
            gaps = [later - step for step, later in pairwise(steps)]
            distance = spec.diloco.sync_every / 2
            assert all(abs(gap - distance) < 1 for gap in gaps[2:]), "the schedule is even"
            assert max(gaps) < 15, "and goes on from where it was"
            context = swarm.coordinator.context
            left = spec.run.rounds - context.history.commit_count
            assert abs(context.total_steps - context.history.step - left * distance) < 1
            for each in swarm.peers.values():
                assert each.service.replica.trainer.total_steps == context.total_steps


async def test_members_apply_a_round_alike_that_was_ordered_with_other_settings() -> None:
    async with running(jitter_s=0.05) as swarm:

        def versions() -> set[int | None]:
            return {each.service.replica.fragments[0].version for each in swarm.peers.values()}

        await swarm.when(lambda: len(versions()) > 1, within_s=600)
        await change(swarm, changed(swarm.spec, "diloco.outer_lr"))
