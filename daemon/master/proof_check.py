"""The check of a proof against a chunk owner: the only tensor data that the master handles."""

from __future__ import annotations

import logging

from ...membership.master.state.master_effects import CheckProof
from ...protocol.trust.notary import Notary

log = logging.getLogger("holdfast.master")


def fault_proven(case: CheckProof, notary: Notary) -> str:
    """Return the fault that a proof shows of a chunk owner, or an empty string. This takes CPU time."""
    # Imported here: a master without accusations never loads the reduction.
    from ...collectives.arithmetic import ChunkLayout
    from ...collectives.evidence import UnsignedError, WrongChunkClaim, check_proof

    layout = ChunkLayout.of(case.order.plan, case.size)
    claim = WrongChunkClaim(case.order, layout, case.chunk, case.owner, case.digest, case.manifest)
    try:
        return check_proof(claim, notary, case.proof)
    except UnsignedError as error:
        log.info("a proof against peer %s is invalid: %s", case.owner[:8], error)
        return ""
