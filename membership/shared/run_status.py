"""The status of a run as frozen records: what the HTTP API answers, and what commands and metrics
read.

``msgspec`` writes them as JSON, reads them back, and makes the schemas of
``daemon/web/api_description`` of them: the docstrings and ``Meta`` descriptions stand there. Times
with ``_s`` are the master's clock or durations in seconds, times with ``_at`` are Unix seconds. A
figure that is not known is None.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from attrs import frozen
from msgspec import Meta

PeerId = Annotated[
    str, Meta(pattern="^[0-9a-f]{32}$", description="A peer's id: the fingerprint of its key.")
]
Digest = Annotated[
    str,
    Meta(
        pattern="^([0-9a-f]{64})?$",
        description="A digest; empty while no majority has confirmed it.",
    ),
]
RoleName = Literal["contributor", "spare", "relay"]


def about(text: str) -> Any:
    """Return the description of a field, for ``Annotated``."""
    return Meta(description=text)


@frozen(kw_only=True)
class Headline:
    """The run in a few figures; null where a figure is not known yet."""

    loss: Annotated[
        float | None, about("Mean over the contributors, weighted by tokens per second.")
    ]
    loss_min: float | None
    loss_max: float | None
    tokens: Annotated[int, about("Tokens that went into committed rounds.")]
    tokens_per_s: float
    utilisation: Annotated[
        float | None,
        about("Share of the contributors' time in the last rounds that went into steps."),
    ]
    step: Annotated[int, about("Where the contributors' trainers are: the middle of their steps.")]
    rounds: Annotated[int, about("Committed; aborted ones are not counted.")]
    rounds_wanted: int | None
    eta_s: Annotated[
        float | None, about("Seconds until the last round; null also while the run waits.")
    ]
    sent_bytes: Annotated[int, about("Bytes that all peers have sent to each other.")]
    saved_bytes: Annotated[
        int,
        about(
            "Bytes that a ring all-reduce of bfloat16 gradients at every step would have sent, 2 (n"
            " - 1) times 2 bytes a value, minus the bytes that were sent."
        ),
    ]
    epoch: Annotated[
        int | None,
        about("The first epoch of leased data that is not complete; null: no data is leased."),
    ] = None
    epoch_share: Annotated[float | None, about("Share of it that is in committed rounds.")] = None
    outer_cosine: Annotated[
        float | None,
        about("Cosine between a round's mean gradient and the outer momentum; median of the last."),
    ] = None
    outer_gain: Annotated[
        float | None,
        about("How far an outer step goes along its gradient, in outer rates; median likewise."),
    ] = None
    outer_text: Annotated[str, about("A sentence about the two; empty while unknown.")] = ""


@frozen(kw_only=True)
class MemberCounts:
    """Numbers of members: attached, able to contribute, and in the last committed round."""

    live: int
    participating: int
    contributed: int


@frozen(kw_only=True)
class PlaceCounts:
    """Places for contributors."""

    limit: Annotated[int, about("0: no limit.")]
    taken: int
    vacant: int


@frozen(kw_only=True)
class HeadRow:
    """A version of a fragment."""

    fragment: int
    version: int
    root: Digest


@frozen(kw_only=True)
class HeldHeadRow(HeadRow):
    """A member's copy of a fragment."""

    state: Literal["stale", "fetching", "unchecked", "held"]


@frozen(kw_only=True)
class UnequalCopyRow:
    """A member whose copy is not known to be equal to the others'."""

    peer: PeerId
    name: str
    why: str


@frozen(kw_only=True)
class CopyAgreement:
    """What the digests that all rounds compare say about the members' copies of the state."""

    text: Annotated[str, about("One sentence; empty while no member holds or copies the state.")]
    all: Annotated[int, about("Members that hold the state or copy it.")]
    equal: Annotated[int, about("Of them, those that reported the run's digest of each fragment.")]
    versions: Annotated[
        tuple[int, ...], about("Of each fragment: the version at which these copies are equal.")
    ]
    compared_s: Annotated[
        float | None,
        about("Seconds since the last of these digests came; null: no copies are equal."),
    ]
    unequal: tuple[UnequalCopyRow, ...]


@frozen(kw_only=True)
class DoneOfAll:
    """A part that is done, and the whole."""

    done: int
    all: int


