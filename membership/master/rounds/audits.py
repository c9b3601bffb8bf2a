"""Audits: before a result is committed, other members check what its owners added up.

    all report one result --draw--> chunks with auditors --all passed--> commit
                            |         |  '-- unseen --> another auditor --AUDITORS_MAX--> withheld
                            |         '----- wrong ---> its auditor sends the proof, it is checked
                            |                             |-- proven: the owner is convicted
                            |                             '-- not proven: another auditor
                            '-- of an owner that is lost: its inputs cannot be fetched any more

Chunks and auditors follow from a secret of this master and the number of the attempt, so an owner cannot
know them before its results are out. A convicted owner is quarantined, and the round is run again without
it. The round is also run again if an audited owner is lost. An owner that does not show what it added is
not convicted, because its line may be to blame, but the round is run again with other owners. After
``WITHHELD_MAX`` such rounds it owns nothing any more.

An owner that lies in ``m`` chunks of each of ``k`` rounds escapes with ``(1 - p) ** (k m)``. Auditors
need not be believed: they must prove what they accuse of (see ``collectives.evidence``). Accomplices of
the liar that audit and keep silent reduce ``p`` by their share of the members.
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

AUDITORS_MAX = 3  # auditors of one chunk that got nothing before its owner counts as withholding
WITHHELD_MAX = 3  # rounds in which an owner withheld; then it owns nothing in this term
FORGIVEN_BY = 100  # passed chunks after which one such round is forgotten, because lines do fail
AUDIT_DEADLINES_MAX = 4  # of an audit, in addition to the time that the reduction took
FALSE_MAX = 3  # accusations without proof before a conviction; faulty RAM can cause a few
_DRAW = struct.Struct(">16sQQ")
_SHARE = struct.Struct(">QQ")  # for each chunk: whether it is drawn, and its auditor


class Auditing:
    """Draws chunks and evaluates their audits; ``decision`` runs the round again or commits it."""

    def __init__(self, context: Context, round_table: RoundTable) -> None:
        self.context = context
        self.round_table = round_table
        self.passed_count = 0
        self.withheld: Counter[str] = Counter()  # rounds, by owner
        self._passed: Counter[str] = Counter()  # chunks, by owner, since the last was forgotten
        self._false: Counter[str] = Counter()  # accusations, by accuser

    # ------------------------------------------------------------ facts

    def audited(self, member: Member, message: Audited) -> None:
        """Note an auditor's findings."""
        audit = self._audit(message.round, message.attempt)
        if audit is None:
            return
        wrong, unseen = set(message.wrong), set(message.unseen)
        for chunk in [c for c, auditor in audit.open.items() if auditor == member.peer]:
            if chunk in audit.accused:
                continue
            if chunk in wrong:
                audit.accused[chunk] = member.peer
            elif chunk in unseen:
                audit.tried.setdefault(chunk, set()).add(member.peer)
            else:
                del audit.open[chunk]
                self._pass(self.round_table.rounds[message.round].running().makers[chunk])

    def _pass(self, owner: str) -> None:
        self.passed_count += 1
        if owner in self.withheld:
            self._passed[owner] += 1
            if self._passed[owner] >= FORGIVEN_BY:
                self._passed[owner] = 0
                self.withheld[owner] -= 1
                self.withheld += Counter()  # drops owners whose count is zero

    def moved(self, member: Member, audit: Audit) -> None:
        """Extend the time of an auditor that bulk bytes reach."""
        if member.peer in audit.open.values() and audit.accusation is None:
            audit.due_s = min(self._due_s(), audit.until_s)

    def proof(self, member: Member, message: ProofPiece) -> None:
        """Take in a piece of an accusation's proof."""
        audit = self._audit(message.round, message.attempt)
        accusation = audit.accusation if audit is not None else None
        if audit is None or accusation is None or accusation.checking:
            return
        if (accusation.accuser, accusation.chunk) != (member.peer, message.chunk):
            return
        if message.offset != len(accusation.data):
            return
        accusation.data += message.data
        ends = len(accusation.data) >= message.all_bytes
        if message.all_bytes > PROOF_BYTES_MAX or not (message.data or ends):
            self._void(audit)  # it cannot be checked
            return
        audit.due_s = self._due_s()
        if not ends:
            wanted = ProofWanted(
                message.round, message.attempt, accusation.chunk, len(accusation.data)
            )
            self.context.send(accusation.accuser, wanted)
            return
        accusation.checking, audit.due_s = True, math.inf
        attempt = self.round_table.rounds[message.round].running()
        assert attempt.order is not None
        self.context.out.append(
            CheckProof(
                attempt.order,
                self.context.history.sizes[attempt.order.fragment],
                audit.number,
                accusation.chunk,
                attempt.makers[accusation.chunk],
                audit.outcome.digest,
                audit.outcome.manifest,
                bytes(accusation.data),
            )
        )

    def proof_checked(self, number: int, attempt_number: int, fault: str) -> None:
        """Conclude an accusation.

        Args:
          fault: what the proof shows to be wrong; empty if it proves nothing.
        """
        audit = self._audit(number, attempt_number)
        if audit is None or audit.accusation is None:
            return
        accusation, round_ = audit.accusation, self.round_table.rounds[number]
        owner = round_.running().makers[accusation.chunk]
        accuser = accusation.accuser
        self._void(audit)
        if fault:
            self.convict(
                owner,
                f"in round {number} it gave a wrong result for chunk {accusation.chunk}: "
                f"{quoted(fault)} (shown by {self.context.name(accuser)})",
            )
        else:
            self._false_accusation(round_, accuser, owner, accusation.chunk)

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
        """Quarantine a peer: nothing of it is added any more until the operator clears it."""
        text = f"{self.context.name(peer)} is quarantined: {why}"
        self.context.record(PeerQuarantined(peer, quoted(why)))
        self.context.announce(EventKind.BAD, peer, text)
        for round_ in self.round_table.reducing():  # its results there may be wrong, too
            if peer in round_.running().peers():
                round_.refused.add(peer)
        self.round_table.evict(peer, RefusalCode.QUARANTINED, why)

    def cleared(self, peer: str) -> None:
        """Forget what a peer was accused of."""
        self.withheld.pop(peer, None)
        self._false.pop(peer, None)

    # ------------------------------------------------------------ questions

    def barred(self) -> set[str]:
        """Return the peers that may not own chunks any more."""
        return {peer for peer, count in self.withheld.items() if count >= WITHHELD_MAX}

    def due_s(self, attempt: Attempt) -> float:
        """Return when the present auditors' time is over."""
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
                return self._withheld(round_, attempt.makers[chunk], chunk)
        gone = sorted({attempt.makers[chunk] for chunk in audit.open} & attempt.lost.keys())
        if gone:
            return f"{self._names(gone)} cannot show any more what went into the result"
        for chunk, auditor in audit.open.items():
            left = auditor in attempt.lost or auditor in attempt.gone
            late = self.context.now_s >= audit.due_s
            if left or (late and (audit.accusation is None or audit.accusation.accuser == auditor)):
                audit.tried.setdefault(chunk, set()).add(auditor)
                audit.accused.pop(chunk, None)
                if audit.accusation is not None and audit.accusation.accuser == auditor:
                    audit.accusation = None
        return self._reassign(round_, audit) or self._open_accusation(round_, audit)

    def _begin(self, round_: Round, outcome: ReductionOutcome) -> Audit:
        attempt = round_.running()
        lots = dict(self._draw(round_.number, attempt.number, len(attempt.owners)))
        return Audit(attempt.number, outcome, math.inf, lots, dict.fromkeys(lots, ""), len(lots))

    def _draw(
        self, number: int, attempt_number: int, chunk_count: int
    ) -> Iterator[tuple[int, int]]:
        """Yield the chunks that are audited, each with a random number."""
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
        """Return a chunk that lacks a contributor that is not lost; None if there is none."""
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
        """Return whether there is no other member that could audit."""
        return len(self.round_table.rounds[number].running().survivors()) < 2

    def _reassign(self, round_: Round, audit: Audit) -> str:
        """Assign chunks that have no auditor, or whose auditor got nothing."""
        attempt = round_.running()
        orders: dict[str, list[int]] = {}
        for chunk, auditor in audit.open.items():
            tried = audit.tried.get(chunk, set())
            if auditor and auditor not in tried:
                continue
            maker = attempt.makers[chunk]
            able = [
                peer
                for peer in attempt.survivors()
                if peer != maker and peer not in tried and attempt.outcomes[peer] == audit.outcome
            ]
            if not able or len(tried) >= AUDITORS_MAX:
                return self._withheld(round_, maker, chunk)
            audit.open[chunk] = able[audit.lots[chunk] % len(able)]
            orders.setdefault(audit.open[chunk], []).append(chunk)
        for auditor, chunks in orders.items():
            message = AuditOrder(round_.number, attempt.number, tuple(sorted(chunks)))
            self.context.send(auditor, message)
        if orders:
            # An audit moves a small part of the reduction's bytes.
            taken_s = self.context.now_s - attempt.started_s
            limit_s = AUDIT_DEADLINES_MAX * self.context.spec.membership.deadline_s
            audit.due_s, audit.until_s = self._due_s(), self.context.now_s + taken_s + limit_s
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

    def _open_accusation(self, round_: Round, audit: Audit) -> str:
        if audit.accusation is None and audit.accused:
            chunk, accuser = next(iter(audit.accused.items()))
            audit.accusation, audit.due_s = Accusation(accuser, chunk), self._due_s()
            self.context.send(accuser, ProofWanted(round_.number, audit.number, chunk, 0))
        return ""

    def _void(self, audit: Audit) -> None:
        """End the accusation; another member audits the chunk."""
        assert audit.accusation is not None
        chunk, accuser = audit.accusation.chunk, audit.accusation.accuser
        audit.accusation, audit.due_s = None, self._due_s()
        audit.accused.pop(chunk, None)
        audit.tried.setdefault(chunk, set()).add(accuser)

    def _audit(self, number: int, attempt_number: int) -> Audit | None:
        attempt = self.round_table.attempt(number, attempt_number)
        return None if attempt is None else attempt.audit

    def _due_s(self) -> float:
        return self.context.now_s + self.context.spec.membership.deadline_s

    def _names(self, peers: list[str]) -> str:
        return ", ".join(self.context.name(peer) for peer in peers)
