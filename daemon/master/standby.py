"""``holdfast standby``: wait for the lease of a journal that several masters share, lead, and wait
again.

    waiting --lease taken--> leading (``run_master.Master``) --lease lost--> waiting
       '--signal--> end                '--signal, command stop--> lease released, end

While it waits it serves HTTP too: it says who leads, and sends readers and actions there.
"""

from __future__ import annotations

import html
import logging
import os
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar
from urllib.parse import urlsplit

import trio
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.routing import BaseRoute, Route

from ...membership.master.state.journal import RunCreated
from ...protocol.errors import UserError
from ...protocol.trust.authority import Authority
from ..advertised_hosts import dialable, is_loopback
from ..process.exit_codes import ExitCode
from ..process.paths import JOURNAL_FILE, STANDBY
from ..process.screen import Screen
from ..process.tasks import wait_for_signals
from ..web.app import Json
from ..web.http_server import control_side
from ..web.json_answers import answer
from ..web.prometheus import StandbyCollector, metrics_route
from .journal.journal_store import JournalStore
from .journal.lease import Lease
from .journal.postgres_journal import Database, PostgresJournal
from .journal.shared_journal import HeldJournal, LeadersDatabase, SharedOptions, read_secret
from .leadership import Leader, Leadership
from .opened_run import MasterOptions
from .run_master import Master

HOLDER_BYTES = 4
CHECK_URL = "; check the address, the user and the password (PGPASSWORD, or ~/.pgpass)"
log = logging.getLogger("holdfast.master")
# For the lease. CLOCK_MONOTONIC of Linux stands still while the machine sleeps.
CLOCK: int = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
T = TypeVar("T")


