"""``TrainerPort``: how the peer service meets its trainer, whatever the trainer is.

The Unix-socket bridge implements it for real training scripts; the simulator implements it with a
trainer of a few numbers in the same process.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ...protocol.arena import Arena
from ...protocol.messages import FailureKind, FragmentSize, Message, ModelLayout


class TrainerEvents(Protocol):
    """What a port reports to the peer service; plain calls, made from the service's own loop."""

    def trainer_came(self, layout: ModelLayout) -> None: ...

    def trainer_said(self, message: Message) -> None: ...

    def trainer_went(self, reason: str) -> None: ...


class TrainerPort(Protocol):
    async def run(self, events: TrainerEvents) -> None:
        """Serve trainers until cancelled, one at a time."""
        ...

    def open_arenas(self, sizes: Sequence[FragmentSize]) -> tuple[Arena, Arena]:
        """Make the shared and the posted arena; they outlive any one trainer."""
        ...

    def tell(self, message: Message) -> None:
        """Send to the present trainer, in order; dropped when there is none."""
        ...

    def end(self, kind: FailureKind, reason: str, sick_s: float) -> None:
        """The present trainer is no good, for so long already: away with it. It may come anew."""
        ...
