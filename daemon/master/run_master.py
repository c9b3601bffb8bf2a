"""``holdfast master`` as a process: store, authority, coordinator, network and HTTP together."""

from __future__ import annotations

import json
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import attrs
import trio
from attrs import define
from starlette.routing import Route

from ... import __version__
from ...membership.master.coordinator import Coordinator
from ...membership.master.state.context import LOT_BYTES
from ...membership.master.state.history import TERMS_SKIPPED
from ...membership.master.state.journal import JournalRecord, RunCreated, SpecChanged, TermStarted
from ...membership.master.state.master_effects import Event
from ...membership.master.status.headline import headline
from ...membership.master.status.status import describe
from ...membership.master.status.why_waiting import WaitReasons
from ...membership.planning.fragment_sizes import sizes_fault
from ...membership.spec.spec import RunSpec
from ...membership.spec.spec_changes import changed_settings
from ...protocol.addresses import Address
from ...protocol.errors import UserError
from ...protocol.messages import MASTERS_MAX, Role
from ...protocol.network.sockets import SocketNetwork
from ...protocol.trust.authority import Authority, Party
from ...protocol.trust.credentials import Credentials
from ...protocol.trust.identity import Identity
from ...protocol.trust.invite import ADDRESSES_MAX, Invite
from ..advertised_hosts import WILDCARDS, dialable, only_loopback
from ..process.exit_codes import ExitCode
from ..process.paths import JOURNAL_FILE, PLACE_FILE, make_private, note_source
from ..process.screen import Screen
from ..process.tasks import wait_for_signals
from ..progress_lines import PRINTED_EVENTS, ProgressClock, master_line
from ..spec_file import read_spec
from ..status_records import MasterStatus
from ..web.app import read_route
from ..web.http_server import control_side
from ..web.live_stream import LiveStream
from ..web.prometheus import StatusCollector, metrics_route
from ..web.run_history import past_routes, status_route
from .announcements import format_end, format_first_invite, format_invites, format_resumed
from .journal.journal_base import Journal, JournalError, storing
from .journal.journal_store import JournalStore
from .master_service import MasterService
from .operator_commands import OperatorCommands
from .run_recorder import RunRecorder

if TYPE_CHECKING:
    from .journal.shared_journal import HeldJournal

# For the invite that a starting master prints: a few machines of the operator's. A person who finds
# it cannot add enough machines to outvote a larger run.
INVITE_USES_DEFAULT = 8
INVITE_HOURS_DEFAULT = 24.0
SHOWN_S = 1.0  # between two states of the living line
RENEW_OWN_S = 6 * 3600.0  # between two renewals of the master's own certificate


@define
class MasterOptions:
    """The options of a process that can lead a run."""

    spec_path: Path | None  # None: the spec in the journal
    state: Path
    listen: Sequence[Address]
    advertise: Sequence[Address]
    http: Address
    invite: bool = True
    takes_over: bool = False  # the journal is a backup: it may lack records
    also: Sequence[Address] = ()  # addresses of machines that may take over from this one
    http_names: Sequence[str] = ()  # for HTTP, besides this machine's own names


