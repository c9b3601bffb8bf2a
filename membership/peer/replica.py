"""The peer's rules: the state of its rounds and fragments, what to apply and what to fetch. Pure.

Messages of the master and reports of the peer's own tasks come in, effects go out; there is no
I/O, no clock and no tensor here. The master decides. This machine ensures that, in any order of
messages, a fragment moves from a version to the next one only by the result that was committed for
it.

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

from collections.abc import Iterable, Mapping

from attrs import Factory, define, field

from ...protocol.messages import (
    FRAGMENTS_MAX,
    NO_DIGEST,
    ROUNDS_HELD_MAX,
    Abort,
    Applied,
    Commit,
    ContributorRun,
    Finish,
    Flush,
    FragmentHead,
    MemberInfo,
    NotReady,
    Open,
    Posted,
    Ready,
    Reduce,
    Reduced,
    ReduceFailed,
    Release,
    Repair,
    Role,
    SyncFailed,
    SyncFragment,
    View,
    Welcome,
)
from ..shared.manifest import contents_of
from ..spec.spec import EVERY
from .lease_book import LeaseBook
from .local_fragment import LocalFragment
from .local_round import LocalRound, RoundState, committed_rounds, overtaken_rounds, void_rounds
from .peer_effects import (
    ApplyRound,
    DiscardState,
    DropRound,
    FlushReduction,
    PeerEffect,
    RepairReduction,
    StartReduction,
    StopFetch,
    StopReduction,
    StoreResult,
    TellMaster,
)
from .trainer_control import TrainerControl

VOID_SAMPLES = "its trainer is still on samples that were given to others"


@define
class Replica:
    """A peer's half of the protocol.

    Attributes:
      me: this peer's id.
      term, nonce: of the newest master that was obeyed.
      branch: of the run's history.
      rounds: by number.
    """

    me: str
    lineage: bytes = b""
    term: int = 0
    nonce: bytes = b""
    branch: int = 0
    view: View | None = None
    fragments: list[LocalFragment] = field(factory=list)
    rounds: dict[int, LocalRound] = field(factory=dict)
    leases: LeaseBook = field(factory=LeaseBook)
    trainer: TrainerControl = Factory(
        lambda self: TrainerControl(self.rounds, self.fragments), takes_self=True
    )

    # ------------------------------------------------------------ questions

    @property
    def valid(self) -> bool:
        """Every fragment is held at some committed version."""
        return bool(self.fragments) and all(f.version is not None for f in self.fragments)

    @property
    def settled(self) -> bool:
        """Every known commit is applied: the run once was in exactly the state that is held.

        Between two rounds that are applied side by side this need not be so.
        """
        return self.valid and all(each.commit is None for each in self.rounds.values())

    @property
    def behind(self) -> bool:
        """The run has committed something that this peer knows of and does not hold."""
        return any(each.behind for each in self.fragments)

    def keeps_checkpoints(self, peers: int | str) -> bool:
        """Return whether this peer writes checkpoints: all in sync do, or the ``peers`` oldest
        members.

        All peers read the same view, so all come to the same answer.
        """
        if (
            not self.trainer.in_sync
            or self.view is None
            or not (isinstance(peers, int) or peers == EVERY)
        ):
            return False
        writing = [m.peer for m in sorted(self.view.members, key=lambda m: m.number) if m.in_sync]
        return self.me in (writing[:peers] if isinstance(peers, int) else writing)

    @property
    def fetching(self) -> bool:
        """A fragment is being copied from donors."""
        return any(each.fetching is not None for each in self.fragments)

    def heads(self) -> tuple[FragmentHead, ...]:
        """Return the fragments that are held, for ``Hello``."""
        return tuple(head for each in self.fragments if (head := each.head) is not None)

    def undecided(self) -> tuple[Reduced, ...]:
        """Return the attempts whose outcome is not known here, with their results.

        The result is ``NO_DIGEST`` while there is none.
        """
        return tuple(
            Reduced(each.round, each.attempt, each.digest or NO_DIGEST)
            for each in self.rounds.values()
            if each.undecided
        )[-FRAGMENTS_MAX:]

    # ------------------------------------------------------------ the state to start from

    def founded(self, lineage: bytes, heads: Iterable[FragmentHead]) -> None:
        """Take the trainer's weights as version 0 of the run."""
        self.lineage = lineage
        self.fragments[:] = [LocalFragment(h.fragment, h.version, h.root) for h in heads]

    def restored(
        self,
        lineage: bytes,
        fragment_count: int,
        heads: Iterable[FragmentHead],
        step: int,
        term: int,
        nonce: bytes,
    ) -> None:
        """Take what an earlier process of this peer has written, before the first session."""
        self.lineage, self.term, self.nonce = lineage, term, nonce
        self.trainer.run_step = step
        self.fragments[:] = map(LocalFragment, range(fragment_count))
        for head in heads:
            self.fragments[head.fragment] = LocalFragment(head.fragment, head.version, head.root)

    def welcome(self, message: Welcome, sync_every: int, fragment_count: int) -> list[PeerEffect]:
        """Begin a session with the master, also once the run was founded.

        ``sync_every`` and ``fragment_count`` are the spec's.
        """
        trainer = self.trainer
        trainer.away, trainer.sync_every = False, sync_every
        trainer.fragment_count, trainer.total_steps = fragment_count, message.total_steps
        self.term, self.nonce = message.term, message.nonce
        known = self.lineage == message.lineage
        trainer.run_step = max(trainer.run_step, message.step) if known else message.step
        effects = self._end_unknown(message)
        for fragment in self.fragments:
            if fragment.fetching is not None:
                fragment.fetching = None
                effects.append(StopFetch(fragment.index))
        if not known:
            if any(f.version is not None for f in self.fragments):
                effects.append(DiscardState())
            self.lineage = message.lineage
            trainer.loaded = False
            self.fragments.clear()
        if message.lineage and not self.fragments:
            self.fragments[:] = map(LocalFragment, range(fragment_count))
        for commit in message.committed:
            effects += self.commit(commit)
        return [*effects, *self._load_trainer(), *trainer.update_role()]

    def _end_unknown(self, message: Welcome) -> list[PeerEffect]:
        """End the rounds that the master does not know any more, or does not continue."""
        effects: list[PeerEffect] = []
        if message.branch != self.branch:
            # Commits of the other branch are void. One that is applied already is the master's to
            # undo.
            self.branch = message.branch
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

    def obeys(self, term: int, nonce: bytes) -> bool:
        """Return whether a master of this term may be obeyed.

        A master of an older term may not, and of one term only the master that was met first.
        """
        return term > self.term or (term == self.term and self.nonce in (b"", nonce))

    def take_view(self, message: View) -> list[PeerEffect]:
        if self.view is not None and message.number < self.view.number:
            return []
        self.view = message
        self._reach(message.step)
        mine = next((member for member in message.members if member.peer == self.me), None)
        role, in_sync = (Role.SPARE, False) if mine is None else (mine.role, mine.in_sync)
        leads = mine is not None and mine == leader_of(message)
        return self.trainer.set_role(role, in_sync=in_sync, leads=leads, valid=self.valid)

    def _reach(self, step: int) -> None:
        self.trainer.run_step = max(self.trainer.run_step, step)

    def open(self, message: Open) -> list[PeerEffect]:
        if not 0 <= message.fragment < len(self.fragments):
            return [TellMaster(NotReady(message.round, "no such fragment here"))]
        if self.fragments[message.fragment].version not in (message.version, message.version - 1):
            return [TellMaster(NotReady(message.round, "the fragment is not in sync here"))]
        known = self.rounds.get(message.round)
        if known is not None and message.at_step < known.at_step:
            return self.trainer.nudge(known)
        effects = self._end_all(void_rounds(self.rounds, message))
        opened = LocalRound(message.round, message.fragment, message.version, message.at_step)
        self.rounds[message.round] = opened
        if not self.trainer.loaded:
            return [*effects, TellMaster(NotReady(message.round, "no trainer is attached"))]
        if self.trainer.barred:
            return [*effects, TellMaster(NotReady(message.round, VOID_SAMPLES))]
        return [*effects, *self.trainer.offer(opened)]

    def _end_all(self, ended: Iterable[LocalRound]) -> list[PeerEffect]:
        return [effect for each in ended for effect in self._end(each, committed=False)]

    def reduce(self, message: Reduce) -> list[PeerEffect]:
        effects = self._end_all(void_rounds(self.rounds, message))
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
        if contribute and ordered.posted is None:
            reason = "our contribution is gone"
            ordered.reported = ReduceFailed(ordered.round, ordered.attempt, (), False, reason)
            return [*effects, TellMaster(ordered.reported)]
        if self.me not in message.receivers:
            return effects
        return [*effects, StartReduction(message, contribute)]

    def flush(self, message: Flush) -> list[PeerEffect]:
        flushed = self.rounds.get(message.round)
        if flushed is None or flushed.order is None or message.attempt <= flushed.attempt:
            return []
        return [FlushReduction(message)]

    def repair(self, message: Repair) -> list[PeerEffect]:
        repaired = self.rounds.get(message.round)
        if repaired is None or not repaired.undecided or message.attempt <= repaired.attempt:
            return []
        repaired.phase, repaired.attempt = RoundState.REDUCING, message.attempt
        repaired.digest, repaired.reported = b"", None
        return [RepairReduction(message)]

    def commit(self, message: Commit) -> list[PeerEffect]:
        if message.fragment >= len(self.fragments):
            return []
        self._reach(message.at_step)
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
        return self._advance(message.fragment)

    def abort(self, message: Abort) -> list[PeerEffect]:
        ended = self.rounds.get(message.round)
        return [] if ended is None else self._end(ended, committed=False)

    def finish(self, _message: Finish) -> list[PeerEffect]:
        self.trainer.finished = True
        return []

    def _lose(self, lost: LocalRound, commit: Commit) -> list[PeerEffect]:
        """End a committed round whose result is not held and will not be."""
        return [*self._end(lost, committed=False), _lost_result(commit)]

    def sync(self, message: SyncFragment) -> list[PeerEffect]:
        index = message.head.fragment
        if index >= len(self.fragments):
            failed = SyncFailed(index, message.head.version, (), "no such fragment here")
            return [TellMaster(failed)]
        return self.fragments[index].fetch(message)

    def stop_copy(self, message: Release) -> list[PeerEffect]:
        """Stop a copy that rounds have overtaken, and drop the rounds kept for its replay."""
        held = self.fragments[message.fragment] if message.fragment < len(self.fragments) else None
        if held is None or held.fetching is None or held.fetching.head.version != message.version:
            return []
        held.fetching = None
        return [
            StopFetch(message.fragment),
            *self._end_all(committed_rounds(self.rounds, message.fragment)),
        ]

    # ------------------------------------------------------------ reports of the peer's own tasks

    def trainer_came(self) -> list[PeerEffect]:
        """Let a trainer with the run's layout begin, once the shared state is there."""
        self.trainer.attached, self.trainer.loaded = True, False
        return self._load_trainer()

    def trainer_spoilt(self) -> list[PeerEffect]:
        """Replace a trainer's weights, which are not finite, once the shared state is there."""
        self.trainer.spoilt, self.trainer.loaded = True, False
        return self._load_trainer()

    def trainer_lost(self) -> list[PeerEffect]:
        """Tell the master not to wait for the trainer; rounds that it has posted for go on."""
        self.trainer.lost()
        self.leases.trainer_gone()
        return [
            TellMaster(NotReady(each.round, "the trainer is gone"))
            for each in self.rounds.values()
            if each.unposted
        ]

    def posted(self, message: Posted, norm: float | None, refusal: str) -> list[PeerEffect]:
        """Take the trainer's pseudo-gradient; ``norm`` is None when it must be refused."""
        opened = self.rounds.get(message.round)
        if opened is None or opened.phase is not RoundState.OPEN:
            return []  # too late: the round went on without it, the delta stays with the trainer
        held = self.fragments[opened.fragment]
        if held.version != opened.version or message.version != opened.version:
            refusal = "the pseudo-gradient is based on another version"
            norm = None
        if norm is None:
            return [TellMaster(NotReady(message.round, refusal))]
        trained = self.leases.post(message.round, message.samples)
        if isinstance(trained, str):
            # What it trained on these samples would be in all its later updates: it starts afresh.
            self.trainer.loaded = False
            return [TellMaster(NotReady(message.round, trained)), *self._load_trainer()]
        opened.posted = message
        ready = Ready(
            opened.round,
            message.tokens,
            norm,
            held.root,
            message.step,
            message.step_s,
            trained,
            message.first_batches,
        )
        return [TellMaster(ready)]

    def look_at_samples(self, trained: Mapping[int, int]) -> list[PeerEffect]:
        """Bar the trainer from rounds while it trains on void samples (see ``lease_book``).

        Args:
          trained: by data rank, how many samples the trainer has trained.
        """
        return self.trainer.bar(barred=self.leases.barred(trained))

    def reduction_done(
        self,
        round_id: int,
        attempt: int,
        digest: bytes,
        manifest: tuple[ContributorRun, ...] = (),
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
            return self._advance(reduced.fragment)
        reduced.reported = Reduced(round_id, attempt, digest, manifest, norm_sums, momentum_square)
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
        report = ReduceFailed(round_id, attempt, tuple(accused), bad, reason)
        if failed.commit is not None:
            return [*self._end(failed, committed=False), TellMaster(report)]
        failed.reported = report
        return [TellMaster(report)]

    def _reducing(self, round_id: int, attempt: int) -> LocalRound | None:
        """Return the round, if it is being reduced in this attempt."""
        each = self.rounds.get(round_id)
        reducing = each is not None and each.phase is RoundState.REDUCING
        return each if each is not None and reducing and each.attempt == attempt else None

    def applied(self, round_id: int, head: FragmentHead) -> list[PeerEffect]:
        """Take the fragment's new head after the outer step, and go on with the next round."""
        ended = self.rounds.get(round_id)
        if ended is None:
            return []
        held = self.fragments[head.fragment]
        held.version, held.root = head.version, head.root
        effects: list[PeerEffect] = [TellMaster(Applied(round_id, head))]
        effects += self._end(ended, committed=True)
        effects += self._advance(head.fragment)
        for other in self.rounds.values():
            if (
                other.phase is RoundState.OPEN
                and other.fragment == head.fragment
                and self.trainer.loaded
                and not self.trainer.barred
            ):
                effects += self.trainer.offer(other)
        return effects

    def fetched(
        self, head: FragmentHead, received_bytes: int, bad_donors: Iterable[str] = ()
    ) -> list[PeerEffect]:
        """Take a copy that is verified and installed; ``bad_donors`` served wrong blocks."""
        held = self.fragments[head.fragment]
        if not held.is_fetching(head):
            return []
        held.install(head, received_bytes, bad_donors)
        self.trainer.loaded = False
        return self._advance(head.fragment)

    def fetch_failed(
        self, head: FragmentHead, bad_donors: Iterable[str], reason: str
    ) -> list[PeerEffect]:
        """Report a copy that failed."""
        held = self.fragments[head.fragment]
        return held.fail(head, bad_donors, reason) if held.is_fetching(head) else []

    # ------------------------------------------------------------ moving on

    def _load_trainer(self) -> list[PeerEffect]:
        return self.trainer.reload() if self.valid and not self.trainer.loaded else []

    def _advance(self, fragment: int) -> list[PeerEffect]:
        """Apply the next committed round of a fragment, if there is one and it can be applied."""
        held = self.fragments[fragment]
        if held.fetching is not None:
            return [*self._trim(), *self._store(fragment)]
        if held.version is None:
            return self._end_all(committed_rounds(self.rounds, fragment))
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
        return [*effects, *held.report_synced(), *self._load_trainer()]

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
        while len(self.rounds) > ROUNDS_HELD_MAX:
            oldest = self.rounds[min(self.rounds)]
            effects += self._end(oldest, committed=False)
        return effects

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


def _lost_result(commit: Commit) -> PeerEffect:
    """Tell the master that a committed result is not held here: it brings this peer in sync."""
    reason = "the committed result is not here"
    return TellMaster(ReduceFailed(commit.round, commit.attempt, (), False, reason))


def leader_of(view: View) -> MemberInfo | None:
    """Return the member that evaluates and saves for the run: the contributor that joined first.

    Contributors that are in sync come before those that are not. None without a contributor.
    """
    contributors = [each for each in view.members if each.role is Role.CONTRIBUTOR]
    return min(contributors, key=lambda each: (not each.in_sync, each.number), default=None)
