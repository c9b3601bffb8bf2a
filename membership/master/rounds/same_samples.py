"""Notices members that train on the same samples in the same order, as a fixed seed makes them do."""

from __future__ import annotations

from ..state.context import Context
from ..state.master_effects import EventKind

WARNING = "train on the same samples (use `run.sampler`, `run.shards` or `run.generator()`)"


class SameSamples:
    """Compares the digests of members' first batches (see ``Ready.first_batches``)."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._digests: dict[str, bytes] = {}  # by member

    def note(self, peer: str, digest: bytes) -> None:
        """Note a member's digest; warn if another member has the same."""
        before, self._digests[peer] = self._digests.get(peer), digest
        if before != digest and len(group := self._members(digest)) > 1:
            self._context.announce(EventKind.RUN, peer, self._format(group))
            for each in group:
                self._context.tell(each, self._format(group))

    def warnings(self) -> tuple[str, ...]:
        """Return a warning for each group of members that train on the same samples."""
        groups = map(self._members, dict.fromkeys(self._digests.values()))
        return tuple(self._format(group) for group in groups if len(group) > 1)

    def _members(self, digest: bytes) -> list[str]:
        roster = self._context.roster
        return [p for p, own in self._digests.items() if own == digest != b"" and p in roster]

    def _format(self, group: list[str]) -> str:
        return f"{len(group)} members {WARNING}: {', '.join(map(self._context.name, group))}"
