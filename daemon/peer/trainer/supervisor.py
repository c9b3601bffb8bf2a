"""The training command beside the daemon: started, restarted with back-off, ended.

    run: start --> status 0 ----------------------------------------> DONE
           ^  '--> failed, or was made to end by ``fail``
           |         |  back-off: 1 s, 2 s, ... 30 s     FAILURES_MAX in a row
           '---------'<---------- ``retry`` --------------- waits for the operator

Each failure and its remedy are reported to the operator and to the master. A caller may end all at
a failure: a script that never attached has a fault that no restart mends.

A command with ``{gpus}`` is started with the number of healthy GPUs. When one fails, the command is
started again with fewer, and with more when one is back; none of this counts as a failure of the
command. With fewer than are required it waits, and the peer is a spare.

The command runs in its own session, so that Ctrl+C reaches only the daemon, which drains first. It
finds the daemon by ``HOLDFAST_SOCKET``. If the daemon is killed, ``watcher`` ends the command.
"""

from __future__ import annotations

import enum
import logging
import os
import secrets
import shlex
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Protocol

import trio
from attrs import define, field

from ....protocol.errors import UserError
from ....protocol.messages import Failing, FailureKind, Remedy, TrainerFailed
from ....protocol.text import plain
from ....protocol.wakeups import Pulse
from ...process.exit_codes import ExitCode
from . import watcher
from .accelerators import COUNT_PLACEHOLDER, GpuWatch
from .failures import STOPPED, Failure, failure_of, memory_kills
from .host_places import HostPlaces
from .output import OutputPipe, Take

log = logging.getLogger("holdfast.supervisor")

HANDED = ("HOLDFAST_HOME",)  # variables of the daemon that its trainer gets
BACKOFF_FIRST_S = 1.0
BACKOFF_MAX_S = 30.0
GOOD_RUN_S = 60.0  # after a run of this length the next failure counts as the first
# In a row; then the peer stays without a trainer until it is restarted, or ``retry``.
FAILURES_MAX = 5
TERM_S = 10.0  # from SIGTERM to SIGKILL
SOCKET_VARIABLE = "HOLDFAST_SOCKET"
UNBUFFERED_VARIABLE = "PYTHONUNBUFFERED"  # else Python keeps a pipe's lines back for long
START_BYTES = 8  # random: tells the starts of trainers under two daemons apart
WATCHER = str(Path(__file__).with_name("watcher.py"))


class TrainerEnd(enum.Enum):
    DONE = "done"  # exit status 0
    STOPPED = "stopped"  # by ``stop``


class Need(Protocol):
    """What a command is started with: this machine's GPUs, the hosts of its peer."""

    @property
    def why_waiting(self) -> str: ...

    async def enough(self) -> None: ...

    def filled(self, command: Sequence[str]) -> Sequence[str]: ...

    async def change(self) -> str: ...


async def no_report() -> Failing | None:
    return None


@define(eq=False)
class _Life:
    """One start of the command, to the end of its process.

    Attributes:
      scope: cancelled to end the process.
      verdict: the reason to end it; None if it ended by itself.
      sick_s: for how long it had failed by then.
      renewal: why it makes way for one with other GPUs; empty if it does not.
    """

    scope: trio.CancelScope = field(factory=trio.CancelScope)
    verdict: Failure | None = None
    sick_s: float = 0.0
    renewal: str = ""


