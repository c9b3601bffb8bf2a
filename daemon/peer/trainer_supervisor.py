"""Runs the training command beside the daemon: starts it, restarts it with back-off, ends it.

    run: start --> status 0 ----------------------------------------> DONE
           ^  '--> failed, or was made to end by ``fail``
           |         |  back-off: 1 s, 2 s, ... 30 s     FAILURES_MAX in a row
           '---------'<---------- ``retry`` --------------- waits for somebody to act

Whoever started the daemon and the run's master are told of each failure and of what is done.

The command runs in a session of its own, so that Ctrl+C reaches only the daemon, which drains
first. It finds the daemon by ``HOLDFAST_SOCKET``. A daemon that is killed takes it along (``trainer_watcher``).
"""

from __future__ import annotations

import enum
import logging
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import trio

from ...protocol.errors import UserError
from ...protocol.messages import Failing, FailureKind, Remedy, TrainerFailed
from ...protocol.text import plain
from ..exit_codes import ExitCode
from .trainer_failures import Failure, failure_of, memory_kills

log = logging.getLogger("holdfast.supervisor")

HANDED = ("HOLDFAST_HOME",)  # of the daemon's variables, to its trainer
BACKOFF_FIRST_S = 1.0
BACKOFF_MAX_S = 30.0
GOOD_RUN_S = 60.0  # a trainer that lived so long was fine: its next failure counts as the first
FAILURES_MAX = 5  # in a row; then the peer stays without a trainer until somebody says ``retry``
TERM_S = 10.0  # from SIGTERM to SIGKILL
SOCKET_VARIABLE = "HOLDFAST_SOCKET"
WATCHER = str(Path(__file__).with_name("trainer_watcher.py"))


class TrainerEnd(enum.Enum):
    DONE = "done"  # exit status 0
    STOPPED = "stopped"  # because we said so


async def nothing_said() -> Failing | None:
    return None


