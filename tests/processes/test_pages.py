"""The documentation's first run, as a user types it, in an empty folder."""

from __future__ import annotations

import re
import shlex
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.packaging.test_docs import ROOT, blocks, sample, typed, untrue
from tests.processes.harness import (
    WAIT_S,
    Fleet,
    contributing,
    in_sync,
    member,
    run_command,
    spec,
)

pytestmark = pytest.mark.slow

DOCS = ROOT / "docs"
INVITE = re.compile(r"holdfast1\.\S+")


class Shell:
    """A folder, and who types ``holdfast`` there. Everything stays on loopback and in the
    folder.
    """

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self.folder = fleet.folder
        self.env = {
            "HOLDFAST_HOME": str(self.folder / "home"),
            "HOLDFAST_MASTER_LISTEN": "127.0.0.1:0",
            "HOLDFAST_MASTER_HTTP": "127.0.0.1:0",
            "HOLDFAST_MASTER_STATE": str(self.folder / "master"),
            "HOLDFAST_JOIN_LISTEN": "127.0.0.1:0",
            "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin",
        }
        self.invite = ""

    def start(self, name: str, line: str) -> None:
        """A command that goes on."""
        words = shlex.split(line.replace("holdfast1....", self.invite))
        self.fleet.spawn(name, *words, env=self.env)

    def run(self, line: str) -> str:
        """A command that ends, well."""
        done = run_command(*shlex.split(line), cwd=self.folder, env=self.env)
        assert done.returncode == 0, f"{line}: {done.stdout}{done.stderr}"
        return done.stdout

    def wait_for_invite(self) -> None:
        until_s = time.monotonic() + WAIT_S
        while (found := INVITE.search(self.fleet.nodes["master"].log)) is None:
            assert time.monotonic() < until_s, self.fleet.nodes["master"].log
            time.sleep(0.05)
        self.invite = found[0]

    def begin(self) -> None:
        """The master and both peers of the first page, with what is in ``my-run``."""
        master, *joins = quickstart(DOCS / "index.md", "master", "join")
        self.start("master", master)
        self.wait_for_invite()
        told = f"  holdfast join {self.invite} -- python my-run/train.py\n"
        assert told in self.fleet.nodes["master"].log, "the line of the first page"
        for line in joins:
            self.join(line)

    def join(self, line: str) -> None:
        found = re.search(r"--name (\w+)", line)
        assert found is not None
        self.start(found[1], line)


def quickstart(page: Path, *names: str) -> list[str]:
    """A page's lines that begin with one of these commands."""
    lines = [line for block in blocks(page, "sh") for line in typed(block)]
    return [line for line in lines if line.split()[0] in names]


@pytest.mark.new_interpreter
def test_the_first_run_as_it_is_written(fleet: Fleet) -> None:
    """Only lengths are changed: short rounds, until the test stops the run."""
    names = ("init", "master", "join", "dashboard", "export")
    init, *_, export = lines = quickstart(DOCS / "index.md", *names)
    assert [line.split()[0] for line in lines] == [*names[:3], *names[2:]]
    assert quickstart(ROOT / "README.md", *names) == lines
    shell = Shell(fleet)
    shell.run(init)
    toml = fleet.folder / "my-run" / "run.toml"
    text = toml.read_text()
    for key, value in {"rounds": 0, "sync_every": 10, "min_members": 2}.items():
        text = re.sub(rf"^{key} = \d+", f"{key} = {value}", text, flags=re.MULTILINE)
    toml.write_text(text)
    shell.begin()
    fleet.until(lambda s: s["committed"] and contributing(s, "alder", "birch"), "both train")

    fleet.kill("birch")
    fleet.until(lambda s: member(s, "birch") is None, "birch is gone")
    assert not fleet.nodes["alder"].ended_badly()
    shell.join(quickstart(DOCS / "index.md", "join")[1])
    fleet.until(lambda s: in_sync(s, "birch"), "birch is back")
    committed = fleet.until_committed(2)
    assert contributing(committed, "alder", "birch")

    for name in ("alder", "birch"):
        fleet.end(name)
    shell.run(export)
    tensors = load_file(fleet.folder / "model.safetensors")
    assert tensors
    assert all(each.isfinite().all() for each in tensors.values())


def test_a_runs_owner_types_what_the_pages_say(fleet: Fleet) -> None:
    """On a live run with the longer script: whatever needs no other machine, nor a name of one's
    own.
    """
    (script,) = blocks(DOCS / "script.md", "python")
    folder = fleet.folder / "my-run"
    folder.mkdir()
    (folder / "train.py").write_text(script)
    (folder / "run.toml").write_text(
        spec(rounds=2_000, sync_every=50) + "[checkpoint]\nevery_rounds = 1\n"
    )
    shell = Shell(fleet)
    shell.begin()
    until_s = time.monotonic() + WAIT_S
    while not list(fleet.folder.glob("my-run/alder/checkpoints/*.safetensors")):
        assert time.monotonic() < until_s, fleet.nodes["alder"].log
        time.sleep(0.1)
    shown: list[str] = []
    while lines := untrue(sample("docs/operating.md", "where the next round"), *shown):
        assert time.monotonic() < until_s, (lines, shown[-1])
        shown.append(shell.run("status --state master").replace("test  ", "first  "))
    pages = (DOCS / "internet.md", DOCS / "operating.md")
    lines = [line for page in pages for block in blocks(page, "sh") for line in typed(block)]
    elsewhere = re.compile(r"^(master|join|relay)|NAME|3F9A20C1|/mnt|/srv|s3:")
    here = [line for line in dict.fromkeys(lines) if not elsewhere.search(line)]
    assert len(here) > 6
    for line in here:
        shell.run(f"{line} --state master")
    for block in blocks(DOCS / "checkpoints.md", "sh"):
        for line in typed(block):
            shell.run(f"{line} --state my-run/alder")
    assert torch.load(fleet.folder / "model.pt")["weight"].shape == (1, 16)
