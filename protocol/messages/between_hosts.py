"""What the head of a peer of several hosts and its other hosts tell each other, over their link."""

from __future__ import annotations

from attrs import field, frozen
from attrs.validators import and_, ge, le, lt, max_len, min_len

from . import fields
from .limits import FRAGMENTS_MAX, HOSTS_MAX, RANKS_MAX
from .parts import FailureKind, Message

_rank = and_(ge(0), lt(RANKS_MAX))
_fragment = and_(ge(0), lt(FRAGMENTS_MAX))
SLOT_BYTES = 64  # of one rank, see ``arena.RANK_SLOT_COUNT``


@frozen
class HostHello(Message):
    """Host: it is there; and again whenever another number of its GPUs is healthy."""

    name: str = field(validator=fields.name)
    gpus_healthy: int = field(validator=fields.count)
    gpus_all: int = field(validator=fields.count)


@frozen
class HostStart(Message):
    """Head: start the training command.

    ``host``, ``hosts`` and ``head`` are put in the place of ``{host}`` (from 1; the head is 0),
    ``{hosts}`` and ``{head}``. ``member`` and ``start`` are the same in all processes of a peer:
    their random numbers follow from them.
    """

    host: int = field(validator=and_(ge(1), lt(HOSTS_MAX)))
    hosts: int = field(validator=and_(ge(2), le(HOSTS_MAX)))
    head: str = field(validator=fields.text)
    member: str = field(validator=fields.peer)
    start: str = field(validator=fields.word)


@frozen
class HostStop(Message):
    """Head: end this start of the command; ``finished``: it ends by itself, as the head's did."""

    start: str = field(validator=fields.word)
    finished: bool = False


@frozen
class HostEnded(Message):
    """Host: this start of the command has ended; ``reason`` is empty for exit status 0."""

    start: str = field(validator=fields.word)
    kind: FailureKind
    reason: str = field(validator=fields.text)


@frozen
class ProcessSays(Message):
    """Both ways: a message of a process of the command to the daemon, or of the daemon to it, as it
    is on the Unix socket.

    ``process`` numbers the connections at the host's socket, upwards. The first message of each is
    a ``TrainerHello`` or a ``DrawHello``.
    """

    process: int = field(validator=fields.u32)
    body: bytes


@frozen
class ProcessGone(Message):
    """Host: the connection has ended. Head: end it, once it has taken its messages."""

    process: int = field(validator=fields.u32)
    reason: str = field(default="", validator=fields.text)


@frozen
class RankSlots:
    """A rank's slots in the posted arena, as they are there."""

    rank: int = field(validator=_rank)
    slots: bytes = field(validator=and_(min_len(SLOT_BYTES), max_len(SLOT_BYTES)))


@frozen
class SlotsChanged(Message):
    """Host: the slots of its ranks that have changed."""

    ranks: tuple[RankSlots, ...] = field(validator=max_len(RANKS_MAX))


@frozen
class HeadSlots(Message):
    """Head: the slots of its shared arena; ``named`` is ``COUNT_MAX`` while no step is named."""

    mail: int = field(validator=fields.count)
    named: int = field(validator=fields.count)


@frozen
class BoxesReady(Message):
    """Head: the fragment is at this version; ask for your boxes of it, for this start's arenas."""

    start: str = field(validator=fields.word)
    fragment: int = field(validator=_fragment)
    version: int = field(validator=fields.count)


@frozen
class BoxesWanted(Message):
    """Receiving side: send the boxes of the fragment, as frames of this transfer.

    From the head: those that ``rank`` has posted. From a host: all of its own at ``version``.
    """

    transfer: int = field(validator=fields.u32)
    fragment: int = field(validator=_fragment)
    rank: int = field(default=0, validator=_rank)
    version: int = field(default=0, validator=fields.count)


@frozen
class BoxesGone(Message):
    """Head: that version is no more; a later one will be ready."""

    transfer: int = field(validator=fields.u32)


@frozen
class BoxesTaken(Message):
    """Host: its boxes of the fragment are at this version, in this start's arenas."""

    start: str = field(validator=fields.word)
    fragment: int = field(validator=_fragment)
    version: int = field(validator=fields.count)
