"""Phases of a connection: the message types that may come in each, and their size limit.

    receiver     sender      first                        then
    master       newcomer    NEWCOMER
    newcomer     master      ADMITTING
    master       member      GREETING: Hello, Resume      MEMBER
    master       master      CLAIM: TermClaim
    peer         peer        LINK_GREETING                LINK

Any other message is refused by its first bytes: see ``wire``. A peer accepts all messages from its
master, and a daemon from its trainer (``ANY``): it trusts them with more than memory.
"""

from __future__ import annotations

from attrs import frozen

from . import messages
from .message_limits import FRAME_BYTES_MAX


@frozen
class ConnectionPhase:
    """A phase of a connection.

    Attributes:
      types: the message types that may come; None: all.
      frame_bytes_max: the limit on a message, either way; each type has its own limit, too.
    """

    types: frozenset[type[messages.Message]] | None
    frame_bytes_max: int


ANY = ConnectionPhase(None, FRAME_BYTES_MAX)

# From a connection without a certificate: room for two certificates, and no more memory.
NEWCOMER_FRAME_BYTES_MAX = 32_768
NEWCOMER = ConnectionPhase(
    frozenset(
        {messages.EnrolHello, messages.EnrolRequest, messages.CheckRequest, messages.ProbeBytes}
    ),
    NEWCOMER_FRAME_BYTES_MAX,
)
# From the machine that a newcomer has dialled, which is not known to be the master yet.
ADMITTING = ConnectionPhase(
    frozenset(
        {
            messages.EnrolAuthority,
            messages.Enrolled,
            messages.CheckAnswer,
            messages.ProbeBytes,
            messages.ProbeBytesCounted,
            messages.Refused,
        }
    ),
    NEWCOMER_FRAME_BYTES_MAX,
)

CLAIM_FRAME_BYTES_MAX = 8_192  # an id, a number and a nonce
CLAIM = ConnectionPhase(frozenset({messages.TermClaim}), CLAIM_FRAME_BYTES_MAX)

# Only the ``Hello`` of a member with a trainer is long: it contains the layout.
GREETING = ConnectionPhase(frozenset({messages.Hello, messages.Resume}), FRAME_BYTES_MAX)

MEMBER = ConnectionPhase(
    frozenset(
        {
            messages.Applied,
            messages.Audited,
            messages.Diagnosis,
            messages.WeightsSupplied,
            messages.Heartbeat,
            messages.Held,
            messages.LeasesHeld,
            messages.LeasesWanted,
            messages.Leaving,
            messages.LinkBroken,
            messages.Measured,
            messages.NotReady,
            messages.Progress,
            messages.Ready,
            messages.ReduceFailed,
            messages.Reduced,
            messages.Relayed,
            messages.Renew,
            messages.RouteWanted,
            messages.RouteWorks,
            messages.SyncFailed,
            messages.Synced,
            messages.TrainerAttached,
            messages.TrainerFailed,
            messages.TrainerLost,
        }
    ),
    FRAME_BYTES_MAX,
)

LINK_GREETING_FRAME_BYTES_MAX = 8_192  # half of a secret, or a refusal
LINK_GREETING = ConnectionPhase(
    frozenset({messages.LinkHello, messages.LinkReady, messages.Refused}),
    LINK_GREETING_FRAME_BYTES_MAX,
)

LINK_FRAME_BYTES_MAX = 3 * 2**20  # an index of as many blocks as there may be takes 2 MiB
LINK = ConnectionPhase(
    frozenset(
        {
            messages.BlocksRefused,
            messages.BlocksRequest,
            messages.Heartbeat,
            messages.Index,
            messages.IndexRequest,
            messages.LanesReceived,
            messages.LanesWanted,
        }
    ),
    LINK_FRAME_BYTES_MAX,
)
