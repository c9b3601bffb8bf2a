"""``holdfast join`` as a process: credentials, the peer service, its bridge, trainer and HTTP
API.
"""

from __future__ import annotations

import contextlib
import math
import re
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import trio
from attrs import define, evolve, field
from starlette.routing import Route

from ... import __version__
from ...checkpoint.checkpoint_store import CheckpointStore, FolderStore, StoreError, place_at
from ...checkpoint.checkpoints import CheckpointError
from ...collectives.links.hub import LinkHub
from ...collectives.links.link import Link
from ...membership.shared.peer_rows import copy_row, format_copy, head_row
from ...protocol.addresses import Address
from ...protocol.errors import EvictedError, UserError
from ...protocol.messages import (
    FailureKind,
    RefusalCode,
    RelayOffer,
    Remedy,
    Role,
    TrainerFailed,
)
from ...protocol.network.socket_options import PACED_ROUND_TRIP_S_MIN, counts_retransmissions
from ...protocol.network.sockets import SocketNetwork, bind_all
from ...protocol.text import plain
from ...protocol.trust.credentials import Credentials
from ...protocol.trust.identity import Identity
from ...protocol.trust.invite import ADDRESSES_MAX, Invite
from ..congestion import CongestionCheck, compare_with_lanes
from ..process.exit_codes import ExitCode
from ..process.log_ring import LogRing
from ..process.memory_check import machine_bytes
from ..process.paths import (
    CHECKPOINTS_FOLDER,
    IDENTITY_FILE,
    MASTERS_FILE,
    OWN_STATE_FILE,
    make_private,
    socket_folder,
)
from ..process.screen import Screen
from ..process.tasks import wait_for_signals
from ..progress_lines import (
    PeerChanges,
    PeerRecord,
    ProgressClock,
    SavedWeights,
    committed_rounds,
    peer_line,
    peer_summary,
)
from ..status_records import (
    CheckpointStatus,
    CongestionReport,
    FellowRow,
    LinkRow,
    PeerRoundRow,
    PeerStatus,
)
from ..web.app import Json
from ..web.http_server import bind_http, control_side
from ..web.live_stream import LiveStream
from ..web.log_reading import log_reading
from ..web.prometheus import StatusCollector, metrics_route
from ..web.run_history import own_routes, status_route
from .away_peer import AwayPeer
from .checkpointer import Checkpointer
from .master_session import with_masters
from .own_history import OwnHistory
from .peer_config import PeerConfig
from .peer_credentials import as_user_error, obtain_credentials
from .peer_service import PeerService
from .trainer.bridge import UnixBridge
from .trainer.failures import Failure
from .trainer.supervisor import TrainerEnd, TrainerSupervisor
from .trainer_service import format_failure
from .volunteer_limits import DiskQuota

PROGRESS_SHOWN = (  # fields of ``Progress`` that the status repeats
    *("step", "tokens", "tokens_per_s", "loss", "metrics", "waited_s", "stepped_s", "accelerators"),
    *("bulk_sent_bytes", "bulk_received_bytes", "state_received_bytes"),
)
PARTIAL_FOLDER = "partial"  # in the state directory: blocks of fetches that did not finish
WRITING_SHOWN_S = 5.0  # between two progress lines of the last checkpoint
AVAILABILITY_S = 1.0  # between two checks whether the machine is still available
SHOWN_S = 0.5  # between two states of the living line
LINES_QUOTED = 20  # of a script's output, with the error that it failed
ERROR_LINE = re.compile(r"[\w.]+(?:Error|Exception|Refused|Gone): .")  # the last one of a traceback
ENDED_EARLY = (
    "the training command ended with exit status 0 before the run did: its loop must go on until "
    "run.finished is true"
)
MISSING_MODULE = re.compile(r"No module named '([\w.]+)'")
REFUSED_S = 5.0  # for a script whose model is refused to end with its own error
IDLE_LOOK_S = 0.5  # between two looks at whether there is a trainer to wait for
FAREWELL_S = 120.0  # for the trainer to evaluate, save and exit after the run's end


