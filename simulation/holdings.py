"""Detection of the peers that hold the committed state, including decisions not yet on disk."""

from __future__ import annotations

from ..membership.peer.local_round import RoundState
from .witness import Witness
from .witnessed_services import SimPeer, WitnessedMaster


def keeps_state(sim: SimPeer, witness: Witness, master: WitnessedMaster | None) -> bool:
    """Return whether a peer holds every committed version, or the previous one and the next's result.

    Args:
      master: the live master, or None.
    """
    if not (sim.alive and sim.holds_everything):
        return False
    commits, versions = list(witness.commits), dict(witness.versions)
    if master is not None:
        history = master.coordinator.context.history
        commits += history.commits.values()
        for fragment, version in enumerate(history.versions):
            versions[fragment] = max(version, versions.get(fragment, 0))
    decided = {commit.round for commit in commits}
    results = {
        (here.fragment, here.version)
        for here in sim.service.replica.rounds.values()
        if here.phase in (RoundState.REDUCED, RoundState.APPLYING) and here.round in decided
    }
    for head in sim.service.replica.heads():
        committed = versions.get(head.fragment, 0)
        step_away = (head.fragment, head.version) in results
        if head.version != committed and not (head.version == committed - 1 and step_away):
            return False
    return True
