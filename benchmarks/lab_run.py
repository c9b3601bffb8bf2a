"""A real run on some ground: ``holdfast master`` on host 0, ``holdfast join`` on all others.

Everything is a process of its own, in its host's network; what it says of itself is read over
HTTP, from the loopback of its host. The master's clock is the one that counts: its status has
``now_s``, and its events and rounds have times of the same clock.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import httpx

from benchmarks.commands import HOLDFAST, ROOT, BenchError, end
from benchmarks.grounds import Ground
from benchmarks.report import keep_json

MASTER_PORT = 29_700
POLL_S = 0.05  # what is measured has times of its own; this only finds the moment to act
START_S = 30.0  # of a daemon; a trainer's torch may be importing beside it
HTTP_S = 10.0
PATIENCE_S = 600.0  # of peers without a master
LOG_TAIL_CHARS = 2_000

Status = dict[str, Any]

_LIBC = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1


def _end_with_parent() -> None:
    """Have the kernel kill this process when the benchmark is killed; its trainer ends without it."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def stop_on_signals() -> None:
    """Let SIGTERM end the program as Ctrl+C does: through every ``with``."""

    def stop(_number: int, _frame: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, stop)


def main_of_kills(
    name: str,
    about: str | None,
    kills: int,
    measure: Callable[[int, int], dict[str, Any]],
    broken: Callable[[dict[str, Any]], object],
) -> int:
    """Run a benchmark that kills processes, as the command line says, and print its figures.

    Args:
      about: the module's docstring.
      kills: how many, unless the command line says another number.
      measure: takes the number of kills and a seed, and returns the figures.
      broken: true of figures that break a promise.

    Returns:
      The exit status: 1 for a broken promise, or when nothing could be measured.
    """
    parser = argparse.ArgumentParser(description=(about or "").partition("\n")[0])
    parser.add_argument("--kills", type=int, default=kills)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    stop_on_signals()
    try:
        found = measure(options.kills, options.seed)
    except BenchError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    print(keep_json(found, options.json))
    return 1 if broken(found) else 0


