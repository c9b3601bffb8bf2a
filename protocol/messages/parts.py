"""Records that messages share: tensors, fragments, members, plans; and the enumerations of all
messages.
"""

from __future__ import annotations

import enum

from attrs import field, frozen
from attrs.validators import and_, ge, le, matches_re, max_len

from . import fields
from .limits import CHUNK_UNITS_MAX, DIMENSIONS_MAX, MEMBERS_MAX, OWNER_RUNS_MAX, TENSORS_MAX


class Message:
    """Base class of everything that may cross a control stream."""

    __slots__ = ()


class Role(enum.Enum):
    CONTRIBUTOR = "contributor"
    SPARE = "spare"
    RELAY = "relay"


class FailureKind(enum.Enum):
    """The ways in which a trainer fails; the values are shown to people."""

    CRASH = "crash"
    HANG = "hang"  # no step within the deadline
    MEMORY = "out of memory"
    CUDA = "CUDA error"
    NAN = "weights not finite"


class Remedy(enum.Enum):
    """The daemon's answer to a trainer's failure."""

    RELOAD = "reload"  # the process continues with the shared state
    RESTART = "restart"  # the daemon starts another process after a pause
    # Too many failures: the peer is a spare without a trainer until its operator acts.
    NONE = "none"


class RouteKind(enum.Enum):
    """The ways in which two members make the streams between them."""

    DIRECT = "direct"  # one member dials the other's addresses
    PUNCHED = "punched"  # both dial at once, through routers that keep ports
    RELAYED = "relayed"  # both dial a relay, which forwards


class RefusalCode(enum.Enum):
    """The reasons to refuse or remove a peer; the peer's reaction follows from the code."""

    VERSION = "version"  # upgrade, then come back
    TOKEN = "token"  # ask for another invite
    RUN = "run"  # this is another run's master
    LAYOUT = "layout"  # the script's tensors are not the run's
    DUPLICATE = "duplicate"  # the same identity is connected already
    COPY = "copy"  # a process with the same identity was here before, and is still
    KICKED = "kicked"  # removed by the run's operator, or contradicted by checks; do not come back
    SILENT = "silent"  # no sign of life within the deadline; may come back
    PROTOCOL = "protocol"  # broke the protocol
    LAGGING = "lagging"  # did not keep up; may come back
    FULL = "full"  # no room for another member
    FINISHED = "finished"  # the run is over
    LEFT = "left"  # the peer asked to leave
    SUPERSEDED = "superseded"  # another master has taken the run over; dial its other addresses
    APPROVAL = "approval"  # the run's operator has to approve this key; ask again
    RESUME = "resume"  # the session is over: send ``Hello``
    BUSY = "busy"  # the master admits no peer now (its disk is full); come back


@frozen
class TensorSpec:
    """One tensor of the model, as the trainer declares it; tied tensors appear once."""

    name: str = field(validator=fields.text)
    shape: tuple[int, ...] = field(validator=fields.each(fields.count, DIMENSIONS_MAX))
    dtype: str = field(validator=fields.word)  # torch's name without "torch.": "float32"
    kind: str = field(validator=matches_re("parameter|buffer|counter"))
    # parameter: with outer momentum; buffer: floating, plain mean; counter: integer or bool,
    # maximum
    aliases: tuple[str, ...] = field(  # the other names of a tied tensor
        default=(), validator=fields.each(fields.text, TENSORS_MAX)
    )


@frozen
class ModelLayout:
    """All shared tensors, in the order of ``model.state_dict()``; equal at all peers."""

    tensors: tuple[TensorSpec, ...] = field(validator=max_len(TENSORS_MAX))


@frozen
class FragmentSize:
    """Elements of a fragment: float32 values (parameters first, then buffers), int64 counters."""

    value_count: int = field(validator=fields.count)
    # The first values, those of parameters, have an outer momentum.
    momentum_count: int = field(validator=fields.count)
    counter_count: int = field(validator=fields.count)


