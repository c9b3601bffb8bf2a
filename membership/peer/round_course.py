"""The course of a peer's rounds. Pure.

A round at a peer:

    OPEN --Reduce--> REDUCING --reduction done--> REDUCED --Commit--> APPLYING --applied--> (gone)
      |                  |                            |
      +------------------+----------Abort-------------+---------------------------------> (gone)

A later attempt's ``Reduce`` or ``Repair`` goes back to REDUCING. ``Commit`` may come before this
peer's own reduction is done (a spare that lags): the round then waits in REDUCING with its commit
known. A committed round of a fragment that is still being fetched waits too, so that a joiner can
replay the rounds that were committed while it copied the base.
"""

from __future__ import annotations

from collections.abc import Iterable

from attrs import define

from ...protocol import messages as m
from ..shared.manifest import contents_of
from .lease_book import LeaseBook
from .local_round import (
    LocalFragment,
    LocalRound,
    RoundState,
    committed_rounds,
    overtaken_rounds,
    void_rounds,
)
from .peer_effects import (
    ApplyRound,
    DropRound,
    FlushReduction,
    PeerEffect,
    RepairReduction,
    StartReduction,
    StopReduction,
    StoreResult,
    TellMaster,
)
from .trainer_control import TrainerControl

VOID_SAMPLES = "its trainer is still on samples that were given to others"


