"""Events that the parts of a peer service report to it; the service passes most of them to ``Replica``.

A part reports a plain ``Message`` for the master in the same way.
"""

from __future__ import annotations

from attrs import frozen

from ...checkpoint.checkpoints import Manifest
from ...collectives.reduction import ReduceResult
from ...protocol.messages import FragmentHead, Message, Posted


@frozen
class ReductionDone:
    """A reduction holds its whole result.

    Attributes:
      planned: it ran as ordered, without a repair.
    """

    round: int
    attempt: int
    result: ReduceResult
    planned: bool


@frozen
class ReductionFailed:
    """A reduction cannot go on here.

    Attributes:
      accused: peer ids that caused it.
      bad: they sent data that must not be added; else they were lost.
    """

    round: int
    attempt: int
    accused: tuple[str, ...]
    reason: str
    bad: bool = False


@frozen
class RoundApplied:
    """The outer step of a round is done."""

    round: int
    head: FragmentHead


@frozen
class FragmentFetched:
    """A copy of a fragment is installed.

    Attributes:
      bad_donors: peer ids that served wrong blocks.
    """

    head: FragmentHead
    received_bytes: int
    bad_donors: tuple[str, ...]


@frozen
class FetchFailed:
    """No donor could give a fragment."""

    head: FragmentHead
    bad_donors: tuple[str, ...]
    reason: str


@frozen
class StateRestored:
    """The shared state comes from a checkpoint; ``None`` means that this checkpoint was discarded."""

    manifest: Manifest | None


@frozen
class InitialStateTaken:
    """The trainer's weights became version 0 of the run."""

    lineage: bytes
    heads: tuple[FragmentHead, ...]


@frozen
class TrainerReady:
    """The trainer waits for the shared state."""


@frozen
class TrainerGone:
    """The trainer disconnected."""


@frozen
class PseudoGradientPosted:
    """The trainer posted for a round, and the post was measured.

    Attributes:
      norm: its Euclidean norm; None if it is refused.
      refusal: the reason; empty if it is accepted.
    """

    message: Posted
    norm: float | None
    refusal: str


PeerEvent = (
    Message
    | ReductionDone
    | ReductionFailed
    | RoundApplied
    | FragmentFetched
    | FetchFailed
    | StateRestored
    | InitialStateTaken
    | TrainerReady
    | TrainerGone
    | PseudoGradientPosted
)
