"""Real ``holdfast`` processes on loopback, observed from outside.

A ``Fleet`` is one run: a master and its peers, each a process with its own log and state directory.
It reads everything over HTTP, as an operator would, and stops by process id what it started.

No time limit of a run here can bind on a busy machine: silence, leases, grace and lag are tested in
virtual time. Processes die by signals, which their sockets tell at once.
"""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from holdfast.daemon.cli import fleet
from holdfast.daemon.cli.fleet import EXIT_S, START_S, Node, Polls, Status, environment
from holdfast.daemon.master.journal.journal_store import JournalStore
from holdfast.daemon.process.paths import JOURNAL_FILE
from holdfast.membership.master.state.journal import RoundCommitted

__all__ = [
    "EXIT_S",
    "START_S",
    "Fleet",
    "Node",
    "Polls",
    "Status",
    "environment",
]

TRAINER = Path(__file__).with_name("tiny_trainer.py")  # without torch
WITH_TORCH = (sys.executable, str(TRAINER.with_name("torch_trainer.py")))
HOLDFAST = (sys.executable, "-m", "holdfast")
WAIT_S = 240.0  # for whatever a test waits for: only what hangs takes as long, on any machine
LOG_TAIL_CHARS = 3_000

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
deadline_s = 60
grace_s = 30
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


def run_command(
    *arguments: object,
    state: Path | None = None,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    before: Sequence[str] = (),
    preexec: Callable[[], None] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, for the daemon of that state directory if one is given."""
    daemon = () if state is None else ("--state", str(state))
    return subprocess.run(
        [*before, *HOLDFAST, *map(str, arguments), *daemon],
        cwd=cwd,
        env=environment(env or {}),
        capture_output=True,
        text=True,
        preexec_fn=preexec,
        timeout=WAIT_S,
        check=False,
    )


def alive(pid: int) -> bool:
    """Return whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


_hosts = itertools.count()


def own_host() -> str:
    """Return an address of loopback where nobody else listens, so that any port is free there."""
    pid = os.getpid()
    return f"127.{100 + next(_hosts) % 100}.{pid // 254 % 254 + 1}.{pid % 254 + 1}"


class Fleet(fleet.Fleet):
    """The processes of one run of a test.

    Args:
      strict: a process that fails while the test waits fails the test.
    """

    def __init__(self, folder: Path, *, strict: bool = True) -> None:
        super().__init__(folder)
        self.strict = strict

    def join(
        self,
        name: str,
        *script: str,
        command: Sequence[str] = (sys.executable, str(TRAINER)),
        patience_s: float = WAIT_S,
        **how: Any,
    ) -> Node:
        """Start a peer, by default with the trainer that needs no torch."""
        return super().join(name, *script, command=command, patience_s=patience_s, **how)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.stop_all()

    def stop_all(self) -> None:
        """Kill all processes that still run, and print all logs: pytest shows them if the test
        failed.
        """
        self.kill_all()
        for name, node in self.nodes.items():
            print(f"---------------- {name} ended with {node.process.returncode}; its log:")
            print(node.log[-LOG_TAIL_CHARS:])

    def check_alive(self, what: str = "the end") -> None:
        if self.strict:
            super().check_alive(what)

    def until(
        self, condition: Callable[[Status], object], what: str, seconds: float = WAIT_S
    ) -> Status:
        """Look at the master's status until the condition holds, and return it."""
        return super().until(condition, what, seconds)

    def until_log(self, name: str, text: str) -> str:
        """Wait until a process has printed this, and return its log."""
        node, polls = self.nodes[name], Polls(WAIT_S)
        while text not in node.log:
            assert polls.wait(), f"{name} has not printed {text!r}; {node.log_tail}"
        return node.log

    def until_committed(self, more: int) -> Status:
        """Wait until the run has committed ``more`` rounds."""
        goal = self.master()["committed"] + more
        return self.until(lambda s: s["committed"] >= goal, f"{more} more rounds")

    def until_finished(self, *names: str) -> Status:
        """Wait until the run is over, and these peers have gone home by themselves."""
        status = self.until(lambda s: s["state"] == "finished" and not s["members"], "the end")
        self.check_exits(*names)
        return status

    def end(self, *names: str) -> None:
        """Ask processes to end, as Ctrl+C does; they do so in good order."""
        for name in names:
            self.nodes[name].signal(signal.SIGINT)
        self.check_exits(*names)

    def check_exits(self, *names: str) -> None:
        assert {name: self.nodes[name].wait(WAIT_S) for name in names} == dict.fromkeys(names, 0)

    def typed(self, *arguments: object, state: str = "master") -> subprocess.CompletedProcess[str]:
        """Type a command at one of the daemons."""
        return run_command(*arguments, state=self.folder / state)

    def said(self, *arguments: object, state: str = "master") -> str:
        """Type a command that ends well, and return what it says."""
        done = self.typed(*arguments, state=state)
        assert (done.returncode, done.stderr) == (0, "")
        assert "\x1b" not in done.stdout, "plain where it is no terminal"
        return done.stdout

    def check_equal(self, *names: str) -> None:
        """Pause the run, and check that these peers hold the same last version."""
        found = self.settle(*names)
        assert len(set(found.values())) == 1, found

    def settle(self, *names: str) -> dict[str, str]:
        """Pause the run, wait until these peers hold its last version, and return their digests by
        name.
        """
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
    """Kill the master, and return how many times its journal's commits have spent each leased
    position.
    """
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
