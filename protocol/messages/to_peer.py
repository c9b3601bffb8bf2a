"""What the master tells a peer."""

from __future__ import annotations

from attrs import field, frozen
from attrs.validators import and_, max_len

from . import fields
from .limits import (
    AUDITS_MAX,
    FRAGMENTS_MAX,
    MASTERS_MAX,
    MEMBERS_MAX,
    OWNER_RUNS_MAX,
    PACKED_BYTES_MAX,
)
from .parts import (
    Assignment,
    Contributor,
    ContributorRun,
    FragmentHead,
    LeaseRange,
    MemberInfo,
    Message,
    ModelLayout,
    Plan,
    RouteKind,
)


@frozen
class Welcome(Message):
    """Master: the answer to ``Hello``; the view that includes the peer follows."""

    version: int = field(validator=fields.count)
    number: int = field(validator=fields.count)
    # The run's spec as the operator wrote it.
    spec_toml: str = field(validator=and_(max_len(65_536), fields.toml_text))
    layout: ModelLayout | None  # None: the run has no weights yet
    lineage: bytes = field(validator=max_len(32))  # empty: the run has no weights yet
    heads: tuple[FragmentHead, ...] = field(validator=max_len(FRAGMENTS_MAX))  # committed versions
    step: int = field(validator=fields.count)  # the run's global step
    # Outcomes of the rounds that the peer reported as undecided.
    committed: tuple[Commit, ...] = field(validator=max_len(FRAGMENTS_MAX))
    term: int = field(validator=fields.count)  # grows with every start of the master
    # Drawn at every start: tells apart two masters that begin the same term.
    nonce: bytes = field(default=b"", validator=fields.nonce)
    # Addresses at which the run's master may be in future: this machine, or a standby machine.
    masters: tuple[str, ...] = field(default=(), validator=fields.each(fields.text, MASTERS_MAX))
    # Different from the branch before: rounds that were committed and are not applied yet are void.
    branch: int = field(default=0, validator=fields.count)
    # Rounds of the previous master whose reductions the peer runs or whose results it holds. They
    # may yet be committed: the peer continues them, and reports its results again.
    going_on: tuple[int, ...] = field(default=(), validator=max_len(FRAGMENTS_MAX))
    # The step at which the run's last round is due; 0: the run has no end.
    total_steps: int = field(default=0, validator=fields.count)


@frozen
class Masters(Message):
    """Master: where the run's master may be from now on, beside the addresses known so far."""

    masters: tuple[str, ...] = field(validator=fields.each(fields.text, MASTERS_MAX))


@frozen
class Resumed(Message):
    """Master: the answer to ``Resume``; the messages that the peer has not received follow."""

    received: int = field(validator=fields.count)  # by the master, in this session


@frozen
class View(Message):
    """Master: the run's members."""

    number: int = field(validator=fields.count)
    members: tuple[MemberInfo, ...] = field(validator=max_len(MEMBERS_MAX))
    # The run's global step, at which a new contributor begins.
    step: int = field(validator=fields.count)


@frozen
class Packed(Message):
    """Master: a ``View``, ``Reduce`` or ``Commit``; see ``protocol/packed_orders.py``."""

    data: bytes = field(validator=max_len(PACKED_BYTES_MAX))


@frozen
class SupplyWeights(Message):
    """Master: supply the run's initial weights from this peer's trainer."""


@frozen
class Open(Message):
    """Master: contribute to this round at the first step boundary at or after ``at_step``.

    The same round again with an earlier step means: the other peers wait; post what is trained by
    now.
    """

    round: int = field(validator=fields.count)
    fragment: int = field(validator=fields.count)
    version: int = field(validator=fields.count)  # of the fragment before the round
    at_step: int = field(validator=fields.count)


@frozen
class Reduce(Message):
    """Master: start this reduction. Contributors and receivers are in order of member number."""

    round: int = field(validator=fields.count)
    attempt: int = field(validator=fields.count)
    fragment: int = field(validator=fields.count)
    version: int = field(validator=fields.count)  # before the round
    view: int = field(validator=fields.count)
    contributors: tuple[Contributor, ...] = field(validator=max_len(MEMBERS_MAX))
    # All peers that get the result, contributors included.
    receivers: tuple[str, ...] = field(validator=fields.peers)
    plan: Plan


@frozen
class Commit(Message):
    """Master: the round is decided and journaled; apply it. Version becomes ``version + 1``."""

    round: int = field(validator=fields.count)
    attempt: int = field(validator=fields.count)
    fragment: int = field(validator=fields.count)
    version: int = field(validator=fields.count)  # before the round
    at_step: int = field(validator=fields.count)  # the run's global step is now at least this
    contributors: tuple[Contributor, ...] = field(validator=max_len(MEMBERS_MAX))
    digest: bytes = field(validator=fields.digest)
    # The contributors in each chunk; empty: all are in all chunks.
    manifest: tuple[ContributorRun, ...] = field(default=(), validator=fields.manifest)


