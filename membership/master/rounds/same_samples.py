"""Notices members that train on the same samples in the same order, as a fixed seed makes them
do.
"""

from __future__ import annotations

from ...shared.event_kind import EventKind
from ..state.context import Context

WARNING = "train on the same samples (use `run.sampler`, `run.shards` or `run.generator()`)"


class SameSamples:
    """Compares the digests of members' first batches (see ``Ready.first_batches``)."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._digests: dict[str, bytes] = {}  # by member

    def note(self, peer: str, digest: bytes) -> None:
        """Note a member's digest; warn if another member has the same."""
        before, self._digests[peer] = self._digests.get(peer), digest
        if before != digest and len(group := self._groups().get(digest, [])) > 1:
            self._context.announce(EventKind.RUN, peer, self._format(group))
            for each in group:
                self._context.tell(each, self._format(group))

    def warnings(self) -> tuple[str, ...]:
        """Return a warning for each group of members that train on the same samples."""
        return tuple(self._format(group) for group in self._groups().values() if len(group) > 1)

    def _groups(self) -> dict[bytes, list[str]]:
        """Return the members by their digests, in one pass."""
        groups: dict[bytes, list[str]] = {}
        for peer, digest in self._digests.items():
            if digest and peer in self._context.roster:
                groups.setdefault(digest, []).append(peer)
        return groups

    def _format(self, group: list[str]) -> str:
        return f"{len(group)} members {WARNING}: {', '.join(map(self._context.name, group))}"
