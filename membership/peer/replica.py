"""The peer's rules: its session with the master, its copy of the state, its trainer. Pure.

Messages of the master and reports of the peer's own tasks come in, effects go out; there is no
I/O, no clock and no tensor here. The master decides. This machine ensures that, in any order of
messages, a fragment moves from a version to the next one only by the result that was committed for
it. ``RoundCourse`` has the rules for rounds.
"""

from __future__ import annotations

from collections.abc import Iterable

from attrs import Factory, define, field

from ...protocol import messages as m
from ..spec.spec import EVERY
from .lease_book import LeaseBook
from .local_round import LocalFragment, LocalRound, RoundState, committed_rounds
from .peer_effects import (
    DiscardState,
    PeerEffect,
    StopFetch,
    TellMaster,
)
from .round_course import RoundCourse
from .trainer_control import TrainerControl


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
    view: m.View | None = None
    fragments: list[LocalFragment] = field(factory=list)
    rounds: dict[int, LocalRound] = field(factory=dict)
    leases: LeaseBook = field(factory=LeaseBook)
    trainer: TrainerControl = Factory(
        lambda self: TrainerControl(self.rounds, self.fragments), takes_self=True
    )
    course: RoundCourse = Factory(
        lambda self: RoundCourse(self.me, self.rounds, self.fragments, self.leases, self.trainer),
        takes_self=True,
    )

    # ------------------------------------------------------------ questions

    @property
    def settled(self) -> bool:
        """Every known commit is applied: the run once was in exactly the state that is held.

        Between two rounds that are applied side by side this need not be so.
        """
        return self.trainer.valid and all(each.commit is None for each in self.rounds.values())

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
        members = sorted(self.view.members, key=lambda each: each.number)
        writing = [each.peer for each in members if each.in_sync]
        return self.me in (writing[:peers] if isinstance(peers, int) else writing)

    @property
    def fetching(self) -> bool:
        return any(each.fetching is not None for each in self.fragments)

    def heads(self) -> tuple[m.FragmentHead, ...]:
        return tuple(head for each in self.fragments if (head := each.head) is not None)

    def undecided(self) -> tuple[m.Reduced, ...]:
        """Return the attempts whose outcome is not known here, with their results.

        The result is ``NO_DIGEST`` while there is none.
        """
        return tuple(
            m.Reduced(each.round, each.attempt, each.digest or m.NO_DIGEST)
            for each in self.rounds.values()
            if each.undecided
        )[-m.FRAGMENTS_MAX :]

    # ------------------------------------------------------------ the state to start from

    def founded(self, lineage: bytes, heads: Iterable[m.FragmentHead]) -> None:
        """Take the trainer's weights as version 0 of the run."""
        self.lineage = lineage
        self.fragments[:] = [LocalFragment(h.fragment, h.version, h.root) for h in heads]

    def restored(
        self,
        lineage: bytes,
        fragment_count: int,
        heads: Iterable[m.FragmentHead],
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

    def welcome(self, message: m.Welcome, sync_every: int, fragment_count: int) -> list[PeerEffect]:
        """Begin a session with the master, also once the run was founded.

        ``sync_every`` and ``fragment_count`` are the spec's.
        """
        trainer = self.trainer
        trainer.away, trainer.sync_every = False, sync_every
        trainer.fragment_count, trainer.total_steps = fragment_count, message.total_steps
        self.term, self.nonce = message.term, message.nonce
        known = self.lineage == message.lineage
        trainer.run_step = max(trainer.run_step, message.step) if known else message.step
        effects = self.course.end_unknown(message, rewound=message.branch != self.branch)
        self.branch = message.branch
        for fragment in self.fragments:
            if fragment.fetching is not None:
                fragment.fetching = None
                effects.append(StopFetch(fragment.index))
        if not known:
            if any(f.version is not None for f in self.fragments):
                effects.append(DiscardState())
            self.lineage = message.lineage
            effects += self.course.end_all(list(self.rounds.values()))  # one is perhaps applied now
            trainer.loaded = False
            self.fragments.clear()
        if message.lineage and not self.fragments:
            self.fragments[:] = map(LocalFragment, range(fragment_count))
        for commit in message.committed:
            effects += self.course.commit(commit)
        return [*effects, *trainer.load(), *trainer.update_role()]

    # ------------------------------------------------------------ messages of the master

    def obeys(self, term: int, nonce: bytes) -> bool:
        """Return whether a master of this term may be obeyed.

        A master of an older term may not, and of one term only the master that was met first.
        """
        return term > self.term or (term == self.term and self.nonce in (b"", nonce))

    def take_view(self, message: m.View) -> list[PeerEffect]:
        if self.view is not None and message.number < self.view.number:
            return []
        self.view = message
        self.trainer.reach(message.step)
        mine = next((member for member in message.members if member.peer == self.me), None)
        role, in_sync = (m.Role.SPARE, False) if mine is None else (mine.role, mine.in_sync)
        leads = mine is not None and mine == leader_of(message)
        return self.trainer.set_role(role, in_sync=in_sync, leads=leads)

    def finish(self, _message: m.Finish) -> list[PeerEffect]:
        self.trainer.finished = True
        return []

    def sync(self, message: m.SyncFragment) -> list[PeerEffect]:
        index = message.head.fragment
        if index >= len(self.fragments):
            failed = m.SyncFailed(index, message.head.version, (), "no such fragment here")
            return [TellMaster(failed)]
        applying = any(
            each.fragment == index and each.phase is RoundState.APPLYING
            for each in self.rounds.values()
        )
        return self.fragments[index].fetch(message, applying=applying)

    def stop_copy(self, message: m.Release) -> list[PeerEffect]:
        """Stop a copy that rounds have overtaken, and drop the rounds kept for its replay."""
        held = self.fragments[message.fragment] if message.fragment < len(self.fragments) else None
        if held is None or held.fetching is None or held.fetching.head.version != message.version:
            return []
        held.fetching = None
        return [
            StopFetch(message.fragment),
            *self.course.end_all(committed_rounds(self.rounds, message.fragment)),
        ]

    # ------------------------------------------------------------ reports of the peer's own tasks

    def trainer_came(self) -> list[PeerEffect]:
        """Let a trainer with the run's layout begin, once the shared state is there."""
        self.trainer.attached, self.trainer.loaded = True, False
        return self.trainer.load()

    def trainer_spoilt(self) -> list[PeerEffect]:
        """Replace a trainer's weights, which are not finite, once the shared state is there."""
        self.trainer.spoilt, self.trainer.loaded = True, False
        return self.trainer.load()

    def trainer_lost(self) -> list[PeerEffect]:
        """Tell the master not to wait for the trainer; rounds that it has posted for go on."""
        self.trainer.lost()
        self.leases.trainer_gone()
        return [
            TellMaster(m.NotReady(each.round, "the trainer is gone"))
            for each in self.rounds.values()
            if each.unposted
        ]

    def fetched(
        self, head: m.FragmentHead, received_bytes: int, bad_donors: Iterable[str] = ()
    ) -> list[PeerEffect]:
        """Take a copy that is verified and installed; ``bad_donors`` served wrong blocks."""
        held = self.fragments[head.fragment]
        if not held.is_fetching(head):
            return []
        held.install(head, received_bytes, bad_donors)
        self.trainer.loaded = False
        return self.course.advance(head.fragment)

    def fetch_failed(
        self, head: m.FragmentHead, bad_donors: Iterable[str], reason: str
    ) -> list[PeerEffect]:
        held = self.fragments[head.fragment]
        return held.fail(head, bad_donors, reason) if held.is_fetching(head) else []


def leader_of(view: m.View) -> m.MemberInfo | None:
    """Return the member that evaluates and saves for the run: the contributor that joined first.

    Contributors that are in sync come before those that are not. None without a contributor.
    """
    contributors = [each for each in view.members if each.role is m.Role.CONTRIBUTOR]
    return min(contributors, key=lambda each: (not each.in_sync, each.number), default=None)
