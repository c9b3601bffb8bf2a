"""A run in one line, its changes as sentences, and a summary at the end: what ``join`` and
``master`` print.

    peer_line, master_line    the living line of a terminal; also a log's progress line
    PeerChanges               one sentence for each change between two statuses of a peer
    ProgressClock             when a log's next progress line is due
    peer_summary              what a peer has done, and where the weights are

All of it is formatting of status records; nothing here reads a clock or writes.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping

from attrs import Factory, define, frozen

from ..membership.shared.event_kind import EventKind
from ..membership.shared.run_status import Headline
from ..protocol.text import format_duration, plural
from .status_records import PeerStatus

PROGRESS_S = 30.0  # between two progress lines in a log, at least
# Events of a run that a master prints; those of rounds, copies and routes are in `holdfast events`.
PRINTED_EVENTS = (EventKind.RUN, EventKind.JOIN, EventKind.LEAVE, EventKind.ROLE, EventKind.BAD)

ATTACHED_PHASE = "in the run"  # of a peer that has had a session
AWAY = "no master"  # in the line of such a peer, when the session is lost


# ---------------------------------------------------------------- one line


def peer_line(status: PeerStatus) -> str:
    busy_s = status.stepped_s + status.waited_s
    away = AWAY if status.phase == ATTACHED_PHASE else status.phase
    known = bool(status.heads or status.rounds_wanted)
    parts = [
        status.role if status.attached else away,
        format_rounds(committed_rounds(status), status.rounds_wanted or None) if known else "",
        *_figures(
            status.loss, status.tokens_per_s, status.stepped_s / busy_s if busy_s > 0.0 else None
        ),
        format_left(status.left_s),
        status.why,
    ]
    return "  ".join(filter(None, parts))


def master_line(state: str, why: str, figures: Headline, member_count: int) -> str:
    """Return what a run does, in one line; ``state`` and ``why`` are those of ``RunStatus``."""
    parts = [
        state,
        format_rounds(figures.rounds, figures.rounds_wanted),
        *_figures(figures.loss, figures.tokens_per_s, figures.utilisation),
        plural(member_count, "member"),
        format_left(figures.eta_s),
        why,
    ]
    return "  ".join(filter(None, parts))


def _figures(loss: float | None, tokens_per_s: float, utilisation: float | None) -> Iterator[str]:
    if loss is not None:
        yield f"loss {loss:.3f}"
    if tokens_per_s > 0.0:
        yield f"{tokens_per_s:,.0f} tokens/s"
    if utilisation is not None:
        yield f"{utilisation:.0%} utilised"


def committed_rounds(status: PeerStatus) -> int:
    """Return the rounds that the state at a peer contains: each made a version of one fragment."""
    return sum(head.version for head in status.heads)


def format_rounds(rounds: int, wanted: int | None) -> str:
    return f"round {rounds}/{wanted}" if wanted else f"round {rounds}"


def format_left(left_s: float | None) -> str:
    """Return the time that is left as text; empty if it is not known or over."""
    return f"{format_duration(left_s)} left" if left_s else ""


# ---------------------------------------------------------------- in time


@define
class ProgressClock:
    """The times of progress lines in a log: at most one for each round and each ``PROGRESS_S``."""

    _at_s: float = 0.0
    _rounds: int = -1

    def is_due(self, rounds: int, now_s: float) -> bool:
        """Return whether a line is due now; it then counts as printed."""
        if self._rounds < 0:
            self._at_s, self._rounds = now_s, rounds
        if rounds == self._rounds or now_s - self._at_s < PROGRESS_S:
            return False
        self._at_s, self._rounds = now_s, rounds
        return True


# ---------------------------------------------------------------- a peer's changes


@define
class PeerChanges:
    """A peer's statuses turned into a sentence for each change that its operator should know of."""

    _role: str = ""
    _attached: bool = False
    _was_attached: bool = False
    _trainer: bool = False
    _members: Mapping[str, str] | None = None

    def of(self, status: PeerStatus, *, leaving: bool = False) -> Iterator[str]:
        """Yield the sentences for what changed since the last status."""
        yield from self._session(status, leaving or status.finished)
        trains = status.trainer_state == "running"
        if trains and not self._trainer:
            yield "the trainer has attached"
        self._trainer = trains
        if not status.attached:
            return
        yield from self._fellows(status)
        if status.in_sync and status.role != self._role:
            verb = "is now" if self._role else "joined as"
            self._role = status.role
            why = f": {status.role_why}" if status.role_why else ""
            yield f"{status.name} {verb} a {status.role}{why}"

    def _session(self, status: PeerStatus, ends: bool) -> Iterator[str]:
        if self._attached and not status.attached and not ends:
            yield "the master is gone; the trainer goes on as far as it may"
        if status.attached and self._was_attached and not self._attached:
            yield "the master is back"
        self._attached = status.attached
        self._was_attached |= status.attached

    def _fellows(self, status: PeerStatus) -> Iterator[str]:
        now = {member.peer: member.name for member in status.members if member.peer != status.peer}
        before, self._members = self._members, now
        if before is None:
            return
        # A view does not say whether a member left or was lost.
        yield from (f"{name} is gone" for peer, name in before.items() if peer not in now)
        yield from (
            f"{name} has joined the run" for peer, name in now.items() if peer not in before
        )


# ---------------------------------------------------------------- the end


@define
class PeerRecord:
    """What a peer has done since it came: fed with its statuses, for the summary.

    Attributes:
      first_loss, last_loss: of its trainer; None: it reported none.
      rounds: committed since the peer came.
    """

    first_loss: float | None = None
    last_loss: float | None = None
    tokens: int = 0
    rounds: int = 0
    _first_rounds: int | None = None

    @property
    def took_part(self) -> bool:
        return self._first_rounds is not None or self.tokens > 0

    def see(self, status: PeerStatus) -> None:
        if status.loss is not None:
            self.last_loss = status.loss
            if self.first_loss is None:
                self.first_loss = status.loss
        self.tokens = max(self.tokens, status.tokens)
        rounds = committed_rounds(status)
        founding = bool(status.heads) and rounds == 0
        if self._first_rounds is None and (status.in_sync or founding):
            self._first_rounds = rounds
        if self._first_rounds is not None:
            self.rounds = max(self.rounds, rounds - self._first_rounds)


@frozen
class SavedWeights:
    """The checkpoint that a peer leaves; ``option`` is what ``holdfast export`` finds it with."""

    place: str
    step: int
    option: tuple[str, ...] = Factory(tuple)


def peer_summary(record: PeerRecord, took_s: float, saved: SavedWeights | None) -> Iterator[str]:
    """Yield the lines that end a peer's part in a run."""
    parts = [
        f"took part for {format_duration(took_s)}",
        plural(record.rounds, "round"),
        f"{record.tokens:,} tokens",
    ]
    if record.first_loss is not None and record.last_loss is not None:
        parts.append(f"loss {record.first_loss:.3f} -> {record.last_loss:.3f}")
    yield ", ".join(parts)
    if saved is not None:
        command = shlex.join(["holdfast", "export", *saved.option, "model.safetensors"])
        yield f"the weights of step {saved.step} are in {saved.place}; to export them:"
        yield f"  {command}"