@define
class PeerOptions:
    """Options of ``holdfast join``."""

    invite: Invite
    command: Sequence[str]
    name: str
    state: Path
    listen: Sequence[Address]
    advertise: Sequence[Address]
    http: Address
    map_ports: bool = False  # ask the router for a port if other machines cannot dial this one
    upload_bytes_per_s: float | None = None
    download_bytes_per_s: float | None = None
    patience_s: float | None = 120.0
    checkpoints: str | None = None  # a folder or URL; None: a folder in ``state``
    memory_bytes: int | None = None  # limit for the state; None: this machine's memory
    disk_quota: DiskQuota | None = None  # None: no limit
    relay: RelayOffer | None = None  # limits on forwarding for other pairs; None: no forwarding
    gpus_min: int = 0  # the training command waits for so many healthy GPUs
    limits: dict[str, str] = field(factory=dict)  # volunteer limits, for the status page
    http_names: Sequence[str] = ()  # host names that HTTP answers to, beside this machine's own

    def config(self, credentials: Credentials, **more: Any) -> PeerConfig:
        """Return the service's configuration, with more of its fields."""
        return PeerConfig(
            me=credentials.identity.peer_id,
            name=self.name,
            run_id=self.invite.run_id,
            masters=self.known_invite().addresses,
            bind=self.listen,
            advertise=self.advertise,
            map_ports=self.map_ports,
            incarnation=secrets.randbits(62),
            patience_s=self.patience_s,
            credentials=credentials,
            **more,
        )

    def known_invite(self) -> Invite:
        """Return the invite with the addresses that the master told an earlier process of this
        peer.
        """
        told: list[str] = []
        with contextlib.suppress(OSError, UnicodeDecodeError):
            told = (self.state / MASTERS_FILE).read_text(encoding="utf-8").splitlines()
        addresses = with_masters(self.invite.addresses, told)[:ADDRESSES_MAX]
        return evolve(self.invite, addresses=tuple(addresses))

    def away(self, phase: str, why: str, ring: LogRing) -> AwayPeer:
        """Return what serves this peer's status while it is not a member: its name and the
        reason.
        """

        def status(why: str) -> PeerStatus:
            identity = Identity.load_or_create(make_private(self.state) / IDENTITY_FILE)
            return PeerStatus(
                version=__version__,
                peer=identity.peer_id,
                name=self.name,
                run_id=self.invite.run_id,
                phase=phase,
                why=why,
                limits=self.limits,
            )

        log = log_reading(self.name, ring)
        return AwayPeer(self.state, self.http, self.http_names, status, log, why)


