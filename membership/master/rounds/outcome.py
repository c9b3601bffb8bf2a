"""Outcome of a reduction, and its audit, as data."""

from __future__ import annotations

import math

from attrs import Factory, define, frozen

from ....protocol.messages import ContributorRun


@frozen
class ReductionOutcome:
    """A complete result, as a receiver reports it."""

    digest: bytes
    manifest: tuple[ContributorRun, ...]  # empty: all contributors are in all chunks


@define
class Accusation:
    """An accusation whose proof is being sent or checked."""

    accuser: str
    chunk: int
    data: bytearray = Factory(bytearray)
    checking: bool = False


@define
class Audit:
    """The audit of one attempt's result.

    Attributes:
      number: of the attempt, after repairs.
      due_s: until when the present auditors are waited for.
      lots: by chunk, a random number that selects its first auditor.
      open: drawn chunks that have not passed, with their auditors; an empty auditor is to be assigned.
      count: number of drawn chunks.
      until_s: limit of ``due_s``, even if bytes move.
      tried: by chunk, auditors that could not check it.
      accused: chunks that were called wrong, with the accuser.
      accusation: the one that is being proven.
    """

    number: int
    outcome: ReductionOutcome
    due_s: float
    lots: dict[int, int]
    open: dict[int, str]
    count: int
    until_s: float = math.inf
    tried: dict[int, set[str]] = Factory(dict)
    accused: dict[int, str] = Factory(dict)
    accusation: Accusation | None = None

    @property
    def over(self) -> bool:
        """Return whether all drawn chunks have passed."""
        return not self.open
