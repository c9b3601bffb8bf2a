"""Peers of several hosts, each host a ``holdfast`` process of its own, in one run with others."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from holdfast.protocol.trust.invite import HOST_PREFIX, Invite
from tests.processes.harness import Fleet, own_host, run_command, spec
from tests.processes.test_sharded import SCRIPT, join, saved

pytestmark = pytest.mark.slow

# torch's store listens at all addresses: a port for each process, below those that systems choose.
PORT = 20_000 + os.getpid() % 10_000
STRING = re.compile(r"holdfasthost1\.[\w-]+")


def torchrun(kind: str, peer: int, save: Path) -> list[str]:
    """Return a command of one process on each host."""
    launch = ["-m", "torch.distributed.run", "--nnodes", "{hosts}", "--node-rank", "{host}"]
    where = ["--master-addr", "{head}", "--master-port", str(PORT), "--nproc-per-node", "1"]
    own = [str(SCRIPT), "--kind", kind, "--peer", str(peer), "--save", str(save)]
    return [sys.executable, *launch, *where, *own]


class Site:
    """A peer of two hosts; the further one is called NAME-1."""

    def __init__(self, fleet: Fleet, name: str) -> None:
        self.fleet, self.name = fleet, name
        self.command = torchrun("fsdp", len(fleet.nodes), saved(fleet, name))
        listen, more = f"{own_host()}:0", ["--hosts", "2"]
        fleet.join(name, command=self.command, listen=listen, more=more)
        found = STRING.search(fleet.until_log(name, "on each further host run"))
        assert found is not None
        self.string = found[0]

    def start_host(self) -> None:
        name = f"{self.name}-1"
        state = self.fleet.folder / name
        own = [f"--name={name}", f"--state={state}", "--", *self.command]
        self.fleet.spawn(name, "host", self.string, *own)


def test_a_peer_of_two_hosts_trains_with_a_plain_one(fleet: Fleet) -> None:
    """FSDP2 over both hosts: each holds half of every tensor, and equal bits come of it."""
    fleet.start_master(spec(rounds=6, sync_every=4, contributors=2, pace="lockstep"))
    join(fleet, "plain", "plain", 1, founder=True)
    site = Site(fleet, "site")
    site.start_host()
    fleet.until_finished("plain", "site")
    assert fleet.nodes["site-1"].wait(60) == 0
    weights = {name: load_file(saved(fleet, name)) for name in ("plain", "site")}
    for key, tensor in weights["plain"].items():
        assert torch.equal(tensor, weights["site"][key]), key


def test_what_is_said_to_a_host_that_cannot_take_part(fleet: Fleet, tmp_path: Path) -> None:
    fleet.start_master(spec(sync_every=4, contributors=1, min_members=1))
    fleet.join("site", command=torchrun("fsdp", 0, tmp_path / "w"), more=["--hosts", "2"])
    fleet.strict = False
    found = STRING.search(fleet.until_log("site", "on each further host run"))
    assert found is not None
    invite = fleet.invite("other", role="contributor", founder=False)

    def said(string: str, *command: str) -> str:
        state = tmp_path / "state"
        return run_command("host", string, f"--state={state}", "--patience=1", *command).stderr

    assert "admits a peer to a run" in said(invite, "--", sys.executable)
    assert "is incomplete or damaged" in said(found[0][:-9], "--", sys.executable)
    other = run_command("join", found[0], "--", sys.executable)
    assert "admits a further host of a peer" in other.stderr

    def checked(string: str) -> dict[str, dict[str, str]]:
        home = {"HOLDFAST_HOME": str(tmp_path / "home")}
        report = json.loads(run_command("doctor", string, "--json", env=home).stdout)
        return {each["check"]: each for each in report["findings"]}

    folder = f"/{Invite.decode(invite).run_id[:16]}-"  # as `join` has it
    assert folder in checked(invite)["state folder"]["text"]
    report = checked(found[0])
    assert "fault" not in {each["verdict"] for each in report.values()}, report
    told = {check: each["text"] for check, each in report.items()}
    folder = f"/{Invite.decode(found[0], prefix=HOST_PREFIX).run_id[-16:]}-"  # as `host` has it
    assert folder in told["state folder"]
    assert told["invite"].startswith("for a further host of peer ")
    assert told["head"].startswith("answers at ")
    assert re.match(r"to the head \d+ Mbit/s, from it \d+ Mbit/s", told["bandwidth"])
    assert "the head's: the string is not usable" in checked(found[0][:-9])["clock"]["text"]
    fleet.kill("site")
    assert "`holdfast join --hosts` runs" in checked(found[0])["head"]["fix"]
    assert "needs a command with {host} and {head}" in said(found[0], "--", sys.executable)
    command = torchrun("fsdp", 0, tmp_path / "w")
    assert "is `holdfast join --hosts` running there" in said(found[0], "--", *command)
