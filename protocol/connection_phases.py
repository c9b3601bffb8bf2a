"""What may come on a connection, by how far it has got: which messages, and how long.

    who hears whom        first                        then
    master, a newcomer    NEWCOMER
    newcomer, a master    ADMITTING
    master, a member      GREETING: Hello, Resume      MEMBER
    master, a master      CLAIM
    peer, a peer          LINK_GREETING                LINK

What is none of these is refused by its first bytes: see ``wire``. A peer hears its master, and a daemon
its trainer, in whatever order they like (``ANY``): they are trusted with more than time and memory.
"""

from __future__ import annotations

from attrs import frozen

from . import messages as said
from .message_limits import FRAME_BYTES_MAX


@frozen
class ConnectionPhase:
    """Of a connection.

    Attributes:
      types: of messages that may come; None: any.
      frame_bytes_max: of a message, either way; one of a type has its own limit, too.
    """

    types: frozenset[type[said.Message]] | None
    frame_bytes_max: int


ANY = ConnectionPhase(None, FRAME_BYTES_MAX)

# Whoever has shown no certificate: two certificates' worth and more; strangers get no more memory.
NEWCOMER_FRAME_BYTES_MAX = 32_768
NEWCOMER = ConnectionPhase(
    frozenset({said.EnrolHello, said.EnrolRequest, said.CheckRequest, said.ProbeBytes}),
    NEWCOMER_FRAME_BYTES_MAX,
)
# And whoever it is that a newcomer has come to.
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

# Only ``Hello`` is long, and only a member's that has a trainer: the layout is in it.
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

LINK_GREETING_FRAME_BYTES_MAX = 8_192  # half of a secret, or why not
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
