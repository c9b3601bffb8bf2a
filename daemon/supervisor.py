"""Runs the training command beside the daemon: starts it, restarts it with back-off, ends it.

The command runs in a session of its own, so that Ctrl+C reaches only the daemon, which drains
first. It finds the daemon by ``HOLDFAST_SOCKET``.
"""

from __future__ import annotations

import enum
import logging
import os
import shlex
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import trio

from ..protocol.errors import UserError
from .exit_codes import ExitCode

log = logging.getLogger("holdfast.supervisor")

BACKOFF_FIRST_S = 1.0
BACKOFF_MAX_S = 30.0
GOOD_RUN_S = 60.0  # a trainer that lived so long was fine: its next failure counts as the first
FAILURES_MAX = 5  # in a row; then the command is given up
TERM_S = 10.0  # from SIGTERM to SIGKILL


class TrainerEnd(enum.Enum):
    DONE = "done"  # exit status 0
    GIVEN_UP = "given up"  # failed too often
    STOPPED = "stopped"  # because we said so


class Supervisor:
    """One training command.

    Attributes:
      pid: of the process running now, or None.
      restarts: how often it was started again.
      last_end: how the last process ended, for people.
    """

    def __init__(self, command: Sequence[str], socket_path: Path, *, member: str) -> None:
        self.command = list(command)
        self.socket_path = socket_path
        self.member = member
        self.pid: int | None = None
        self.restarts = 0
        self.last_end = ""
        self._scope = trio.CancelScope()
        self._ended = trio.Event()

    def environment(self) -> Mapping[str, str]:
        return {
            **os.environ,
            "HOLDFAST_SOCKET": str(self.socket_path),
            "HOLDFAST_MEMBER": self.member,
        }

    async def run(self) -> TrainerEnd:
        """Keep the command running until it ends well, fails too often, or ``stop`` is called.

        Cancelled: the process is asked to end (SIGTERM), then killed.

        Raises:
          UserError: the command cannot be started at all.
        """
        try:
            with self._scope:
                return await self._keep_running()
            return TrainerEnd.STOPPED
        finally:
            self._ended.set()

    async def stop(self) -> None:
        """End the command; on return nothing of it runs, and nothing starts it again."""
        self._scope.cancel()
        await self._ended.wait()

    async def _keep_running(self) -> TrainerEnd:
        failures, backoff_s = 0, BACKOFF_FIRST_S
        while True:
            began_s = trio.current_time()
            status = await self._run_once()
            if status == 0:
                self.last_end = "ended by itself"
                return TrainerEnd.DONE
            self.last_end = _how(status)
            if trio.current_time() - began_s > GOOD_RUN_S:
                failures, backoff_s = 0, BACKOFF_FIRST_S
            failures += 1
            log.warning("the training command %s", self.last_end)
            if failures >= FAILURES_MAX:
                return TrainerEnd.GIVEN_UP
            log.warning("starting it again in %.0f s", backoff_s)
            await trio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, BACKOFF_MAX_S)
            self.restarts += 1

    async def _run_once(self) -> int:
        try:
            process = await trio.lowlevel.open_process(
                self.command,
                stdin=subprocess.DEVNULL,
                env=self.environment(),
                start_new_session=True,
            )
        except OSError as error:
            raise UserError(
                f"cannot start `{shlex.join(self.command)}`: {error.strerror}",
                exit_code=ExitCode.TRAINER,
                hint="the training command follows `--`, e.g. `-- python train.py`",
            ) from error
        self.pid = process.pid
        try:
            return await process.wait()
        finally:
            await _end(process)
            self.pid = None


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
            with trio.move_on_after(TERM_S):
                await process.wait()
        _signal(process, signal.SIGKILL)
        await process.wait()


def _signal(process: trio.Process, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):  # it may have ended in between
        os.killpg(process.pid, number)


def _how(status: int) -> str:
    if status < 0:
        try:
            return f"was killed by {signal.Signals(-status).name}"
        except ValueError:
            return f"was killed by signal {-status}"
    return f"ended with exit status {status}"