class TrainerSupervisor:
    """One training command.

    Args:
      words: waits a moment for what the process that has just ended said of its end.
      tell: called after every failure, with what is done about it.

    Attributes:
      pid: of the process running now, or None.
      restarts: how often it was started again.
      failed: the failure that nothing was done about yet; None while a process runs.
    """

    def __init__(
        self,
        command: Sequence[str],
        socket_path: Path,
        *,
        member: str,
        words: Callable[[], Awaitable[Failing | None]] = nothing_said,
        tell: Callable[[TrainerFailed], None] = lambda _message: None,
    ) -> None:
        self.command = list(command)
        self.socket_path = socket_path
        self.member = member
        self.pid: int | None = None
        self.restarts = 0
        self.failed: TrainerFailed | None = None
        self._words = words
        self._tell = tell
        self._scope = trio.CancelScope()
        self._process_scope = trio.CancelScope()
        self._verdict: Failure | None = None  # why the process that runs must end
        self._sick_s = 0.0  # how long it was no good before that
        self._retry = trio.Event()
        self._ended = trio.Event()

    def environment(self) -> Mapping[str, str]:
        # Not the daemon's own options: one of them is the invite, which lets anybody in.
        kept = {k: v for k, v in os.environ.items() if not k.startswith("HOLDFAST_") or k in HANDED}
        return {
            **kept,
            SOCKET_VARIABLE: str(self.socket_path),
            "HOLDFAST_MEMBER": self.member,
        }

    async def run(self) -> TrainerEnd:
        """Keep the command running until it ends well, or ``stop`` is called.

        Cancelled: the process is asked to end (SIGTERM), then killed.

        Raises:
          UserError: the command cannot be started at all.
        """
        try:
            with self._scope:
                await self._keep_running()
                return TrainerEnd.DONE
            return TrainerEnd.STOPPED
        finally:
            self._ended.set()

    async def stop(self) -> None:
        """End the command; on return nothing of it runs, and nothing starts it again."""
        self._scope.cancel()
        await self._ended.wait()

    def fail(self, kind: FailureKind, reason: str, sick_s: float) -> None:
        """The process that runs does not do its work, for so long already: end it as a failure."""
        if self.pid is not None and self._verdict is None:
            self._verdict, self._sick_s = Failure(kind, reason), sick_s
            self._process_scope.cancel()

    def retry(self) -> bool:
        """Start the command now, after however many failures. False: it runs."""
        if self.failed is None:
            return False
        self._retry.set()
        return True

    async def _keep_running(self) -> None:
        failure_count = 0
        while True:
            began_s = trio.current_time()
            kills = memory_kills()
            self.failed, self._verdict, self._sick_s = None, None, 0.0
            self._retry = trio.Event()
            status = await self._run_once(first=self.restarts == 0)
            if status == 0 and self._verdict is None:
                return
            well_s = trio.current_time() - began_s - self._sick_s
            failure_count = 1 if well_s > GOOD_RUN_S else failure_count + 1
            failure = await self._why(status, kernel_killed=memory_kills() > kills)
            if not await self._recover(failure, failure_count):
                failure_count = 0
            self.restarts += 1

    async def _why(self, status: int, *, kernel_killed: bool) -> Failure:
        said = await self._words()
        if self._verdict is not None:
            return self._verdict
        if said is not None:
            return Failure(said.kind, said.reason)
        return failure_of(status, kernel_killed=kernel_killed)

    async def _recover(self, failure: Failure, count: int) -> bool:
        """Tell what happened and wait until the next try; False: somebody asked for it."""
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
            log.error("it failed %d times in a row; it is started again on `holdfast retry`", count)
            await self._retry.wait()
            return False
        log.warning("starting it again in %.0f s (%d of %d)", pause_s, count, FAILURES_MAX)
        with trio.move_on_after(pause_s):
            await self._retry.wait()
            return False
        return True

    async def _run_once(self, *, first: bool) -> int:
        try:
            process = await trio.lowlevel.open_process(
                self.command,
                stdin=subprocess.DEVNULL,
                env=self.environment(),
                start_new_session=True,
            )
        except OSError as error:
            why = f"cannot start `{shlex.join(self.command)}`: {error.strerror}"
            if not first:  # it could be started once: no memory, no process number, an update
                self._verdict = Failure(FailureKind.CRASH, why)
                return 1
            raise UserError(
                why,
                exit_code=ExitCode.TRAINER,
                hint="the training command follows `--`, e.g. `-- python train.py`",
            ) from error
        self.pid = process.pid
        self._process_scope = trio.CancelScope()
        try:
            async with _watched(process, self.socket_path):
                try:
                    with self._process_scope:
                        await process.wait()
                finally:
                    await _end(process)
        finally:
            self.pid = None
        assert process.returncode is not None
        return process.returncode


@asynccontextmanager
async def _watched(process: trio.Process, socket_path: Path) -> AsyncIterator[None]:
    """Have all that the process starts end with this daemon, should that be killed in the block."""
    marker = f"{SOCKET_VARIABLE}={socket_path}"
    try:
        with trio.CancelScope(shield=True):  # the process runs: who waits for it has to end it
            watcher = await trio.lowlevel.open_process(
                [sys.executable, "-I", "-S", WATCHER, str(process.pid), marker],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
    except OSError as error:
        log.warning("the training command would outlive this daemon's death: %s", error)
        yield
        return
    try:
        yield
    finally:
        with trio.CancelScope(shield=True):
            assert watcher.stdin is not None
            with suppress(trio.BrokenResourceError):  # somebody has ended it
                await watcher.stdin.send_all(b".")
            await watcher.stdin.aclose()
            await watcher.wait()


async def _end(process: trio.Process) -> None:
    """SIGTERM, then SIGKILL, to the whole session of a process.

    Its children may outlive it (data loaders, the script under a shell or under torchrun) and hold
    memory that the next one needs; so the session is killed even if the process itself has ended.
    """
    if process.returncode == 0:
        return  # it went by itself; what it left running, it left on purpose
    with trio.CancelScope(shield=True):
        if process.returncode is None:
            _signal(process, signal.SIGTERM)
            _signal(process, signal.SIGCONT)  # one that was stopped hears of it, too
            with trio.move_on_after(TERM_S):
                await process.wait()
        _signal(process, signal.SIGKILL)
        await process.wait()


def _signal(process: trio.Process, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):  # it may have ended in between
        os.killpg(process.pid, number)
