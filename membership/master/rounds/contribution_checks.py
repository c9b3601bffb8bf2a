"""Checks of a round's contributions by their reported norms, before the commit (see ``norms``).

Findings become events and facts for the status; ``decision`` refuses contributions. After the
commit the reports join the history of members' updates.
"""

from __future__ import annotations

from ....protocol.messages import LoggedFigure
from ...shared.event_kind import EventKind
from ..state.context import Context
from .norms import UnderstatedNorm, added_up, understated
from .outer_momentum import outer_motion
from .round import Round
from .update_history import UpdateHistory


class ContributionChecks:
    """Checks the contributions of rounds."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self.history = UpdateHistory()

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
            totals = added_up(reports.values(), len(attempt.peers()))
            round_.motion = outer_motion(totals, self.context.spec.diloco)
        return liars

    def committed(self, round_: Round) -> None:
        """Compare the updates of a committed round, and tell the operator what is new of them."""
        attempt = round_.running()
        tokens = {each.peer: each.weight for each in attempt.contributors}
        tokens |= {peer: ready.weight for peer, ready in round_.answers.ready.items()}
        self.history.note(attempt.norm_reports(), attempt.makers, attempt.contributors, tokens)
        for peer in attempt.survivors():
            if (member := self.context.roster.get(peer)) is None:
                continue
            figures = self.history.figures(peer).items()
            member.measured = {k: LoggedFigure(value, round_.at_step) for k, value in figures}
            suspicion = self.history.suspicion(peer, self.context.name)
            if suspicion and not member.suspicion:
                self.context.announce(EventKind.BAD, peer, f"{member.name}: {suspicion}")
            member.suspicion = suspicion


# ---------------------------------------------------------------- equal samples


WARNING = "train on the same samples (use `run.sampler`, `run.shards` or `run.generator()`)"


class SameSamples:
    """Compares the digests of members' first batches (see ``Ready.first_batches``)."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._digests: dict[str, bytes] = {}  # by member

    def note(self, peer: str, digest: bytes) -> None:
        """Note a member's digest; warn if another member has the same."""
        before, self._digests[peer] = self._digests.get(peer), digest
        if before != digest and len(group := self._groups().get(digest, [])) > 1:
            self._context.announce(EventKind.RUN, peer, self._format(group))
            for each in group:
                self._context.tell(each, self._format(group))

    def warnings(self) -> tuple[str, ...]:
        """Return a warning for each group of members that train on the same samples."""
        return tuple(self._format(group) for group in self._groups().values() if len(group) > 1)

    def _groups(self) -> dict[bytes, list[str]]:
        """Return the members by their digests, in one pass."""
        groups: dict[bytes, list[str]] = {}
        for peer, digest in self._digests.items():
            if digest and peer in self._context.roster:
                groups.setdefault(digest, []).append(peer)
        return groups

    def _format(self, group: list[str]) -> str:
        return f"{len(group)} members {WARNING}: {', '.join(map(self._context.name, group))}"
