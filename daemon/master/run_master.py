"""``holdfast master`` as a process: store, authority, coordinator, network and HTTP together."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import attrs
import trio
from starlette.routing import Route

from ... import __version__
from ...membership.master.run_end import ends_by_epochs, how_to_go_on
from ...membership.master.state.history import RunHistory
from ...membership.master.state.journal import RoundCommitted
from ...membership.master.state.master_effects import Event
from ...membership.master.status.headline import headline
from ...membership.master.status.status import describe
from ...membership.master.status.why_waiting import WaitReasons
from ...membership.spec.spec import RunSpec
from ...protocol.addresses import Address
from ...protocol.messages import MASTERS_MAX, Role
from ...protocol.network.sockets import SocketNetwork
from ...protocol.text import format_duration, plural
from ...protocol.trust.authority import Authority, Party
from ...protocol.trust.credentials import Credentials
from ...protocol.trust.identity import Identity
from ..advertised_hosts import WILDCARDS, only_loopback
from ..process.paths import join_line, make_private, note_source
from ..process.screen import Screen
from ..process.tasks import wait_for_signals
from ..progress_lines import PRINTED_EVENTS, ProgressClock, master_line
from ..status_records import Ending, MasterStatus
from ..web.app import read_route
from ..web.http_server import control_side
from ..web.live_stream import LiveStream
from ..web.prometheus import StatusCollector, metrics_route
from ..web.run_history import past_routes, status_route
from .journal.journal_base import Journal
from .master_service import MasterService
from .opened_run import MasterOptions, open_run
from .operator_commands import MasterInvites, OperatorCommands
from .run_recorder import RunRecorder

if TYPE_CHECKING:
    from .journal.shared_journal import HeldJournal

# For the invite that a starting master prints: a few machines of the operator's. A person who finds
# it cannot add enough machines to outvote a larger run.
INVITE_USES_DEFAULT = 8
INVITE_HOURS_DEFAULT = 24.0
SHOWN_S = 1.0  # between two states of the living line
RENEW_OWN_S = 6 * 3600.0  # between two renewals of the master's own certificate
NAMES_MAX = 8  # peers named in one sentence


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
        self._end_told = False  # the operator has read how the run ended
        self.url = ""  # of the page, once it is served
        self.opened = open_run(options, shared)
        self.store, self.coordinator = self.opened.store, self.opened.coordinator
        if options.spec_path is not None:
            note_source(options.state, options.spec_path)
        self.credentials = _certify(self.opened.authority, options.state)
        self.network = SocketNetwork(self.credentials, newcomers=True)
        self.service = MasterService(
            self.coordinator,
            self.store,
            self.network,
            options.listen,
            authority=self.opened.authority,
            may_decide=None if shared is None else shared.is_held,
        )
        self.started_s = time.time()
        self._scope = trio.CancelScope()
        self.invites = MasterInvites(options, self.opened, lambda: self.service.bound)
        self._commands = OperatorCommands(
            self.service, self.store, self.invites, self._scope.cancel
        )
        self.service.subscribe(self._tell_end)

    # ------------------------------------------------------------ life

    async def run(self) -> None:
        """Serve until a signal or the command ``stop`` comes."""
        try:
            async with trio.open_nursery() as nursery:
                # Before anything is told.
                await nursery.start(wait_for_signals, self._scope.cancel)
                self._tell_what_it_is()
                await self._record_and_serve()
                nursery.cancel_scope.cancel()
        finally:
            if self._shared is not None:
                self.store.close()

    async def _record_and_serve(self) -> None:
        live = LiveStream(partial(self.status, past=False), self._stamp)
        recorder = self.recorder = await self.network.run_sync(
            lambda: RunRecorder(self.service, self.options.state, live=live)
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
                moved = self._know_masters()  # to addresses that earlier invites do not name
                self._note_start()
                nursery.start_soon(recorder.run)
                nursery.start_soon(live.run)
                nursery.start_soon(serve_http)
                nursery.start_soon(self._renew_own)
                self._announce(bound, url, moved=moved)
                self.service.subscribe(self._tell_event)
                nursery.start_soon(self._show_progress)

    def _note_start(self) -> None:
        """Note as events what the members and the operator should know of this start."""
        if self.store.cut is not None:
            self.service.decide(partial(self.coordinator.note, str(self.store.cut)))
        if self.opened.resumes:
            term = self.coordinator.context.term
            text = f"the master was started again (term {term})"
            if self._shared is not None or self.options.takes_over:
                text = f"the master on {socket.gethostname()} leads the run now (term {term})"
            self.service.decide(partial(self.coordinator.note, text))
        if self.opened.changes:
            text = f"settings changed with the restart: {'; '.join(self.opened.changes)}"
            self.service.decide(partial(self.coordinator.note, text))
        self.service.decide(self.coordinator.settle)  # a run may be finished by its new settings

    def _tell_what_it_is(self) -> None:
        """Tell which run this is, before anything can fail that has to do with this machine."""
        context = self.coordinator.context
        named = f"{context.spec.run.name} ({context.run_id[:8]})"
        if not self.opened.resumes:
            self.tell(f"new run {named}")
            return
        known = format_resumed(context.history, self.store)
        self.tell(f"resuming run {named}, term {context.term}: {known}")
        for change in self.opened.changes:
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

    def _announce(self, bound: Sequence[Address], url: str, *, moved: bool) -> None:
        self.tell(f"listening on {', '.join(map(str, bound))}; dashboard at {url}")
        self.tell(f"state in {self.options.state}")
        if self.store.cut is not None:
            self.tell(f"WARNING: {self.store.cut}")
        addresses = [Address.parse(text) for text in self.invites.addresses()]
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
            self._tell_invite(moved=moved)

    def _tell_invite(self, *, moved: bool) -> None:
        """Print the first invite of a run, or one with addresses that earlier ones do not name."""
        if self.opened.resumes and not moved:
            self.tell("`holdfast invite` makes an invite; peers of the run come back without one")
            return
        founder = not self.coordinator.context.history.founded
        invite = self.invites.make(
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
        while True:
            await trio.sleep(RENEW_OWN_S)
            credentials = self.credentials
            credentials.replace_certificate(
                self.opened.authority.issue(
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
            run_id=self.coordinator.context.run_id,
            name=self.coordinator.context.spec.run.name,
            uptime_s=time.time() - self.started_s,
            value_count=sum(size.value_count for size in sizes),
            addresses=self.invites.addresses(),
            pending=self.service.admission.rows(),
            ending=self.recorder.ending(),
            figures=self.recorder.figures,
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

    def know_others(self, addresses: Sequence[str]) -> None:
        """Name these masters of a shared journal in invites and to the members."""
        if tuple(addresses) != self.invites.others:
            self.invites.others = tuple(addresses)
            self._know_masters()

    def _know_masters(self) -> bool:
        """Tell the members this run's master addresses; return whether some are new."""
        masters = tuple(map(str, self.invites.masters()))[:MASTERS_MAX]
        new = set(masters) - set(self.coordinator.context.history.masters.addresses)
        self.service.decide(partial(self.coordinator.know_masters, masters))
        return bool(new)

    def whereabouts(self) -> tuple[Sequence[str], str] | None:
        """Return addresses and page as they are now; None before this master listens."""
        return (self.invites.addresses(), self.url) if self.service.bound else None


