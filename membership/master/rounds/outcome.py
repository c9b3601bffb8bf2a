"""What a reduction came to, and the audits of it, as data."""

from __future__ import annotations

import math

from attrs import Factory, define, frozen

from ....protocol.messages import ContributorRun


@frozen
class ReductionOutcome:
    """What a receiver says that it holds when its result is whole."""

    digest: bytes
    manifest: tuple[ContributorRun, ...]  # empty: all contributors are in all chunks


@define
class Accusation:
    """An accusation whose proof is on its way, or is being judged."""

    accuser: str
    chunk: int
    data: bytearray = Factory(bytearray)
    judging: bool = False


@define
class Audit:
    """The audits of one attempt's result.

    Attributes:
      number: of the attempt, after repairs.
      open: drawn chunks that nobody has passed yet, with whose turn it is; empty: nobody's yet.
      lots: where each one's turn begins among those who may.
      tried: who has looked at a chunk in vain.
      due_s: until when those are waited for whose turn it is.
      until_s: until when they are, though bytes move.
      accused: chunks that were called wrong, with by whom.
    """

    number: int
    outcome: ReductionOutcome
    due_s: float
    lots: dict[int, int]
    open: dict[int, str]
    count: int  # of chunks, when they were drawn
    until_s: float = math.inf
    tried: dict[int, set[str]] = Factory(dict)
    accused: dict[int, str] = Factory(dict)
    case: Accusation | None = None

    @property
    def over(self) -> bool:
        return not self.open
