"""Peers of several hosts, each host a ``holdfast`` process of its own, in one run with others."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.processes.harness import Fleet, own_host, spec
from tests.processes.test_sharded import SCRIPT, join, saved

pytestmark = pytest.mark.slow

STRING = re.compile(r"holdfasthost1\.[\w-]+")


def torchrun(kind: str, peer: int, save: Path, *script: str, hosts: str = "{hosts}") -> list[str]:
    """Return a command of one process on each host."""
    launch = ["-m", "torch.distributed.run", "--nnodes", hosts, "--node-rank", "{host}"]
    where = ["--master-addr", "{head}", "--master-port", "29731", "--nproc-per-node", "1"]
    own = [str(SCRIPT), "--kind", kind, "--peer", str(peer), "--save", str(save), *script]
    return [sys.executable, *launch, *where, *own]


def join_hosts(fleet: Fleet, name: str, *script: str, kind: str = "fsdp", count: int = 2) -> None:
    """Start a head and its hosts, which are called NAME-1 and so on."""
    command = torchrun(kind, len(fleet.nodes), saved(fleet, name), *script)
    fleet.join(name, command=command, listen=f"{own_host()}:0", more=["--hosts", str(count)])
    found = STRING.search(fleet.until_log(name, "on each further host run"))
    assert found is not None
    for number in range(1, count):
        start_host(fleet, f"{name}-{number}", found[0], command)


def start_host(fleet: Fleet, name: str, string: str, command: list[str]) -> None:
    state = fleet.folder / name
    fleet.spawn(name, "host", string, f"--name={name}", f"--state={state}", "--", *command)


def test_a_peer_of_two_hosts_trains_with_a_plain_one(fleet: Fleet) -> None:
    """FSDP2 over both hosts: each holds half of every tensor, and equal bits come of it."""
    fleet.start_master(spec(rounds=6, sync_every=4, contributors=2, pace="lockstep"))
    join(fleet, "plain", "plain", 1, founder=True)
    join_hosts(fleet, "site")
    fleet.until_finished("plain", "site")
    weights = {name: load_file(saved(fleet, name)) for name in ("plain", "site")}
    for key, tensor in weights["plain"].items():
        assert torch.equal(tensor, weights["site"][key]), key
    assert fleet.nodes["site-1"].wait(60) == 0
