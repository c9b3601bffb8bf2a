"""``holdfast master`` as a process: store, authority, coordinator, network and HTTP together."""

from __future__ import annotations

import json
import secrets
import sqlite3
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import attrs
import trio
from attrs import define
from starlette.routing import Route

from ... import __version__
from ...membership.master.coordinator import Coordinator
from ...membership.master.state.context import LOT_BYTES
from ...membership.master.state.journal import (
    TERMS_SKIPPED,
    JournalRecord,
    RunCreated,
    SpecChanged,
    TermStarted,
)
from ...membership.master.status.status import describe
from ...membership.planning.fragment_sizes import sizes_fault
from ...membership.spec.spec import RunSpec
from ...protocol.addresses import Address
from ...protocol.errors import UserError
from ...protocol.messages import MASTERS_MAX, Role
from ...protocol.network.sockets import SocketNetwork
from ...protocol.trust.authority import Authority, Party
from ...protocol.trust.credentials import Credentials
from ...protocol.trust.identity import Identity
from ...protocol.trust.invite import ADDRESSES_MAX, Invite
from ..advertised_hosts import WILDCARDS, dialable, only_loopback
from ..exit_codes import ExitCode
from ..paths import make_private
from ..spec_file import read_spec
from ..status_records import MasterStatus
from ..tasks import wait_for_signals
from ..web.app import read_route
from ..web.http_server import control_side
from ..web.live_stream import LiveStream
from ..web.prometheus import metrics_route
from ..web.run_history import past_routes, status_route
from .journal_store import JOURNAL_FILE, JournalStore, storing
from .master_service import MasterService
from .operator_commands import OperatorCommands
from .run_recorder import RunRecorder

# For the invite that a starting master prints: a few machines of the operator's. A person who finds it
# cannot add enough machines to outvote a larger run.
INVITE_USES_DEFAULT = 8
INVITE_HOURS_DEFAULT = 24.0
RENEW_OWN_S = 6 * 3600.0  # between two renewals of the master's own certificate


@define
class MasterOptions:
    """The options of ``holdfast master``."""

    spec_path: Path | None  # None: the spec in the journal
    state: Path
    listen: Sequence[Address]
    advertise: Sequence[Address]
    http: Address
    invite: bool = True
    takes_over: bool = False  # the state is a copy of another master's
    standby: Sequence[Address] = ()  # addresses of masters that may take over from this one
    http_names: Sequence[str] = ()  # for HTTP, besides this machine's own names


