"""Real ``holdfast`` processes on loopback, observed from outside.

A ``Fleet`` is one run: a master and its peers, each a process with its own log and state directory.
It reads everything over HTTP, as an operator would, and stops by process id what it started.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx

from holdfast.daemon.master.journal_store import JournalStore
from holdfast.daemon.paths import JOURNAL_FILE
from holdfast.membership.master.state.journal import RoundCommitted

TRAINER = Path(__file__).with_name("tiny_trainer.py")  # without torch
WITH_TORCH = (sys.executable, str(TRAINER.with_name("torch_trainer.py")))
POLL_S = 0.03
START_S = 60.0  # of one daemon; it does not import torch
WAIT_S = 120.0  # for whatever a test waits for: importing torch takes long on a busy machine
EXIT_S = 60.0
LOG_TAIL_CHARS = 3_000

Status = dict[str, Any]

SPEC = """
[run]
name = "test"
rounds = {rounds}
[diloco]
sync_every = {sync_every}
outer_lr = {outer_lr}
outer_momentum = {outer_momentum}
pace = "{pace}"
[membership]
contributors = {contributors}
min_members = {min_members}
deadline_s = 3
grace_s = 2
[reduce]
codec_up = "{codec}"
codec_down = "{codec}"
"""


def spec(
    *,
    rounds: int = 0,
    sync_every: int = 10,
    contributors: int = 0,
    min_members: int = 2,
    codec: str = "fp32",
    outer_lr: float = 0.7,
    outer_momentum: float = 0.9,
    pace: str = "elastic",
) -> str:
    return SPEC.format(
        rounds=rounds,
        sync_every=sync_every,
        contributors=contributors,
        min_members=min_members,
        codec=codec,
        outer_lr=outer_lr,
        outer_momentum=outer_momentum,
        pace=pace,
    )


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return this process's environment without the variables that configure holdfast."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("HOLDFAST_")}
    kept.pop("COLUMNS", None)  # the width of the test runner's terminal
    return {**kept, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", **(extra or {})}


def alive(pid: int) -> bool:
    """Return whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


class Node:
    """One ``holdfast`` process."""

    def __init__(self, name: str, folder: Path, process: subprocess.Popen[bytes]) -> None:
        self.name = name
        self.folder = folder
        self.process = process
        self.trainer_pids: set[int] = set()
        self.awaited = False  # the test expects its end

    def ended_badly(self) -> bool:
        """Return whether it ended by itself with a failure that the test has not awaited."""
        return not self.awaited and (self.process.poll() or 0) > 0

    @property
    def log(self) -> str:
        return (self.folder.parent / f"{self.name}.log").read_text(errors="replace")

    def control(self) -> dict[str, Any]:
        """Wait until it serves, and return its URL, token and process id."""
        until_s = time.monotonic() + START_S
        while time.monotonic() < until_s and self.process.poll() is None:
            with contextlib.suppress(OSError, ValueError):
                control: dict[str, Any] = json.loads((self.folder / "control.json").read_text())
                if control["pid"] == self.process.pid:
                    return control
            time.sleep(POLL_S)
        raise AssertionError(f"{self.name} does not serve:\n{self.log[-LOG_TAIL_CHARS:]}")

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def wait(self, seconds: float = EXIT_S) -> int:
        """Wait for its end, and return its exit status."""
        self.awaited = True
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self.name} still runs:\n{self.log[-LOG_TAIL_CHARS:]}") from None


