"""``holdfast join`` under volunteer limits: the peer is in the run while the machine is available.

    run    wait until available (HTTP shows the reason) --> one stay: ``Peer``
            ^                                                 |  not available: it drains
            '-------------------------------------------------'

Each stay is a new peer, as if it had been started again. Between stays the state is on disk only;
memory and accelerator are free for the machine's owner.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import trio

from ..process.screen import Screen
from ..process.this_machine import on_battery
from .peer_options import PeerOptions
from .run_peer import Peer
from .volunteer_limits import VolunteerLimits

CHECK_S = 1.0  # between two checks of the clock and the power supply


class Volunteer:
    """A peer as a process, under the volunteer limits of the machine's owner."""

    def __init__(
        self,
        options: PeerOptions,
        limits: VolunteerLimits,
        tell: Callable[[str], None],
        screen: Screen | None = None,
    ) -> None:
        self.options = options
        self._limits = limits
        self._tell = tell
        self._screen = screen or Screen(None)

    async def run(self) -> None:
        """Take part whenever the machine is available, until the run is over or the operator ends
        it.

        Raises:
          UserError: as ``Peer.run``.
        """
        while True:
            if not await self._wait():
                self._tell("stopped while it waited")
                return
            peer = Peer(self.options, self._tell, unavailable=self.why_not, screen=self._screen)
            await peer.run()
            if not peer.away_reason:
                return
            self._tell(f"away: {peer.away_reason}")

    def why_not(self) -> str:
        """Return why this machine is not available now; empty if it is."""
        local = time.localtime()
        return self._limits.why_not(
            trio.current_time(),
            60 * local.tm_hour + local.tm_min,
            on_battery=self._limits.off_battery and on_battery(),
        )

    # ------------------------------------------------------------ between stays

    async def _wait(self) -> bool:
        """Wait until the machine is available; return False if the operator ended the wait."""
        if not (why := self.why_not()):
            return True
        self._tell(f"waiting: {why}")
        away = self.options.away("away", why, self._screen.ring)

        async def available() -> bool:
            while why := self.why_not():
                away.why = why
                await trio.sleep(CHECK_S)
            return True

        return await away.during(available) or False
