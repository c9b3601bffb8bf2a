"""Notices members that train on the same samples in the same order, as a fixed seed makes them do."""

from __future__ import annotations

from collections.abc import Iterator

from ..state.context import Context
from ..state.master_effects import EventKind

NAMES_MAX = 4  # of members that a warning lists


class SameSamples:
    """Compares the first batches of members' trainers (see ``Ready.first_batches``)."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._batches: dict[str, bytes] = {}  # by member: the digest

    def note(self, peer: str, batches: bytes) -> None:
        """Note the digest of a member's first batches; warn if another member has the same."""
        if self._batches.get(peer, b"") == batches:
            return
        self._batches[peer] = batches
        for group in self._groups():
            if peer in group:
                self._context.announce(EventKind.RUN, peer, self._format(group))
                for each in group:
                    self._context.tell(each, self._format(group))

    def warnings(self) -> tuple[str, ...]:
        """Return a warning for each group of members that train on the same samples."""
        return tuple(map(self._format, self._groups()))

    def _groups(self) -> Iterator[list[str]]:
        groups: dict[bytes, list[str]] = {}
        for peer, batches in self._batches.items():
            if batches and peer in self._context.roster:
                groups.setdefault(batches, []).append(peer)
        yield from (group for group in groups.values() if len(group) > 1)

    def _format(self, group: list[str]) -> str:
        names = [self._context.name(peer) for peer in group[:NAMES_MAX]]
        if len(group) > NAMES_MAX:
            names.append(f"{len(group) - NAMES_MAX} more")
        return (
            f"{', '.join(names[:-1])} and {names[-1]} train on the same samples: their first batches "
            "were equal; use `run.sampler` or `run.shards`, or order samples by `run.generator()`"
        )
