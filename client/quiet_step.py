"""The numbers of a trainer's steps, most of them in memory shared with the daemon.

A step at which nothing is due only writes three of them and reads one. Memory views give and take
plain numbers several times faster than numpy does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import cast

import numpy as np

from ..protocol.arena import (
    LOSS_SLOT,
    MAIL_SLOT,
    NAMED_SLOT,
    NO_STEP_NAMED,
    SAMPLES_SLOT,
    SECONDS_SLOT,
    WAITING_SLOT,
)
from ..protocol.messages import RankPart
from .boundary import BoundaryMachine
from .daemon_connection import DaemonConnection
from .state.arenas import Arenas

# Interval at which a quiet step reads the socket itself, to notice that the daemon died.
POLL_INTERVAL_S = 1.0

WAITED, STEPPED = 0, 1  # indices into ``Arena.seconds``


class QuietStep:
    """See the top of this file.

    Attributes:
      due_step: the first step at which something is due even if no message comes.
      poll_at_s: the time at which a step reads the socket itself.
      mail: the number of the daemon's messages to a trainer of one rank.
      named: the step at which the daemon has messages for a trainer of several ranks.
      slots: this process's slots.
      loss, seconds: those of the slots that are floats.
      spoilt_count: losses in a row that are not finite.
      waited_s: seconds spent waiting inside ``Run.step``.
    """

    def __init__(
        self, machine: BoundaryMachine, connection: DaemonConnection, clock: Callable[[], float]
    ) -> None:
        self._machine = machine
        self._connection = connection
        self._clock = clock
        self._left_at_s = clock()  # the end of the last boundary
        self.due_step = 0
        self.poll_at_s = 0.0
        self.spoilt_count = 0
        self.waited_s = 0.0
        # These are replaced once the arenas are open.
        self.mail: memoryview[int] = np.zeros(1, np.uint64).data
        self.named: memoryview[int] = np.full(1, NO_STEP_NAMED, np.uint64).data
        self.slots: memoryview[int] = np.zeros(8, np.uint64).data
        self.loss = cast("memoryview[float]", np.zeros(1, np.float64).data)
        self.seconds = cast("memoryview[float]", np.zeros(2, np.float64).data)

    def open(self, arenas: Arenas, part: RankPart) -> None:
        """Use the slots of these arenas from now on."""
        slots = arenas.posted.slots
        if part.world_size == 1:
            self.mail = arenas.shared.slots[MAIL_SLOT : MAIL_SLOT + 1].data
        else:
            slots = arenas.posted.rank_slots(part.rank)
            self.named = arenas.shared.slots[NAMED_SLOT : NAMED_SLOT + 1].data
        floats = slots.view(np.float64)
        self.slots = slots.data
        self.loss = cast("memoryview[float]", floats[LOSS_SLOT : LOSS_SLOT + 1].data)
        self.seconds = cast("memoryview[float]", floats[SECONDS_SLOT : SECONDS_SLOT + 2].data)
        self.loss[0] = math.nan  # none so far
        self.slots[WAITING_SLOT] = 0  # an earlier process may have died while it waited
        self.slots[SAMPLES_SLOT] = self._machine.samples

    @property
    def stepping_s(self) -> float:
        """The time by a clock that stops while the trainer waits."""
        return self._clock() - self.waited_s

    def begin_boundary(self) -> None:
        """Count the time of the steps since the last boundary."""
        now_s = self._clock()
        self.poll_at_s = now_s + POLL_INTERVAL_S
        if self._machine.contributing:
            self.seconds[STEPPED] += now_s - self._left_at_s

    def end_boundary(self, due_step: int) -> None:
        """Go on with quiet steps until something is due at ``due_step``."""
        self.due_step = due_step
        self._left_at_s = self._clock()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Show the daemon that the trainer waits for it, and count the time."""
        self.slots[WAITING_SLOT] = self._connection.received_count + 1
        started_s = self._clock()
        try:
            yield
        finally:  # Ctrl+C ends the wait, and a script may train on
            waited_s = self._clock() - started_s
            self.slots[WAITING_SLOT] = 0
            self.waited_s += waited_s
            if self._machine.contributing:
                self.seconds[WAITED] += waited_s
