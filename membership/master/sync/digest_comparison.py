"""Comparison of the digests of peers' memories: finds copies that differ from the run's. Pure.

Peers digest while rounds go on, so they may be a version apart: only copies of one version are
compared, with the journal's root of that version. Where the journal has no root, the root that more
than half of the holders report counts; if there is none, all holders differ from each other.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence

from attrs import frozen

from ....protocol.messages import FragmentHead

DIGEST_BYTES = 32
RUNS_MAX = 12  # runs of blocks that a sentence names


@frozen
class DifferingCopy:
    """A copy that is not the run's.

    Attributes:
      expected: the run's root of that version; empty: unknown.
      against: a peer whose copy of the same version has that root, or at least a different one;
        empty: there is none.
    """

    peer: str
    head: FragmentHead
    expected: bytes
    against: str


def differences(
    reported: Mapping[str, Sequence[FragmentHead]], known_root: Callable[[int, int], bytes]
) -> list[DifferingCopy]:
    """Return the copies that differ, sorted by peer and fragment.

    Args:
      reported: the heads that each peer's memory has, by peer.
      known_root: the journal's root of a fragment's version, or ``b""``.
    """
    holders: dict[tuple[int, int], dict[str, bytes]] = defaultdict(dict)
    for peer, heads in reported.items():
        for head in heads:
            holders[head.fragment, head.version][peer] = head.root
    found = []
    for (fragment, version), roots in sorted(holders.items()):
        expected = known_root(fragment, version) or _majority(roots)
        good = min((peer for peer, root in roots.items() if root == expected), default="")
        if not expected and len(roots) == 1:
            continue  # nothing to compare it with
        for peer, root in sorted(roots.items()):
            if root != expected:
                others = (other for other, theirs in roots.items() if theirs != root)
                against = good or min(others, default="")
                head = FragmentHead(fragment, version, root)
                found.append(DifferingCopy(peer, head, expected, against))
    return sorted(found, key=lambda each: (each.peer, each.head.fragment))


def _majority(roots: Mapping[str, bytes]) -> bytes:
    root, count = Counter(roots.values()).most_common(1)[0]
    return root if len(roots) > 1 and 2 * count > len(roots) else b""


def differing_blocks(ours: bytes, theirs: bytes) -> list[int] | None:
    """Return the indices of digests that differ, or None if the two are not of one fragment's version.

    This is ``checkpoint.blocks`` without numpy, which a master does not need.
    """
    if len(ours) != len(theirs) or not ours:
        return None
    return [
        at // DIGEST_BYTES
        for at in range(0, len(ours), DIGEST_BYTES)
        if ours[at : at + DIGEST_BYTES] != theirs[at : at + DIGEST_BYTES]
    ]


def format_blocks(blocks: Sequence[int]) -> str:
    """Format rising indices as ``3, 7 to 9``, with ``...`` in place of many."""
    runs: list[list[int]] = []
    for block in blocks:
        if runs and block == runs[-1][-1] + 1:
            runs[-1][1:] = [block]
        else:
            runs.append([block])
    texts = [" to ".join(map(str, run)) for run in runs[:RUNS_MAX]]
    return ", ".join(texts) + (", ..." if len(runs) > RUNS_MAX else "")