class Peer:
    """A peer as a process: everything around ``PeerService``.

    Args:
      tell: takes sentences for the operator.
      unavailable: returns why this machine may not take part now; empty while it may.
      screen: shows the trainer's output, and how the run goes; None: nothing shows it.

    Attributes:
      service, bridge: exist from the beginning of ``run``.
      away_reason: the volunteer limit that made this peer leave; empty if it left for another
        reason.
    """

    def __init__(
        self,
        options: PeerOptions,
        tell: Callable[[str], None],
        unavailable: Callable[[], str] = lambda: "",
        screen: Screen | None = None,
    ) -> None:
        self.options = options
        self.tell = tell
        self.screen = screen or Screen(None)
        self.away_reason = ""
        self._unavailable = unavailable
        self._leaving = False
        self.service: PeerService
        self.bridge: UnixBridge
        self.supervisor: TrainerSupervisor | None = None
        self._signals = 0
        self._nursery: trio.Nursery
        self._error: UserError | None = None
        self._unfit = False  # the master refuses the script's model
        self._record = PeerRecord()
        self._congestion_check = CongestionCheck()

    async def run(self) -> None:
        """Take part until the run is over, or this peer leaves or is refused.

        Raises:
          UserError: with the exit code for what went wrong.
        """
        options = self.options
        place = self._place()
        await check_ports(options)
        credentials = await self._enter()
        if credentials is None:
            self.tell("stopped before this machine was admitted")
            return
        network = SocketNetwork(credentials, newcomers=False)
        with socket_folder() as folder:
            ends = self._end_trainer if options.command else None
            self.bridge = UnixBridge(folder / "trainer.sock", ends)
            if options.command:
                self.supervisor = TrainerSupervisor(
                    options.command,
                    self.bridge.path,
                    member=credentials.identity.peer_id,
                    crash_report=self.bridge.crash_report,
                    tell=self._trainer_failed,
                    give_up=self._give_up_untried,
                    output=self.screen.output,
                    gpus_min=options.gpus_min,
                    show_gpus=self._show_gpus,
                    ready=self.bridge.listening,
                )
            quota, used_bytes = options.disk_quota, 0
            if quota is not None and isinstance(place, FolderStore):
                used_bytes = sum(map(place.size_bytes, place.names()))
            config = options.config(
                credentials,
                upload_bytes_per_s=options.upload_bytes_per_s,
                download_bytes_per_s=options.download_bytes_per_s,
                always_writes=options.checkpoints is not None,
                local_checkpoint=str((options.state / OWN_STATE_FILE).absolute()),
                partial=options.state / PARTIAL_FOLDER,
                versions=options.state,
                memory_bytes=min(filter(None, (machine_bytes(), options.memory_bytes))),
                # Checkpoints count only if they are on this machine's disk.
                disk_quota=quota if isinstance(place, FolderStore) else None,
                partial_bytes=None if quota is None else quota.left_bytes(used_bytes),
                relay=options.relay,
            )
            self.service = PeerService(config, network, self.bridge, checkpoints=place)
            await self._restore(self.service, place)
            began_s = trio.current_time()
            try:
                await self._serve(self.service)
            finally:
                self.screen.show("")
                await self._write_last(self.service)
        if self._error is None:
            self.tell("left the run")
        self._record.see(self.status())
        if self._record.took_part:
            took_s = trio.current_time() - began_s
            for line in peer_summary(self._record, took_s, self._saved(self.service)):
                self.tell(line)
        if self._error is not None:
            raise self._error

    async def _enter(self) -> Credentials | None:
        """Return the credentials for the run; None if the operator ended the wait for them."""
        options = self.options
        away, waits = options.away("waiting for admission", "", self.screen.ring), trio.Event()

        def tell(line: str) -> None:
            # The first line says that the master is asked, the others why that takes long.
            if away.why:
                waits.set()
            away.why = line
            self.tell(line)

        return await away.during(
            lambda: obtain_credentials(
                options.state, options.known_invite(), options.name, options.patience_s, tell
            ),
            waits,
        )

    def _place(self) -> CheckpointStore:
        """Return the store of this peer's checkpoints."""
        if self.options.checkpoints is None:
            return FolderStore(self.options.state / CHECKPOINTS_FOLDER)
        try:
            return place_at(self.options.checkpoints)
        except StoreError as error:
            raise UserError(
                str(error),
                exit_code=ExitCode.CONFIG,
                hint="install what it needs, or give a folder: --checkpoints DIR",
            ) from error

    async def _restore(self, service: PeerService, place: CheckpointStore) -> None:
        """Load the newest checkpoint that is whole."""
        try:
            found = await trio.to_thread.run_sync(service.state_service.restore, place, self.tell)
        except CheckpointError as error:
            raise UserError(
                f"the checkpoints in {place} are not this run's: {error}",
                exit_code=ExitCode.CONFIG,
                hint="give the run a place of its own with --checkpoints (or --state)",
            ) from error
        except StoreError as error:
            raise UserError(
                f"cannot look for checkpoints: {error}",
                exit_code=ExitCode.CONFIG,
                hint="make the place usable, or give another one with --checkpoints",
            ) from error
        if found:
            restored = service.state_service.restored
            assert restored is not None
            self.tell(f"loaded a checkpoint of step {restored.step}, {restored.rounds} rounds")

    async def _write_last(self, service: PeerService) -> None:
        """Write a last checkpoint, whatever ended this peer."""
        if self._unfit:
            return  # it has never taken part in the run and cannot with this script
        last = service.checkpointer.last()
        if last is None:
            return
        size_bytes, writing = last
        self.tell(f"writing a last checkpoint ({size_bytes / 1e6:.1f} MB) ...")
        written_bytes = 0

        def work() -> None:
            nonlocal written_bytes
            for piece_bytes in writing:
                written_bytes += piece_bytes

        async def tell() -> None:
            while True:
                await trio.sleep(WRITING_SHOWN_S)
                self.tell(f"{written_bytes / 1e6:.0f} of {size_bytes / 1e6:.0f} MB written")

        with trio.CancelScope(shield=True):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(tell)
                try:
                    await trio.to_thread.run_sync(work)
                except StoreError as error:
                    self.tell(f"no last checkpoint: {error}")
                nursery.cancel_scope.cancel()

    async def _serve(self, service: PeerService) -> None:
        live = LiveStream(self.status, self.status)
        me = service.config.me, service.config.name
        history = OwnHistory(*me, service.training.progress, live, service.network)
        side = control_side(
            "peer",
            self.options.state,
            self.options.http,
            actions={"leave": self._act_leave, "retry": self._act_retry},
            private_reads={"logs": log_reading(self.options.name, self.screen.ring)},
            why_unready=self.why_unready,
            routes=[
                status_route(lambda _past: self.status()),  # rounds and events are the master's
                Route("/api/live", live, methods=["GET"]),
                metrics_route(StatusCollector(self.status)),
                *own_routes(history.store, service.network, me),
            ],
            names=self.options.http_names,
        )
        with side as (serve_http, url):
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                nursery.start_soon(wait_for_signals, self._on_signal)
                nursery.start_soon(serve_http)
                nursery.start_soon(live.run)
                nursery.start_soon(self._show_progress)
                nursery.start_soon(history.run)
                if self.supervisor is not None:
                    nursery.start_soon(self._supervise, self.supervisor)
                nursery.start_soon(self._see_out)
                nursery.start_soon(self._leave_when_unavailable)
                self.tell(
                    f"peer {service.config.me[:8]} ({service.config.name}); dashboard at {url}"
                )
                self.tell(f"state in {self.options.state}")
                try:
                    await service.run()
                except EvictedError as error:
                    self._error = self._error or as_user_error(error)
                    self._unfit = error.code == RefusalCode.LAYOUT.value
                    if self._unfit and self.supervisor is not None:
                        with trio.move_on_after(REFUSED_S):
                            await self.supervisor.process_ended()
                nursery.cancel_scope.cancel()

    async def _supervise(self, supervisor: TrainerSupervisor) -> None:
        try:
            end = await supervisor.run()
        except UserError as error:
            self._error = error
            await self._leave(plain(str(error)))
            return
        if end is TrainerEnd.STOPPED:
            return
        if self.service.finished.is_set():
            await self._leave("the run is finished")
        elif self.bridge.was_attached:
            self.tell(ENDED_EARLY)
            await self._leave(ENDED_EARLY)
        else:
            self._error = UserError(
                "the training command ended without holdfast.attach: nothing of it came into"
                " the run",
                exit_code=ExitCode.TRAINER,
                hint=(
                    "the script has to call holdfast.attach(model, optimizer) and, after each step,"
                    " run.step()"
                ),
            )
            await self._leave(str(self._error))

    def _end_trainer(self, kind: FailureKind, reason: str, sick_s: float) -> None:
        assert self.supervisor is not None
        self.supervisor.fail(kind, reason, sick_s)

    def _give_up_untried(self, failure: Failure) -> None:
        """Raise UserError for a failure of a script that has not worked here yet."""
        restored = self.service.state_service.restored is not None
        if not self.bridge.was_attached and not restored:
            lines = [line.text for line in self.screen.ring.tail(LINES_QUOTED, source="trainer")]
            raise failed_untried(failure, self.options.command, lines)

    def _trainer_failed(self, failed: TrainerFailed) -> None:
        self.service.training.failed_with(failed)
        for line in self.screen.ring.tail(1, source="trainer"):
            self.tell(f"the trainer failed ({failed.reason}); its last line: {line.text}")
        if failed.remedy is Remedy.NONE:
            self.tell(f"the trainer: {format_failure(failed)}; until then this peer keeps a copy")

    async def _see_out(self) -> None:
        """Leave after the run's end, once the trainer had time to finish."""
        await self.service.finished.wait()
        rounds = self.service.rounds_wanted  # 0: it ended with its epochs
        self.tell(
            "the run is finished" + (f": all {rounds} rounds are committed" if rounds else "")
        )
        self._leaving = True
        with trio.move_on_after(FAREWELL_S):
            while self.supervisor is not None and not self.supervisor.idle:
                await trio.sleep(IDLE_LOOK_S)
        await self._leave("the run is finished")

    async def _leave_when_unavailable(self) -> None:
        """Leave as soon as the machine's owner needs it."""
        while not (why := self._unavailable()):
            await trio.sleep(AVAILABILITY_S)
        if self._leaving:
            return  # for good, and for another reason
        self.away_reason = why
        self.tell(f"leaving after the round in flight: {why}")
        await self._leave(why)

    async def _leave(self, reason: str) -> None:
        self._leaving = True
        await self.service.drain(reason)
        if self.supervisor is not None:
            # Before the daemon ends, so that the trainer ends by a signal and not by an error.
            await self.supervisor.stop()
        self.service.stop()

    def _on_signal(self) -> None:
        self._signals += 1
        self.away_reason = ""  # the operator ends this peer: it must not come back
        if self._signals > 1:
            self._error = UserError("stopped without draining", exit_code=ExitCode.INTERRUPTED)
            self.service.stop()
            return
        self.tell("leaving after the round in flight (again: stop at once) ...")
        self._nursery.start_soon(self._leave, "stopped by its owner")

    # ------------------------------------------------------------ what is shown

    async def _show_progress(self) -> None:
        """Tell what changes, and keep the living line of a terminal or print a line from time to
        time.
        """
        changes, clock = PeerChanges(), ProgressClock()
        while True:
            status, now_s = self.status(), trio.current_time()
            self._record.see(status)
            for line in changes.of(status, leaving=self._leaving):
                self.tell(line)
            rounds = committed_rounds(status)
            self.screen.progress(peer_line(status), due=clock.is_due(rounds, now_s))
            await trio.sleep(SHOWN_S)

    def _saved(self, service: PeerService) -> SavedWeights | None:
        """Return where this peer's newest checkpoint is; None if it has none."""
        newest = service.checkpointer.newest or service.state_service.restored
        if newest is None:
            return None
        where = self.options.checkpoints
        option = ("--state", str(self.options.state))
        if where is not None:
            option = ("--checkpoints", where)
        return SavedWeights(str(service.checkpointer.place), newest.step, option)

    # ------------------------------------------------------------ the HTTP API

    def status(self) -> PeerStatus:
        """Return this peer's status."""
        service = self.service
        assert service is not None
        replica, progress = service.replica, service.training.progress()
        return PeerStatus(
            version=__version__,
            attached=service.session.connected,
            peer=service.config.me,
            name=service.config.name,
            run_id=service.config.run_id,
            number=service.number,
            role=replica.trainer.role.value,
            role_why=self._why_spare(),
            in_sync=replica.trainer.in_sync,
            phase=service.report.phase,
            why="; ".join(map(format_copy, progress.copies))
            or service.report.why
            or service.training.why_still(),
            notices=tuple(service.report.notices),
            links=tuple(_link_row(peer, link) for peer, link in service.hub.links.items()),
            bulk_retransmitted_bytes=_known_retransmitted(service.hub),
            congestion=self._congestion(),
            copies=tuple(map(copy_row, progress.copies)),
            heads=tuple(map(head_row, replica.heads())),
            rounds=tuple(
                PeerRoundRow(
                    round=each.round,
                    fragment=each.fragment,
                    phase=each.phase.value,
                    attempt=each.attempt,
                )
                for each in replica.rounds.values()
            ),
            rounds_wanted=0 if service.spec is None else service.spec.run.rounds,
            left_s=service.report.left_s if service.session.connected else 0.0,
            members=tuple(
                FellowRow(peer=each.peer, name=each.name, role=each.role.value)
                for each in (replica.view.members if replica.view is not None else ())
            ),
            checkpoints=_checkpoints(service.checkpointer),
            finished=replica.trainer.finished,
            trainer_pid=self.bridge.attached_pid,
            command_pid=None if self.supervisor is None else self.supervisor.pid,
            trainer_restarts=0 if self.supervisor is None else self.supervisor.restarts,
            trainer_state=self._trainer_state(),
            limits=self.options.limits,
            mapped_port=service.ports.said,
            **{name: getattr(progress, name) for name in PROGRESS_SHOWN},
        )

    def _show_gpus(self, text: str) -> None:
        self.service.report.accelerators = text

    def why_unready(self) -> str:
        """Return why this peer takes no part in its run now; empty if it does."""
        return "" if self.service.session.connected else "it is not attached to a master"

    def _congestion(self) -> CongestionReport | None:
        service = self.service
        if service.spec is None:
            return None
        report = self._congestion_check.look(service.spec.reduce.congestion)
        lanes = [lane.facts for link in service.hub.links.values() for lane in link.lanes]
        # Over short paths BBR is not even asked for.
        far = (facts for facts in lanes if facts.round_trip_s >= PACED_ROUND_TRIP_S_MIN)
        return compare_with_lanes(report, (facts.congestion for facts in far))

    def _why_spare(self) -> str:
        """Return why this peer has no place; empty if it has one, or the reason is not known."""
        spec, view = self.service.spec, self.service.replica.view
        if spec is None or view is None or self.service.replica.trainer.role is not Role.SPARE:
            return ""
        if self.options.invite.role is Role.SPARE:
            return "its invite is a spare's; it takes a place that another peer gives up"
        if self.service.training.layout is None:
            if self.supervisor is not None and self.supervisor.why_waiting:
                return self.supervisor.why_waiting
            starting = self.supervisor is not None and self.supervisor.failed is None
            return "its trainer is starting" if starting else "it has no trainer"
        limit = spec.membership.contributors
        taken = sum(member.role is Role.CONTRIBUTOR for member in view.members)
        if limit and taken >= limit:
            return f"all {limit} places of contributors are taken"
        return ""

    def _trainer_state(self) -> str:
        training = self.service.training
        if training.layout is not None:
            return "running"
        if self.supervisor is not None and self.supervisor.failed is not None:
            return format_failure(self.supervisor.failed)
        if self.supervisor is not None and self.supervisor.why_waiting:
            return f"waits: {self.supervisor.why_waiting}"
        return "none" if self.supervisor is None else "starting"

    async def _act_retry(self, _body: Json) -> Json:
        if self.supervisor is None:
            raise UserError(
                "this peer has no training command",
                exit_code=ExitCode.USAGE,
                hint="join with one: holdfast join INVITE -- python train.py",
            )
        if not self.supervisor.retry():
            raise UserError(
                "the training command runs",
                exit_code=ExitCode.FAILED,
                hint="`holdfast status` says what it does",
            )
        return {"started": True}

    async def _act_leave(self, _body: Json) -> Json:
        self.away_reason = ""
        self._nursery.start_soon(self._leave, "asked to leave by its owner")
        return {"leaving": True}