@define
class RoundCourse:
    """The rules for the rounds of one peer; all else it shares with its ``Replica``."""

    me: str
    rounds: dict[int, LocalRound]
    fragments: list[LocalFragment]
    leases: LeaseBook
    trainer: TrainerControl

    def end_unknown(self, message: m.Welcome, *, rewound: bool) -> list[PeerEffect]:
        """End the rounds that the master does not know any more, or does not continue.

        Args:
          rewound: commits of the run's other branch are void. One that is applied already is the
            master's to undo.
        """
        effects: list[PeerEffect] = []
        if rewound:
            for fragment in self.fragments:
                fragment.committed_version = 0
            for each in list(self.rounds.values()):
                if each.commit is not None and each.phase is not RoundState.APPLYING:
                    effects += self._end(each, committed=False)
        committed = {commit.round for commit in message.committed}
        for number in sorted(self.rounds):
            each = self.rounds[number]
            if each.phase is RoundState.APPLYING or each.commit is not None:
                continue
            if number in committed and each.phase is RoundState.REDUCED:
                continue
            if number not in message.going_on:
                effects += self._end(each, committed=False)
            elif each.reported is not None:
                effects.append(TellMaster(each.reported))
        return effects

    # ------------------------------------------------------------ messages of the master

    def open(self, message: m.Open) -> list[PeerEffect]:
        if not 0 <= message.fragment < len(self.fragments):
            return [TellMaster(m.NotReady(message.round, "no such fragment here"))]
        if self.fragments[message.fragment].version not in (message.version, message.version - 1):
            return [TellMaster(m.NotReady(message.round, "the fragment is not in sync here"))]
        known = self.rounds.get(message.round)
        if known is not None and message.at_step < known.at_step:
            return self.trainer.nudge(known)
        holds = known is not None and known.offer and self.trainer.may_post
        if known is not None and holds and known.phase is RoundState.OPEN:
            # Invited again, and the trainer has loaded nothing since: what it was told holds.
            return [] if known.ready is None else [TellMaster(known.ready)]
        effects = self.end_all(void_rounds(self.rounds, message))
        opened = LocalRound(message.round, message.fragment, message.version, message.at_step)
        self.rounds[message.round] = opened
        if not self.trainer.loaded:
            return [*effects, TellMaster(m.NotReady(message.round, "no trainer is attached"))]
        if self.trainer.barred:
            return [*effects, TellMaster(m.NotReady(message.round, VOID_SAMPLES))]
        return [*effects, *self.trainer.offer(opened)]

    def reduce(self, message: m.Reduce) -> list[PeerEffect]:
        effects = self.end_all(void_rounds(self.rounds, message))
        for overtaken, commit in overtaken_rounds(self.rounds, message.fragment):
            effects += self._lose(overtaken, commit)
        ordered = self.rounds.setdefault(
            message.round, LocalRound(message.round, message.fragment, message.version, at_step=0)
        )
        if message.attempt <= ordered.attempt or ordered.commit is not None:
            return effects
        if ordered.phase is RoundState.REDUCING:
            effects.append(StopReduction(ordered.round))
        ordered.phase, ordered.attempt = RoundState.REDUCING, message.attempt
        ordered.order, ordered.digest, ordered.reported = message, b"", None
        contribute = any(c.peer == self.me for c in message.contributors)
        if contribute and ordered.ready is None:
            reason = "our contribution is gone"
            ordered.reported = m.ReduceFailed(ordered.round, ordered.attempt, (), False, reason)
            return [*effects, TellMaster(ordered.reported)]
        if self.me not in message.receivers:
            return effects
        return [*effects, StartReduction(message, contribute)]

    def flush(self, message: m.Flush) -> list[PeerEffect]:
        flushed = self.rounds.get(message.round)
        if flushed is None or flushed.order is None or message.attempt <= flushed.attempt:
            return []
        return [FlushReduction(message)]

    def repair(self, message: m.Repair) -> list[PeerEffect]:
        repaired = self.rounds.get(message.round)
        if repaired is None or not repaired.undecided or message.attempt <= repaired.attempt:
            return []
        repaired.phase, repaired.attempt = RoundState.REDUCING, message.attempt
        repaired.digest, repaired.reported = b"", None
        return [RepairReduction(message)]

    def commit(self, message: m.Commit) -> list[PeerEffect]:
        if message.fragment >= len(self.fragments):
            return []
        self.trainer.reach(message.at_step)
        added = contents_of(message).added
        contributed = any(each.contributor.peer == self.me for each in added)
        self.leases.committed(message.round, contributed=contributed)
        held, decided = self.fragments[message.fragment], self.rounds.get(message.round)
        held.committed_version = max(held.committed_version, message.version + 1)
        if decided is None:
            missed = held.fetching is None and held.version == message.version
            return [_lost_result(message)] if missed else []
        if decided.commit is not None:
            return []
        decided.commit, decided.at_step = message, message.at_step
        reduced = decided.phase is RoundState.REDUCED
        if reduced and decided.digest != message.digest:
            return self._lose(decided, message)
        if not reduced and decided.attempt != message.attempt:
            return self._lose(decided, message)
        return self.advance(message.fragment)

    def abort(self, message: m.Abort) -> list[PeerEffect]:
        ended = self.rounds.get(message.round)
        return [] if ended is None else self._end(ended, committed=False)

    def _lose(self, lost: LocalRound, commit: m.Commit) -> list[PeerEffect]:
        """End a committed round whose result is not held and will not be."""
        return [*self._end(lost, committed=False), _lost_result(commit)]

    # ------------------------------------------------------------ reports of the peer's own tasks

    def posted(self, message: m.Posted, norm: float | None, refusal: str) -> list[PeerEffect]:
        """Take the trainer's pseudo-gradient; ``norm`` is None when it must be refused."""
        opened = self.rounds.get(message.round)
        if opened is None or opened.phase is not RoundState.OPEN:
            return []  # too late: the round went on without it, the delta stays with the trainer
        if message.offer != opened.offer:
            return []  # it crossed a ``Load``: the trainer posts again for the newest offer
        held = self.fragments[opened.fragment]
        if held.version != opened.version or message.version != opened.version:
            refusal = "the pseudo-gradient is based on another version"
            norm = None
        if norm is None:
            return [TellMaster(m.NotReady(message.round, refusal))]
        trained = self.leases.post(message.round, message.samples)
        if isinstance(trained, str):
            # What it trained on these samples would be in all its later updates: it starts afresh.
            self.trainer.loaded = False
            return [TellMaster(m.NotReady(message.round, trained)), *self.trainer.load()]
        opened.ready = m.Ready(
            opened.round,
            message.tokens,
            norm,
            held.root,
            message.step,
            message.step_s,
            trained,
            message.first_batches,
        )
        return [TellMaster(opened.ready)]

    def reduction_done(
        self,
        round_id: int,
        attempt: int,
        digest: bytes,
        manifest: tuple[m.ContributorRun, ...] = (),
        norm_sums: bytes = b"",
        momentum_square: float = 0.0,
    ) -> list[PeerEffect]:
        """Report the result of a reduction, or apply it if it is committed already."""
        reduced = self._reducing(round_id, attempt)
        if reduced is None:
            return []
        reduced.phase, reduced.digest = RoundState.REDUCED, digest
        if reduced.commit is not None:
            if reduced.commit.digest != digest:
                return self._lose(reduced, reduced.commit)
            return self.advance(reduced.fragment)
        reduced.reported = m.Reduced(
            round_id, attempt, digest, manifest, norm_sums, momentum_square
        )
        return [TellMaster(reduced.reported)]

    def reduction_failed(
        self, round_id: int, attempt: int, accused: Iterable[str], bad: bool, reason: str
    ) -> list[PeerEffect]:
        """Report a reduction that ended, or (``accused`` and not ``bad``) awaits a repair or an
        abort.
        """
        failed = self._reducing(round_id, attempt)
        if failed is None:
            return []
        report = m.ReduceFailed(round_id, attempt, tuple(accused), bad, reason)
        if failed.commit is not None:
            return [*self._end(failed, committed=False), TellMaster(report)]
        failed.reported = report
        return [TellMaster(report)]

    def _reducing(self, round_id: int, attempt: int) -> LocalRound | None:
        """Return the round, if it is being reduced in this attempt."""
        each = self.rounds.get(round_id)
        reducing = each is not None and each.phase is RoundState.REDUCING
        return each if each is not None and reducing and each.attempt == attempt else None

    def applied(self, round_id: int, head: m.FragmentHead) -> list[PeerEffect]:
        """Take the fragment's new head after the outer step, and go on with the next round."""
        ended = self.rounds.get(round_id)
        if ended is None:
            return []
        held = self.fragments[head.fragment]
        held.version, held.root = head.version, head.root
        effects: list[PeerEffect] = [TellMaster(m.Applied(round_id, head))]
        effects += self._end(ended, committed=True)
        waiting, held.fetching = held.fetching, None
        if waiting is not None:  # perhaps of the version that is held now
            effects += held.fetch(waiting)
        effects += self.advance(head.fragment)
        for other in self.rounds.values():
            if (
                other.phase is RoundState.OPEN
                and other.fragment == head.fragment
                and self.trainer.may_post
            ):
                effects += self.trainer.offer(other)
        return effects

    # ------------------------------------------------------------ moving on

    def advance(self, fragment: int) -> list[PeerEffect]:
        """Apply the next committed round of a fragment, if there is one and it can be applied."""
        held = self.fragments[fragment]
        if held.fetching is not None:
            return [*self._trim(), *self._store(fragment)]
        if held.version is None:
            return self.end_all(committed_rounds(self.rounds, fragment))
        effects: list[PeerEffect] = []
        for each in sorted(self.rounds.values(), key=lambda r: r.round):
            if each.fragment != fragment or each.commit is None:
                continue
            if each.phase is RoundState.APPLYING:
                return effects
            if each.version < held.version:
                effects += self._end(each, committed=False)
            elif each.version == held.version and each.phase is RoundState.REDUCED:
                each.phase = RoundState.APPLYING
                return [*effects, ApplyRound(each.commit)]
        return [*effects, *held.report_synced(), *self.trainer.load()]

    def _store(self, fragment: int) -> list[PeerEffect]:
        """Store the results of committed rounds until the fragment is copied."""
        waiting = [
            each
            for each in committed_rounds(self.rounds, fragment)
            if each.phase is RoundState.REDUCED and not each.stored
        ]
        for each in waiting:
            each.stored = True
        return [StoreResult(each.round) for each in waiting]

    def _trim(self) -> list[PeerEffect]:
        """End the oldest of too many rounds that a joiner holds; a later fetch contains them."""
        effects: list[PeerEffect] = []
        while len(self.rounds) > m.ROUNDS_HELD_MAX:
            oldest = self.rounds[min(self.rounds)]
            effects += self._end(oldest, committed=False)
        return effects

    def end_all(self, ended: Iterable[LocalRound]) -> list[PeerEffect]:
        return [effect for each in ended for effect in self._end(each, committed=False)]

    def _end(self, ended: LocalRound, *, committed: bool) -> list[PeerEffect]:
        """End a round here: tell the trainer, free its memory."""
        del self.rounds[ended.round]
        if ended.commit is None:
            self.leases.aborted(ended.round)
        effects: list[PeerEffect] = []
        if ended.phase is RoundState.REDUCING:
            effects.append(StopReduction(ended.round))
        added = contents_of(ended.commit).added if committed and ended.commit is not None else ()
        contributed = any(each.contributor.peer == self.me for each in added)
        told = self.trainer.tell_ended(ended, committed=committed, contributed=contributed)
        effects += [told, DropRound(ended.round)]
        if committed:
            effects += self.trainer.note_committed(ended, contributed=contributed)
        return effects


def _lost_result(commit: m.Commit) -> PeerEffect:
    """Tell the master that a committed result is not held here: it brings this peer in sync."""
    reason = "the committed result is not here"
    return TellMaster(m.ReduceFailed(commit.round, commit.attempt, (), False, reason))
