"""A peer that is not a member now, because it waits: for its machine, or for admission to the run.

It serves its status with the reason, so that commands find it, and can be made to stop.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TypeVar

import trio

from ...protocol.addresses import Address
from ...protocol.errors import UserError
from ..process.exit_codes import ExitCode
from ..process.tasks import wait_for_signals
from ..status_records import PeerStatus
from ..web.app import Json, PrivateRead, read_route
from ..web.http_server import control_side

ANSWERED_S = 0.2  # the answer to ``leave`` goes out first

T = TypeVar("T")


class AwayPeer:
    """Serve the status of a peer while it waits.

    Args:
      state: its state directory.
      http: the address of its HTTP API.
      names: host names that HTTP answers to, besides this machine's own.
      status: makes the status from the reason.
      log: answers requests for the tail of its log.

    Attributes:
      why: what it waits for.
    """

    def __init__(
        self,
        state: Path,
        http: Address,
        names: Sequence[str],
        status: Callable[[str], PeerStatus],
        log: PrivateRead,
        why: str,
    ) -> None:
        self.why = why
        self._state = state
        self._http = http
        self._names = names
        self._status = status
        self._log = log
        self._scope = trio.CancelScope()

    async def during(
        self, work: Callable[[], Awaitable[T]], waits: trio.Event | None = None
    ) -> T | None:
        """Serve until ``work`` ends, and return its result; None if the operator ended it first.

        Args:
          waits: set when the work is known to take long; nothing is served before that.

        Raises:
          UserError: what ``work`` raises; or the HTTP address cannot be bound.
        """
        result: T | None = None
        error: UserError | None = None
        with self._scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._serve, waits)
                try:
                    result = await work()
                except UserError as raised:
                    error = raised
                nursery.cancel_scope.cancel()
        if error is not None:
            raise error
        return result

    async def _serve(self, waits: trio.Event | None) -> None:
        if waits is not None:
            await waits.wait()
        side = control_side(
            "peer",
            self._state,
            self._http,
            routes=[read_route("status", lambda: self._status(self.why))],
            actions={"leave": self._leave, "retry": self._retry},
            private_reads={"logs": self._log},
            why_unready=lambda: self.why,
            names=self._names,
        )
        with side as (serve_http, _url):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(wait_for_signals, self._scope.cancel)
                nursery.start_soon(serve_http)

    async def _leave(self, _body: Json) -> Json:
        self._scope.deadline = trio.current_time() + ANSWERED_S
        return {"leaving": True}

    async def _retry(self, _body: Json) -> Json:
        raise UserError(f"this peer is away: {self.why}", exit_code=ExitCode.FAILED)