class LabRun:
    """The processes of one run; those that still live when the ``with`` block ends are killed.

    Args:
      folder: for state and logs; one folder and one ``NAME.log`` for each process.
      script: the training script and its arguments.
    """

    def __init__(self, lab: Ground, folder: Path, script: Sequence[str]) -> None:
        self._lab = lab
        self._folder = folder
        self._script = script
        self._processes: dict[str, subprocess.Popen[Any]] = {}
        self._hosts: dict[str, int] = {}
        self._invites: dict[str, str] = {}
        self._trainers: dict[str, int] = {}  # process ids, by peer; each leads a group of its own
        # By name: daemons on different hosts may have the same address and port.
        self._clients: dict[str, httpx.Client] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for name, process in self._processes.items():
            process.send_signal(signal.SIGCONT)  # one that is stopped answers nobody
            self._note_trainer(name)
        for name in list(self._processes):
            self.kill(name)
        for client in self._clients.values():
            client.close()

    # ------------------------------------------------------------ processes

    def start_master(self, toml: str) -> None:
        (self._folder / "run.toml").write_text(toml)
        self.restart_master()

    def restart_master(self) -> None:
        """Start the master again, from its journal and at the address that its peers know."""
        listen = f"{self._lab.address(0)}:{MASTER_PORT}"
        spec = str(self._folder / "run.toml")
        self._spawn("master", 0, "master", spec, "--no-invite", "--listen", listen)

    def invite(self, name: str, *, role: str = "contributor", founder: bool = False) -> None:
        """Ask for the invite with which ``join`` will start this peer."""
        body = {"role": role, "uses": 1, "hours": 24, "founder": founder}
        self._invites[name] = str(self.act("invite", body)["invite"])

    def join(
        self,
        name: str,
        host: int,
        *,
        founder: bool = False,
        more: Sequence[str] = (),
        options: Sequence[str] = (),
        program: Sequence[str] = HOLDFAST,
    ) -> None:
        """Start a peer with its trainer; one that was here before comes back as itself.

        Args:
          more: further arguments of its training script.
          options: of the command ``join``.
          program: what runs the command ``join``.
        """
        if name not in self._invites:
            self.invite(name, founder=founder)
        listen = f"{self._lab.address(host)}:{MASTER_PORT + 1}"
        arguments = ["join", self._invites[name], "--name", name, "--listen", listen]
        arguments += ["--patience", f"{PATIENCE_S:g}", *options]
        command = [sys.executable, *self._script, *more]
        self._spawn(name, host, *arguments, command=command, program=program)

    def _spawn(
        self,
        name: str,
        host: int,
        *arguments: str,
        command: list[str] | None = None,
        program: Sequence[str] = HOLDFAST,
        http: bool = True,
    ) -> None:
        state = ["--state", str(self._folder / name)]
        state += ["--http", "127.0.0.1:0"] if http else []
        after = ["--", *command] if command else []
        kept = {k: v for k, v in os.environ.items() if not k.startswith("HOLDFAST_")}
        with (self._folder / f"{name}.log").open("ab") as log:
            self._processes[name] = self._lab.popen(
                host,
                [*program, "--log-level", "info", *arguments, *state, *after],
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**kept, "OMP_NUM_THREADS": "1"},
                start_new_session=True,  # Ctrl+C is for this program to handle
                preexec_fn=_end_with_parent,
            )
        self._hosts[name] = host

    def kill(self, name: str) -> None:
        """As if its power were cut, but for its kernel, which closes the connections."""
        process = self._processes[name]
        process.kill()
        process.wait()
        if (trainer := self._trainers.pop(name, None)) is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(trainer, signal.SIGKILL)

    def send_signal(self, name: str, number: signal.Signals) -> None:
        """Send a signal to a daemon."""
        self._processes[name].send_signal(number)

    def signal_trainer(self, name: str, number: signal.Signals) -> bool:
        """Send a signal to a peer's trainer; False if it has none that we know of."""
        trainer = self._trainers.get(name)
        if trainer is None:
            return False
        try:
            os.killpg(trainer, number)
        except ProcessLookupError:
            return False
        return True

    def serves(self, name: str) -> bool:
        """Whether a daemon can be asked by now; does not wait for it."""
        return self._read_control(name) is not None

    def url(self, name: str) -> str:
        """The address at which a daemon serves HTTP."""
        return str(self._control(name)["url"])

    def pid(self, name: str) -> int:
        """The process id of a daemon."""
        return self._processes[name].pid

    def ended(self, name: str) -> int | None:
        """A daemon's exit status; None while it runs."""
        return self._processes[name].poll()

    def stop(self, name: str) -> None:
        """In good order."""
        end(self._processes[name])

    # ------------------------------------------------------------ what they say

    def master(self) -> Status:
        """The master's status, with ``asked_s``: this process's clock when it was taken."""
        before_s = time.monotonic()
        status = self._http("master", "status", None)
        return {**status, "asked_s": (before_s + time.monotonic()) / 2}

    def peer(self, name: str) -> Status:
        """A peer's own status; notes its trainer's process id."""
        status = self._http(name, "status", None)
        if pid := status.get("command_pid"):
            self._trainers[name] = int(pid)
        return status

    def note_trainers(self) -> None:
        """Learn which processes to kill with their daemons."""
        for name in self._processes:
            self._note_trainer(name)

    def _note_trainer(self, name: str) -> None:
        if name == "master" or not self.serves(name):
            return
        with contextlib.suppress(BenchError, httpx.HTTPError):
            self.peer(name)

    def ask(self, what: str) -> dict[str, Any]:
        """Ask the master for something that it keeps."""
        return self._http("master", what, None)

    def act(self, what: str, body: Mapping[str, object]) -> dict[str, Any]:
        """Ask the master to do something."""
        return self._http("master", what, body)

    def _http(self, name: str, what: str, body: Mapping[str, object] | None) -> dict[str, Any]:
        control = self._control(name)
        url = f"{control['url']}/api/{what}"
        if name not in self._clients:
            self._clients[name] = httpx.Client(timeout=HTTP_S)
        with self._lab.inside(self._hosts[name]):
            if body is None:
                response = self._clients[name].get(url)
            else:
                headers = {"authorization": f"Bearer {control['token']}"}
                response = self._clients[name].post(url, json=dict(body), headers=headers)
        if response.status_code != 200:
            raise BenchError(f"{name}: {what}: {response.text}")
        answer: dict[str, Any] = response.json()
        return answer

    def _control(self, name: str) -> dict[str, Any]:
        until_s = time.monotonic() + START_S
        process = self._processes[name]
        while time.monotonic() < until_s and process.poll() is None:
            if (control := self._read_control(name)) is not None:
                return control
            time.sleep(POLL_S)
        raise BenchError(f"{name} does not serve; its log ends with:\n{self._tail(name)}")

    def _read_control(self, name: str) -> dict[str, Any] | None:
        with contextlib.suppress(OSError, ValueError):
            control: dict[str, Any] = json.loads((self._folder / name / "control.json").read_text())
            if control["pid"] == self._processes[name].pid:
                return control
        return None

    def until(self, condition: Callable[[Status], Any], what: str, seconds: float) -> Status:
        """Poll the master until the condition holds.

        Raises:
          BenchError: it does not within so many seconds.
        """
        until_s = time.monotonic() + seconds
        while True:
            status = self.master()
            if condition(status):
                return status
            if time.monotonic() > until_s:
                raise BenchError(
                    f"not within {seconds:g} s: {what}; {status['state']}: "
                    f"{status['why_waiting']}\n{self._tail('master')}"
                )
            time.sleep(POLL_S)

    def _tail(self, name: str) -> str:
        return (self._folder / f"{name}.log").read_text(errors="replace")[-LOG_TAIL_CHARS:]


def all_equal(run: LabRun) -> bool:
    """Return whether all members' copies get equal, as the run's status says."""
    status = run.until(lambda s: s["copies"]["equal"] == s["copies"]["all"], "equal copies", 60.0)
    return bool(status["copies"]["all"])
