"""What a peer tells the master. All of it may come once it is a member: ``connection_phases``."""

from __future__ import annotations

from attrs import field, frozen
from attrs.validators import and_, ge, le, max_len

from . import fields
from .limits import (
    AUDITS_MAX,
    CHUNK_BITS_BYTES_MAX,
    FRAGMENTS_MAX,
    KEPT_STATES_MAX,
    LEASED_MAX,
    MEMBERS_MAX,
    NORM_SUMS_BYTES,
    SKETCH_BYTES,
)
from .parts import (
    ContributorRun,
    FailureKind,
    FragmentHead,
    FragmentSize,
    LeaseRange,
    LinkLoad,
    Message,
    ModelLayout,
    Remedy,
)


@frozen
class KeptState:
    """A complete state of the run, in a checkpoint that the peer can read."""

    heads: tuple[FragmentHead, ...] = field(validator=max_len(FRAGMENTS_MAX))


@frozen
class RelayOffer:
    """A peer's offer to forward between peers that cannot reach each other.

    ``only``: the peer takes no other part in the run, and holds no state.
    """

    bytes_per_s: float = field(validator=fields.finite)  # of all pairs, both ways
    pairs: int = field(validator=fields.count)
    quota_bytes: int = field(validator=fields.count)  # over the relay's life; 0: no limit
    only: bool


@frozen
class Hello(Message):
    """Peer: the first message on a control stream."""

    version_min: int = field(validator=fields.count)
    version_max: int = field(validator=fields.count)
    run_id: str = field(validator=fields.run_id)
    name: str = field(validator=fields.name)
    addresses: tuple[str, ...] = field(validator=fields.addresses)  # at which peers can dial it
    # Random per daemon process: tells a reconnect from a restart.
    incarnation: int = field(validator=fields.count)
    layout: ModelLayout | None  # of the trainer; None: not known yet
    # The committed state that the peer holds.
    heads: tuple[FragmentHead, ...] = field(validator=max_len(FRAGMENTS_MAX))
    lineage: bytes = field(validator=max_len(32))  # of that state; empty: the peer holds none
    # Results that the peer reported and whose outcome it has not heard.
    undecided: tuple[Reduced, ...] = field(validator=max_len(FRAGMENTS_MAX))
    # The cap that the machine's owner sets on traffic to other peers; 0: no cap.
    upload_bytes_per_s: float = field(default=0.0, validator=fields.finite)
    # The same for receiving.
    download_bytes_per_s: float = field(default=0.0, validator=fields.finite)
    # Of the newest master that the peer has obeyed; an older master learns that it is superseded.
    term: int = field(default=0, validator=fields.count)
    nonce: bytes = field(default=b"", validator=fields.nonce)
    # Older states of the same lineage: the run may have to go back to one of them.
    kept: tuple[KeptState, ...] = field(default=(), validator=max_len(KEPT_STATES_MAX))
    software: str = field(default="", validator=fields.word)  # the daemon's version
    relay: RelayOffer | None = None
    # Of this stream at the peer; if the master sees the same port, the routers between keep ports.
    local_port: int = field(default=0, validator=fields.port)


@frozen
class Heartbeat(Message):
    """Both ways: a sign of life, several per deadline.

    ``received``: messages received in the session with the master, heartbeats not counted.
    """

    received: int = field(default=0, validator=fields.count)
    # A master's: of the run; 0.0: not known.
    left_s: float = field(default=0.0, validator=fields.finite)


@frozen
class Resume(Message):
    """Peer, instead of ``Hello``: its connection broke; continue after ``received`` messages."""

    run_id: str = field(validator=fields.run_id)
    incarnation: int = field(validator=fields.count)
    term: int = field(validator=fields.count)  # of the session's master
    nonce: bytes = field(validator=fields.nonce)
    received: int = field(validator=fields.count)
    addresses: tuple[str, ...] = field(validator=fields.addresses)  # as in ``Hello``
    local_port: int = field(default=0, validator=fields.port)


