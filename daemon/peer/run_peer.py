"""``holdfast join`` as a process: credentials, peer service, bridge, trainer and HTTP API."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import trio
from starlette.routing import Route

from ...checkpoint.checkpoint_store import CheckpointStore, FolderStore, StoreError, place_at
from ...checkpoint.checkpoints import CheckpointError
from ...protocol.errors import EvictedError, UserError
from ...protocol.messages import FailureKind, RefusalCode, Remedy, TrainerFailed
from ...protocol.network.sockets import SocketNetwork, bind_all
from ...protocol.text import plain
from ...protocol.trust.credentials import Credentials
from ..process.exit_codes import ExitCode
from ..process.memory_check import machine_bytes
from ..process.paths import CHECKPOINTS_FOLDER, OWN_STATE_FILE, socket_folder
from ..process.screen import Screen
from ..process.tasks import wait_for_signals
from ..progress_lines import (
    PeerChanges,
    PeerRecord,
    ProgressClock,
    committed_rounds,
    peer_line,
    peer_summary,
)
from ..web.app import Json
from ..web.http_server import bind_http, control_side
from ..web.live_stream import LiveStream
from ..web.prometheus import StatusCollector, metrics_route
from ..web.run_history import log_reading, own_routes, status_route
from .hosts.hosting import Hosting
from .peer_credentials import as_user_error, obtain_credentials
from .peer_options import PeerOptions
from .peer_service import PeerService
from .peer_status import OwnHistory, StatusSource
from .trainer.bridge import UnixBridge
from .trainer.failures import Failure, last_error
from .trainer.supervisor import TrainerEnd, TrainerSupervisor
from .trainer_service import format_failure

WRITING_SHOWN_S = 5.0  # between two progress lines of the last checkpoint
AVAILABILITY_S = 1.0  # between two checks whether the machine is still available
SHOWN_S = 1.0  # between two states of the living line
LINES_QUOTED = 20  # of a script's output, with the error that it failed
ENDED_EARLY = (
    "the training command ended with exit status 0 before the run did: its loop must go on until "
    "run.finished is true"
)
MISSING_MODULE = re.compile(r"No module named '([\w.]+)'")
REFUSED_S = 5.0  # for a script whose model is refused to end with its own error
IDLE_LOOK_S = 0.5  # between two looks at whether there is a trainer to wait for
FAREWELL_S = 120.0  # for the trainer to evaluate, save and exit after the run's end


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
        self._hosting: Hosting | None = None
        self._signals = 0
        self._nursery: trio.Nursery
        self._status: StatusSource
        self._error: UserError | None = None
        self._unfit = False  # the master refuses the script's model
        self._record = PeerRecord()

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
            if options.hosts > 1:
                self._hosting = Hosting(
                    options,
                    credentials.identity,
                    self.bridge,
                    self.tell,
                    lambda: self._show_gpus(""),
                    lambda: self.service.training,
                )
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
                    hosts=None if self._hosting is None else self._hosting.places,
                )
            config = options.config(
                credentials,
                always_writes=options.checkpoints is not None,
                local_checkpoint=str((options.state / OWN_STATE_FILE).absolute()),
                versions=options.state,
                memory_bytes=min(filter(None, (machine_bytes(), options.memory_bytes))),
                # Checkpoints count only if they are on this machine's disk.
                disk_quota=options.disk_quota if isinstance(place, FolderStore) else None,
            )
            self.service = PeerService(config, network, self.bridge, checkpoints=place)
            self._status = StatusSource(options, self.service, self.bridge, self.supervisor)
            await self._restore(self.service, place)
            began_s = trio.current_time()
            try:
                await self._serve(self.service)
            finally:
                self.screen.show("")
                await self._write_last(self.service)
        if self._error is None:
            self.tell("left the run")
        self._record.see(self._status.status())
        if self._record.took_part:
            took_s = trio.current_time() - began_s
            for line in peer_summary(self._record, took_s, self._status.saved_weights()):
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
        status = self._status.status
        live = LiveStream(status, status)
        me = service.config.me, service.config.name
        network = service.context.network
        history = OwnHistory(*me, service.training.progress, live, network)
        side = control_side(
            "peer",
            self.options.state,
            self.options.http,
            actions={"leave": self._act_leave, "retry": self._act_retry},
            private_reads={"logs": log_reading(self.options.name, self.screen.ring)},
            why_unready=self.why_unready,
            routes=[
                status_route(lambda _past: status()),  # rounds and events are the master's
                Route("/api/live", live, methods=["GET"]),
                metrics_route(StatusCollector(status)),
                *own_routes(history.store, network, me),
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
                if self._hosting is not None:
                    await nursery.start(self._hosting.run)
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
        """Tell what changes, and how the run goes: on the living line, or as a line at times."""
        changes, clock = PeerChanges(), ProgressClock()
        while True:
            status, now_s = self._status.status(), trio.current_time()
            self._record.see(status)
            for line in changes.of(status, leaving=self._leaving):
                self.tell(line)
            rounds = committed_rounds(status)
            self.screen.progress(peer_line(status), due=clock.is_due(rounds, now_s))
            await trio.sleep(SHOWN_S)

    # ------------------------------------------------------------ the HTTP API

    def _show_gpus(self, text: str) -> None:
        if self._hosting is not None and self.supervisor is not None:
            text = self._hosting.places.shown(*self.supervisor.gpus.counts())
        self.service.report.accelerators = text

    def why_unready(self) -> str:
        """Return why this peer takes no part in its run now; empty if it does."""
        return "" if self.service.session.connected else "it is not attached to a master"

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
    error = last_error(lines)
    said = "\n    ".join(["its last lines:", *lines]) if lines else "it printed nothing"
    return UserError(
        f"the training command {failure.reason} before it attached" + (error and f": {error}"),
        exit_code=ExitCode.TRAINER,
        hint=f"{said}\n  {advice}",
    )