class Master:
    """A run's master as a process: everything around ``MasterService``.

    Args:
      tell: prints a line for the operator.
      screen: shows how the run goes; None: nothing shows it.
      shared: a journal that other masters share; None: the one in the state directory.
    """

    def __init__(
        self,
        options: MasterOptions,
        tell: Callable[[str], None],
        screen: Screen | None = None,
        shared: HeldJournal | None = None,
    ) -> None:
        self.options = options
        self.tell = tell
        self.screen = screen or Screen(None)
        self._shared = shared
        if shared is None:
            self._check_state()
        self._end_told = False  # the operator has read how the run ended
        self._resumes = False
        self._changes: list[str] = []  # of the settings, since the last start
        self._moved = False  # to addresses that earlier invites do not name
        self.url = ""  # of the page, once it is served
        self._others: tuple[str, ...] = ()  # addresses of the other masters of a shared journal
        given = None if options.spec_path is None else read_spec(options.spec_path)
        make_private(options.state)
        self.store: Journal = (
            JournalStore(options.state / JOURNAL_FILE) if shared is None else shared.journal
        )
        self.authority, self.spec, self.coordinator = self._restore(given)
        if options.spec_path is not None:
            note_source(options.state, options.spec_path)
        self.run_id = self.authority.run_id
        self.credentials = _certify(self.authority, options.state)
        self.network = SocketNetwork(self.credentials, newcomers=True)
        self.service = MasterService(
            self.coordinator,
            self.store,
            self.network,
            options.listen,
            authority=self.authority,
            may_decide=None if shared is None else shared.is_held,
        )
        self.started_s = time.time()
        self._scope = trio.CancelScope()
        self._commands = OperatorCommands(
            self.service, self.store, self.make_invite, self._scope.cancel
        )
        self.service.subscribe(self._tell_end)

    def _check_state(self) -> None:
        """Raise UserError if the journal or its authority's key is missing, before anything is
        written.
        """
        options = self.options
        exists = (options.state / JOURNAL_FILE).exists()
        place = options.state / PLACE_FILE
        if place.exists() and not exists:
            raise UserError(
                f"the journal of {options.state} is in {place.read_text().strip()}",
                exit_code=ExitCode.CONFIG,
                hint="start it with `holdfast standby RUN_TOML`",
            )
        if not exists and (options.takes_over or options.spec_path is None):
            raise UserError(
                f"there is no journal in {options.state}",
                exit_code=ExitCode.CONFIG,
                hint="copy the run's state there first: `holdfast backup DIR` at its master",
            )
        if exists and not (options.state / "authority" / "authority.key").exists():
            raise UserError(
                f"{options.state} has the journal, but not the key of the run's authority",
                exit_code=ExitCode.CONFIG,
                hint="copy the folder authority/ as well: `holdfast backup DIR` does",
            )

    def _restore(self, given: RunSpec | None) -> tuple[Authority, RunSpec, Coordinator]:
        """Continue the journal's run in a new term; begin a new run if there is no journal."""
        records = self.store.records()
        created = [record for record in records if isinstance(record, RunCreated)]
        if not created:
            assert given is not None
            run_id = secrets.token_hex(16)
            self._record(records, RunCreated(run_id, given.toml_text))
            recorded = given
        else:
            run_id = created[0].run_id
            texts = [r.spec_toml for r in records if isinstance(r, RunCreated | SpecChanged)]
            recorded = RunSpec.parse(texts[-1])
        self._resumes = bool(created)
        spec = recorded if given is None else given
        if spec != recorded:
            self._check_same_run(recorded, spec)
            self._changes = changed_settings(recorded, spec)
            self._record(records, SpecChanged(spec.toml_text))
        behind = self.options.takes_over or self.store.cut is not None
        terms = [record.term for record in records if isinstance(record, TermStarted)]
        last = max([self.store.last_term, *terms])
        term = last + (TERMS_SKIPPED if behind else 1)
        if self._shared is None:
            authority = Authority.load_or_create(self.options.state / "authority", run_id)
        else:
            authority = self._shared.authority(run_id)
        self._record(records, TermStarted(term, authority.begin_term(term), behind))
        lot = secrets.token_bytes(LOT_BYTES)
        coordinator = Coordinator.restore(spec, run_id, records, term, lot)
        self._check_sizes(coordinator)
        return authority, spec, coordinator

    def _check_sizes(self, coordinator: Coordinator) -> None:
        """Raise UserError for impossible fragment sizes, which older versions recorded
        unchecked.
        """
        context = coordinator.context
        layout, sizes = context.history.layout, context.history.sizes
        if layout is not None and (fault := sizes_fault(layout, sizes, context.spec)) is not None:
            raise UserError(
                f"the journal in {self.options.state} founds the run on impossible sizes: {fault}",
                exit_code=ExitCode.CONFIG,
                hint="no master can serve it; start a new run with another --state DIR",
            )

    def _record(self, records: list[JournalRecord], record: JournalRecord) -> None:
        try:
            self.store.append(record)
        except JournalError as error:
            if self._shared is not None:  # another master may lead by now; this one can wait
                raise
            raise UserError(
                f"the journal {self.store.place} cannot be written: {error}",
                hint=f"{self.store.remedy}, then start the master again",
            ) from error
        records.append(record)

    def _check_same_run(self, before: RunSpec, now: RunSpec) -> None:
        if before.run.name != now.run.name:
            raise UserError(
                f"{self.options.state} has the run {before.run.name!r}, and"
                f" {self.options.spec_path} is of {now.run.name!r}",
                exit_code=ExitCode.CONFIG,
                hint=(
                    "a new run needs its own --state DIR; to go on with that one, write "
                    f"name = {json.dumps(before.run.name, ensure_ascii=False)} into the file"
                ),
            )
        for key in ("fragments", "groups"):
            recorded, given = getattr(before.diloco, key), getattr(now.diloco, key)
            if recorded != given:
                raise UserError(
                    f"the run in {self.options.state} has {key} = {json.dumps(recorded)}, "
                    f"{self.options.spec_path} says {json.dumps(given)}",
                    exit_code=ExitCode.CONFIG,
                    hint="a new run needs another name, or its own --state DIR",
                )

    # ------------------------------------------------------------ life

    async def run(self) -> None:
        """Serve until a signal or the command ``stop`` comes."""
        async with trio.open_nursery() as nursery:
            await nursery.start(wait_for_signals, self._scope.cancel)  # before anything is told
            self._tell_what_it_is()
            await self._record_and_serve()
            nursery.cancel_scope.cancel()

    async def _record_and_serve(self) -> None:
        live = LiveStream(partial(self.status, past=False), self._stamp)
        recorder = self.recorder = await self.network.run_sync(
            lambda: RunRecorder.open(self.service, self.options.state, live=live)
        )
        try:
            await self._serve(recorder, live)
        finally:
            with trio.CancelScope(shield=True):
                recorder.look()
                await trio.to_thread.run_sync(recorder.close)

    async def _serve(self, recorder: RunRecorder, live: LiveStream) -> None:
        side = control_side(
            "master",
            self.options.state,
            self.options.http,
            why_unready=self.why_unready,
            routes=[
                read_route("invites", lambda: {"invites": self.store.invites()}),
                status_route(lambda past: self.status(past=past)),
                Route("/api/live", live, methods=["GET"]),
                metrics_route(StatusCollector(self.status)),
                *past_routes(recorder.history, self.network),
            ],
            actions=self._commands.actions(),
            names=self.options.http_names,
        )
        with side as (serve_http, url), self._scope:
            self.url = url
            async with trio.open_nursery() as nursery:
                bound = await nursery.start(self.service.run)
                self._note_start()
                nursery.start_soon(recorder.run)
                nursery.start_soon(live.run)
                nursery.start_soon(serve_http)
                nursery.start_soon(self._renew_own)
                self._announce(bound, url)
                self.service.subscribe(self._tell_event)
                nursery.start_soon(self._show_progress)

    def _note_start(self) -> None:
        """Have the members told this run's master addresses; note a cut of the journal as an
        event.
        """
        masters = tuple(map(str, self._masters()))[:MASTERS_MAX]
        self._moved = not set(masters) <= set(self.coordinator.context.history.masters.addresses)
        self.service.decide(partial(self.coordinator.know_masters, masters))
        if self.store.cut is not None:
            self.service.decide(partial(self.coordinator.note, str(self.store.cut)))
        if self._resumes:
            term = self.coordinator.context.term
            text = f"the master was started again (term {term})"
            if self._shared is not None or self.options.takes_over:
                text = f"the master on {socket.gethostname()} leads the run now (term {term})"
            self.service.decide(partial(self.coordinator.note, text))
        if self._changes:
            text = f"settings changed with the restart: {'; '.join(self._changes)}"
            self.service.decide(partial(self.coordinator.note, text))
        self.service.decide(self.coordinator.settle)  # a run may be finished by its new settings

    def _tell_what_it_is(self) -> None:
        """Tell which run this is, before anything can fail that has to do with this machine."""
        context, name = self.coordinator.context, self.spec.run.name
        if not self._resumes:
            self.tell(f"new run {name} ({self.run_id[:8]})")
            return
        known = format_resumed(context.history, self.store)
        self.tell(f"resuming run {name} ({self.run_id[:8]}), term {context.term}: {known}")
        for change in self._changes:
            self.tell(f"changed: {change}")

    def _tell_end(self, _event: Event) -> None:
        """Tell once how the run ended; again if it was resumed and ends again."""
        context, ending = self.coordinator.context, self.recorder.ending()
        if ending is None:
            self._end_told = False
        elif not self._end_told and ending.finished_at is not None:  # else it is not on disk yet
            self._end_told = True
            for line in format_end(context.history, context.spec, ending):
                self.tell(line)

    def _announce(self, bound: Sequence[Address], url: str) -> None:
        self.tell(f"listening on {', '.join(map(str, bound))}; dashboard at {url}")
        self.tell(f"state in {self.options.state}")
        if self.store.cut is not None:
            self.tell(f"WARNING: {self.store.cut}")
        addresses = [Address.parse(text) for text in self.addresses()]
        anywhere = not self.options.advertise and any(each.host in WILDCARDS for each in bound)
        if anywhere and only_loopback(addresses):
            self.tell(
                "WARNING: this machine has no network address, so invites name it as "
                f"{', '.join(map(str, addresses))}, which only this machine reaches. For other "
                "machines start the master with --advertise HOST"
            )
        if self.coordinator.succession.waiting:
            self.tell(self.coordinator.succession.why_waiting())
        if self.options.invite and not self.coordinator.context.history.finished:
            self._tell_invite()

    def _tell_invite(self) -> None:
        """Print a new invite, unless an earlier one still admits machines at this master's
        addresses.
        """
        founder = not self.coordinator.context.history.founded
        usable = self.store.usable_invites(Role.CONTRIBUTOR, founder=founder)
        if usable and not self._moved:
            for line in format_invites(usable):
                self.tell(line)
        else:
            invite = self.make_invite(
                Role.CONTRIBUTOR, founder, INVITE_USES_DEFAULT, INVITE_HOURS_DEFAULT
            )
            for line in format_first_invite(invite, INVITE_USES_DEFAULT, self.options.spec_path):
                self.tell(line)

    def _tell_event(self, event: Event) -> None:
        if event.kind in PRINTED_EVENTS:
            self.tell(event.text)

    async def _show_progress(self) -> None:
        """Keep the living line of a terminal, or print a line from time to time."""
        clock = ProgressClock()
        while True:
            context = self.coordinator.context
            due = clock.is_due(context.history.commit_count, trio.current_time())
            if self.screen.live or due:
                state, why = WaitReasons(self.coordinator, self.service.now()).of_run()
                figures = self.recorder.headline(headline(self.coordinator, state))
                self.screen.progress(master_line(state, why, figures, len(context.roster)), due=due)
            await trio.sleep(SHOWN_S)

    async def _renew_own(self) -> None:
        """Renew the master's own certificate, which is valid for a day."""
        while True:
            await trio.sleep(RENEW_OWN_S)
            credentials = self.credentials
            credentials.replace_certificate(
                self.authority.issue(
                    credentials.identity.request_pem("master"), "master", Party.MASTER
                )
            )

    # ------------------------------------------------------------ status and invites

    def status(self, *, past: bool = True) -> MasterStatus:
        """Return the status; without ``past`` only as it is now."""
        status = describe(self.coordinator, self.service.now(), past=past)
        status = attrs.evolve(
            status,
            headline=self.recorder.headline(status.headline),
            why_waiting=self.service.why_stuck() or status.why_waiting,
        )
        sizes = self.coordinator.context.history.sizes
        return MasterStatus(
            **attrs.asdict(status, recurse=False),
            kind="master",
            version=__version__,
            journal_cut=None if self.store.cut is None else str(self.store.cut),
            run_id=self.run_id,
            name=self.spec.run.name,
            uptime_s=time.time() - self.started_s,
            value_count=sum(size.value_count for size in sizes),
            addresses=tuple(self.addresses()),
            pending=self.service.admission.rows(),
            ending=self.recorder.ending(),
        )

    def _stamp(self) -> object:
        """Return a value that changes when the status may have changed in more than ages."""
        context, service = self.coordinator.context, self.service
        changes = context.change_count, service.admission.change_count
        return *changes, service.why_stuck(), self.recorder.ending()

    def why_unready(self) -> str:
        """Return why no round can be committed here, or an empty string."""
        if self.coordinator.succession.superseded:
            return self.coordinator.succession.superseded
        return self.service.why_stuck() or (
            "" if self.service.bound else "the master does not listen yet"
        )

    def addresses(self) -> Sequence[str]:
        """Return the addresses at which other machines dial this master."""
        return dialable(self.service.bound, self.options.advertise)

    def _masters(self) -> tuple[Address, ...]:
        """Return the addresses for invites: this master's, then those of masters that may take
        over.
        """
        ours = [Address.parse(text) for text in self.addresses()]
        known = self.coordinator.context.history.masters.addresses
        others = map(Address.parse, (*self._others, *known))
        return tuple(dict.fromkeys([*ours, *self.options.also, *others]))[:ADDRESSES_MAX]

    def know_others(self, addresses: Sequence[str]) -> None:
        """Name these masters of a shared journal in invites and to the members."""
        if tuple(addresses) == self._others:
            return
        self._others = tuple(addresses)
        masters = tuple(map(str, self._masters()))[:MASTERS_MAX]
        self.service.decide(partial(self.coordinator.know_masters, masters))

    def make_invite(
        self, role: Role, founder: bool, uses: int, hours: float, *, approve: bool = False
    ) -> str:
        """Make an invite and return it as text.

        Args:
          approve: the operator approves each newcomer that comes with it.

        Raises:
          UserError: the disk is full.
        """
        with storing("the invite"):
            token, expires_s = self.store.make_token(
                role, founder=founder, uses=uses, hours=hours, by_hand=approve
            )
        return Invite(
            run_id=self.run_id,
            addresses=self._masters(),
            fingerprint=self.authority.fingerprint,
            token=token,
            role=role,
            expires_s=int(expires_s),
        ).encode()


def _certify(authority: Authority, state: Path) -> Credentials:
    """Return what this master shows to others: its key, and a certificate of the run's
    authority.
    """
    folder = state / "master"
    identity = Identity.load_or_create(make_private(folder) / "identity.key")
    certificate = authority.issue(identity.request_pem("master"), "master", Party.MASTER)
    return Credentials(folder, identity, certificate, authority.certificate_pem)