@frozen
class FragmentHead:
    """A version of a fragment that a peer holds, and the digest of its state."""

    fragment: int = field(validator=fields.count)
    version: int = field(validator=fields.count)
    root: bytes = field(validator=max_len(32))  # empty: not known


@frozen
class MemberInfo:
    """A member as all other members know it."""

    peer: str = field(validator=fields.peer)
    name: str = field(validator=fields.name)
    # The order of joining; also the order of addition in a reduction.
    number: int = field(validator=fields.count)
    addresses: tuple[str, ...] = field(validator=fields.addresses)  # "host:port", best first
    role: Role
    in_sync: bool
    reachable: bool = True  # False: it can dial, but cannot be dialled (it is behind a router)


@frozen
class Contributor:
    """A contributor to a round."""

    peer: str = field(validator=fields.peer)
    weight: int = field(validator=fields.count)  # tokens behind its pseudo-gradient
    # The clip factor that a chunk's owner applies before it adds; normally 1.0.
    scale: float = field(validator=fields.finite)


@frozen
class LinkLoad:
    """Bytes sent over one link, and the seconds in which bytes were under way there.

    ``round_trip_s``: the shortest round trip that was seen on the path; 0.0: not known.
    """

    peer: str = field(validator=fields.peer)
    sent_bytes: int = field(validator=fields.count)
    sending_s: float = field(validator=fields.finite)
    round_trip_s: float = field(default=0.0, validator=fields.finite)


@frozen
class OwnerRun:
    """A run of ``chunk_count`` consecutive chunks that ``peer`` owns; the first run begins at chunk
    0.

    Each has ``chunk_units`` times as many values as the plan says.
    """

    peer: str = field(validator=fields.peer)
    chunk_count: int = field(validator=fields.count)
    chunk_units: int = field(default=1, validator=and_(ge(1), le(CHUNK_UNITS_MAX)))

    @property
    def unit_count(self) -> int:
        return self.chunk_count * self.chunk_units


@frozen
class ContributorRun:
    """A run of ``chunk_count`` consecutive chunks whose mean has the same contributors in it.

    ``contributors``: one bit for each contributor of ``Reduce``, the first one lowest.
    """

    contributors: bytes = field(validator=max_len(MEMBERS_MAX // 8))
    chunk_count: int = field(validator=fields.count)


@frozen
class LeaseRange:
    """Positions of the run's order of samples, from ``start`` up to ``stop``, which is not
    included.
    """

    start: int = field(validator=fields.count)
    stop: int = field(validator=fields.count)

    def __attrs_post_init__(self) -> None:
        if self.start >= self.stop:
            raise ValueError(f"a range from {self.start} to {self.stop} is empty")


@frozen
class Assignment:
    """Consecutive chunks of a lost owner, and their new owner.

    ``from_scratch`` False: ``owner`` holds the results and sends them to the receivers whose bit in
    ``lacking`` is set (in the order of the receivers). True: no remaining peer holds the results;
    contributors send these chunks again, ``owner`` adds them up, and a receiver drops any result
    that it has.
    """

    first_chunk: int = field(validator=fields.count)
    chunk_count: int = field(validator=fields.count)
    owner: str = field(validator=fields.peer)
    from_scratch: bool
    lacking: bytes = field(validator=max_len(MEMBERS_MAX // 8))


@frozen
class Plan:
    """The division of a fragment into chunks, and each chunk's owner. The last chunk may be short.

    The fragment has ``ceil(value_count / chunk_elements)`` units of values (weighted mean), and one
    more if it has counters (elementwise maximum, int64, sent verbatim). A chunk is one unit or, by
    its ``OwnerRun``, several; the counters are a chunk of their own.
    """

    chunk_elements: int = field(validator=and_(ge(1), le(2**24)))
    owners: tuple[OwnerRun, ...] = field(validator=max_len(OWNER_RUNS_MAX))
    codec_up: str = field(validator=fields.word)  # contributor -> owner
    codec_down: str = field(validator=fields.word)  # owner -> receivers
    combine: str = field(default="mean", validator=fields.word)  # a rule of ``collectives.combine``
