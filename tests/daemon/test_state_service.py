"""The state that a peer loads when it starts, and refusals that name the difference."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
from attrs import define, evolve

from holdfast.checkpoint.checkpoint_store import FolderStore
from holdfast.checkpoint.checkpoints import CheckpointError, Manifest
from holdfast.daemon.fragment_layout import fragments_of, sizes_of
from holdfast.daemon.peer.peer_config import CurrentSpec, PeerConfig, PeerContext, PeerReport
from holdfast.daemon.peer.state_service import StateService
from holdfast.membership.peer.replica import Replica
from holdfast.membership.spec.spec import RunSpec
from holdfast.protocol.messages import ModelLayout
from holdfast.simulation.drifting_trainer import SimTrainer, small_layout
from holdfast.simulation.witness import Witness
from tests.checkpoint.saving import NONCE, TERM, save
from tests.checkpoint.test_shared_state import founded

ME = "a" * 32
LAYOUT = small_layout((5, 3))


def saved(folder: Path, run_id: str = "run", toml: str = "", step: int = 10) -> Manifest:
    state = founded(*sizes_of(fragments_of(LAYOUT, RunSpec.parse(toml).diloco)), run_id=run_id)
    return save(
        FolderStore(folder),
        state,
        lineage=state.lineage(),
        layout=LAYOUT,
        spec_toml=toml,
        step=step,
    )


@define
class Mine:
    """A state service, and what it reports."""

    state_service: StateService
    report: PeerReport
    replica: Replica


def mine(toml: str = "") -> Mine:
    trainer = SimTrainer(ME, LAYOUT, Witness(), step_s=0.1, delta=None)
    context = PeerContext(
        PeerConfig(ME, "a", "run", (), ()),
        cast("Any", None),
        trainer,
        Replica(ME),
        start=lambda *_: None,
        tell=lambda _message: None,
        perform=lambda _effects: None,
        spec=CurrentSpec(RunSpec.parse(toml)),
    )
    return Mine(StateService(context, cast("Any", None)), context.report, context.replica)


@pytest.mark.fault("a checkpoint is damaged")
def test_the_newest_whole_one_is_taken_up(tmp_path: Path) -> None:
    saved(tmp_path, step=10)
    manifest = saved(tmp_path, step=20)
    broken = saved(tmp_path, step=30).name
    data = bytearray((tmp_path / broken).read_bytes())
    data[-1] ^= 1
    (tmp_path / broken).write_bytes(data)
    (tmp_path / saved(tmp_path, step=40).name).write_bytes(b"what is this")
    told: list[str] = []
    peer = mine()
    assert peer.state_service.restore(FolderStore(tmp_path), told.append)
    assert peer.state_service.restored == manifest
    assert peer.state_service.state.heads() == manifest.fragment_heads()
    assert (manifest.step, manifest.term, manifest.nonce) == (20, TERM, NONCE.hex())
    assert peer.replica.heads() == manifest.fragment_heads()
    assert (peer.replica.term, peer.replica.trainer.run_step) == (TERM, 20)
    assert len(told) == 2
    assert all("damaged" in text for text in told)


def test_where_there_is_none_nothing_is_taken_up(tmp_path: Path) -> None:
    assert not mine().state_service.restore(FolderStore(tmp_path / "none"))


def test_another_runs_are_refused(tmp_path: Path) -> None:
    saved(tmp_path, run_id="other")
    peer = mine()
    with pytest.raises(CheckpointError, match="of run other, and this one is run"):
        peer.state_service.restore(FolderStore(tmp_path))
    assert peer.state_service.known_state is None


@pytest.mark.fault("a checkpoint is of another run, or its spec cuts in another way")
@pytest.mark.parametrize(
    ("layout", "toml", "lineage", "why"),
    [
        (None, "", None, "the run has no weights yet"),
        (small_layout((5, 4)), "", None, "'layer1.weight' has shape"),
        (small_layout((5, 3), counters=2), "", None, "'steps' has shape"),
        (LAYOUT, "[diloco]\nfragments = 2\n", None, "cut into 1 fragments in another way than"),
        (LAYOUT, "", b"\1" * 32, "it began with other weights"),
    ],
)
def test_what_differs_is_named(
    tmp_path: Path, layout: ModelLayout | None, toml: str, lineage: bytes | None, why: str
) -> None:
    manifest = saved(tmp_path)
    peer = mine(toml)
    peer.state_service.restore(FolderStore(tmp_path))
    peer.state_service.check_restored(layout, lineage or bytes.fromhex(manifest.lineage))
    assert why in peer.report.notices[0]
    assert peer.state_service.known_state is None
    assert peer.state_service.restored is None
    assert (peer.replica.lineage, peer.replica.heads()) == (b"", ())


def test_what_is_the_runs_stays(tmp_path: Path) -> None:
    manifest = saved(tmp_path)
    peer = mine()
    peer.state_service.restore(FolderStore(tmp_path))
    peer.state_service.check_restored(evolve(LAYOUT), bytes.fromhex(manifest.lineage))
    assert peer.state_service.restored == manifest
    assert not peer.report.notices
