"""A run on this machine: a master and its peers as processes, each with its folder and its log.

It uses only the ``holdfast`` commands and what daemons say over HTTP, as any operator would.
``holdfast demo`` is such a run; tests and benchmarks start theirs in the same way.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from attrs import define, field

from ...protocol.errors import UserError
from ..process.paths import CONTROL_FILE, DaemonAddress, read_control
from .daemon_client import call

MASTER = "master"
LOOPBACK = "127.0.0.1:0"
START_S = 60.0  # of one daemon, on a busy machine; it does not import torch
HTTP_S = 60.0
EXIT_S = 60.0
STOP_S = 20.0  # for all to end in good order
# Between two looks at a status; twice as long after each, since a look costs some.
POLL_FIRST_S = 0.02
POLL_MAX_S = 0.16  # milliseconds of the processor that the run needs
LOG_TAIL_CHARS = 3_000
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}  # several trainers share a machine

Status = dict[str, Any]


class FleetError(UserError):
    """A process of the run failed, or something did not happen in time; the hint quotes its log."""


@define(eq=False)
class Node:
    """One ``holdfast`` process.

    Attributes:
      folder: its state.
      trainer_pids: of trainers that it is known to have started; each leads a group of its own.
      awaited: its end is expected.
    """

    name: str
    folder: Path
    log_path: Path
    process: subprocess.Popen[Any]
    trainer_pids: set[int] = field(factory=set)
    awaited: bool = False

    @property
    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    @property
    def log_tail(self) -> str:
        return f"its log ends with:\n{self.log[-LOG_TAIL_CHARS:].strip()}"

    def ended_badly(self) -> bool:
        """Return whether it ended by itself with a failure that nobody awaited."""
        return not self.awaited and (self.process.poll() or 0) > 0

    def address(self) -> DaemonAddress | None:
        """Return where it serves, and its token; None if it does not serve yet."""
        found = read_control(self.folder / CONTROL_FILE)
        return found if found is not None and found.pid == self.process.pid else None

    def control(self) -> DaemonAddress:
        """Wait until it serves; raise FleetError if it has ended, or did not start in time."""
        polls = Polls(START_S)
        while self.process.poll() is None:
            if (found := self.address()) is not None:
                return found
            if not polls.wait():
                break
        raise FleetError(f"{self.name} does not serve", hint=self.log_tail)

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def wait(self, seconds: float = EXIT_S) -> int:
        self.awaited = True
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise FleetError(f"{self.name} still runs", hint=self.log_tail) from None


class Polls:
    """The pauses between looks at something that changes, until ``seconds`` are over."""

    def __init__(self, seconds: float) -> None:
        self._until_s = time.monotonic() + seconds
        self._pause_s = POLL_FIRST_S

    def wait(self) -> bool:
        """Pause; return False without a pause if the time is over."""
        if time.monotonic() > self._until_s:
            return False
        time.sleep(self._pause_s)
        self._pause_s = min(2 * self._pause_s, POLL_MAX_S)
        return True


class Fleet:
    """The processes of one run; ``stop`` or ``kill_all`` ends them.

    Attributes:
      folder: each process has ``NAME/`` for its state and ``NAME.log`` in it.
      nodes: the processes by name; the master's is ``master``.
      ended: earlier lives of nodes that were started again.
      invites: by the name of the peer.

    Args:
      run_in: where processes run; by default in ``folder``.
    """

    def __init__(self, folder: Path, run_in: Path | None = None) -> None:
        self.folder = folder
        self._run_in = run_in or folder
        self.nodes: dict[str, Node] = {}
        self.ended: list[Node] = []
        self.invites: dict[str, str] = {}
        self._master_arguments: list[str] = []
        self._master_addresses: list[str] = []

    # ------------------------------------------------------------ processes

    def spawn(
        self,
        name: str,
        *arguments: str,
        env: Mapping[str, str] | None = None,
        before: Sequence[str] = (),
    ) -> Node:
        """Start ``holdfast ARGUMENTS`` in a session of its own.

        Args:
          env: variables beside this process's, without those that configure holdfast.
          before: a command that executes that one.
        """
        log_path = self.folder / f"{name}.log"
        with log_path.open("ab") as log:
            process = subprocess.Popen(
                [*before, sys.executable, "-m", "holdfast", "--log-level", "info", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment(env),
                cwd=self._run_in,
                start_new_session=True,
            )
        if name in self.nodes:
            self.ended.append(self.nodes[name])
        node = self.nodes[name] = Node(name, self.folder / name, log_path, process)
        return node

    def start_master(
        self, toml: str, *, listen: str = LOOPBACK, http: str = LOOPBACK, more: Sequence[str] = ()
    ) -> Node:
        """Start a master with this text as run.toml, and wait until it serves."""
        path = self.folder / "run.toml"
        path.write_text(toml)
        self._master_arguments = [str(path), "--http", http, "--no-invite", *more]
        return self._start_master(listen)

    def restart_master(self) -> Node:
        """Start the master again, at the address that its peers know."""
        return self._start_master(self._master_addresses[0])

    def _start_master(self, listen: str) -> Node:
        where = ("--state", str(self.folder / MASTER), "--listen", listen)
        node = self.spawn(MASTER, MASTER, *self._master_arguments, *where)
        node.control()
        self._master_addresses = [str(each) for each in self.master()["addresses"]]
        return node

    def invite(self, name: str, *, role: str = "contributor", founder: bool = False) -> str:
        """Return the invite of a peer; the first call asks the master for it."""
        if name not in self.invites:
            body = {"role": role, "uses": 1, "hours": 24, "founder": founder}
            self.invites[name] = str(self.act("invite", body)["invite"])
        return self.invites[name]

    def join(
        self,
        name: str,
        *script: str,
        command: Sequence[str] = (),
        role: str = "contributor",
        founder: bool = False,
        listen: str = LOOPBACK,
        http: str = LOOPBACK,
        patience_s: float = 30.0,
        more: Sequence[str] = (),
        **how: Any,
    ) -> Node:
        """Start a peer; a name that was there before returns with its identity and its old invite.

        Args:
          command: the training command; without one the peer only keeps a copy.
          script: further arguments of it.
          patience_s: for how long it looks for a master.
          more: further options of ``join``.
          how: see ``spawn``.
        """
        return self.spawn(
            name,
            "join",
            self.invite(name, role=role, founder=founder),
            f"--name={name}",
            f"--state={self.folder / name}",
            f"--listen={listen}",
            f"--http={http}",
            f"--patience={patience_s:g}",
            *more,
            *(["--", *command, *script] if command else []),
            **how,
        )

    def kill(self, name: str) -> None:
        """Kill a daemon and its trainer as a power cut does: neither sees the other die."""
        node = self.nodes[name]
        if name != MASTER and node.process.poll() is None:
            self._note_trainer(name)
            node.signal(signal.SIGSTOP)
        self._kill(node)

    def stop(self, seconds: float = STOP_S) -> None:
        """Ask all processes to end, peers as Ctrl+C does, and kill those that have not in time."""
        for name, node in self.nodes.items():
            if node.process.poll() is None:
                node.signal(signal.SIGTERM if name == MASTER else signal.SIGINT)
        until_s = time.monotonic() + seconds
        for node in self.nodes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                node.process.wait(max(0.1, until_s - time.monotonic()))
        self.kill_all()

    def kill_all(self) -> None:
        for name, node in self.nodes.items():
            if node.process.poll() is None:
                node.signal(signal.SIGCONT)  # one that is stopped answers nobody
                self._note_trainer(name)
        for node in [*self.ended, *self.nodes.values()]:
            self._kill(node)

    def _note_trainer(self, name: str) -> None:
        """Learn a trainer's process id; a daemon that does not serve yet has none."""
        if self.nodes[name].address() is not None:
            with contextlib.suppress(UserError):
                self.peer(name)

    @staticmethod
    def _kill(node: Node) -> None:
        node.awaited = True
        for pid in node.trainer_pids:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)
        node.process.kill()
        node.process.wait()

    # ------------------------------------------------------------ status and actions

    def peer(self, name: str) -> Status:
        status = self.ask(name, "status")
        if status.get("command_pid"):
            self.nodes[name].trainer_pids.add(int(status["command_pid"]))
        return status

    def master(self) -> Status:
        return self.ask(MASTER, "status")

    def act(self, what: str, body: Mapping[str, object]) -> Status:
        return self.ask(MASTER, what, body)

    def ask(self, name: str, what: str, body: Mapping[str, object] | None = None) -> Status:
        """Return a daemon's answer to a GET, or a POST with this body; raise UserError without."""
        return call(self.nodes[name].control(), what, body, timeout_s=HTTP_S)

    def until(self, condition: Callable[[Status], object], what: str, seconds: float) -> Status:
        """Return the master's status once the condition holds; raise FleetError if it does not."""
        polls = Polls(seconds)
        while True:
            status = self.master()
            if condition(status):
                return status
            self.check_alive(what)
            if not polls.wait():
                raise FleetError(
                    f"not within {seconds:g} s: {what}; {status['state']}: {status['why_waiting']}",
                    hint=self.nodes[MASTER].log_tail,
                )

    def check_alive(self, what: str = "the end") -> None:
        """Raise FleetError if a process has failed, with the end of its log."""
        for node in self.nodes.values():
            if node.ended_badly():
                raise FleetError(
                    f"{node.name} ended with exit status {node.process.returncode}, waiting for:"
                    f" {what}",
                    hint=node.log_tail,
                )


def interrupt_on_signals() -> None:
    """Take SIGHUP and SIGTERM like Ctrl+C, so that no process stays behind."""
    for number in (signal.SIGHUP, signal.SIGTERM):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler)


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return this process's environment for one of many daemons, without holdfast's variables."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HOLDFAST_")}
    kept.pop("COLUMNS", None)  # the width of this terminal
    return {**kept, **ONE_THREAD, **(extra or {})}
