"""Phases of a connection: the message types that may come in each, and their size limit.

    receiver     sender      first                        then
    master       newcomer    NEWCOMER
    newcomer     master      ADMITTING
    master       member      GREETING: Hello, Resume      MEMBER
    master       master      CLAIM: TermClaim
    peer         peer        LINK_GREETING                LINK
    head         host        LINK_GREETING                HOST_LINK, both ways

Any other message is refused by its first bytes: see ``wire``. A peer accepts all messages from its
master, and a daemon from its trainer (``ANY``): it trusts them with more than memory.
"""

from __future__ import annotations

from types import ModuleType

from attrs import frozen

from . import messages
from .message_limits import FRAME_BYTES_MAX
from .messages import between_hosts, between_peers, to_master


@frozen
class ConnectionPhase:
    """A phase of a connection.

    Attributes:
      types: the message types that may come; None: all.
      frame_bytes_max: the limit on a message, either way; each type has its own limit, too.
    """

    types: frozenset[type[messages.Message]] | None
    frame_bytes_max: int


def _defined_in(module: ModuleType) -> frozenset[type[messages.Message]]:
    classes = (each for each in vars(module).values() if isinstance(each, type))
    own = (each for each in classes if each.__module__ == module.__name__)
    return frozenset(each for each in own if issubclass(each, messages.Message))


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
_GREETINGS = frozenset({messages.Hello, messages.Resume})
GREETING = ConnectionPhase(_GREETINGS, FRAME_BYTES_MAX)

MEMBER = ConnectionPhase(_defined_in(to_master) - _GREETINGS, FRAME_BYTES_MAX)

LINK_GREETING_FRAME_BYTES_MAX = 8_192  # half of a secret, or a refusal
_LINK_GREETINGS = frozenset({messages.LinkHello, messages.LinkReady})
LINK_GREETING = ConnectionPhase(_LINK_GREETINGS | {messages.Refused}, LINK_GREETING_FRAME_BYTES_MAX)

LINK_FRAME_BYTES_MAX = 3 * 2**20  # an index of as many blocks as there may be takes 2 MiB
_ON_LINK = _defined_in(between_peers) - _LINK_GREETINGS | {messages.Heartbeat}
LINK = ConnectionPhase(_ON_LINK, LINK_FRAME_BYTES_MAX)

# Head and host of one peer trust each other; a rank's first message holds the layout.
HOST_LINK = ConnectionPhase(_ON_LINK | _defined_in(between_hosts), FRAME_BYTES_MAX)
