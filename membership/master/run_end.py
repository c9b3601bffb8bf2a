"""The end of a run: with the last of its rounds, or of the epochs of its data."""

from __future__ import annotations

import math

from ...protocol.messages import Finish, NewSpec
from ..shared.event_kind import EventKind
from ..spec.spec import RunSpec
from ..spec.spec_changes import changed_settings
from .leases import Leases
from .rounds.round_scheduler import RoundScheduler
from .state.context import Context
from .state.history import RunHistory
from .state.journal import RunFinished, SpecChanged


class RunEnding:
    """Finishes the run after its last round, and lets it go on if its spec has another end."""

    def __init__(self, context: Context, scheduler: RoundScheduler, leases: Leases) -> None:
        self.context = context
        self.scheduler = scheduler
        self.leases = leases
        self._due_s = math.inf  # when Finish is sent even if the last round is not applied
        self._sent = False

    def change(self, spec: RunSpec) -> bool:
        """Take over a spec with another end, on the operator's word."""
        before, self.context.spec = self.context.spec, spec
        self.context.record(SpecChanged(spec.toml_text))
        self._due_s, self._sent = math.inf, False
        what = f"the run's operator changed {', '.join(changed_settings(before, spec))}"
        self.context.announce(EventKind.RUN, None, what)
        self.context.send_all(NewSpec(spec.toml_text, self.context.total_steps))
        return True

    def finish(self) -> bool:
        """Finish the run after its last round, once all members in sync have applied that round."""
        history, wanted = self.context.history, self.context.spec.run.rounds
        by_rounds = bool(wanted) and history.commit_count >= wanted
        if self._sent or not (by_rounds or self.leases.complete):
            return False
        if not history.finished:
            if self.scheduler.end_rounds("every epoch is in committed work"):
                return False
            self.context.record(RunFinished(history.schedule.last_round))
            done = what_is_committed(history, self.context.spec)
            self.context.announce(EventKind.RUN, None, f"{done}; the run is finished")
            self._due_s = self.context.now_s + self.context.spec.membership.deadline_s
            return True
        applied = all(
            copy.version == version
            for member in self.context.roster
            if member.in_sync
            for copy, version in zip(member.copies, history.versions, strict=True)
        )
        if not applied and self.context.now_s < self._due_s:
            return False
        self._sent = True
        self.context.send_all(Finish(history.schedule.last_round))
        return True

    def next_deadline_s(self) -> float:
        """Return when ``Finish`` is sent even if the last round is not applied everywhere."""
        return math.inf if self._sent else self._due_s


def ends_by_epochs(history: RunHistory, spec: RunSpec) -> bool:
    """Return whether a finished run has ended with its epochs, and had rounds left."""
    rounds = spec.run.rounds
    return spec.data.epochs > 0 and not 0 < rounds <= history.commit_count


def what_is_committed(history: RunHistory, spec: RunSpec) -> str:
    """Return why a run is finished, such as "all 40 rounds are committed"."""
    count, what = history.commit_count, "round"
    if ends_by_epochs(history, spec):
        count, what = spec.data.epochs, "epoch"
    return f"the only {what} is committed" if count == 1 else f"all {count} {what}s are committed"


def how_to_go_on(history: RunHistory, spec: RunSpec) -> tuple[str, str]:
    """Return the command with which a finished run goes on, and its goal ("round N")."""
    what = "epoch" if ends_by_epochs(history, spec) else "round"
    return f"`holdfast resume --{what}s N`", f"{what} N"
