"""Members' trainers: whether one runs, why not, and when a member without one gives up its place.

A place holder that loses its trainer keeps the place while no other member could fill it. A spare
with a running trainer takes over after ``settle_s``: it contributes at once and moves no state,
while a process takes seconds to start. The former holder comes back as a spare. A member that does
not restart its trainer any more gives up the place in any case.

A contributor that was late for ``LATE_MAX`` rounds in a row rests: it gives up its place and may
take one again after a time, which doubles with each rest.
"""

from __future__ import annotations

import itertools
import math

from ...protocol.messages import Remedy, TrainerFailed
from ..shared.event_kind import EventKind
from .state.context import Context, format_member, quoted
from .state.roster import Member, can_contribute, next_to_seat

LATE_MAX = 3  # rounds in a row that closed without a contributor
REST_DEADLINES = 4  # length of the first rest; doubled each time
REST_S_MAX = 3_600.0


def failed(context: Context, member: Member, message: TrainerFailed) -> None:
    """Note why a member's trainer failed, and its daemon's remedy."""
    what = f"{message.kind.value}: {quoted(message.reason)}"
    if message.remedy is Remedy.RELOAD:
        then = "it goes on with the shared state"
    else:
        member.trainer.failed, member.trainer.failed_s = message, context.now_s
        then = f"restarting in {message.restart_s:.0f} s, failure {message.failure_count} in a row"
        if message.remedy is Remedy.NONE:
            then = f"given up after {message.failure_count} failures in a row"
    context.announce(
        EventKind.ROLE, member.peer, f"{format_member(member)}'s trainer: {what}; {then}"
    )


def unseated(context: Context) -> Member | None:
    """Return a place holder without a trainer whose place is to be vacated now."""
    history, roster, spec = context.history, context.roster, context.spec
    for member in roster.by_number():
        if member.peer not in history.members.places or member.trainer.running:
            continue
        if given_up(member):
            return member
        if context.now_s < (member.trainer.gone_s or 0.0) + spec.settle_s:
            continue
        others = history.members.places - {member.peer}
        limit, vacancies = spec.membership.contributors, history.members.vacancies + 1
        versions, now_s = history.versions, context.now_s
        if next_to_seat(roster, others, vacancies, limit, versions, now_s) is not None:
            return member
    return None


def too_late(context: Context) -> Member | None:
    """Return a place holder that was late ``LATE_MAX`` times in a row."""
    history = context.history
    able = (m for m in context.roster.by_number() if can_contribute(m, history.members.places))
    return next((member for member in able if member.trainer.late_count >= LATE_MAX), None)


def rest(context: Context, member: Member) -> str:
    """Keep a member from taking a place for a time. Returns a sentence about it."""
    trainer, deadline_s = member.trainer, context.spec.membership.deadline_s
    rest_s = min(REST_S_MAX, REST_DEADLINES * deadline_s * 2.0 ** min(trainer.rest_count, 16))
    late_count, trainer.late_count = trainer.late_count, 0
    trainer.rest_count += 1
    trainer.rests_until_s = context.now_s + rest_s
    return f"{late_count} rounds in a row went on without it; it is tried again in {rest_s:.0f} s"


def next_deadline_s(context: Context) -> float:
    """Return when the next member's time without a trainer, or its rest, is over."""
    dues = (
        member.trainer.gone_s + context.spec.settle_s
        for member in context.roster
        if not member.trainer.running
        and member.trainer.gone_s is not None
        and member.peer in context.history.members.places
    )
    rests = (member.trainer.rests_until_s for member in context.roster)
    times_s = itertools.chain(dues, rests)
    return min((due_s for due_s in times_s if due_s > context.settled_s), default=math.inf)


def given_up(member: Member) -> bool:
    """Return whether the member's daemon does not restart its trainer any more."""
    return member.trainer.failed is not None and member.trainer.failed.remedy is Remedy.NONE


def state_of(member: Member, now_s: float) -> str:
    """Return a phrase about the member's trainer."""
    if member.trainer.running:
        return "running"
    known = member.trainer.failed
    if known is None:
        return "none"
    why = f"{known.kind.value} ({quoted(known.reason)})"
    if known.remedy is Remedy.NONE:
        return f"given up after {known.failure_count} failures in a row, the last one: {why}"
    left_s = member.trainer.failed_s + known.restart_s - now_s
    when = f"restarting in {left_s:.0f} s" if left_s > 0.5 else "starting again"
    return f"{when} after {why}, failure {known.failure_count} in a row"