async def check_ports(options: PeerOptions) -> None:
    """Raise UserError for a port that is taken, before the invite is used for it."""
    for listener in await bind_all([each for each in options.listen if each.port]):
        listener.socket.close()
    bind_http(options.http)[0].close()


def failed_untried(failure: Failure, command: Sequence[str], lines: Sequence[str]) -> UserError:
    """Return the error for a script that failed before it ever attached, with its last lines."""
    missing = next((found for line in lines if (found := MISSING_MODULE.search(line))), None)
    advice = "correct it, then join again with the same invite"
    if missing is not None:
        advice = (
            f"install {missing[1]} for {command[0]}, or name the Python that has it: "
            "-- /path/to/python train.py"
        )
    errors = [f": {line}" for line in lines if ERROR_LINE.match(line)]
    said = "\n    ".join(["its last lines:", *lines]) if lines else "it printed nothing"
    return UserError(
        f"the training command {failure.reason} before it attached" + "".join(errors[-1:]),
        exit_code=ExitCode.TRAINER,
        hint=f"{said}\n  {advice}",
    )


def _link_row(peer: str, link: Link) -> LinkRow:
    known = link.round_trip_s < math.inf
    return LinkRow(
        peer=peer,
        lanes=len(link.lanes),
        congestion=tuple(sorted({lane.facts.congestion for lane in link.lanes})),
        round_trip_s=link.round_trip_s if known else None,
        sent_bytes=link.sent_bytes,
        retransmitted_bytes=_known_retransmitted(link),
    )


def _known_retransmitted(of: Link | LinkHub) -> int | None:
    """Return how many bytes TCP sent again; None if the kernel does not tell."""
    return of.count_retransmitted() if counts_retransmissions() else None


def _checkpoints(checkpointer: Checkpointer) -> CheckpointStatus:
    newest = checkpointer.newest
    return CheckpointStatus(
        place=str(checkpointer.place),
        writing=checkpointer.writing,
        newest=None if newest is None else newest.name,
        step=None if newest is None else newest.step,
        error=checkpointer.error,
    )
