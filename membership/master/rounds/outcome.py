"""Outcome of a reduction, and its audit, as data."""

from __future__ import annotations

import math

from attrs import Factory, define, frozen

from ....protocol.messages import ChunkFinding, ContributorRun


@frozen
class ReductionOutcome:
    """A complete result, as a receiver reports it."""

    digest: bytes
    manifest: tuple[ContributorRun, ...]  # empty: all contributors are in all chunks


@frozen
class Check:
    """One check of a chunk: the member that makes it, and the transfer of the order for it."""

    checker: str
    transfer: int


@define
class Audit:
    """The audit of one attempt's result.

    Attributes:
      number: of the attempt, after repairs.
      due_s: until when the present checkers are waited for.
      lots: by chunk, a random number that selects its first checker.
      open: drawn chunks that are not checked yet, with their checks; None: it is to be assigned.
      until_s: limit of ``due_s``, even if bytes move.
      tried: by chunk, members that could not check it.
      different: findings of other sums, with their checkers.
      mute: by member, the checkers that got nothing from it.
      order_count: orders to checkers.
    """

    number: int
    outcome: ReductionOutcome
    due_s: float
    lots: dict[int, int]
    open: dict[int, Check | None]
    until_s: float = math.inf
    tried: dict[int, set[str]] = Factory(dict)
    different: list[tuple[str, ChunkFinding]] = Factory(list)
    mute: dict[str, set[str]] = Factory(dict)
    order_count: int = 0

    @property
    def over(self) -> bool:
        """Return whether no drawn chunk is to be checked any more."""
        return not self.open
