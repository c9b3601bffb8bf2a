"""Every message that crosses a control stream, as typed records; nothing else lives here.

This stays one file: it is the table of everything on the wire, and a review of the protocol reads it whole.

A message is an attrs class. Its fields' validators are its limits, so a record that exists keeps the
limits, on the sending and on the receiving side. ``wire`` converts records to msgpack and back, and refuses
bytes that do not fit. Tensor bytes never travel in messages: they are chunks on lanes.

The first word of a docstring is the sender. Units are last in names. A peer is named by its peer id, 32 hex
digits (see ``identity``).
"""

from __future__ import annotations

import enum
import math
import re
from typing import Any

import attrs
from attrs import field, frozen
from attrs.validators import and_, ge, le, lt, matches_re, max_len, min_len

from .text import TEXT_CHARS_MAX as TEXT_CHARS_MAX
from .text import printable

VERSION_MIN = 8  # the oldest protocol version that is accepted; 8 tells members of new masters
VERSION_MAX = 8  # the newest protocol version

MASTERS_MAX = 16  # addresses of a run's master: as many as an invite has room for
NAME_CHARS_MAX = 64  # in the name of a peer or of a figure, so that tables and logs stay readable
WORD_CHARS_MAX = 64  # in the name of a dtype, a codec, a phase or a metric
NORM_SUMS_BYTES = 12  # three float32 for each contributor in ``Reduced.norm_sums``
MEMBERS_MAX = 512  # members of a run: each keeps a link to every other one
ROUNDS_HELD_MAX = 256  # undecided or unapplied rounds; a joiner that falls further behind refetches
KEPT_STATES_MAX = 16  # checkpoints that a peer reports, the newest ones
FRAGMENTS_MAX = 1_024  # fragments of a model
TENSORS_MAX = 65_536  # tensors of a model; mixture-of-experts models reach some ten thousand
DIMENSIONS_MAX = 16  # dimensions of a tensor
RANKS_MAX = 63  # processes of one peer's trainer; their slots fill a page, see ``arena``
LANES_OPEN_MAX = 64  # lanes of one link at once; far more than one path can use
OWNER_RUNS_MAX = 4_096  # runs of consecutive chunks with one owner, in a plan
BLOCKS_MAX = 65_536  # block digests in one index: 64 GiB of state a fragment at 1 MiB a block
CHECKED_ADDRESSES_MAX = 4  # addresses at which the master dials a newcomer back, in one check
JUNK_BYTES_MAX = 16_384  # in one message that times a newcomer's line
METRICS_MAX = 32  # named figures that a trainer reports beside its loss
LEASE_RANGES_MAX = 4_096  # ranges of leased positions in one message; a peer holds a few
SAMPLES_MAX = 2**40  # of a data set: so that positions of many epochs are numbers of a message
LEASED_MAX = 2**32  # positions that a peer asks for at once
SAMPLES_AHEAD = 64  # samples that are leased to a peer before its trainer's speed is known
ORDER_KEY_BYTES = 16  # of the order of a run's samples
CERTIFICATE_BYTES_MAX = 8_192
COUNT_MAX = 2**63 - 1
CHUNK_BITS_BYTES_MAX = 2**17  # one bit for each chunk of a fragment: a million chunks
AUDITS_MAX = 2**12  # chunks of one result that are checked; of a larger result fewer are drawn


_count: Any = and_(ge(0), le(COUNT_MAX))
_u32: Any = and_(ge(0), le(2**32 - 1))  # what a frame's header has room for
_text: Any = and_(max_len(TEXT_CHARS_MAX), printable)
_name: Any = and_(max_len(NAME_CHARS_MAX), printable)
_word: Any = and_(max_len(WORD_CHARS_MAX), printable)
# A run id also names folders and stands in certificates: no separators, no leading dot.
RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_NOT_TOML = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff]")
_run_id: Any = matches_re(RUN_ID)
_peer: Any = matches_re(r"[0-9a-f]{32}")
_peer_or_none: Any = matches_re(r"([0-9a-f]{32})?")
_digest: Any = and_(min_len(32), max_len(32))
NO_DIGEST = bytes(32)  # in ``Hello.undecided``: a reduction that is not finished at this peer
_port: Any = and_(ge(0), le(65_535))
_token: Any = and_(max_len(128), printable)
_ticket: Any = max_len(32)
_nonce: Any = max_len(128)  # of a term: random bytes and the run authority's signature of them
_blob: Any = max_len(CERTIFICATE_BYTES_MAX)


def _finite(_instance: object, attribute: attrs.Attribute[Any], value: float) -> None:
    if not math.isfinite(value) or value < 0:
        raise ValueError(f"{attribute.name} must be finite and not negative, got {value}")


def _metrics(instance: object, attribute: Any, value: dict[str, float]) -> None:
    max_len(METRICS_MAX)(instance, attribute, value)  # type: ignore[arg-type]
    for name in value:
        _name(instance, attribute, name)


def _toml_text(_instance: object, attribute: Any, value: str) -> None:
    """Refuse characters that TOML does not allow. The text is parsed, and never shown as it is."""
    if _NOT_TOML.search(value):
        raise ValueError(f"{attribute.name} has a control character")


def _each(validator: Any, count_max: int) -> Any:
    return attrs.validators.deep_iterable(
        member_validator=validator, iterable_validator=max_len(count_max)
    )


_peers = _each(_peer, MEMBERS_MAX)


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
    NONE = (
        "none"  # too many failures: the peer is a spare without a trainer until its operator acts
    )


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


# ---------------------------------------------------------------- shared records


