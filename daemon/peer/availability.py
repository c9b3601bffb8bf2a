"""``holdfast join``, for as long as the machine's owner lends it: stays in the run, and waits between.

    run    wait until it may take part (HTTP says why not) --> a stay: ``Peer``
            ^                                                    |  not lent any more: it drains
            '----------------------------------------------------'

Each stay is a peer of its own, as if it had been started again: what it holds is on disk in between,
the memory and the accelerator are the owner's.
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
from ..status_records import CheckpointStatus, PeerStatus
from ..tasks import wait_for_signals
from ..this_machine import on_battery
from ..web.app import Json
from ..web.http_server import control_side
from .run_peer import Peer, PeerOptions
from .volunteer_limits import VolunteerLimits

LOOK_S = 1.0  # between two looks at the clock and the plug


class Volunteer:
    """A peer as a process, with its owner's conditions."""

    def __init__(
        self, options: PeerOptions, lending: VolunteerLimits, tell: Callable[[str], None]
    ) -> None:
        self.options = options
        self._lending = lending
        self._tell = tell
        self._scope = trio.CancelScope()
        self._why = ""

    async def run(self) -> None:
        """Take part whenever the machine is lent, until the run is over or somebody ends it.

        Raises:
          UserError: as ``Peer.run``.
        """
        while True:
            if not await self._wait():
                self._tell("ended while it waited")
                return
            peer = Peer(self.options, self._tell, not_lent=self.why_not)
            await peer.run()
            if not peer.not_lent_why:
                return
            self._tell(f"away: {peer.not_lent_why}")

    def why_not(self) -> str:
        """Why this machine is not lent now; empty: it is."""
        local = time.localtime()
        lending = self._lending
        return lending.why_not(
            trio.current_time(),
            60 * local.tm_hour + local.tm_min,
            on_battery=lending.off_battery and on_battery(),
        )

    # ------------------------------------------------------------ between stays

    async def _wait(self) -> bool:
        """Until the machine is lent; False: somebody does not want to wait any more."""
        if not (why := self.why_not()):
            return True
        self._why, self._scope = why, trio.CancelScope()
        self._tell(f"waiting: {why}")
        side = control_side(
            "peer",
            self.options.state,
            self.options.http,
            reads={"status": self.status},
            actions={"leave": self._act_leave, "retry": self._act_retry},
            why_unready=lambda: self._why,
            names=self.options.http_names,
        )
        lent = False
        with side as (serve_http, _url), self._scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(wait_for_signals, self._scope.cancel)
                nursery.start_soon(serve_http)
                while why := self.why_not():
                    self._why = why
                    await trio.sleep(LOOK_S)
                lent = True
                nursery.cancel_scope.cancel()
        return lent

    def status(self) -> PeerStatus:
        """Return this peer's status while it is not a member: nothing but its name and the reason."""
        options = self.options
        identity = Identity.load_or_create(make_private(options.state) / "identity.key")
        return PeerStatus(
            kind="peer",
            version=__version__,
            attached=False,
            peer=identity.peer_id,
            name=options.name,
            run_id=options.invite.run_id,
            number=0,
            role="away",
            in_sync=False,
            phase="away",
            why=self._why,
            told=(),
            step=0,
            tokens=0,
            tokens_per_s=0.0,
            loss=None,
            metrics={},
            links=(),
            bulk_sent_bytes=0,
            bulk_received_bytes=0,
            state_received_bytes=0,
            state_saved_bytes=0,
            copies=(),
            heads=(),
            rounds=(),
            checkpoints=CheckpointStatus(place="", writing=False, newest=None, step=None, error=""),
            finished=False,
            trainer_pid=None,
            command_pid=None,
            trainer_restarts=0,
            trainer_state="none",
            waited_s=0.0,
            stepped_s=0.0,
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
