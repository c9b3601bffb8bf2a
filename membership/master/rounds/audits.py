"""Audits: before a result is committed, others look whether owners added up what they were given.

    all report one result --draw--> chunks with auditors --all passed--> commit
                            |         |  '-- unseen --> another auditor --AUDITORS_MAX--> withheld
                            |         '----- wrong ---> its auditor sends the proof, it is judged
                            |                             |-- proven: the owner is convicted
                            |                             '-- not: the auditor has lied; another one
                            '-- of an owner that is lost: nobody can show it any more

Chunk and auditor follow from a secret of this master's and the number of the attempt, so an owner
cannot know them before its results are out. Whoever is convicted is quarantined and the round is run
again without it; the same if what an owner made must be looked at and the owner is gone. Who does not
show what it added is not convicted, for its line may be to blame, but the round is run again with
others as owners; ``WITHHELD_MAX`` times, and it owns nothing any more.

An owner that lies in ``m`` chunks of each of ``k`` rounds escapes with ``(1 - p) ** (k m)``. Auditors
need not be believed: what they accuse of they must prove (see ``collectives.evidence``). An auditor
that is the liar's friend and keeps silent makes ``p`` smaller by the share of such friends.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections import Counter
from collections.abc import Iterator

from ....protocol.messages import (
    AUDITS_MAX,
    PROOF_BYTES_MAX,
    Audited,
    AuditOrder,
    ProofPiece,
    ProofWanted,
    RefusalCode,
)
from ..state.context import Context, quoted
from ..state.journal import PeerQuarantined
from ..state.master_effects import CheckProof, EventKind
from ..state.roster import Member
from .attempt import Attempt
from .outcome import Accusation, Audit, ReductionOutcome
from .round import Round
from .round_table import RoundTable

AUDITORS_MAX = 3  # that look at one chunk in vain before its owner counts as withholding it
WITHHELD_MAX = 3  # rounds in which an owner showed nothing; then it owns nothing in this term
FORGIVEN_BY = 100  # of its chunks, passed: then one such round is forgotten, for lines do fail
LOOK_DEADLINES_MAX = 4  # for a look, over the time that the reduction took
FALSE_MAX = 3  # accusations that prove nothing; bad memory accuses falsely, too, but not for long
_DRAW = struct.Struct(">16sQQ")
_SHARE = struct.Struct(">QQ")  # for each chunk: whether it is drawn, and whose it is to look at it


class Auditing:
    """Draws, hears and concludes; ``reduction_driver`` runs again or commits."""

    def __init__(self, context: Context, round_table: RoundTable) -> None:
        self.context = context
        self.round_table = round_table
        self.passed_count = 0
        self.withheld: Counter[str] = Counter()  # rounds, by owner
        self._passed: Counter[str] = Counter()  # chunks, by owner, since the last was forgotten
        self._false: Counter[str] = Counter()  # accusations, by accuser

    # ------------------------------------------------------------ facts

    def audited(self, member: Member, message: Audited) -> None:
        """An auditor has looked."""
        look = self._look(message.round, message.attempt)
        if look is None:
            return
        wrong, unseen = set(message.wrong), set(message.unseen)
        for chunk in [c for c, auditor in look.open.items() if auditor == member.peer]:
            if chunk in look.accused:
                continue
            if chunk in wrong:
                look.accused[chunk] = member.peer
            elif chunk in unseen:
                look.tried.setdefault(chunk, set()).add(member.peer)
            else:
                del look.open[chunk]
                self._pass(self.round_table.rounds[message.round].running().makers[chunk])

    def _pass(self, owner: str) -> None:
        self.passed_count += 1
        if owner in self.withheld:
            self._passed[owner] += 1
            if self._passed[owner] >= FORGIVEN_BY:
                self._passed[owner] = 0
                self.withheld[owner] -= 1
                self.withheld += Counter()  # without those of whom nothing is left

    def moved(self, member: Member, look: Audit) -> None:
        """Bulk bytes reach or leave the member: if it looks at something, it is about to see it."""
        if member.peer in look.open.values() and look.case is None:
            look.due_s = min(self._due_s(), look.until_s)

    def proof(self, member: Member, message: ProofPiece) -> None:
        """A piece of what proves an accusation."""
        look = self._look(message.round, message.attempt)
        case = look.case if look is not None else None
        if look is None or case is None or case.judging:
            return
        if (case.accuser, case.chunk) != (member.peer, message.chunk):
            return
        if message.offset != len(case.data):
            return
        case.data += message.data
        ends = len(case.data) >= message.all_bytes
        if message.all_bytes > PROOF_BYTES_MAX or not (message.data or ends):
            self._void(look)  # nobody can judge that
            return
        look.due_s = self._due_s()
        if not ends:
            wanted = ProofWanted(message.round, message.attempt, case.chunk, len(case.data))
            self.context.send(case.accuser, wanted)
            return
        case.judging, look.due_s = True, math.inf
        attempt = self.round_table.rounds[message.round].running()
        assert attempt.order is not None
        self.context.out.append(
            CheckProof(
                attempt.order,
                self.context.history.sizes[attempt.order.fragment],
                look.number,
                case.chunk,
                attempt.makers[case.chunk],
                look.outcome.digest,
                look.outcome.manifest,
                bytes(case.data),
            )
        )

    def judged(self, number: int, attempt_number: int, fault: str) -> None:
        """What a proof proves; empty: nothing."""
        look = self._look(number, attempt_number)
        if look is None or look.case is None:
            return
        case, round_ = look.case, self.round_table.rounds[number]
        owner = round_.running().makers[case.chunk]
        accuser = case.accuser
        self._void(look)
        if fault:
            self.convict(
                owner,
                f"in round {number} it gave a wrong result for chunk {case.chunk}: "
                f"{quoted(fault)} (shown by {self.context.name(accuser)})",
            )
        else:
            self._false_accusation(round_, accuser, owner, case.chunk)

    def _false_accusation(self, round_: Round, accuser: str, owner: str, chunk: int) -> None:
        self._false[accuser] += 1
        text = (
            f"in round {round_.number} it called chunk {chunk} of {self.context.name(owner)} wrong "
            "and did not prove it"
        )
        self.context.announce(EventKind.BAD, accuser, f"{self.context.name(accuser)}: {text}")
        self.context.tell(accuser, text)
        if self._false[accuser] >= FALSE_MAX:
            self.convict(accuser, f"{FALSE_MAX} times it accused others falsely; the last: {text}")

    def convict(self, peer: str, why: str) -> None:
        """Nothing of this peer may get into the run any more, until the owner clears it."""
        text = f"{self.context.name(peer)} is quarantined: {why}"
        self.context.record(PeerQuarantined(peer, quoted(why)))
        self.context.announce(EventKind.BAD, peer, text)
        for round_ in self.round_table.reducing():  # what it made there may be as wrong
            if peer in round_.running().peers():
                round_.refused.add(peer)
        self.round_table.evict(peer, RefusalCode.QUARANTINED, why)

    def cleared(self, peer: str) -> None:
        """The run's owner trusts it again."""
        self.withheld.pop(peer, None)
        self._false.pop(peer, None)

    # ------------------------------------------------------------ questions

    def barred(self) -> set[str]:
        """Who owns nothing any more."""
        return {peer for peer, count in self.withheld.items() if count >= WITHHELD_MAX}

    def due_s(self, attempt: Attempt) -> float:
        return attempt.look.due_s if attempt.look is not None else math.inf

    # ------------------------------------------------------------ what follows

    def advance(self, round_: Round, outcome: ReductionOutcome) -> str:
        """Have a result looked at, as far as it was not; why the round must be run again, or empty.

        The result may be committed once ``attempt.look.over``.
        """
        attempt = round_.running()
        look = attempt.look
        if look is None or (look.number, look.outcome) != (attempt.number, outcome):
            look = attempt.look = self._begin(round_, outcome)
            if (chunk := self._lacking(attempt, outcome)) is not None:
                return self._withheld(round_, attempt.makers[chunk], chunk)
        gone = sorted({attempt.makers[chunk] for chunk in look.open} & attempt.lost.keys())
        if gone:
            return f"{self._names(gone)} cannot show any more what went into the result"
        for chunk, auditor in look.open.items():
            left = auditor in attempt.lost or auditor in attempt.gone
            late = self.context.now_s >= look.due_s
            if left or (late and (look.case is None or look.case.accuser == auditor)):
                look.tried.setdefault(chunk, set()).add(auditor)
                look.accused.pop(chunk, None)
                if look.case is not None and look.case.accuser == auditor:
                    look.case = None
        return self._reassign(round_, look) or self._open_case(round_, look)

    def _begin(self, round_: Round, outcome: ReductionOutcome) -> Audit:
        attempt = round_.running()
        lots = dict(self._draw(round_.number, attempt.number, len(attempt.owners)))
        return Audit(attempt.number, outcome, math.inf, lots, dict.fromkeys(lots, ""), len(lots))

    def _draw(
        self, number: int, attempt_number: int, chunk_count: int
    ) -> Iterator[tuple[int, int]]:
        """The chunks that are audited, each with a random number."""
        share = self.context.spec.reduce.audit
        if not share or self._alone(number):
            return
        seed = _DRAW.pack(b"holdfast audits ", number, attempt_number)
        stream = hashlib.shake_256(self.context.lot + seed).digest(_SHARE.size * chunk_count)
        drawn = [
            (at, chunk, lot)
            for chunk, (at, lot) in enumerate(_SHARE.iter_unpack(stream))
            if at < share * 2**64
        ]
        for _at, chunk, lot in sorted(drawn)[:AUDITS_MAX]:
            yield chunk, lot

    def _lacking(self, attempt: Attempt, outcome: ReductionOutcome) -> int | None:
        """A chunk without somebody who was not lost; None: there is none."""
        if not self.context.spec.reduce.audit:
            return None
        chunk = 0
        for run in outcome.manifest:
            bits = int.from_bytes(run.contributors, "little")
            missing = {p for place, p in enumerate(attempt.peers()) if not bits >> place & 1}
            if missing - attempt.lost.keys():
                return chunk
            chunk += run.chunk_count
        return None

    def _alone(self, number: int) -> bool:
        """Nobody else is there who could look."""
        return len(self.round_table.rounds[number].running().survivors()) < 2

    def _reassign(self, round_: Round, look: Audit) -> str:
        """Give chunks that were looked at in vain to others."""
        attempt = round_.running()
        orders: dict[str, list[int]] = {}
        for chunk, auditor in look.open.items():
            tried = look.tried.get(chunk, set())
            if auditor and auditor not in tried:
                continue
            maker = attempt.makers[chunk]
            able = [
                peer
                for peer in attempt.survivors()
                if peer != maker and peer not in tried and attempt.outcomes[peer] == look.outcome
            ]
            if not able or len(tried) >= AUDITORS_MAX:
                return self._withheld(round_, maker, chunk)
            look.open[chunk] = able[look.lots[chunk] % len(able)]
            orders.setdefault(look.open[chunk], []).append(chunk)
        for auditor, chunks in orders.items():
            message = AuditOrder(round_.number, attempt.number, tuple(sorted(chunks)))
            self.context.send(auditor, message)
        if orders:
            # What is shown is a small part of what the reduction has moved.
            taken_s = self.context.now_s - attempt.started_s
            limit_s = LOOK_DEADLINES_MAX * self.context.spec.membership.deadline_s
            look.due_s, look.until_s = self._due_s(), self.context.now_s + taken_s + limit_s
        return ""

    def _withheld(self, round_: Round, maker: str, chunk: int) -> str:
        self.withheld[maker] += 1
        round_.barred.add(maker)
        what = f"{self.context.name(maker)} does not show what it added to chunk {chunk}"
        if self.withheld[maker] == WITHHELD_MAX:
            text = f"{what}, in {WITHHELD_MAX} rounds now: it owns no chunks any more"
            self.context.announce(EventKind.ROLE, maker, text)
            self.context.tell(maker, f"{text}. Other members must be able to fetch from it")
        return what

    def _open_case(self, round_: Round, look: Audit) -> str:
        if look.case is None and look.accused:
            chunk, accuser = next(iter(look.accused.items()))
            look.case, look.due_s = Accusation(accuser, chunk), self._due_s()
            self.context.send(accuser, ProofWanted(round_.number, look.number, chunk, 0))
        return ""

    def _void(self, look: Audit) -> None:
        """The case is over; somebody else looks at the chunk."""
        assert look.case is not None
        chunk, accuser = look.case.chunk, look.case.accuser
        look.case, look.due_s = None, self._due_s()
        look.accused.pop(chunk, None)
        look.tried.setdefault(chunk, set()).add(accuser)

    def _look(self, number: int, attempt_number: int) -> Audit | None:
        attempt = self.round_table.attempt(number, attempt_number)
        return None if attempt is None else attempt.look

    def _due_s(self) -> float:
        return self.context.now_s + self.context.spec.membership.deadline_s

    def _names(self, peers: list[str]) -> str:
        return ", ".join(self.context.name(peer) for peer in peers)