class TrainerSupervisor:
    """A training command that is kept running.

    Args:
      member: this peer's id, for the command's environment.
      crash_report: waits a moment for the report of the process that has just ended.
      tell: takes every failure with its remedy.
      give_up: called with every failure; raises UserError if the command must not be started again.
      output: takes the command's output, see ``OutputPipe``; None: it goes where the daemon's goes.
      gpus_min: the command waits for so many healthy GPUs; 0: one, if the command has ``{gpus}``.
      show_gpus: takes what is known of the GPUs, for people.
      ready: the first start waits for it: the daemon listens at the socket.
      hosts: of a peer of several, where the command is started and ended likewise; else None.
      start: of the command at the head, at a further host; None: it is started here first.

    Attributes:
      pid: of the process that runs, or None.
      restarts: number of restarts.
      failed: the failure after which no process runs yet; None while one runs.
      gpus: those that the command may use.
    """

    def __init__(
        self,
        command: Sequence[str],
        socket_path: Path,
        *,
        member: str,
        crash_report: Callable[[], Awaitable[Failing | None]] = no_report,
        tell: Callable[[TrainerFailed], None] = lambda _message: None,
        give_up: Callable[[Failure], None] = lambda _failure: None,
        output: Take | None = None,
        gpus_min: int = 0,
        show_gpus: Callable[[str], None] = lambda _text: None,
        ready: trio.Event | None = None,
        hosts: HostPlaces | None = None,
        start: str | None = None,
    ) -> None:
        self.command = list(command)
        self.socket_path = socket_path
        self.member = member
        self.pid: int | None = None
        first, _, count = (start or f"{secrets.token_hex(START_BYTES)}.0").rpartition(".")
        self._first_start, self.restarts = first, int(count)
        self.failed: TrainerFailed | None = None
        self._crash_report = crash_report
        self._tell = tell
        self._give_up = give_up
        self._output = output
        self._ready = ready
        self._hosts = hosts
        if hosts is not None:
            hosts.fail = self.fail
        counted = any(COUNT_PLACEHOLDER in each for each in command)
        self.gpus = GpuWatch(max(gpus_min, int(counted)), show_gpus)
        self._needs: list[Need] = [self.gpus, *([] if hosts is None else [hosts])]
        self._scope = trio.CancelScope()
        self._life = _Life()
        self._retry = Pulse()
        self._ended = trio.Event()
        self._exited = trio.Event()  # of the newest process
        self._exited.set()

    @property
    def idle(self) -> bool:
        """No process runs, and none will until somebody mends something."""
        given_up = self.failed is not None and self.failed.remedy is Remedy.NONE
        return given_up or any(each.why_waiting for each in self._needs)

    @property
    def start(self) -> str:
        """Tells this start of the command from all others."""
        return f"{self._first_start}.{self.restarts}"

    def environment(self) -> Mapping[str, str]:
        # Without the daemon's own options: one of them is the invite, which admits any machine.
        kept = {k: v for k, v in os.environ.items() if not k.startswith("HOLDFAST_") or k in HANDED}
        return {
            **({} if self._output is None else {UNBUFFERED_VARIABLE: "1"}),
            **kept,
            SOCKET_VARIABLE: str(self.socket_path),
            "HOLDFAST_MEMBER": self.member,
            "HOLDFAST_START": self.start,
            **self.gpus.environment(),
        }

    async def run(self) -> TrainerEnd:
        """Keep the command running until it succeeds or ``stop`` is called.

        Cancellation: the process is asked to end (SIGTERM), then killed.

        Raises:
          UserError: the command cannot be started at all, or ``give_up`` raises it.
        """
        try:
            with self._scope:
                if self._ready is not None:
                    await self._ready.wait()
                await self._keep_running()
                return TrainerEnd.DONE
            return TrainerEnd.STOPPED
        finally:
            self._ended.set()

    async def stop(self) -> None:
        """End the command for good; on return none of its processes run."""
        self._scope.cancel()
        await self._ended.wait()

    async def process_ended(self) -> None:
        """Wait until no process runs and its last lines are taken."""
        await self._exited.wait()

    def fail(self, kind: FailureKind, reason: str, sick_s: float) -> None:
        """End the running process as a failure that began ``sick_s`` ago."""
        life = self._life
        if self.pid is not None and life.verdict is None:
            life.verdict, life.sick_s = Failure(kind, reason), sick_s
            life.scope.cancel()

    def retry(self) -> bool:
        """Start the command now, whatever its failures; return False if it runs."""
        if self.failed is None:
            return False
        self._retry.notify_all()
        return True

    async def run_once(self) -> Failure | None:
        """Run the command once; return why it failed, or None.

        Cancellation: as ``run``.
        """
        try:
            with self._scope:
                if self._ready is not None:
                    await self._ready.wait()
                for need in self._needs:
                    await need.enough()
                kills = memory_kills()
                status = await self._run_once(first=False)
                if status == 0 and self._life.verdict is None:
                    return None
                return await self._why(status, kernel_killed=memory_kills() > kills)
            return Failure(FailureKind.CRASH, STOPPED)
        finally:
            self._ended.set()

    async def _keep_running(self) -> None:
        failure_count = 0
        while True:
            began_s = trio.current_time()
            kills = memory_kills()
            self.failed = None
            life = self._life = _Life()
            for need in self._needs:
                await need.enough()
            status = await self._run_once(first=self.restarts == 0)
            if status == 0 and life.verdict is None and not life.renewal:
                return
            if life.renewal:
                log.warning("%s: starting the training command again", life.renewal)
                self.restarts += 1
                continue
            well_s = trio.current_time() - began_s - life.sick_s
            failure_count = 1 if well_s > GOOD_RUN_S else failure_count + 1
            failure = await self._why(status, kernel_killed=memory_kills() > kills)
            self._give_up(failure)
            if not await self._recover(failure, failure_count):
                failure_count = 0
            self.restarts += 1

    # ------------------------------------------------------------ failures

    async def _why(self, status: int, *, kernel_killed: bool) -> Failure:
        report = await self._crash_report()
        if self._life.verdict is not None:
            return self._life.verdict
        if report is not None:
            return Failure(report.kind, report.reason)
        return failure_of(status, kernel_killed=kernel_killed)

    async def _recover(self, failure: Failure, count: int) -> bool:
        """Report a failure and wait for the next try; return False if the operator asked for it."""
        pause_s = min(BACKOFF_FIRST_S * 2.0 ** (count - 1), BACKOFF_MAX_S)
        given_up = count >= FAILURES_MAX
        self.failed = TrainerFailed(
            failure.kind,
            plain(failure.reason),
            Remedy.NONE if given_up else Remedy.RESTART,
            count,
            0.0 if given_up else pause_s,
        )
        log.warning("the training command failed (%s): %s", failure.kind.value, failure.reason)
        self._tell(self.failed)
        if given_up:
            log.error("it failed %d times in a row: start this peer again once it is mended", count)
            await self._retry.wait()
            return False
        log.warning("starting it again in %.0f s (%d of %d)", pause_s, count, FAILURES_MAX)
        with trio.move_on_after(pause_s):
            await self._retry.wait()
            return False
        return True

    async def _renew(self, life: _Life) -> None:
        """End the running process when there are other GPUs, or hosts, than at its start."""
        async with trio.open_nursery() as nursery:

            async def wait_for(change: Callable[[], Awaitable[str]]) -> None:
                life.renewal = life.renewal or await change()
                nursery.cancel_scope.cancel()

            for need in self._needs:
                nursery.start_soon(wait_for, need.change)
        life.scope.cancel()

    async def _run_once(self, *, first: bool) -> int:
        pipe = None if self._output is None else OutputPipe(self._output)
        write_end = None if pipe is None else pipe.write_end
        command: Sequence[str] = self.command
        for need in self._needs:
            command = need.filled(command)
        try:
            process = await trio.lowlevel.open_process(
                command,
                stdin=subprocess.DEVNULL,
                stdout=write_end,
                stderr=write_end,
                env=self.environment(),
                start_new_session=True,
            )
        except OSError as error:
            why = f"cannot start `{shlex.join(self.command)}`: {error.strerror}"
            if not first:  # it could be started before: memory or process ids ran out, or an update
                self._life.verdict = Failure(FailureKind.CRASH, why)
                return 1
            raise UserError(
                why,
                exit_code=ExitCode.TRAINER,
                hint="the training command follows `--`, e.g. `-- python train.py`",
            ) from error
        finally:
            if pipe is not None:
                pipe.close()
        self.pid, self._exited = process.pid, trio.Event()
        if self._hosts is not None:
            self._hosts.start(self.start)
        try:
            async with _watched(process, self.socket_path):
                try:
                    async with trio.open_nursery() as nursery:
                        nursery.start_soon(self._renew, self._life)
                        with self._life.scope:
                            await process.wait()
                        nursery.cancel_scope.cancel()
                finally:
                    await _end(process, self.socket_path)
                    if self._hosts is not None:
                        with trio.CancelScope(shield=True):
                            own_end = not self._life.renewal and self._life.verdict is None
                            well = process.returncode == 0 and own_end
                            await self._hosts.stop(finished=well)
        finally:
            self.pid = None
            if pipe is not None:
                await pipe.last_lines()
            self._exited.set()
        assert process.returncode is not None
        return process.returncode


