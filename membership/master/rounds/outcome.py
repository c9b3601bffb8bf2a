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
    """The audit of one attempt's result."""

    number: int  # of the attempt, after repairs
    outcome: ReductionOutcome
    due_s: float  # until when the present checkers are waited for
    lots: dict[int, int]  # by chunk, a random number that selects its first checker
    # Drawn chunks that are not checked yet, with their checks; None: it is to be assigned.
    open: dict[int, Check | None]
    until_s: float = math.inf  # limit of ``due_s``, even if bytes move
    tried: dict[int, set[str]] = Factory(dict)  # by chunk, members that could not check it
    # Findings of other sums, with their checkers.
    different: list[tuple[str, ChunkFinding]] = Factory(list)
    silent: dict[str, set[str]] = Factory(dict)  # by member, the checkers that got nothing from it
    order_count: int = 0  # orders to checkers

    @property
    def over(self) -> bool:
        """Return whether no drawn chunk is to be checked any more."""
        return not self.open
