"""What trainer and daemon say to each other about moments; the moments themselves are ``moments``'s.

ask     our steps count from now on and our optimizer is empty: MomentsWanted
take    TakeMoments: another trainer's lie there; MomentsTaken, or why not
give    GiveMoments: somebody wants ours; MomentsGiven, by the thread that has written them
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import torch

from ..protocol.messages import (
    Message,
    MomentsGiven,
    MomentsTaken,
    MomentsWanted,
)
from ..protocol.text import plain
from .connection import Connection
from .errors import DaemonGone
from .moments import Background, Moments, MomentsError
from .tensors import SharedTensor


class InnerState:
    """One trainer's side.

    Attributes:
      asked: since the optimizer was last empty, until we contribute.
    """

    def __init__(self, connection: Connection, background: Background) -> None:
        self.asked = False
        self._connection = connection
        self._background = background
        self._moments: Moments | None = None

    def open(
        self, beginning: str, optimizer: torch.optim.Optimizer, tensors: Sequence[SharedTensor]
    ) -> None:
        """The run wants it, and this is where the files are."""
        self._moments = Moments(beginning, optimizer, tensors, self._background)

    def ask(self) -> None:
        """Once, however often there is a reason to."""
        if self._moments is not None and not self.asked:
            self.asked = True
            self._send(MomentsWanted())

    def give(self, why_not: str) -> None:
        """Begin to; or say why this trainer's are nothing to go on from."""
        try:
            if self._moments is None:
                raise MomentsError("its script attaches without its optimizer")
            if why_not:
                raise MomentsError(why_not)
            self._moments.give(self._say_given)
        except MomentsError as error:
            self._say_given(str(error))

    def take(self) -> bool:
        """Whether the optimizer has a state now. After a first contribution it would be a step back."""
        reason = ""
        try:
            if self._moments is None or not self.asked:
                raise MomentsError("it has contributed meanwhile")
            self._moments.take()
            self.asked = False
        except MomentsError as error:
            reason = str(error)
        self._send(MomentsTaken(plain(reason)))
        return not reason

    def _say_given(self, reason: str) -> None:
        self._send(MomentsGiven(plain(reason)))

    def _send(self, message: Message) -> None:
        with suppress(DaemonGone):  # the trainer's next look at the connection finds that out
            self._connection.send(message)
