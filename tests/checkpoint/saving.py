"""Checkpoints as a peer writes them."""

from __future__ import annotations

from typing import Any

from holdfast.checkpoint import checkpoints
from holdfast.checkpoint.checkpoint_store import CheckpointStore
from holdfast.checkpoint.checkpoints import Manifest
from holdfast.checkpoint.shared_state import SharedState
from holdfast.protocol.messages import ModelLayout, TensorSpec

LAYOUT = ModelLayout((TensorSpec("weight", (7,), "float32", "parameter"),))
LINEAGE, TERM, NONCE = b"l" * 32, 3, b"n" * 80
READER = "checkpoint"


def manifest_of(state: SharedState, *, step: int = 400, **other: Any) -> Manifest:
    usual: dict[str, Any] = {
        "lineage": LINEAGE,
        "term": TERM,
        "nonce": NONCE,
        "branch": 0,
        "layout": LAYOUT,
        "spec_toml": "",
        "now_s": 0.0,
    }
    manifest = checkpoints.manifest_of(state, step=step, **(usual | other))
    assert manifest is not None
    return manifest


def save(place: CheckpointStore, state: SharedState, **what: Any) -> Manifest:
    """Write a checkpoint, and return what it says of itself."""
    manifest = manifest_of(state, **what)
    for _written in checkpoints.write(place, state, manifest, reader=READER, writer="me"):
        pass
    return manifest