class Master:
    """A run's master as a process: everything around ``MasterService``.

    Args:
      tell: prints a line for the operator.
    """

    def __init__(self, options: MasterOptions, tell: Callable[[str], None]) -> None:
        self.options = options
        self.tell = tell
        self._check_state()
        given = None if options.spec_path is None else read_spec(options.spec_path)
        make_private(options.state)
        self.store = JournalStore(options.state / JOURNAL_FILE)
        self.authority, self.spec, self.coordinator = self._restore(given)
        self.run_id = self.authority.run_id
        self.credentials = self._credentials()
        self.network = SocketNetwork(self.credentials, newcomers=True)
        self.service = MasterService(
            self.coordinator, self.store, self.network, options.listen, authority=self.authority
        )
        self.started_s = time.time()
        self._scope = trio.CancelScope()
        self._commands = OperatorCommands(
            self.service, self.store, self.make_invite, self._scope.cancel
        )

    def _check_state(self) -> None:
        """Raise UserError if the journal or its authority's key is missing, before anything is written."""
        options = self.options
        exists = (options.state / JOURNAL_FILE).exists()
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
        spec = recorded if given is None else given
        if spec.toml_text != recorded.toml_text:
            self._check_same_run(recorded, spec)
            self._record(records, SpecChanged(spec.toml_text))
        behind = self.options.takes_over or self.store.cut is not None
        terms = [record.term for record in records if isinstance(record, TermStarted)]
        last = max([self.store.last_term, *terms])
        term = last + (TERMS_SKIPPED if behind else 1)
        authority = Authority.load_or_create(self.options.state / "authority", run_id)
        self._record(records, TermStarted(term, authority.begin_term(term), behind))
        lot = secrets.token_bytes(LOT_BYTES)
        coordinator = Coordinator.restore(spec, run_id, records, term, lot)
        self._check_sizes(coordinator)
        return authority, spec, coordinator

    def _check_sizes(self, coordinator: Coordinator) -> None:
        """Raise UserError for impossible fragment sizes, which older versions recorded unchecked."""
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
        except sqlite3.Error as error:
            raise UserError(
                f"the journal in {self.options.state} cannot be written: {error}",
                hint="free some space on its disk, then start the master again",
            ) from error
        records.append(record)

    def _check_same_run(self, before: RunSpec, now: RunSpec) -> None:
        for key in ("fragments", "pattern", "groups"):
            recorded, given = getattr(before.diloco, key), getattr(now.diloco, key)
            if recorded != given:
                raise UserError(
                    f"the run in {self.options.state} has {key} = {json.dumps(recorded)}, "
                    f"{self.options.spec_path} says {json.dumps(given)}",
                    exit_code=ExitCode.CONFIG,
                    hint="a new run needs another name, or its own --state DIR",
                )

    def _credentials(self) -> Credentials:
        folder = self.options.state / "master"
        identity = Identity.load_or_create(make_private(folder) / "identity.key")
        certificate = self.authority.issue(identity.request_pem("master"), "master", Party.MASTER)
        return Credentials(folder, identity, certificate, self.authority.certificate_pem)

    # ------------------------------------------------------------ life

    async def run(self) -> None:
        """Serve until a signal or the command ``stop`` comes."""
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
                metrics_route(self.status),
                *past_routes(recorder.history, self.network),
            ],
            actions=self._commands.actions(),
            names=self.options.http_names,
        )
        with side as (serve_http, url), self._scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(wait_for_signals, self._scope.cancel)
                bound = await nursery.start(self.service.run)
                self._note_start()
                nursery.start_soon(recorder.run)
                nursery.start_soon(live.run)
                nursery.start_soon(serve_http)
                nursery.start_soon(self._renew_own)
                self._announce(bound, url)

    def _note_start(self) -> None:
        """Have the members told this run's master addresses; note a cut of the journal as an event."""
        masters = (*self._addresses(), *map(str, self.options.standby))[:MASTERS_MAX]
        self.service.decide(partial(self.coordinator.know_masters, masters))
        if self.store.cut is not None:
            self.service.decide(partial(self.coordinator.note, str(self.store.cut)))

    def _announce(self, bound: Sequence[Address], url: str) -> None:
        self.tell(
            f"run {self.spec.run.name} ({self.run_id[:8]}), term {self.coordinator.context.term}"
        )
        self.tell(f"listening on {', '.join(map(str, bound))}; dashboard at {url}")
        self.tell(f"state in {self.options.state}")
        if self.store.cut is not None:
            self.tell(f"WARNING: {self.store.cut}")
        addresses = [Address.parse(text) for text in self._addresses()]
        anywhere = not self.options.advertise and any(each.host in WILDCARDS for each in bound)
        if anywhere and only_loopback(addresses):
            self.tell(
                "WARNING: this machine has no network address, so invites name it as "
                f"{', '.join(map(str, addresses))}, which only this machine reaches. For other "
                "machines start the master with --advertise HOST"
            )
        if self.coordinator.succession.waiting:
            self.tell(self.coordinator.succession.why_waiting())
        if self.options.invite:
            founder = not self.coordinator.context.history.founded
            invite = self.make_invite(
                Role.CONTRIBUTOR, founder, INVITE_USES_DEFAULT, INVITE_HOURS_DEFAULT
            )
            self.tell(f"on each machine that takes part ({INVITE_USES_DEFAULT} at most), run:")
            self.tell(f"  holdfast join {invite} -- python train.py")

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
            addresses=tuple(self._addresses()),
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

    def _addresses(self) -> Sequence[str]:
        return dialable(self.service.bound, self.options.advertise)

    def _masters(self) -> tuple[Address, ...]:
        """Return the addresses for invites: this master's, then the standbys'."""
        ours = [Address.parse(text) for text in self._addresses()]
        return tuple(dict.fromkeys([*ours, *self.options.standby]))[:ADDRESSES_MAX]

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
