"""The records of the status as tests look at them: plain JSON."""

from __future__ import annotations

from typing import Any

import msgspec

from holdfast.daemon.status_records import CheckpointStatus, MasterStatus, PeerStatus
from holdfast.membership.master.coordinator import Coordinator
from holdfast.membership.master.status import status


def describe(coordinator: Coordinator, now_s: float, *, past: bool = True) -> dict[str, Any]:
    """Return the status of a run as a master answers it."""
    told = status.describe(coordinator, now_s, past=past)
    plain: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(told))
    return plain


def master_status(coordinator: Coordinator, now_s: float, name: str) -> MasterStatus:
    """Return the status of a master that has this name and listens nowhere."""
    more: dict[str, Any] = {
        "kind": "master",
        "version": "0",
        "journal_cut": None,
        "run_id": "5" * 32,
        "name": name,
        "uptime_s": 0.0,
        "value_count": 0,
        "addresses": [],
        "pending": [],
        "ending": None,
        "figures": {},
    }
    return msgspec.convert({**describe(coordinator, now_s), **more}, MasterStatus)


def peer_status(peer: str, name: str) -> PeerStatus:
    """Return the status of a peer that does nothing yet."""
    texts = dict.fromkeys(("version", "run_id", "phase", "why", "trainer_state"), "x")
    lists = dict.fromkeys(("notices", "links", "copies", "heads", "rounds"), ())
    numbers = ("number", "step", "tokens", "trainer_restarts", "bulk_sent_bytes")
    counts = dict.fromkeys((*numbers, "bulk_received_bytes", "state_received_bytes"), 1)
    figures = dict.fromkeys(("tokens_per_s", "loss", "waited_s", "stepped_s"), 1.0)
    flags = dict.fromkeys(("attached", "in_sync", "finished"), True)
    rest = {"metrics": {}, "limits": {}, "trainer_pid": 1, "command_pid": 1}
    saved = CheckpointStatus(place="x", writing=False, newest="x", step=1, error="x")
    who = {"kind": "peer", "peer": peer, "name": name, "role": "spare", "checkpoints": saved}
    fields: dict[str, Any] = {**texts, **lists, **counts, **figures, **flags, **rest, **who}
    return PeerStatus(**fields)
