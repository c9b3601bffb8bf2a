"""Every message that crosses a control stream, as typed records; nothing else lives here.

A message is an attrs class. Its limits are its fields' validators, so a record that exists is a
record within limits, whoever made it. ``wire`` turns records into msgpack and back and refuses what
does not fit. Tensor bytes never travel in messages: they are chunks on lanes.

Units are last in names. Peers are named by their peer id, 32 hex digits (see ``identity``).
"""

from __future__ import annotations

import enum
import math
import re
from typing import Any

import attrs
from attrs import field, frozen
from attrs.validators import and_, ge, le, matches_re, max_len, min_len

from .text import TEXT_CHARS_MAX as TEXT_CHARS_MAX
from .text import printable

VERSION_MIN = 5  # the oldest protocol version we still speak; 5 has other names of messages than 4
VERSION_MAX = 5  # the newest one

MASTERS_MAX = 16  # addresses at which a run's master may be: as many as an invite has room for
NAME_CHARS_MAX = 64  # of a peer: tables, logs and the line about who wants in stay readable
WORD_CHARS_MAX = 64  # of a dtype, a codec, a phase, a metric: names that programs give
GAUGED_BYTES = 12  # of one contributor in ``Reduced``
MEMBERS_MAX = 1_024  # members of a view
ROUNDS_HELD_MAX = 256  # undecided or unapplied rounds; a joiner that falls further behind refetches
KEPT_STATES_MAX = 16  # checkpoints that a peer tells of: the newest
FRAGMENTS_MAX = 1_024  # fragments of a model
TENSORS_MAX = 65_536  # tensors of a model; Mixture-of-experts models reach some ten thousand
DIMENSIONS_MAX = 16
SITE_CHARS_MAX = 64  # of a site's name
LANES_OPEN_MAX = 64  # lanes of one link at once; far more than one path can use
OWNER_RUNS_MAX = 4_096  # runs of consecutive chunks with one owner, in a plan
SITES_MAX = 256  # of a plan
BLOCKS_MAX = 65_536  # block digests in one index: 64 GiB of state a fragment at 1 MiB a block
PROBE_BYTES_MAX = 16 * 2**20  # of junk: a third of a second of 300 Mbit/s
PROBE_S_MAX = 3.0  # a slow line need not carry all of it: it is known by then
CHECKED_ADDRESSES_MAX = 4  # at which the master dials back who asks whether it can be reached
JUNK_BYTES_MAX = 16_384  # in one message by which a newcomer's line is timed
METRICS_MAX = 32  # named figures a trainer reports beside its loss
CERTIFICATE_BYTES_MAX = 8_192
COUNT_MAX = 2**63 - 1
CHUNK_BITS_BYTES_MAX = 2**17  # a bit for each chunk of a fragment: a million chunks
AUDITS_MAX = 2**15  # chunks of one result that are audited; of more, so many are drawn
PROOF_BYTES_MAX = 2**28  # what proves a lie: a chunk of all who are in it; the master holds it once
PROOF_PIECE_BYTES_MAX = 2**16  # of it in one message: half a second of 1 Mbit/s between heartbeats


_count: Any = and_(ge(0), le(COUNT_MAX))
_u32: Any = and_(ge(0), le(2**32 - 1))  # what a frame's header has room for
_text: Any = and_(max_len(TEXT_CHARS_MAX), printable)
_name: Any = and_(max_len(NAME_CHARS_MAX), printable)
_word: Any = and_(max_len(WORD_CHARS_MAX), printable)
# What names a run also names folders and stands in certificates: no separators, no leading dot.
RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_NOT_TOML = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff]")
_run_id: Any = matches_re(RUN_ID)
_peer: Any = matches_re(r"[0-9a-f]{32}")
_peer_or_none: Any = matches_re(r"([0-9a-f]{32})?")
_digest: Any = and_(min_len(32), max_len(32))
NO_DIGEST = bytes(32)  # in ``Hello.undecided``: a reduction that is not over here
_port: Any = and_(ge(0), le(65_535))
_token: Any = and_(max_len(128), printable)
_ticket: Any = max_len(32)
_nonce: Any = max_len(128)  # of a term: random bytes that the run's authority has signed
_blob: Any = max_len(CERTIFICATE_BYTES_MAX)


def _finite(_instance: object, attribute: attrs.Attribute[Any], value: float) -> None:
    if not math.isfinite(value) or value < 0:
        raise ValueError(f"{attribute.name} must be finite and not negative, got {value}")


def _metrics(instance: object, attribute: Any, value: dict[str, float]) -> None:
    max_len(METRICS_MAX)(instance, attribute, value)  # type: ignore[arg-type]
    for name in value:
        _text(instance, attribute, name)


def _toml_text(_instance: object, attribute: Any, value: str) -> None:
    """Refuse what TOML itself does not allow. It is parsed, and never shown as it is."""
    if _NOT_TOML.search(value):
        raise ValueError(f"{attribute.name} has a control character")


def _each(validator: Any, count_max: int) -> Any:
    return attrs.validators.deep_iterable(
        member_validator=validator, iterable_validator=max_len(count_max)
    )


_peers = _each(_peer, MEMBERS_MAX)


