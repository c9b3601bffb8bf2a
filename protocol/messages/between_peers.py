"""What peers tell each other on the control stream of their link, where all of it may come: see
``connection_phases``.
"""

from __future__ import annotations

from attrs import field, frozen
from attrs.validators import and_, ge, le, max_len, min_len

from . import fields
from .limits import BLOCKS_MAX, LANES_OPEN_MAX
from .parts import FragmentHead, Message


@frozen
class LinkHello(Message):
    """Both sides, first message: half of the lanes' secret. The dialer's ``link_id`` counts."""

    version_min: int = field(validator=fields.count)
    version_max: int = field(validator=fields.count)
    link_id: bytes = field(validator=and_(min_len(16), max_len(16)))
    # 32 random bytes; lane keys come from both by HKDF.
    secret: bytes = field(repr=False, validator=fields.digest)


@frozen
class LinkReady(Message):
    """Accepting side: the lanes may be dialled now."""


@frozen
class LaneReceived:
    """Frames and bytes received on one lane since it was opened.

    Attributes:
      frames: complete frames that were handed on; later ones may be sent again on another lane.
      bytes: all bytes: a sign of life from a lane in the middle of a long frame.
      closed: nothing more will be read from this lane, and nothing more reported of it.
    """

    lane: int = field(validator=fields.u32)
    frames: int = field(validator=fields.count)
    bytes: int = field(validator=fields.count)
    closed: bool = False


@frozen
class LanesReceived(Message):
    """Both sides, a moment after frames came: an acknowledgement of what arrived."""

    lanes: tuple[LaneReceived, ...] = field(validator=max_len(2 * LANES_OPEN_MAX))


@frozen
class LanesWanted(Message):
    """Accepting side, which cannot dial: the number of lanes that would speed up its sending."""

    count: int = field(validator=and_(ge(1), le(LANES_OPEN_MAX)))


@frozen
class IndexRequest(Message):
    """Joiner to donor: the block digests of a pinned version."""

    head: FragmentHead


@frozen
class Index(Message):
    """Donor: ``digests`` holds 32 bytes per block, in order; they hash to the root."""

    head: FragmentHead
    digests: bytes = field(validator=max_len(32 * BLOCKS_MAX))


@frozen
class BlocksRequest(Message):
    """Joiner to donor: send these blocks over the lanes."""

    fragment: int = field(validator=fields.count)
    version: int = field(validator=fields.count)
    # The joiner's number for this transfer; the frames carry it.
    transfer: int = field(validator=fields.count)
    blocks: tuple[int, ...] = field(validator=fields.each(fields.count, BLOCKS_MAX))


@frozen
class BlocksRefused(Message):
    """Donor: it cannot send the blocks, for this reason."""

    fragment: int = field(validator=fields.count)
    version: int = field(validator=fields.count)
    transfer: int = field(validator=fields.count)
    reason: str = field(validator=fields.text)
