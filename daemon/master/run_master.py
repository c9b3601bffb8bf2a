"""``holdfast master``: puts together store, authority, coordinator, network and HTTP, and runs them."""

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
from ..web.app import Json
from ..web.http_server import control_side
from ..web.live_stream import LiveStream
from ..web.prometheus import metrics_route
from ..web.run_history import past_routes, status_route
from .admission import called
from .journal_store import JOURNAL_FILE, JournalStore
from .master_service import MasterService
from .run_recorder import RunRecorder

# Of the invite that a starting master prints: a few machines of its owner's. Whoever finds it cannot
# come with enough of them to outvote a larger run.
INVITE_USES_DEFAULT = 8
INVITE_HOURS_DEFAULT = 24.0
USES_MAX = 1_000_000  # of an invite
HOURS_MAX = 87_600.0  # of an invite: ten years


@define
class MasterOptions:
    spec_path: Path | None  # None: as the journal has it
    state: Path
    listen: Sequence[Address]
    advertise: Sequence[Address]
    http: Address
    invite: bool = True
    takes_over: bool = False  # the state is a copy of another master's
    standby: Sequence[Address] = ()  # where other masters may take over from this one
    http_names: Sequence[str] = ()  # that the HTTP side answers to, beside this machine's own


class Master:
    """A run's master as a process: everything around ``MasterService``."""

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

    def _check_state(self) -> None:
        """A journal without its authority's key cannot serve: say so before anything is written."""
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
        """The run as its journal has it, in a new term; a new run if there is no journal."""
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
        """Versions before this one recorded whatever sizes a founder said."""
        context = coordinator.context
        layout, sizes = context.history.layout, context.history.sizes
        if layout is not None and (fault := sizes_fault(layout, sizes, context.spec)) is not None:
            raise UserError(
                f"the journal in {self.options.state} founds the run on what cannot be: {fault}",
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
            had, said = getattr(before.diloco, key), getattr(now.diloco, key)
            if had != said:
                raise UserError(
                    f"the run in {self.options.state} has {key} = {json.dumps(had)}, "
                    f"{self.options.spec_path} says {json.dumps(said)}",
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
        """Serve until a signal or ``stop``."""
        recorder = await self.network.run_sync(
            lambda: RunRecorder.open(self.service, self.options.state)
        )
        try:
            await self._serve(recorder)
        finally:
            with trio.CancelScope(shield=True):
                recorder.look()
                await trio.to_thread.run_sync(recorder.close)

    async def _serve(self, recorder: RunRecorder) -> None:
        self.recorder = recorder
        live = recorder.live = LiveStream(partial(self.status, past=False), self._stamp)
        side = control_side(
            "master",
            self.options.state,
            self.options.http,
            reads={"invites": lambda: {"invites": self.store.invites()}},
            why_unready=self.why_unready,
            routes=[
                status_route(lambda past: self.status(past=past)),
                Route("/api/live", live, methods=["GET"]),
                metrics_route(self.status),
                *past_routes(recorder.history, self.network),
            ],
            actions={
                "invite": self._act_invite,
                "withdraw": self._act_withdraw,
                "approve": self._act_approve,
                "kick": self._act_kick,
                "checkpoint": self._act_checkpoint,
                "clear": self._act_clear,
                "verify": self._act_verify,
                "pause": self._act_pause,
                "resume": self._act_resume,
                "stop": self._act_stop,
            },
            names=self.options.http_names,
        )
        self._scope = trio.CancelScope()
        with side as (serve_http, url), self._scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(wait_for_signals, self._on_signal)
                bound = await nursery.start(self.service.run)
                self._note_start()
                nursery.start_soon(recorder.run)
                nursery.start_soon(live.run)
                nursery.start_soon(serve_http)
                nursery.start_soon(self._renew_own)
                self._announce(bound, url)

    def _note_start(self) -> None:
        """What everybody should know from now on: our addresses, and what became of the journal."""
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
                "WARNING: this machine is in no network, so invites name it as "
                f"{', '.join(map(str, addresses))}, where only its own peers find it. For others "
                "start the master with --advertise HOST"
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
        """The master's own certificate lives a day, too."""
        while True:
            await trio.sleep(6 * 3600)
            credentials = self.credentials
            credentials.replace_certificate(
                self.authority.issue(
                    credentials.identity.request_pem("master"), "master", Party.MASTER
                )
            )

    def _on_signal(self) -> None:
        self._scope.cancel()

    # ------------------------------------------------------------ what people ask and do

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
            pending=self.service.gate.rows(),
        )

    def _stamp(self) -> object:
        """Changes when the status may have changed, but for what only grows old."""
        context, service = self.coordinator.context, self.service
        return context.change_count, service.gate.change_count, service.why_stuck()

    def why_unready(self) -> str:
        """Why no round can be committed here; empty: it can."""
        if self.coordinator.succession.superseded:
            return self.coordinator.succession.superseded
        return self.service.why_stuck() or ("" if self.service.bound else "it does not listen yet")

    def _addresses(self) -> Sequence[str]:
        return dialable(self.service.bound, self.options.advertise)

    def _masters(self) -> tuple[Address, ...]:
        """Where a newcomer may find the run's master: here first, then at the standbys."""
        ours = [Address.parse(text) for text in self._addresses()]
        return tuple(dict.fromkeys([*ours, *self.options.standby]))[:ADDRESSES_MAX]

    def make_invite(
        self, role: Role, founder: bool, uses: int, hours: float, *, approve: bool = False
    ) -> str:
        try:
            token, expires_s = self.store.make_token(
                role, founder=founder, uses=uses, hours=hours, by_hand=approve
            )
        except sqlite3.Error as error:
            raise UserError(
                f"the invite cannot be written down: {error}",
                hint="free some space on the disk of the master's state",
            ) from error
        return Invite(
            run_id=self.run_id,
            addresses=self._masters(),
            fingerprint=self.authority.fingerprint,
            token=token,
            role=role,
            expires_s=int(expires_s),
        ).encode()

    async def _act_invite(self, body: Json) -> Json:
        try:
            role = Role(body.get("role", "contributor"))
            uses, hours = int(str(body.get("uses", 1))), float(str(body.get("hours", 24.0)))
        except ValueError as error:
            raise UserError(f"a bad invite: {error}", exit_code=ExitCode.USAGE) from error
        founder, approve = body.get("founder", False), body.get("approve", False)
        plain = isinstance(founder, bool) and isinstance(approve, bool)
        if not (1 <= uses <= USES_MAX and 0 < hours <= HOURS_MAX and plain):
            raise UserError(
                f"a bad invite: uses from 1 to {USES_MAX}, hours to {HOURS_MAX:.0f}, founder or "
                "not, to be approved or not",
                exit_code=ExitCode.USAGE,
            )
        invite = self.make_invite(role, founder is True, uses, hours, approve=approve is True)
        told = {"role": role.value, "uses": uses, "hours": hours, "approve": approve}
        return {"invite": invite, **told}

    async def _act_withdraw(self, body: Json) -> Json:
        invite_id = str(body.get("id", ""))
        if not self.store.withdraw(invite_id):
            raise UserError(
                f"there is no invite {invite_id!r}",
                exit_code=ExitCode.USAGE,
                hint="`holdfast invites` lists them with their ids",
            )
        return {"id": invite_id, "withdrawn": True}

    async def _act_approve(self, body: Json) -> Json:
        wanted, refuse = str(body.get("peer", "")), body.get("refuse", False)
        if not isinstance(refuse, bool):
            raise UserError("refuse is true or false", exit_code=ExitCode.USAGE)
        if not refuse:
            return await self.service.gate.approve(wanted)
        reason = str(body.get("reason") or "no reason was given")[:900]
        return await self.service.gate.refuse(wanted, reason)

    async def _act_kick(self, body: Json) -> Json:
        wanted = str(body.get("peer", ""))
        reason = str(body.get("reason") or "no reason was given")[:900]
        peer = self._find_peer(wanted)
        await self.service.see_through(partial(self.coordinator.kick, peer, reason))
        return {"peer": peer, "kicked": True}

    async def _act_clear(self, body: Json) -> Json:
        wanted = str(body.get("peer", ""))
        audits, history = self.coordinator.scheduler.driver.audits, self.coordinator.context.history
        peer = self._find_peer(wanted)
        if peer not in history.quarantined and peer not in audits.barred():
            raise UserError(
                f"{wanted!r} is not in quarantine",
                exit_code=ExitCode.USAGE,
                hint="`holdfast peers` lists who is",
            )
        await self.service.see_through(partial(self.coordinator.clear, peer))
        return {"peer": peer, "cleared": True}

    def _find_peer(self, wanted: str) -> str:
        names = {peer: grant.name for peer, grant in self.store.granted().items()}
        history = self.coordinator.context.history
        names |= {peer: admitted.name for peer, admitted in history.admitted.items()}
        names |= {member.peer: member.name for member in self.coordinator.context.roster}
        for peer in history.revoked:
            names.pop(peer, None)
        matches = called(wanted, names)
        if len(matches) != 1:
            raise UserError(
                f"{'no peer is' if not matches else 'several peers are'} called {wanted!r}"
                + (f": {', '.join(peer[:8] for peer in matches[:8])}" if matches else ""),
                exit_code=ExitCode.USAGE,
                hint="`holdfast status` lists the members; use the peer id's first digits",
            )
        return matches[0]

    async def _act_checkpoint(self, _body: Json) -> Json:
        return await self.service.checkpoint_asker.run()

    async def _act_verify(self, _body: Json) -> Json:
        return await self.service.verifier.run()

    async def _act_pause(self, _body: Json) -> Json:
        await self.service.see_through(self.coordinator.pause)
        return {"paused": True}

    async def _act_resume(self, _body: Json) -> Json:
        await self.service.see_through(self.coordinator.resume)
        return {"paused": False}

    async def _act_stop(self, _body: Json) -> Json:
        trio.lowlevel.spawn_system_task(self._stop_soon)
        return {"stopping": True}

    async def _stop_soon(self) -> None:
        await trio.sleep(0.2)  # the answer goes out first
        self._scope.cancel()
