"""``holdfast master --journal DIR --standby-of ADDRESS``: keep the copy of a run's journal up to date.

    dialling --JournalWanted, parts--> copying --nothing is missing--> in step
        ^                                 |                              |
        '------ refused for now, line lost, silence for SILENT_S --------'

The folder has the run's key, from ``holdfast backup``: with it this process certifies itself as a master of the run, and
the copied journal can be led from. While it is in step, its master acknowledges nothing that is not on disk here. It does
not lead by itself: two machines cannot tell a master that ended from a line that broke.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

import msgpack
import trio
from attrs import define
from starlette.requests import Request

from ...membership.master.state.journal import RunCreated
from ...protocol.addresses import Address
from ...protocol.connection_phases import COPIED
from ...protocol.errors import HoldfastError, RemoteProtocolError, UserError
from ...protocol.messages import JournalPart, JournalStored, JournalWanted, Refused
from ...protocol.network.interface import Channel, Network
from ...protocol.network.sockets import SocketNetwork
from ...protocol.network.stream import MessageStream
from ...protocol.trust.authority import Authority, Party
from ..exit_codes import ExitCode
from ..paths import JOURNAL_FILE, STANDBY
from ..tasks import wait_for_signals
from ..web.app import Json
from ..web.http_server import control_side
from .journal_base import JournalAwayError, JournalError
from .journal_store import SCHEMA_VERSION, JournalStore
from .run_master import MasterOptions, certify, check_copy
from .standby_pages import standby_routes

log = logging.getLogger("holdfast.master")

DIAL_S = 10.0
SILENT_S = 10.0  # without a part the line is given up; the master sends one each second
AGAIN_S, AGAIN_S_MAX = 1.0, 15.0  # until the next attempt, doubling
ENDS = (trio.EndOfChannel, trio.BrokenResourceError, trio.ClosedResourceError, trio.TooSlowError)


@define
class StandbyState:
    """How the copy stands.

    Attributes:
      where: the master's address; empty while there is no connection.
      is_all: it has everything that the master had sent.
      in_step: the master waits for this standby with every answer.
      heard_at: unix seconds of the last part; 0.0: none came yet.
      trouble: why there is no connection, or why nothing can be written.
    """

    where: str = ""
    is_all: bool = False
    in_step: bool = False
    heard_at: float = 0.0
    trouble: str = ""


class StandbyCopy:
    """The process.

    Args:
      masters: addresses at which the run's master may be.
      tell: prints a line for the operator.
    """

    def __init__(
        self, options: MasterOptions, masters: Sequence[Address], tell: Callable[[str], None]
    ) -> None:
        check_copy(options)
        self._options = options
        self._masters = masters
        self._tell = tell
        self._told = ""
        self.state = StandbyState()
        self.store = JournalStore(options.state / JOURNAL_FILE)
        created = [each for each in self.store.records() if isinstance(each, RunCreated)]
        self._run_id = created[0].run_id if created else ""
        authority = Authority.load_or_create(options.state / "authority", self._run_id)
        self._network = SocketNetwork(certify(authority, options.state))

    async def run(self) -> None:
        """Copy until a signal comes.

        Raises:
          UserError: the copy cannot be continued.
        """
        side = control_side(
            STANDBY,
            self._options.state,
            self._options.http,
            actions={},
            why_unready=self.why,
            routes=standby_routes(self.why, self._facts, _nowhere),
            names=self._options.http_names,
            with_page=False,
        )
        try:
            with side as (serve_http, url):
                async with trio.open_nursery() as nursery:
                    await nursery.start(wait_for_signals, nursery.cancel_scope.cancel)
                    nursery.start_soon(serve_http)
                    self._tell(f"state at {url}; the copy is in {self._options.state}")
                    nursery.start_soon(self._tell_changes)
                    await self._keep()
        finally:
            self.store.close()
            self._tell(f"this copy ends with record {self.store.position.records}; {self._hint()}")

    async def _keep(self) -> None:
        """Connect again and again, and copy."""
        wait_s = AGAIN_S
        while True:
            for address in self._masters:
                try:
                    await self._copy_from(address)
                except (OSError, HoldfastError, *ENDS) as error:
                    if isinstance(error, UserError | JournalError):
                        raise
                    ended = isinstance(error, trio.EndOfChannel | trio.BrokenResourceError)
                    why = "the connection ended" if ended else str(error) or "no answer in time"
                    self.state.trouble = f"{address}: {why}"
                if self.state.where:
                    wait_s = AGAIN_S
                self.state.where, self.state.in_step = "", False
            await trio.sleep(wait_s)
            wait_s = min(2 * wait_s, AGAIN_S_MAX)

    async def _copy_from(self, address: Address) -> None:
        with trio.fail_after(DIAL_S):
            channel = await self._network.dial(address, party=Party.MASTER)
        try:
            await keep_copy(channel, self._network, self.store, self._run_id, self.state)
        finally:
            with suppress(OSError, *ENDS):
                await trio.aclose_forcefully(channel.stream)

    # ------------------------------------------------------------ what is told

    async def _tell_changes(self) -> None:
        """Print a line when something has changed in more than numbers."""
        while True:
            state = self.state
            essence = f"{state.where} {state.is_all} {state.in_step} {state.trouble}"
            if essence != self._told:
                self._told = essence
                self._tell(self.why())
            await trio.sleep(0.5)

    def why(self) -> str:
        """Return how the copy stands, in a sentence."""
        state, count = self.state, self.store.position.records
        if not (state.where or state.trouble):
            return (
                f"standby: dials {', '.join(map(str, self._masters))}; the copy has {count} records"
            )
        if state.where and state.trouble:
            return f"standby of {state.where}: nothing can be written here: {state.trouble}"
        if state.in_step:
            return (
                f"standby of {state.where}: in step with {count} records; nothing is acknowledged there "
                "before it is here"
            )
        if state.where:
            return f"standby of {state.where}: copying, {count} records so far"
        since = "; it was never reached"
        if state.heard_at:
            since = (
                f"; last heard of {time.time() - state.heard_at:.0f} s ago, with all its records"
            )
            since += "" if state.is_all else " but some"
        trouble = f" ({state.trouble})" if state.trouble else ""
        return f"standby: the master is away{trouble}{since}; the copy has {count} records; {self._hint()}"

    def _hint(self) -> str:
        return (
            "to lead the run here, when its master is gone for good: "
            f"`holdfast master --journal {self._options.state}`"
        )

    def _facts(self) -> Json:
        state = self.state
        return {
            "records": self.store.position.records,
            "in_step": state.in_step,
            "master": state.where,
            "heard_at": state.heard_at,
        }


async def keep_copy(
    channel: Channel, network: Network, store: JournalStore, run_id: str, state: StandbyState
) -> None:
    """Write into the copy what the master sends, until the connection ends.

    Raises:
      UserError: the master will never continue this copy.
      RemoteProtocolError: what came is no part of a journal.
      trio.TooSlowError: nothing came for ``SILENT_S``.
    """
    stream = MessageStream(channel.stream, COPIED)
    count = store.position.records
    check = await network.run_sync(partial(store.check_at, count))
    await stream.send(JournalWanted(run_id, count, check, SCHEMA_VERSION))
    while True:
        with trio.fail_after(SILENT_S):
            part = await stream.receive_expected(JournalPart, Refused)
        if isinstance(part, Refused):
            raise UserError(
                f"the master at {channel.remote_address} does not continue this copy: {part.reason}",
                exit_code=ExitCode.CONFIG,
                hint="make a new one: `holdfast backup DIR` there, and copy DIR here",
            )
        if not state.where:
            state.where, state.trouble = channel.remote_address, ""
        if part.rows:
            await _write(network, store, part, state)
        state.is_all, state.in_step = part.is_all, part.in_step
        state.heard_at = time.time()
        await stream.send(JournalStored(part.serial))


async def _write(
    network: Network, store: JournalStore, part: JournalPart, state: StandbyState
) -> None:
    """Make a part durable; while the disk is full, again and again: the master drops this standby then."""
    try:
        rows = [(each.table, msgpack.unpackb(each.row)) for each in part.rows]
    except (ValueError, msgpack.UnpackException) as error:
        raise RemoteProtocolError(f"a row that is none: {error}") from error
    while True:
        try:
            await network.run_sync(partial(store.take_copied, rows))
            state.trouble = ""
            return
        except JournalAwayError as error:
            state.trouble, state.in_step = str(error), False
            await trio.sleep(AGAIN_S)


def _nowhere(_request: Request) -> str | None:
    return None
