"""Phases of a connection: the message types that may come in each, and their size limit.

    receiver     sender      first                        then
    master       newcomer    NEWCOMER
    newcomer     master      ADMITTING
    master       member      GREETING: Hello, Resume      MEMBER
    master       master      CLAIM
    peer         peer        LINK_GREETING                LINK

Any other message is refused by its first bytes: see ``wire``. A peer accepts all messages from its master,
and a daemon from its trainer (``ANY``), because it trusts them with more than time and memory.
"""

from __future__ import annotations

from attrs import frozen

from . import messages as said
from .message_limits import FRAME_BYTES_MAX


@frozen
class ConnectionPhase:
    """A phase of a connection.

    Attributes:
      types: the message types that may come; None: all.
      frame_bytes_max: the limit on a message, either way; each type has its own limit, too.
    """

    types: frozenset[type[said.Message]] | None
    frame_bytes_max: int


ANY = ConnectionPhase(None, FRAME_BYTES_MAX)

# From a connection without a certificate: room for two certificates, and no more memory.
NEWCOMER_FRAME_BYTES_MAX = 32_768
NEWCOMER = ConnectionPhase(
    frozenset({said.EnrolHello, said.EnrolRequest, said.CheckRequest, said.ProbeBytes}),
    NEWCOMER_FRAME_BYTES_MAX,
)
# From the machine that a newcomer has dialled, which is not known to be the master yet.
ADMITTING = ConnectionPhase(
    frozenset(
        {
            said.EnrolAuthority,
            said.Enrolled,
            said.CheckAnswer,
            said.ProbeBytes,
            said.ProbeBytesCounted,
            said.Refused,
        }
    ),
    NEWCOMER_FRAME_BYTES_MAX,
)

CLAIM_FRAME_BYTES_MAX = 8_192  # an id, a number and a nonce
CLAIM = ConnectionPhase(frozenset({said.TermClaim}), CLAIM_FRAME_BYTES_MAX)

# Only the ``Hello`` of a member with a trainer is long: it contains the layout.
GREETING = ConnectionPhase(frozenset({said.Hello, said.Resume}), FRAME_BYTES_MAX)

MEMBER = ConnectionPhase(
    frozenset(
        {
            said.Applied,
            said.Audited,
            said.BlocksVerified,
            said.CheckpointTold,
            said.Diagnosis,
            said.WeightsSupplied,
            said.Heartbeat,
            said.Held,
            said.Leaving,
            said.LinkBroken,
            said.Measured,
            said.NotReady,
            said.Probed,
            said.Progress,
            said.ProofPiece,
            said.Ready,
            said.ReduceFailed,
            said.Reduced,
            said.Relayed,
            said.Renew,
            said.RouteWanted,
            said.RouteWorks,
            said.SyncFailed,
            said.Synced,
            said.TrainerAttached,
            said.TrainerFailed,
            said.TrainerLost,
            said.Verified,
        }
    ),
    FRAME_BYTES_MAX,
)

LINK_GREETING_FRAME_BYTES_MAX = 8_192  # half of a secret, or a refusal
LINK_GREETING = ConnectionPhase(
    frozenset({said.LinkHello, said.LinkReady, said.Refused}), LINK_GREETING_FRAME_BYTES_MAX
)

LINK_FRAME_BYTES_MAX = 3 * 2**20  # an index of as many blocks as there may be takes 2 MiB
LINK = ConnectionPhase(
    frozenset(
        {
            said.BlocksRefused,
            said.BlocksRequest,
            said.EvidenceRefused,
            said.EvidenceRequest,
            said.Heartbeat,
            said.Index,
            said.IndexRequest,
            said.LanesReceived,
            said.LanesWanted,
            said.ProbeRequest,
        }
    ),
    LINK_FRAME_BYTES_MAX,
)