@frozen
class Flush(Message):
    """Master: the round goes on without these peers. Accept nothing more from them, answer
    ``Held``.
    """

    round: int = field(validator=fields.count)
    attempt: int = field(validator=fields.count)  # of the ``Repair`` that is being prepared
    lost: tuple[str, ...] = field(validator=fields.peers)  # all of the present ``Reduce``


@frozen
class Repair(Message):
    """Master: the running reduction goes on without the lost peers, under this attempt's number."""

    round: int = field(validator=fields.count)
    attempt: int = field(validator=fields.count)
    lost: tuple[str, ...] = field(validator=fields.peers)
    assignments: tuple[Assignment, ...] = field(validator=max_len(OWNER_RUNS_MAX))


@frozen
class Diagnose(Message):
    """Master: this attempt stalls, or ends in different results. Answer ``Diagnosis``."""

    round: int = field(validator=fields.count)
    attempt: int = field(validator=fields.count)


@frozen
class CheckerChunks:
    """Chunks that one member checks."""

    checker: str = field(validator=fields.peer)
    chunks: tuple[int, ...] = field(validator=fields.each(fields.u32, AUDITS_MAX))


@frozen
class AuditOrder(Message):
    """Master, to the contributors of a result: send these checkers these chunks again.

    They come as BLOCK frames of this transfer. A checker adds its chunks up, and answers
    ``Audited``.
    """

    round: int = field(validator=fields.count)
    attempt: int = field(validator=fields.count)
    transfer: int = field(validator=fields.u32)
    checks: tuple[CheckerChunks, ...] = field(validator=max_len(MEMBERS_MAX))


@frozen
class Abort(Message):
    """Master: the round is void; drop its result and keep the local delta."""

    round: int = field(validator=fields.count)
    reason: str = field(validator=fields.text)


@frozen
class SyncFragment(Message):
    """Master: fetch this version of a fragment from these donors, which have pinned it.

    ``replaces_newer``: replace a held fragment even if its version is higher; that version belongs
    to an abandoned branch of the run's history.
    """

    head: FragmentHead
    donors: tuple[str, ...] = field(validator=fields.peers)
    replaces_newer: bool = False


@frozen
class Route(Message):
    """Master: use this route to the member from now on, instead of the route that follows from the
    view.

    ``number``: grows with each route of a pair. ``dials``: this end is the dialler; the other end
    gets the opposite.
    """

    peer: str = field(validator=fields.peer)
    number: int = field(validator=fields.count)
    kind: RouteKind
    dials: bool
    relay: str = field(default="", validator=fields.peer_or_none)  # the peer that forwards
    # The relay's addresses; of a punched route the one from which the other end dials.
    addresses: tuple[str, ...] = field(default=(), validator=fields.addresses)
    ticket: bytes = field(default=b"", validator=fields.ticket)  # shown to the relay
    local_port: int = field(default=0, validator=fields.port)  # the port to dial from


@frozen
class RelayPair(Message):
    """Master, to a relay: forward between streams that show this ticket, which these two peers
    have.
    """

    ticket: bytes = field(validator=fields.ticket)
    peers: tuple[str, ...] = field(validator=fields.peers)


@frozen
class StopRelayingPair(Message):
    """Master, to a relay: this ticket is void."""

    ticket: bytes = field(validator=fields.ticket)


@frozen
class Donate(Message):
    """Master: keep this version of the fragment readable for ``receiver`` until ``Release``."""

    head: FragmentHead
    receiver: str = field(validator=fields.peer)


@frozen
class Release(Message):
    """Master: the version of ``Donate`` need not stay readable for ``receiver`` any longer."""

    fragment: int = field(validator=fields.count)
    version: int = field(validator=fields.count)
    receiver: str = field(validator=fields.peer)


@frozen
class Leased(Message):
    """Master: leases on these positions.

    ``all``: these are all that the peer holds; every other lease of it is void.
    """

    ranges: tuple[LeaseRange, ...] = field(validator=fields.leases)
    all: bool = False
    # Samples of the run's data set; 0: not known yet.
    length: int = field(default=0, validator=fields.count)


@frozen
class Renewed(Message):
    """Master: the answer to ``Renew``."""

    certificate_pem: bytes = field(validator=fields.blob)


@frozen
class Notice(Message):
    """Master: a text for the peer's operator (its update was refused, ...)."""

    text: str = field(validator=fields.text)


@frozen
class NewSpec(Message):
    """Master: the run's spec from now on; it differs from the last one in the number of rounds."""

    spec_toml: str = field(validator=and_(max_len(65_536), fields.toml_text))
    total_steps: int = field(validator=fields.count)  # as in ``Welcome``


@frozen
class Released(Message):
    """Master: the answer to ``Leaving``; nothing of the run depends on the peer any more."""


@frozen
class Finish(Message):
    """Master: the run has committed all its rounds."""

    round: int = field(validator=fields.count)
