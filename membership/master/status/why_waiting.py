"""Sentences for people: why the run, or a member, does nothing now."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from ....protocol.messages import CopyProgress
from ....protocol.text import plural
from ...shared.peer_rows import NO_STEP, format_copy
from ...shared.run_status import RunState
from ..rounds.round import Round, RoundPhase
from ..run_end import how_to_go_on, what_is_committed
from ..state.context import quoted
from ..state.roster import CopyState, Member, can_contribute
from ..state.succession import NAMES_MAX
from ..trainers import state_of

if TYPE_CHECKING:
    from ..coordinator import Coordinator


class WaitReasons:
    """Reasons as they are now; made once for a status: most wait for the same round."""

    def __init__(self, coordinator: Coordinator, now_s: float) -> None:
        self._coordinator = coordinator
        self._now_s = now_s
        self._names = Counter(member.name for member in coordinator.context.roster)
        self._rounds: dict[int, str] = {}  # by round number

    def of_run(self) -> tuple[RunState, str]:
        """Return the run's state, and why nothing happens; empty while the run goes on."""
        context, scheduler = self._coordinator.context, self._coordinator.scheduler
        history = context.history
        if self._coordinator.succession.superseded:
            return "superseded", self._coordinator.succession.superseded
        if history.finished:
            command, _goal = how_to_go_on(history, context.spec)
            return "finished", f"{what_is_committed(history, context.spec)}; {command} goes on"
        if self._coordinator.succession.waiting:
            return "waiting for members", self._coordinator.succession.why_waiting()
        if not history.founded:
            return "waiting for weights", self._no_weights()
        for round_ in scheduler.rounds.values():
            return "training", self._of_round(round_)
        if history.paused:
            return "paused", "paused by the operator; `holdfast resume` lets the run go on"
        awaited = (
            self._coordinator.state_sync.missing or self._coordinator.adoption.awaited_listeners()
        )
        if awaited:
            names = ", ".join(sorted(map(context.name, awaited)))
            return "waiting for members", f"the master has restarted and waits for {names}"
        needed = context.spec.membership.min_members
        here = len(scheduler.contributors())
        if here < needed:
            return "waiting for members", self._few(here, needed)
        if self._now_s < scheduler.round_table.backoff.until_s:
            wait_s = scheduler.round_table.backoff.until_s - self._now_s
            return "training", f"the last round was aborted; the next opens in {wait_s:.1f} s"
        return "training", ""

    def _no_weights(self) -> str:
        context = self._coordinator.context
        if self._coordinator.founding.founder is not None:
            return (
                f"initial weights: {context.name(self._coordinator.founding.founder)} supplies them"
            )
        if founders := self._coordinator.founding.founders():
            names = ", ".join(context.name(member.peer) for member in founders)
            return f"initial weights: waiting for the trainer of {names}"
        return "initial weights: waiting for a peer with a founder invite"

    def _few(self, here: int, needed: int) -> str:
        context, missing = self._coordinator.context, needed - here
        text = (
            f"waiting for {plural(missing, 'more contributor')}: "
            f"{here} of {needed} are connected, in sync and have a trainer"
        )
        coming = [
            f"{context.name(m.peer)} ({self.of_member(m) or 'no place yet'})"
            for m in context.roster.by_number()
            if not m.relay and not can_contribute(m, context.history.members.places)
        ]
        last = {c.peer for commit in context.history.commits.values() for c in commit.contributors}
        gone = [context.name(p) for p in sorted(last) if p not in context.roster]
        if coming:
            text += f"; connected but not ready: {', '.join(coming[:NAMES_MAX])}"
        if gone:
            text += f"; not connected: {', '.join(gone[:NAMES_MAX])}"
        lost = self._coordinator.lineage.why_waiting(self._now_s)
        return f"{text}; {lost}" if lost and len(context.roster) else text

    def _of_round(self, round_: Round) -> str:
        if round_.number not in self._rounds:
            self._rounds[round_.number] = self._round(round_)
        return self._rounds[round_.number]

    def _round(self, round_: Round) -> str:
        if round_.phase is RoundPhase.OPEN:
            waiting = [
                peer
                for peer in self._coordinator.scheduler.expected(round_)
                if peer not in round_.answers.ready and peer not in round_.answers.declined
            ]
            if not round_.answers.ready:
                return f"training up to step {round_.at_step}, where the next round averages"
            return self._sentence("the next round waits", waiting, "still training")
        attempt = round_.running()
        if attempt.flush.in_progress:
            held = attempt.flush.held
            waiting = attempt.unheard() or [p for p in attempt.served() if p not in held]
            lost = ", ".join(self._short_name(peer) for peer in attempt.lost)
            what = f"the round goes on without {lost}"
            return self._sentence(what, waiting, "still to report the chunks they hold")
        return self._sentence("averaging", attempt.unreported(), "still averaging")

    def _sentence(self, what: str, waiting: list[str], why: str) -> str:
        if not waiting:
            return ""
        names = [self._short_name(peer) for peer in waiting]
        listed = ", ".join(names[:-1]) + (" and " if len(names) > 1 else "") + names[-1]
        return f"{what} ({listed} {why})"

    def _short_name(self, peer: str) -> str:
        """Return a member's name, with its id only if another one has the same name."""
        member = self._coordinator.context.roster.get(peer)
        if member is None or self._names[member.name] > 1:
            return self._coordinator.context.name(peer)
        return member.name

    def of_member(self, member: Member) -> str:
        """Return why a member does not do what it is here for; empty if it does."""
        context = self._coordinator.context
        history = context.history
        if not history.founded:
            if self._coordinator.founding.founder == member.peer:
                return "it supplies the initial weights"
            return "waiting for the initial weights"
        if member.draining:
            why_leaving = f": {quoted(member.draining_why)}" if member.draining_why else ""
            return f"leaving as soon as no other member needs it{why_leaving}"
        if history.finished:
            return "the run is finished"
        if member.relay:
            return _format_relay(member)
        if not member.in_sync and member.peer in context.in_line():
            return "waiting: all places and spares are taken"
        if not member.in_sync:
            return self._not_in_sync(member)
        if not member.trainer.running:
            state = state_of(member, context.now_s)
            return "waiting for its trainer" + ("" if state == "none" else f": {state}")
        if member.progress is not None and member.progress.phase.startswith(NO_STEP):
            return member.progress.phase
        if not can_contribute(member, history.members.places):
            return self._no_place(member)
        for round_ in self._coordinator.scheduler.rounds.values():
            if round_.phase is RoundPhase.OPEN and member.peer in round_.answers.ready:
                others = [
                    p for p in self._coordinator.scheduler.expected(round_) if p != member.peer
                ]
                if not round_.answers.complete(others):
                    return self._of_round(round_)
            if member.peer in round_.answers.declined:
                return f"not in this round: {round_.answers.declined[member.peer]}"
        return ""

    def _no_place(self, member: Member) -> str:
        context = self._coordinator.context
        if member.peer in context.history.members.demoted:
            return "a spare: the run's operator has demoted it"
        rest_s = member.trainer.rests_until_s - context.now_s
        if rest_s > 0.0:
            return f"a spare: it was late again and again; it is tried again in {rest_s:.0f} s"
        limit = context.spec.membership.contributors
        if limit and len(context.history.members.places) >= limit:
            return f"all {limit} places are taken; it steps in when one becomes vacant"
        return "a spare: it steps in when a contributor is lost"

    def _not_in_sync(self, member: Member) -> str:
        history = self._coordinator.context.history
        fetching = [copy.fetch for copy in member.copies if copy.fetch is not None]
        if fetching:
            if progress := [format_copy(copy) for copy in wanted_copies(member)]:
                return "; ".join(progress)
            donors = {donor for fetch in fetching for donor in fetch.donors}
            source = f"{len(donors)} donors" if donors else "its disk"
            return f"fetching {len(fetching)} fragments from {source}"
        if slow := self._coordinator.state_sync.catch_up.waits(member):
            return slow
        for fragment, copy in enumerate(member.copies):
            version = history.versions[fragment]
            if copy.state is CopyState.STALE:
                if self._coordinator.scheduler.excluded(member, fragment):
                    return "waiting for the end of a reduction that began before it joined"
                if not history.root(fragment, version):
                    return f"waiting until the members agree on version {version}: {copy.why}"
                return f"no connected peer has version {version} to copy from yet: {copy.why}"
            if copy.state is CopyState.UNCHECKED:
                return f"waiting until the members agree on version {copy.version}"
            if copy.version < version:
                return f"applying version {version} of fragment {fragment}"
        return "waiting for the end of a reduction that began before it joined"


def _format_relay(member: Member) -> str:
    relayed = member.connection.relayed
    if relayed is None or not relayed.pairs:
        return "a relay: no pair of members needs it now"
    spent = "; its quota is used up" if relayed.spent else ""
    pairs = "1 pair" if relayed.pairs == 1 else f"{relayed.pairs} pairs"
    return f"forwards for {pairs}, {relayed.carried_bytes / 1e6:.1f} MB so far{spent}"


def wanted_copies(member: Member) -> list[CopyProgress]:
    """Return the reported progress of the copies that the master still wants."""
    if member.progress is None:
        return []
    return [
        copy
        for copy in member.progress.copies
        if copy.fragment < len(member.copies)
        and (fetch := member.copies[copy.fragment].fetch) is not None
        and fetch.head.version == copy.version
    ]