@asynccontextmanager
async def _watched(process: trio.Process, socket_path: Path) -> AsyncIterator[None]:
    """End all that the process starts, should this daemon be killed inside the block."""
    marker = _marker(socket_path)
    try:
        with trio.CancelScope(shield=True):  # the process runs, and the caller must end it
            watcher = await trio.lowlevel.open_process(
                [sys.executable, "-I", "-S", WATCHER, str(process.pid), marker],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
    except OSError as error:
        log.warning("if this daemon is killed, the training command goes on running: %s", error)
        yield
        return
    try:
        yield
    finally:
        with trio.CancelScope(shield=True):
            assert watcher.stdin is not None
            with suppress(trio.BrokenResourceError):  # it was killed
                await watcher.stdin.send_all(b".")
            await watcher.stdin.aclose()
            await watcher.wait()


def _marker(socket_path: Path) -> str:
    """Return the entry in the environment of all that the command starts."""
    return f"{SOCKET_VARIABLE}={socket_path}"


async def _end(process: trio.Process, socket_path: Path) -> None:
    """Send SIGTERM, then SIGKILL, to the whole session of a process, and SIGKILL to all that it
    started.

    Its children may outlive it (data loaders, the script under a shell or under torchrun, which
    gives each rank its own session) and hold memory that the next process needs; so they are killed
    even if the process itself has ended.
    """
    if process.returncode == 0:
        return  # it succeeded: processes that it left running are there on purpose
    with trio.CancelScope(shield=True):
        if process.returncode is None:
            _signal(process, signal.SIGTERM)
            _signal(process, signal.SIGCONT)  # so that a stopped process gets it, too
            with trio.move_on_after(TERM_S):
                await process.wait()
        _signal(process, signal.SIGKILL)
        await process.wait()
        marker = os.fsencode(_marker(socket_path))
        await trio.to_thread.run_sync(watcher.end, process.pid, marker)


def _signal(process: trio.Process, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):  # it may have ended in between
        os.killpg(process.pid, number)
