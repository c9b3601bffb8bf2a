"""Reading a manifest: which of an order's contributors are in which chunks. Empty: all in all."""

from __future__ import annotations

from collections.abc import Sequence

from ..protocol.messages import ContributorRun


def fits(manifest: Sequence[ContributorRun], chunk_count: int, contributor_count: int) -> bool:
    """Whether a manifest is about so many chunks and names contributors only."""
    if not manifest:
        return True
    return sum(run.chunk_count for run in manifest) == chunk_count and all(
        int.from_bytes(run.contributors, "little") >> contributor_count == 0 for run in manifest
    )


def is_everywhere(manifest: Sequence[ContributorRun], place: int) -> bool:
    """Whether the contributor at this place of the order is in every chunk."""
    return all(int.from_bytes(run.contributors, "little") >> place & 1 for run in manifest)
