"""Detection of the peers that hold the committed state, including decisions not yet on disk."""

from __future__ import annotations

from ...membership.peer.local_round import RoundState
from .witness import Witness
from .witnessed_services import SimPeer, WitnessedMaster


def keeps_state(sim: SimPeer, witness: Witness, master: WitnessedMaster | None) -> bool:
    """Return whether a peer holds every committed version, or the previous one and the next's result.

    Args:
      master: the live master, or None.
    """
    if not (sim.alive and sim.holds_everything):
        return False
    decided = _decided(witness, master)
    results = {
        (here.fragment, here.version)
        for here in sim.service.replica.rounds.values()
        if here.phase in (RoundState.REDUCED, RoundState.APPLYING) and here.round in decided
    }
    for head in sim.service.replica.heads():
        committed = _newest(head.fragment, witness, master)
        step_away = (head.fragment, head.version) in results
        if head.version != committed and not (head.version == committed - 1 and step_away):
            return False
    return True


def _decided(witness: Witness, master: WitnessedMaster | None) -> set[int]:
    rounds = {commit.round for commit in witness.commits}
    if master is not None:
        history = master.coordinator.context.history
        rounds.update(commit.round for commit in history.commits.values())
    return rounds


def _newest(fragment: int, witness: Witness, master: WitnessedMaster | None) -> int:
    known = witness.versions.get(fragment, 0)
    if master is None:
        return known
    history = master.coordinator.context.history
    return max(known, history.versions[fragment]) if history.founded else known
