"""Every setting that may change is changed during a run, and changed back, by restarts of the
master.
"""

from __future__ import annotations

from itertools import pairwise

import attrs
import pytest

from holdfast.membership.master.state.journal import RoundCommitted, SpecChanged
from holdfast.membership.spec.spec import TABLES, RunSpec
from holdfast.simulation.swarm import Swarm
from tests.swarm.test_swarm import a_swarm, settled, spec

# The master refuses another value; it says what other keys are; the trainers or the run's place
# decide.
FIXED = {"run.name", "diloco.fragments", "diloco.groups"}
FIXED |= {"run.preset", "run.journal", "data.samples"}
# Numbers that are not here are halved, or 1 instead of 0.
OTHER = {
    "diloco.sync_every": 21,
    "diloco.pace": "lockstep",
    "membership.contributors": 2,
    "membership.spares": 0,
    "membership.newcomers": "shadow:2",
    "membership.grace_s": 2.0,
    "reduce.codec_up": "int8",
    "reduce.codec_down": "bf16",
    "reduce.combine": "clipped",
    "reduce.congestion": "",
    "checkpoint.peers": 1,
    "data.epochs": 900,
}
KEYS = {f"{name}.{each.name}" for name, kind in TABLES.items() for each in attrs.fields(kind)}


def changed(before: RunSpec, key: str) -> RunSpec:
    name, attribute = key.split(".")
    table = getattr(before, name)
    value = getattr(table, attribute)
    if key in OTHER:
        value = OTHER[key]
    else:
        value = not value if isinstance(value, bool) else type(value)(value / 2) or 1
    after = attrs.evolve(before, **{name: attrs.evolve(table, **{attribute: value})})
    assert after != before
    return after


async def change(swarm: Swarm, spec: RunSpec) -> list[int]:
    """Restart the master with other settings; return the steps of the rounds from just before
    on.
    """
    swarm.crash_master()
    swarm.spec = spec
    swarm.store.append(SpecChanged(spec.toml_text))
    await swarm.start_master()
    await swarm.commit(5)
    records = swarm.store.records()
    return sorted(r.commit.at_step for r in records if isinstance(r, RoundCommitted))[-6:]


@pytest.mark.slow
@pytest.mark.parametrize("key", sorted(KEYS - FIXED))
async def test_a_setting_changes_during_a_run_and_back(key: str) -> None:
    toml = spec(rounds=1000, fragments=2).replace("sync_every = 4", "sync_every = 8")
    async with a_swarm("abc", toml=toml, strict=True, samples=997) as swarm:
        swarm.witness.coarse = key.startswith("reduce.codec")
        swarm.witness.knows_contributions = key != "reduce.combine"
        before = swarm.spec
        for now in (changed(before, key), before):
            steps = await change(swarm, now)
            gaps = [later - step for step, later in pairwise(steps)]
            distance = now.diloco.sync_every / 2
            assert all(abs(gap - distance) < 1 for gap in gaps[2:]), "the schedule is even"
            assert max(gaps) < 15, "and goes on from where it was"
            context = swarm.coordinator.context
            left = now.run.rounds - context.history.commit_count
            assert abs(context.total_steps - context.history.step - left * distance) < 1
            for each in swarm.peers.values():
                assert each.service.replica.trainer.total_steps == context.total_steps
        await settled(swarm, "abc")


async def test_members_apply_a_round_alike_that_was_ordered_with_other_settings() -> None:
    async with a_swarm("abc", jitter_s=0.05) as swarm:

        def versions() -> set[int | None]:
            return {each.service.replica.fragments[0].version for each in swarm.peers.values()}

        await swarm.when(lambda: len(versions()) > 1, within_s=600)
        await change(swarm, changed(swarm.spec, "diloco.outer_lr"))
        await settled(swarm, "abc")
