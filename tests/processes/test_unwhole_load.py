"""Ranks of which one finds the shared state whole and another does not: a real group, a real
bridge.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import trio
from safetensors.numpy import load_file

from holdfast.daemon.fragment_layout import fragments_of, sizes_of
from holdfast.membership.spec.spec import DilocoTable
from holdfast.protocol import messages as m
from holdfast.protocol.arena import STEP_SLOT
from tests.daemon.test_bridge import folder, serving
from tests.processes.harness import environment

__all__ = ["folder"]

pytestmark = [pytest.mark.slow, pytest.mark.real_time]

HERE = Path(__file__).parent
HANGS_S = 150.0  # the ranks import torch first
MANY = 1_000_000  # steps


async def until(condition: Callable[[], object]) -> None:
    with trio.fail_after(HANGS_S):
        while not condition():
            await trio.sleep(0.005)


class Spoilt(Exception):
    """Leaves a fragment without a whole version."""


@pytest.mark.fault(
    "one of a peer's processes finds the state unwhole",
    "its read of the arena",
    "all train on, what they post is refused, the next load makes them equal",
)
async def test_a_load_that_fails_in_one_rank_is_made_good_by_the_next_one(
    folder: Path, tmp_path: Path
) -> None:
    gate, saved = tmp_path / "gate", tmp_path / "saved.safetensors"
    command = [sys.executable, str(HERE / "launch_ranks.py"), "2", str(HERE / "gated_ranks.py")]
    async with serving(folder) as (bridge, events):
        with subprocess.Popen(
            [*command, str(bridge.path), str(gate), str(saved)], env=environment()
        ) as launcher:
            try:
                with trio.fail_after(HANGS_S):
                    while not events.seen:
                        await trio.sleep(0.01)
                layout = await events.until(m.ModelLayout)
                diloco = DilocoTable()
                fragments = fragments_of(layout, diloco)
                sizes = sizes_of(fragments)
                shared, posted = bridge.open_arenas(sizes)
                tensors = tuple(fragment.tensors for fragment in fragments)
                bridge.tell(m.ArenaOpened(tensors, sizes, 0))
                bridge.tell(m.PostInitial())
                await events.until(m.InitialPosted)
                with shared.writing(0, 0):
                    shared.values(0)[:] = posted.values(0)
                bridge.tell(m.Load(0, MANY, False))

                def steps() -> list[int]:
                    return [int(posted.rank_slots(rank)[STEP_SLOT]) for rank in (0, 1)]

                await until(lambda: min(steps()) > 5)
                gate.touch()
                with shared.writing(0, 1):
                    shared.values(0)[:] = 1.0
                bridge.tell(m.Load(50, MANY, False))
                await until(
                    lambda: any(isinstance(e, m.Metrics) and e.step >= 50 for e in events.seen)
                )
                with suppress(Spoilt), shared.writing(0, 2):
                    raise Spoilt
                gate.unlink()
                before = min(steps())
                await until(lambda: min(steps()) > before + 3)  # they train on
                bridge.tell(m.RoundOpened(7, 0, 1, 0, MANY))
                found = await events.until(m.Posted)
                assert (found.round, found.version) == (7, 0), "which no peer counts as version 1"
                bridge.tell(m.RoundEnded(7, 0, False, False, 1, 0, MANY))
                with shared.writing(0, 3):
                    shared.values(0)[:] = np.arange(sizes[0].value_count)
                bridge.tell(m.Load(1_000, 1_000, False))
                await until(lambda: steps() == [1_000, 1_000])
                bridge.tell(m.Finished())
                await until(lambda: launcher.poll() is not None)
                assert launcher.returncode == 0
            finally:
                launcher.terminate()
    whole = load_file(saved)
    values = np.concatenate([whole[spec.name].reshape(-1) for spec in layout.tensors])
    np.testing.assert_array_equal(np.sort(values), np.arange(sizes[0].value_count))
