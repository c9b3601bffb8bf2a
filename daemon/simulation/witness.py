"""Sees all that happens in a simulated run, and objects when a promise is broken.

What it checks, after every event that can break it:

    parity      all members have the same root at the same fragment and version
    history     versions are committed one after the other, each once
    divisor     a committed mean is that of exactly the contributors its record names
    promotion   a promoted spare was in sync: it moved no state
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import trio
from attrs import define, field
from blake3 import blake3
from numpy.typing import NDArray

from ...membership.journal import JournalRecord, RoundCommitted
from ...protocol.messages import Commit, Contributor, ContributorRun, FragmentHead

CONTRIBUTIONS_KEPT_MAX = 4_096  # of (round, peer); older ones cannot be committed any more


class ViolationError(AssertionError):
    """The run broke a promise."""


@define
class Witness:
    """Sees what happens at every peer and at the journal; raises ViolationError."""

    roots: dict[tuple[int, int], tuple[bytes, str]] = field(factory=dict)
    commits: list[Commit] = field(factory=list)
    versions: dict[int, int] = field(factory=dict)
    contributions: dict[tuple[int, str], NDArray[np.float32]] = field(factory=dict)
    events: int = 0
    trace: blake3 = field(factory=blake3)
    coarse: bool = False  # a lossy codec is in use: means are right to a few steps of int8

    excused: set[str] = field(factory=set)  # peers whose copy a test has damaged

    def note(self, *what: object) -> None:
        self.events += 1
        self.trace.update(repr((round(trio.current_time(), 6), *what)).encode())

    def saw_root(self, peer: str, head: FragmentHead) -> None:
        self.note("root", peer, head)
        if peer in self.excused:
            return
        key = (head.fragment, head.version)
        known = self.roots.setdefault(key, (head.root, peer))
        if known[0] != head.root:
            raise ViolationError(
                f"version {head.version} of fragment {head.fragment} differs between "
                f"{known[1][:8]} and {peer[:8]}"
            )

    def saw_record(self, record: JournalRecord) -> None:
        self.note("record", record)
        if not isinstance(record, RoundCommitted):
            return
        commit = record.commit
        expected = self.versions.get(commit.fragment, 0)
        if commit.version != expected:
            raise ViolationError(
                f"round {commit.round} commits on version {commit.version}, not {expected}"
            )
        self.versions[commit.fragment] = expected + 1
        self.commits.append(commit)

    def saw_contribution(self, peer: str, round_id: int, values: NDArray[np.float32]) -> None:
        self.contributions[(round_id, peer)] = values.copy()
        while len(self.contributions) > CONTRIBUTIONS_KEPT_MAX:
            del self.contributions[next(iter(self.contributions))]

    def saw_mean(
        self, peer: str, commit: Commit, mean: NDArray[np.float32], chunk_elements: int
    ) -> None:
        """The divisor is the weight that went in, and what went in is what the record names.

        Chunk by chunk: after a repair they have different contributors.
        """
        self.note("mean", peer, commit.round)
        everybody = b"\xff" * (len(commit.contributors) // 8 + 1)
        start = 0
        for run in commit.manifest or (ContributorRun(everybody, len(mean) // chunk_elements + 1),):
            end = min(len(mean), start + run.chunk_count * chunk_elements)
            bits = int.from_bytes(run.contributors, "little")
            present = [c for at, c in enumerate(commit.contributors) if bits >> at & 1]
            self._check_part(peer, commit, present, slice(start, end), mean[start:end])
            start = end
        if start < len(mean):
            raise ViolationError(f"round {commit.round}: the manifest ends at {start}")

    def _check_part(
        self,
        peer: str,
        commit: Commit,
        present: Sequence[Contributor],
        part: slice,
        mean: NDArray[np.float32],
    ) -> None:
        posted = [
            self.contributions[commit.round, c.peer][part].astype(np.float64) for c in present
        ]
        total = sum(c.weight for c in present)
        expected = np.zeros(mean.shape, np.float64)
        for contributor, values in zip(present, posted, strict=True):
            expected += values * (contributor.weight / total * contributor.scale)
        largest = max((float(np.max(np.abs(values), initial=0.0)) for values in posted), default=0)
        if not np.allclose(mean, expected, rtol=1e-5, atol=largest / 50 if self.coarse else 1e-6):
            names = [c.peer[:8] for c in present]
            raise ViolationError(
                f"round {commit.round} at {peer[:8]}: the mean of {part} is not that of {names}"
            )
