"""One fragment of the shared state as a peer holds it."""

from __future__ import annotations

from collections.abc import Iterable

from attrs import define

from ...protocol.messages import FragmentHead, Synced, SyncFailed, SyncFragment
from .peer_effects import FetchFragment, PeerEffect, StopFetch, TellMaster


@define
class LocalFragment:
    """One fragment at this peer, and its copy from donors while that is under way.

    Attributes:
      version: None while nothing valid is held.
      committed_version: the newest one that this peer was told of.
      fetching: the order of the copy that is under way.
      synced_due: a copy is installed and ``Synced`` is not sent yet.
      received_bytes, bad_donors: of that copy.
      worth_step: before this step the trainer has too little for another round.
    """

    index: int
    version: int | None = None
    root: bytes = b""
    committed_version: int = 0
    fetching: SyncFragment | None = None
    synced_due: bool = False
    received_bytes: int = 0
    bad_donors: tuple[str, ...] = ()
    worth_step: int = 0

    @property
    def head(self) -> FragmentHead | None:
        return None if self.version is None else FragmentHead(self.index, self.version, self.root)

    @property
    def behind(self) -> bool:
        return self.version is None or self.version < self.committed_version

    def fetch(self, order: SyncFragment) -> list[PeerEffect]:
        """Begin a copy, unless the ordered version or a later one is held already."""
        if order.replaces_newer:  # the run went back
            self.committed_version = 0
        self.committed_version = max(self.committed_version, order.head.version)
        head = self.head
        newer = head is not None and head.version > order.head.version
        if head is not None and (head == order.head or (newer and not order.replaces_newer)):
            return [TellMaster(Synced(head, 0))]
        effects: list[PeerEffect] = [StopFetch(self.index)] if self.fetching is not None else []
        self.fetching, self.version, self.root = order, None, b""
        return [*effects, FetchFragment(order)]

    def is_fetching(self, head: FragmentHead) -> bool:
        return self.fetching is not None and self.fetching.head == head

    def install(self, head: FragmentHead, received_bytes: int, bad_donors: Iterable[str]) -> None:
        self.fetching, self.version, self.root = None, head.version, head.root
        self.synced_due, self.received_bytes = True, received_bytes
        self.bad_donors = tuple(bad_donors)

    def report_synced(self) -> list[PeerEffect]:
        """Send ``Synced`` for an installed copy, once."""
        head = self.head
        if head is None or not self.synced_due:
            return []
        self.synced_due = False
        return [TellMaster(Synced(head, self.received_bytes, self.bad_donors))]

    def fail(self, head: FragmentHead, bad_donors: Iterable[str], reason: str) -> list[PeerEffect]:
        self.fetching = None
        return [TellMaster(SyncFailed(head.fragment, head.version, tuple(bad_donors), reason))]
