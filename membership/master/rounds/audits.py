"""Audits: before a result is committed, other members add some of its chunks up again.

    all report one result --draw--> chunks with checkers --all equal, or none can check--> commit
                                    |   |   '-- a checker is lost, silent or lacks bytes--> another
                                    |   '-- a sum differs, or two checkers get nothing of a member
                                    '-- of an owner that is lost                --> run again

Chunks and checkers follow from a secret of this master and the number of the attempt, so an owner
cannot know them before its results are out.

No word of a member is proof. If a checker's sum differs, one of a few *suspects* lies: the owner,
the checker, or the contributor that has sent the two different bytes, as the owner says. The round
is run again with other owners than these. The owner and the contributor are *named*. A member
leaves the run if it is all that the suspects of at least two contradictions have in common in which
it is named. So a single liar gets no other member removed: it is itself among the suspects of all
of them. Members of one voting bloc count as one. Until then a member that two checkers have named
owns no chunks. A checker that has contradicted ``ALONE_MAX`` owners alone checks no more, and no
member checks an owner twice after it has contradicted it: so false words end.

An owner that lies in ``m`` chunks of each of ``k`` rounds is not contradicted with probability
``(1 - p) ** (k m)``, and leaves after ``2 / (1 - (1 - p) ** m)`` rounds with a lie on average.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections import deque
from collections.abc import Iterable, Iterator, Mapping

from attrs import frozen

from ....protocol import messages as m
from ...shared.event_kind import EventKind
from ..routes.routes import Routes
from ..state.context import Context, quoted
from ..state.journal import PeerRevoked
from ..state.roster import Member
from ..state.voting_blocs import Voice, voices_of
from .attempt import Attempt, Audit, Check, ReductionOutcome
from .round import Round
from .round_table import RoundTable

CHECKED_MIN = 3  # contributors; of two, no third can tell which one is wrong
CHECKERS_MAX = 3  # of one chunk, until it counts as one that cannot be checked
ALONE_MAX = 2  # owners that a checker may contradict alone; faulty memory can cause one
CONTRADICTED = "checks of sums contradict it"
CONTRADICTIONS_MAX = 1_000  # that are remembered; honest runs have none
AUDIT_DEADLINES_MAX = 4  # of an audit, in addition to the time that the reduction took
_DRAW = struct.Struct(">16sQQ")
_SHARE = struct.Struct(">QQ")  # for each chunk: whether it is drawn, and its checker
_TRANSFER = struct.Struct(">16sQQQ")


@frozen
class SumContradiction:
    """A checker's word that an owner's sum is wrong."""

    round: int
    owner: str
    checker: str
    # The owner, the checker, and a contributor if there is one; each with its voting bloc.
    suspects: Mapping[str, Voice]

    def names(self, peer: str) -> bool:
        """Return whether a member is a suspect for another reason than that it has checked."""
        return peer in self.suspects and peer != self.checker

    def beside(self, peer: str) -> set[str | Voice]:
        """Return the other suspects, and their voting blocs."""
        others = [other for other in self.suspects if other != peer]
        return {*others, *(self.suspects[other] for other in others)}


class Auditing:
    """Draws chunks and evaluates their checks; ``decision`` runs the round again or commits it."""

    def __init__(self, context: Context, round_table: RoundTable, routes: Routes) -> None:
        self.context = context
        self.round_table = round_table
        self.routes = routes
        self.equal_count = 0  # checks that found the same sum
        # Of members that are not removed, the oldest first; forgotten with this master.
        self.contradictions: deque[SumContradiction] = deque(maxlen=CONTRADICTIONS_MAX)

    # ------------------------------------------------------------ facts

    def audited(self, member: Member, message: m.Audited) -> None:
        """Note a checker's findings."""
        attempt = self.round_table.attempt(message.round, message.attempt)
        if attempt is None or attempt.audit is None:
            return
        audit, check = attempt.audit, Check(member.peer, message.transfer)
        findings = {each.chunk: each for each in message.findings}
        for chunk in [chunk for chunk, current in audit.open.items() if current == check]:
            found = findings.get(chunk)
            if found is None:
                del audit.open[chunk]
                self.equal_count += 1
            elif found.differs:
                audit.different.append((member.peer, found))
            else:
                audit.tried.setdefault(chunk, set()).add(member.peer)
                if attempt.contributes(found.peer) and found.peer != member.peer:
                    audit.silent.setdefault(found.peer, set()).add(member.peer)
                    self.routes.disputes.note(member.peer, found.peer, self.context.now_s)

    def moved(self, member: Member, audit: Audit) -> None:
        """Extend the time of a checker that bulk bytes reach."""
        if any(check and check.checker == member.peer for check in audit.open.values()):
            audit.due_s = min(self._due_s(), audit.until_s)

    # ------------------------------------------------------------ questions

    def barred(self) -> set[str]:
        """Return the members that own no chunks because two checkers have named them."""
        checkers: dict[str, set[Voice]] = {}
        for each in self.contradictions:
            for peer in filter(each.names, each.suspects):
                checkers.setdefault(peer, set()).add(each.suspects[each.checker])
        return {peer for peer, voices in checkers.items() if len(voices) > 1}

    def distrusted(self) -> set[str]:
        """Return the members that check no more: they have contradicted several owners alone."""
        owners: dict[str, set[Voice]] = {}
        for each in self.contradictions:
            owners.setdefault(each.checker, set()).add(each.suspects[each.owner])
        return {peer for peer, voices in owners.items() if len(voices) >= ALONE_MAX}

    def due_s(self, attempt: Attempt) -> float:
        """Return when the present checkers' time is over."""
        return attempt.audit.due_s if attempt.audit is not None else math.inf

    # ------------------------------------------------------------ conclusions

    def advance(self, round_: Round, outcome: ReductionOutcome) -> str:
        """Continue the audit of a result, which may be committed once ``attempt.audit.over``.

        Returns:
          Why the round must be run again; otherwise empty.
        """
        attempt = round_.running()
        audit = attempt.audit
        if audit is None or (audit.number, audit.outcome) != (attempt.number, outcome):
            audit = attempt.audit = self._begin(round_, outcome)
            if (chunk := self._lacking(attempt, outcome)) is not None:
                maker = attempt.makers[chunk]
                round_.distrust.barred.add(maker)
                return f"{self.context.name(maker)} has left out a contributor that is not lost"
        if audit.different:
            first = {
                (checker, attempt.makers[found.chunk]): found for checker, found in audit.different
            }
            return "; ".join(
                [self._contradicted(round_, *pair, found) for pair, found in first.items()]
            )
        if why := self._leave_out_silent(round_, audit):
            return why
        gone = sorted({attempt.makers[chunk] for chunk in audit.open} & attempt.lost.keys())
        if gone:
            names = ", ".join(self.context.name(peer) for peer in gone)
            return f"{names} cannot send any more what its chunks are checked with"
        late = self.context.now_s >= audit.due_s
        for chunk, check in audit.open.items():
            if check is not None and (late or not attempt.serves(check.checker)):
                audit.tried.setdefault(chunk, set()).add(check.checker)
        self._assign(round_, audit)
        return ""

    def _begin(self, round_: Round, outcome: ReductionOutcome) -> Audit:
        attempt = round_.running()
        lots = dict(self._draw(round_.number, attempt.number, len(attempt.owners)))
        return Audit(attempt.number, outcome, math.inf, lots, dict.fromkeys(lots))

    def _draw(
        self, number: int, attempt_number: int, chunk_count: int
    ) -> Iterator[tuple[int, int]]:
        """Yield the chunks that are checked, each with a random number."""
        share = self.context.spec.reduce.audit
        if not share or self._too_few(number):
            return
        seed = _DRAW.pack(b"holdfast audits ", number, attempt_number)
        stream = hashlib.shake_256(self.context.lot + seed).digest(_SHARE.size * chunk_count)
        drawn = [
            (at, chunk, lot)
            for chunk, (at, lot) in enumerate(_SHARE.iter_unpack(stream))
            if at < share * 2**64
        ]
        for _at, chunk, lot in sorted(drawn)[: m.AUDITS_MAX]:
            yield chunk, lot

    def _too_few(self, number: int) -> bool:
        return len(self.round_table.rounds[number].running().survivors()) < CHECKED_MIN

    def _lacking(self, attempt: Attempt, outcome: ReductionOutcome) -> int | None:
        """Return a chunk that lacks a contributor that is not lost; None if there is none."""
        if not self.context.spec.reduce.audit:
            return None
        chunk = 0
        for run in outcome.manifest:
            here = _present(attempt, outcome, chunk)
            if set(attempt.peers()) - here - attempt.lost.keys():
                return chunk
            chunk += run.chunk_count
        return None

    # ------------------------------------------------------------ checkers

    def _assign(self, round_: Round, audit: Audit) -> None:
        """Assign chunks that have no checker, or whose checker could not check them."""
        attempt = round_.running()
        able = self._able(round_, audit) if audit.open else []
        orders: dict[str, list[int]] = {}
        for chunk, check in list(audit.open.items()):
            tried = audit.tried.get(chunk, set())
            if check is not None and check.checker not in tried:
                continue
            maker = attempt.makers[chunk]
            left = [
                peer
                for peer in able
                if peer != maker and peer not in tried and not self._has_contradicted(peer, maker)
            ]
            lost = attempt.lost and _present(attempt, audit.outcome, chunk) & attempt.lost.keys()
            if lost or not left or len(tried) >= CHECKERS_MAX:
                del audit.open[chunk]  # it cannot be checked, which says nothing of any member
                continue
            checker = left[audit.lots[chunk] % len(left)]
            orders.setdefault(checker, []).append(chunk)
        if orders:
            self._order(round_, audit, orders)

    def _able(self, round_: Round, audit: Audit) -> list[str]:
        """Return the members that may check: that others can send to, and that are believed."""
        attempt = round_.running()
        out = round_.distrust.barred | self.distrusted() | self.routes.apart(attempt.survivors())
        return [
            peer
            for peer in attempt.survivors()
            if peer not in out and attempt.outcomes.get(peer) == audit.outcome
        ]

    def _has_contradicted(self, checker: str, owner: str) -> bool:
        pair = checker, owner
        return any((each.checker, each.owner) == pair for each in self.contradictions)

    def _order(self, round_: Round, audit: Audit, orders: Mapping[str, list[int]]) -> None:
        attempt = round_.running()
        audit.order_count += 1
        where = round_.number, attempt.number, audit.order_count
        seed = self.context.lot + _TRANSFER.pack(b"holdfast checks ", *where)
        transfer = int.from_bytes(hashlib.sha256(seed).digest()[:4], "big")
        for checker, chunks in orders.items():
            audit.open.update(dict.fromkeys(chunks, Check(checker, transfer)))
        checks = tuple(
            m.CheckerChunks(checker, tuple(chunks)) for checker, chunks in orders.items()
        )
        message = m.AuditOrder(round_.number, attempt.number, transfer, checks)
        for peer in attempt.survivors():
            self.context.send(peer, message)
        # An audit moves a small part of the reduction's bytes.
        taken_s = self.context.now_s - attempt.started_s
        limit_s = AUDIT_DEADLINES_MAX * self.context.spec.membership.deadline_s
        audit.due_s, audit.until_s = self._due_s(), self.context.now_s + taken_s + limit_s

    def _due_s(self) -> float:
        return self.context.now_s + self.context.spec.membership.deadline_s

    # ------------------------------------------------------------ members that send nothing

    def _leave_out_silent(self, round_: Round, audit: Audit) -> str:
        """Leave out of the round a member of which two checkers got nothing; return why.

        Otherwise an owner would only have to withhold its own contribution from its checkers.
        """
        attempt = round_.running()
        for peer, checkers in audit.silent.items():
            voices = self._voices(attempt, checkers)
            if len(set(voices.values())) > 1 and peer not in attempt.lost:
                why = f"{len(checkers)} checkers got nothing from {self.context.name(peer)}"
                attempt.lose(peer, why)
                attempt.missed[peer] = f"it was left out of round {round_.number}: {why}"
                return why
        return ""

    # ------------------------------------------------------------ sums that differ

    def _contradicted(self, round_: Round, checker: str, owner: str, found: m.ChunkFinding) -> str:
        """Note a contradiction and what follows from it; return why the round is run again."""
        attempt = round_.running()
        suspects = {owner, checker}
        if attempt.contributes(found.peer):
            suspects.add(found.peer)
        round_.distrust.barred |= suspects
        others = suspects - {owner, checker}
        between = (
            f", to whom {self.context.name(min(others))} has sent unlike bytes" if others else ""
        )
        why = (
            f"in chunk {found.chunk} {self.context.name(checker)} finds another sum than its owner "
            f"{self.context.name(owner)}{between}"
        )
        self.context.announce(EventKind.ROUND, checker, f"round {round_.number}: {why}")
        for peer in sorted(suspects):
            self.context.tell(
                peer, f"round {round_.number}: {why}. Test the memory of this machine"
            )
        if suspects & self.context.history.members.revoked.keys():
            return why  # a moment ago, for this
        before = self.distrusted()
        self.contradictions.append(
            SumContradiction(round_.number, owner, checker, self._voices(attempt, suspects))
        )
        common = next(
            (peer for peer in sorted(suspects - {checker}) if self._is_common(peer)), None
        )
        if common is not None:
            self._remove(common, f"round {round_.number}: {why}")
        for peer in sorted(self.distrusted() - before):
            text = f"has contradicted {ALONE_MAX} owners alone: it checks no more"
            self.context.announce_peer(EventKind.ROLE, peer, text)
        return why

    def _voices(self, attempt: Attempt, peers: Iterable[str]) -> dict[str, Voice]:
        """Return the voting blocs of these members; each is one of its own if all are of one."""
        voices = voices_of(self.context.roster, attempt.receivers)
        alike = len(set(voices.values())) < 2
        return {peer: ("", peer) if alike else voices.get(peer, ("", peer)) for peer in peers}

    def _is_common(self, peer: str) -> bool:
        """Return whether a member is all that the contradictions that name it have in common."""
        beside = [each.beside(peer) for each in self.contradictions if each.names(peer)]
        return len(beside) > 1 and not set.intersection(*beside)

    def _remove(self, peer: str, why: str) -> None:
        """Remove a member for good, as the operator's ``kick`` does."""
        for each in [each for each in self.contradictions if peer in each.suspects]:
            self.contradictions.remove(each)  # it was at fault, and the others were not
        text = f"{CONTRADICTED}, the last one in {why}"
        self.context.record(PeerRevoked(peer, quoted(text)))
        self.context.announce_peer(EventKind.BAD, peer, f"is removed: {text}")
        for round_ in self.round_table.reducing():  # its results there may be wrong, too
            if peer in round_.running().peers():
                round_.distrust.refused.add(peer)
        self.round_table.evict(peer, m.RefusalCode.KICKED, text)


def _present(attempt: Attempt, outcome: ReductionOutcome, chunk: int) -> set[str]:
    for run in outcome.manifest:
        if chunk < run.chunk_count:
            bits = int.from_bytes(run.contributors, "little")
            return {peer for place, peer in enumerate(attempt.peers()) if bits >> place & 1}
        chunk -= run.chunk_count
    return set(attempt.peers())
