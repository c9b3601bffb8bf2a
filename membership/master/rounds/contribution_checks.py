"""Checks of a round's contributions by their reported norms, before the commit (see ``norms``).

Findings become events and facts for the status; ``decision`` refuses contributions.
"""

from __future__ import annotations

from collections.abc import Mapping

from ...shared.event_kind import EventKind
from ..state.context import Context
from .norms import NormsFound, UnderstatedNorm, against_the_others, found_in, understated
from .round import Round


class ContributionChecks:
    """Checks the contributions of rounds."""

    def __init__(self, context: Context) -> None:
        self.context = context

    def overlong(self, round_: Round) -> list[UnderstatedNorm]:
        """Return the contributions longer than announced; with any, the result is void."""
        attempt = round_.running()
        reports = attempt.norm_reports()
        ready = round_.answers.ready
        announced = {peer: ready[peer].norm for peer in attempt.survivors() if peer in ready}
        liars = understated(reports, attempt.peers(), announced, attempt.order.plan.codec_up)
        others_count = len(attempt.peers()) - 1
        if others_count > 1 and 2 * len(liars) > others_count:
            # More likely the members that added up are wrong than most of the contributors.
            text = (
                f"round {round_.number}: {len(liars)} of {len(announced)} contributions seem longer"
            )
            self.context.announce(EventKind.ROUND, None, f"{text} than announced; all are added")
            liars = []
        if not liars:
            self._note_directions(round_, found_in(reports.values(), attempt.peers()))
        return liars

    def _note_directions(self, round_: Round, found: Mapping[str, NormsFound]) -> None:
        against = against_the_others(found)
        for peer, each in found.items():
            member = self.context.roster.get(peer)
            if member is None:
                continue
            member.direction = each.cosine
            if peer in against and not member.against:
                name, what = self.context.name(peer), against[peer]
                text = f"the update of {name} for round {round_.number} {what}; it is added"
                self.context.announce(EventKind.ROUND, peer, text)
            member.against = peer in against
