"""The scheduler of rounds: opens them when they are due and closes their sets of contributors.

    tick, messages --> facts in Round and Attempt --> advance: acts on the facts

A round is open until all invited contributors have answered, or, at the elastic pace (see
``round_clock``), until the quorum has answered and the grace is over. Then ``reduction_driver``
brings it to its end. Messages only add facts, so the order in which they arrive does not matter.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from ....protocol.messages import Contributor, FragmentHead, Measured, NotReady, Open, Ready
from ...planning.bandwidth import Bandwidths
from ...shared.event_kind import EventKind
from ..leases import Leases
from ..routes.routes import Routes
from ..state.context import Context, quoted
from ..state.journal import RoundNumbered
from ..state.roster import CopyState, Member, can_contribute
from ..state.round_schedule import next_fragment
from ..state.succession import Succession
from ..sync.state_sync import StateSync
from .contribution_checks import SameSamples
from .reduction_driver import ReductionDriver
from .round import NOTHING_TRAINED, Round, RoundPhase, gate_norms
from .round_clock import RoundClock
from .round_table import Evict, RoundTable

ROUNDS_IN_FLIGHT_MAX = 4  # each of another fragment; at most one of them is open


class RoundScheduler:
    """All rounds of a run.

    Args:
      evict: removes a member from the roster; calls back ``removed``.
    """

    def __init__(
        self,
        context: Context,
        state_sync: StateSync,
        succession: Succession,
        bandwidths: Bandwidths,
        routes: Routes,
        evict: Evict,
        leases: Leases,
    ) -> None:
        self.context = context
        self.state_sync = state_sync
        self.succession = succession
        self.bandwidths = bandwidths
        self.elastic = context.spec.diloco.pace == "elastic"
        self.leases = leases
        self.round_table = RoundTable(context, evict, leases)
        self.clock = RoundClock(context, self.round_table)
        self.same_samples = SameSamples(context)
        # Of the rounds that are reducing; receives the messages about reductions.
        self.driver = ReductionDriver(
            context, state_sync, self.round_table, self.bandwidths, routes
        )
        self.rounds = self.round_table.rounds  # open or reducing, by number; the round table's

    # ------------------------------------------------------------ facts

    def ready(self, member: Member, message: Ready) -> None:
        """Note that a contributor has posted its update."""
        round_ = self._inviting(member, message)
        if round_ is None or member.peer in round_.answers.ready:
            return
        self.same_samples.note(member.peer, message.first_batches)
        head = FragmentHead(round_.fragment, round_.version, message.state_root)
        self.state_sync.report(member, head)
        answers = round_.answers
        answers.declined.pop(member.peer, None)
        self.clock.answered(round_, member.peer, message.step_s)
        if message.weight == 0:
            answers.decline(member.peer, NOTHING_TRAINED)
            return
        if not self.leases.may_post(member.peer, message.trained):
            answers.decline(member.peer, "it trained on samples that are not leased to it")
            return
        self.leases.ready(round_.number, member.peer, message.trained)
        answers.ready[member.peer] = message
        round_.mark(member.peer, member.name).ready_s = self.context.now_s
        if message.step >= round_.at_step and answers.reached_s is None:
            answers.reached_s = self.context.now_s
            self.clock.reached(round_, message.step)

    def not_ready(self, member: Member, message: NotReady) -> None:
        """Note that a contributor declines a round."""
        round_ = self._inviting(member, message)
        if round_ is not None:
            round_.answers.decline(member.peer, quoted(message.reason))

    def _inviting(self, member: Member, message: Ready | NotReady) -> Round | None:
        """Return the round that a contributor answers, if it is open and the member invited."""
        round_ = self.rounds.get(message.round)
        if round_ is None or round_.phase is not RoundPhase.OPEN:
            return None
        return round_ if member.peer in round_.answers.invited else None

    def trainer_lost(self, member: Member) -> None:
        """Expect no update of a member without a trainer, except the ones that it has posted."""
        for round_ in self.rounds.values():
            if member.peer not in round_.answers.ready:
                round_.answers.invited.discard(member.peer)
                round_.answers.declined.pop(member.peer, None)

    def measured(self, member: Member, message: Measured) -> None:
        """Note measured bandwidths, for the next plan."""
        self.bandwidths.measured(member.peer, message)

    def removed(self, peer: str, why: str) -> None:
        """Note that a member has left the roster."""
        self.clock.removed(peer)
        for round_ in self.rounds.values():
            round_.forget(peer, why)

    # ------------------------------------------------------------ questions

    def excluded(self, member: Member, fragment: int) -> bool:
        """Return whether a reduction of the fragment runs whose result the member will not get."""
        return any(
            round_.fragment == fragment and member.peer not in round_.running().reached()
            for round_ in self.round_table.reducing()
        )

    def awaits(self, peer: str) -> bool:
        """Return whether an open round has an update of this member."""
        return any(peer in round_.answers.ready for round_ in self.round_table.opened())

    def adds(self, peer: str) -> bool:
        """Return whether a reduction in progress needs this member."""
        return any(peer in round_.running().needed() for round_ in self.round_table.reducing())

    def contributors(self) -> list[Member]:
        """Return the members that can contribute now, by number."""
        places = self.context.history.members.places
        return [m for m in self.context.roster.by_number() if can_contribute(m, places)]

    # ------------------------------------------------------------ conclusions

    def advance(self) -> bool:
        """Do one thing that the facts call for. Returns True if it did; then call again."""
        for round_ in list(self.rounds.values()):
            step = self._advance_open if round_.phase is RoundPhase.OPEN else self.driver.advance
            if step(round_):
                return True
        return self._open_next()

    def _open_next(self) -> bool:
        history, spec = self.context.history, self.context.spec
        if (
            not history.founded
            or history.finished
            or history.paused
            or self.leases.complete
            or len(self.rounds) >= ROUNDS_IN_FLIGHT_MAX
            or self.round_table.opened()
            or (spec.run.rounds and history.commit_count + len(self.rounds) >= spec.run.rounds)
            or self.context.now_s < self.round_table.backoff.until_s
            or self.succession.waiting  # too few members have attached to this master
            or self.state_sync.missing  # contributors from before the restart may return
            or len(self.contributors()) < spec.membership.min_members
        ):
            return False
        fragment = next_fragment(history.schedule.turns, {r.fragment for r in self.rounds.values()})
        if fragment is None:
            return False
        number, version = history.schedule.next_round, history.versions[fragment]
        at_step = self.context.due_step(fragment, history.schedule.turns[fragment])
        schedule = spec.diloco.sync_every, self.context.moved
        self.context.record(RoundNumbered(number, fragment, version, at_step, *schedule))
        self.rounds[number] = Round(
            number=number,
            fragment=fragment,
            version=version,
            at_step=at_step,
            opened_s=self.context.now_s,
        )
        return True

    def end_rounds(self, why: str) -> bool:
        """Abort the rounds that are only open. Returns True while another one is under way."""
        for round_ in self.round_table.opened():
            self.round_table.abort(round_, why)
        return bool(self.rounds)

    def expected(self, round_: Round) -> list[str]:
        """Return the contributors that the round waits for or has heard from, by number."""
        able = {member.peer for member in self.contributors()}
        return [
            member.peer
            for member in self.context.roster.by_number()
            if member.peer in round_.answers.invited
            and (member.peer in able or member.peer in round_.answers.ready)
        ]

    def _invite(self, round_: Round) -> None:
        for member in self.contributors():
            if member.peer not in round_.answers.invited:
                round_.answers.invited.add(member.peer)
                round_.mark(member.peer, member.name).gone = False
                self.context.send(
                    member.peer,
                    Open(round_.number, round_.fragment, round_.version, round_.at_step),
                )
        for peer in list(round_.answers.invited):
            invited = self.context.roster.get(peer)
            if invited is None or not invited.in_sync:
                # Its update was made against another state; once it is in sync it is invited again.
                round_.forget(peer, "")

    def _advance_open(self, round_: Round) -> bool:
        self._invite(round_)
        expected = self.expected(round_)
        answers = round_.answers
        ready = [peer for peer in expected if peer in answers.ready]
        needed = self.round_table.quorum(len(expected))
        if not expected:
            self.round_table.abort(round_, "no contributor is left")
            return True
        if self.elastic:
            self._nudge(round_, expected)
        if len(ready) < needed:
            answers.quorum_s = None
            if answers.complete(expected):
                self.round_table.abort(
                    round_, self._shortage(round_, len(ready), len(expected), needed)
                )
                return True
            return False
        if answers.quorum_s is None:
            answers.quorum_s = self.context.now_s
        root = self.state_sync.decide(round_.fragment, round_.version)
        if (root and answers.complete(expected)) or self.context.now_s >= self._limit_s(round_):
            self._close(round_, ready, expected)
            return True
        return False

    def _nudge(self, round_: Round, expected: list[str]) -> None:
        """Tell late contributors to post, at their next step, what they have trained by then."""
        for peer, due_s in self.clock.nudges(round_, expected).items():
            if self.context.now_s >= due_s:
                round_.answers.nudged[peer] = self.context.now_s
                self.context.send(peer, Open(round_.number, round_.fragment, round_.version, 0))

    def _limit_s(self, round_: Round) -> float:
        return self.clock.limit_s(round_) if self.elastic else math.inf

    def _shortage(self, round_: Round, ready: int, expected: int, needed: int) -> str:
        declined = sorted(round_.answers.declined.items())
        whys = [f"{self.context.name(peer)}: {why}" for peer, why in declined]
        return f"{ready} of {expected} contributors are ready, {needed} are needed" + (
            f" ({'; '.join(whys[:5])})" if whys else ""
        )

    def _close(self, round_: Round, ready: list[str], expected: list[str]) -> None:
        self.state_sync.decide(round_.fragment, round_.version, force=True)
        for peer in ready:
            member = self.context.roster.get(peer)
            if member is None or member.copies[round_.fragment].state is not CopyState.HELD:
                # The root was agreed only now, and this copy differs. It will be fetched again; the
                # round is evaluated again without this member.
                round_.forget(peer, "")
                ready = [other for other in ready if other != peer]
                self.state_sync.settle(self.excluded)
        needed = self.round_table.quorum(len(expected))
        if any(peer not in round_.answers.ready for peer in ready) or len(ready) < needed:
            return
        messages = dict(round_.answers.ready)
        scales, refused = gate_norms(
            {peer: messages[peer].norm for peer in ready},
            {peer: messages[peer].weight for peer in ready},
        )
        for peer, why in refused.items():
            self.round_table.refuse_update(round_, peer, why)
        added = [peer for peer in ready if peer in scales and peer in self.context.roster]
        weights = weights_of({p: messages[p].weight for p in added}, self.context)
        contributors = tuple(Contributor(peer, weights[peer], scales[peer]) for peer in added)
        if len(contributors) < needed:
            self.round_table.abort(
                round_, self._shortage(round_, len(contributors), len(expected), needed)
            )
            return
        for contributor in contributors:
            if contributor.scale != 1.0:
                self.context.announce(
                    EventKind.ROUND,
                    contributor.peer,
                    f"the update of {self.context.name(contributor.peer)} for round "
                    f"{round_.number} is far larger than the others' and is scaled by "
                    f"{contributor.scale:.3g}",
                )
        self._note_late(round_, expected)
        round_.turn(RoundPhase.REDUCING)
        round_.closed_s = self.context.now_s
        round_.original_count = len(contributors)
        self.driver.orders.begin(round_, contributors)

    def _note_late(self, round_: Round, expected: list[str]) -> None:
        """Note which contributors the round closes without, and how often in a row for each."""
        for peer in round_.answers.ready:
            if (member := self.context.roster.get(peer)) is not None:
                member.trainer.late_count = 0
        for peer in expected:
            member = self.context.roster.get(peer)
            if member is None or peer in round_.answers.ready or peer in round_.answers.declined:
                continue
            round_.answers.declined[peer] = "it was not ready in time"
            member.trainer.late_count += 1
            self.clock.missed(round_, peer)
        self.clock.closed(round_)

    def next_deadline_s(self) -> float:
        """Return when ``advance`` has something to do at the latest, if nothing else happens."""
        deadlines = [self.driver.next_deadline_s()]
        for round_ in self.round_table.opened():
            deadlines.append(self._limit_s(round_))
            if self.elastic:
                deadlines += self.clock.nudges(round_, self.expected(round_)).values()
        until_s = self.round_table.backoff.until_s
        if not self.round_table.opened() and until_s > self.context.settled_s:
            deadlines.append(until_s)
        return min(deadlines, default=math.inf)


# ---------------------------------------------------------------- what contributors weigh


# Policies against strangers, none of which holds by default. The trial: a new member's first rounds
# are trained, posted and measured at weight 0. The cap: all members of one invite together weigh at
# most a share of the whole.


def weights_of(tokens: Mapping[str, int], context: Context) -> dict[str, int]:
    """Return what contributors weigh that have trained on these tokens."""
    spec, weights = context.spec.membership, dict(tokens)
    served = context.history.members.served
    tried = {peer for peer in tokens if served.get(peer, 0) >= spec.trial_rounds}
    if tried:  # else nobody would weigh anything
        weights |= dict.fromkeys(tokens.keys() - tried, 0)
    if spec.invite_share_max < 1.0:
        members = [(peer, context.roster.get(peer)) for peer in tokens]
        invites = {peer: member.grant.invite if member else "" for peer, member in members}
        weights = capped_by_invite(weights, invites, spec.invite_share_max)
    return weights


def capped_by_invite(
    weights: Mapping[str, int], invites: Mapping[str, str], share_max: float
) -> dict[str, int]:
    """Scale weights down until no invite has more than its share; at most to equal shares.

    Args:
      invites: by peer; a peer whose invite is not known stands for itself.
    """
    sums: dict[str, int] = {}
    for peer, weight in weights.items():
        invite = invites[peer] or peer
        sums[invite] = sums.get(invite, 0) + weight
    limit = _level(sorted(filter(None, sums.values()), reverse=True), share_max)
    return {
        peer: weight and max(1, int(weight * min(1.0, limit / sums[invites[peer] or peer])))
        for peer, weight in weights.items()
    }


def _level(sums: list[int], share_max: float) -> float:
    """Return the most that an invite may weigh; the larger ones are given, in descending order."""
    for capped_count, largest in enumerate(sums):
        left = 1.0 - capped_count * share_max
        if left <= 0.0:
            break
        limit = share_max * sum(sums[capped_count:]) / left
        if largest <= limit:
            return limit
    return float(min(sums, default=0))