@frozen(kw_only=True)
class CopyRow:
    """Progress of a fragment's copy."""

    fragment: int
    version: int
    blocks: DoneOfAll
    bytes: DoneOfAll
    bytes_per_s: float
    left_s: float | None
    donors: tuple[str, ...]
    rounds_kept: Annotated[int, about("Rounds that are replayed once the copy is complete.")]
    text: str


@frozen(kw_only=True)
class MemberBytes:
    """Bytes that a member has moved since its daemon started."""

    bulk_sent: int
    bulk_received: int
    state_received: int


@frozen(kw_only=True)
class MeasuredBandwidth:
    """A member's line as measured; null: not measured yet, or no cap."""

    up_bytes_per_s: float | None
    down_bytes_per_s: float | None
    upload_cap_bytes_per_s: float | None
    download_cap_bytes_per_s: float | None
    links: Annotated[
        dict[str, float], about("By peer id: what the link to that peer carried, bytes per second.")
    ]


@frozen(kw_only=True)
class RelayRow:
    """A relay's limits, and what it forwards now."""

    bytes_per_s: float
    quota_bytes: int | None
    pairs: int
    streams: int
    carried_bytes: int
    spent: Annotated[bool, about("Its quota is used up.")]


@frozen(kw_only=True)
class DepartedRow:
    """A member that has left."""

    peer: PeerId
    name: str
    number: Annotated[
        int, about("Member number; another process of the same peer has another number.")
    ]
    addresses: tuple[str, ...]
    host: Annotated[str, about("The address from which it connects to the master.")]
    reach: Annotated[
        Literal["reachable", "outbound"],
        about("outbound: no other member can dial it; it dials the others."),
    ]
    relay: RelayRow | None
    software: Annotated[str, about("Its version of holdfast; empty: not told.")]
    role: RoleName
    granted: Annotated[RoleName, about("The role that its invite allows.")]
    in_sync: bool
    trainer: bool
    trainer_state: str
    draining: Annotated[bool, about("It leaves as soon as no other member needs it.")]
    phase: str
    step: int
    tokens: Annotated[int, about("Since its daemon started.")]
    tokens_per_s: float
    loss: float | None
    accelerators: Annotated[str, about('"7 of 8 GPUs" are healthy; empty: not told.')]
    waited_s: Annotated[float, about("Seconds that its trainer has spent in the hook.")]
    stepped_s: Annotated[float, about("Seconds that its trainer has spent in steps.")]
    metrics: Annotated[
        dict[str, float],
        about("Figures of run.log; agreement, effort and likeness: found by chunk owners."),
    ]
    bytes: MemberBytes
    copies: tuple[CopyRow, ...]
    bandwidth: MeasuredBandwidth
    bad_blocks: Annotated[int, about("Transfers to other members in which it served wrong blocks.")]
    suspicion: Annotated[
        str, about("What is odd about its updates, for many rounds; empty: nothing.")
    ]
    heads: tuple[HeldHeadRow, ...]
    why: Annotated[str, about("Why it waits; of a member that has left, why it left.")]
    gone_s: Annotated[float | None, about("Seconds since it left; null: it is attached.")] = None


@frozen(kw_only=True)
class MemberRow(DepartedRow):
    """A member that is attached."""

    attached_s: float
    silent_s: Annotated[float, about("Seconds since its last sign of life.")]


@frozen(kw_only=True)
class ContributorRow:
    """A contributor of a round under way."""

    peer: PeerId
    weight: Annotated[int, about("Tokens behind its update.")]
    scale: Annotated[
        float, about("1: taken as it was; less: it was far larger than the other updates.")
    ]


@frozen(kw_only=True)
class ContributionRow(ContributorRow):
    """A contributor's part in a mean."""

    chunk_share: Annotated[float, about("Share of all chunks that include its update.")]
    weight_share: Annotated[
        float, about("Its share of the weight that a chunk was divided by; mean over all chunks.")
    ]


@frozen(kw_only=True)
class ChunkGroupRow:
    """The chunks whose mean is of the same contributors."""

    contributors: Annotated[
        tuple[int, ...], about("Positions in the round's list of contributors, from 0.")
    ]
    weight: Annotated[int, about("The weight that their sum was divided by.")]
    chunks: Annotated[
        tuple[tuple[int, int], ...],
        about("Runs of consecutive chunks: the first, from 0, and the count."),
    ]


@frozen(kw_only=True)
class PlanRow:
    """Predicted, smallest possible and actual time of the last attempt."""

    predicted_s: Annotated[
        float | None, about("Null: the line of a contributor is not measured yet.")
    ]
    bound_s: float
    guessed_count: int
    took_s: float