def _certify(authority: Authority, state: Path) -> Credentials:
    """Return what this master shows to others: its key, and its authority's certificate."""
    folder = state / "master"
    identity = Identity.load_or_create(make_private(folder) / "identity.key")
    certificate = authority.issue(identity.request_pem("master"), "master", Party.MASTER)
    return Credentials(folder, identity, certificate, authority.certificate_pem)


# ---------------------------------------------------------------- what it prints


def format_resumed(history: RunHistory, store: Journal) -> str:
    """Return what the journal holds of a run: its rounds, and when the last one was committed."""
    if not history.founded:
        return "it has no weights yet"
    text = f"{plural(history.commit_count, 'round')} committed"
    last_s = store.written_at(RoundCommitted)
    return text if last_s is None else f"{text}, last on {format_minute(last_s)}"


def format_end(history: RunHistory, spec: RunSpec, ending: Ending) -> list[str]:
    """Return lines about a finished run: its figures, its final weights, how to go on."""
    figures = [f"all {plural(history.commit_count, 'round')} committed"]
    if ends_by_epochs(history, spec):
        epochs = f"all {plural(spec.data.epochs, 'epoch')}"
        figures = [f"{epochs} and {plural(history.commit_count, 'round')} committed"]
    if ending.duration_s is not None:
        figures[0] += f" in {format_duration(ending.duration_s)}"
    if ending.loss_end is not None:
        figures.append(f"loss {ending.loss_end:.3f}")
    figures.append(plural(history.token_count // max(1, history.fragment_count), "token"))
    names = ending.weights_at
    command, goal = how_to_go_on(history, spec)
    more = f" and {len(names) - NAMES_MAX} more" if len(names) > NAMES_MAX else ""
    return [
        f"run {spec.run.name} is finished: {', '.join(figures)}",
        f"its final weights are in the last checkpoints of {', '.join(names[:NAMES_MAX])}{more}: "
        "`holdfast export OUT --state DIR` there makes a file of them",
        f"{command} lets the run go on to {goal}; then its peers join again",
        "status and dashboard work until Ctrl+C",
    ]


def format_first_invite(invite: str, uses: int, run_toml: Path | None) -> list[str]:
    """Return the lines that say how to join, with the script beside the run.toml if it is there."""
    beside = Path() if run_toml is None else run_toml.with_name("train.py")
    script = beside if beside.is_file() else Path("train.py")
    told = f"on each machine that takes part ({uses} at most), run:"
    return [told, f"  {join_line(invite, script)}"]


def format_minute(at_s: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(at_s))
