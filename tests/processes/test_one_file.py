"""``examples/diloco_one_file.py`` computes what daemons commit, to the last bit.

The two share the training of a peer alone. A root in the master's journal is a digest of a
version's weights and outer momentum.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from examples import diloco_one_file
from examples.diloco_one_file import PRESETS, Array, Peer
from holdfast.checkpoint.blocks import FragmentArrays, block_places, digest_blocks, fragment_root
from holdfast.daemon.master.journal.journal_store import JournalStore
from holdfast.daemon.process.paths import JOURNAL_FILE
from holdfast.membership.master.state.journal import RootKnown
from holdfast.membership.spec.spec import RunSpec
from holdfast.protocol.messages import FragmentSize
from tests.processes.harness import Fleet, Status

TRAINER = (sys.executable, str(Path(__file__).with_name("one_file_trainer.py")))
FILE_LINES_MAX = 150
PEERS = 3  # with unequal tokens: the order of additions, and every weight, change bits
TURNS = 3  # of each fragment: its second round has a residual and a momentum

SPEC = """
[run]
preset = "{preset}"
[diloco]
pace = "lockstep"
[membership]
min_members = {peers}
deadline_s = 60
"""

Roots = dict[tuple[int, int], str]  # by fragment and version, in hex


def computed(preset: str, run_id: str) -> Roots:
    """Return the roots of all versions that the file computes."""
    torch.set_num_threads(1)  # as the trainers
    peers = [Peer(number, preset) for number in range(PEERS)]
    versions = [0] * PRESETS[preset][1]
    found: Roots = {}
    for fragment, weights, momentum in diloco_one_file.run(preset, peers, TURNS):
        versions[fragment] += 1
        key = fragment, versions[fragment]
        found[key] = root(run_id, key, weights, momentum)
    return found


def root(run_id: str, key: tuple[int, int], weights: Array, momentum: Array) -> str:
    size = FragmentSize(len(weights), len(momentum), 0)
    parts = FragmentArrays(weights, momentum, np.empty(0, np.int64))
    digests = digest_blocks(parts, block_places(size))
    return fragment_root(run_id, *key, size, digests).hex()


def committed(preset: str, folder: Path) -> tuple[str, Roots]:
    """Train under daemons; return the run's id, and the roots that members have agreed on."""
    count = PRESETS[preset][1]
    with Fleet(folder) as fleet:
        fleet.start_master(SPEC.format(preset=preset, peers=PEERS))
        for number in range(PEERS):  # they are added up in the order in which they became members
            fleet.join(f"peer{number}", preset, str(number), command=TRAINER, founder=number == 0)
            fleet.until(partial(has_members, number + 1), f"peer{number} is a member")
        # A round begins when the members have agreed on the version before it.
        run_id = fleet.until_committed((TURNS + 1) * count)["run_id"]
        fleet.kill("master")
    store = JournalStore(folder / "master" / JOURNAL_FILE)
    heads = [record.head for record in store.records() if isinstance(record, RootKnown)]
    store.close()
    return run_id, {(each.fragment, each.version): each.root.hex() for each in heads}


def has_members(count: int, status: Status) -> bool:
    return len(status["members"]) == count


@pytest.mark.slow
@pytest.mark.parametrize("preset", PRESETS)
def test_daemons_commit_what_the_file_computes(preset: str, tmp_path: Path) -> None:
    run_id, found = committed(preset, tmp_path)
    wanted = computed(preset, run_id)
    assert len(wanted) == TURNS * PRESETS[preset][1]
    assert {key: found.get(key) for key in wanted} == wanted


@pytest.mark.parametrize("preset", PRESETS)
def test_the_file_has_the_settings_of_the_presets(preset: str) -> None:
    spec = RunSpec.parse(f'[run]\npreset = "{preset}"\n')
    diloco, reduce = spec.diloco, spec.reduce
    up, down = (each.partition("+")[0] for each in reduce.codecs(0))  # zstd changes no value
    outer = diloco.outer_lr, diloco.outer_momentum
    found = diloco.sync_every, diloco.fragments, diloco.overlap, *outer, up, down
    assert found == PRESETS[preset]
    assert diloco.nesterov
    assert reduce.feedback_decay == 1.0


def test_the_file_is_short_and_plain() -> None:
    source = Path(diloco_one_file.__file__).read_text()
    assert len(source.splitlines()) <= FILE_LINES_MAX
    assert "holdfast" not in source