@frozen(kw_only=True)
class RoundRow:
    """A round that is under way."""

    round: int
    fragment: int
    version: int
    at_step: int
    phase: Literal["open", "reducing"]
    open_s: float
    reduce_s: float | None
    plan: PlanRow | None
    expected: tuple[str, ...]
    ready: tuple[str, ...]
    declined: Annotated[dict[str, str], about("By peer: why it does not contribute.")]
    attempt: int
    contributors: tuple[ContributorRow, ...]
    reported: tuple[str, ...]
    lost: Annotated[dict[str, str], about("By peer: why the round goes on without it.")]
    repairs: int
    reruns: int


@frozen(kw_only=True)
class PastRoundRow:
    """A round that is over.

    After a master's crash only the journal's part of its last rounds is known; the rest is null.
    """

    round: int
    fragment: int
    version: Annotated[int, about("Before the round.")]
    at_step: int
    outcome: Literal["committed", "aborted"]
    why: str
    attempts: int
    repairs: int | None
    reruns: int | None
    lost: dict[str, str]
    contributors: Annotated[
        tuple[ContributionRow, ...],
        about(
            "Committed: the contributors of the mean, or of a part of its chunks. Aborted: those of"
            " the order, with shares of 0."
        ),
    ]
    chunk_count: Annotated[int | None, about("Of the fragment; null: not known.")]
    manifest: Annotated[
        tuple[ChunkGroupRow, ...],
        about("Which contributors are in which chunks; empty: all are in all."),
    ]
    declined: dict[str, str]
    digest: Digest
    opened_s: float | None
    open_s: Annotated[float | None, about("Seconds until its set of contributors was closed.")]
    reduce_s: Annotated[float | None, about("Seconds from then to its end.")]
    plan: PlanRow | None


@frozen(kw_only=True)
class RoundMarkRow:
    """A member's part in a round, in seconds after it was opened; null: never, or not recorded."""

    name: str
    ready_s: float | None
    reduced_s: Annotated[float | None, about("When it had the result.")]
    state: Literal["invited", "excluded", "lost", "contributed", "received", "missed"]


@frozen(kw_only=True)
class RecordedRound(PastRoundRow):
    """A round that is over, with the times of its members."""

    marks: Annotated[dict[str, RoundMarkRow], about("By peer.")]
    opened_at: Annotated[float | None, about("Unix seconds.")]
    ended_at: Annotated[float, about("Unix seconds.")]


@frozen(kw_only=True)
class RouteRow:
    """A pair of members whose route to each other was arranged, or is wanted."""

    peers: tuple[str, str]
    names: tuple[str, str]
    route: str
    dials: Annotated[str | None, about("The peer that dials.")]
    relay: Annotated[str | None, about("The peer that forwards.")]
    works: bool
    tried: tuple[str, ...]


@frozen(kw_only=True)
class EventRow:
    """An event of this master's life."""

    kind: str
    peer: str | None
    text: str
    at_s: float


RunState = Literal[
    "waiting for weights",
    "waiting for members",
    "training",
    "paused",
    "finished",
    "superseded",
]


@frozen(kw_only=True)
class RunStatus:
    """A run as the rules of its master know it."""

    now_s: Annotated[float, about("The master's clock.")]
    term: int
    state: RunState
    why_waiting: str
    headline: Headline
    step: Annotated[int, about("Of the last commit.")]
    committed: int
    aborted: int
    repaired: int
    rerun: int
    rounds_wanted: Annotated[int, about("0: no end.")]
    view: int
    counts: MemberCounts
    places: PlaceCounts
    fragments: tuple[HeadRow, ...]
    copies: CopyAgreement
    members: tuple[MemberRow, ...]
    departed: tuple[DepartedRow, ...]
    rounds: tuple[RoundRow, ...]
    routes: tuple[RouteRow, ...]
    masters: tuple[str, ...]
    rewound: int
    revoked: Annotated[dict[str, str], about("By peer: why.")]
    audited: Annotated[int, about("Chunks that other members added up again, with the same sum.")]
    warnings: Annotated[
        tuple[str, ...],
        about("What the operator should look at, though the run does not wait for it."),
    ]
    past_rounds: Annotated[tuple[PastRoundRow, ...] | None, about("null: not asked for.")]
    events: Annotated[tuple[EventRow, ...] | None, about("null: not asked for.")]
