"""The peer's rules: which round is where, what may be applied, what must be fetched. Pure.

Messages of the master and reports of the peer's own tasks come in, effects go out; there is no
I/O, no clock and no tensor here. The master decides; this machine makes sure that whatever arrives
in whatever order, a fragment only ever moves from a version to the next one by the result that was
committed for it.

A round at a peer:

    OPEN --Reduce--> REDUCING --reduction done--> REDUCED --Commit--> APPLYING --applied--> (gone)
      |                  |                            |
      +------------------+----------Abort-------------+---------------------------------> (gone)

A later attempt's ``Reduce`` or ``Repair`` goes back to REDUCING. ``Commit`` may come before our own
reduction is done (a spare that lags): the round then waits in REDUCING with its commit known. A
committed round of a fragment that is still being fetched waits too: that is how a joiner replays what
was decided while it copied the base.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable

from attrs import define, field

from ...protocol.messages import (
    COUNT_MAX,
    FRAGMENTS_MAX,
    NO_DIGEST,
    ROUNDS_HELD_MAX,
    Abort,
    Applied,
    Commit,
    ContributorRun,
    Diagnose,
    Donate,
    ExtendStepLimit,
    Finish,
    Flush,
    FragmentHead,
    Message,
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
    RoundEnded,
    RoundOpened,
    SetContributing,
    Synced,
    SyncFailed,
    SyncFragment,
    View,
    Welcome,
)
from ..manifest import went_in
from ..spec.spec import EVERY
from .peer_effects import (
    ApplyRound,
    DiagnoseReduction,
    DiscardState,
    DropRound,
    FetchFragment,
    FlushReduction,
    PeerEffect,
    PinFragment,
    ReloadTrainer,
    RepairReduction,
    StartReduction,
    StopFetch,
    StopReduction,
    TellMaster,
    TellTrainer,
    UnpinFragment,
)

# Later rounds of a fragment that are ordered while a committed one still lacks frames. Nobody sends
# that one any more by then: a link may have taken its frames with it, and a sender gives up what a
# slow listener has not got after fewer rounds than that.
OVERTAKEN_MAX = 8
# Of the steps between two rounds of a fragment, so much is trained before the next one is posted. It
# only matters to a trainer that is past the next round's step by then: it went on while the master was
# away, or the run was rewound. Its rounds then come twice as often at most, until the steps agree.
WORTH_SHARE = 0.5


# ---------------------------------------------------------------- state


class RoundState(enum.Enum):
    OPEN = "open"
    REDUCING = "reducing"
    REDUCED = "reduced"
    APPLYING = "applying"


@define
class RoundHere:
    """One round as this peer sees it."""

    round: int
    fragment: int
    version: int
    at_step: int
    phase: RoundState = RoundState.OPEN
    attempt: int = 0
    order: Reduce | None = None
    posted: Posted | None = None  # our trainer's pseudo-gradient for it
    offered: bool = False  # the trainer was told that it is open
    told_step: int = 0  # at which it is to post, as it was told
    nudged: bool = False  # the others wait: what is trained by now is wanted
    digest: bytes = b""  # of the result we hold, when REDUCED
    reported: Reduced | ReduceFailed | None = None  # what became of the attempt here
    commit: Commit | None = None


@define
class FragmentHere:
    """One fragment as this peer holds it: ``version`` is None while we hold nothing valid."""

    version: int | None = None
    root: bytes = b""
    fetching: SyncFragment | None = None
    synced_due: bool = False  # a fetch is installed and ``Synced`` not yet sent
    received_bytes: int = 0
    bad_donors: tuple[str, ...] = ()  # of that fetch
    worth_step: int = 0  # before that our trainer has too little for another round


def next_boundary(step: int, sync_every: int, fragment_count: int) -> int:
    """The first step after ``step`` at which some fragment is due: multiples of H / P, floored."""
    turn = step * fragment_count // sync_every + 1
    while turn * sync_every // fragment_count <= step:
        turn += 1
    return turn * sync_every // fragment_count


@define
class Replica:
    """A peer's half of the protocol.

    Attributes:
      me: our peer id.
      sync_every, fragment_count: of the spec (H, P).
      away: there is no session with the master.
      extended_limit: how far the trainer may go beyond its hold since the master was lost; None again
        as soon as it was told of a round.
      lift_count: lifts so far.
      trained: what the trainer has done since its last ``Load`` is a contributor's training.
      told_training: the trainer was last told that its steps count.
    """

    me: str
    sync_every: int = 1
    fragment_count: int = 1
    lineage: bytes = b""
    term: int = 0  # of the newest master that we have obeyed
    nonce: bytes = b""  # of that master
    branch: int = 0  # of the run's history
    step: int = 0
    view: View | None = None
    role: Role = Role.SPARE
    in_sync: bool = False
    trainer_attached: bool = False
    trainer_loaded: bool = False  # the trainer has the shared state and may contribute
    finished: bool = False
    away: bool = False
    extended_limit: int | None = None
    lift_count: int = 0
    trained: bool = False
    told_training: bool = False
    fragments: list[FragmentHere] = field(factory=list)
    rounds: dict[int, RoundHere] = field(factory=dict)

    # ------------------------------------------------------------ questions

    @property
    def valid(self) -> bool:
        """Every fragment is held at some committed version."""
        return bool(self.fragments) and all(f.version is not None for f in self.fragments)

    @property
    def contributing(self) -> bool:
        return self.role is Role.CONTRIBUTOR and self.in_sync

    @property
    def training(self) -> bool:
        """Our trainer's steps count. A master that has just come back takes its contributors for
        not in sync until enough of them are there; they need not stand still for that."""
        back = self.extended_limit is not None and self.trained and self.role is Role.CONTRIBUTOR
        return self.contributing or back

    @property
    def settled(self) -> bool:
        """All that was committed, as far as we have heard, is in what we hold: the run was exactly
        here. Between two rounds that are applied side by side it need not have been."""
        return self.valid and all(here.commit is None for here in self.rounds.values())

    def keeps_checkpoints(self, peers: int | str) -> bool:
        """Whether we are one of those who write: all in sync, or the ``peers`` of them that have
        been members for longest. All read the same view, so all come to the same."""
        if not self.in_sync or self.view is None or not (isinstance(peers, int) or peers == EVERY):
            return False
        keeping = [m.peer for m in sorted(self.view.members, key=lambda m: m.number) if m.in_sync]
        return self.me in (keeping[:peers] if isinstance(peers, int) else keeping)

    def is_copying(self, fragment: int) -> bool:
        """Results of this fragment wait until its copy is whole."""
        return fragment < len(self.fragments) and self.fragments[fragment].fetching is not None

    def heads(self) -> tuple[FragmentHead, ...]:
        """What we hold, for ``Hello``."""
        return tuple(
            FragmentHead(index, here.version, here.root)
            for index, here in enumerate(self.fragments)
            if here.version is not None
        )

    def undecided(self) -> tuple[Reduced, ...]:
        """Attempts whose outcome we have not heard, with our results, or ``NO_DIGEST``: not yet."""
        return tuple(
            Reduced(r.round, r.attempt, r.digest or NO_DIGEST)
            for r in self.rounds.values()
            if r.phase in (RoundState.REDUCING, RoundState.REDUCED) and r.commit is None
        )[-FRAGMENTS_MAX:]

    def step_limit(self) -> int:
        """How far a trainer may go before it hears of the next round: the first step at which one
        is due that it was not told of. A round that we know is not enough: the trainer would run
        past its step while the message is on its way."""
        opened = [max(r.at_step, r.told_step) for r in self.rounds.values() if r.offered]
        return next_boundary(max([self.step, *opened]), self.sync_every, self.fragment_count)

    # ------------------------------------------------------------ without a master

    def master_gone(self) -> list[PeerEffect]:
        """The session broke. The trainer goes on: what it learns meanwhile comes with the next
        round. The caller sets a bound later, by ``bound_lift`` with ``lift_count``."""
        self.away = True
        if self.extended_limit is None:
            self.extended_limit = COUNT_MAX
            self.lift_count += 1
        return self._lift()

    def bound_lift(self, lift_count: int) -> list[PeerEffect]:
        """The master has been away for long: only ``sync_every`` steps past the hold are left."""
        if self.extended_limit != COUNT_MAX or lift_count != self.lift_count:
            return []
        self.extended_limit = self.step_limit() + self.sync_every
        return self._lift()

    def _lift(self) -> list[PeerEffect]:
        if self.extended_limit is None or self.finished:
            return []
        if not (self.trainer_loaded and self.training):
            return []
        return [TellTrainer(ExtendStepLimit(self.extended_limit))]

    def _heard_of_round(self) -> list[PeerEffect]:
        """The trainer was told of a round, which ends a lift; but not while the master is away."""
        if self.away:
            return self._lift()
        self.extended_limit = None
        return []

    # ------------------------------------------------------------ the state we start from

    def founded(self, lineage: bytes, heads: Iterable[FragmentHead]) -> None:
        """Our trainer's weights became version 0 of the run."""
        self.lineage = lineage
        self.fragments = [FragmentHere(head.version, head.root) for head in heads]

    def restored(
        self,
        lineage: bytes,
        fragment_count: int,
        heads: Iterable[FragmentHead],
        step: int,
        term: int,
        nonce: bytes,
    ) -> None:
        """Before the first session: an earlier process of this peer has kept this."""
        self.lineage, self.step, self.term, self.nonce = lineage, step, term, nonce
        self.fragments = [FragmentHere() for _ in range(fragment_count)]
        for head in heads:
            self.fragments[head.fragment] = FragmentHere(head.version, head.root)

    def welcome(self, message: Welcome, fragment_count: int) -> list[PeerEffect]:
        """A (new) session with the master begins, or the run has just been founded."""
        effects: list[PeerEffect] = []
        self.away = False
        self.term, self.nonce = message.term, message.nonce
        self.step = (
            max(self.step, message.step) if self.lineage == message.lineage else message.step
        )
        committed = {commit.round: commit for commit in message.committed}
        if message.branch != self.branch:
            # What was committed there is void, unless it is applied already: the master will say.
            self.branch = message.branch
            for here in list(self.rounds.values()):
                if here.commit is not None and here.phase is not RoundState.APPLYING:
                    effects += self._end(here, committed=False)
        for round_id in sorted(self.rounds):
            here = self.rounds[round_id]
            if here.phase is RoundState.APPLYING or here.commit is not None:
                continue
            if round_id in committed and here.phase is RoundState.REDUCED:
                continue
            if round_id in message.going_on:
                if here.reported is not None:
                    effects.append(TellMaster(here.reported))
                continue
            effects += self._end(here, committed=False)
        for index, fragment in enumerate(self.fragments):
            if fragment.fetching is not None:
                fragment.fetching = None
                effects.append(StopFetch(index))
        if message.lineage != self.lineage:
            if self.fragments and any(f.version is not None for f in self.fragments):
                effects.append(DiscardState())
            self.lineage = message.lineage
            self.trainer_loaded = False
            self.fragments = []
        self.fragment_count = fragment_count
        if message.lineage and not self.fragments:
            self.fragments = [FragmentHere() for _ in range(fragment_count)]
        for commit in message.committed:
            effects += self.receive(commit)
        if self.valid and not self.trainer_loaded:
            effects += self._reload()
        return effects

    # ------------------------------------------------------------ the master speaks

    def obeys(self, term: int, nonce: bytes) -> bool:
        """Whether a master of this term may be obeyed: never an older one than before, and of one
        term only the one that was met first.
        """
        return term > self.term or (term == self.term and self.nonce in (b"", nonce))

    def receive(self, message: Message) -> list[PeerEffect]:
        """Handle one message of the master (all but ``Welcome``)."""
        match message:
            case View():
                return self._view(message)
            case Open():
                return self._open(message)
            case Reduce():
                return self._reduce(message)
            case Flush():
                return self._flush(message)
            case Diagnose():
                return [DiagnoseReduction(message)]
            case Repair():
                return self._repair(message)
            case Commit():
                return self._commit(message)
            case Abort():
                here = self.rounds.get(message.round)
                return [] if here is None else self._end(here, committed=False)
            case SyncFragment():
                return self._sync(message)
            case Donate():
                return [PinFragment(message)]
            case Release() if message.receiver == self.me:
                return self._stop_copy(message)
            case Release():
                return [UnpinFragment(message)]
            case Finish():
                self.finished = True
                return []
            case _:
                return []

    def _view(self, message: View) -> list[PeerEffect]:
        if self.view is not None and message.number < self.view.number:
            return []
        self.view = message
        self.step = max(self.step, message.step)
        mine = [member for member in message.members if member.peer == self.me]
        self.role = mine[0].role if mine else Role.SPARE
        self.in_sync = bool(mine) and mine[0].in_sync
        if self.training == self.told_training:
            return []
        if self.training and self.valid and not self.finished and not self.trained:
            return self._reload()  # a spare's warm-up steps are not training: it starts afresh
        return [self._tell_role()] if self.trainer_loaded else []

    def _tell_role(self) -> PeerEffect:
        self.told_training = self.training
        why = "" if self.training else f"this peer is a {self.role.value}, kept in sync"
        return TellTrainer(SetContributing(self.training, why))

    def _open(self, message: Open) -> list[PeerEffect]:
        if not 0 <= message.fragment < len(self.fragments):
            return [TellMaster(NotReady(message.round, "no such fragment here"))]
        if self.fragments[message.fragment].version not in (message.version, message.version - 1):
            return [TellMaster(NotReady(message.round, "the fragment is not in sync here"))]
        known = self.rounds.get(message.round)
        if known is not None and message.at_step < known.at_step:
            return self._nudge(known)
        effects = self._end_void(message.fragment, message.round)
        here = RoundHere(message.round, message.fragment, message.version, message.at_step)
        self.rounds[message.round] = here
        if not self.trainer_loaded:
            return [*effects, TellMaster(NotReady(message.round, "no trainer is attached"))]
        return [*effects, *self._offer(here)]

    def _nudge(self, here: RoundHere) -> list[PeerEffect]:
        """The round is told again with an earlier step: it waits for us."""
        here.nudged = True
        if here.phase is RoundState.OPEN and here.posted is None and here.offered:
            return self._offer(here)
        return []

    def _end_void(self, fragment: int, round_id: int) -> list[PeerEffect]:
        """A new round of a fragment: earlier ones that are not committed by now never will be."""
        void = [
            here
            for here in self.rounds.values()
            if here.fragment == fragment and here.round < round_id and here.commit is None
        ]
        return [effect for here in void for effect in self._end(here, committed=False)]

    def _offer(self, here: RoundHere) -> list[PeerEffect]:
        """Tell the trainer of an open round, once its fragment is at the round's base version."""
        fragment = self.fragments[here.fragment]
        if fragment.version != here.version:
            return []
        here.offered = True
        here.told_step = 0 if here.nudged else max(here.at_step, fragment.worth_step)
        opened = RoundOpened(
            here.round, here.fragment, here.version, here.told_step, self.step_limit()
        )
        return [TellTrainer(opened), *self._heard_of_round()]

    def _end_overtaken(self, fragment: int) -> list[PeerEffect]:
        """Committed rounds whose results will not come any more: ask to be brought in sync."""
        numbers = sorted(here.round for here in self.rounds.values() if here.fragment == fragment)
        effects: list[PeerEffect] = []
        for number in numbers[: 1 - OVERTAKEN_MAX]:  # the one that is ordered now counts, too
            here = self.rounds[number]
            if here.commit is not None and here.phase is RoundState.REDUCING:
                effects += [*self._end(here, committed=False), *self._lost_result(here.commit)]
        return effects

    def _reduce(self, message: Reduce) -> list[PeerEffect]:
        effects = self._end_void(message.fragment, message.round)
        effects += self._end_overtaken(message.fragment)
        here = self.rounds.get(message.round)
        if here is None:
            here = RoundHere(message.round, message.fragment, message.version, at_step=0)
            self.rounds[message.round] = here
        if message.attempt <= here.attempt or here.commit is not None:
            return effects
        if here.phase is RoundState.REDUCING:
            effects.append(StopReduction(here.round))
        here.phase, here.attempt, here.order = RoundState.REDUCING, message.attempt, message
        here.digest, here.reported = b"", None
        contribute = any(c.peer == self.me for c in message.contributors)
        if contribute and here.posted is None:
            return [*effects, *self._fail(here, "our contribution is gone")]
        if self.me not in message.receivers:
            return effects
        return [*effects, StartReduction(message, contribute)]

    def _flush(self, message: Flush) -> list[PeerEffect]:
        here = self.rounds.get(message.round)
        if here is None or here.order is None or message.attempt <= here.attempt:
            return []
        return [FlushReduction(message)]

    def _repair(self, message: Repair) -> list[PeerEffect]:
        here = self.rounds.get(message.round)
        if here is None or here.phase not in (RoundState.REDUCING, RoundState.REDUCED):
            return []
        if message.attempt <= here.attempt or here.commit is not None:
            return []
        here.phase, here.attempt, here.digest = RoundState.REDUCING, message.attempt, b""
        here.reported = None
        return [RepairReduction(message)]

    def _fail(self, here: RoundHere, reason: str) -> list[PeerEffect]:
        here.reported = ReduceFailed(here.round, here.attempt, (), False, reason)
        return [TellMaster(here.reported)]

    def _commit(self, message: Commit) -> list[PeerEffect]:
        if message.fragment >= len(self.fragments):
            return []
        self.step = max(self.step, message.at_step)
        here = self.rounds.get(message.round)
        held = self.fragments[message.fragment]
        if here is None:
            if held.fetching is None and held.version == message.version:
                return self._lost_result(message)
            return []
        if here.commit is not None:
            return []
        here.commit, here.at_step = message, message.at_step
        if here.phase is RoundState.REDUCED and here.digest != message.digest:
            return [*self._end(here, committed=False), *self._lost_result(message)]
        if here.phase is not RoundState.REDUCED and here.attempt != message.attempt:
            return [*self._end(here, committed=False), *self._lost_result(message)]
        return self._advance(message.fragment)

    def _lost_result(self, commit: Commit) -> list[PeerEffect]:
        """A round is committed whose result we do not hold: ask to be brought in sync."""
        failed = ReduceFailed(
            commit.round, commit.attempt, (), False, "the committed result is not here"
        )
        return [TellMaster(failed)]

    def _sync(self, message: SyncFragment) -> list[PeerEffect]:
        index = message.head.fragment
        if index >= len(self.fragments):
            return [
                TellMaster(SyncFailed(index, message.head.version, (), "no such fragment here"))
            ]
        here = self.fragments[index]
        same = here.version == message.head.version and here.root == message.head.root
        if (
            here.version is not None
            and (same or not message.replaces_newer)
            and here.version >= message.head.version
            and (here.version > message.head.version or here.root == message.head.root)
        ):
            return [TellMaster(Synced(FragmentHead(index, here.version, here.root), 0))]
        effects: list[PeerEffect] = [StopFetch(index)] if here.fetching is not None else []
        here.fetching, here.version, here.root = message, None, b""
        return [*effects, FetchFragment(message)]

    def _stop_copy(self, message: Release) -> list[PeerEffect]:
        """The rounds have outrun our copy: neither it nor what was kept for replay is of use."""
        here = self.fragments[message.fragment] if message.fragment < len(self.fragments) else None
        if here is None or here.fetching is None or here.fetching.head.version != message.version:
            return []
        here.fetching = None
        return [StopFetch(message.fragment), *self._end_kept(message.fragment)]

    def _end_kept(self, fragment: int) -> list[PeerEffect]:
        """Committed rounds that there is nothing to apply to: the next copy will have them in it."""
        kept = [here for here in self.rounds.values() if here.fragment == fragment and here.commit]
        return [effect for here in kept for effect in self._end(here, committed=False)]

    # ------------------------------------------------------------ our own tasks report

    def trainer_came(self) -> list[PeerEffect]:
        """A trainer attached with the right layout; it begins once the shared state is there."""
        self.trainer_attached, self.trainer_loaded = True, False
        return self._reload() if self.valid else []

    def trainer_lost(self) -> list[PeerEffect]:
        """The trainer is gone; rounds it has posted for go on, the others do not wait for it."""
        self.trainer_attached = self.trainer_loaded = self.trained = False
        return [
            TellMaster(NotReady(here.round, "the trainer is gone"))
            for here in self.rounds.values()
            if here.phase is RoundState.OPEN and here.posted is None
        ]

    def posted(self, message: Posted, norm: float | None, refusal: str) -> list[PeerEffect]:
        """The trainer posted a pseudo-gradient; ``norm`` is None when it must be refused."""
        here = self.rounds.get(message.round)
        if here is None or here.phase is not RoundState.OPEN:
            return []  # too late: the round went on without us, the delta stays with the trainer
        held = self.fragments[here.fragment]
        if held.version != here.version or message.version != here.version:
            refusal = "the pseudo-gradient is based on another version"
            norm = None
        if norm is None:
            return [TellMaster(NotReady(here.round, refusal))]
        here.posted = message
        ready = Ready(here.round, message.tokens, norm, held.root, message.step, message.step_s)
        return [TellMaster(ready)]

    def reduction_done(
        self,
        round_id: int,
        attempt: int,
        digest: bytes,
        manifest: tuple[ContributorRun, ...] = (),
        norm_sums: bytes = b"",
        momentum_square: float = 0.0,
    ) -> list[PeerEffect]:
        here = self.rounds.get(round_id)
        if here is None or here.attempt != attempt or here.phase is not RoundState.REDUCING:
            return []
        here.phase, here.digest = RoundState.REDUCED, digest
        if here.commit is not None:
            if here.commit.digest != digest:
                commit = here.commit
                return [*self._end(here, committed=False), *self._lost_result(commit)]
            return self._advance(here.fragment)
        here.reported = Reduced(round_id, attempt, digest, manifest, norm_sums, momentum_square)
        return [TellMaster(here.reported)]

    def reduction_failed(
        self, round_id: int, attempt: int, accused: Iterable[str], bad: bool, reason: str
    ) -> list[PeerEffect]:
        """Our reduction ended, or (``accused`` and not ``bad``) waits for a repair or an abort."""
        here = self.rounds.get(round_id)
        if here is None or here.attempt != attempt or here.phase is not RoundState.REDUCING:
            return []
        failed = ReduceFailed(round_id, attempt, tuple(accused), bad, reason)
        if here.commit is not None:
            return [*self._end(here, committed=False), TellMaster(failed)]
        here.reported = failed
        return [TellMaster(failed)]

    def applied(self, round_id: int, head: FragmentHead) -> list[PeerEffect]:
        """The outer step is done and the fragment has this head now."""
        here = self.rounds.get(round_id)
        if here is None:
            return []
        held = self.fragments[head.fragment]
        held.version, held.root = head.version, head.root
        effects: list[PeerEffect] = [TellMaster(Applied(round_id, head))]
        effects += self._end(here, committed=True)
        effects += self._advance(head.fragment)
        for other in self.rounds.values():
            if (
                other.phase is RoundState.OPEN
                and other.fragment == head.fragment
                and self.trainer_loaded
            ):
                effects += self._offer(other)
        return effects

    def fetched(
        self, head: FragmentHead, received_bytes: int, bad_donors: Iterable[str] = ()
    ) -> list[PeerEffect]:
        """A fetch is verified and installed; ``bad_donors`` served wrong blocks."""
        held = self.fragments[head.fragment]
        if held.fetching is None or held.fetching.head != head:
            return []
        held.fetching, held.version, held.root = None, head.version, head.root
        held.synced_due, held.received_bytes = True, received_bytes
        held.bad_donors = tuple(bad_donors)
        self.trainer_loaded = False
        return self._advance(head.fragment)

    def fetch_failed(
        self, head: FragmentHead, bad_donors: Iterable[str], reason: str
    ) -> list[PeerEffect]:
        held = self.fragments[head.fragment]
        if held.fetching is None or held.fetching.head != head:
            return []
        held.fetching = None
        return [TellMaster(SyncFailed(head.fragment, head.version, tuple(bad_donors), reason))]

    # ------------------------------------------------------------ moving on

    def _advance(self, fragment: int) -> list[PeerEffect]:
        """Apply the next committed round of a fragment, if there is one and it can be applied."""
        held = self.fragments[fragment]
        if held.fetching is not None:
            return self._trim()
        if held.version is None:
            return self._end_kept(fragment)
        effects: list[PeerEffect] = []
        for here in sorted(self.rounds.values(), key=lambda r: r.round):
            if here.fragment != fragment or here.commit is None:
                continue
            if here.phase is RoundState.APPLYING:
                return effects
            if here.version < held.version:
                effects += self._end(here, committed=False)
            elif here.version == held.version and here.phase is RoundState.REDUCED:
                here.phase = RoundState.APPLYING
                return [*effects, ApplyRound(here.commit)]
        if held.synced_due:
            held.synced_due = False
            head = FragmentHead(fragment, held.version, held.root)
            effects.append(TellMaster(Synced(head, held.received_bytes, held.bad_donors)))
        if self.valid and not self.trainer_loaded:
            effects += self._reload()
        return effects

    def _trim(self) -> list[PeerEffect]:
        """Bound what a joiner buffers: the oldest rounds go, a later fetch makes up for them."""
        effects: list[PeerEffect] = []
        while len(self.rounds) > ROUNDS_HELD_MAX:
            oldest = self.rounds[min(self.rounds)]
            effects += self._end(oldest, committed=False)
        return effects

    def _reload(self) -> list[PeerEffect]:
        if not self.trainer_attached:
            return []
        self.trainer_loaded, self.trained = True, self.training
        worth_step = self.step + self._worth_steps(self.sync_every // self.fragment_count)
        for fragment in self.fragments:
            fragment.worth_step = worth_step
        for here in self.rounds.values():
            here.offered = False  # it may be another trainer than before
        effects: list[PeerEffect] = [ReloadTrainer(self.step, self.step_limit()), self._tell_role()]
        for here in self.rounds.values():
            if here.phase is RoundState.OPEN and here.posted is None:
                effects += self._offer(here)
        return [*effects, *self._heard_of_round()]

    def _end(self, here: RoundHere, *, committed: bool) -> list[PeerEffect]:
        """The round is over for us: tell the trainer, free its memory."""
        del self.rounds[here.round]
        effects: list[PeerEffect] = []
        if here.phase is RoundState.REDUCING:
            effects.append(StopReduction(here.round))
        added = went_in(here.commit).added if committed and here.commit is not None else ()
        ours = next((each for each in added if each.contributor.peer == self.me), None)
        held = self.fragments[here.fragment] if here.fragment < len(self.fragments) else None
        version = here.version if held is None or held.version is None else held.version
        ended = RoundEnded(
            here.round,
            here.fragment,
            committed,
            ours is not None,
            version,
            self.step,
            self.step_limit() if committed else self._hold_step_after_abort(here),
            share=0.0 if ours is None else ours.weight_share,
        )
        effects += [TellTrainer(ended), DropRound(here.round)]
        if not committed:
            return effects
        if ours is not None and held is not None and here.posted is not None:
            held.worth_step = here.posted.step + self._worth_steps(self.sync_every)
        self.trained &= self.training  # a spare's trainer takes the new version as it is
        return [*effects, *self._heard_of_round()]

    def _hold_step_after_abort(self, here: RoundHere) -> int:
        """An aborted round is opened again at the same step, and the trainer waits for it there.

        The master has one round open at a time. If that is a later one already, it comes first, and
        a trainer that waited before its step would wait for ever.
        """
        at_step = max(here.at_step, here.told_step)
        later = any(
            other.offered and other.phase is RoundState.OPEN and other.at_step > here.at_step
            for other in self.rounds.values()
        )
        return at_step if at_step > self.step and not later else self.step_limit()

    def _worth_steps(self, between_steps: int) -> int:
        """Steps to train since the last round before another one is worth its bytes."""
        return int(WORTH_SHARE * between_steps)
