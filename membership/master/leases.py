"""Leases on the run's data: who trains on which samples, so that each is used once an epoch.

    free --granted--> held by a peer --trained, in a committed round--> spent, for good
      ^                  |
      |                  '--the peer is gone--> kept for it --it does not come back--.
      '------------------------------------------------------------------------------'

Positions (see ``lease_ranges``) are given out lowest first, and the order of samples has no end:
the next epoch's leases are given while the last ones of this epoch are held, and nobody waits for a
lease.

*What a commit spends.* A contributor's ``Ready`` names the positions whose samples are in its
update. They are spent by the commit, if that update is in any chunk of the mean. With several
fragments a sample is in the next update of each of them, and the first commit spends it. From
``Ready`` until the round is over these positions are given to nobody else, even if the contributor
dies meanwhile.

*Who left while a reduction adds up its update* has dropped that round, and if it is back it does
not hear of the commit: it is told what it holds then, or it would draw those samples again.

*Who is believed.* A peer spends only positions that it holds. An update that was trained on any
others is not taken: ``Leased`` tells the peer what it holds, and it drops that update.

*Old leases* are taken back, or a peer that leases and does not train would keep an epoch from its
end. What is held at one look and still at the next is old. Until a third one, its peer does not get
it again.

*After a restart* nobody holds anything. What may have been leased and is not spent is free, but not
given out until the members from before are back, or given up; each tells what it holds
(``LeasesHeld``).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable

from attrs import define

from ...protocol import messages as m
from ..shared.event_kind import EventKind
from ..shared.lease_ranges import RangeSet
from .state.context import Context, format_member
from .state.journal import DataKnown, LeasesReserved, RoundOrdered
from .state.roster import Member

# A journal record reserves positions for so many grants of the present size; a master that restarts
# leases those again that were not given out.
GRANTS_RESERVED = 64
# Of a peer: what its last commits spent. Updates of other fragments that were on their way name
# them again; more rounds than this are never in flight.
RECENT_COMMITS = 8
# Of one peer. A trainer that has trained on all that its peer holds while there was no master posts
# that after its next step only, for which it needs samples: one epoch would be too few.
HELD_EPOCHS_MAX = 8
# A lease is old if its peer has held it for so many deadlines of the run, and while the run went on
# by so many steps and turns. A peer leases ahead for four deadlines; the rest is for loaders that
# are far ahead of a slow trainer.
OLD_DEADLINES = 32
OLD_STEPS = 1_000
OLD_TURNS = 8
# Of one grant, so that all that a peer holds fits a message.
GRANT_RANGES_MAX = m.LEASE_RANGES_MAX // 8


@define
class KeptLeases:
    """Leases of a peer that is gone: it may come back with them until then."""

    ranges: RangeSet
    until_s: float


class Leases:
    """All leases of a run."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self._data = data = context.history.data
        self.cursor = data.reserved  # no position from this one on is leased
        # Positions before it that are neither spent, held nor kept.
        self.free = RangeSet([(0, self.cursor)]) - data.spent
        self.held: dict[str, RangeSet] = {}  # by peer, what it holds
        self.kept: dict[str, KeptLeases] = {}  # by peer, what it held when it left
        # By round and peer, what its update was trained on.
        self.posted: dict[int, dict[str, RangeSet]] = {}
        # By round whose reduction was ordered, whose members left the roster since they posted.
        self.left: dict[int, set[str]] = {}
        self._wanted: dict[str, m.LeasesWanted] = {}
        self._recent: dict[str, deque[RangeSet]] = {}
        # At the last look for old leases: by peer, what it held.
        self._looked: dict[str, RangeSet] = {}
        self._looked_s, self._looked_step = context.now_s, context.history.step
        self._old: dict[str, RangeSet] = {}  # what was taken back then, by peer
        self._expect_adoption(context.history.orders.values())

    def _expect_adoption(self, orders: Iterable[RoundOrdered]) -> None:
        """Keep what reductions of the previous master may yet spend."""
        unspent = RangeSet(self.free)
        for record in orders:
            posted = self.posted.setdefault(record.order.round, {})
            self.left[record.order.round] = set()
            for ready, contributor in zip(record.ready, record.order.contributors, strict=True):
                trained = RangeSet.of(ready.trained) & unspent
                posted[contributor.peer] = trained
                self.free.subtract(trained)
                self._keep(contributor.peer, trained, -math.inf)

    # ------------------------------------------------------------ facts

    def wanted(self, member: Member, message: m.LeasesWanted) -> None:
        """Note that a member wants leases; ``settle`` gives them.

        It has claimed before what it still holds of an earlier session: the rest is nobody's.
        """
        self._wanted[member.peer] = message
        if (kept := self.kept.get(member.peer)) is not None:
            kept.until_s = -math.inf

    def claimed(self, member: Member, message: m.LeasesHeld) -> None:
        """Give a member that is back what it held, as far as nobody else has got it meanwhile."""
        peer = member.peer
        if message.length != self._data.length:
            self._tell_length(peer)
            return
        before = self.held.pop(peer, RangeSet())
        if (kept := self.kept.pop(peer, None)) is not None:
            before.update(kept.ranges)
        available = before | self.free
        granted = RangeSet.of(message.ranges) & available
        left = available - granted
        flying = left & before & self._flying(peer)
        self.free = left - flying
        if flying:
            self._keep(peer, flying, self.context.now_s)
        self.held[peer] = granted
        self._tell_all(peer)

    def may_post(self, peer: str, trained: tuple[m.LeaseRange, ...]) -> bool:
        """Return whether a peer holds all positions that its update was trained on.

        If it does not, it is told what it holds.
        """
        known = self.held.get(peer, RangeSet())
        for spent in self._recent.get(peer, ()):
            known = known | spent
        if not (RangeSet.of(trained) - known):
            return True
        self._tell_all(peer)
        return False

    def ready(self, number: int, peer: str, trained: tuple[m.LeaseRange, ...]) -> None:
        """Note what an update was trained on, which is in an open round now."""
        self.posted.setdefault(number, {})[peer] = RangeSet.of(trained)

    def ordered(self, number: int, peers: Iterable[str]) -> None:
        """Note whose updates the reduction of a round adds up; again, if it is run again."""
        posted = self.posted.get(number, {})
        self.posted[number] = {peer: posted[peer] for peer in peers if peer in posted}
        self.left.setdefault(number, set())

    def spend(self, number: int, peers: Iterable[str]) -> tuple[m.LeaseRange, ...]:
        """Spend what these contributors to a round were trained on.

        Returns:
          The positions that were not spent before, for the commit's record.
        """
        posted, spent = self.posted.get(number, {}), RangeSet()
        for peer in peers:
            trained = posted.get(peer)
            if trained is None:
                continue
            mine = RangeSet()
            if (held := self.held.get(peer)) is not None:
                mine.update(trained & held)
                held.subtract(mine)
            if (kept := self.kept.get(peer)) is not None:
                lost = trained & kept.ranges
                kept.ranges.subtract(lost)
                mine.update(lost)
            if peer not in self.left.get(number, ()):
                self._recent.setdefault(peer, deque(maxlen=RECENT_COMMITS)).append(mine)
            elif held is not None:
                self._tell_all(peer)
            spent.update(mine)
        return spent.leases()

    def ended(self, number: int) -> None:
        """Note that a round is over."""
        self.posted.pop(number, None)
        self.left.pop(number, None)

    def removed(self, peer: str) -> None:
        """Keep the leases of a member that left the roster, until it had the time to come back."""
        self._wanted.pop(peer, None)
        self._recent.pop(peer, None)
        for number, posted in self.posted.items():
            if number in self.left:
                self.left[number].add(peer)
            else:
                posted.pop(peer, None)
        held = self.held.pop(peer, None)
        if held:
            self._keep(peer, held, self.context.now_s + self.context.spec.membership.deadline_s)

    def rewound(self) -> None:
        """Take the run's spent positions anew: the commits that spent some of them are void."""
        taken = RangeSet(self._data.spent)
        for held in self.held.values():
            taken.update(held)
        for kept in self.kept.values():
            taken.update(kept.ranges)
        self.free = RangeSet([(0, self.cursor)]) - taken
        self._recent.clear()

    # ------------------------------------------------------------ conclusions

    def settle(self, *, waiting: bool) -> None:
        """Take back what is nobody's any more, and give leases to those that want some.

        Args:
          waiting: members from before a restart may come back with leases that look free.
        """
        self._give_up()
        self._revoke()
        self._take_old_back()
        if self.context.history.finished:
            return
        places = self.context.history.members.places
        for member in self.context.roster.by_number():
            trains = member.trainer.running and not member.draining
            if trains and member.peer in self._wanted and member.peer in places:
                self._grant(member, waiting=waiting)

    def _give_up(self) -> None:
        for peer, kept in list(self.kept.items()):
            if self.context.now_s < kept.until_s:
                continue
            flying = kept.ranges & self._flying(peer)
            self.free.update(kept.ranges - flying)
            kept.ranges = flying
            if not flying:
                del self.kept[peer]

    def _revoke(self) -> None:
        """Take the leases of members that are spares now."""
        for member in self.context.roster.by_number():
            held = self.held.get(member.peer)
            if not held or not member.in_sync or member.peer in self.context.history.members.places:
                continue
            flying = held & self._flying(member.peer)
            self.free.update(held - flying)
            self.held[member.peer] = RangeSet()
            self._keep(member.peer, flying, self.context.now_s)
            self._tell_all(member.peer)

    def _take_old_back(self) -> None:
        spec, now_s, step = self.context.spec, self.context.now_s, self.context.history.step
        steps = OLD_STEPS + OLD_TURNS * spec.diloco.sync_every
        due_s = self._looked_s + OLD_DEADLINES * spec.membership.deadline_s
        if now_s < due_s or step < self._looked_step + steps:
            return
        self._old.clear()
        for peer, held in self.held.items():
            old = (held & self._looked.get(peer, RangeSet())) - self._flying(peer)
            if old:
                held.subtract(old)
                self.free.update(old)
                self._old[peer] = old
                self._tell_all(peer)
                what = f"does not train on {old.count} samples that it leased: others do"
                self.context.announce_peer(EventKind.RUN, peer, what)
        self._looked = {peer: RangeSet(held) for peer, held in self.held.items()}
        self._looked_s, self._looked_step = now_s, step

    def _grant(self, member: Member, *, waiting: bool) -> None:
        message = self._wanted[member.peer]
        if not self._data.length:
            self._know(member, message.length)
        if message.length != self._data.length:
            del self._wanted[member.peer]
            self._tell_length(member.peer)
            return
        held = self.held.setdefault(member.peer, RangeSet())
        length = self._data.length
        count = min(message.count, length, HELD_EPOCHS_MAX * length - held.count)
        if count <= 0:
            return  # later, when a round has spent some of what it holds
        del self._wanted[member.peer]
        free = RangeSet() if waiting else self.free - self._old.get(member.peer, RangeSet())
        granted = RangeSet(free.take(count, GRANT_RANGES_MAX))
        self.free.subtract(granted)
        if not granted:
            granted.add(self.cursor, self._advance(count))
        held.update(granted)
        self.context.send(member.peer, self._leased(granted))

    def _know(self, member: Member, length: int) -> None:
        """Take the data set's length from the first member that wants leases, or the spec."""
        wanted = self.context.spec.data.samples
        self.context.record(DataKnown(wanted or length))
        self.context.announce(
            EventKind.RUN,
            member.peer,
            f"the run's data set has {self._data.length} samples"
            + ("" if wanted else f", as {format_member(member)} says"),
        )

    def _advance(self, count: int) -> int:
        """Move the cursor by so many positions and return it; reserve them on disk before."""
        self.cursor += count
        if self.cursor > self._data.reserved:
            self.context.record(LeasesReserved(self.cursor + GRANTS_RESERVED * count))
        return self.cursor

    # ------------------------------------------------------------ parts

    def _flying(self, peer: str) -> RangeSet:
        """Return the positions that a peer's updates in rounds under way were trained on."""
        flying = RangeSet()
        for posted in self.posted.values():
            if peer in posted:
                flying.update(posted[peer])
        return flying

    def _keep(self, peer: str, ranges: RangeSet, until_s: float) -> None:
        if not ranges:
            return
        kept = self.kept.setdefault(peer, KeptLeases(RangeSet(), until_s))
        kept.ranges.update(ranges)
        kept.until_s = max(kept.until_s, until_s)

    def _tell_all(self, peer: str) -> None:
        held = self.held.get(peer, RangeSet())
        self.context.send(peer, self._leased(held, everything=True))

    def _tell_length(self, peer: str) -> None:
        """Tell a member the length of the run's data set, which its own differs from."""
        self.context.send(peer, m.Leased((), length=self._data.length))

    def _leased(self, ranges: RangeSet, *, everything: bool = False) -> m.Leased:
        return m.Leased(ranges.leases(), everything, self._data.length)

    # ------------------------------------------------------------ questions

    @property
    def complete(self) -> bool:
        """All epochs that the spec asks for are in committed work."""
        epochs = self.context.spec.data.epochs
        return bool(epochs and self._data.length) and self._data.epoch >= epochs

    def next_deadline_s(self) -> float:
        """Return when leases of a peer that is gone become free."""
        due = (kept.until_s for kept in self.kept.values())
        return min((each for each in due if each > self.context.settled_s), default=math.inf)
