"""One round as a peer sees it."""

from __future__ import annotations

import enum
from collections.abc import Iterable

from attrs import define

from ...protocol import messages as m
from .peer_effects import FetchFragment, PeerEffect, StopFetch, TellMaster

# Rounds of a fragment that may be ordered after a committed one that still lacks frames. By then no
# peer sends that one any more: a broken link may have lost its frames, and a sender drops what a
# slow receiver has not got after fewer rounds than that.
OVERTAKEN_MAX = 8


class RoundState(enum.Enum):
    OPEN = "open"
    REDUCING = "reducing"
    REDUCED = "reduced"
    APPLYING = "applying"


@define
class LocalRound:
    """One round of one fragment at this peer.

    Attributes:
      version: of the fragment before the round.
      at_step: the step at which contributors post, by the master's ``Open`` or ``Commit``.
      order: the reduction that the master ordered last; ``attempt`` is its number.
      ready: the master was told of the trainer's pseudo-gradient, which is posted.
      offer: the trainer was told that the round is open, has loaded nothing since, and says with
        this number what it posts for; 0: it was not told.
      told_step: the step at which the trainer was told to post.
      nudged: other peers wait for this one: the trainer posts what it has by now.
      digest: of the result held here, in REDUCED.
      reported: what the master was told of the attempt.
      stored: the result waits for a copy of the fragment.
    """

    round: int
    fragment: int
    version: int
    at_step: int
    phase: RoundState = RoundState.OPEN
    attempt: int = 0
    order: m.Reduce | None = None
    ready: m.Ready | None = None
    offer: int = 0
    told_step: int = 0
    nudged: bool = False
    digest: bytes = b""
    reported: m.Reduced | m.ReduceFailed | None = None
    commit: m.Commit | None = None
    stored: bool = False

    @property
    def unposted(self) -> bool:
        """The round is open and the trainer has not posted for it."""
        return self.phase is RoundState.OPEN and self.ready is None

    @property
    def undecided(self) -> bool:
        """A reduction was ordered and the peer has not heard how the round ended."""
        return self.phase in (RoundState.REDUCING, RoundState.REDUCED) and self.commit is None


def void_rounds(rounds: dict[int, LocalRound], new: m.Open | m.Reduce) -> list[LocalRound]:
    """Return the uncommitted rounds that a new round of their fragment ends."""
    return [
        each
        for each in rounds.values()
        if each.fragment == new.fragment and each.round < new.round and each.commit is None
    ]


def overtaken_rounds(
    rounds: dict[int, LocalRound], fragment: int
) -> list[tuple[LocalRound, m.Commit]]:
    """Return the committed rounds of a fragment whose results will not come any more."""
    numbers = sorted(each.round for each in rounds.values() if each.fragment == fragment)
    before = numbers[: 1 - OVERTAKEN_MAX]  # the round that is being ordered counts, too
    return [
        (rounds[number], commit)
        for number in before
        if rounds[number].phase is RoundState.REDUCING
        and (commit := rounds[number].commit) is not None
    ]


def committed_rounds(rounds: dict[int, LocalRound], fragment: int) -> list[LocalRound]:
    """Return the committed rounds of a fragment that are not being applied.

    Where there is no base to apply them to they are of no use: the next copy contains them.
    """
    return [
        each
        for each in rounds.values()
        if each.fragment == fragment and each.commit and each.phase is not RoundState.APPLYING
    ]


# ---------------------------------------------------------------- fragments


@define
class LocalFragment:
    """One fragment at this peer, and its copy from donors while that is under way.

    Attributes:
      version: None while nothing valid is held.
      committed_version: the newest one that this peer was told of.
      fetching: the order of the copy that is under way, or waits for a round to be applied.
      synced_due: a copy is installed and ``Synced`` is not sent yet.
      received_bytes, bad_donors: of that copy.
      worth_step: before this step the trainer has too little for another round.
      offer_count: times that one of its rounds was offered to the trainer.
    """

    index: int
    version: int | None = None
    root: bytes = b""
    committed_version: int = 0
    fetching: m.SyncFragment | None = None
    synced_due: bool = False
    received_bytes: int = 0
    bad_donors: tuple[str, ...] = ()
    worth_step: int = 0
    offer_count: int = 0

    @property
    def head(self) -> m.FragmentHead | None:
        return None if self.version is None else m.FragmentHead(self.index, self.version, self.root)

    @property
    def behind(self) -> bool:
        return self.version is None or self.version < self.committed_version

    def fetch(self, order: m.SyncFragment, *, applying: bool = False) -> list[PeerEffect]:
        """Begin a copy, unless the ordered version or a later one is held already.

        Args:
          applying: a round is being applied. The copy must not come before it, and waits; see
            ``RoundCourse.applied``.
        """
        if order.replaces_newer:  # the run went back
            self.committed_version = 0
        self.committed_version = max(self.committed_version, order.head.version)
        head = None if applying else self.head
        newer = head is not None and head.version > order.head.version
        if head is not None and (head == order.head or (newer and not order.replaces_newer)):
            return [TellMaster(m.Synced(head, 0))]
        effects: list[PeerEffect] = [StopFetch(self.index)] if self.fetching is not None else []
        self.fetching, self.version, self.root = order, None, b""
        return effects if applying else [*effects, FetchFragment(order)]

    def is_fetching(self, head: m.FragmentHead) -> bool:
        return self.fetching is not None and self.fetching.head == head

    def install(self, head: m.FragmentHead, received_bytes: int, bad_donors: Iterable[str]) -> None:
        self.fetching, self.version, self.root = None, head.version, head.root
        self.synced_due, self.received_bytes = True, received_bytes
        self.bad_donors = tuple(bad_donors)

    def report_synced(self) -> list[PeerEffect]:
        """Send ``Synced`` for an installed copy, once."""
        head = self.head
        if head is None or not self.synced_due:
            return []
        self.synced_due = False
        return [TellMaster(m.Synced(head, self.received_bytes, self.bad_donors))]

    def fail(
        self, head: m.FragmentHead, bad_donors: Iterable[str], reason: str
    ) -> list[PeerEffect]:
        self.fetching = None
        return [TellMaster(m.SyncFailed(head.fragment, head.version, tuple(bad_donors), reason))]