class Message:
    """Base of everything that may cross a control stream."""

    __slots__ = ()


class Role(enum.Enum):
    CONTRIBUTOR = "contributor"
    SPARE = "spare"
    RELAY = "relay"


class FailureKind(enum.Enum):
    """What became of a trainer; the words are for people."""

    CRASH = "crash"
    HANG = "hang"  # no step within the deadline
    MEMORY = "out of memory"
    CUDA = "CUDA error"
    NAN = "loss not finite"


class Remedy(enum.Enum):
    """What the daemon does about a trainer's failure."""

    RELOAD = "reload"  # the process goes on, with the shared state
    RESTART = "restart"  # another process, after a pause
    NONE = "none"  # it failed too often: the peer is a spare without a trainer until somebody acts


class RouteKind(enum.Enum):
    """How the streams between two members are made."""

    DIRECT = "direct"  # one dials the other's addresses
    PUNCHED = "punched"  # both dial at once, through routers that keep ports
    RELAYED = "relayed"  # both dial a third, which forwards


class RefusalCode(enum.Enum):
    """Why somebody may not enter or stay; what the other side should do follows from it."""

    VERSION = "version"  # upgrade, then come back
    TOKEN = "token"  # ask for another invite
    RUN = "run"  # that is another run's master
    LAYOUT = "layout"  # the script's tensors are not the run's
    DUPLICATE = "duplicate"  # the same identity is connected already
    KICKED = "kicked"  # removed by the run's owner; do not come back
    QUARANTINED = "quarantined"  # convicted of a lie; do not come back before the owner clears it
    SILENT = "silent"  # no sign of life within the deadline; may come back
    PROTOCOL = "protocol"  # broke the protocol
    LAGGING = "lagging"  # did not keep up; may come back
    FULL = "full"  # no room for another member
    FINISHED = "finished"  # the run is over
    LEFT = "left"  # it asked to leave
    SUPERSEDED = "superseded"  # another master has taken the run over; dial its other addresses
    APPROVAL = "approval"  # the run's owner has to approve this key by hand; ask again
    RESUME = "resume"  # that session is over: say Hello
    BUSY = "busy"  # the master cannot take anybody in now (its disk is full); come back


# ---------------------------------------------------------------- shared records


@frozen
class TensorSpec:
    """One tensor of the model, as the trainer declares it; tied tensors appear once."""

    name: str = field(validator=_text)
    shape: tuple[int, ...] = field(validator=_each(_count, DIMENSIONS_MAX))
    dtype: str = field(validator=_word)  # torch's name without "torch.": "float32"
    kind: str = field(validator=matches_re("parameter|buffer|counter"))
    # parameter: outer momentum; buffer: floating, averaged plainly; counter: integer or bool, max
    aliases: tuple[str, ...] = field(  # its other names, if it is tied
        default=(), validator=_each(_text, TENSORS_MAX)
    )


@frozen
class ModelLayout:
    """All tensors that are shared, in the order of ``model.state_dict()``; equal at all peers."""

    tensors: tuple[TensorSpec, ...] = field(validator=max_len(TENSORS_MAX))


@frozen
class FragmentSize:
    """Elements of a fragment: float32 values (parameters first, then buffers), int64 counters."""

    value_count: int = field(validator=_count)
    momentum_count: int = field(
        validator=_count
    )  # of the values, the first that have an outer momentum
    counter_count: int = field(validator=_count)


@frozen
class FragmentHead:
    """Which version of a fragment somebody holds, and its digest (empty: not known)."""

    fragment: int = field(validator=_count)
    version: int = field(validator=_count)
    root: bytes = field(validator=max_len(32))


@frozen
class MemberInfo:
    """What every member must know of another one."""

    peer: str = field(validator=_peer)
    name: str = field(validator=_name)
    number: int = field(
        validator=_count
    )  # order of joining; also the order of addition in a reduction
    addresses: tuple[str, ...] = field(validator=_each(_text, 16))  # "host:port", best first
    role: Role
    in_sync: bool
    reachable: bool = True  # the master can dial it; False: it only dials, as from behind a router


@frozen
class Contributor:
    peer: str = field(validator=_peer)
    weight: int = field(validator=_count)  # tokens behind its pseudo-gradient
    scale: float = field(
        validator=_finite
    )  # clip factor applied by the owner before adding; 1.0 normally


@frozen
class LinkLoad:
    """What went to one member, and how long something was on its way there."""

    peer: str = field(validator=_peer)
    sent_bytes: int = field(validator=_count)
    sending_s: float = field(validator=_finite)


@frozen
class OwnerRun:
    """``chunk_count`` consecutive chunks that ``peer`` owns; runs follow each other from 0."""

    peer: str = field(validator=_peer)
    chunk_count: int = field(validator=_count)


