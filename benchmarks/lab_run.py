"""A real run on some ground: ``holdfast master`` on host 0, ``holdfast join`` on all others.

The ``Fleet`` of the demo and of tests, with each process in its host's network. The master's clock
is the one that counts: its status has ``now_s``, and its events and rounds have times of the same
clock.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import psutil

from benchmarks.grounds import Ground
from holdfast.daemon.cli.fleet import MASTER, Fleet, Node, Status

MASTER_PORT = 29_700
ONE_FRAGMENT = Path(__file__).with_name("one_fragment.py")
PATIENCE_S = 600.0  # of peers without a master


class LabRun(Fleet):
    """The processes of one run; those that still live when the ``with`` block ends are killed.

    Args:
      folder: for state and logs; one folder and one ``NAME.log`` for each process.
      script: the training script and its arguments.

    Attributes:
      hosts: of the ground, by process.
    """

    def __init__(self, ground: Ground, folder: Path, script: Sequence[str]) -> None:
        super().__init__(folder)
        self.ground = ground
        self.hosts = {MASTER: 0}
        self._script = script

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill_all()

    def http(self, host: int) -> str:
        """Where a host's daemon serves HTTP: no two on one address, whatever ports they get."""
        return f"127.78.0.{host + 1}:0"

    def spawn(self, name: str, *arguments: str, **how: Any) -> Node:
        return super().spawn(
            name, *arguments, before=self.ground.command(self.hosts[name], ()), **how
        )

    def start_master(self, toml: str, **how: Any) -> Node:
        listen = f"{self.ground.address(0)}:{MASTER_PORT}"
        return super().start_master(toml, **{"listen": listen, "http": self.http(0), **how})

    def join_on(
        self,
        host: int,
        name: str,
        *script: str,
        founder: bool = False,
        more: Sequence[str] = (),
    ) -> Node:
        """Start a peer with its trainer on a host; one that was here before comes back as itself.

        Args:
          script: further arguments of its training script.
          more: further options of ``join``.
        """
        self.hosts[name] = host
        return self.join(
            name,
            *script,
            command=[sys.executable, *self._script],
            founder=founder,
            listen=f"{self.ground.address(host)}:{MASTER_PORT + 1}",
            http=self.http(host),
            patience_s=PATIENCE_S,
            more=more,
        )

    def reach(self, count: int, seconds: float) -> Status:
        """Wait until so many rounds are committed, and return the master's status."""
        return self.until(lambda s: s["committed"] >= count, f"{count} rounds", seconds)

    def master(self) -> Status:
        """Return the master's status, with ``asked_s``: this process's clock when it was taken."""
        before_s = time.monotonic()
        status = super().master()
        return {**status, "asked_s": (before_s + time.monotonic()) / 2}

    def processor_s(self, name: str) -> tuple[float, float]:
        """Processor seconds so far of a node's daemon, and of the processes that it has started."""
        daemon = psutil.Process(self.nodes[name].process.pid)
        own, *started = (each.cpu_times() for each in (daemon, *daemon.children()))
        return own.user + own.system, sum(each.user + each.system for each in started)

    def ask(self, name: str, what: str, body: Mapping[str, object] | None = None) -> Status:
        with self.ground.inside(self.hosts[name]):
            return super().ask(name, what, body)


@contextmanager
def running(
    ground: Ground, script: Sequence[str], toml: str, peers: Sequence[str]
) -> Iterator[LabRun]:
    """Start a run with a master on host 0 and each of the peers on the next host."""
    with (
        tempfile.TemporaryDirectory(prefix="holdfast-bench-") as directory,
        LabRun(ground, Path(directory), script) as run,
    ):
        run.start_master(toml)
        for host, name in enumerate(peers, 1):
            run.join_on(host, name, founder=host == 1)
        yield run


def said_s(status: Status, kind: str, name: str) -> float:
    """Return when the master last said this of a peer, by its clock; negative: never."""
    return max(
        (
            float(event["at_s"])
            for event in status["events"]
            if event["kind"] == kind and event["text"].startswith(f"{name} (")
        ),
        default=-1.0,
    )
