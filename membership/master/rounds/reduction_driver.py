"""The course of a reduction at the master: from the order, over deaths and repairs, to a commit.

    begin --Reduce--> running --all survivors report one outcome--> recorded, Commit
                       |  ^ ^
                       |  | '-- Repair <--everybody said what it holds-- Flush <--somebody is lost
                       |  '---- Reduce: an update was refused, or nothing moves for a deadline
                       '--> Abort: fewer than the quorum are left, or they do not agree

A loss costs the chunks that the lost owned. First everybody who is left stops accepting from the
lost and says what it holds (``Flush``, ``Held``); only then are those chunks given to others
(``Repair``), so nothing of the lost can come later and make a second result. A chunk that somebody
holds is spread from there, one that nobody holds is added up again from those who are left. Which
contributors are in which chunk is part of the outcome that all have to agree on. Another loss in
between begins a new flush.

Only stars are repaired. In a tree a contribution is soon a part of a leader's sum, so nothing can be
taken back and little be given anew: a loss runs the round again, with those who are left, as a star.

Messages only add facts. ``advance`` looks at the facts and acts, so it does not matter in which
order a death, an accusation and a late result arrive. Nobody waits for the dead: a closed connection
counts at once, an accused that still looks alive has ``settle_s``, who does not answer a flush and
an attempt in which nothing moves have ``deadline_s``, and who finishes long after the quorum did is
left behind.

Where nothing moves and nobody is accused, or the results differ, everybody is asked what it waits for, and
holds (``inquiry``). What the answers say of others counts as if a link had broken.

Two that lost each other, and nobody else, are both well: only what lies between them is not. The round
goes on without one of them, which stays a member and is synced again; and plans do without the pair
until it has a link again (see ``routes``). Nobody is removed for what others cannot reach.

*A member's word is no proof.* It takes ``ACCUSERS_MIN`` to have an update refused. What one alone says of
another costs it at most the round, and for a while plans do without this pair (``disputes``). If it says that
an update must not be added, the round is run again so: if it is true, the next owner says the same. Who says
so again in that round, and alone again, or of one that has sent it nothing, is left out of it. Of two
contributors there is no third who could tell, and no plan without the pair: the round is aborted.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from itertools import islice

from attrs import evolve

from ....protocol.messages import (
    OWNER_RUNS_MAX,
    Assignment,
    Commit,
    Contributor,
    Diagnose,
    Diagnosis,
    Flush,
    Held,
    Reduce,
    Reduced,
    ReduceFailed,
    RefusalCode,
    Repair,
)
from ...manifest import fits, format_committed, went_in
from ...planning.bandwidth import Bandwidths, LineCapacities
from ...planning.plan import make_plan
from ...planning.shares import NoReachableOwnerError
from ..routes.disputes import DISPUTES_MAX
from ..routes.routes import Routes
from ..state.context import Context, quoted, said
from ..state.journal import RoundCommitted, RoundOrdered
from ..state.master_effects import EventKind
from ..state.roster import CopyState, Member, caps_of, sites_of
from ..state.voting_blocs import voices_of
from ..sync.state_sync import StateSync
from .attempt import Attempt
from .audits import Auditing
from .contribution_checks import ContributionChecks
from .inquiry import Findings, Question, differing, is_done, waiting
from .norms import makes_sense
from .outcome import ReductionOutcome
from .repair import plan_repair
from .round import Round, RoundEvent
from .round_table import RoundTable

# From nothing, in one round; then it is aborted and a new one asks everybody again. Repairs need no
# limit: each costs a contributor.
RERUNS_MAX = 7
STALLS_MAX = 2  # attempts of a round in which nothing moved and nobody could be blamed
# Receivers with whom an order is kept for the next master. A record grows with them; a larger run orders
# the round again after a restart.
ORDER_KEPT_MAX = 256
HEIRS_SAID_MAX = 4  # named in an event
INQUIRY_MIN = (
    3  # contributors; of two there is no third who could tell, nor a plan without the pair
)
ACCUSERS_MIN = 2  # of one member; what one alone says of another may be its own fault, or a lie


class ReductionDriver:
    """Brings the reductions of a ledger's rounds to their end."""

    def __init__(
        self,
        context: Context,
        state_sync: StateSync,
        round_table: RoundTable,
        bandwidths: Bandwidths,
        routes: Routes,
    ) -> None:
        self.context = context
        self.state_sync = state_sync
        self.round_table = round_table
        self.bandwidths = bandwidths
        self.audits = Auditing(context, round_table)
        self.contribution_checks = ContributionChecks(context)
        self.routes = routes

    # ------------------------------------------------------------ facts

    def reduced(self, member: Member, message: Reduced) -> None:
        attempt = self.round_table.attempt(message.round, message.attempt)
        if attempt is None:
            self._reduced_late(member, message)
            return
        if member.peer not in attempt.served():
            return
        if not fits(message.manifest, len(attempt.owners), len(attempt.contributors)):
            self._violation(member, "its manifest is not of the round that it reports")
            return
        if not makes_sense(message.norm_sums, len(attempt.contributors)):
            self._violation(member, "what it has found is not of the round's contributors")
            return
        attempt.outcomes[member.peer] = ReductionOutcome(message.digest, message.manifest)
        attempt.reports[member.peer] = message.norm_sums, message.momentum_square
        round_ = self.round_table.rounds[message.round]
        round_.mark(member.peer, member.name).reduced_s = self.context.now_s
        attempt.missed.pop(member.peer, None)
        attempt.blind.pop(member.peer, None)
        if member.peer in attempt.survivors():
            attempt.moved_s = self.context.now_s
            reported_count = len(attempt.survivors()) - len(attempt.unreported())
            if attempt.quorum_s is None and reported_count >= self.round_table.quorum(
                len(attempt.contributors)
            ):
                attempt.quorum_s = self.context.now_s

    def _reduced_late(self, member: Member, message: Reduced) -> None:
        """A receiver's digest that comes after the decision: it may have another result."""
        round_ = self.round_table.committed(message.round)
        if round_ is None or round_.running().number != message.attempt:
            return
        if round_.digest != message.digest:
            self._missed(member, message.round, "its result differs from the one committed")
        elif member.peer in round_.running().receivers:
            round_.mark(member.peer, member.name).reduced_s = self.context.now_s

    def held(self, member: Member, message: Held) -> None:
        """What a receiver holds after it has shut out the lost."""
        round_ = self.round_table.rounds.get(message.round)
        attempt = round_.attempt if round_ is not None else None
        if attempt is None or not attempt.flushing or attempt.flush_number != message.attempt:
            return
        if member.peer not in attempt.served():
            return
        if len(message.results) != (len(attempt.owners) + 7) // 8:
            self._violation(member, "it holds chunks that the round does not have")
            return
        attempt.held[member.peer] = message.results

    def diagnosed(self, member: Member, message: Diagnosis) -> None:
        """What it waits for, or holds."""
        attempt = self.round_table.attempt(message.round, message.attempt)
        inquiry = attempt.inquiry if attempt is not None else None
        if inquiry is not None and member.peer in inquiry.asked:
            inquiry.told[member.peer] = message

    def reduce_failed(self, member: Member, message: ReduceFailed) -> None:
        attempt = self.round_table.attempt(message.round, message.attempt)
        if attempt is None:
            self._missed(member, message.round, quoted(message.reason))
            return
        if member.peer in attempt.peers():
            if member.peer not in attempt.lost:
                self._contributor_failed(member, message, attempt)
            return
        attempt.missed[member.peer] = quoted(message.reason)
        attempt.outcomes.pop(member.peer, None)
        named = attempt.takes_part(message.accused)
        if named and not message.bad:
            attempt.blind.setdefault(member.peer, set()).update(named)
            return
        attempt.blind.pop(member.peer, None)
        if member.peer in attempt.owners:
            attempt.lose(member.peer, f"it cannot spread the results it has: {message.reason}")

    def _contributor_failed(self, member: Member, message: ReduceFailed, attempt: Attempt) -> None:
        attempt.outcomes.pop(member.peer, None)
        named = [peer for peer in attempt.takes_part(message.accused) if peer != member.peer]
        others_count = len(attempt.peers()) - 1
        bad = message.bad and bool(named)
        if bad and others_count > 1 and 2 * len(named) > others_count:
            named = []
        elif bad:
            named = self._believed(member.peer, named, message.round)
        if not named:
            # Blaming nobody, most of the others or who cannot be it says something of who speaks.
            why = f"it cannot finish the round: {quoted(message.reason)}"
            attempt.lose(member.peer, why)
            attempt.missed[member.peer] = why  # it lives, and is synced again afterwards
            self.context.announce(EventKind.ROUND, member.peer, f"{said(member)}: {why}")
            return
        if bad:
            attempt.ended.add(member.peer)
        for peer in named:
            attempt.accuse(peer, member.peer, self.context.now_s)
            if bad and peer in attempt.peers():
                round_ = self.round_table.rounds[message.round]
                self._call_bad(round_, peer, member.peer, quoted(message.reason))

    def _believed(self, accuser: str, named: Sequence[str], number: int) -> list[str]:
        """Who of these may have sent it what must not be added; others look at it once in a round."""
        round_ = self.round_table.rounds[number]
        attempt = round_.running()
        if accuser in round_.alone:
            return []
        return [peer for peer in named if attempt.gives(peer, accuser)]

    def _call_bad(self, round_: Round, peer: str, accuser: str, why: str) -> bool:
        """Somebody says that what a contributor sent must not be added; whether it is refused."""
        accusers = round_.called_bad.setdefault(peer, set())
        accusers.add(accuser)
        others = [other for other in round_.running().peers() if other != peer]
        voices = voices_of(self.context.roster, {*others, *accusers})
        # Of several that came by one invite from one line only one counts, unless all did.
        needed = min(ACCUSERS_MIN, len({voices[other] for other in others if other in voices}))
        heard = [voices[each] for each in accusers if each in voices]
        if len(heard) < ACCUSERS_MIN or len(set(heard)) < needed:
            return False
        round_.alone -= accusers
        if peer not in round_.refused:
            self.round_table.refuse_update(round_, peer, why)
        return True

    def moved(self, member: Member) -> None:
        """Bulk bytes leave or reach the member: what it takes part in is not stalled."""
        for round_ in self.round_table.reducing():
            attempt = round_.running()
            if attempt.unreported():
                if member.peer in attempt.served():
                    attempt.moved(member.peer, self.context.now_s)
            elif attempt.look is not None:
                self.audits.moved(member, attempt.look)

    def _missed(self, member: Member, number: int, why: str) -> None:
        round_ = self.round_table.committed(number)
        if round_ is not None and member.copies[round_.fragment].version <= round_.version:
            self.state_sync.late(member, round_.fragment, why, round_.version)

    def _violation(self, member: Member, why: str) -> None:
        self.round_table.evict(member.peer, RefusalCode.PROTOCOL, why)

    # ------------------------------------------------------------ attempts

    def begin(self, round_: Round, contributors: tuple[Contributor, ...]) -> None:
        """Order a reduction of these contributors, the first one of the round or another one."""
        everybody = [contributor.peer for contributor in contributors]
        wanted = self._receivers(set(everybody), round_.fragment)
        if round_.attempt is None:
            self.routes.disputes.planned(self.context.roster.members)
        adding, receivers = self.routes.together(everybody, wanted)
        if len(adding) < len(everybody):
            contributors = self._without_route(round_, contributors, set(adding))
            if len(adding) < self.round_table.quorum(round_.original_count):
                self.round_table.abort(round_, "too few contributors have a route to one another")
                return
        roster, now_s, before = self.context.roster, self.context.now_s, round_.attempt
        sites = sites_of([member for member in roster.by_number() if member.peer in receivers])
        try:
            plan, estimate = make_plan(
                self.context.history.sizes[round_.fragment],
                adding,
                receivers,
                self._lines(receivers, sites, adding),
                self.context.spec,
                fragment=round_.fragment,
                star_only=before is not None,  # what goes wrong again can be repaired then
                barred=self.audits.barred() | round_.barred,
            )
        except NoReachableOwnerError as error:
            self.round_table.abort(round_, str(error))
            return
        number = 1 if before is None else max(before.number, before.flush_number) + 1
        owners = [run.peer for run in plan.owners for _ in range(run.chunk_count)]
        round_.attempt = Attempt(
            number,
            contributors,
            tuple(receivers),
            owners,
            estimate,
            tuple(site.members for site in plan.sites),
            started_s=now_s,
            moved_s=now_s,
        )
        message = round_.attempt.order = Reduce(
            round=round_.number,
            attempt=number,
            fragment=round_.fragment,
            version=round_.version,
            view=self.context.roster.view_number,
            contributors=contributors,
            receivers=tuple(receivers),
            plan=plan,
        )
        if len(receivers) <= ORDER_KEPT_MAX:
            ready = tuple(round_.ready[each.peer] for each in contributors)
            self.context.record(RoundOrdered(message, round_.at_step, ready))
        for peer in receivers:
            round_.mark(peer, roster.members[peer].name)
            self.context.send(peer, message)

    def _without_route(
        self, round_: Round, contributors: tuple[Contributor, ...], adding: set[str]
    ) -> tuple[Contributor, ...]:
        for contributor in contributors:
            if contributor.peer not in adding:
                why = "it has no route to those who add up"
                round_.declined[contributor.peer] = why
                self.context.announce(
                    EventKind.ROUTE,
                    contributor.peer,
                    f"{self.context.name(contributor.peer)} is left out of round {round_.number}: "
                    f"{why}",
                )
        return tuple(c for c in contributors if c.peer in adding)

    def _lines(
        self, receivers: Sequence[str], sites: Sequence[tuple[str, ...]], adding: Sequence[str]
    ) -> LineCapacities:
        lines = self.bandwidths.lines(receivers, caps_of(self.context.roster), sites, adding)
        return evolve(lines, pair_limits=self.routes.limits(receivers))

    def _receivers(self, adding: set[str], fragment: int) -> tuple[str, ...]:
        """Whoever adds, and everybody who stays and has a use for the result.

        A joiner replays what it gets while it copies; of a fragment that it does not copy yet, or
        cannot, it would be a burden for nothing.
        """
        in_line = self.context.in_line()
        return tuple(
            member.peer
            for member in self.context.roster.by_number()
            if member.peer in adding
            or (
                not (member.draining or member.relay or member.peer in in_line)
                and member.copies[fragment].state is not CopyState.STALE
            )
        )

    # ------------------------------------------------------------ what follows from the facts

    def advance(self, round_: Round) -> bool:
        """Do what the facts call for. True if anything changed; then call again."""
        attempt, now_s = round_.running(), self.context.now_s
        if self._too_few(round_):
            self._abort_for_few(round_)
        elif round_.refused.intersection(attempt.peers()):
            self._rerun(round_, whys(attempt))  # it may be in chunks that are done
        elif not attempt.unreported():
            return self._decide(round_)
        elif attempt.sites and attempt.lost:
            self._rerun(round_, f"a tree cannot be repaired ({whys(attempt)})")
        elif attempt.lost and attempt.ended.intersection(attempt.survivors()):
            self._rerun(round_, whys(attempt))  # they have nothing left that could be repaired
        elif attempt.lost.keys() - attempt.shut:
            self._flush(round_)
        elif attempt.flushing and self._may_repair(attempt):
            self._repair(round_)
        elif now_s >= self._flush_limit_s(attempt):
            self._remove_mute(round_)
        elif now_s >= self._settle_limit_s(attempt):
            self._leave_out_accused(round_)
        elif attempt.inquiry is not None and now_s >= self._answers_limit_s(attempt):
            self._hear_of_waiting(round_)
        elif now_s >= self._lag_limit_s(attempt):
            if not self._inquire(round_, Question.LAG, attempt.unreported()):
                self._leave_behind(attempt)
        elif now_s >= self._stall_limit_s(attempt):
            if not self._inquire(round_, Question.STALL, attempt.survivors()):
                self._stalled(round_)
        else:
            return False
        return True

    def next_deadline_s(self) -> float:
        """When ``advance`` has something to do at the latest, if nothing else happens."""
        limits = [math.inf]
        for round_ in self.round_table.reducing():
            attempt = round_.running()
            if not attempt.unreported():
                # Only auditors are waited for, or who says what it holds.
                limits += [self.audits.due_s(attempt), self._answers_limit_s(attempt)]
                continue
            limits += [
                self._listeners_limit_s(attempt),
                self._flush_limit_s(attempt),
                self._settle_limit_s(attempt),
                self._answers_limit_s(attempt),
                self._lag_limit_s(attempt),
                self._stall_limit_s(attempt),
            ]
        return min(limits)

    def _too_few(self, round_: Round) -> bool:
        survivors = round_.running().survivors()
        return not survivors or len(survivors) < self.round_table.quorum(round_.original_count)

    def _abort_for_few(self, round_: Round) -> None:
        attempt = round_.running()
        self.round_table.abort(
            round_,
            f"{len(attempt.survivors())} of {round_.original_count} contributors are left, "
            f"{self.round_table.quorum(round_.original_count)} are needed: {whys(attempt)}",
        )

    # ------------------------------------------------------------ limits of time

    def _flush_limit_s(self, attempt: Attempt) -> float:
        """Who is needed and does not answer a flush by then is removed."""
        return attempt.flush_s + self.context.spec.membership.deadline_s

    def _listeners_limit_s(self, attempt: Attempt) -> float:
        """Listeners that may hold what is lost have so long to answer a flush."""
        if not attempt.flushing or attempt.unheard():
            return math.inf  # they are not what is waited for
        return attempt.flush_s + self.context.spec.settle_s

    def _settle_limit_s(self, attempt: Attempt) -> float:
        """An accusation that nobody joins and nobody returns has longer to be borne out."""
        if attempt.most_accused() is None:
            return math.inf
        spec = self.context.spec
        alone = self._who_is_out(attempt)[1] is None
        return attempt.accused_s + (spec.link_deadline_s if alone else spec.settle_s)

    def _answers_limit_s(self, attempt: Attempt) -> float:
        """What was said of an attempt is looked at when all have, or by then."""
        if attempt.inquiry is None:
            return math.inf
        if not attempt.unanswered():
            return -math.inf
        return attempt.inquiry.began_s + self.context.spec.settle_s

    def _lag_limit_s(self, attempt: Attempt) -> float:
        """Who needs more than twice the quorum's time (and a deadline) holds everybody up."""
        if attempt.quorum_s is None or self._is_seen_to(attempt):
            return math.inf
        if attempt.adopted:
            return math.inf
        taken_s = attempt.quorum_s - attempt.started_s
        limit_s = attempt.quorum_s + max(self.context.spec.membership.deadline_s, taken_s)
        return max(limit_s, attempt.patience_s)

    def _is_seen_to(self, attempt: Attempt) -> bool:
        """Whether we know already who is in the way, or soon: another limit runs."""
        known = attempt.flushing or attempt.inquiry is not None
        return known or attempt.most_accused() is not None

    def _stall_limit_s(self, attempt: Attempt) -> float:
        if self._is_seen_to(attempt):
            return math.inf
        limit_s = attempt.moved_s + self.context.spec.membership.deadline_s
        return max(limit_s, attempt.patience_s)

    # ------------------------------------------------------------ who is in the way

    def _remove_mute(self, round_: Round) -> None:
        """Somebody shows signs of life, but does not say what it holds."""
        for peer in round_.running().unheard():
            self.round_table.evict(
                peer, RefusalCode.LAGGING, f"it did not answer a flush of round {round_.number}"
            )

    def _who_is_out(self, attempt: Attempt) -> tuple[str, set[str] | None]:
        """Without whom to go on, and who lost it; None: it alone says that it lost somebody."""
        without = {peer: self.routes.without(peer) for peer in attempt.accusers}
        peer = attempt.most_accused(without)
        assert peer is not None
        accusers = attempt.against(peer, without)
        if len(accusers) > 1:
            return peer, accusers
        (accuser,) = accusers
        returned = attempt.against(accuser, {accuser: self.routes.without(accuser)})
        if returned or self._quarrels_more(peer, accuser, attempt):
            return peer, accusers
        return accuser, None

    def _quarrels_more(self, peer: str, other: str, attempt: Attempt) -> bool:
        """Whether it is apart from more of the others; who has failed one may fail the next."""
        counts = self.routes.disputes.counts(attempt.peers(), self.context.now_s)
        return counts[peer] > counts[other]

    def _leave_out_accused(self, round_: Round) -> None:
        """Go on without somebody who is a member as before; its copy is synced again."""
        attempt = round_.running()
        if attempt.ended.intersection(attempt.survivors()):
            self._settle_bad(round_)
            return
        peer, accusers = self._who_is_out(attempt)
        names = sorted(self.context.name(p) for p in accusers or attempt.accused_by(peer))
        if accusers is None or len(accusers) == 1:
            for other in accusers or attempt.accused_by(peer):
                self.routes.disputes.note(peer, other, self.context.now_s)
        others = quoted(", ".join(names))
        if attempt.vain.get(peer) or any(peer in vain for vain in attempt.vain.values()):
            alone, joined = f"it alone waits in vain for {others}", f"kept waiting: {others}"
        else:
            alone, joined = f"it alone finds {others} unreachable", f"unreachable for {others}"
        why = alone if accusers is None else joined
        attempt.lose(peer, f"{self.context.name(peer)}: {why}")
        attempt.missed[peer] = f"it was left out of round {round_.number}: {why}"
        self.context.announce(
            EventKind.ROUTE,
            peer,
            f"{said(self.context.roster.members[peer])} is left out of round {round_.number}: {why}",
        )

    def _settle_bad(self, round_: Round) -> None:
        """Somebody says that an update must not be added, and nobody else does: have others look."""
        attempt = round_.running()
        left = attempt.ended.intersection(attempt.survivors())
        lone = [
            self._part(round_, accuser, accused)
            for accused, accusers in attempt.accusers.items()
            for accuser in sorted(accusers & left)
        ]
        self._rerun(round_, quoted("; ".join(lone)))

    def _part(self, round_: Round, accuser: str, accused: str) -> str:
        """One alone says it of another: have rounds do without this pair for a while."""
        round_.alone.add(accuser)
        lasts_s = self.routes.disputes.note(accuser, accused, self.context.now_s)
        name, other = self.context.name(accuser), self.context.name(accused)
        why = f"only {name} says that what {other} sent must not be added"
        text = f"round {round_.number}: {why}; for {lasts_s:.0f} s rounds do without this pair"
        self.context.announce(EventKind.ROUTE, accuser, text)
        return why

    def _inquire(self, round_: Round, question: Question, asked: Sequence[str]) -> bool:
        """Ask what it is that does not get on; False: they were asked, or it cannot be told."""
        attempt = round_.running()
        if attempt.sites or len(attempt.peers()) < INQUIRY_MIN:
            return False
        if not attempt.begin_inquiry(question, asked, self.context.now_s):
            return False
        for peer in attempt.unanswered():
            self.context.send(peer, Diagnose(round_.number, attempt.number))
        return True

    def _hear_of_waiting(self, round_: Round) -> None:
        """All who were asked have said whom they wait for, or had the time to."""
        attempt, now_s = round_.running(), self.context.now_s
        inquiry = attempt.end_inquiry()
        if inquiry.question is Question.DIFFERENCE:  # somebody has taken its report back
            attempt.inquired.discard(Question.DIFFERENCE)
            return
        left = set(attempt.takes_part(attempt.receivers)) - attempt.lost.keys()
        findings = self._weighed(attempt, waiting(inquiry.told, left, attempt.outcomes))
        for peer, accusers in findings.against.items():
            attempt.vain[peer] = accusers
            for accuser in accusers:
                attempt.accuse(peer, accuser, now_s)
        if findings.against:
            return
        if inquiry.question is Question.STALL and attempt.moved_s > inquiry.began_s:
            attempt.inquired.discard(Question.STALL)  # it goes on; next time it is something else
        if any(is_done(answer) for answer in inquiry.told.values()):
            attempt.patience_s = now_s + self.context.spec.membership.deadline_s

    def _weighed(self, attempt: Attempt, findings: Findings) -> Findings:
        """One word for each voice; plans do without these pairs for a while."""
        voices = voices_of(self.context.roster, attempt.receivers)
        if len(set(voices.values())) > 1:  # else all came by one invite from one line
            findings = findings.by_voice(voices)
        pairs = ((accuser, peer) for peer, each in findings.against.items() for accuser in each)
        for accuser, peer in islice(pairs, DISPUTES_MAX):
            if peer in self.context.roster:
                self.routes.disputes.note(accuser, peer, self.context.now_s)
        return findings

    def _leave_behind(self, attempt: Attempt) -> None:
        why = "it did not finish a reduction that others did"
        for peer in attempt.unreported():
            if attempt.sites:
                # It may be for want of what a leader keeps, and in a tree nobody can be asked.
                attempt.lose(peer, f"{self.context.name(peer)}: {why}")
                attempt.missed[peer] = why
            else:
                self.round_table.evict(peer, RefusalCode.LAGGING, why)

    def _stalled(self, round_: Round) -> None:
        """Nothing moved for a deadline, and nobody was accused."""
        attempt = round_.running()
        round_.stall_count += 1
        survivors, unreported = attempt.survivors(), attempt.unreported()
        reported_count = len(survivors) - len(unreported)
        if 2 * reported_count > len(survivors) or (
            reported_count and round_.stall_count >= STALLS_MAX
        ):
            self._leave_behind(attempt)
        elif round_.stall_count >= STALLS_MAX:
            self.round_table.abort(round_, f"nothing moved in {round_.stall_count} attempts")
        else:
            deadline_s = self.context.spec.membership.deadline_s
            self._rerun(round_, f"nothing moved for {deadline_s:g} s")

    def _rerun(self, round_: Round, why: str) -> None:
        """Begin again with nothing but the inputs."""
        attempt = round_.running()
        if round_.rerun_count >= RERUNS_MAX:
            self.round_table.abort(round_, f"{attempt.number} attempts failed, the last one: {why}")
            return
        left = tuple(c for c in attempt.contributors if c.peer in attempt.survivors())
        round_.rerun_count += 1
        self.round_table.rerun_count += 1
        self.context.announce(
            EventKind.ROUND,
            None,
            f"round {round_.number} starts over with {len(left)} contributors"
            f"{', as a star' if attempt.sites else ''}: {why}",
        )
        round_.turn(RoundEvent.RERUN)
        self.begin(round_, left)

    # ------------------------------------------------------------ flush and repair

    def _flush(self, round_: Round) -> None:
        attempt = round_.running()
        attempt.begin_flush(self.context.now_s)
        message = Flush(round_.number, attempt.flush_number, tuple(attempt.lost))
        for peer in attempt.served():
            self.context.send(peer, message)

    def _may_repair(self, attempt: Attempt) -> bool:
        if attempt.unheard():
            return False
        return self.context.now_s >= self._listeners_limit_s(attempt) or not (
            attempt.may_learn_more()
        )

    def _repair(self, round_: Round) -> None:
        """Everybody has shut out the lost and said what they hold: give out what is missing."""
        attempt = round_.running()
        assignments = plan_repair(
            attempt.owners,
            attempt.lost,
            attempt.survivors(),
            attempt.receivers,
            attempt.held,
            self.routes.apart(attempt.receivers),
        )
        if len(assignments) > OWNER_RUNS_MAX:
            self._rerun(round_, whys(attempt))
            return
        round_.turn(RoundEvent.REPAIR)
        round_.repair_count += 1
        self.round_table.repair_count += 1
        self.context.announce(EventKind.ROUND, None, self._repair_said(round_, assignments))
        attempt.begin_repair(assignments, self.context.now_s)
        self._send_repair(round_, assignments)

    def _repair_said(self, round_: Round, assignments: Sequence[Assignment]) -> str:
        attempt = round_.running()
        lost = ", ".join(self.context.name(peer) for peer in attempt.lost)
        counts: Counter[str] = Counter()
        for assignment in assignments:
            counts[assignment.owner] += assignment.chunk_count
        anew_count = sum(a.chunk_count for a in assignments if a.anew)
        successors = [
            f"{self.context.name(p)} ({n})" for p, n in counts.most_common(HEIRS_SAID_MAX)
        ]
        if len(counts) > len(successors):
            successors.append(f"{len(counts) - len(successors)} more")
        taken = f" by {', '.join(successors)}" if successors else ""
        return (
            f"repaired round {round_.number}: {lost} lost, {counts.total()} of "
            f"{len(attempt.owners)} chunks taken over{taken}, {anew_count} of them added up again, "
            f"nothing else rerun ({whys(attempt)})"
        )

    def _send_repair(self, round_: Round, assignments: tuple[Assignment, ...]) -> None:
        attempt = round_.running()
        message = Repair(round_.number, attempt.number, tuple(attempt.lost), assignments)
        for peer in attempt.served():
            self.context.send(peer, message)

    def _serve_listeners(self, round_: Round, outcome: ReductionOutcome) -> None:
        """Who only listens may lack what a lost owner has not sent: have it spread by others.

        Nothing needs to be flushed: all who are asked hold the result that is being committed.
        """
        attempt = round_.running()
        if attempt.sites:
            return  # who lacks a tree's result is synced again
        having = [p for p in attempt.survivors() if attempt.outcomes.get(p) == outcome]
        waiting = [p for p in attempt.served() if p not in attempt.outcomes]
        if not (having and waiting and attempt.lost.keys() & set(attempt.owners)):
            return
        everything = b"\xff" * ((len(attempt.owners) + 7) // 8)
        held = dict.fromkeys([p for p in attempt.reached() if p not in waiting], everything)
        assignments = plan_repair(
            attempt.owners,
            attempt.lost,
            having,
            attempt.receivers,
            held,
            self.routes.apart(attempt.receivers),
        )
        if len(assignments) > OWNER_RUNS_MAX:
            return  # they are synced again, as everybody who misses a result
        outcomes = dict(attempt.outcomes)
        attempt.begin_flush(self.context.now_s)
        attempt.begin_repair(assignments, self.context.now_s)
        attempt.outcomes = outcomes
        self._send_repair(round_, assignments)

    # ------------------------------------------------------------ the decision

    def _decide(self, round_: Round) -> bool:
        """Every survivor has reported. False: auditors are waited for."""
        attempt = round_.running()
        if attempt.inquiry is not None and attempt.inquiry.question is not Question.DIFFERENCE:
            attempt.end_inquiry()  # nobody waits any more
        if attempt.inquiry is not None:
            if self.context.now_s < self._answers_limit_s(attempt):
                return False
            self._hear_of_results(attempt)
        elif attempt.disagrees() and self._inquire(
            round_, Question.DIFFERENCE, attempt.survivors()
        ):
            return True
        outcome = attempt.agreed(self.context.roster)
        if outcome is None:
            self._disagreed(round_)
            return True
        if self._refuse_overlong(round_):
            return True
        why = self.audits.advance(round_, outcome)
        if why:
            self._rerun(round_, why)
            return True
        if attempt.look is not None and not attempt.look.over:
            return False
        self._serve_listeners(round_, outcome)
        self._commit(round_, outcome)
        return True

    def _hear_of_results(self, attempt: Attempt) -> None:
        """Whose chunks differ; it is lost to the attempt if two or more say so."""
        told = attempt.end_inquiry().told
        findings = self._weighed(attempt, differing(told, set(attempt.makers)))
        attempt.two_faced = findings.culprits
        attempt.misled = {
            accuser: peer for peer, accusers in findings.against.items() for accuser in accusers
        }

    def _disagreed(self, round_: Round) -> None:
        attempt = round_.running()
        if not attempt.two_faced:
            self.round_table.abort(
                round_, "the contributors hold different results and no majority"
            )
            return
        self._name_two_faced(round_)
        for peer in attempt.two_faced:
            attempt.lose(peer, f"{self.context.name(peer)} gave others different results")
        if self._too_few(round_):
            self._abort_for_few(round_)
        else:
            names = ", ".join(self.context.name(peer) for peer in attempt.two_faced)
            self._rerun(round_, f"what {names} made came to others differently")

    def _name_two_faced(self, round_: Round) -> None:
        attempt = round_.running()
        for peer in attempt.two_faced:
            if peer not in attempt.lost:  # else somebody else has spread what it made
                text = f"{self.context.name(peer)} gave others different results"
                self.context.announce(EventKind.BAD, peer, f"round {round_.number}: {text}")

    def _refuse_overlong(self, round_: Round) -> bool:
        """Whether somebody sent more than it had said; what one alone says is looked at again."""
        overlong = self.contribution_checks.overlong(round_)
        lone = []
        for found in overlong:
            if not found.accuser:
                self.round_table.refuse_update(round_, found.peer, found.why)
            elif not self._call_bad(round_, found.peer, found.accuser, found.why):
                lone.append(self._part(round_, found.accuser, found.peer))
        if lone and not round_.refused.intersection(round_.running().peers()):
            self._rerun(round_, quoted("; ".join(lone)))
        return bool(overlong)

    def _commit(self, round_: Round, outcome: ReductionOutcome) -> None:
        attempt = round_.running()
        commit = Commit(
            round=round_.number,
            attempt=attempt.number,
            fragment=round_.fragment,
            version=round_.version,
            at_step=round_.at_step,
            contributors=attempt.contributors,
            digest=outcome.digest,
            manifest=outcome.manifest,
        )
        self._name_two_faced(round_)
        self.context.record(RoundCommitted(commit))
        round_.digest = outcome.digest
        round_.went_in = went_in(commit)
        wrong = dict(attempt.missed)
        for peer, reported in attempt.outcomes.items():
            if reported != outcome:
                kind, why = EventKind.BAD, "differs from the one committed"
                if peer in attempt.misled:
                    owner = self.context.name(attempt.misled[peer])
                    kind, why = EventKind.SYNC, f"is not what {owner} gave others"
                wrong[peer] = f"its result of round {round_.number} {why}"
                text = f"{self.context.name(peer)}: {wrong[peer]}; it is synced again"
                self.context.announce(kind, peer, text)
        for peer in attempt.reached():
            self.context.send(peer, commit)
        self.state_sync.committed(commit, attempt.reached(), wrong)
        self.round_table.commit(round_, format_outcome(round_))


def whys(attempt: Attempt) -> str:
    """Why the lost are lost."""
    return "; ".join(attempt.lost.values())


def format_outcome(round_: Round) -> str:
    """The outcome of a round, for its record."""
    assert round_.went_in is not None
    text = format_committed(round_.went_in)
    for what, count in (("repaired", round_.repair_count), ("run again", round_.rerun_count)):
        if count:
            text += f", {what} {'once' if count == 1 else f'{count} times'}"
    return text