@frozen
class ContributorRun:
    """``chunk_count`` consecutive chunks whose mean has the same contributors in it.

    ``contributors``: one bit for each contributor of the order, the first one lowest.
    """

    contributors: bytes = field(validator=max_len(MEMBERS_MAX // 8))
    chunk_count: int = field(validator=_count)


_manifest: Any = max_len(OWNER_RUNS_MAX)  # runs follow each other from chunk 0


@frozen
class Assignment:
    """Consecutive chunks of a lost owner, and who takes them over.

    ``anew`` False: ``owner`` holds their results and spreads them as they are, to those whose bit
    in ``lacking`` is set (in the order of the receivers). True: nobody holds them; what a listener
    may hold is void, contributors send these chunks again, ``owner`` adds up what comes.
    """

    first_chunk: int = field(validator=_count)
    chunk_count: int = field(validator=_count)
    owner: str = field(validator=_peer)
    anew: bool
    lacking: bytes = field(validator=max_len(MEMBERS_MAX // 8))


@frozen
class SiteLeaders:
    """Members behind one line, who gather and spread within their site.

    ``leaders``: which of them does so for which chunks, in runs as ``Plan.owners``. The owner of a
    chunk, if it is a member, leads it.
    """

    members: tuple[str, ...] = field(validator=_peers)  # at least two
    leaders: tuple[OwnerRun, ...] = field(validator=max_len(OWNER_RUNS_MAX))


@frozen
class Plan:
    """How a fragment is cut and who owns what. The last chunk may be short.

    Chunks ``0 .. ceil(value_count / chunk_elements) - 1`` hold values (weighted mean); one more
    chunk follows when the fragment has counters (elementwise maximum, int64, sent verbatim).
    """

    chunk_elements: int = field(validator=and_(ge(1), le(2**24)))
    owners: tuple[OwnerRun, ...] = field(validator=max_len(OWNER_RUNS_MAX))
    codec_up: str = field(validator=_word)  # contributor -> owner
    codec_down: str = field(validator=_word)  # owner -> receivers
    sites: tuple[SiteLeaders, ...] = field(default=(), validator=max_len(SITES_MAX))
    combine: str = field(default="mean", validator=_word)  # a rule, see collectives.combine
    # Contributions carry their contributors' seals, owners keep them; never together with sites.
    sealed: bool = False


# ---------------------------------------------------------------- enrolment (before a certificate)


@frozen
class EnrolHello(Message):
    """Newcomer: the first message on a stream without a client certificate."""

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
    certificate_pem: bytes = field(validator=_blob)


@frozen
class CheckRequest(Message):
    """Newcomer, instead of ``EnrolRequest``: what is wrong with me, seen from there?

    The token is looked at, not used up.
    """

    token: str = field(repr=False, validator=_token)
    addresses: tuple[str, ...] = field(validator=_each(_text, CHECKED_ADDRESSES_MAX))
    nonce: bytes = field(validator=_digest)  # what is said at them to whoever connects


@frozen
class CheckAnswer(Message):
    """Master: what it saw, and what a member of this run needs."""

    now_s: float = field(validator=_finite)  # Unix time, by the master's clock
    host: str = field(validator=_text)  # where the newcomer comes from
    faults: tuple[str, ...] = field(validator=_each(_text, CHECKED_ADDRESSES_MAX))  # "": reached
    member_count: int = field(validator=_count)
    lanes_max: int = field(validator=_count)  # of each link
    memory_bytes: int = field(validator=_count)  # for the state; 0: there is none yet
    checkpoint_bytes: int = field(validator=_count)  # one
    checkpoint_count: int = field(validator=_count)  # kept on disk
    software: str = field(default="", validator=_word)  # the master's


@frozen
class ProbeBytes(Message):
    """Either side, after a ``CheckAnswer``: bytes by which the line is timed."""

    data: bytes = field(validator=max_len(JUNK_BYTES_MAX))
    last: bool


@frozen
class ProbeBytesCounted(Message):
    """Master: what came, from the first of it to the last."""

    count_bytes: int = field(validator=_count)
    took_s: float = field(validator=_finite)


@frozen
class Refused(Message):
    """Either side, at any time: why this stream ends now."""

    code: RefusalCode
    reason: str = field(validator=_text)


# ---------------------------------------------------------------- peer -> master


@frozen
class KeptState:
    """A state of the run, all of it, in a checkpoint that the peer can read."""

    heads: tuple[FragmentHead, ...] = field(validator=max_len(FRAGMENTS_MAX))


@frozen
class RelayOffer:
    """What a peer would forward for others that cannot reach each other.

    ``only``: it takes no other part in the run, and holds no state.
    """

    bytes_per_s: float = field(validator=_finite)  # of all pairs, both ways
    pairs: int = field(validator=_count)
    quota_bytes: int = field(validator=_count)  # in its life; 0: without end
    only: bool


@frozen
class Hello(Message):
    """Peer: the first message on a control stream."""

    version_min: int = field(validator=_count)
    version_max: int = field(validator=_count)
    run_id: str = field(validator=_run_id)
    name: str = field(validator=_name)
    addresses: tuple[str, ...] = field(validator=_each(_text, 16))  # where others can dial us
    incarnation: int = field(
        validator=_count
    )  # random per daemon process: tells a reconnect from a restart
    layout: ModelLayout | None  # of the trainer, once it is known
    heads: tuple[FragmentHead, ...] = field(
        validator=max_len(FRAGMENTS_MAX)
    )  # committed state that we hold
    lineage: bytes = field(validator=max_len(32))  # of that state; empty: we hold none
    # A result that was reported but whose outcome we did not hear, by round:
    undecided: tuple[Reduced, ...] = field(validator=max_len(FRAGMENTS_MAX))
    # What its person allows it to send to other peers; 0: no cap.
    upload_bytes_per_s: float = field(default=0.0, validator=_finite)
    download_bytes_per_s: float = field(default=0.0, validator=_finite)  # likewise to receive
    # Members that name the same one share a line; empty: those who come from one address do.
    site: str = field(default="", validator=and_(max_len(SITE_CHARS_MAX), printable))
    # The newest master that we have obeyed; older ones learn from it that their time is over.
    term: int = field(default=0, validator=_count)
    nonce: bytes = field(default=b"", validator=_nonce)
    # Of the same lineage, older than what we hold: the run may have to go back to one of them.
    kept: tuple[KeptState, ...] = field(default=(), validator=max_len(KEPT_STATES_MAX))
    software: str = field(default="", validator=_word)  # of its daemon
    relay: RelayOffer | None = None
    # Of this stream at the peer: if the master sees the same, what is between them keeps ports.
    local_port: int = field(default=0, validator=_port)


@frozen
class Heartbeat(Message):
    """Both ways: a sign of life, several per deadline.

    ``received``: of a session with the master: messages that came in it, heartbeats apart.
    """

    sequence: int = field(validator=_count)
    received: int = field(default=0, validator=_count)


@frozen
class Resume(Message):
    """Peer, instead of ``Hello``: its connection broke; go on where ``received`` messages had come."""

    run_id: str = field(validator=_run_id)
    incarnation: int = field(validator=_count)
    term: int = field(validator=_count)  # of the master that the session is with
    nonce: bytes = field(validator=_nonce)
    received: int = field(validator=_count)
    addresses: tuple[str, ...] = field(validator=_each(_text, 16))  # as in ``Hello``
    local_port: int = field(default=0, validator=_port)


@frozen
class LinkBroken(Message):
    """Peer: its link to a member broke, though nobody wanted that."""

    peer: str = field(validator=_peer)


@frozen
class CopyProgress:
    """How far the copy of one fragment is; blocks that were here before count as done."""

    fragment: int = field(validator=_count)
    version: int = field(validator=_count)
    done_blocks: int = field(validator=_count)
    all_blocks: int = field(validator=_count)
    done_bytes: int = field(validator=_count)
    all_bytes: int = field(validator=_count)
    bytes_per_s: float = field(validator=_finite)  # of late; 0.0: not known yet
    donors: tuple[str, ...] = field(validator=_peers)  # that give at the moment
    rounds_kept: int = field(validator=_count)  # committed rounds that wait to be replayed on it


@frozen
class Progress(Message):
    """Peer: what its trainer does, about once a second while it changes."""

    step: int = field(validator=_count)  # the run's global step at this trainer
    tokens: int = field(validator=_count)  # since the daemon started
    tokens_per_s: float = field(validator=_finite)
    loss: float | None
    phase: str = field(validator=_word)  # "training", "waiting for commit", ...
    bulk_sent_bytes: int = field(validator=_count)
    bulk_received_bytes: int = field(validator=_count)
    state_received_bytes: int = field(validator=_count)  # blocks of state, before compression
    metrics: dict[str, float] = field(validator=_metrics)
    # Of contributors' trainers, since the daemon started: in the hook, waiting, and outside of it.
    waited_s: float = field(default=0.0, validator=_finite)
    stepped_s: float = field(default=0.0, validator=_finite)
    copies: tuple[CopyProgress, ...] = field(default=(), validator=max_len(FRAGMENTS_MAX))
    state_saved_bytes: int = field(default=0, validator=_count)  # of these, never on the line


@frozen
class Measured(Message):
    """Peer, after a reduction: what its lines carried during it, and how long they were busy.

    Time in which several links send counts once in ``sending_s``, so bytes by seconds is what the
    peer's own line did; likewise for receiving.
    """

    sent_bytes: int = field(validator=_count)
    sending_s: float = field(validator=_finite)
    received_bytes: int = field(validator=_count)
    receiving_s: float = field(validator=_finite)
    links: tuple[LinkLoad, ...] = field(validator=max_len(MEMBERS_MAX))  # that sent anything


@frozen
class Probed(Message):
    """Peer, after ``Probe``: what came of ``sender``'s junk while it came fast, and in what time.

    Nothing in no time: the probe failed, or was stopped for a round.
    """

    number: int = field(validator=_count)
    sender: str = field(validator=_peer)
    carried_bytes: int = field(validator=_count)
    seconds: float = field(validator=_finite)


@frozen
class RouteWanted(Message):
    """Peer: it has no link to this member and gets none by the route that it knows.

    ``route``: that route's number; 0: the one that follows from the view. ``worked``: there was a link
    over it, and it is lost.
    """

    peer: str = field(validator=_peer)
    route: int = field(validator=_count)
    worked: bool
    reason: str = field(validator=_text)


@frozen
class RouteWorks(Message):
    """Peer: there is a link to this member, over a route that was arranged or was in doubt."""

    peer: str = field(validator=_peer)
    route: int = field(validator=_count)


@frozen
class Relayed(Message):
    """Relay: what it forwards, now and then while that changes."""

    pairs: int = field(validator=_count)  # whose ticket it has
    streams: int = field(validator=_count)  # that are forwarded at the moment
    carried_bytes: int = field(validator=_count)  # in its life, both ways
    spent: bool  # its quota is; it forwards no more


@frozen
class TrainerAttached(Message):
    """Peer: the trainer is there and declared this layout."""

    layout: ModelLayout


@frozen
class TrainerLost(Message):
    """Peer: no trainer at the moment; the supervisor may bring it back."""

    reason: str = field(validator=_text)


@frozen
class TrainerFailed(Message):
    """Peer: why its trainer failed, and what is done about it; said again in a new session.

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
    norm: float = field(validator=_finite)  # L2, of the float32 values
    state_root: bytes = field(validator=_digest)  # of the fragment before the round
    step: int = field(validator=_count)
    step_s: float = field(default=0.0, validator=_finite)  # of its trainer; 0: not known


@frozen
class NotReady(Message):
    """Peer: it cannot contribute to this round and says why (not finite, trainer lost, ...)."""

    round: int = field(validator=_count)
    reason: str = field(validator=_text)


@frozen
class Reduced(Message):
    """Peer: it holds the result of an attempt. ``digest``: BLAKE3 of the result's wire bytes.

    ``manifest``: which contributors are in which chunks; empty: all are in all. The digest covers it.
    ``norm_sums``: three sums for each contributor, in the order's order, over its values in the chunks that
    the speaker added up, as they came: of their squares; and over some of them, of their squares and of
    their products with the outer momentum. Little-endian float32; empty: it added up nothing.
    ``momentum_square``: of those of the outer momentum's values that were compared.
    """

    round: int = field(validator=_count)
    attempt: int = field(validator=_count)
    digest: bytes = field(validator=_digest)
    manifest: tuple[ContributorRun, ...] = field(default=(), validator=_manifest)
    norm_sums: bytes = field(default=b"", validator=max_len(GAUGED_BYTES * MEMBERS_MAX))
    momentum_square: float = field(default=0.0, validator=_finite)


@frozen
class Held(Message):
    """Peer, after ``Flush``: it accepts nothing more of the lost, and has these chunks' results.

    ``results``: one bit for each chunk, the first one lowest.
    """

    round: int = field(validator=_count)
    attempt: int = field(validator=_count)
    results: bytes = field(validator=max_len(CHUNK_BITS_BYTES_MAX))


@frozen
class MadeDigest(Message):
    """What a peer holds of all chunks that one member has added up: BLAKE3 of their digests and sets."""

    maker: str = field(validator=_peer)
    digest: bytes = field(validator=_digest)


@frozen
class Diagnosis(Message):
    """Peer, after ``Diagnose``: what its part of an attempt waits for, and what it holds.

    ``contributions``: whose contributions to chunks of its own it lacks. ``results``: owners whose results
    it lacks. ``made``: what it holds whole, by who has made it.
    """

    round: int = field(validator=_count)
    attempt: int = field(validator=_count)
    contributions: tuple[str, ...] = field(default=(), validator=_peers)
    results: tuple[str, ...] = field(default=(), validator=_peers)
    made: tuple[MadeDigest, ...] = field(default=(), validator=max_len(MEMBERS_MAX))


@frozen
class ReduceFailed(Message):
    """Peer: an attempt cannot finish here. ``accused``: who vanished or sent nonsense.

    Who only lost somebody (an accused, not ``bad``) keeps what it has and waits for a ``Repair``.
    """

    round: int = field(validator=_count)
    attempt: int = field(validator=_count)
    accused: tuple[str, ...] = field(validator=_peers)
    bad: bool  # True: the accused sent something that must not be added
    reason: str = field(validator=_text)


@frozen
class Audited(Message):
    """Peer, after ``AuditOrder``: what is not as it should be. Chunks that are not named are.

    ``wrong``: the owner signed what it added, and that does not make its result; provable.
    ``unseen``: the owner did not show what it added, or did not sign it.
    """

    round: int = field(validator=_count)
    attempt: int = field(validator=_count)
    wrong: tuple[int, ...] = field(validator=_each(_u32, AUDITS_MAX))
    unseen: tuple[int, ...] = field(validator=_each(_u32, AUDITS_MAX))
    reason: str = field(default="", validator=_text)


@frozen
class ProofPiece(Message):
    """Peer, after ``ProofWanted``: of what proves its accusation, from that offset on."""

    round: int = field(validator=_count)
    attempt: int = field(validator=_count)
    chunk: int = field(validator=_u32)
    offset: int = field(validator=_count)
    all_bytes: int = field(validator=_count)
    data: bytes = field(validator=max_len(PROOF_PIECE_BYTES_MAX))


@frozen
class Applied(Message):
    """Peer: the outer step of a committed round is in its shared state, which now has this root."""

    round: int = field(validator=_count)
    head: FragmentHead


@frozen
class Synced(Message):
    """Peer: a fragment fetched after ``SyncFragment`` is in place, buffered rounds included.

    ``bad_donors`` served blocks with wrong digests; others have made up for them.
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
class Verified(Message):
    """Peer, after ``Verify``: the roots of the bytes in its memory. Nothing of what is not whole."""

    number: int = field(validator=_count)
    heads: tuple[FragmentHead, ...] = field(validator=max_len(FRAGMENTS_MAX))


@frozen
class CheckpointTold(Message):
    """Peer, after ``WriteCheckpoint``: whether it will, and later once more, what came of it."""

    number: int = field(validator=_count)
    writes: bool  # it will; False: it will not, or has
    name: str = field(default="", validator=_text)  # of the one that is there now
    reason: str = field(default="", validator=_text)  # why there is none


@frozen
class BlocksVerified(Message):
    """Peer, after ``VerifyBlocks``: 32 bytes per block; none if it is not at that version."""

    number: int = field(validator=_count)
    fragment: int = field(validator=_count)
    version: int = field(validator=_count)
    digests: bytes = field(validator=max_len(32 * BLOCKS_MAX))


@frozen
class Leaving(Message):
    """Peer: it wants to go; it stays until ``Released``."""

    reason: str = field(validator=_text)


@frozen
class Renew(Message):
    request_pem: bytes = field(validator=_blob)


# ---------------------------------------------------------------- master -> peer


@frozen
class Welcome(Message):
    """Master: the answer to ``Hello``; the view that includes the peer follows."""

    version: int = field(validator=_count)
    number: int = field(validator=_count)
    spec_toml: str = field(
        validator=and_(max_len(65_536), _toml_text)
    )  # the run's spec as the owner wrote it
    layout: ModelLayout | None  # None: the run has no weights yet
    lineage: bytes = field(validator=max_len(32))  # empty: the run has no weights yet
    heads: tuple[FragmentHead, ...] = field(validator=max_len(FRAGMENTS_MAX))  # committed versions
    step: int = field(validator=_count)  # the run's global step
    # Outcomes of the rounds that the peer reported as undecided:
    committed: tuple[Commit, ...] = field(validator=max_len(FRAGMENTS_MAX))
    term: int = field(validator=_count)  # grows with every start of the master
    # Drawn at every start: two masters that begin the same term are told apart by it.
    nonce: bytes = field(default=b"", validator=_nonce)
    # Where the run's master may be in future: here, or on a standby machine.
    masters: tuple[str, ...] = field(default=(), validator=_each(_text, MASTERS_MAX))
    # Another one than before: what was committed and is not applied yet is void.
    branch: int = field(default=0, validator=_count)
    # Rounds whose reductions, ordered by the master before this one, the peer has under way or holds
    # the results of. They may yet be committed: it goes on, and reports what it has reported.
    going_on: tuple[int, ...] = field(default=(), validator=max_len(FRAGMENTS_MAX))


@frozen
class Resumed(Message):
    """Master: the answer to ``Resume``; what the peer has not got follows."""

    received: int = field(validator=_count)  # by the master, in this session


@frozen
class View(Message):
    number: int = field(validator=_count)
    members: tuple[MemberInfo, ...] = field(validator=max_len(MEMBERS_MAX))
    step: int = field(validator=_count)  # the run's global step, where a new contributor begins


@frozen
class ViewChange(Message):
    """Master: the next view, as its difference to the one told last on this connection."""

    number: int = field(validator=_count)
    base: int = field(validator=_count)  # the number of the view that it changes
    changed: tuple[MemberInfo, ...] = field(validator=max_len(MEMBERS_MAX))  # or new
    gone: tuple[int, ...] = field(validator=_each(_count, MEMBERS_MAX))  # by member number
    step: int = field(validator=_count)


@frozen
class SupplyWeights(Message):
    """Master: this peer's trainer gives the run its first weights."""


@frozen
class Open(Message):
    """Master: contribute to this round at the first step boundary at or after ``at_step``.

    The same round again with an earlier step: the others wait, post what is trained by now.
    """

    round: int = field(validator=_count)
    fragment: int = field(validator=_count)
    version: int = field(validator=_count)  # of the fragment before the round
    at_step: int = field(validator=_count)


@frozen
class Reduce(Message):
    """Master: reduce now. Contributors and receivers are in order of member number."""

    round: int = field(validator=_count)
    attempt: int = field(validator=_count)
    fragment: int = field(validator=_count)
    version: int = field(validator=_count)  # before the round
    view: int = field(validator=_count)
    contributors: tuple[Contributor, ...] = field(validator=max_len(MEMBERS_MAX))
    receivers: tuple[str, ...] = field(
        validator=_peers
    )  # everyone who gets the result, contributors too
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
    # Which of them are in which chunks; empty: all are in all.
    manifest: tuple[ContributorRun, ...] = field(default=(), validator=_manifest)


@frozen
class Flush(Message):
    """Master: these are lost to the round. Accept nothing more of them, then say what you hold."""

    round: int = field(validator=_count)
    attempt: int = field(validator=_count)  # of the ``Repair`` that is being prepared
    lost: tuple[str, ...] = field(validator=_peers)  # of the present order, earlier ones too


@frozen
class Repair(Message):
    """Master: the running reduction goes on without the lost, under this attempt's number."""

    round: int = field(validator=_count)
    attempt: int = field(validator=_count)
    lost: tuple[str, ...] = field(validator=_peers)
    assignments: tuple[Assignment, ...] = field(validator=max_len(OWNER_RUNS_MAX))


@frozen
class Diagnose(Message):
    """Master: this attempt does not get on, or ends in different results. Say what it is with you."""

    round: int = field(validator=_count)
    attempt: int = field(validator=_count)


@frozen
class AuditOrder(Message):
    """Master, to who holds the result: have the owners of these chunks show what they added."""

    round: int = field(validator=_count)
    attempt: int = field(validator=_count)
    chunks: tuple[int, ...] = field(validator=_each(_u32, AUDITS_MAX))


@frozen
class ProofWanted(Message):
    """Master, to who calls a chunk wrong: prove it; the next piece from this offset on."""

    round: int = field(validator=_count)
    attempt: int = field(validator=_count)
    chunk: int = field(validator=_u32)
    offset: int = field(validator=_count)


@frozen
class Abort(Message):
    """Master: the round is void; drop its result. Local deltas stay local."""

    round: int = field(validator=_count)
    reason: str = field(validator=_text)


@frozen
class SyncFragment(Message):
    """Master: fetch this version of a fragment from these donors, which have pinned it.

    ``replaces_newer``: what you hold may have a higher version. It is of no branch of the run's
    history any more and gives way.
    """

    head: FragmentHead
    donors: tuple[str, ...] = field(validator=_peers)
    replaces_newer: bool = False


@frozen
class Probe(Message):
    """Master: ask ``sender`` for junk, at most so much and so long, and say how fast it comes."""

    number: int = field(validator=_count)
    sender: str = field(validator=_peer)
    bytes: int = field(validator=and_(ge(1), le(PROBE_BYTES_MAX)))
    seconds: float = field(validator=and_(_finite, le(PROBE_S_MAX)))


@frozen
class Route(Message):
    """Master: how to get to this member from now on, instead of what follows from the view.

    ``number``: grows with each that is arranged for a pair. ``dials``: this end keeps the dialler's
    part; the other end is told the opposite.
    """

    peer: str = field(validator=_peer)
    number: int = field(validator=_count)
    kind: RouteKind
    dials: bool
    relay: str = field(default="", validator=_peer_or_none)  # who forwards
    # Of the relay; of a punched route one, where the other end dials from.
    addresses: tuple[str, ...] = field(default=(), validator=_each(_text, 16))
    ticket: bytes = field(default=b"", validator=_ticket)  # to show at the relay
    local_port: int = field(default=0, validator=_port)  # from which to punch


@frozen
class RelayPair(Message):
    """Master, to a relay: forward between those that show this ticket, which these two have."""

    ticket: bytes = field(validator=_ticket)
    peers: tuple[str, ...] = field(validator=_peers)


@frozen
class StopRelayingPair(Message):
    """Master, to a relay: that ticket is void."""

    ticket: bytes = field(validator=_ticket)


@frozen
class Donate(Message):
    """Master: keep this version of the fragment readable for ``receiver`` until ``Release``."""

    head: FragmentHead
    receiver: str = field(validator=_peer)


@frozen
class Release(Message):
    fragment: int = field(validator=_count)
    version: int = field(validator=_count)
    receiver: str = field(validator=_peer)


@frozen
class Verify(Message):
    """Master, for its owner: digest all of your state as it is in memory now, and say its roots."""

    number: int = field(validator=_count)


@frozen
class VerifyBlocks(Message):
    """Master: the same by block, for a fragment whose root was not everybody's."""

    number: int = field(validator=_count)
    fragment: int = field(validator=_count)
    version: int = field(validator=_count)


@frozen
class WriteCheckpoint(Message):
    """Master, for its owner: write what the run is now, whatever was due when."""

    number: int = field(validator=_count)


@frozen
class Renewed(Message):
    certificate_pem: bytes = field(validator=_blob)


@frozen
class Notice(Message):
    """Master: something the peer's person should read (its update was refused, ...)."""

    text: str = field(validator=_text)


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
    """Both sides, once: which term of the run this master serves. The lower one gives way."""

    run_id: str = field(validator=_run_id)
    term: int = field(validator=_count)
    nonce: bytes = field(validator=_nonce)


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
    """The accepting side: the lanes may be dialled now."""


@frozen
class LaneReceived:
    """What came on one lane since it was opened.

    Attributes:
      frames: that are whole and were handed on; what follows may be sent again on another lane.
      bytes: that came at all: a sign of life from a lane in the middle of a long frame.
      closed: no more will be read from it; the last word on this lane.
    """

    lane: int = field(validator=_u32)
    frames: int = field(validator=_count)
    bytes: int = field(validator=_count)
    closed: bool = False


@frozen
class LanesReceived(Message):
    """Both sides, some moments after something came: what is known to have arrived."""

    lanes: tuple[LaneReceived, ...] = field(validator=max_len(2 * LANES_OPEN_MAX))


@frozen
class LanesWanted(Message):
    """The accepting side, which cannot dial: how many lanes would speed up what it sends."""

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
    transfer: int = field(
        validator=_count
    )  # the joiner's number for this transfer; comes back in the frames
    blocks: tuple[int, ...] = field(validator=_each(_count, BLOCKS_MAX))


@frozen
class BlocksRefused(Message):
    fragment: int = field(validator=_count)
    version: int = field(validator=_count)
    transfer: int = field(validator=_count)
    reason: str = field(validator=_text)


@frozen
class ProbeRequest(Message):
    """Receiver to sender: send junk over the lanes, as BLOCK frames of this transfer."""

    transfer: int = field(validator=_u32)
    bytes: int = field(validator=and_(ge(1), le(PROBE_BYTES_MAX)))
    seconds: float = field(validator=and_(_finite, le(PROBE_S_MAX)))


@frozen
class EvidenceRequest(Message):
    """Auditor to a chunk's owner: send what you added, as BLOCK frames of this transfer."""

    transfer: int = field(validator=_u32)
    round: int = field(validator=_count)
    chunk: int = field(validator=_u32)


@frozen
class EvidenceRefused(Message):
    """Owner: it has nothing of that chunk, or shows much already."""

    transfer: int = field(validator=_u32)
    reason: str = field(validator=_text)


# ---------------------------------------------------------------- daemon <-> trainer (Unix socket)


@frozen
class TrainerHello(Message):
    """Trainer: first message."""

    version: int = field(validator=_count)
    pid: int = field(validator=_count)
    layout: ModelLayout


@frozen
class ArenaOpened(Message):
    """Daemon: two file descriptors come with this message, the shared and the posted arena.

    ``fragments``: for each fragment the indices of its tensors in the layout, in order.
    """

    fragments: tuple[tuple[int, ...], ...] = field(validator=max_len(FRAGMENTS_MAX))
    sizes: tuple[FragmentSize, ...] = field(validator=max_len(FRAGMENTS_MAX))
    overlap_steps: int = field(validator=_count)
    merge: str = field(validator=_word)
    # So many losses in a row that are not finite are ``Failing``; 0: never.
    nan_steps: int = field(default=0, validator=_count)
    # While a round runs, train on from what the outer step makes of our own update alone.
    preview: bool = False
    outer_lr: float = field(default=0.0, validator=_finite)  # of that step, as the two that follow
    outer_momentum: float = field(default=0.0, validator=_finite)
    nesterov: bool = False
    # Where ``KeepState`` writes; empty: nowhere.
    local_checkpoint: str = field(default="", validator=_text)


@frozen
class KeepState(Message):
    """Daemon: write down what is only yours (the optimizer's state, random numbers)."""


@frozen
class PostInitial(Message):
    """Daemon: write the model's present tensors into the posted arena (the run is founded)."""


@frozen
class InitialPosted(Message):
    pass


@frozen
class Load(Message):
    """Daemon: replace the model's tensors by the shared state, drop local deltas."""

    step: int = field(validator=_count)  # the run's global step from now on
    step_limit: int = field(validator=_count)  # do not go beyond it before the next ``RoundOpened``
    finished: bool


@frozen
class SetContributing(Message):
    """Daemon: False keeps the trainer waiting at its step boundary (a spare)."""

    contributing: bool
    why: str = field(validator=_text)


@frozen
class ExtendStepLimit(Message):
    """Daemon: the master is away. Train on past whatever you wait for, as far as ``step_limit``.

    Over with the next ``RoundOpened``, ``Load`` or committed round.
    """

    step_limit: int = field(validator=_count)


@frozen
class RoundOpened(Message):
    round: int = field(validator=_count)
    fragment: int = field(validator=_count)
    version: int = field(validator=_count)
    at_step: int = field(validator=_count)
    step_limit: int = field(validator=_count)


@frozen
class Posted(Message):
    """Trainer: the pseudo-gradient of the fragment is in the posted arena."""

    round: int = field(validator=_count)
    fragment: int = field(validator=_count)
    version: int = field(validator=_count)  # the version its local weights are based on
    tokens: int = field(validator=_count)
    step: int = field(validator=_count)
    step_s: float = field(default=0.0, validator=_finite)  # a step's, of late, without any waiting


@frozen
class RoundEnded(Message):
    """Daemon: what became of a round; on commit the shared arena holds ``version``."""

    round: int = field(validator=_count)
    fragment: int = field(validator=_count)
    committed: bool
    contributed: bool
    version: int = field(validator=_count)
    step: int = field(validator=_count)
    step_limit: int = field(validator=_count)
    share: float = field(default=0.0, validator=_finite)  # of all weights that ours was, up to 1


@frozen
class Metrics(Message):
    """Trainer: named figures for the dashboard."""

    step: int = field(validator=_count)
    values: dict[str, float] = field(validator=_metrics)


@frozen
class Failing(Message):
    """Trainer: what is wrong with it. After ``NAN`` it waits for a ``Load``, else it ends."""

    kind: FailureKind
    reason: str = field(validator=_text)


@frozen
class Finished(Message):
    """Daemon: the run is over; ``run.finished`` becomes true at the next step boundary."""


@frozen
class Rejected(Message):
    """Daemon: this trainer cannot take part, and why; it raises that text."""

    reason: str = field(validator=_text)


attrs.resolve_types(Hello)
attrs.resolve_types(Welcome)
