"""The status of a master and of a peer, and the rows of the HTTP API, as frozen records.

See ``membership.shared.run_status``: the same conventions, and the records that the master's
rules fill.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeVar

import msgspec
from attrs import Factory, frozen

from ..membership.shared.run_status import (
    CopyRow,
    HeadRow,
    PeerId,
    RoleName,
    RunStatus,
    about,
)
from ..protocol.errors import UserError
from .process.exit_codes import ExitCode

# Limits of one answer, for the server and its clients; a request for more is refused.
ROUNDS_ANSWER_MAX = 200
EVENTS_ANSWER_MAX = 1_000

R = TypeVar("R")


@frozen(kw_only=True)
class PendingRow:
    """A newcomer that waits for the operator's approval."""

    peer: PeerId
    name: str
    role: RoleName
    founder: Annotated[bool, about("Its invite lets it supply a new run's initial weights.")]
    host: Annotated[str, about("The address from which it connects to the master.")]
    waits_s: float


@frozen(kw_only=True)
class Ending:
    """The outcome of a finished run; null where it is not known."""

    finished_at: Annotated[float | None, about("Unix seconds.")]
    duration_s: Annotated[float | None, about("From the first round's opening to the last commit.")]
    loss_start: Annotated[float | None, about("The first loss in the run's history.")]
    loss_end: float | None
    weights_at: Annotated[
        tuple[str, ...],
        about(
            "Names of the last commit's contributors. Each writes the final weights as a"
            " checkpoint; `holdfast export FILE` there makes a file of them."
        ),
    ]


@frozen(kw_only=True)
class MasterStatus(RunStatus):
    """A run as its master sees it."""

    kind: Literal["master"]
    version: Annotated[str, about("Of holdfast.")]
    journal_cut: str | None
    run_id: str
    name: str
    uptime_s: float
    value_count: int
    addresses: tuple[str, ...]
    pending: tuple[PendingRow, ...]
    ending: Annotated[Ending | None, about("null: the run is not finished.")]
    figures: Annotated[
        dict[str, float], about("Figures of run.log: the mean of what contributors logged last.")
    ]


@frozen(kw_only=True)
class LinkRow:
    """A peer's link to another peer."""

    peer: PeerId
    lanes: Annotated[int, about("TCP connections for bulk bytes, now.")]
    congestion: Annotated[tuple[str, ...], about("TCP congestion controls of these connections.")]
    round_trip_s: Annotated[float | None, about("The shortest seen; null: not known.")]
    sent_bytes: Annotated[int, about("Bulk bytes sent over this link, on past connections too.")]
    retransmitted_bytes: Annotated[
        int | None, about("What TCP sent again of it; null: the kernel does not tell.")
    ]


@frozen(kw_only=True)
class CongestionReport:
    """The TCP congestion control that this machine's new lanes get, in words."""

    wanted: Annotated[str, about("By the run's spec; empty: the kernel's default.")]
    used: Annotated[str, about("Empty: not known.")]
    text: Annotated[str, about("What is used and why, in a sentence.")]
    fix: Annotated[
        str, about("What the machine's owner can do for the wanted one; empty: nothing.")
    ] = ""


@frozen(kw_only=True)
class PeerRoundRow:
    """A round as a peer knows it."""

    round: int
    fragment: int
    phase: str
    attempt: int


@frozen(kw_only=True)
class FellowRow:
    """A member of the run as its other members know it."""

    peer: PeerId
    name: str
    role: RoleName


@frozen(kw_only=True)
class CheckpointStatus:
    """A peer's checkpoints."""

    place: str = ""
    writing: bool = False
    newest: str | None = None
    step: int | None = None
    error: str = ""


@frozen(kw_only=True)
class PeerStatus:
    """A peer as it sees itself."""

    # The defaults are those of a peer that is away.
    kind: Literal["peer"] = "peer"
    version: str
    attached: Annotated[bool, about("It has a session with the master.")] = False
    peer: PeerId
    name: str
    run_id: str
    number: int | None = 0
    role: RoleName | Literal["away"] = "away"
    role_why: Annotated[str, about("Why it is a spare; empty for a contributor.")] = ""
    in_sync: bool = False
    phase: str = "away"
    why: str
    notices: Annotated[tuple[str, ...], about("The newest notices to the operator.")] = ()
    step: int = 0
    tokens: int = 0
    tokens_per_s: float = 0.0
    loss: float | None = None
    metrics: dict[str, float] = Factory(dict)
    links: tuple[LinkRow, ...] = ()
    bulk_sent_bytes: int = 0
    bulk_received_bytes: int = 0
    bulk_retransmitted_bytes: Annotated[
        int | None,
        about("Of the bytes sent, what TCP sent again; null: not known. Past links count, too."),
    ] = None
    congestion: Annotated[CongestionReport | None, about("null: the spec is not known yet.")] = None
    state_received_bytes: int = 0
    copies: tuple[CopyRow, ...] = ()
    heads: tuple[HeadRow, ...] = ()
    rounds: tuple[PeerRoundRow, ...] = ()
    rounds_wanted: Annotated[int, about("0: no end, or not known yet.")] = 0
    left_s: Annotated[float, about("Until the run's end, as its master says; 0: not known.")] = 0.0
    members: Annotated[tuple[FellowRow, ...], about("Of the newest view, itself included.")] = ()
    checkpoints: CheckpointStatus = CheckpointStatus()
    finished: bool = False
    trainer_pid: int | None = None
    command_pid: int | None = None
    trainer_restarts: int = 0
    trainer_state: str = "none"
    accelerators: Annotated[str, about('"7 of 8 GPUs" are healthy; empty: not asked for.')] = ""
    waited_s: float = 0.0
    stepped_s: float = 0.0
    limits: Annotated[dict[str, str], about("Set by the machine's owner, with their units.")]
    mapped_port: Annotated[
        str,
        about('"203.0.113.7:29701 by PCP": asked of the router; or why not; empty: not needed.'),
    ] = ""


def read(answer: object, kind: type[R]) -> R:
    """Return a daemon's answer as a record; raise UserError if it is not of that form."""
    try:
        return msgspec.convert(answer, kind)
    except msgspec.ValidationError as error:
        raise UserError(
            f"the daemon's answer is not understood: {error}",
            exit_code=ExitCode.FAILED,
            hint="if it is of another version of holdfast, start it again with this one",
        ) from error
