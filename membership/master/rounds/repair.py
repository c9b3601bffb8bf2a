"""Flushes and repairs: the chunks of a lost owner go to other members (see ``attempt``).

A chunk whose result a survivor holds is spread from there, unchanged; if no survivor holds it, from
a listener that does. Any other chunk gets a new owner among the survivors, which adds up what the
contributors send again. Chunks are distributed evenly; of equals the member that joined first comes
first.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from ....protocol import messages as m
from ...shared.event_kind import EventKind
from ..routes.routes import Routes
from ..state.context import Context
from ..state.roster import Member
from .attempt import Attempt, ReductionOutcome, holds
from .round import Round
from .round_table import RoundTable

SUCCESSORS_NAMED_MAX = 4  # in an event


class Repairer:
    """Has members shut out a lost one and say what they hold, then redistributes its chunks."""

    def __init__(self, context: Context, round_table: RoundTable, routes: Routes) -> None:
        self.context = context
        self.round_table = round_table
        self.routes = routes

    # ------------------------------------------------------------ flush

    def flush(self, round_: Round) -> None:
        """Tell all members in the attempt to accept nothing more from the lost."""
        attempt = round_.running()
        attempt.begin_flush(self.context.now_s)
        message = m.Flush(round_.number, attempt.flush.number, tuple(attempt.lost))
        for peer in attempt.served():
            self.context.send(peer, message)

    def held(self, member: Member, message: m.Held) -> None:
        """Note which chunks' results a receiver holds, now that it has shut out the lost."""
        round_ = self.round_table.rounds.get(message.round)
        attempt = round_.attempt if round_ is not None else None
        if (
            attempt is None
            or not attempt.flush.in_progress
            or attempt.flush.number != message.attempt
        ):
            return
        if not attempt.serves(member.peer):
            return
        if len(message.results) != (len(attempt.owners) + 7) // 8:
            why = "it holds chunks that the round does not have"
            self.round_table.evict(member.peer, m.RefusalCode.PROTOCOL, why)
            return
        attempt.flush.held[member.peer] = message.results

    def flush_limit_s(self, attempt: Attempt) -> float:
        """Return when a needed member that has not answered the flush is removed."""
        return attempt.flush.began_s + self.context.spec.membership.deadline_s

    def listeners_limit_s(self, attempt: Attempt) -> float:
        """Return until when listeners that may hold lost chunks are waited for."""
        if not attempt.flush.in_progress or attempt.unheard():
            return math.inf  # needed members are waited for, not listeners
        return attempt.flush.began_s + self.context.spec.settle_s

    def remove_mute(self, round_: Round) -> None:
        """Remove the needed members that are alive and have not answered the flush."""
        for peer in round_.running().unheard():
            self.round_table.evict(
                peer, m.RefusalCode.LAGGING, f"it did not answer a flush of round {round_.number}"
            )

    # ------------------------------------------------------------ repair

    def may_repair(self, attempt: Attempt) -> bool:
        """Return whether all answers to the flush that matter are in."""
        if attempt.unheard():
            return False
        return self.context.now_s >= self.listeners_limit_s(attempt) or not (
            attempt.may_learn_more()
        )

    def repair(self, round_: Round) -> bool:
        """Give the chunks of the lost to others; return False if the message would be too large."""
        attempt = round_.running()
        assignments = self._assignments(attempt, attempt.survivors(), attempt.flush.held)
        if len(assignments) > m.OWNER_RUNS_MAX:
            return False
        round_.repair_count += 1
        self.round_table.repair_count += 1
        self.context.announce(EventKind.ROUND, None, self._format_repair(round_, assignments))
        attempt.begin_repair(assignments, self.context.now_s)
        self._send(round_, assignments)
        return True

    def serve_listeners(self, round_: Round, outcome: ReductionOutcome) -> None:
        """Have the results that a lost owner did not send to listeners spread by other members.

        This needs no flush: all members that are asked hold the result that is being committed.
        """
        attempt = round_.running()
        having = [p for p in attempt.survivors() if attempt.outcomes.get(p) == outcome]
        waiting = [p for p in attempt.served() if p not in attempt.outcomes]
        if not (having and waiting and attempt.lost.keys() & set(attempt.owners)):
            return
        everything = b"\xff" * ((len(attempt.owners) + 7) // 8)
        held = dict.fromkeys([p for p in attempt.reached() if p not in waiting], everything)
        assignments = self._assignments(attempt, having, held)
        if len(assignments) > m.OWNER_RUNS_MAX:
            return  # they are synced again, like all members that miss a result
        outcomes = dict(attempt.outcomes)
        attempt.begin_flush(self.context.now_s)
        attempt.begin_repair(assignments, self.context.now_s)
        attempt.outcomes = outcomes
        self._send(round_, assignments)

    def _assignments(
        self, attempt: Attempt, survivors: Sequence[str], held: Mapping[str, bytes]
    ) -> tuple[m.Assignment, ...]:
        apart = self.routes.apart(attempt.receivers)
        return plan_repair(attempt.owners, attempt.lost, survivors, attempt.receivers, held, apart)

    def _send(self, round_: Round, assignments: tuple[m.Assignment, ...]) -> None:
        attempt = round_.running()
        message = m.Repair(round_.number, attempt.number, tuple(attempt.lost), assignments)
        for peer in attempt.served():
            self.context.send(peer, message)

    def _format_repair(self, round_: Round, assignments: Sequence[m.Assignment]) -> str:
        attempt = round_.running()
        lost = ", ".join(self.context.name(peer) for peer in attempt.lost)
        counts: Counter[str] = Counter()
        for assignment in assignments:
            counts[assignment.owner] += assignment.chunk_count
        again_count = sum(a.chunk_count for a in assignments if a.from_scratch)
        successors = [
            f"{self.context.name(p)} ({n})" for p, n in counts.most_common(SUCCESSORS_NAMED_MAX)
        ]
        if len(counts) > len(successors):
            successors.append(f"{len(counts) - len(successors)} more")
        taken = f" by {', '.join(successors)}" if successors else ""
        return (
            f"repaired round {round_.number}: {lost} lost, {counts.total()} of"
            f" {len(attempt.owners)} chunks taken over{taken}, {again_count} of them added up"
            f" again, nothing else rerun ({attempt.why_lost()})"
        )


# ---------------------------------------------------------------- the plan of a repair


def plan_repair(
    owners: Sequence[str],
    lost: Collection[str],
    survivors: Sequence[str],
    receivers: Sequence[str],
    held: Mapping[str, bytes],
    apart: Collection[str] = (),
) -> tuple[m.Assignment, ...]:
    """Assign every chunk of a lost owner to another member.

    Args:
      owners: by chunk.
      survivors: contributors that are left, in order; all of them are in ``held``.
      receivers: of the order; ``lacking`` refers to them.
      held: by peer, without the lost: a bit for each chunk whose result it holds. A receiver that
        has not answered counts as holding nothing.
      apart: members that lack a link to another one: chosen only if no other member can do it.
    """
    listeners = [peer for peer in receivers if peer in held and peer not in survivors]
    load = dict.fromkeys([*survivors, *listeners], 0)
    places = {peer: at for at, peer in enumerate(receivers)}
    chosen: list[tuple[int, tuple[str, bool, bytes]]] = []
    for chunk, owner in enumerate(owners):
        if owner not in lost:
            continue
        holders = [peer for peer in survivors if holds(held[peer], chunk)] or [
            peer for peer in listeners if holds(held[peer], chunk)
        ]
        successor = min(holders or survivors, key=lambda peer: (peer in apart, load[peer]))
        load[successor] += 1
        lacking = bytearray((len(receivers) + 7) // 8)
        if holders:
            for peer, at in places.items():
                if not holds(held.get(peer, b""), chunk):
                    lacking[at // 8] |= 1 << at % 8
        chosen.append((chunk, (successor, not holders, bytes(lacking))))
    runs = itertools.groupby(enumerate(chosen), key=lambda e: (e[1][0] - e[0], e[1][1]))
    assignments = []
    for (_offset, (successor, from_scratch, lacks)), run in runs:
        chunks = [chunk for _at, (chunk, _what) in run]
        assignments.append(m.Assignment(chunks[0], len(chunks), successor, from_scratch, lacks))
    return tuple(assignments)
