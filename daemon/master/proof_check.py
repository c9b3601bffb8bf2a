"""The master as a judge: the only time that it touches contributions, a chunk of them."""

from __future__ import annotations

import logging

from ...membership.master.state.master_effects import CheckProof
from ...protocol.trust.notary import Notary

log = logging.getLogger("holdfast.master")


def fault_proven(case: CheckProof, notary: Notary) -> str:
    """What an owner is proven to have done; empty: nothing. Heavy."""
    # A master that judges nobody need not load what adds up.
    from ...collectives.arithmetic import ChunkLayout
    from ...collectives.evidence import UnsignedError, WrongChunkClaim, check_proof

    layout = ChunkLayout.of(case.order.plan, case.size)
    claim = WrongChunkClaim(case.order, layout, case.chunk, case.owner, case.digest, case.manifest)
    try:
        return check_proof(claim, notary, case.proof)
    except UnsignedError as error:
        log.info("a proof against peer %s is none: %s", case.owner[:8], error)
        return ""