class SharedMaster:
    """One of several masters of a run."""

    def __init__(
        self,
        options: MasterOptions,
        shared: SharedOptions,
        tell: Callable[[str], None],
        screen: Screen | None = None,
    ) -> None:
        self._options = options
        self._shared = shared
        self._tell = tell
        self._screen = screen
        # One connection for the lease, another for the journal: no record delays a renewal.
        self._leases = LeadersDatabase(shared, options.state)
        self._leadership = Leadership(
            self._leases,
            f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(HOLDER_BYTES)}",
            shared.lease_s,
            call=partial(trio.to_thread.run_sync, abandon_on_cancel=True),
            clock=partial(time.clock_gettime, CLOCK),
        )

    async def run(self) -> None:
        """Lead, or wait for it, until a signal or ``stop``."""
        while True:
            lease = await self._wait()
            if lease is None:
                return
            why_lost = await self._leadership.lead(lease, partial(self._begin, lease))
            if not why_lost:
                return
            self._tell(f"this master does not lead any more: {why_lost}")

    # ------------------------------------------------------------ waiting

    async def _wait(self) -> Lease | None:
        """Return the lease, or None after a signal."""
        found: list[Lease] = []
        side = control_side(
            STANDBY,
            self._options.state,
            self._options.http,
            actions={},
            why_unready=self._why_unready,
            routes=standby_routes(self._why_unready, self._facts, self._page_elsewhere),
            names=self._options.http_names,
            with_page=False,
        )
        with side as (serve_http, self._leadership.page):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(wait_for_signals, nursery.cancel_scope.cancel)
                nursery.start_soon(serve_http)
                found.append(await self._leadership.take(self._watch_leader()))
                nursery.cancel_scope.cancel()
        return found[0] if found else None

    def _watch_leader(self) -> Callable[[], None]:
        """Return what is called after each look at another master's lease."""
        told = ""

        def looked() -> None:
            nonlocal told
            listen = self._options.listen
            if all(each.port for each in listen):  # the machine may have an address only by now
                self._leadership.addresses = dialable(listen, self._options.advertise)
            state = self._why_unready()
            if state != told:
                told = state
                self._tell(state)

        return looked

    def _why_unready(self) -> str:
        if self._leadership.away:
            hint = "" if self._leadership.known else CHECK_URL  # it has never answered
            return f"standby: {self._leases.place} does not answer: {self._leadership.away}{hint}"
        if self._leases.unfit:
            return f"standby: this master cannot lead: {self._leases.unfit}"
        leader = self._leadership.leader
        if leader is None:
            return "standby: no master leads the run at the moment; its lease has to run out"
        where = f" at {', '.join(leader.addresses)}" if leader.addresses else ""
        return (
            f"standby: the master {leader.holder}{where} leads the run; its page is {leader.page}"
        )

    # ------------------------------------------------------------ HTTP of one that waits

    def _facts(self) -> Json:
        leader = self._leadership.leader
        return {
            "holder": self._leadership.holder,
            "leader": None if leader is None else leader.holder,
            "leader_page": None if leader is None else leader.page,
            "leader_addresses": [] if leader is None else list(leader.addresses),
            "lease_left_s": None if leader is None else leader.left_s,
            "masters": [each.holder for each in self._leadership.known],
        }

    def _page_elsewhere(self, request: Request) -> str | None:
        """Return the leader's URL for this request; None if no other machine can reach its page."""
        leader = self._leadership.leader
        if leader is None or not leader.page:
            return None
        here = request.client is not None and is_loopback(request.client.host)
        same_machine = leader.holder.split(":")[0] == self._leadership.holder.split(":")[0]
        if is_loopback(urlsplit(leader.page).hostname or "") and not (here and same_machine):
            return None
        query = f"?{request.url.query}" if request.url.query else ""
        return f"{leader.page.rstrip('/')}{request.url.path}{query}"

    # ------------------------------------------------------------ leading

    async def _begin(self, lease: Lease) -> Leader:
        return await trio.to_thread.run_sync(self._make, lease)

    def _make(self, lease: Lease) -> Leader:
        shared = self._shared
        journal = PostgresJournal(Database(shared.url, shared.run), lease)
        try:
            secret = self._leases.secret or read_secret(shared, new_run=True)
            held = HeldJournal(journal, secret, self._leadership.is_held)
            self._move_in(held)
            made = Master(self._options, self._tell, self._screen, shared=held)
            self._options.takes_over = False  # it does only once
            return made
        except BaseException:
            journal.close()
            raise

    def _move_in(self, held: HeldJournal) -> None:
        """Move the state directory's journal into the database; raise UserError if it has a run."""
        state = self._options.state
        path = state / JOURNAL_FILE
        if not path.exists():
            return
        own = JournalStore(path)
        records = own.records()
        if held.journal.is_empty:
            (run_id,) = {record.run_id for record in records if isinstance(record, RunCreated)}
            authority = Authority.load_or_create(state / "authority", run_id)
            sealed = authority.sealed(held.secret)
            held.journal.adopt(own, authority.certificate_pem, sealed)
        elif held.journal.records()[: len(records)] != records:  # else it was moved before a crash
            raise UserError(
                f"{state} has a journal of its own, and {held.journal.place} has a run of this"
                " name, too",
                exit_code=ExitCode.CONFIG,
                hint=(
                    "give this master another folder with --state DIR; or remove the folder, if its"
                    " journal is not needed any more"
                ),
            )
        own.close()
        moved, key = state / f"{JOURNAL_FILE}.moved", state / "authority.moved"
        if (state / "authority").exists():
            (state / "authority").rename(key)
        path.rename(moved)
        self._tell(
            f"moved {len(records)} records into {held.journal.place}; the old file is {moved}"
        )
        self._tell(
            f"{key} has the run's key as it was, not sealed: delete it once you trust the database"
        )


# ---------------------------------------------------------------- HTTP


def standby_routes(
    why: Callable[[], str],
    facts: Callable[[], Json],
    page_elsewhere: Callable[[Request], str | None],
) -> Sequence[BaseRoute]:
    """Return the routes; ``page_elsewhere`` returns the leader's URL if the client can reach it."""

    async def front(request: Request) -> Response:
        if (url := page_elsewhere(request)) is not None:
            return RedirectResponse(url)
        text = html.escape(why())
        return HTMLResponse(
            "<!doctype html><meta"
            f" charset=utf-8><title>standby</title><h1>Standby</h1><p>{text}</p>"
        )

    async def status(_request: Request) -> Response:
        return answer({"kind": STANDBY, "state": STANDBY, "why_waiting": why(), **facts()})

    async def elsewhere(request: Request) -> Response:
        if (url := page_elsewhere(request)) is not None:
            return RedirectResponse(url)  # 307: an action stays one
        return answer({"error": why()}, 503)

    return [
        Route("/", front, methods=["GET"]),
        Route("/api/status", status, methods=["GET"]),
        metrics_route(StandbyCollector()),
        Route("/{rest:path}", elsewhere, methods=["GET", "POST"]),
    ]
