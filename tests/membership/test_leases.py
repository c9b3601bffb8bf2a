"""The master's leases: rules one by one, and whole histories from a seed, in which bugs are
planted.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from holdfast.membership.master.leases import (
    GRANT_RANGES_MAX,
    GRANTS_RESERVED,
    HELD_EPOCHS_MAX,
    OLD_DEADLINES,
    OLD_STEPS,
    Leases,
)
from holdfast.membership.master.state.context import Context
from holdfast.membership.master.state.history import RunHistory
from holdfast.membership.master.state.journal import JournalRecord, LeasesReserved
from holdfast.membership.master.state.master_effects import RecordDurably, SendMessage
from holdfast.membership.master.state.roster import Grant, Member
from holdfast.membership.shared.lease_ranges import RangeSet
from holdfast.membership.spec.spec import RunSpec
from holdfast.protocol import messages as m
from holdfast.protocol.errors import LocalProtocolError
from holdfast.simulation.invariants import check_leases
from tests.planting import Bugs, Note, Patch

LENGTH = 40
DEADLINE_S = 10.0
PEERS = ("a", "b", "c")
SPEC = f"[data]\nepochs = 2\n[membership]\ndeadline_s = {DEADLINE_S}\n"
SEEDS_MAX = 400
ENDS_AFTER = 400  # of a healthy run's rounds: each spends something
STEPS = 60


class Trainer:
    """What a peer knows: the leases that it was told of, and those that it has trained on.

    Attributes:
      sessions: it has left so many times; rounds under way are over for it then.
    """

    def __init__(self) -> None:
        self.held, self.trained = RangeSet(), RangeSet()
        self.sessions = 0

    def heard(self, message: m.Leased) -> None:
        told = RangeSet.of(message.ranges)
        self.held = told if message.all else self.held | told
        self.trained = self.trained & self.held

    def train(self, count: int) -> None:
        self.trained.update((self.held - self.trained).take(count, GRANT_RANGES_MAX))


class Desk:
    """A master's ``Leases`` with its real history, and its peers.

    Attributes:
      counts: by position, in how many committed updates that no rewind made void it was trained on.
    """

    def __init__(self, spec: str = SPEC, peers: tuple[str, ...] = PEERS) -> None:
        self.spec = RunSpec.parse(spec)
        self.history = RunHistory()
        self.history.members.places.update(peers)
        self.trainers = {peer: Trainer() for peer in peers}
        self.records: list[JournalRecord] = []
        self.commits: list[list[RangeSet]] = []  # the trained positions by contributor
        self.counts: dict[int, int] = {}
        self.round = self.term = 0
        self.now_s = 0.0
        self.begin()
        for peer in peers:
            self.attach(peer)

    # ------------------------------------------------------------ the master

    def begin(self) -> None:
        """Begin a term: nobody is attached, and nobody holds anything."""
        self.term += 1
        self.context = Context(self.spec, "run", self.history, self.term)
        self.context.now_s = self.now_s
        self.leases = Leases(self.context)
        self.before = set(self.trainers) if self.term > 1 else set()

    def settle(self) -> None:
        self.leases.settle(waiting=bool(self.before))
        self.context.settled_s = self.context.now_s
        for effect in self.context.take_effects():
            if isinstance(effect, RecordDurably):
                self.records.append(effect.record)
            elif isinstance(effect, SendMessage) and isinstance(effect.message, m.Leased):
                self.trainers[effect.peer].heard(effect.message)
        check_leases(self.leases)

    def wait(self, seconds: float) -> None:
        self.now_s = self.context.now_s = self.now_s + seconds
        self.settle()

    # ------------------------------------------------------------ members

    def member(self, peer: str) -> Member:
        return self.context.roster.members[peer]

    def attach(self, peer: str) -> None:
        number = PEERS.index(peer)
        member = Member(peer, peer, number, 1, Grant(m.Role.CONTRIBUTOR), self.now_s)
        member.trainer.layout, member.in_sync = m.ModelLayout(()), True
        self.context.roster.members[peer] = member

    def leave(self, peer: str, *, forgets: bool = False) -> None:
        self.leases.removed(peer)
        del self.context.roster.members[peer]
        sessions = self.trainers[peer].sessions
        if forgets:
            self.trainers[peer] = Trainer()
        self.trainers[peer].sessions = sessions + 1
        self.settle()

    def back(self, peer: str) -> None:
        self.attach(peer)
        self.before.discard(peer)
        held = self.trainers[peer].held.leases()
        self.leases.claimed(self.member(peer), m.LeasesHeld(LENGTH, held))
        self.settle()

    def want(self, peer: str, count: int) -> RangeSet:
        """Ask for leases; return what the peer holds then."""
        self.leases.wanted(self.member(peer), m.LeasesWanted(LENGTH, count))
        self.settle()
        return self.trainers[peer].held

    # ------------------------------------------------------------ rounds

    def open(self, *peers: str) -> dict[str, tuple[int, RangeSet]]:
        """Open a round with the updates of these; by peer its session and what was taken of it."""
        self.round += 1
        posted = {}
        for peer in peers:
            trainer = self.trainers[peer]
            trained = trainer.trained.leases()
            if self.leases.may_post(peer, trained):
                self.leases.ready(self.round, peer, trained)
                posted[peer] = trainer.sessions, RangeSet(trainer.trained)
        self.settle()
        return posted

    def commit(self, posted: dict[str, tuple[int, RangeSet]], *peers: str) -> RangeSet:
        """Commit the mean of these updates; returns what is spent by it.

        Who has left since it posted does not hear of the commit.
        """
        spent = self.leases.spend(self.round, peers)
        self.history.data.spend(spent)
        self.history.step += OLD_STEPS
        self.commits.append([posted[peer][1] for peer in peers])
        self.count(self.commits[-1], 1)
        for peer in peers:
            sessions, trained = posted[peer]
            if (trainer := self.trainers[peer]).sessions == sessions:
                trainer.held.subtract(trained)
                trainer.trained.subtract(trained)
        self.leases.ended(self.round)
        self.settle()
        return RangeSet.of(spent)

    def count(self, updates: list[RangeSet], by: int) -> None:
        for start, stop in (pair for each in updates for pair in each):
            for position in range(start, stop):
                self.counts[position] = self.counts.get(position, 0) + by
                assert self.counts[position] <= 1, f"position {position} was trained on twice"

    def abort(self) -> None:
        self.leases.ended(self.round)
        self.settle()

    def rewind(self) -> None:
        self.count(self.commits.pop(), -1)
        self.history.data.undo()
        self.leases.rewound()
        self.settle()

    def train_all(self) -> None:
        """A healthy run from here to the end of its epochs."""
        self.before.clear()
        self.wait(3 * DEADLINE_S)
        for peer in set(PEERS) - set(self.context.roster.members):
            self.back(peer)
        for _ in range(ENDS_AFTER):
            if self.leases.complete:
                break
            for peer in PEERS:
                self.want(peer, 7)
                self.trainers[peer].train(7)
            posted = self.open(*PEERS)
            self.commit(posted, *posted)
        assert self.leases.complete
        assert all(self.counts.get(position) == 1 for position in range(2 * LENGTH))


# ---------------------------------------------------------------- rules


def ranges(*pairs: tuple[int, int]) -> RangeSet:
    return RangeSet(pairs)


def working(count: int, trained: int | None = None) -> Desk:
    """Peer a has so many leases and has trained on all of them, or so many."""
    desk = Desk()
    desk.want("a", count)
    desk.trainers["a"].train(count if trained is None else trained)
    return desk


def test_leases_are_given_lowest_first_and_each_to_one() -> None:
    desk = Desk()
    assert desk.want("a", 10) == ranges((0, 10))
    assert desk.want("b", 5) == ranges((10, 15))
    assert desk.want("a", 3) == ranges((0, 10), (15, 18))


def test_a_record_reserves_many_grants_before_the_first_of_them_is_told() -> None:
    desk = Desk()
    desk.want("a", 10)
    assert desk.records[-1] == LeasesReserved(10 + GRANTS_RESERVED * 10)
    count = len(desk.records)
    for _ in range(3):
        desk.want("b", 10)
    assert len(desk.records) == count


def test_nobody_gets_more_than_an_epoch_at_once_or_holds_more_than_some() -> None:
    desk = Desk()
    assert desk.want("a", 3 * LENGTH).count == LENGTH
    for _ in range(HELD_EPOCHS_MAX):
        desk.want("a", LENGTH)
    assert desk.trainers["a"].held.count == HELD_EPOCHS_MAX * LENGTH
    assert desk.want("a", 5).count == HELD_EPOCHS_MAX * LENGTH
    desk.trainers["a"].train(10)
    desk.commit(desk.open("a"), "a")
    desk.settle()
    assert desk.trainers["a"].held.count == HELD_EPOCHS_MAX * LENGTH - 10 + 5  # the wish was kept


def test_an_update_on_its_way_may_name_what_a_commit_has_spent() -> None:
    """With several fragments, a sample is in the next update of each of them."""
    desk = working(6, 4)
    desk.commit(desk.open("a"), "a")
    assert desk.leases.may_post("a", (m.LeaseRange(0, 6),))


def test_who_is_gone_finds_its_leases_until_the_deadline_and_then_others_do() -> None:
    desk = Desk()
    desk.want("a", 4)
    desk.leave("a")
    assert desk.leases.next_deadline_s() == DEADLINE_S
    assert desk.want("b", 4) == ranges((4, 8))
    desk.back("a")
    assert desk.leases.held["a"] == ranges((0, 4))
    desk.leave("a")
    desk.wait(DEADLINE_S + 0.1)
    assert desk.want("c", 2) == ranges((0, 2))
    desk.back("a")
    assert desk.trainers["a"].held == ranges((2, 4)), "as far as nobody else has got them"


def test_who_returns_with_nothing_gives_back_what_it_held() -> None:
    desk = Desk()
    desk.want("a", 4)
    desk.leave("a", forgets=True)
    desk.back("a")
    assert desk.want("b", 4) == ranges((0, 4))


def test_a_peer_that_wants_leases_before_it_claims_any_has_none_of_before() -> None:
    """Its process is another one: what the killed one held is waited for no longer."""
    desk = Desk()
    desk.want("a", 4)
    desk.leave("a", forgets=True)
    desk.attach("a")
    assert desk.want("a", 4) == ranges((0, 4))


@pytest.mark.parametrize("commits", [True, False])
def test_what_an_ordered_reduction_may_spend_is_nobodys_until_it_is_over(commits: bool) -> None:
    desk = working(4)
    posted = desk.open("a")
    desk.leases.ordered(desk.round, ["a"])
    desk.leave("a", forgets=True)
    desk.wait(DEADLINE_S + 0.1)
    assert desk.want("b", 2) == ranges((4, 6))
    if commits:
        assert desk.commit(posted, "a") == ranges((0, 4))
        assert desk.want("c", 2) == ranges((6, 8))
    else:
        desk.abort()
        assert desk.want("c", 2) == ranges((0, 2))


def test_a_spare_gives_its_leases_back() -> None:
    desk = Desk()
    desk.want("a", 4)
    desk.history.members.places.discard("a")
    desk.settle()
    assert not desk.trainers["a"].held
    assert desk.want("b", 4) == ranges((0, 4))
    assert not desk.want("a", 4), "and gets none"


def test_after_a_restart_nothing_is_given_twice_while_members_are_awaited() -> None:
    desk = Desk()
    desk.want("a", 4)
    desk.want("b", 4)
    desk.begin()
    desk.back("b")
    desk.want("b", 4)
    assert desk.trainers["b"].held.count == 8
    assert not (desk.trainers["b"].held & ranges((0, 4))), "a may come back with them"
    desk.back("a")
    assert desk.trainers["a"].held == ranges((0, 4))


def test_another_data_set_gets_no_leases_and_hears_the_runs_length() -> None:
    desk = Desk()
    desk.want("a", 4)
    desk.leases.wanted(desk.member("b"), m.LeasesWanted(LENGTH + 1, 4))
    desk.settle()
    assert not desk.trainers["b"].held
    desk.leases.claimed(desk.member("b"), m.LeasesHeld(LENGTH + 1, ()))
    sent = [each.message for each in desk.context.take_effects() if isinstance(each, SendMessage)]
    assert sent == [m.Leased((), length=LENGTH)]


def test_who_leases_and_does_not_train_keeps_no_epoch_from_its_end() -> None:
    desk = Desk()
    desk.want("a", 10)
    for _ in range(ENDS_AFTER):
        if desk.leases.complete:
            break
        desk.want("a", 1)
        desk.want("b", 7)
        desk.trainers["b"].train(7)
        desk.wait(OLD_DEADLINES / 3 * DEADLINE_S)
        desk.commit(desk.open("b"), "b")
    assert desk.leases.complete
    _known, *told = [event.text for event in desk.context.events]
    assert told
    assert all(text.startswith("a (a) does not train on") for text in told), "b does"


def test_no_deadline_while_nobody_is_gone() -> None:
    assert Desk().leases.next_deadline_s() == math.inf


# ---------------------------------------------------------------- histories


def play(seed: int) -> None:
    """Deaths, returns, aborts, rewinds and restarts, then a healthy run: each sample once an epoch.

    Raises:
      AssertionError: a position is in two states or none, or was trained on twice or never.
      LocalProtocolError: a commit spends what the history does not allow.
    """
    chance, desk = random.Random(seed), Desk()
    for _ in range(STEPS):
        here = sorted(desk.context.roster.members)
        gone = sorted(set(PEERS) - set(here))
        act = chance.choice(("train", "train", "train", "round", "round", "lose", "back", "other"))
        if act == "train" and here:
            peer = chance.choice(here)
            desk.want(peer, chance.randint(1, 9))
            desk.trainers[peer].train(chance.randint(1, 9))
        elif act == "round" and here:
            some_round(desk, chance, here)
        elif act == "lose" and here:
            desk.leave(chance.choice(here), forgets=chance.random() < 0.5)
        elif act == "back" and gone:
            if chance.random() < 0.3:
                desk.attach(chance.choice(gone))  # and does not say what it holds
            else:
                desk.back(chance.choice(gone))
        elif act == "other":
            what = chance.choice(("wait", "wait", "restart", "rewind", "forget"))
            if what == "wait":
                desk.wait(chance.choice((1.0, DEADLINE_S / 2, 2 * OLD_DEADLINES * DEADLINE_S)))
            elif what == "restart":
                desk.begin()
            elif what == "rewind" and desk.commits:
                desk.rewind()
            desk.before.difference_update(PEERS if what == "forget" else ())
    desk.train_all()


def some_round(desk: Desk, chance: random.Random, here: list[str]) -> None:
    posted = desk.open(*here)
    lost = [peer for peer in here if chance.random() < 0.3]
    early = chance.random() < 0.3
    for peer in lost if early else ():
        desk.leave(peer, forgets=chance.random() < 0.5)
    adding = [peer for peer in posted if not (early and peer in lost)]
    desk.leases.ordered(desk.round, adding)
    for peer in lost if not early else ():
        desk.leave(peer, forgets=chance.random() < 0.5)
        if chance.random() < 0.5:
            desk.wait(2 * DEADLINE_S)
        if chance.random() < 0.5:
            desk.back(peer)
            desk.want(peer, 5)
            desk.trainers[peer].train(3)
    for peer in set(here) - set(lost):
        desk.want(peer, 5)
    if chance.random() < 0.3:
        desk.abort()
    else:
        desk.commit(posted, *(peer for peer in adding if chance.random() < 0.8))


@given(st.integers(0, 2**32 - 1))
@example(0)
def test_each_sample_is_in_committed_work_once_an_epoch(seed: int) -> None:
    play(seed)


BUGS = Bugs()
bug = BUGS.named


@bug("whatever was trained is believed", seed=1)
def _(patch: Patch) -> None:
    patch.setattr(Leases, "may_post", lambda *_: True)


@bug("given away while a reduction may spend it", seed=1)
def _(patch: Patch) -> None:
    patch.setattr(Leases, "_flying", lambda *_: RangeSet())


@bug("leases die with their peer", seed=0)
def _(patch: Patch) -> None:
    patch.setattr(Leases, "_keep", lambda *_: None)


@bug("a rewind does not free", seed=2)
def _(patch: Patch) -> None:
    patch.setattr(Leases, "rewound", lambda *_: None)


@bug("who returns is believed", seed=4)
def _(patch: Patch) -> None:
    original = Leases.claimed

    def claimed(self: Leases, member: Member, message: m.LeasesHeld) -> None:
        original(self, member, message)
        self.held[member.peer] = RangeSet.of(message.ranges)
        self._tell_all(member.peer)

    patch.setattr(Leases, "claimed", claimed)


@bug("who left is thought to hear of commits", seed=11)
def _(patch: Patch) -> None:
    original = Leases.spend

    def spend(self: Leases, number: int, peers: Iterable[str]) -> tuple[m.LeaseRange, ...]:
        self.left[number] = set()
        return original(self, number, peers)

    patch.setattr(Leases, "spend", spend)


@bug("leases are not reserved", seed=0)
def _(patch: Patch) -> None:
    def advance(self: Leases, count: int) -> int:
        self.cursor += count
        return self.cursor

    patch.setattr(Leases, "_advance", advance)


@bug("a round is never over", seed=19)
def _(patch: Patch) -> None:
    patch.setattr(Leases, "ended", lambda *_: None)


@bug("an update that is added spends nothing", seed=0)
def _(patch: Patch) -> None:
    patch.setattr(Leases, "spend", lambda *_: ())


def breaks(seed: int) -> bool:
    try:
        play(seed)
    except (AssertionError, LocalProtocolError):
        return True
    return False


@pytest.mark.planted
@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_found(name: str, monkeypatch: Patch, record_property: Note) -> None:
    assert BUGS.is_found(name, monkeypatch, record_property, breaks, range(SEEDS_MAX))