@frozen
class LinkBroken(Message):
    """Peer: its link to a member broke, and neither side had closed it."""

    peer: str = field(validator=fields.peer)


@frozen
class CopyProgress:
    """The progress of copying one fragment; blocks that the peer had before count as done."""

    fragment: int = field(validator=fields.count)
    version: int = field(validator=fields.count)
    done_blocks: int = field(validator=fields.count)
    all_blocks: int = field(validator=fields.count)
    done_bytes: int = field(validator=fields.count)
    all_bytes: int = field(validator=fields.count)
    bytes_per_s: float = field(validator=fields.finite)  # the recent rate; 0.0: not known yet
    donors: tuple[str, ...] = field(validator=fields.peers)  # that send at the moment
    rounds_kept: int = field(validator=fields.count)  # committed rounds to be replayed on the copy


@frozen
class LoggedFigure:
    """A figure of ``run.log``, and the step at which it was logged."""

    value: float
    step: int = field(validator=fields.count)


@frozen
class Progress(Message):
    """Peer: its trainer's activity, about once a second while it changes."""

    step: int = field(validator=fields.count)  # the run's global step at this trainer
    tokens: int = field(validator=fields.count)  # since the daemon started
    tokens_per_s: float = field(validator=fields.finite)
    loss: float | None
    phase: str = field(validator=fields.word)  # "training", "waiting for commit", ...
    bulk_sent_bytes: int = field(validator=fields.count)
    bulk_received_bytes: int = field(validator=fields.count)
    state_received_bytes: int = field(validator=fields.count)  # blocks of state
    metrics: dict[str, LoggedFigure] = field(validator=fields.metrics)
    # Seconds since the daemon started, while contributing: waiting inside the hook, and outside of
    # it.
    waited_s: float = field(default=0.0, validator=fields.finite)
    stepped_s: float = field(default=0.0, validator=fields.finite)
    copies: tuple[CopyProgress, ...] = field(default=(), validator=max_len(FRAGMENTS_MAX))
    accelerators: str = field(default="", validator=fields.word)  # "7 of 8 GPUs"; empty: not told

    @property
    def figures(self) -> dict[str, float]:
        """The values of ``metrics``."""
        return {name: figure.value for name, figure in self.metrics.items()}


@frozen
class Measured(Message):
    """Peer, after a reduction: the bytes that it sent and received, and the seconds that this took.

    A second in which several links send counts once in ``sending_s``, so bytes divided by seconds
    is the rate of the peer's own line, unless it waited for others. The same holds for receiving.
    ``best_bytes_per_s``: at which it sent in its best second; 0: not known.
    """

    sent_bytes: int = field(validator=fields.count)
    sending_s: float = field(validator=fields.finite)
    received_bytes: int = field(validator=fields.count)
    receiving_s: float = field(validator=fields.finite)
    links: tuple[LinkLoad, ...] = field(validator=max_len(MEMBERS_MAX))  # that sent bytes
    best_bytes_per_s: float = field(default=0.0, validator=fields.finite)


@frozen
class RouteWanted(Message):
    """Peer: it has no link to this member, and the present route does not give one.

    ``route``: the route's number; 0: the route that follows from the view. ``worked``: a link over
    this route existed and is lost.
    """

    peer: str = field(validator=fields.peer)
    route: int = field(validator=fields.count)
    worked: bool
    reason: str = field(validator=fields.text)


@frozen
class RouteWorks(Message):
    """Peer: it has a link to this member, over a route that was arranged or was in doubt."""

    peer: str = field(validator=fields.peer)
    route: int = field(validator=fields.count)


@frozen
class Relayed(Message):
    """Relay: its load, from time to time while it changes."""

    pairs: int = field(validator=fields.count)  # pairs with a valid ticket
    streams: int = field(validator=fields.count)  # streams that it forwards at the moment
    carried_bytes: int = field(validator=fields.count)  # over its life, both ways
    spent: bool  # its quota is used up; it forwards no more