@frozen
class TensorSpec:
    """One tensor of the model, as the trainer declares it; tied tensors appear once."""

    name: str = field(validator=_text)
    shape: tuple[int, ...] = field(validator=_each(_count, DIMENSIONS_MAX))
    dtype: str = field(validator=_word)  # torch's name without "torch.": "float32"
    kind: str = field(validator=matches_re("parameter|buffer|counter"))
    # parameter: with outer momentum; buffer: floating, plain mean; counter: integer or bool, maximum
    aliases: tuple[str, ...] = field(  # the other names of a tied tensor
        default=(), validator=_each(_text, TENSORS_MAX)
    )


@frozen
class ModelLayout:
    """All shared tensors, in the order of ``model.state_dict()``; equal at all peers."""

    tensors: tuple[TensorSpec, ...] = field(validator=max_len(TENSORS_MAX))


@frozen
class FragmentSize:
    """Elements of a fragment: float32 values (parameters first, then buffers), int64 counters."""

    value_count: int = field(validator=_count)
    # The first values, those of parameters, have an outer momentum.
    momentum_count: int = field(validator=_count)
    counter_count: int = field(validator=_count)


@frozen
class FragmentHead:
    """A version of a fragment that a peer holds, and the digest of its state."""

    fragment: int = field(validator=_count)
    version: int = field(validator=_count)
    root: bytes = field(validator=max_len(32))  # empty: not known


@frozen
class MemberInfo:
    """A member as all other members know it."""

    peer: str = field(validator=_peer)
    name: str = field(validator=_name)
    # The order of joining; also the order of addition in a reduction.
    number: int = field(validator=_count)
    addresses: tuple[str, ...] = field(validator=_each(_text, 16))  # "host:port", best first
    role: Role
    in_sync: bool
    reachable: bool = True  # False: it can dial, but cannot be dialled (it is behind a router)


@frozen
class Contributor:
    """A contributor to a round."""

    peer: str = field(validator=_peer)
    weight: int = field(validator=_count)  # tokens behind its pseudo-gradient
    # The clip factor that a chunk's owner applies before it adds; normally 1.0.
    scale: float = field(validator=_finite)


@frozen
class LinkLoad:
    """Bytes sent over one link, and the seconds in which bytes were under way there.

    ``round_trip_s``: the shortest round trip that was seen on the path; 0.0: not known.
    """

    peer: str = field(validator=_peer)
    sent_bytes: int = field(validator=_count)
    sending_s: float = field(validator=_finite)
    round_trip_s: float = field(default=0.0, validator=_finite)


@frozen
class OwnerRun:
    """A run of ``chunk_count`` consecutive chunks that ``peer`` owns; the first run begins at chunk 0."""

    peer: str = field(validator=_peer)
    chunk_count: int = field(validator=_count)


