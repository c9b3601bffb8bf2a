"""Manifests: the contributors of each chunk of a result. Empty: all are in all chunks."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import frozen

from ...protocol.messages import Commit, Contributor, ContributorRun


def fits(manifest: Sequence[ContributorRun], chunk_count: int, contributor_count: int) -> bool:
    """Return whether a manifest covers this number of chunks and names contributors only."""
    if not manifest:
        return True
    return sum(run.chunk_count for run in manifest) == chunk_count and all(
        int.from_bytes(run.contributors, "little") >> contributor_count == 0 for run in manifest
    )


def is_everywhere(manifest: Sequence[ContributorRun], place: int) -> bool:
    """Return whether the contributor at this place of the order is in every chunk."""
    return all(int.from_bytes(run.contributors, "little") >> place & 1 for run in manifest)


@frozen
class AddedContributor:
    """A contributor whose data is in a mean.

    Attributes:
      chunk_share: the share of chunks whose mean it is in.
      weight_share: its share of the weight that a chunk was divided by; the mean over all chunks.
    """

    contributor: Contributor
    chunk_share: float
    weight_share: float


@frozen
class ChunkGroup:
    """The runs (first, count) of chunks whose mean is of the contributors at these places."""

    places: tuple[int, ...]
    weight: int
    chunks: tuple[tuple[int, int], ...]


@frozen
class MeanContents:
    """The contributors of a committed mean.

    Attributes:
      added: contributors that are in some chunk, in the order of the ``Reduce``.
      parts: chunks by set of contributors; empty: all of ``added`` are in all chunks.
    """

    added: tuple[AddedContributor, ...]
    parts: tuple[ChunkGroup, ...] = ()

    @property
    def tokens(self) -> int:
        """The tokens behind the mean: a part of the chunks counts for that part."""
        return round(sum(each.contributor.weight * each.chunk_share for each in self.added))


def contents_of(commit: Commit) -> MeanContents:
    """Read the contributors of a committed mean from its manifest, in time linear in its runs."""
    order = commit.contributors
    if not commit.manifest:
        total = sum(each.weight for each in order)
        return MeanContents(
            tuple(AddedContributor(each, 1.0, _share(each.weight, total)) for each in order)
        )
    runs: dict[int, list[tuple[int, int]]] = {}  # by set of contributors, a bit each
    first = 0
    for run in commit.manifest:
        bits = int.from_bytes(run.contributors, "little")
        runs.setdefault(bits, []).append((first, run.chunk_count))
        first += run.chunk_count
    counts, weights = [0] * len(order), [0.0] * len(order)
    totals: dict[int, int] = {}
    for bits, chunks in runs.items():
        inside = [place for place in range(len(order)) if bits >> place & 1]
        totals[bits] = sum(order[place].weight for place in inside)
        chunk_count = sum(count for _first, count in chunks)
        for place in inside:
            counts[place] += chunk_count
            weights[place] += chunk_count * _share(order[place].weight, totals[bits])
    present = [place for place in range(len(order)) if counts[place]]
    added = tuple(
        AddedContributor(order[place], _share(counts[place], first), weights[place] / first)
        for place in present
    )
    if all(each.chunk_share == 1.0 for each in added):
        return MeanContents(added)  # a contributor that is missing is missing in all chunks
    parts = tuple(
        ChunkGroup(
            tuple(at for at, place in enumerate(present) if bits >> place & 1),
            totals[bits],
            _joined(chunks),
        )
        for bits, chunks in runs.items()
    )
    return MeanContents(added, parts)


def format_committed(made: MeanContents) -> str:
    """Format the beginning of a sentence about a committed mean."""
    text = f"committed with {len(made.added)} contributors"
    if partial := sum(each.chunk_share < 1.0 for each in made.added):
        text += f" ({partial} of them in a part of the chunks)"
    return text


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0


def _joined(runs: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    joined: list[tuple[int, int]] = []
    for first, count in runs:
        if joined and sum(joined[-1]) == first:
            joined[-1] = joined[-1][0], joined[-1][1] + count
        else:
            joined.append((first, count))
    return tuple(joined)