@frozen
class TrainerAttached(Message):
    """Peer: its trainer attached and declared this layout."""

    layout: ModelLayout


@frozen
class TrainerLost(Message):
    """Peer: it has no trainer at the moment; the supervisor may restart it."""

    reason: str = field(validator=fields.text)


@frozen
class TrainerFailed(Message):
    """Peer: the reason of its trainer's failure, and the remedy; sent again in a new session.

    ``failure_count``: failures in a row, this one included.
    """

    kind: FailureKind
    reason: str = field(validator=fields.text)
    remedy: Remedy
    failure_count: int = field(default=1, validator=fields.count)
    restart_s: float = field(default=0.0, validator=fields.finite)  # until the next process


@frozen
class WeightsSupplied(Message):
    """Peer, after ``SupplyWeights``: version 0 of every fragment, taken from its trainer."""

    layout: ModelLayout
    sizes: tuple[FragmentSize, ...] = field(validator=max_len(FRAGMENTS_MAX))
    heads: tuple[FragmentHead, ...] = field(validator=max_len(FRAGMENTS_MAX))
    lineage: bytes = field(validator=fields.digest)


@frozen
class Ready(Message):
    """Peer: its pseudo-gradient for the round is posted and checked."""

    round: int = field(validator=fields.count)
    weight: int = field(validator=fields.count)
    norm: float = field(validator=fields.finite)  # L2 norm of the float32 values
    state_root: bytes = field(validator=fields.digest)  # of the fragment before the round
    step: int = field(validator=fields.count)
    step_s: float = field(default=0.0, validator=fields.finite)  # of one trainer step; 0: not known
    # Leased positions whose samples are in the pseudo-gradient and were spent by no commit known
    # here.
    trained: tuple[LeaseRange, ...] = field(default=(), validator=fields.leases)
    # Digest of those that its trainer began with; empty: not known (yet).
    first_batches: bytes = field(default=b"", validator=max_len(32))


@frozen
class LeasesHeld(Message):
    """Peer, at the begin of a session: the leases that it has from an earlier one. Answer
    ``Leased``.
    """

    length: int = field(validator=fields.samples)  # of the data set
    ranges: tuple[LeaseRange, ...] = field(validator=fields.leases)


@frozen
class LeasesWanted(Message):
    """Peer: it wants leases on so many more samples. A later one replaces an earlier one."""

    length: int = field(validator=fields.samples)  # of the data set
    count: int = field(validator=and_(ge(1), le(LEASED_MAX)))


@frozen
class NotReady(Message):
    """Peer: it cannot contribute to this round, for this reason (not finite, trainer lost, ...)."""

    round: int = field(validator=fields.count)
    reason: str = field(validator=fields.text)


@frozen
class Reduced(Message):
    """Peer: it holds the result of an attempt. ``digest``: BLAKE3 of the result's wire bytes.

    ``manifest``: the contributors in each chunk; empty: all are in all chunks. The digest covers
    it.
    ``norm_sums``: three sums for each contributor, in the order of ``Reduce``, over its unclipped
    values in the chunks that this peer added up: the squares; over a sample of the values, the
    squares, and the products with the sum of all contributions times their clip factors. Then over
    the sample the squares of the result and of that sum, and the products of the result with the
    outer momentum. Little-endian float32. Then for each contributor a sketch of 64 signs, see
    ``norm_report``. Empty: this peer added up nothing.
    ``momentum_square``: the sum of squares of the outer momentum over that sample.
    """

    round: int = field(validator=fields.count)
    attempt: int = field(validator=fields.count)
    digest: bytes = field(validator=fields.digest)
    manifest: tuple[ContributorRun, ...] = field(default=(), validator=fields.manifest)
    norm_sums: bytes = field(
        default=b"", validator=max_len((NORM_SUMS_BYTES + SKETCH_BYTES) * (MEMBERS_MAX + 1))
    )
    momentum_square: float = field(default=0.0, validator=fields.finite)


