"""Control of a peer's trainer: its state, its rounds, and how far it may run.

A trainer never runs past its step limit, the first step at which a round may be due that it was
not told of. Without a master the limit is extended: the run goes on, and what the trainer learns
meanwhile comes with the next round.
"""

from __future__ import annotations

from attrs import define

from ...protocol import messages as m
from .local_round import LocalFragment, LocalRound, RoundState
from .peer_effects import PeerEffect, ReloadTrainer, TellTrainer

# A trainer posts for its next round no earlier than after this share of the steps between two
# rounds of a fragment. This matters only to a trainer that is past the next round's step: it went
# on while the master was away, or the run was rewound. Its rounds then come at most twice as often,
# until the steps agree.
WORTH_SHARE = 0.5


def next_boundary(step: int, sync_every: int, fragment_count: int) -> int:
    """Return the first step after ``step`` at which a fragment is due: a multiple of H / P."""
    turn = step * fragment_count // sync_every + 1
    while turn * sync_every // fragment_count <= step:
        turn += 1
    return turn * sync_every // fragment_count


@define
class TrainerControl:
    """One peer's trainer: what it was told, and its step limit.

    Attributes:
      rounds, fragments: the replica's; a round's ``offer`` and ``told_step`` and a fragment's
        ``worth_step`` and ``offer_count`` are written here only.
      sync_every, fragment_count: of the spec (H, P).
      run_step: the step that the run has reached, as the master told it.
      role, in_sync: this peer's, by the newest view.
      finished: the run is over.
      attached: a trainer with the run's layout is connected.
      loaded: the trainer has the shared state and may contribute.
      spoilt: the trainer's weights are not finite; its next ``Load`` says so.
      trained: all that the trainer did since its last ``Load`` is a contributor's training.
      leads: this peer leads the members of the newest view.
      total_steps: the step at which the run's last round is due; 0 for a run without an end.
      told_role: the trainer's last ``SetRole``.
      away: there is no session with the master.
      extended_limit: the step limit since the master was lost; None again as soon as the trainer
        was told of a round.
      extension_count: extensions so far.
      barred: what the trainer trains on now must not be contributed (see ``lease_book``).
      unbounded: while barred, the trainer was told to go on without rounds.
    """

    rounds: dict[int, LocalRound]
    fragments: list[LocalFragment]
    sync_every: int = 1
    fragment_count: int = 1
    run_step: int = 0
    role: m.Role = m.Role.SPARE
    in_sync: bool = False
    finished: bool = False
    attached: bool = False
    loaded: bool = False
    spoilt: bool = False
    trained: bool = False
    leads: bool = False
    total_steps: int = 0
    told_role: m.SetRole | None = None
    away: bool = False
    extended_limit: int | None = None
    extension_count: int = 0
    barred: bool = False
    unbounded: bool = False

    @property
    def contributing(self) -> bool:
        return self.role is m.Role.CONTRIBUTOR and self.in_sync

    @property
    def training(self) -> bool:
        """The trainer's steps count.

        A master that has just come back takes no contributor for in sync until enough of them are
        connected. They need not stand still for that.
        """
        resumed = self.extended_limit is not None and self.trained
        return self.role is m.Role.CONTRIBUTOR and (self.in_sync or resumed)

    @property
    def may_post(self) -> bool:
        return self.loaded and not self.barred

    # ------------------------------------------------------------ how far it may run

    def step_limit(self) -> int:
        """Return the first step at which a round is due that the trainer was not told of.

        A round that the trainer has not been told of does not count: the trainer would run past the
        round's step while ``RoundOpened`` is on its way.
        """
        offered = [max(r.at_step, r.told_step) for r in self.rounds.values() if r.offer]
        return next_boundary(max([self.run_step, *offered]), self.sync_every, self.fragment_count)

    def extend_limit(self) -> list[PeerEffect]:
        """Let the trainer go on without a master, with no limit for now."""
        self.away = True
        if self.extended_limit is None:
            self.extended_limit = m.COUNT_MAX
            self.extension_count += 1
        return self._tell_extension()

    def bound_extension(self, extension: int) -> list[PeerEffect]:
        """Leave the trainer ``sync_every`` steps past its limit, if that extension still lasts."""
        if self.extended_limit != m.COUNT_MAX or extension != self.extension_count:
            return []
        self.extended_limit = self.step_limit() + self.sync_every
        return self._tell_extension()

    def _tell_extension(self) -> list[PeerEffect]:
        if self.extended_limit is None or self.finished:
            return []
        if not (self.loaded and self.training):
            return []
        return [TellTrainer(m.ExtendStepLimit(self.extended_limit))]

    def _end_extension(self) -> list[PeerEffect]:
        """End an extension, which lasts while the master is away."""
        if self.away:
            return self._tell_extension()
        self.extended_limit = None
        return []

    def _limit_after_abort(self, aborted: LocalRound) -> int:
        """Return the step limit after an abort: the step at which the round will be opened again.

        The master has one round open at a time. If that is a later one already, it comes first, and
        a trainer that waited before its step would wait for ever.
        """
        at_step = max(aborted.at_step, aborted.told_step)
        later = any(
            other.offer and other.phase is RoundState.OPEN and other.at_step > aborted.at_step
            for other in self.rounds.values()
        )
        return at_step if at_step > self.run_step and not later else self.step_limit()

    def lost(self) -> None:
        self.attached = self.loaded = self.trained = self.spoilt = False
        self.told_role = None

    def bar(self, *, barred: bool) -> list[PeerEffect]:
        """Let a trainer that must not contribute train without rounds; then it starts afresh."""
        if not barred or not (self.loaded and self.training) or self.finished:
            was_barred, self.barred = self.barred, False
            return self.reload() if was_barred and self.loaded and not self.finished else []
        self.barred = True
        if self.unbounded:
            return []
        self.unbounded = True
        return [TellTrainer(m.ExtendStepLimit(m.COUNT_MAX))]

    # ------------------------------------------------------------ the shared state

    @property
    def valid(self) -> bool:
        """Every fragment is held at some committed version."""
        return bool(self.fragments) and all(f.version is not None for f in self.fragments)

    def load(self) -> list[PeerEffect]:
        """Load the shared state into the trainer, if it is there and the trainer has not got it."""
        return self.reload() if self.valid and not self.loaded else []

    def reach(self, step: int) -> None:
        self.run_step = max(self.run_step, step)

    def reload(self) -> list[PeerEffect]:
        """Load the shared state into an attached trainer, then offer it every open round."""
        if not self.attached:
            return []
        self.loaded, self.trained, self.unbounded = True, self.training, False
        worth_step = self.run_step + _worth_steps(self.sync_every // self.fragment_count)
        for fragment in self.fragments:
            fragment.worth_step = worth_step
        for each in self.rounds.values():
            each.offer = 0  # this may be another trainer than before
        load = ReloadTrainer(self.run_step, self.step_limit(), self.spoilt)
        self.spoilt = False
        # ``attach`` returns at the first load, and the script may ask at once who leads. Later a
        # spare that becomes a contributor must not train on before it has loaded.
        first = self.told_role is None
        effects: list[PeerEffect] = (
            [self._tell_role(), load] if first else [load, self._tell_role()]
        )
        for each in self.rounds.values():
            if each.unposted and not self.barred:
                effects += self.offer(each)
        return [*effects, *self._end_extension()]

    def set_role(self, role: m.Role, *, in_sync: bool, leads: bool) -> list[PeerEffect]:
        self.role, self.in_sync = role, in_sync
        if not self.finished:  # when a leader has left a finished run, nobody else saves as well
            self.leads = leads
        was_training = self.told_role is not None and self.told_role.contributing
        begins = self.training and not was_training
        if begins and self.valid and not self.finished and not self.trained:
            return self.reload()  # what a spare's trainer did is not a contribution: start afresh
        return self.update_role()

    def update_role(self) -> list[PeerEffect]:
        """Tell a loaded trainer its role if that differs from what it was told."""
        changed = self.told_role is None or self._role() != self.told_role
        return [self._tell_role()] if self.loaded and changed else []

    def set_total_steps(self, total_steps: int) -> list[PeerEffect]:
        """Take the step at which the run's last round is due from a new spec."""
        self.total_steps = total_steps
        return self.update_role()

    def _role(self) -> m.SetRole:
        why = "" if self.training else f"this peer is a {self.role.value}, kept in sync"
        return m.SetRole(self.training, why, self.leads, self.total_steps)

    def _tell_role(self) -> PeerEffect:
        self.told_role = self._role()
        return TellTrainer(self.told_role)

    # ------------------------------------------------------------ rounds

    def offer(self, opened: LocalRound) -> list[PeerEffect]:
        """Tell the trainer of an open round, once its fragment is at the round's base version."""
        fragment = self.fragments[opened.fragment]
        if fragment.version != opened.version:
            return []
        fragment.offer_count += 1
        opened.offer = fragment.offer_count
        return self._tell_opened(opened)

    def _tell_opened(self, opened: LocalRound) -> list[PeerEffect]:
        fragment, self.unbounded = self.fragments[opened.fragment], False
        opened.told_step = 0 if opened.nudged else max(opened.at_step, fragment.worth_step)
        message = m.RoundOpened(
            opened.round,
            opened.fragment,
            opened.version,
            opened.told_step,
            self.step_limit(),
            opened.offer,
        )
        return [TellTrainer(message), *self._end_extension()]

    def nudge(self, opened: LocalRound) -> list[PeerEffect]:
        """Ask for what the trainer has by now: the master named an earlier step for the round."""
        opened.nudged = True
        return self._tell_opened(opened) if opened.unposted and opened.offer else []

    def tell_ended(self, ended: LocalRound, *, committed: bool, contributed: bool) -> PeerEffect:
        held = self.fragments[ended.fragment] if ended.fragment < len(self.fragments) else None
        version = ended.version if held is None or held.version is None else held.version
        self.unbounded = False
        step_limit = self.step_limit() if committed else self._limit_after_abort(ended)
        return TellTrainer(
            m.RoundEnded(
                ended.round,
                ended.fragment,
                committed,
                contributed,
                version,
                self.run_step,
                step_limit,
            )
        )

    def note_committed(self, ended: LocalRound, *, contributed: bool) -> list[PeerEffect]:
        """Go on after a committed round that the trainer was told of."""
        if contributed and ended.ready is not None:
            worth_step = ended.ready.step + _worth_steps(self.sync_every)
            self.fragments[ended.fragment].worth_step = worth_step
        self.trained &= self.training  # a spare's trainer drops its own steps at the new version
        return self._end_extension()


def _worth_steps(between_steps: int) -> int:
    """Return the steps to train since the last round before another one is worth its bytes."""
    return int(WORTH_SHARE * between_steps)
