"""``holdfast join`` under volunteer limits: the peer is in the run while the machine is available.

    run    wait until available (HTTP shows the reason) --> one stay: ``Peer``
            ^                                                 |  not available: it drains
            '-------------------------------------------------'

Each stay is a new peer, as if it had been started again. Between stays the state is on disk only; memory
and accelerator are free for the machine's owner.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import trio

from ... import __version__
from ...protocol.errors import UserError
from ...protocol.trust.identity import Identity
from ..exit_codes import ExitCode
from ..paths import make_private
from ..status_records import PeerStatus
from ..tasks import wait_for_signals
from ..this_machine import on_battery
from ..web.app import Json, read_route
from ..web.http_server import control_side
from .run_peer import Peer, PeerOptions
from .volunteer_limits import VolunteerLimits

CHECK_S = 1.0  # between two checks of the clock and the power supply


class Volunteer:
    """A peer as a process, under the volunteer limits of the machine's owner."""

    def __init__(
        self, options: PeerOptions, limits: VolunteerLimits, tell: Callable[[str], None]
    ) -> None:
        self.options = options
        self._limits = limits
        self._tell = tell
        self._scope = trio.CancelScope()
        self._why = ""

    async def run(self) -> None:
        """Take part whenever the machine is available, until the run is over or the operator ends it.

        Raises:
          UserError: as ``Peer.run``.
        """
        while True:
            if not await self._wait():
                self._tell("stopped while it waited")
                return
            peer = Peer(self.options, self._tell, unavailable=self.why_not)
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
        self._why, self._scope = why, trio.CancelScope()
        self._tell(f"waiting: {why}")
        side = control_side(
            "peer",
            self.options.state,
            self.options.http,
            routes=[read_route("status", self.status)],
            actions={"leave": self._act_leave, "retry": self._act_retry},
            why_unready=lambda: self._why,
            names=self.options.http_names,
        )
        available = False
        with side as (serve_http, _url), self._scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(wait_for_signals, self._scope.cancel)
                nursery.start_soon(serve_http)
                while why := self.why_not():
                    self._why = why
                    await trio.sleep(CHECK_S)
                available = True
                nursery.cancel_scope.cancel()
        return available

    def status(self) -> PeerStatus:
        """Return this peer's status while it is not a member: nothing but its name and the reason."""
        options = self.options
        identity = Identity.load_or_create(make_private(options.state) / "identity.key")
        return PeerStatus(
            version=__version__,
            peer=identity.peer_id,
            name=options.name,
            run_id=options.invite.run_id,
            why=self._why,
            limits=options.limits,
        )

    async def _act_leave(self, _body: Json) -> Json:
        trio.lowlevel.spawn_system_task(self._end_soon)
        return {"leaving": True}

    async def _end_soon(self) -> None:
        await trio.sleep(0.2)  # the answer goes out first
        self._scope.cancel()

    async def _act_retry(self, _body: Json) -> Json:
        raise UserError(f"this peer is away: {self._why}", exit_code=ExitCode.FAILED)