@frozen
class Held(Message):
    """Peer, after ``Flush``: it accepts nothing more from the lost peers, and holds these results.

    ``results``: one bit for each chunk, the first one lowest.
    """

    round: int = field(validator=fields.count)
    attempt: int = field(validator=fields.count)
    results: bytes = field(validator=max_len(CHUNK_BITS_BYTES_MAX))


@frozen
class MadeDigest:
    """A digest of all results that one member made: BLAKE3 of the chunks' digests and contributor
    sets.
    """

    maker: str = field(validator=fields.peer)
    digest: bytes = field(validator=fields.digest)


@frozen
class Diagnosis(Message):
    """Peer, after ``Diagnose``: the peers that its part of an attempt waits for, and its results.

    ``contributions``: peers whose contributions to its own chunks it lacks. ``results``: owners
    whose results it lacks. ``made``: the complete results that it holds, by the member that made
    them.
    """

    round: int = field(validator=fields.count)
    attempt: int = field(validator=fields.count)
    contributions: tuple[str, ...] = field(default=(), validator=fields.peers)
    results: tuple[str, ...] = field(default=(), validator=fields.peers)
    made: tuple[MadeDigest, ...] = field(default=(), validator=max_len(MEMBERS_MAX))


@frozen
class ReduceFailed(Message):
    """Peer: an attempt cannot finish here. ``accused``: peers that vanished or sent invalid data.

    If they only vanished (not ``bad``), the sender keeps what it has and waits for a ``Repair``.
    """

    round: int = field(validator=fields.count)
    attempt: int = field(validator=fields.count)
    accused: tuple[str, ...] = field(validator=fields.peers)
    bad: bool  # the accused sent data that must not be added
    reason: str = field(validator=fields.text)


@frozen
class ChunkFinding:
    """A chunk that a checker did not find equal to its own sum.

    ``differs``: the sums differ, and ``peer`` is the contributor that, by the owner's digests, has
    sent the owner something else than the checker; empty if there is none, or more than one.
    Otherwise the checker could not add the chunk up: ``peer`` sent it nothing.
    """

    chunk: int = field(validator=fields.u32)
    differs: bool
    peer: str = field(default="", validator=fields.peer_or_none)


@frozen
class Audited(Message):
    """Peer, after ``AuditOrder``: its findings. All other chunks of the order are equal."""

    round: int = field(validator=fields.count)
    attempt: int = field(validator=fields.count)
    transfer: int = field(validator=fields.u32)
    findings: tuple[ChunkFinding, ...] = field(default=(), validator=max_len(AUDITS_MAX))


@frozen
class Applied(Message):
    """Peer: it applied a committed round's outer step; its shared state now has this root."""

    round: int = field(validator=fields.count)
    head: FragmentHead


@frozen
class Synced(Message):
    """Peer: a fragment fetched after ``SyncFragment`` is in place, buffered rounds included.

    ``bad_donors`` served blocks with wrong digests; other donors replaced these blocks.
    """

    head: FragmentHead
    received_bytes: int = field(validator=fields.count)
    bad_donors: tuple[str, ...] = field(default=(), validator=fields.peers)


@frozen
class SyncFailed(Message):
    """Peer: a fragment could not be fetched; ``bad_donors`` served blocks with wrong digests."""

    fragment: int = field(validator=fields.count)
    version: int = field(validator=fields.count)
    bad_donors: tuple[str, ...] = field(validator=fields.peers)
    reason: str = field(validator=fields.text)


@frozen
class Leaving(Message):
    """Peer: it wants to leave; it stays until ``Released``."""

    reason: str = field(validator=fields.text)


@frozen
class Renew(Message):
    """Peer: a request for its next certificate."""

    request_pem: bytes = field(validator=fields.blob)
