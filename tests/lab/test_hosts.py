"""One run of unlike peers: one process, a pipeline, and two hosts in networks of their own."""

from __future__ import annotations

import re
import signal
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks.grounds import Switch
from benchmarks.lab_run import LabRun
from holdfast.daemon.cli.fleet import Status
from tests import needs
from tests.processes.harness import contributing, in_sync, member, spec

pytestmark = [pytest.mark.slow, pytest.mark.nightly]

EXAMPLES = Path(__file__).parents[2] / "examples"
TORCHRUN = (sys.executable, "-m", "torch.distributed.run")
OWN_DEVICE = {"GLOO_SOCKET_IFNAME": "eth0"}
STRING = re.compile(r"holdfasthost1\.[\w-]+")
HOME, AWAY = 0, 1  # hosts of the switch
WAIT_S = 240.0
PLACES = ("--nnodes={hosts}", "--node-rank={host}", "--master-addr={head}", "--nproc-per-node=2")
SITE = (*TORCHRUN, *PLACES, "--master-port=29511", str(EXAMPLES / "fsdp.py"))


def pipeline(stages: int, port: int) -> tuple[str, ...]:
    where = (f"--nproc-per-node={stages}", f"--master-port={port}")
    return (*TORCHRUN, *where, str(EXAMPLES / "pipeline.py"))


class Run:
    """A lab run, and what is asked of it here."""

    def __init__(self, run: LabRun) -> None:
        self.run = run

    def join(self, name: str, port: int, command: tuple[str, ...], **how: Any) -> None:
        self.run.hosts[name] = HOME
        self.run.join(
            name,
            command=command,
            listen=f"{self.run.ground.address(HOME)}:{port}",
            http=self.run.http(len(self.run.hosts)),
            patience_s=WAIT_S,
            env=OWN_DEVICE,
            **how,
        )

    def start_head(self) -> str:
        """Start the peer of two hosts; return the string for the other one."""
        self.join("site", 29711, SITE, more=["--hosts", "2"])
        found = None
        self.run.until(lambda _: STRING.search(self.run.nodes["site"].log), "a string", WAIT_S)
        found = STRING.search(self.run.nodes["site"].log)
        assert found is not None
        return found[0]

    def start_host(self, string: str) -> None:
        self.run.hosts["further"] = AWAY
        own = ["--name=further", f"--state={self.run.folder / 'further'}", "--", *SITE]
        self.run.spawn("further", "host", string, *own, env=OWN_DEVICE)

    def train(self, *names: str, hosts: str = "2 of 2 hosts", more: int = 3) -> None:
        """Wait for rounds to which all of these contribute, the site with so many hosts."""

        def together(status: Status) -> bool:
            site = member(status, "site")
            said = "" if site is None else site["accelerators"]
            there = "site" not in names or said.startswith(hosts)
            return there and contributing(status, *names)

        goal = self.run.until(together, f"{names} contribute", WAIT_S)["committed"] + more
        self.run.until(lambda s: s["committed"] >= goal and together(s), "rounds", WAIT_S)

    def check_equal(self, *names: str) -> None:
        """Check that all copies are equal, as the master compares them in each round."""
        status = self.run.until(lambda s: in_sync(s, *names), "all are in sync", WAIT_S)
        assert not [event for event in status["events"] if event["kind"] == "bad"]
        assert not status["copies"]["unequal"], status["copies"]
        self.run.until(lambda s: s["copies"]["equal"] >= len(names), "all are compared", WAIT_S)

    def kill_script(self, name: str, script: str) -> None:
        below = psutil.Process(self.run.nodes[name].process.pid).children(recursive=True)
        mine = [each for each in below if str(EXAMPLES / script) in each.cmdline()[1:3]]
        mine[-1].kill()


def test_unlike_peers_hold_equal_bits_whatever_dies(tmp_path: Path) -> None:
    needs.need(needs.namespaces())
    with Switch(2) as ground, LabRun(ground, tmp_path, []) as lab:
        run = Run(lab)
        lab.start_master(spec(sync_every=8, contributors=4, min_members=2))
        run.join("plain", 29701, (sys.executable, str(EXAMPLES / "fsdp.py")), founder=True)
        run.join("pipeline", 29702, pipeline(2, 29512))
        string = run.start_head()
        run.start_host(string)
        everybody = ["plain", "pipeline", "site"]
        run.train(*everybody, more=5)
        run.check_equal(*everybody)

        run.kill_script("further", "fsdp.py")
        run.kill_script("pipeline", "pipeline.py")
        run.train(*everybody)
        run.check_equal(*everybody)

        lab.nodes["further"].awaited = True
        lab.nodes["further"].signal(signal.SIGKILL)
        run.train(*everybody, hosts="1 of 2 hosts")
        run.start_host(string)
        run.train(*everybody)
        run.check_equal(*everybody)

        lab.kill("site")
        lab.until(lambda s: member(s, "site") is None, "the head is gone", WAIT_S)
        run.start_head()
        run.join("three", 29703, pipeline(3, 29513))
        everybody.append("three")
        run.train(*everybody, more=5)
        run.check_equal(*everybody)
        assert lab.master()["committed"] >= 20
