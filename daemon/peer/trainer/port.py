"""``TrainerPort``: the interface between the peer service and its trainer.

The Unix-socket bridge implements it for real training scripts; the simulator implements it with a
trainer of a few numbers in the same process.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ....protocol import messages as m
from ....protocol.arena import Arena


class TrainerEvents(Protocol):
    """Events that a port reports to the peer service; plain calls on the service's event loop."""

    def trainer_came(self, layout: m.ModelLayout) -> None: ...

    def trainer_sent(self, message: m.Message) -> None: ...

    def trainer_went(self, reason: str) -> None: ...

    def begin_draws(self, hello: m.DrawHello) -> m.Drawn | m.Rejected: ...

    async def draw(self, hello: m.DrawHello, message: m.Draw) -> m.Drawn | m.Rejected: ...


class TrainerPort(Protocol):
    """A way to reach trainers, one at a time."""

    async def run(self, events: TrainerEvents) -> None:
        """Serve trainers until cancelled."""
        ...

    def open_arenas(self, sizes: Sequence[m.FragmentSize]) -> tuple[Arena, Arena]:
        """Create the shared and the posting arena; they outlive any trainer."""
        ...

    def tell(self, message: m.Message) -> None:
        """Send a message to the attached trainer, in order; without one it is dropped."""
        ...

    def samples(self) -> dict[int, int]:
        """Return how many leased samples the attached trainer has trained, by data rank."""
        ...

    def end(self, kind: m.FailureKind, reason: str, sick_s: float) -> None:
        """End the attached trainer, which has failed for ``sick_s``; another may attach later."""
        ...
