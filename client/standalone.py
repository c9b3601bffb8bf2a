"""A run without a daemon: the same training script, alone on one machine.

``StandaloneRun`` shares nothing and never waits. It takes every call of ``Run``, so that a script
can be tried, debugged or timed before it joins a run.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import cast

from ..protocol.errors import UserError
from ..protocol.messages import COUNT_MAX, Message
from .callbacks import Callback
from .daemon_connection import DaemonConnection
from .data.sampler import LocalSource, Source
from .hook import Run
from .state.trained_parameters import TrainedParameters

STANDALONE_VARIABLE = "HOLDFAST_STANDALONE"  # set by a person: attach without a daemon
STEPS_VARIABLE = "HOLDFAST_STANDALONE_STEPS"  # the step at which such a run is finished


class _NoConnection:
    """In the place of a connection to a daemon: it takes every message, and none comes."""

    received_count = 0

    def send(self, message: Message) -> None:
        pass

    def send_last(self, message: Message) -> None:
        pass

    def close(self) -> None:
        pass


class StandaloneRun(Run):
    """A run of one trainer and no daemon.

    Args:
      total_steps: the step at which the run is finished; None: it has no end.

    Raises:
      ValueError: ``total_steps`` is less than 1.
    """

    def __init__(
        self,
        trained: TrainedParameters,
        callbacks: Sequence[Callback] = (),
        total_steps: int | None = None,
    ) -> None:
        if total_steps is not None and total_steps < 1:
            raise ValueError(f"total_steps must be 1 or more, got {total_steps}")
        self._length = total_steps
        super().__init__(cast(DaemonConnection, _NoConnection()), trained, callbacks=callbacks)

    def _attach(self) -> None:
        self._machine.leads = self._machine.loaded = True
        self._machine.total_steps = self._length or 0
        self._quiet.due_step = self._length or COUNT_MAX
        self._quiet.poll_at_s = math.inf

    def _boundary(self) -> None:
        self._machine.finished = True

    def _source(self, length: int, ahead: int) -> Source:
        return LocalSource()


def steps_from_environment() -> int | None:
    """Return the length of a standalone run from ``HOLDFAST_STANDALONE_STEPS``.

    Raises:
      UserError: the variable is no whole number.
    """
    text = os.environ.get(STEPS_VARIABLE, "")
    if not text:
        return None
    if not text.isdecimal():
        raise UserError(f"{STEPS_VARIABLE} must be a whole number of steps, got {text!r}")
    return int(text)
