"""Accusations: a member says that another one is unreachable, or sends what must not be added.

*A member's word is no proof.* An update is refused on the word of ``ACCUSERS_MIN`` members. The
word of one costs the accused at most the round, and plans avoid this pair for a while (see
``disputes``). If one member says that an update must not be added, the round is run again without
the pair: if it is true, the next owner says the same. A member that says it again in that round,
and alone again, or of a member that has sent it nothing, is left out of the round. With two
contributors there is no third that could tell, and no plan without the pair: the round is aborted.

If two members have lost each other, and no others, only the link between them has failed. The round
goes on without one of them. It stays a member and is synced again; plans avoid the pair until it
has a link again (see ``routes``). No member is removed because others cannot reach it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

from attrs import frozen

from ....protocol.messages import ReduceFailed
from ...shared.event_kind import EventKind
from ..routes.routes import Routes
from ..state.context import Context, format_member, quoted
from ..state.roster import Member
from ..state.voting_blocs import voices_of
from .attempt import Attempt
from .round import Round
from .round_table import RoundTable

# Accusers of one member. What one alone says of another may be its own fault, or a lie.
ACCUSERS_MIN = 2


@frozen
class Exclusion:
    """A member that an attempt goes on without because a link has failed."""

    peer: str
    others: Collection[str]  # the members that accuse it; if ``alone``, those that it accuses
    alone: bool  # it is the only accuser of ``others``, and is not accused itself


class Accusations:
    """Weighs accusations in rounds that are reducing."""

    def __init__(self, context: Context, round_table: RoundTable, routes: Routes) -> None:
        self.context = context
        self.round_table = round_table
        self.routes = routes

    def contributor_failed(self, member: Member, message: ReduceFailed, attempt: Attempt) -> None:
        """Note that a contributor cannot finish the reduction, and whom it accuses."""
        attempt.outcomes.pop(member.peer, None)
        named = [peer for peer in attempt.takes_part(message.accused) if peer != member.peer]
        others_count = len(attempt.peers()) - 1
        bad = message.bad and bool(named)
        if bad and others_count > 1 and 2 * len(named) > others_count:
            named = []
        elif bad:
            named = self._believed(member.peer, named, message.round)
        if not named:
            # An accusation of none, of most others or of an impossible member is about the accuser.
            why = f"it cannot finish the round: {quoted(message.reason)}"
            attempt.lose(member.peer, why)
            attempt.missed[member.peer] = why  # it is alive, and is synced again afterwards
            self.context.announce(EventKind.ROUND, member.peer, f"{format_member(member)}: {why}")
            return
        if bad:
            attempt.blame.ended.add(member.peer)
        for peer in named:
            attempt.blame.accuse(peer, member.peer, self.context.now_s)
            if bad and peer in attempt.peers():
                round_ = self.round_table.rounds[message.round]
                self.call_bad(round_, peer, member.peer, quoted(message.reason))

    # ------------------------------------------------------------ updates that must not be added

    def _believed(self, accuser: str, named: Sequence[str], number: int) -> list[str]:
        """Return the named members that can have sent the accuser anything.

        A round is run again on a lone accuser's word once; the second time nothing is believed.
        """
        round_ = self.round_table.rounds[number]
        attempt = round_.running()
        if accuser in round_.distrust.alone:
            return []
        return [peer for peer in named if attempt.gives(peer, accuser)]

    def call_bad(self, round_: Round, peer: str, accuser: str, why: str) -> bool:
        """Note that a member calls a contribution bad, and refuse it if enough members do.

        Returns:
          True if the update is refused.
        """
        accusers = round_.distrust.called_bad.setdefault(peer, set())
        accusers.add(accuser)
        others = [other for other in round_.running().peers() if other != peer]
        voices = voices_of(self.context.roster, {*others, *accusers})
        # Of several accusers that came by one invite from one line only one counts, unless all did.
        needed = min(ACCUSERS_MIN, len({voices[other] for other in others if other in voices}))
        heard = [voices[each] for each in accusers if each in voices]
        if len(heard) < ACCUSERS_MIN or len(set(heard)) < needed:
            return False
        round_.distrust.alone -= accusers
        if peer not in round_.distrust.refused:
            self.round_table.refuse_update(round_, peer, why)
        return True

    def keep_apart(self, round_: Round, accuser: str, accused: str) -> str:
        """Have plans avoid a pair for a while: one member alone calls the other's update bad.

        Returns:
          A sentence about it: why the round is run again.
        """
        round_.distrust.alone.add(accuser)
        lasts_s = self.routes.disputes.note(accuser, accused, self.context.now_s)
        name, other = self.context.name(accuser), self.context.name(accused)
        why = f"only {name} says that what {other} sent must not be added"
        text = f"round {round_.number}: {why}; for {lasts_s:.0f} s rounds do without this pair"
        self.context.announce(EventKind.ROUTE, accuser, text)
        return why

    # ------------------------------------------------------------ links that have failed

    def limit_s(self, attempt: Attempt) -> float:
        """Return when the most accused member is left out.

        A single accusation that is not returned gets more time to be confirmed.
        """
        exclusion = self._exclusion(attempt)
        if exclusion is None:
            return math.inf
        spec = self.context.spec
        return attempt.blame.since_s + (spec.link_deadline_s if exclusion.alone else spec.settle_s)

    def _exclusion(self, attempt: Attempt) -> Exclusion | None:
        """Return the member to go on without; None if none is accused."""
        without = {peer: self.routes.without(peer) for peer in attempt.blame.accusers}
        peer = attempt.blame.most_accused(without)
        if peer is None:
            return None
        accusers = attempt.blame.against(peer, without)
        if len(accusers) > 1:
            return Exclusion(peer, accusers, alone=False)
        (accuser,) = accusers
        returned = attempt.blame.against(accuser, {accuser: self.routes.without(accuser)})
        if returned or self._disputes_more(peer, accuser, attempt):
            return Exclusion(peer, accusers, alone=False)
        return Exclusion(accuser, attempt.blame.accused_by(accuser), alone=True)

    def _disputes_more(self, peer: str, other: str, attempt: Attempt) -> bool:
        """Return whether plans avoid more pairs of the one: it may fail the next member, too."""
        counts = self.routes.disputes.counts(attempt.peers(), self.context.now_s)
        return counts[peer] > counts[other]

    def resolve(self, round_: Round) -> str:
        """Leave the most accused member out of the attempt; its copy is synced again.

        Returns:
          Why the round must be run again instead: a lone accuser calls an update bad, and other
          owners are to check it. Otherwise empty.
        """
        attempt = round_.running()
        ended = attempt.blame.ended.intersection(attempt.survivors())
        if ended:
            lone = [
                self.keep_apart(round_, accuser, accused)
                for accused, accusers in attempt.blame.accusers.items()
                for accuser in sorted(accusers & ended)
            ]
            return quoted("; ".join(lone))
        exclusion = self._exclusion(attempt)
        assert exclusion is not None
        self._leave_out(round_, exclusion)
        return ""

    def _leave_out(self, round_: Round, exclusion: Exclusion) -> None:
        attempt, peer = round_.running(), exclusion.peer
        if exclusion.alone or len(exclusion.others) == 1:
            for other in sorted(exclusion.others):
                self.routes.disputes.note(peer, other, self.context.now_s)
        others = quoted(", ".join(sorted(self.context.name(other) for other in exclusion.others)))
        vain = attempt.blame.vain
        if vain.get(peer) or any(peer in waiting for waiting in vain.values()):
            alone, joined = f"it alone waits in vain for {others}", f"it kept {others} waiting"
        else:
            alone, joined = f"it alone cannot reach {others}", f"{others} cannot reach it"
        why = alone if exclusion.alone else joined
        attempt.lose(peer, f"{self.context.name(peer)}: {why}")
        attempt.missed[peer] = f"it was left out of round {round_.number}: {why}"
        text = f"is left out of round {round_.number}: {why}"
        self.context.announce_peer(EventKind.ROUTE, peer, text)
