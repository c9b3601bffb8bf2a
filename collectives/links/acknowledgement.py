"""Acknowledgements: a link tells the other side which frames have come on its lanes.

The sender keeps a frame in memory until it is acknowledged. So that not every frame costs a
message, what comes within ``ACKNOWLEDGE_S`` is acknowledged together; ``send_now`` cuts that short.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import trio

from ...protocol.messages import LanesWanted, Message
from .event_loop import Loop
from .lane_pool import LanePool

# How long an acknowledgement waits for what comes meanwhile. The sender keeps what it sent in
# memory for this long and one trip.
ACKNOWLEDGE_S = 0.1
PROGRESS_S = 0.25  # how often progress of frames under way is told: see ``LaneReceived.bytes``


class Acknowledger:
    """See the top of this file. Made and owned by ``Link``.

    Args:
      send: sends a message on the link's control stream.
    """

    def __init__(
        self, lane_pool: LanePool, loop: Loop, send: Callable[[Message], Awaitable[None]]
    ) -> None:
        self._lane_pool = lane_pool
        self._loop = loop
        self._send = send
        self._due = trio.Event()
        self._due_noted = False  # set from lanes' threads too; cleared before what came is read
        self._at_once = trio.Event()

    def note_received(self) -> None:
        """Acknowledge soon what came on a lane; from any thread."""
        if not self._due_noted:
            self._due_noted = True
            self._loop.soon(self.wake)

    def wake(self) -> None:
        """Tell the other side soon what it does not know yet. On the event loop."""
        self._due.set()

    def send_now(self) -> None:
        self._at_once.set()

    async def run(self) -> None:
        """Tell the other side what came, and how many lanes are wanted if it dials them."""
        while True:
            if self._lane_pool.receiving:  # a long frame
                with trio.move_on_after(PROGRESS_S):
                    await self._due.wait()
            else:
                await self._due.wait()
            with trio.move_on_after(ACKNOWLEDGE_S):
                await self._at_once.wait()
            self._at_once = trio.Event()
            self._due = trio.Event()
            self._due_noted = False
            if (received := self._lane_pool.take_received()) is not None:
                await self._send(received)
            if self._lane_pool.has_new_count:
                await self._send(LanesWanted(self._lane_pool.take_wanted()))