@frozen
class ContributorRun:
    """A run of ``chunk_count`` consecutive chunks whose mean has the same contributors in it.

    ``contributors``: one bit for each contributor of ``Reduce``, the first one lowest.
    """

    contributors: bytes = field(validator=max_len(MEMBERS_MAX // 8))
    chunk_count: int = field(validator=_count)


_manifest: Any = max_len(OWNER_RUNS_MAX)  # the first run begins at chunk 0
_leases: Any = max_len(LEASE_RANGES_MAX)
_samples: Any = and_(ge(1), le(SAMPLES_MAX))


@frozen
class LeaseRange:
    """Positions of the run's order of samples, from ``start`` up to ``stop``, which is not included."""

    start: int = field(validator=_count)
    stop: int = field(validator=_count)

    def __attrs_post_init__(self) -> None:
        if self.start >= self.stop:
            raise ValueError(f"a range from {self.start} to {self.stop} is empty")


@frozen
class Assignment:
    """Consecutive chunks of a lost owner, and their new owner.

    ``from_scratch`` False: ``owner`` holds the results and sends them to the receivers whose bit in ``lacking``
    is set (in the order of the receivers). True: no remaining peer holds the results; contributors send
    these chunks again, ``owner`` adds them up, and a receiver drops any result that it has.
    """

    first_chunk: int = field(validator=_count)
    chunk_count: int = field(validator=_count)
    owner: str = field(validator=_peer)
    from_scratch: bool
    lacking: bytes = field(validator=max_len(MEMBERS_MAX // 8))


@frozen
class Plan:
    """The division of a fragment into chunks, and each chunk's owner. The last chunk may be short.

    Chunks ``0 .. ceil(value_count / chunk_elements) - 1`` hold values (weighted mean); one more
    chunk follows when the fragment has counters (elementwise maximum, int64, sent verbatim).
    """

    chunk_elements: int = field(validator=and_(ge(1), le(2**24)))
    owners: tuple[OwnerRun, ...] = field(validator=max_len(OWNER_RUNS_MAX))
    codec_up: str = field(validator=_word)  # contributor -> owner
    codec_down: str = field(validator=_word)  # owner -> receivers
    combine: str = field(default="mean", validator=_word)  # a rule of ``collectives.combine``


# ---------------------------------------------------------------- enrolment (before a certificate)


@frozen
class EnrolHello(Message):
    """Newcomer: the first message on a stream without a client certificate, with its versions."""

    version_min: int = field(validator=_count)
    version_max: int = field(validator=_count)


@frozen
class EnrolAuthority(Message):
    """Master: the run's CA certificate; the newcomer compares its fingerprint with the invite."""

    run_id: str = field(validator=_run_id)
    authority_pem: bytes = field(validator=_blob)


@frozen
class EnrolRequest(Message):
    """Newcomer: the invite's token and a certificate request signed by its identity."""

    token: str = field(repr=False, validator=_token)
    request_pem: bytes = field(validator=_blob)
    name: str = field(validator=_name)


@frozen
class Enrolled(Message):
    """Master: the newcomer's certificate."""

    certificate_pem: bytes = field(validator=_blob)


@frozen
class CheckRequest(Message):
    """Newcomer, instead of ``EnrolRequest``: asks the master to check this machine from outside.

    The token is checked, not used up.
    """

    token: str = field(repr=False, validator=_token)
    addresses: tuple[str, ...] = field(validator=_each(_text, CHECKED_ADDRESSES_MAX))
    nonce: bytes = field(validator=_digest)  # sent to every connection at these addresses


@frozen
class CheckAnswer(Message):
    """Master: the results of the check, and the resources that a member of this run needs."""

    now_s: float = field(validator=_finite)  # Unix time, by the master's clock
    host: str = field(validator=_text)  # the newcomer's address as the master sees it
    # For each address of the request; empty: reached.
    faults: tuple[str, ...] = field(validator=_each(_text, CHECKED_ADDRESSES_MAX))
    member_count: int = field(validator=_count)
    lanes_max: int = field(validator=_count)  # of each link
    # For daemon and hook, beside the script's own; 0: the run has no weights yet.
    memory_bytes: int = field(validator=_count)
    checkpoint_bytes: int = field(validator=_count)  # of one checkpoint
    checkpoint_count: int = field(validator=_count)  # kept on disk
    software: str = field(default="", validator=_word)  # the master's version


@frozen
class ProbeBytes(Message):
    """Either side, after a ``CheckAnswer``: bytes that time the line."""

    data: bytes = field(validator=max_len(JUNK_BYTES_MAX))
    last: bool


@frozen
class ProbeBytesCounted(Message):
    """Master: bytes received, and the seconds from the first message to the last."""

    count_bytes: int = field(validator=_count)
    took_s: float = field(validator=_finite)


@frozen
class Refused(Message):
    """Either side, at any time: this stream ends now, for this reason."""

    code: RefusalCode
    reason: str = field(validator=_text)


# ---------------------------------------------------------------- peer -> master


@frozen
class KeptState:
    """A complete state of the run, in a checkpoint that the peer can read."""

    heads: tuple[FragmentHead, ...] = field(validator=max_len(FRAGMENTS_MAX))


@frozen
class RelayOffer:
    """A peer's offer to forward between peers that cannot reach each other.

    ``only``: the peer takes no other part in the run, and holds no state.
    """

    bytes_per_s: float = field(validator=_finite)  # of all pairs, both ways
    pairs: int = field(validator=_count)
    quota_bytes: int = field(validator=_count)  # over the relay's life; 0: no limit
    only: bool


@frozen
class Hello(Message):
    """Peer: the first message on a control stream."""

    version_min: int = field(validator=_count)
    version_max: int = field(validator=_count)
    run_id: str = field(validator=_run_id)
    name: str = field(validator=_name)
    addresses: tuple[str, ...] = field(validator=_each(_text, 16))  # at which peers can dial it
    # Random per daemon process: tells a reconnect from a restart.
    incarnation: int = field(validator=_count)
    layout: ModelLayout | None  # of the trainer; None: not known yet
    # The committed state that the peer holds.
    heads: tuple[FragmentHead, ...] = field(validator=max_len(FRAGMENTS_MAX))
    lineage: bytes = field(validator=max_len(32))  # of that state; empty: the peer holds none
    # Results that the peer reported and whose outcome it has not heard.
    undecided: tuple[Reduced, ...] = field(validator=max_len(FRAGMENTS_MAX))
    # The cap that the machine's owner sets on traffic to other peers; 0: no cap.
    upload_bytes_per_s: float = field(default=0.0, validator=_finite)
    download_bytes_per_s: float = field(default=0.0, validator=_finite)  # the same for receiving
    # Of the newest master that the peer has obeyed; an older master learns that it is superseded.
    term: int = field(default=0, validator=_count)
    nonce: bytes = field(default=b"", validator=_nonce)
    # Older states of the same lineage: the run may have to go back to one of them.
    kept: tuple[KeptState, ...] = field(default=(), validator=max_len(KEPT_STATES_MAX))
    software: str = field(default="", validator=_word)  # the daemon's version
    relay: RelayOffer | None = None
    # Of this stream at the peer; if the master sees the same port, the routers between keep ports.
    local_port: int = field(default=0, validator=_port)


@frozen
class Heartbeat(Message):
    """Both ways: a sign of life, several per deadline.

    ``received``: messages received in the session with the master, heartbeats not counted.
    """

    sequence: int = field(validator=_count)
    received: int = field(default=0, validator=_count)
    left_s: float = field(default=0.0, validator=_finite)  # a master's: of the run; 0.0: not known


@frozen
class Resume(Message):
    """Peer, instead of ``Hello``: its connection broke; continue after ``received`` messages."""

    run_id: str = field(validator=_run_id)
    incarnation: int = field(validator=_count)
    term: int = field(validator=_count)  # of the session's master
    nonce: bytes = field(validator=_nonce)
    received: int = field(validator=_count)
    addresses: tuple[str, ...] = field(validator=_each(_text, 16))  # as in ``Hello``
    local_port: int = field(default=0, validator=_port)


@frozen
class LinkBroken(Message):
    """Peer: its link to a member broke, and neither side had closed it."""

    peer: str = field(validator=_peer)


@frozen
class CopyProgress:
    """The progress of copying one fragment; blocks that the peer had before count as done."""

    fragment: int = field(validator=_count)
    version: int = field(validator=_count)
    done_blocks: int = field(validator=_count)
    all_blocks: int = field(validator=_count)
    done_bytes: int = field(validator=_count)
    all_bytes: int = field(validator=_count)
    bytes_per_s: float = field(validator=_finite)  # the recent rate; 0.0: not known yet
    donors: tuple[str, ...] = field(validator=_peers)  # that send at the moment
    rounds_kept: int = field(validator=_count)  # committed rounds to be replayed on the copy


@frozen
class Progress(Message):
    """Peer: its trainer's activity, about once a second while it changes."""

    step: int = field(validator=_count)  # the run's global step at this trainer
    tokens: int = field(validator=_count)  # since the daemon started
    tokens_per_s: float = field(validator=_finite)
    loss: float | None
    phase: str = field(validator=_word)  # "training", "waiting for commit", ...
    bulk_sent_bytes: int = field(validator=_count)
    bulk_received_bytes: int = field(validator=_count)
    state_received_bytes: int = field(validator=_count)  # blocks of state
    metrics: dict[str, float] = field(validator=_metrics)
    # Seconds since the daemon started, while contributing: waiting inside the hook, and outside of it.
    waited_s: float = field(default=0.0, validator=_finite)
    stepped_s: float = field(default=0.0, validator=_finite)
    copies: tuple[CopyProgress, ...] = field(default=(), validator=max_len(FRAGMENTS_MAX))
    accelerators: str = field(default="", validator=_word)  # "7 of 8 GPUs"; empty: not told


@frozen
class Measured(Message):
    """Peer, after a reduction: the bytes that it sent and received, and the seconds that this took.

    A second in which several links send counts once in ``sending_s``, so bytes divided by seconds is
    the rate of the peer's own line, unless it waited for others. The same holds for receiving.
    ``best_bytes_per_s``: at which it sent in its best second; 0: not known.
    """

    sent_bytes: int = field(validator=_count)
    sending_s: float = field(validator=_finite)
    received_bytes: int = field(validator=_count)
    receiving_s: float = field(validator=_finite)
    links: tuple[LinkLoad, ...] = field(validator=max_len(MEMBERS_MAX))  # that sent bytes
    best_bytes_per_s: float = field(default=0.0, validator=_finite)


@frozen
class RouteWanted(Message):
    """Peer: it has no link to this member, and the present route does not give one.

    ``route``: the route's number; 0: the route that follows from the view. ``worked``: a link over this
    route existed and is lost.
    """

    peer: str = field(validator=_peer)
    route: int = field(validator=_count)
    worked: bool
    reason: str = field(validator=_text)


@frozen
class RouteWorks(Message):
    """Peer: it has a link to this member, over a route that was arranged or was in doubt."""

    peer: str = field(validator=_peer)
    route: int = field(validator=_count)


@frozen
class Relayed(Message):
    """Relay: its load, from time to time while it changes."""

    pairs: int = field(validator=_count)  # pairs with a valid ticket
    streams: int = field(validator=_count)  # streams that it forwards at the moment
    carried_bytes: int = field(validator=_count)  # over its life, both ways
    spent: bool  # its quota is used up; it forwards no more


@frozen
class TrainerAttached(Message):
    """Peer: its trainer attached and declared this layout."""

    layout: ModelLayout


@frozen
class TrainerLost(Message):
    """Peer: it has no trainer at the moment; the supervisor may restart it."""

    reason: str = field(validator=_text)


@frozen
class TrainerFailed(Message):
    """Peer: the reason of its trainer's failure, and the remedy; sent again in a new session.

    ``failure_count``: failures in a row, this one included.
    """

    kind: FailureKind
    reason: str = field(validator=_text)
    remedy: Remedy
    failure_count: int = field(default=1, validator=_count)
    restart_s: float = field(default=0.0, validator=_finite)  # until the next process


@frozen
class WeightsSupplied(Message):
    """Peer, after ``SupplyWeights``: version 0 of every fragment, taken from its trainer."""

    layout: ModelLayout
    sizes: tuple[FragmentSize, ...] = field(validator=max_len(FRAGMENTS_MAX))
    heads: tuple[FragmentHead, ...] = field(validator=max_len(FRAGMENTS_MAX))
    lineage: bytes = field(validator=_digest)


@frozen
class Ready(Message):
    """Peer: its pseudo-gradient for the round is posted and checked."""

    round: int = field(validator=_count)
    weight: int = field(validator=_count)
    norm: float = field(validator=_finite)  # L2 norm of the float32 values
    state_root: bytes = field(validator=_digest)  # of the fragment before the round
    step: int = field(validator=_count)
    step_s: float = field(default=0.0, validator=_finite)  # of one trainer step; 0: not known
    # Leased positions whose samples are in the pseudo-gradient and were spent by no commit known here.
    trained: tuple[LeaseRange, ...] = field(default=(), validator=_leases)
    # Digest of those that its trainer began with; empty: not known (yet).
    first_batches: bytes = field(default=b"", validator=max_len(32))


@frozen
class LeasesHeld(Message):
    """Peer, at the begin of a session: the leases that it has from an earlier one. Answer ``Leased``."""

    length: int = field(validator=_samples)  # of the data set
    ranges: tuple[LeaseRange, ...] = field(validator=_leases)


@frozen
class LeasesWanted(Message):
    """Peer: it wants leases on so many more samples. A later one replaces an earlier one."""

    length: int = field(validator=_samples)  # of the data set
    count: int = field(validator=and_(ge(1), le(LEASED_MAX)))


@frozen
class NotReady(Message):
    """Peer: it cannot contribute to this round, for this reason (not finite, trainer lost, ...)."""

    round: int = field(validator=_count)
    reason: str = field(validator=_text)


@frozen
class Reduced(Message):
    """Peer: it holds the result of an attempt. ``digest``: BLAKE3 of the result's wire bytes.

    ``manifest``: the contributors in each chunk; empty: all are in all chunks. The digest covers it.
    ``norm_sums``: three sums for each contributor, in the order of ``Reduce``, over its unclipped values in
    the chunks that this peer added up: the squares; over a sample of the values, the squares, and the
    products with the outer momentum. Little-endian float32; empty: this peer added up nothing.
    ``momentum_square``: the sum of squares of the outer momentum over that sample.
    """

    round: int = field(validator=_count)
    attempt: int = field(validator=_count)
    digest: bytes = field(validator=_digest)
    manifest: tuple[ContributorRun, ...] = field(default=(), validator=_manifest)
    norm_sums: bytes = field(default=b"", validator=max_len(NORM_SUMS_BYTES * MEMBERS_MAX))
    momentum_square: float = field(default=0.0, validator=_finite)


@frozen
class Held(Message):
    """Peer, after ``Flush``: it accepts nothing more from the lost peers, and holds these results.

    ``results``: one bit for each chunk, the first one lowest.
    """

    round: int = field(validator=_count)
    attempt: int = field(validator=_count)
    results: bytes = field(validator=max_len(CHUNK_BITS_BYTES_MAX))


@frozen
class MadeDigest(Message):
    """A digest of all results that one member made: BLAKE3 of the chunks' digests and contributor sets."""

    maker: str = field(validator=_peer)
    digest: bytes = field(validator=_digest)


@frozen
class Diagnosis(Message):
    """Peer, after ``Diagnose``: the peers that its part of an attempt waits for, and its results.

    ``contributions``: peers whose contributions to its own chunks it lacks. ``results``: owners whose
    results it lacks. ``made``: the complete results that it holds, by the member that made them.
    """

    round: int = field(validator=_count)
    attempt: int = field(validator=_count)
    contributions: tuple[str, ...] = field(default=(), validator=_peers)
    results: tuple[str, ...] = field(default=(), validator=_peers)
    made: tuple[MadeDigest, ...] = field(default=(), validator=max_len(MEMBERS_MAX))


@frozen
class ReduceFailed(Message):
    """Peer: an attempt cannot finish here. ``accused``: peers that vanished or sent invalid data.

    If they only vanished (not ``bad``), the sender keeps what it has and waits for a ``Repair``.
    """

    round: int = field(validator=_count)
    attempt: int = field(validator=_count)
    accused: tuple[str, ...] = field(validator=_peers)
    bad: bool  # the accused sent data that must not be added
    reason: str = field(validator=_text)


@frozen
class ChunkFinding:
    """A chunk that a checker did not find equal to its own sum.

    ``differs``: the sums differ, and ``peer`` is the contributor that, by the owner's digests, has sent the
    owner something else than the checker; empty if there is none, or more than one. Otherwise the
    checker could not add the chunk up: ``peer`` sent it nothing.
    """

    chunk: int = field(validator=_u32)
    differs: bool
    peer: str = field(default="", validator=_peer_or_none)


@frozen
class Audited(Message):
    """Peer, after ``AuditOrder``: its findings. All other chunks of the order are equal."""

    round: int = field(validator=_count)
    attempt: int = field(validator=_count)
    transfer: int = field(validator=_u32)
    findings: tuple[ChunkFinding, ...] = field(default=(), validator=max_len(AUDITS_MAX))


@frozen
class Applied(Message):
    """Peer: it applied a committed round's outer step; its shared state now has this root."""

    round: int = field(validator=_count)
    head: FragmentHead


@frozen
class Synced(Message):
    """Peer: a fragment fetched after ``SyncFragment`` is in place, buffered rounds included.

    ``bad_donors`` served blocks with wrong digests; other donors replaced these blocks.
    """

    head: FragmentHead
    received_bytes: int = field(validator=_count)
    bad_donors: tuple[str, ...] = field(default=(), validator=_peers)


@frozen
class SyncFailed(Message):
    """Peer: a fragment could not be fetched; ``bad_donors`` served blocks with wrong digests."""

    fragment: int = field(validator=_count)
    version: int = field(validator=_count)
    bad_donors: tuple[str, ...] = field(validator=_peers)
    reason: str = field(validator=_text)


@frozen
class Leaving(Message):
    """Peer: it wants to leave; it stays until ``Released``."""

    reason: str = field(validator=_text)


@frozen
class Renew(Message):
    """Peer: a request for its next certificate."""

    request_pem: bytes = field(validator=_blob)


# ---------------------------------------------------------------- master -> peer


@frozen
class Welcome(Message):
    """Master: the answer to ``Hello``; the view that includes the peer follows."""

    version: int = field(validator=_count)
    number: int = field(validator=_count)
    # The run's spec as the operator wrote it.
    spec_toml: str = field(validator=and_(max_len(65_536), _toml_text))
    layout: ModelLayout | None  # None: the run has no weights yet
    lineage: bytes = field(validator=max_len(32))  # empty: the run has no weights yet
    heads: tuple[FragmentHead, ...] = field(validator=max_len(FRAGMENTS_MAX))  # committed versions
    step: int = field(validator=_count)  # the run's global step
    # Outcomes of the rounds that the peer reported as undecided.
    committed: tuple[Commit, ...] = field(validator=max_len(FRAGMENTS_MAX))
    term: int = field(validator=_count)  # grows with every start of the master
    # Drawn at every start: tells apart two masters that begin the same term.
    nonce: bytes = field(default=b"", validator=_nonce)
    # Addresses at which the run's master may be in future: this machine, or a standby machine.
    masters: tuple[str, ...] = field(default=(), validator=_each(_text, MASTERS_MAX))
    # Different from the branch before: rounds that were committed and are not applied yet are void.
    branch: int = field(default=0, validator=_count)
    # Rounds of the previous master whose reductions the peer runs or whose results it holds. They may
    # yet be committed: the peer continues them, and reports its results again.
    going_on: tuple[int, ...] = field(default=(), validator=max_len(FRAGMENTS_MAX))
    # The step at which the run's last round is due; 0: the run has no end.
    total_steps: int = field(default=0, validator=_count)


@frozen
class Masters(Message):
    """Master: where the run's master may be from now on, beside the addresses known so far."""

    masters: tuple[str, ...] = field(validator=_each(_text, MASTERS_MAX))


@frozen
class Resumed(Message):
    """Master: the answer to ``Resume``; the messages that the peer has not received follow."""

    received: int = field(validator=_count)  # by the master, in this session


@frozen
class View(Message):
    """Master: the run's members."""

    number: int = field(validator=_count)
    members: tuple[MemberInfo, ...] = field(validator=max_len(MEMBERS_MAX))
    step: int = field(validator=_count)  # the run's global step, at which a new contributor begins


@frozen
class ViewChange(Message):
    """Master: the next view, as its difference from the last view on this connection."""

    number: int = field(validator=_count)
    base: int = field(validator=_count)  # the number of the view that it changes
    # Changed or new members.
    changed: tuple[MemberInfo, ...] = field(validator=max_len(MEMBERS_MAX))
    gone: tuple[int, ...] = field(validator=_each(_count, MEMBERS_MAX))  # by member number
    step: int = field(validator=_count)


@frozen
class SupplyWeights(Message):
    """Master: supply the run's initial weights from this peer's trainer."""


@frozen
class Open(Message):
    """Master: contribute to this round at the first step boundary at or after ``at_step``.

    The same round again with an earlier step means: the other peers wait; post what is trained by now.
    """

    round: int = field(validator=_count)
    fragment: int = field(validator=_count)
    version: int = field(validator=_count)  # of the fragment before the round
    at_step: int = field(validator=_count)


@frozen
class Reduce(Message):
    """Master: start this reduction. Contributors and receivers are in order of member number."""

    round: int = field(validator=_count)
    attempt: int = field(validator=_count)
    fragment: int = field(validator=_count)
    version: int = field(validator=_count)  # before the round
    view: int = field(validator=_count)
    contributors: tuple[Contributor, ...] = field(validator=max_len(MEMBERS_MAX))
    # All peers that get the result, contributors included.
    receivers: tuple[str, ...] = field(validator=_peers)
    plan: Plan


@frozen
class Commit(Message):
    """Master: the round is decided and journaled; apply it. Version becomes ``version + 1``."""

    round: int = field(validator=_count)
    attempt: int = field(validator=_count)
    fragment: int = field(validator=_count)
    version: int = field(validator=_count)  # before the round
    at_step: int = field(validator=_count)  # the run's global step is now at least this
    contributors: tuple[Contributor, ...] = field(validator=max_len(MEMBERS_MAX))
    digest: bytes = field(validator=_digest)
    # The contributors in each chunk; empty: all are in all chunks.
    manifest: tuple[ContributorRun, ...] = field(default=(), validator=_manifest)


_packed: Any = max_len(16 * MEMBERS_MAX)


@frozen
class BriefReduce(Message):
    """Master: ``Reduce``, with members by their numbers in the view ``base`` of this connection.

    What the bytes mean is written in ``membership/master/state/brief_orders.py``.
    """

    round: int = field(validator=_count)
    attempt: int = field(validator=_count)
    fragment: int = field(validator=_count)
    version: int = field(validator=_count)
    view: int = field(validator=_count)
    base: int = field(validator=_count)
    contributors: bytes = field(validator=_packed)  # runs of numbers
    weights: bytes = field(validator=_packed)
    scales: tuple[float, ...] = field(validator=_each(_finite, MEMBERS_MAX))  # empty: all are 1.0
    receivers: bytes = field(validator=_packed)  # runs of numbers
    owners: bytes = field(validator=max_len(16 * OWNER_RUNS_MAX))  # numbers and counts of chunks
    plan: Plan  # without owners


@frozen
class BriefCommit(Message):
    """Master: ``Commit``, with the contributors of this round's ``Reduce`` on this connection."""

    round: int = field(validator=_count)
    attempt: int = field(validator=_count)
    fragment: int = field(validator=_count)
    version: int = field(validator=_count)
    at_step: int = field(validator=_count)
    digest: bytes = field(validator=_digest)
    manifest: tuple[ContributorRun, ...] = field(default=(), validator=_manifest)


@frozen
class Flush(Message):
    """Master: the round goes on without these peers. Accept nothing more from them, answer ``Held``."""

    round: int = field(validator=_count)
    attempt: int = field(validator=_count)  # of the ``Repair`` that is being prepared
    lost: tuple[str, ...] = field(validator=_peers)  # all lost peers of the present ``Reduce``


@frozen
class Repair(Message):
    """Master: the running reduction goes on without the lost peers, under this attempt's number."""

    round: int = field(validator=_count)
    attempt: int = field(validator=_count)
    lost: tuple[str, ...] = field(validator=_peers)
    assignments: tuple[Assignment, ...] = field(validator=max_len(OWNER_RUNS_MAX))


@frozen
class Diagnose(Message):
    """Master: this attempt stalls, or ends in different results. Answer ``Diagnosis``."""

    round: int = field(validator=_count)
    attempt: int = field(validator=_count)


@frozen
class CheckerChunks:
    """Chunks that one member checks."""

    checker: str = field(validator=_peer)
    chunks: tuple[int, ...] = field(validator=_each(_u32, AUDITS_MAX))


@frozen
class AuditOrder(Message):
    """Master, to the contributors of a result: send these checkers these chunks again.

    They come as BLOCK frames of this transfer. A checker adds its chunks up, and answers ``Audited``.
    """

    round: int = field(validator=_count)
    attempt: int = field(validator=_count)
    transfer: int = field(validator=_u32)
    checks: tuple[CheckerChunks, ...] = field(validator=max_len(MEMBERS_MAX))


@frozen
class Abort(Message):
    """Master: the round is void; drop its result and keep the local delta."""

    round: int = field(validator=_count)
    reason: str = field(validator=_text)


@frozen
class SyncFragment(Message):
    """Master: fetch this version of a fragment from these donors, which have pinned it.

    ``replaces_newer``: replace a held fragment even if its version is higher; that version belongs to
    an abandoned branch of the run's history.
    """

    head: FragmentHead
    donors: tuple[str, ...] = field(validator=_peers)
    replaces_newer: bool = False


@frozen
class Route(Message):
    """Master: use this route to the member from now on, instead of the route that follows from the view.

    ``number``: grows with each route of a pair. ``dials``: this end is the dialler; the other end gets
    the opposite.
    """

    peer: str = field(validator=_peer)
    number: int = field(validator=_count)
    kind: RouteKind
    dials: bool
    relay: str = field(default="", validator=_peer_or_none)  # the peer that forwards
    # The relay's addresses; of a punched route the one from which the other end dials.
    addresses: tuple[str, ...] = field(default=(), validator=_each(_text, 16))
    ticket: bytes = field(default=b"", validator=_ticket)  # shown to the relay
    local_port: int = field(default=0, validator=_port)  # the port to dial from


@frozen
class RelayPair(Message):
    """Master, to a relay: forward between streams that show this ticket, which these two peers have."""

    ticket: bytes = field(validator=_ticket)
    peers: tuple[str, ...] = field(validator=_peers)


@frozen
class StopRelayingPair(Message):
    """Master, to a relay: this ticket is void."""

    ticket: bytes = field(validator=_ticket)


@frozen
class Donate(Message):
    """Master: keep this version of the fragment readable for ``receiver`` until ``Release``."""

    head: FragmentHead
    receiver: str = field(validator=_peer)


@frozen
class Release(Message):
    """Master: the version of ``Donate`` need not stay readable for ``receiver`` any longer."""

    fragment: int = field(validator=_count)
    version: int = field(validator=_count)
    receiver: str = field(validator=_peer)


@frozen
class Leased(Message):
    """Master: leases on these positions.

    ``all``: these are all that the peer holds; every other lease of it is void.
    """

    ranges: tuple[LeaseRange, ...] = field(validator=_leases)
    all: bool = False
    length: int = field(
        default=0, validator=_count
    )  # samples of the run's data set; 0: not known yet


@frozen
class Renewed(Message):
    """Master: the answer to ``Renew``."""

    certificate_pem: bytes = field(validator=_blob)


@frozen
class Notice(Message):
    """Master: a text for the peer's operator (its update was refused, ...)."""

    text: str = field(validator=_text)


@frozen
class NewSpec(Message):
    """Master: the run's spec from now on; it differs from the last one in the number of rounds."""

    spec_toml: str = field(validator=and_(max_len(65_536), _toml_text))
    total_steps: int = field(validator=_count)  # as in ``Welcome``


@frozen
class Released(Message):
    """Master: the answer to ``Leaving``; nothing of the run depends on the peer any more."""


@frozen
class Finish(Message):
    """Master: the run has committed all its rounds."""

    round: int = field(validator=_count)


# ---------------------------------------------------------------- master <-> master


@frozen
class TermClaim(Message):
    """Both sides, once: a master's term. The lower one gives way, of one term the start less followed."""

    run_id: str = field(validator=_run_id)
    term: int = field(validator=_count)
    nonce: bytes = field(validator=_nonce)
    followers: int = field(validator=_count)  # members that have attached in this term


# ---------------------------------------------------------------- peer <-> peer (a link's control stream)


@frozen
class LinkHello(Message):
    """Both sides, first message: half of the lanes' secret. The dialer's ``link_id`` counts."""

    version_min: int = field(validator=_count)
    version_max: int = field(validator=_count)
    link_id: bytes = field(validator=and_(min_len(16), max_len(16)))
    secret: bytes = field(  # 32 random bytes; lane keys come from both by HKDF
        repr=False, validator=_digest
    )


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

    lane: int = field(validator=_u32)
    frames: int = field(validator=_count)
    bytes: int = field(validator=_count)
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

    fragment: int = field(validator=_count)
    version: int = field(validator=_count)
    # The joiner's number for this transfer; the frames carry it.
    transfer: int = field(validator=_count)
    blocks: tuple[int, ...] = field(validator=_each(_count, BLOCKS_MAX))


@frozen
class BlocksRefused(Message):
    """Donor: it cannot send the blocks, for this reason."""

    fragment: int = field(validator=_count)
    version: int = field(validator=_count)
    transfer: int = field(validator=_count)
    reason: str = field(validator=_text)


# ---------------------------------------------------------------- daemon <-> trainer (Unix socket)


@frozen
class TensorBox:
    """The part of a tensor that a rank holds: ``shape`` elements from ``start`` on, in each dimension."""

    start: tuple[int, ...] = field(validator=_each(_count, DIMENSIONS_MAX))
    shape: tuple[int, ...] = field(validator=_each(_count, DIMENSIONS_MAX))


@frozen
class RankPart:
    """One process of a trainer, and what it holds of the model.

    Ranks with the same ``data_rank`` train on the same samples (tensor parallel): their tokens count once.
    ``boxes``: one for each tensor of the layout; empty: the whole model.
    """

    rank: int = field(default=0, validator=and_(ge(0), lt(RANKS_MAX)))
    world_size: int = field(default=1, validator=and_(ge(1), le(RANKS_MAX)))
    data_rank: int = field(default=0, validator=and_(ge(0), lt(RANKS_MAX)))
    boxes: tuple[TensorBox, ...] = field(default=(), validator=max_len(TENSORS_MAX))


@frozen
class TrainerHello(Message):
    """Trainer: the first message, of each of its ranks."""

    version: int = field(validator=_count)
    pid: int = field(validator=_count)
    layout: ModelLayout
    part: RankPart = RankPart()


@frozen
class DrawHello(Message):
    """Sampler: the first message on a connection that draws leased samples for one data rank.

    ``ahead``: so many are leased to this peer before the speed of its trainer is known.
    """

    version: int = field(validator=_count)
    data_rank: int = field(validator=and_(ge(0), lt(RANKS_MAX)))
    length: int = field(validator=_samples)  # of the data set
    ahead: int = field(default=SAMPLES_AHEAD, validator=and_(ge(1), le(LEASED_MAX)))


@frozen
class Draw(Message):
    """Sampler: the next samples, from the ``index``-th one of this data rank on, ``count`` at most."""

    index: int = field(validator=_count)
    count: int = field(validator=and_(ge(1), le(LEASED_MAX)))


@frozen
class Drawn(Message):
    """Daemon: the positions of those samples. The answer to ``DrawHello`` has the key of the order."""

    ranges: tuple[LeaseRange, ...] = field(validator=_leases)
    key: bytes = field(default=b"", validator=max_len(ORDER_KEY_BYTES))


@frozen
class RankWrites(Message):
    """Daemon to a rank, first: the indices of the tensors that it writes into the posted arena.

    Of ranks that hold the same part of a tensor one writes it.
    """

    tensors: tuple[int, ...] = field(validator=_each(_count, TENSORS_MAX))


@frozen
class RankOrders(Message):
    """Daemon to all ranks that wait at one step: so many messages follow. See ``RankGate``."""

    count: int = field(validator=_count)


@frozen
class RankPassOn(Message):
    """Daemon to a rank that waits for the word only: train on."""


@frozen
class RankWaits(Message):
    """Rank: it waits at this step; ``must``: it cannot train on without a message."""

    step: int = field(validator=_count)
    must: bool


@frozen
class RankTrainsOn(Message):
    """Rank: it has handled all messages that it was given, and trains on."""


@frozen
class ArenaOpened(Message):
    """Daemon: the shared and the posted arena; their two file descriptors come with this message.

    ``fragments``: for each fragment the indices of its tensors in the layout, in order.
    """

    fragments: tuple[tuple[int, ...], ...] = field(validator=max_len(FRAGMENTS_MAX))
    sizes: tuple[FragmentSize, ...] = field(validator=max_len(FRAGMENTS_MAX))
    overlap_steps: int = field(validator=_count)
    # The trainer sends ``Failing`` after this many losses in a row that are not finite; 0: never.
    nan_steps: int = field(default=0, validator=_count)
    # The path that ``KeepState`` writes to; empty: the trainer writes none.
    local_checkpoint: str = field(default="", validator=_text)


@frozen
class KeepState(Message):
    """Daemon: write the trainer's local state to disk (optimizer state, random number generators)."""


@frozen
class PostInitial(Message):
    """Daemon: write the model's present tensors into the posted arena, as the run's initial weights."""


@frozen
class InitialPosted(Message):
    """Trainer: the answer to ``PostInitial``."""


@frozen
class Load(Message):
    """Daemon: replace the model's tensors by the shared state, drop local deltas.

    ``spoilt``: they are not finite, so that the inner optimizer's state is to be dropped, too.
    """

    step: int = field(validator=_count)  # the run's global step from now on
    step_limit: int = field(validator=_count)  # not to be passed before the next ``RoundOpened``
    finished: bool
    spoilt: bool = False


@frozen
class SetRole(Message):
    """Daemon: train, or (not ``contributing``: as a spare) wait at the step boundary.

    One member of a view leads: it evaluates and saves for the run. ``total_steps`` is the step at which
    the last round is due; 0 if the run has no end.
    """

    contributing: bool
    why: str = field(validator=_text)
    leads: bool = False
    total_steps: int = field(default=0, validator=_count)


@frozen
class ExtendStepLimit(Message):
    """Daemon: the master is away. Do not wait for rounds; train on as far as ``step_limit``.

    The next ``RoundOpened``, ``Load`` or committed round ends this.
    """

    step_limit: int = field(validator=_count)


@frozen
class RoundOpened(Message):
    """Daemon: post the fragment's pseudo-gradient at the first step boundary at or after ``at_step``."""

    round: int = field(validator=_count)
    fragment: int = field(validator=_count)
    version: int = field(validator=_count)
    at_step: int = field(validator=_count)
    step_limit: int = field(validator=_count)


@frozen
class RankSamples:
    """Samples of one data rank's sampler, counted from the start of the trainer.

    ``lost``: trained before the last ``Load``, so they are in no tensor. ``trained``: all so far.
    """

    data_rank: int = field(validator=and_(ge(0), lt(RANKS_MAX)))
    lost: int = field(validator=_count)
    trained: int = field(validator=_count)


@frozen
class Posted(Message):
    """Trainer: the pseudo-gradient of the fragment is in the posted arena."""

    round: int = field(validator=_count)
    fragment: int = field(validator=_count)
    version: int = field(validator=_count)  # on which its local weights are based
    tokens: int = field(validator=_count)
    step: int = field(validator=_count)
    step_s: float = field(default=0.0, validator=_finite)  # of a recent step, without waiting
    # Of each data rank that draws leased samples; a trainer without a sampler has none.
    samples: tuple[RankSamples, ...] = field(default=(), validator=max_len(RANKS_MAX))
    first_batches: bytes = field(default=b"", validator=max_len(32))  # see ``Ready``


@frozen
class RoundEnded(Message):
    """Daemon: a round's outcome; after a commit the shared arena holds ``version``."""

    round: int = field(validator=_count)
    fragment: int = field(validator=_count)
    committed: bool
    contributed: bool
    version: int = field(validator=_count)
    step: int = field(validator=_count)
    step_limit: int = field(validator=_count)


@frozen
class Metrics(Message):
    """Trainer: named figures for the dashboard."""

    step: int = field(validator=_count)
    values: dict[str, float] = field(validator=_metrics)


@frozen
class Failing(Message):
    """Trainer: it failed, for this reason. After ``NAN`` it waits for a ``Load``, else it ends."""

    kind: FailureKind
    reason: str = field(validator=_text)


@frozen
class Finished(Message):
    """Daemon: the run is over; ``run.finished`` becomes true at the next step boundary."""


@frozen
class Rejected(Message):
    """Daemon: this trainer cannot take part; it raises an error with this reason."""

    reason: str = field(validator=_text)


attrs.resolve_types(Hello)
attrs.resolve_types(Welcome)
