"""A real run in a WAN lab: ``holdfast master`` on host 0, ``holdfast join`` on all others.

Everything is a process of its own, in its host's network; what it says of itself is read over
HTTP, from the loopback of its host. The master's clock is the one that counts: its status has
``now_s``, and its events and rounds have times of the same clock.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx

from benchmarks.commands import HOLDFAST, ROOT, BenchError, end
from benchmarks.wan_lab import WanLab

TRAINER = Path(__file__).with_name("one_fragment.py")
MASTER_PORT = 29_700
POLL_S = 0.05  # what is measured has times of its own; this only finds the moment to act
START_S = 30.0  # of a daemon; a trainer's torch may be importing beside it
HTTP_S = 10.0
LOG_TAIL_CHARS = 2_000

Status = dict[str, Any]


class LabRun:
    """The processes of one run; those that still live when the ``with`` block ends are killed.

    Args:
      folder: for state and logs; one folder and one ``NAME.log`` for each process.
      mib: of all values.
      tensors: that they are in; fragments are made of whole ones.
      all_in: steps in which every value changes; 0: only some ever do.
      step_s: what a step of the trainers takes.
    """

    def __init__(
        self,
        lab: WanLab,
        folder: Path,
        *,
        mib: int,
        step_s: float,
        tensors: int = 1,
        all_in: int = 0,
    ) -> None:
        self._lab = lab
        self._folder = folder
        self.value_bytes = mib * 2**20
        self._script = ["--mib", str(mib), "--step-s", str(step_s)]
        self._script += ["--tensors", str(tensors), "--all-in", str(all_in)]
        self._processes: dict[str, subprocess.Popen[Any]] = {}
        self._hosts: dict[str, int] = {}
        self._invites: dict[str, str] = {}
        self._trainers: dict[str, int] = {}  # process ids, by peer; each leads a group of its own
        # By name: daemons on different hosts may have the same address and port.
        self._clients: dict[str, httpx.Client] = {}

    def __enter__(self) -> LabRun:
        return self

    def __exit__(
        self,
        _type: type[BaseException] | None,
        _error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        for name in self._processes:
            self._note_trainer(name)
        for name in list(self._processes):
            self.kill(name)
        for client in self._clients.values():
            client.close()

    # ------------------------------------------------------------ processes

    def start_master(self, toml: str) -> None:
        path = self._folder / "run.toml"
        path.write_text(toml)
        listen = f"{self._lab.address(0)}:{MASTER_PORT}"
        self._spawn("master", 0, "master", str(path), "--no-invite", "--listen", listen)

    def join(self, name: str, host: int, *, founder: bool = False) -> None:
        """Start a peer with its trainer; one that was here before comes back as itself."""
        if name not in self._invites:
            body = {"role": "contributor", "uses": 1, "hours": 1, "founder": founder}
            self._invites[name] = str(self.act("invite", body)["invite"])
        listen = f"{self._lab.address(host)}:{MASTER_PORT + 1}"
        arguments = ["join", self._invites[name], "--name", name, "--listen", listen]
        self._spawn(name, host, *arguments, command=[sys.executable, str(TRAINER), *self._script])

    def _spawn(
        self, name: str, host: int, *arguments: str, command: list[str] | None = None
    ) -> None:
        state = ["--state", str(self._folder / name), "--http", "127.0.0.1:0"]
        after = ["--", *command] if command else []
        kept = {k: v for k, v in os.environ.items() if not k.startswith("HOLDFAST_")}
        with (self._folder / f"{name}.log").open("ab") as log:
            self._processes[name] = self._lab.popen(
                host,
                [*HOLDFAST, "--log-level", "info", *arguments, *state, *after],
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**kept, "OMP_NUM_THREADS": "1"},
                start_new_session=True,  # Ctrl+C is for this program to handle
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

    def stop(self, name: str) -> None:
        """In good order."""
        end(self._processes[name])

    # ------------------------------------------------------------ what they say

    def master(self) -> Status:
        """The master's status, with ``asked_s``: this process's clock when it was taken."""
        before_s = time.monotonic()
        status = self._http("master", "status", None)
        return {**status, "asked_s": (before_s + time.monotonic()) / 2}

    def note_trainers(self) -> None:
        """Learn which processes to kill with their daemons."""
        for name in self._processes:
            self._note_trainer(name)

    def _note_trainer(self, name: str) -> None:
        if name == "master" or self._processes[name].poll() is not None:
            return
        with contextlib.suppress(BenchError, httpx.HTTPError):
            if pid := self._http(name, "status", None).get("command_pid"):
                self._trainers[name] = int(pid)

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
            with contextlib.suppress(OSError, ValueError):
                control: dict[str, Any] = json.loads(
                    (self._folder / name / "control.json").read_text()
                )
                if control["pid"] == process.pid:
                    return control
            time.sleep(POLL_S)
        raise BenchError(f"{name} does not serve; its log ends with:\n{self._tail(name)}")

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
