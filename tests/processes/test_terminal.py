"""What ``join`` and ``master`` print: in a terminal, into a log, and on request."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from urllib.error import HTTPError

import pytest

from holdfast.daemon.process.exit_codes import ExitCode
from tests.processes.harness import (
    EXIT_S,
    TRAINER,
    Fleet,
    environment,
    member,
    run_command,
    spec,
)
from tests.terminal import Terminal

pytestmark = pytest.mark.slow

TRAIN = f"exec {sys.executable} {TRAINER}"
BAR = "printf '\\r 10%%|#   '; until test -e go; do sleep 0.05; done; printf '\\r 90%%|### \\n';"
GARBAGE = (
    "printf 'half a'; sleep 0.1; printf ' line\\n\\033[2J\\033]0;title\\007\\377\\376 bin\\n';"
)


@pytest.fixture
def terminal() -> Iterator[Terminal]:
    made = Terminal(columns=70)
    yield made
    made.close()


class Shown:
    """``holdfast join`` in a terminal."""

    def __init__(self, fleet: Fleet, terminal: Terminal, *options: str, script: str) -> None:
        body = {"role": "contributor", "uses": 1, "hours": 1, "founder": True}
        invite = str(fleet.act("invite", body)["invite"])
        state = str(fleet.folder / "shown")
        here = ["--state", state, "--listen", "127.0.0.1:0", "--http", "127.0.0.1:0"]
        words = ["join", invite, "--name", "alder", *here, *options, "--", "sh", "-c", script]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "holdfast", *words],
            stdin=terminal.end,
            stdout=terminal.end,
            stderr=terminal.end,
            env=environment({"TERM": "xterm"}),
            cwd=fleet.folder,
            start_new_session=True,
        )
        self._terminal = terminal

    def end(self, number: signal.Signals | None = signal.SIGINT) -> int:
        """Send a signal, read on, and return the exit status."""
        if number is not None:
            self.process.send_signal(number)
        self._terminal.until(lambda: self.process.poll() is not None, "it has ended")
        while self._terminal.read():
            pass
        return self.process.wait(EXIT_S)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


def test_a_terminal_shows_how_the_run_goes_below_what_the_script_prints(
    fleet: Fleet, terminal: Terminal
) -> None:
    fleet.start_master(spec(min_members=1, rounds=1_000))
    shown = Shown(fleet, terminal, script=f"{GARBAGE} {BAR} {TRAIN}")
    try:
        terminal.until_shown(" 10%|#")
        (fleet.folder / "go").touch()
        terminal.until_shown("alder joined as a")
        terminal.until(lambda: "contributor  round " in terminal.lines[-1], "the living line")
        terminal.until(lambda: "/1000" in terminal.lines[-1], "with the rounds")
        assert len(terminal.lines[-1]) < 70
        assert "half a line" in terminal.lines
        assert "\\xff\\xfe bin" in terminal.lines
        assert any(" 90%|###" in line for line in terminal.lines)
        fleet.join("birch", "--rank", "1")
        terminal.until_shown("birch has joined the run")
        fleet.kill("birch")
        terminal.until_shown("birch is gone")
        terminal.until(lambda: re.search(r"round ([3-9]|\d\d)", terminal.lines[-1]), "some rounds")
        assert shown.end() == ExitCode.OK
    finally:
        shown.kill()
    lines = [line for line in terminal.lines if line]
    assert sum(line.startswith("leaving after the round") for line in lines) == 1
    assert not any(line.startswith("contributor  ") for line in lines), "the living line is gone"
    assert terminal.lines[-1] == ""
    assert "left the run" in lines
    assert not any("master is gone" in line for line in lines), "it left by itself"
    assert any(line.startswith("took part for ") and " rounds, " in line for line in lines)
    assert any(line.startswith("the weights of step ") for line in lines)
    command = next(line.split() for line in lines if line.startswith("  holdfast export "))
    out = fleet.folder / "model.safetensors"
    exported = run_command("export", *command[2:-1], str(out))
    assert exported.returncode == 0, exported.stderr
    assert out.stat().st_size > 0


def test_a_quiet_peer_prints_errors_only(fleet: Fleet) -> None:
    fleet.start_master(spec(min_members=1, rounds=3), more=("--quiet",))
    node = fleet.join(
        "alder", founder=True, command=("sh", "-c", f"echo hello; {TRAIN}"), more=("-q",)
    )
    assert node.wait() == 0
    assert node.log == ""
    # A script that ended by itself could be heard of first.
    failing = fleet.join("birch", command=("sh", "-c", "echo hello; exec sleep 60"), more=("-q",))
    assert failing.wait() == ExitCode.REFUSED, "the run is over"
    assert "hello" not in failing.log
    assert failing.log.startswith("holdfast: ")
    assert fleet.nodes["master"].log == ""


@pytest.mark.fault(
    "a script fails before it has ever attached",
    "its exit status, and that no trainer has attached yet",
    "the peer leaves at once, with the script's last lines",
)
def test_a_script_that_fails_at_once_ends_the_peer(fleet: Fleet, tmp_path: Path) -> None:
    fleet.start_master(spec(min_members=1))
    script = tmp_path / "train.py"
    script.write_text("print('about to start')\nimport nonesuch\n")
    node = fleet.join("alder", founder=True, command=(sys.executable, str(script)))
    assert node.wait() == ExitCode.TRAINER
    assert "the training command ended with exit status 1 before it attached" in node.log
    error = node.log.partition("before it attached")[2]
    assert "about to start" in error
    assert "ModuleNotFoundError: No module named 'nonesuch'" in error
    assert f"install nonesuch for {sys.executable}" in error
    assert "starting it again" not in node.log
    fleet.until(lambda s: member(s, "alder") is None, "it has left")
    cause = "1 before it attached: ModuleNotFoundError: No module named 'nonesuch'"
    assert cause in fleet.nodes["master"].log


def test_a_script_that_ends_before_the_run_says_so(fleet: Fleet, tmp_path: Path) -> None:
    (tmp_path / "crash").touch()
    fleet.start_master(spec(min_members=1))
    script = f"({TRAIN} --crash {tmp_path / 'crash'}); exit 0"
    node = fleet.join("alder", founder=True, command=("sh", "-c", script))
    node.wait()
    fleet.until(lambda s: member(s, "alder") is None, "it has left")
    for each in (node, fleet.nodes["master"]):
        assert "ended with exit status 0 before the run did" in each.log


def test_a_script_that_never_attaches_is_no_success(fleet: Fleet) -> None:
    fleet.start_master(spec(min_members=1))
    node = fleet.join("alder", founder=True, command=("true",))
    assert node.wait() == ExitCode.TRAINER
    assert "ended without holdfast.attach" in node.log


# ---------------------------------------------------------------- holdfast logs


def lines_of(fleet: Fleet, *arguments: str, name: str) -> Sequence[dict[str, object]]:
    state = str(fleet.nodes[name].folder)
    done = run_command("logs", *arguments, "--state", state, "--json")
    assert done.returncode == 0, done.stderr
    found: Sequence[dict[str, object]] = json.loads(done.stdout)["lines"]
    return found


def test_a_peers_log_is_read_at_its_machine_with_the_token(fleet: Fleet) -> None:
    fleet.start_master(spec(min_members=1))
    script = f"for n in 1 2 3; do echo line $n; done; {TRAIN}"
    fleet.join("alder", founder=True, command=("sh", "-c", script))
    fleet.until(lambda s: s["committed"] >= 1, "it trains")
    fleet.until_log("alder", "the trainer has attached")  # it looks once a second

    own = lines_of(fleet, name="alder")
    assert [line["text"] for line in own if line["source"] == "trainer"] == [
        "line 1",
        "line 2",
        "line 3",
    ]
    assert "the trainer has attached" in [line["text"] for line in own]
    newest, own = lines_of(fleet, "-n", "2", name="alder"), lines_of(fleet, name="alder")
    assert list(newest) in [list(own[at : at + 2]) for at in range(len(own))], "more may have come"
    plain = run_command("logs", "--state", str(fleet.nodes["alder"].folder))
    assert "  trainer  line 2\n" in plain.stdout
    refused = run_command("logs", "--state", str(fleet.nodes["master"].folder))
    assert refused.returncode != 0, "a master shows no machine's log"

    def ask(query: str, token: str | None) -> tuple[int, dict[str, object]]:
        control = fleet.nodes["alder"].control()
        request = urllib.request.Request(f"{control.url}/api/logs{query}")
        if token is not None:
            request.add_header("authorization", f"Bearer {token or control.token}")
        try:
            with urllib.request.urlopen(request) as answer:
                return answer.status, json.loads(answer.read())
        except HTTPError as error:
            return error.code, json.loads(error.read())

    assert ask("?lines=5", None)[0] == ask("?lines=5", "wrong")[0] == 401
    status, answer = ask("?lines=5", "")
    assert (status, answer["peer"]) == (200, "alder")
    assert ask("?lines=0", "")[0] == 400


def test_new_lines_are_followed(fleet: Fleet, tmp_path: Path) -> None:
    fleet.start_master(spec(min_members=1))
    go = tmp_path / "go"
    script = f"echo early; while test ! -e {go}; do sleep 0.05; done; echo late; {TRAIN}"
    fleet.join("alder", founder=True, command=("sh", "-c", script))
    fleet.until(lambda s: len(s["members"]) == 1, "it is there")
    state = str(fleet.nodes["alder"].folder)
    follow = subprocess.Popen(
        [sys.executable, "-m", "holdfast", "logs", "-f", "--json", "--state", state],
        stdout=subprocess.PIPE,
        env=environment(),
        text=True,
    )
    try:
        assert follow.stdout is not None
        texts = []
        for line in follow.stdout:
            texts.append(json.loads(line)["text"])
            if "early" in texts:
                go.touch()
            if "the trainer has attached" in texts:
                break
    finally:
        follow.kill()
        follow.communicate()
    assert texts.count("early") == texts.count("late") == 1
    assert texts.index("early") < texts.index("late")


# ---------------------------------------------------------------- holdfast dashboard


def test_the_page_is_opened_signed_in(fleet: Fleet, tmp_path: Path) -> None:
    node = fleet.start_master(spec(min_members=1))
    control = node.control()
    address = f"{control.url}/#token={control.token}"
    state = str(node.folder)
    printed = run_command("dashboard", "--print", "--state", state)
    assert printed.stdout == address + "\n"

    opened = tmp_path / "opened"
    browser = tmp_path / "browser"
    browser.write_text(f'#!/bin/sh\nprintf %s "$1" > {opened}\n')
    browser.chmod(0o700)
    desktop = {"DISPLAY": ":0", "BROWSER": f"{browser} %s"}
    command = [sys.executable, "-m", "holdfast", "dashboard", "--state", state]
    clean = {name: value for name, value in environment().items() if name != "SSH_CONNECTION"}

    def run(**more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command, env={**clean, **more}, capture_output=True, text=True, check=False
        )

    assert "opened the page of the master" in run(**desktop).stdout
    assert opened.read_text() == address
    over_ssh = run(**desktop, SSH_CONNECTION="10.0.0.2 50000 10.0.0.1 22", USER="ada")
    assert over_ssh.stdout == address + "\n"
    port = control.url.rpartition(":")[2]
    assert f"ssh -N -L {port}:127.0.0.1:{port} ada@10.0.0.1" in over_ssh.stderr
    without = {k: v for k, v in os.environ.items() if k in ("DISPLAY", "WAYLAND_DISPLAY")}
    if not without:
        assert run().stdout == address + "\n"
