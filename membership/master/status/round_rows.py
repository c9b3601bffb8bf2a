"""Rounds as records of the status: under way, over, and as the journal alone knows them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import attrs

from ....protocol.messages import Commit
from ...shared.manifest import AddedContributor, MeanContents, contents_of, format_committed
from ...shared.run_status import (
    ChunkGroupRow,
    ContributionRow,
    ContributorRow,
    PastRoundRow,
    PlanRow,
    RecordedRound,
    RoundMarkRow,
    RoundRow,
)
from ..rounds.attempt import Attempt
from ..rounds.round import PastRole, Round, part_of
from ..state.journal import RoundNumbered

if TYPE_CHECKING:
    from ..coordinator import Coordinator


def round_row(coordinator: Coordinator, round_: Round, now_s: float) -> RoundRow:
    """Return the record of a round that is under way."""
    attempt = round_.attempt
    return RoundRow(
        round=round_.number,
        fragment=round_.fragment,
        version=round_.version,
        at_step=round_.at_step,
        phase="open" if attempt is None else "reducing",
        open_s=(round_.closed_s if attempt else now_s) - round_.opened_s,
        reduce_s=now_s - round_.closed_s if attempt else None,
        plan=_plan(attempt, now_s),
        expected=tuple(coordinator.scheduler.expected(round_)),
        ready=tuple(sorted(round_.answers.ready)),
        declined=dict(round_.answers.declined),
        attempt=attempt.number if attempt else 0,
        contributors=tuple(
            ContributorRow(peer=each.peer, weight=each.weight, scale=each.scale)
            for each in (attempt.contributors if attempt else ())
        ),
        reported=tuple(sorted(attempt.outcomes)) if attempt else (),
        lost=dict(attempt.lost) if attempt else {},
        repairs=round_.repair_count,
        reruns=round_.rerun_count,
    )


def past_round_row(round_: Round) -> PastRoundRow:
    """Return the record of a round that is over."""
    return PastRoundRow(**_past(round_))


def recorded_round(round_: Round, opened_at: float, ended_at: float) -> RecordedRound:
    """Return the record of a round that is over, with the times of its members.

    Args:
      opened_at: Unix seconds.
      ended_at: Unix seconds.
    """
    marks = {
        peer: RoundMarkRow(
            name=mark.name,
            ready_s=_since(round_, mark.ready_s),
            reduced_s=_since(round_, mark.reduced_s),
            state=part_of(round_, peer).value,
        )
        for peer, mark in round_.marks.items()
    }
    return RecordedRound(**_past(round_), marks=marks, opened_at=opened_at, ended_at=ended_at)


def journaled_round(
    record: Commit | RoundNumbered,
    name_of: Callable[[str], str],
    opened_at: float | None,
    ended_at: float,
) -> RecordedRound:
    """Return the record of a round of which only the journal's part is known.

    Args:
      record: its commit; without one it was open when its master ended.
      name_of: returns a peer's name, or an empty string.
      opened_at: Unix seconds.
      ended_at: Unix seconds; of a round without a commit those of the master's restart.
    """
    commit = record if isinstance(record, Commit) else None
    added = MeanContents(()) if commit is None else contents_of(commit)
    why = "the master was restarted while the round was open"
    if commit is not None:
        why = f"{format_committed(added)}; only the journal's part of this round is known"
    return RecordedRound(
        **_mean(added, None),
        round=record.round,
        fragment=record.fragment,
        version=record.version,
        at_step=record.at_step,
        outcome="aborted" if commit is None else "committed",
        why=why,
        attempts=0 if commit is None else commit.attempt,
        repairs=None,
        reruns=None,
        lost={},
        declined={},
        digest="" if commit is None else commit.digest.hex(),
        opened_s=None,
        open_s=None,
        reduce_s=None,
        plan=None,
        marks={
            peer: RoundMarkRow(
                name=name_of(peer) or peer[:8],
                ready_s=None,
                reduced_s=None,
                state=PastRole.CONTRIBUTED.value,
            )
            for peer in (each.contributor.peer for each in added.added)
        },
        opened_at=opened_at,
        ended_at=ended_at,
    )


def _past(round_: Round) -> dict[str, Any]:
    attempt = round_.attempt
    closed_s = round_.closed_s if attempt else round_.ended_s
    return {
        "round": round_.number,
        "fragment": round_.fragment,
        "version": round_.version,
        "at_step": round_.at_step,
        "outcome": round_.phase.value,
        "why": round_.outcome,
        "attempts": attempt.number if attempt else 0,
        "repairs": round_.repair_count,
        "reruns": round_.rerun_count,
        "lost": dict(attempt.lost) if attempt else {},
        **_mean(round_.contents, attempt),
        "declined": dict(round_.answers.declined),
        "digest": round_.digest.hex(),
        "opened_s": round_.opened_s,
        "open_s": closed_s - round_.opened_s,
        "reduce_s": round_.ended_s - closed_s,
        "plan": _plan(attempt, round_.ended_s),
    }


def _since(round_: Round, at_s: float | None) -> float | None:
    return None if at_s is None else round(at_s - round_.opened_s, 6)


def _plan(attempt: Attempt | None, end_s: float) -> PlanRow | None:
    if attempt is None:
        return None
    return PlanRow(**attrs.asdict(attempt.estimate), took_s=end_s - attempt.started_s)


def _mean(made: MeanContents | None, attempt: Attempt | None) -> dict[str, Any]:
    """Return the fields about a mean's contributors; without a mean, those of the order."""
    if made is None:
        order = attempt.contributors if attempt is not None else ()
        made = MeanContents(tuple(AddedContributor(each, 0.0, 0.0) for each in order))
    return {
        "contributors": tuple(
            ContributionRow(
                peer=each.contributor.peer,
                weight=each.contributor.weight,
                scale=each.contributor.scale,
                chunk_share=each.chunk_share,
                weight_share=each.weight_share,
            )
            for each in made.added
        ),
        "chunk_count": len(attempt.owners) if attempt is not None else None,
        "manifest": tuple(
            ChunkGroupRow(contributors=part.places, weight=part.weight, chunks=part.chunks)
            for part in made.parts
        ),
    }