class Fleet:
    """The processes of one run.

    Args:
      strict: a process that fails while the test waits fails the test.
    """

    def __init__(self, folder: Path, *, strict: bool = True) -> None:
        self.folder = folder
        self.strict = strict
        self.nodes: dict[str, Node] = {}
        self.ended: list[Node] = []  # earlier lives of nodes that were started again
        self.invites: dict[str, str] = {}
        self._client = httpx.Client(timeout=EXIT_S)
        self._master_arguments: list[str] = []

    # ------------------------------------------------------------ processes

    def spawn(
        self,
        name: str,
        *arguments: str,
        env: Mapping[str, str] | None = None,
        before: Sequence[str] = (),
    ) -> Node:
        """Start ``holdfast ARGUMENTS``; its state is ``folder/name``, its output a log beside it.

        Args:
          before: a command that executes that one.
        """
        folder = self.folder / name
        with (self.folder / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                [*before, sys.executable, "-m", "holdfast", "--log-level", "info", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment(env),
                cwd=self.folder,
                start_new_session=True,
            )
        if name in self.nodes:
            self.ended.append(self.nodes[name])
        node = self.nodes[name] = Node(name, folder, process)
        return node

    def start_master(
        self, toml: str, *, listen: str = "127.0.0.1:0", more: Sequence[str] = ()
    ) -> Node:
        path = self.folder / "run.toml"
        path.write_text(toml)
        self._master_arguments = [str(path), "--http", "127.0.0.1:0", "--no-invite", *more]
        node = self._spawn_master(listen)
        node.control()
        return node

    def restart_master(self) -> Node:
        """Start the master again, at the address that its peers know."""
        addresses = self._last_addresses
        node = self._spawn_master(addresses[0])
        node.control()
        return node

    def _spawn_master(self, listen: str) -> Node:
        state = str(self.folder / "master")
        return self.spawn(
            "master", "master", *self._master_arguments, "--state", state, "--listen", listen
        )

    def join(
        self,
        name: str,
        *script: str,
        role: str = "contributor",
        founder: bool = False,
        listen: str = "127.0.0.1:0",
        more: Sequence[str] = (),
        command: Sequence[str] = (sys.executable, str(TRAINER)),
        env: Mapping[str, str] | None = None,
        before: Sequence[str] = (),
    ) -> Node:
        """Start a peer; a name that was there before returns with its identity and its old invite.

        Args:
          script: the trainer's arguments.
          command: by default the trainer that needs no torch.
        """
        if name not in self.invites:
            body = {"role": role, "uses": 1, "hours": 1, "founder": founder}
            self.invites[name] = str(self.act("invite", body)["invite"])
        return self.spawn(
            name,
            "join",
            self.invites[name],
            "--name",
            name,
            "--state",
            str(self.folder / name),
            "--listen",
            listen,
            "--http",
            "127.0.0.1:0",
            "--patience",
            "30",
            *more,
            "--",
            *command,
            *script,
            env=env,
            before=before,
        )

    def kill(self, name: str) -> None:
        """Kill a peer as a power cut does: neither the daemon nor its trainer sees the other die."""
        trainer = self.peer(name)["command_pid"]
        self.nodes[name].signal(signal.SIGSTOP)
        if trainer:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(trainer, signal.SIGKILL)
        self.nodes[name].process.kill()
        self.nodes[name].process.wait()

    def stop_all(self) -> None:
        """Kill all processes that still run, and print all logs: pytest shows them if the test failed."""
        for node in self.nodes.values():
            if node.process.poll() is None:
                node.signal(signal.SIGCONT)
                with contextlib.suppress(Exception):  # a daemon that hangs is killed, too
                    self.peer(node.name)
                node.process.kill()
                node.process.wait()
        for node in self.ended:
            node.process.kill()
            node.process.wait()
        for node in [*self.ended, *self.nodes.values()]:
            for pid in node.trainer_pids:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(pid, signal.SIGKILL)
        self._client.close()
        for name, node in self.nodes.items():
            print(f"---------------- {name} ended with {node.process.returncode}; its log:")
            print(node.log[-LOG_TAIL_CHARS:])

    # ------------------------------------------------------------ status and actions

    def peer(self, name: str) -> Status:
        """Return a peer's own status."""
        node = self.nodes[name]
        status: Status = self._client.get(f"{node.control()['url']}/api/status").json()
        if status.get("command_pid"):
            node.trainer_pids.add(int(status["command_pid"]))
        return status

    def master(self) -> Status:
        control = self.nodes["master"].control()
        status: Status = self._client.get(f"{control['url']}/api/status").json()
        self._last_addresses = [str(address) for address in status["addresses"]]
        return status

    def act(self, name: str, body: Mapping[str, object]) -> dict[str, Any]:
        """Ask the master to do something."""
        control = self.nodes["master"].control()
        headers = {"authorization": f"Bearer {control['token']}"}
        response = self._client.post(f"{control['url']}/api/{name}", json=body, headers=headers)
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        return answer

    def until(
        self, condition: Callable[[Status], object], what: str, seconds: float = WAIT_S
    ) -> Status:
        """Poll the master's status until the condition holds; the test fails if it never does."""
        until_s = time.monotonic() + seconds
        while True:
            status = self.master()
            if condition(status):
                return status
            failed = [n.name for n in self.nodes.values() if n.ended_badly()]
            if failed and self.strict:
                raise AssertionError(f"{', '.join(failed)} ended, while waiting for: {what}")
            if time.monotonic() > until_s:
                brief = {k: v for k, v in status.items() if k not in ("past_rounds", "events")}
                raise AssertionError(
                    f"not within {seconds:.0f} s: {what}\n{json.dumps(brief, indent=1)}"
                )
            time.sleep(POLL_S)

    def until_committed(self, more: int) -> Status:
        """Wait until the run has committed ``more`` rounds."""
        goal = self.master()["committed"] + more
        return self.until(lambda s: s["committed"] >= goal, f"{more} more rounds")

    def settle(self, *names: str) -> dict[str, str]:
        """Pause the run, wait until these peers hold its last version, and return their digests by name."""
        self.act("pause", {})

        def settled(status: Status) -> bool:
            return not status["rounds"] and all(
                self.holds(status, name, status["committed"]) for name in names
            )

        status = self.until(settled, f"{', '.join(names)} hold the last version")
        return digests(status, *names)

    @staticmethod
    def holds(status: Status, name: str, version: int) -> bool:
        found = member(status, name)
        return found is not None and all(
            head["state"] == "held" and head["version"] == version for head in found["heads"]
        )


def member(status: Status, name: str) -> Status | None:
    """Return the member of that name as the master sees it."""
    return next((m for m in status["members"] if m["name"] == name), None)


def why_gone(status: Status, name: str) -> str:
    """Return the text of the last event that says that this member is gone."""
    left = [
        event["text"]
        for event in status["events"]
        if event["kind"] == "leave" and event["text"].startswith(f"{name} (")
    ]
    return str(left[-1])


def role(status: Status, name: str) -> str:
    found = member(status, name)
    return "" if found is None else str(found["role"])


def in_sync(status: Status, *names: str) -> bool:
    found = [member(status, name) for name in names]
    return all(m is not None and m["in_sync"] for m in found)


def contributing(status: Status, *names: str) -> bool:
    """Return whether the last committed round has added the updates of all these members."""
    ended = [r for r in status["past_rounds"] if r["outcome"] == "committed"]
    if not ended:
        return False
    peers = {c["peer"] for c in ended[-1]["contributors"]}
    found = [member(status, name) for name in names]
    return all(m is not None and m["peer"] in peers for m in found)


def spent_positions(fleet: Fleet) -> Counter[int]:
    """Kill the master, and return how many times its journal's commits have spent each leased position."""
    fleet.nodes["master"].signal(signal.SIGKILL)
    fleet.nodes["master"].wait()
    store = JournalStore(fleet.folder / "master" / JOURNAL_FILE)
    commits = [record for record in store.records() if isinstance(record, RoundCommitted)]
    store.close()
    return Counter(
        position
        for record in commits
        for each in record.spent
        for position in range(each.start, each.stop)
    )


def digests(status: Status, *names: str) -> dict[str, str]:
    found = {name: member(status, name) for name in names}
    return {name: m["heads"][0]["root"] for name, m in found.items() if m is not None}
