"""The documentation's first run, as somebody types it: its files, its commands, in an empty folder."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.packaging.test_docs import ROOT, blocks, typed
from tests.processes.harness import WAIT_S, Fleet, environment

pytestmark = pytest.mark.slow

DOCS = ROOT / "docs"
INVITE = re.compile(r"holdfast1\.\S+")


class Shell:
    """A folder, and who types ``holdfast`` there. Everything stays on loopback and in the folder."""

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
        self.fleet.spawn(
            name, *[word.replace("/tmp/", f"{self.folder}/") for word in words], env=self.env
        )

    def run(self, line: str) -> str:
        """A command that ends, well."""
        done = subprocess.run(
            [sys.executable, "-m", "holdfast", *shlex.split(line)],
            cwd=self.folder,
            env=environment(self.env),
            capture_output=True,
            text=True,
            timeout=WAIT_S,
        )
        assert done.returncode == 0, f"{line}: {done.stdout}{done.stderr}"
        return done.stdout

    def wait_for_invite(self) -> None:
        until_s = time.monotonic() + WAIT_S
        while (found := INVITE.search(self.fleet.nodes["master"].log)) is None:
            assert time.monotonic() < until_s, self.fleet.nodes["master"].log
            time.sleep(0.05)
        self.invite = found[0]

    def begin(self, spec: str, script: str) -> None:
        """Both files, and the three commands of the first page."""
        (self.folder / "run.toml").write_text(spec)
        (self.folder / "train.py").write_text(script)
        lines = [line for block in blocks(DOCS / "index.md", "sh") for line in typed(block)]
        master, *joins = lines
        self.start("master", master)
        self.wait_for_invite()
        for line in joins:
            found = re.search(r"--name (\w+)", line)
            assert found is not None
            self.start(found[1], line)


def without_comments(script: str) -> list[str]:
    lines = (re.sub(r"\s+#.*", "", line) for line in script.splitlines())
    return [line for line in lines if line]


def test_the_first_run_as_it_is_written(fleet: Fleet) -> None:
    (spec,), (script,) = blocks(DOCS / "index.md", "toml"), blocks(DOCS / "index.md", "python")
    assert [spec] == blocks(ROOT / "README.md", "toml")  # the README's is the same
    assert without_comments(script) == without_comments(*blocks(ROOT / "README.md", "python"))
    shell = Shell(fleet)
    shell.begin(spec, script)
    assert [fleet.nodes[name].wait(WAIT_S) for name in ("alder", "birch")] == [0, 0]
    assert torch.load(fleet.folder / "final.pt")["0.weight"].shape == (64, 8)


def test_a_runs_owner_types_what_the_pages_say(fleet: Fleet) -> None:
    """On a live run with the longer script: whatever needs no other machine, nor a name of one's own."""
    (spec,) = blocks(DOCS / "index.md", "toml")
    (script,) = blocks(DOCS / "script.md", "python")
    shell = Shell(fleet)
    shell.begin(
        spec.replace("rounds = 20", "rounds = 0") + "\n[checkpoint]\nevery_rounds = 1\n", script
    )
    until_s = time.monotonic() + WAIT_S
    while not list(fleet.folder.glob("alder/checkpoints/*.safetensors")):
        assert time.monotonic() < until_s, fleet.nodes["alder"].log
        time.sleep(0.1)
    pages = (DOCS / "internet.md", DOCS / "operating.md")
    lines = [line for page in pages for block in blocks(page, "sh") for line in typed(block)]
    elsewhere = re.compile(r"^(master|join|relay)|NAME|3F9A20C1|/mnt|/srv|s3:")
    here = [line for line in dict.fromkeys(lines) if not elsewhere.search(line)]
    assert len(here) > 6
    for line in here:
        shell.run(f"{line} --state master")
    for block in blocks(DOCS / "checkpoints.md", "sh"):
        for line in typed(block):
            shell.run(f"{line} --state alder")
    assert torch.load(fleet.folder / "model.pt")["weight"].shape == (1, 16)
