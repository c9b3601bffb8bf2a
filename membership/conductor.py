"""Runs the rounds: opens them when they are due, reruns them over deaths, commits them.

    tick, messages --> facts in Round and Attempt --> advance: what follows from the facts?

Messages only add facts. ``advance`` looks at the facts and acts, so it does not matter in which
order a death, an accusation and a late result arrive. Nobody waits for the dead: a closed connection
counts at once, an accused that still looks alive has ``settle_s``, an attempt in which nothing moves
has ``deadline_s``, and who finishes long after the quorum did is left behind.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable

from ..protocol.messages import (
    MEMBERS_MAX,
    TEXT_CHARS_MAX,
    Abort,
    Commit,
    Contributor,
    FragmentHead,
    Measured,
    NotReady,
    Open,
    Ready,
    Reduce,
    Reduced,
    ReduceFailed,
    RefusalCode,
)
from .bandwidth import Bandwidth, Bandwidths
from .context import Context, quoted, said
from .effects import EventKind
from .journal import RoundCommitted, RoundNumbered
from .pace import Backoff, scheduled
from .plan import make_plan
from .roster import CopyState, Member, can_contribute
from .rounds import Attempt, Phase, Round, Turn, answered, gate_norms, quorum_count
from .shares import NobodyReachableError
from .syncing import Syncing

ROUNDS_IN_FLIGHT_MAX = 1  # rounds that are open or reducing at a time
ATTEMPTS_MAX = 8  # then the round is aborted and a new one asks everybody again
STALLS_MAX = 2  # attempts of a round in which nothing moved and nobody could be blamed
BAD_MAX = 3  # refused contributions in a row (no commit in between) before the peer is removed
PAST_ROUNDS_MAX = 50  # kept for the dashboard and for answers that come late

Evict = Callable[[str, RefusalCode, str], None]


class Conductor:
    """All rounds of a run.

    Args:
      evict: removes a member from the roster; calls back ``removed``.
    """

    def __init__(self, context: Context, syncing: Syncing, evict: Evict) -> None:
        self.context = context
        self.syncing = syncing
        self.evict = evict
        self.rounds: dict[int, Round] = {}  # open or reducing, by number
        self.past: deque[Round] = deque(maxlen=PAST_ROUNDS_MAX)
        self.backoff = Backoff()
        self.abort_count = 0
        self.bad_counts: dict[str, int] = {}  # refused contributions since the last commit with it
        self.bandwidths = Bandwidths()

    # ------------------------------------------------------------ facts

    def ready(self, member: Member, message: Ready) -> None:
        round_ = self.rounds.get(message.round)
        if round_ is None or round_.phase is not Phase.OPEN or member.peer not in round_.invited:
            return
        if member.peer in round_.ready:
            return
        head = FragmentHead(round_.fragment, round_.version, message.state_root)
        self.syncing.report(member, head)
        round_.declined.pop(member.peer, None)
        if message.weight == 0:
            round_.declined[member.peer] = "it has trained nothing since its last sync"
        else:
            round_.ready[member.peer] = message

    def not_ready(self, member: Member, message: NotReady) -> None:
        round_ = self.rounds.get(message.round)
        if round_ is None or round_.phase is not Phase.OPEN or member.peer not in round_.invited:
            return
        round_.ready.pop(member.peer, None)
        round_.declined[member.peer] = quoted(message.reason)

    def trainer_lost(self, member: Member) -> None:
        """What it has posted stays good; what it has not posted will not come."""
        for round_ in self.rounds.values():
            if member.peer not in round_.ready:
                round_.invited.discard(member.peer)
                round_.declined.pop(member.peer, None)

    def reduced(self, member: Member, message: Reduced) -> None:
        attempt = self._attempt(message.round, message.attempt)
        if attempt is None:
            self._reduced_late(member, message)
            return
        if member.peer not in attempt.reached():
            return
        attempt.digests[member.peer] = message.digest
        if member.peer in attempt.peers():
            attempt.moved_s = self.context.now_s
            reported_count = len(attempt.survivors()) - len(attempt.unreported())
            if attempt.quorum_s is None and reported_count >= self._quorum(
                len(attempt.contributors)
            ):
                attempt.quorum_s = self.context.now_s

    def reduce_failed(self, member: Member, message: ReduceFailed) -> None:
        attempt = self._attempt(message.round, message.attempt)
        if attempt is None:
            self._missed(member, message.round, quoted(message.reason))
            return
        peers = attempt.peers()
        if member.peer not in peers:
            attempt.missed[member.peer] = quoted(message.reason)
            return
        attempt.digests.pop(member.peer, None)
        named = [peer for peer in message.accused if peer in peers and peer != member.peer]
        others_count = len(peers) - 1
        if not named or (message.bad and others_count > 1 and 2 * len(named) > others_count):
            # Blaming nobody, or most of the others, says something about the one who speaks.
            attempt.lost[member.peer] = f"it cannot finish the round: {quoted(message.reason)}"
            self.context.announce(
                EventKind.ROUND, member.peer, f"{said(member)}: {attempt.lost[member.peer]}"
            )
        elif message.bad:
            for peer in named:
                self._refuse_update(self.rounds[message.round], peer, quoted(message.reason))
        else:
            attempt.accused_s = min(attempt.accused_s, self.context.now_s)
            for peer in named:
                attempt.accusers.setdefault(peer, set()).add(member.peer)

    def moved(self, member: Member) -> None:
        """Bulk bytes leave or reach the member: what it takes part in is not stalled."""
        for round_ in self.rounds.values():
            if round_.phase is Phase.REDUCING and member.peer in round_.running().unreported():
                round_.running().moved_s = self.context.now_s

    def measured(self, member: Member, message: Measured) -> None:
        """What its lines carried; the next plan knows it."""
        self.bandwidths.measured(member.peer, message)

    def removed(self, peer: str, why: str) -> None:
        for round_ in self.rounds.values():
            round_.forget(peer, why)

    def excluded(self, member: Member, fragment: int) -> bool:
        """Whether a reduction of the fragment runs whose result the member will not get."""
        return any(
            round_.phase is Phase.REDUCING
            and round_.fragment == fragment
            and member.peer not in round_.running().reached()
            for round_ in self.rounds.values()
        )

    def awaits(self, peer: str) -> bool:
        """Whether a round is to add what this member has posted."""
        return any(peer in round_.ready for round_ in self._in(Phase.OPEN))

    def adds(self, peer: str) -> bool:
        """Whether a reduction that runs needs this member."""
        return any(peer in round_.running().survivors() for round_ in self._in(Phase.REDUCING))

    def _in(self, phase: Phase) -> list[Round]:
        return [round_ for round_ in self.rounds.values() if round_.phase is phase]

    def _attempt(self, number: int, attempt_number: int) -> Attempt | None:
        round_ = self.rounds.get(number)
        if round_ is None or round_.phase is not Phase.REDUCING:
            return None
        attempt = round_.running()
        return attempt if attempt.number == attempt_number else None

    def _reduced_late(self, member: Member, message: Reduced) -> None:
        """A receiver's digest that comes after the decision: it may have another result."""
        for round_ in self.past:
            if (
                round_.number == message.round
                and round_.phase is Phase.COMMITTED
                and round_.running().number == message.attempt
                and round_.digest != message.digest
            ):
                self._missed(member, message.round, "its result differs from the one committed")

    def _missed(self, member: Member, number: int, why: str) -> None:
        for round_ in self.past:
            if round_.number == number and round_.phase is Phase.COMMITTED:
                copy = member.copies[round_.fragment]
                if copy.version <= round_.version:
                    self.syncing.late(member, round_.fragment, why)

    def _refuse_update(self, round_: Round, peer: str, why: str) -> None:
        """Announce, tell and count a contribution that must not be added."""
        count = self.bad_counts.get(peer, 0) + 1
        self.bad_counts[peer] = count
        if len(self.bad_counts) > MEMBERS_MAX:
            del self.bad_counts[next(iter(self.bad_counts))]
        if round_.attempt is not None:
            round_.refused.add(peer)
            round_.attempt.lost[peer] = f"its update was refused: {why}"
        round_.ready.pop(peer, None)
        round_.declined[peer] = f"refused: {why}"
        name = self.context.name(peer)
        text = f"the update of {name} for round {round_.number} was refused: {why}"
        self.context.announce(EventKind.BAD, peer, text)
        self.context.tell(peer, text)
        if count >= BAD_MAX:
            self.evict(peer, RefusalCode.PROTOCOL, f"{count} updates in a row were refused: {why}")

    # ------------------------------------------------------------ what follows from them

    def advance(self) -> bool:
        """Do what the facts call for. True if anything changed; then call again."""
        for round_ in list(self.rounds.values()):
            step = self._advance_open if round_.phase is Phase.OPEN else self._advance_reducing
            if step(round_):
                return True
        return self._open_next()

    def _quorum(self, count: int) -> int:
        members = self.context.spec.membership
        return max(quorum_count(members.quorum, count), members.min_members)

    def contributors(self) -> list[Member]:
        places = self.context.history.places
        return [m for m in self.context.roster.by_number() if can_contribute(m, places)]

    def _open_next(self) -> bool:
        history, spec = self.context.history, self.context.spec
        if (
            not history.founded
            or history.finished
            or history.paused
            or len(self.rounds) >= ROUNDS_IN_FLIGHT_MAX
            or (spec.run.rounds and history.commit_count >= spec.run.rounds)
            or self.context.now_s < self.backoff.until_s
            or self.syncing.missing  # contributors of before the restart are on their way back
            or len(self.contributors()) < spec.membership.min_members
        ):
            return False
        index = history.commit_count
        fragment, at_step = scheduled(index, spec.diloco.sync_every, history.fragment_count)
        number = history.next_round
        self.context.record(RoundNumbered(number))
        self.rounds[number] = Round(
            number=number,
            index=index,
            fragment=fragment,
            version=history.versions[fragment],
            at_step=at_step,
            opened_s=self.context.now_s,
        )
        return True

    def expected(self, round_: Round) -> list[str]:
        """Contributors that the round waits for, or has already heard from, by number."""
        able = {member.peer for member in self.contributors()}
        return [
            member.peer
            for member in self.context.roster.by_number()
            if member.peer in round_.invited
            and (member.peer in able or member.peer in round_.ready)
        ]

    def _invite(self, round_: Round) -> None:
        for member in self.contributors():
            if member.peer not in round_.invited:
                round_.invited.add(member.peer)
                self.context.send(
                    member.peer,
                    Open(round_.number, round_.fragment, round_.version, round_.at_step),
                )
        for peer in list(round_.invited):
            invited = self.context.roster.get(peer)
            if invited is None or not invited.in_sync:
                # Its update was made against another state; once it is healed it is asked anew.
                round_.forget(peer, "")

    def _advance_open(self, round_: Round) -> bool:
        self._invite(round_)
        expected = self.expected(round_)
        ready = [peer for peer in expected if peer in round_.ready]
        needed = self._quorum(len(expected))
        if not expected:
            self._abort(round_, "no contributor is left")
            return True
        if len(ready) < needed:
            round_.quorum_s = None
            if answered(round_, expected):
                self._abort(round_, self._shortage(round_, len(ready), len(expected), needed))
                return True
            return False
        if round_.quorum_s is None:
            round_.quorum_s = self.context.now_s
        root = self.syncing.decide(round_.fragment, round_.version)
        limit_s = round_.quorum_s + self.context.spec.membership.grace_s
        if (root and answered(round_, expected)) or self.context.now_s >= limit_s:
            self._close(round_, ready, len(expected))
            return True
        return False

    def _shortage(self, round_: Round, ready: int, expected: int, needed: int) -> str:
        whys = [f"{self.context.name(p)}: {why}" for p, why in sorted(round_.declined.items())]
        return f"{ready} of {expected} contributors are ready, {needed} are needed" + (
            f" ({'; '.join(whys[:5])})" if whys else ""
        )

    def _close(self, round_: Round, ready: list[str], expected_count: int) -> None:
        self.syncing.decide(round_.fragment, round_.version, force=True)
        for peer in ready:
            if self._copy_state(peer, round_.fragment) is not CopyState.HELD:
                # The root was agreed only now and this one differs. It will be healed; the round
                # is looked at again without it.
                round_.forget(peer, "")
                ready = [other for other in ready if other != peer]
                self.syncing.settle(self.excluded)
        if any(peer not in round_.ready for peer in ready) or len(ready) < self._quorum(
            expected_count
        ):
            return
        scales, refused = gate_norms({peer: round_.ready[peer].norm for peer in ready})
        messages = dict(round_.ready)
        for peer, why in refused.items():
            self._refuse_update(round_, peer, why)
        contributors = tuple(
            Contributor(peer, messages[peer].weight, scales[peer])
            for peer in ready
            if peer in scales and peer in self.context.roster
        )
        needed = self._quorum(expected_count)
        if len(contributors) < needed:
            self._abort(round_, self._shortage(round_, len(contributors), expected_count, needed))
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
        for peer in round_.invited - {contributor.peer for contributor in contributors}:
            round_.declined.setdefault(peer, "it was not ready in time")
        round_.turn(Turn.CLOSE)
        round_.closed_s = self.context.now_s
        round_.original_count = len(contributors)
        self._start_attempt(round_, contributors)

    def _copy_state(self, peer: str, fragment: int) -> CopyState:
        member = self.context.roster.get(peer)
        return member.copies[fragment].state if member else CopyState.STALE

    def _start_attempt(self, round_: Round, contributors: tuple[Contributor, ...]) -> None:
        receivers = self._receivers({contributor.peer for contributor in contributors})
        now_s = self.context.now_s
        try:
            plan, estimate = make_plan(
                self.context.history.sizes[round_.fragment],
                [contributor.peer for contributor in contributors],
                receivers,
                self.bandwidths.lines(receivers, self._caps()),
                self.context.spec,
            )
        except NobodyReachableError as error:
            self._abort(round_, str(error))
            return
        number = 1 if round_.attempt is None else round_.attempt.number + 1
        round_.attempt = Attempt(
            number, contributors, receivers, estimate, started_s=now_s, moved_s=now_s
        )
        message = Reduce(
            round=round_.number,
            attempt=number,
            fragment=round_.fragment,
            version=round_.version,
            view=self.context.roster.view_number,
            contributors=contributors,
            receivers=receivers,
            plan=plan,
        )
        for peer in receivers:
            self.context.send(peer, message)

    def _caps(self) -> dict[str, Bandwidth]:
        """What the members' persons allow them to carry."""
        return {
            member.peer: Bandwidth(
                member.upload_bytes_per_s or math.inf, member.download_bytes_per_s or math.inf
            )
            for member in self.context.roster
            if member.upload_bytes_per_s or member.download_bytes_per_s
        }

    def _receivers(self, adding: set[str]) -> tuple[str, ...]:
        """Whoever adds, and everybody who stays: a joiner replays what it gets from now on."""
        return tuple(
            member.peer
            for member in self.context.roster.by_number()
            if member.peer in adding or not (member.draining or member.relay)
        )

    def _advance_reducing(self, round_: Round) -> bool:
        attempt = round_.running()
        tainted = bool(round_.refused.intersection(attempt.peers()))
        if not attempt.survivors():
            self._abort(round_, "no contributor is left")
        elif not tainted and not attempt.unreported():
            digest = attempt.agreed()
            if digest is None:
                self._abort(round_, "the contributors hold different results and no majority")
            else:
                self._commit(round_, digest)
        elif attempt.lost:
            self._rerun(round_, "; ".join(attempt.lost.values()))
        elif self.context.now_s >= attempt.accused_s + self.context.spec.settle_s:
            self._remove_accused(round_)
        elif self.context.now_s >= self._lag_limit_s(attempt):
            self._leave_behind(attempt)
        elif self.context.now_s >= self._stall_limit_s(attempt):
            self._stalled(round_)
        else:
            return False
        return True

    def _remove_accused(self, round_: Round) -> None:
        attempt = round_.running()
        peer = attempt.most_accused()
        assert peer is not None  # an accused that is lost leads to a rerun before we come here
        accusers = ", ".join(sorted(self.context.name(p) for p in attempt.accusers[peer]))
        self.evict(
            peer,
            RefusalCode.LAGGING,
            f"unreachable in round {round_.number} for {quoted(accusers)}",
        )

    def _lag_limit_s(self, attempt: Attempt) -> float:
        """Who needs more than twice the quorum's time (and a deadline) holds everybody up."""
        if attempt.quorum_s is None:
            return math.inf
        taken_s = attempt.quorum_s - attempt.started_s
        return attempt.quorum_s + max(self.context.spec.membership.deadline_s, taken_s)

    def _stall_limit_s(self, attempt: Attempt) -> float:
        if attempt.accusers:
            return math.inf  # we know already who is in the way; ``settle_s`` runs
        return attempt.moved_s + self.context.spec.membership.deadline_s

    def _leave_behind(self, attempt: Attempt) -> None:
        for peer in attempt.unreported():
            self.evict(peer, RefusalCode.LAGGING, "it did not finish a reduction that others did")

    def _stalled(self, round_: Round) -> None:
        """Nothing moved for a deadline, and nobody was accused."""
        attempt = round_.running()
        round_.stall_count += 1
        survivors, waiting = attempt.survivors(), attempt.unreported()
        reported_count = len(survivors) - len(waiting)
        if 2 * reported_count > len(survivors) or (
            reported_count and round_.stall_count >= STALLS_MAX
        ):
            self._leave_behind(attempt)
        elif round_.stall_count >= STALLS_MAX:
            self._abort(round_, f"nothing moved in {round_.stall_count} attempts")
        else:
            deadline_s = self.context.spec.membership.deadline_s
            self._rerun(round_, f"nothing moved for {deadline_s:g} s")

    def _rerun(self, round_: Round, why: str) -> None:
        attempt = round_.running()
        left = tuple(c for c in attempt.contributors if c.peer in attempt.survivors())
        needed = self._quorum(round_.original_count)
        if len(left) < needed:
            self._abort(
                round_,
                f"{len(left)} of {round_.original_count} contributors are left, "
                f"{needed} are needed: {why}",
            )
        elif attempt.number >= ATTEMPTS_MAX:
            self._abort(round_, f"{attempt.number} attempts failed, the last one: {why}")
        else:
            self.context.announce(
                EventKind.ROUND,
                None,
                f"round {round_.number} starts over with {len(left)} contributors: {why}",
            )
            round_.turn(Turn.RERUN)
            self._start_attempt(round_, left)

    # ------------------------------------------------------------ endings

    def _commit(self, round_: Round, digest: bytes) -> None:
        attempt = round_.running()
        commit = Commit(
            round=round_.number,
            attempt=attempt.number,
            fragment=round_.fragment,
            version=round_.version,
            at_step=round_.at_step,
            contributors=attempt.contributors,
            digest=digest,
        )
        self.context.record(RoundCommitted(commit))
        round_.turn(Turn.AGREE)
        round_.digest = digest
        wrong = dict(attempt.missed)
        for peer, reported in attempt.digests.items():
            if reported != digest:
                wrong[peer] = f"its result of round {round_.number} differs from the one committed"
                text = f"{self.context.name(peer)}: {wrong[peer]}; it is synced again"
                self.context.announce(EventKind.BAD, peer, text)
        for peer in attempt.reached():
            self.context.send(peer, commit)
        self.syncing.committed(commit, attempt.reached(), wrong)
        for contributor in attempt.contributors:
            self.bad_counts.pop(contributor.peer, None)
        self.backoff.committed()
        self._end(round_, f"committed with {len(attempt.contributors)} contributors")

    def _abort(self, round_: Round, reason: str) -> None:
        reason = reason[:TEXT_CHARS_MAX]
        told = set(round_.invited)
        if round_.attempt is not None:
            told.update(round_.attempt.reached())
        for member in self.context.roster.by_number():
            if member.peer in told:
                self.context.send(member.peer, Abort(round_.number, reason))
        round_.turn(Turn.VOID)
        self.abort_count += 1
        self.backoff.aborted(self.context.now_s)
        self.context.announce(EventKind.ROUND, None, f"round {round_.number} was aborted: {reason}")
        self._end(round_, reason)

    def _end(self, round_: Round, outcome: str) -> None:
        round_.outcome = outcome
        round_.ended_s = self.context.now_s
        del self.rounds[round_.number]
        self.past.append(round_)

    def next_deadline_s(self) -> float:
        spec = self.context.spec
        deadlines = [math.inf]
        for round_ in self.rounds.values():
            if round_.phase is Phase.OPEN:
                if round_.quorum_s is not None:
                    deadlines.append(round_.quorum_s + spec.membership.grace_s)
            else:
                attempt = round_.running()
                deadlines += [
                    attempt.accused_s + spec.settle_s,
                    self._stall_limit_s(attempt),
                    self._lag_limit_s(attempt),
                ]
        if not self.rounds and self.backoff.until_s > self.context.now_s:
            deadlines.append(self.backoff.until_s)
        return min(deadlines)
