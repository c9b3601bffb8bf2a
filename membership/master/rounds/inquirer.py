"""Inquiries of the master: who is asked, and what follows from the answers.

If nothing moves and no member is accused, or if the results differ, the master asks the members
what they wait for and what they hold (see ``inquiry``). What the answers say of other members
counts as if a link to them had broken.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import islice

from ....protocol.messages import Diagnose, Diagnosis
from ..routes.disputes import DISPUTES_MAX
from ..routes.routes import Routes
from ..state.context import Context
from ..state.roster import Member
from ..state.voting_blocs import voices_of
from .attempt import Attempt
from .inquiry import Findings, Question, differing, is_done, waiting
from .round import Round
from .round_table import RoundTable

# Contributors. With two there is no third that could tell who is at fault, and no plan without the
# pair.
INQUIRY_MIN = 3


class Inquirer:
    """Asks members about an attempt, and notes in it what they accuse others of."""

    def __init__(self, context: Context, round_table: RoundTable, routes: Routes) -> None:
        self.context = context
        self.round_table = round_table
        self.routes = routes

    def ask(self, round_: Round, question: Question, asked: Sequence[str]) -> bool:
        """Begin an inquiry. Returns False if it was made before, or could tell nothing."""
        attempt = round_.running()
        if len(attempt.peers()) < INQUIRY_MIN:
            return False
        if not attempt.inquiries.begin(question, asked, self.context.now_s):
            return False
        for peer in attempt.unanswered():
            self.context.send(peer, Diagnose(round_.number, attempt.number))
        return True

    def diagnosed(self, member: Member, message: Diagnosis) -> None:
        """Note an answer."""
        attempt = self.round_table.attempt(message.round, message.attempt)
        inquiry = attempt.inquiries.current if attempt is not None else None
        if inquiry is not None and member.peer in inquiry.asked:
            inquiry.answers[member.peer] = message

    def limit_s(self, attempt: Attempt) -> float:
        """Return when the answers are evaluated: at once if there are all of them."""
        inquiry = attempt.inquiries.current
        if inquiry is None:
            return math.inf
        if not attempt.unanswered():
            return -math.inf
        return inquiry.began_s + self.context.spec.settle_s

    def find_blockers(self, round_: Round) -> None:
        """End an inquiry about waiting: accuse the members that others wait for."""
        attempt, now_s = round_.running(), self.context.now_s
        inquiry = attempt.inquiries.end()
        if inquiry.question is Question.DIFFERENCE:  # a survivor has taken its report back
            attempt.inquiries.asked.discard(Question.DIFFERENCE)
            return
        left = set(attempt.takes_part(attempt.receivers)) - attempt.lost.keys()
        findings = self._weighed(attempt, waiting(inquiry.answers, left, attempt.outcomes))
        for peer, accusers in findings.against.items():
            attempt.blame.wait_in_vain(peer, accusers, now_s)
        if findings.against:
            return
        if inquiry.question is Question.STALL and attempt.reports.moved_s > inquiry.began_s:
            # It goes on; the next stall has another cause.
            attempt.inquiries.asked.discard(Question.STALL)
        if any(is_done(answer) for answer in inquiry.answers.values()):
            attempt.inquiries.patience_s = now_s + self.context.spec.membership.deadline_s

    def find_two_faced(self, attempt: Attempt) -> None:
        """End an inquiry about results: note the owners that two or more members accuse."""
        answers = attempt.inquiries.end().answers
        findings = self._weighed(attempt, differing(answers, set(attempt.makers)))
        attempt.inquiries.two_faced = findings.culprits
        attempt.inquiries.misled = {
            accuser: peer for peer, accusers in findings.against.items() for accuser in accusers
        }

    def _weighed(self, attempt: Attempt, findings: Findings) -> Findings:
        """Count one accuser for each voice; for a while plans avoid the pairs in dispute."""
        voices = voices_of(self.context.roster, attempt.receivers)
        if len(set(voices.values())) > 1:  # else all came by one invite from one line
            findings = findings.by_voice(voices)
        pairs = ((accuser, peer) for peer, each in findings.against.items() for accuser in each)
        for accuser, peer in islice(pairs, DISPUTES_MAX):
            if peer in self.context.roster:
                self.routes.disputes.note(accuser, peer, self.context.now_s)
        return findings
