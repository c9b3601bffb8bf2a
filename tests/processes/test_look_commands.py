"""``peers``, ``rounds``, ``events`` and ``watch`` with a real run and a restart of its master."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import httpx
import pytest

from holdfast.protocol.network.socket_options import UNPACED
from tests.processes.harness import WAIT_S, Fleet, Polls, environment, member, spec

COLUMNS, LINES = 80, 24
NAME = "train.example.org"  # that the master's owner has given it


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """A run of two: one trains, the other keeps a copy."""
    fleet = Fleet(tmp_path_factory.mktemp("looking"))
    try:
        fleet.start_master(spec(min_members=1), more=("--http-host", NAME))
        fleet.join("alder", founder=True)
        fleet.join("birch", command=())
        fleet.until(lambda s: s["committed"] >= 3 and s["counts"]["live"] == 2, "three rounds")
        yield fleet
    finally:
        fleet.stop_all()


def said(fleet: Fleet, *arguments: str, at: str = "master") -> str:
    done = subprocess.run(
        [*HOLDFAST, *arguments, "--state", str(fleet.folder / at)],
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "\x1b" not in done.stdout, "plain where it is no terminal"
    return done.stdout


HOLDFAST = (sys.executable, "-m", "holdfast")


def test_a_daemon_is_read_under_its_own_names_only(fleet: Fleet) -> None:
    for node, host, status in (
        ("master", NAME, 200),
        ("master", f"other.{NAME}", 421),
        ("alder", "localhost:1", 200),
        ("alder", NAME, 421),
    ):
        url = fleet.nodes[node].control().url
        told = httpx.get(f"{url}/api/status", headers={"host": host})
        assert told.status_code == status, (node, host)


def test_members_are_listed(fleet: Fleet) -> None:
    heading, *rows = said(fleet, "peers").splitlines()
    assert heading.split()[:4] == ["#", "peer", "name", "role"]
    by_name = {row.split()[2]: row for row in rows}
    assert sorted(by_name) == ["alder", "birch"]
    assert "waiting for its trainer" in by_name["birch"]
    told = json.loads(said(fleet, "peers", "--json"))["peers"]
    assert {row["name"]: row["in_sync"] for row in told}["alder"] is True
    assert said(fleet, "peers", "--gone") == "no peer has left\n"


def test_rounds_are_listed_the_newest_first(fleet: Fleet) -> None:
    told = json.loads(said(fleet, "rounds", "--limit", "2", "--json"))["rounds"]
    assert [row["outcome"] for row in told] == ["committed", "committed"]
    assert told[0]["round"] == told[1]["round"] + 1
    assert told[0]["names"] == ["alder"]
    assert abs(told[0]["at"] - time.time()) < 60
    assert "committed" in said(fleet, "rounds").splitlines()[1]


def test_events_are_filtered(fleet: Fleet) -> None:
    everything = json.loads(said(fleet, "events", "--json"))["events"]
    joins = json.loads(said(fleet, "events", "--kind", "join", "--json"))["events"]
    assert [row["text"] for row in joins] == [
        row["text"] for row in everything if row["kind"] == "join"
    ]
    assert {row["name"] for row in joins} == {"alder", "birch"}
    only = said(fleet, "events", "--kind", "join", "--peer", "birch", "--text", "JOIN")
    assert "birch" in only
    assert "alder" not in only
    assert len(said(fleet, "events", "--limit", "1").splitlines()) == 1
    assert said(fleet, "events", "--text", "no such text") == ""


def test_a_peers_status_tells_how_its_links_do(fleet: Fleet) -> None:
    told = json.loads(said(fleet, "status", "--json", at="alder"))
    (link,) = told["links"]
    assert link["lanes"] >= 1
    assert 0 < link["sent_bytes"] <= told["bulk_sent_bytes"]
    assert 0 <= link["retransmitted_bytes"] <= told["bulk_retransmitted_bytes"]
    # Over a path as short as this machine's BBR is not asked for.
    assert {*link["congestion"]} <= {told["congestion"]["used"], *UNPACED}
    assert told["congestion"]["wanted"] == "bbr"
    lines = said(fleet, "status", at="alder").splitlines()
    (row,) = (after for head, after in pairwise(lines) if head.startswith("linked to  connections"))
    assert row.split()[0] == "birch"
    assert row.split()[-1] == "%"


class Screen:
    """A command on a terminal of 80 by 24."""

    def __init__(self, *arguments: str) -> None:
        self.pid, self.file = pty.fork()
        if self.pid == 0:
            os.execvpe(sys.executable, [*HOLDFAST, *arguments], environment({"TERM": "xterm"}))
        fcntl.ioctl(self.file, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, COLUMNS, 0, 0))
        self.text = ""

    def until(self, wanted: str) -> str:
        """Read until a text is shown; return everything shown since the last call."""
        until_s = time.monotonic() + WAIT_S
        while wanted not in self.text and time.monotonic() < until_s:
            if select.select([self.file], [], [], 1.0)[0]:
                self.text += os.read(self.file, 65_536).decode(errors="replace")
        before, found, self.text = self.text.partition(wanted)
        assert found, f"{wanted!r} is not shown: {before[-3_000:]}"
        return before

    def press(self, key: str) -> int:
        """Press a key and return the exit status."""
        os.write(self.file, key.encode())
        until_s = time.monotonic() + WAIT_S
        while time.monotonic() < until_s:
            if select.select([self.file], [], [], 0.1)[0]:
                try:
                    self.text += os.read(self.file, 65_536).decode(errors="replace")
                except OSError:  # it has ended
                    break
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def test_a_watcher_sees_the_run_and_outlives_its_master(fleet: Fleet) -> None:
    state = ("--state", str(fleet.folder / "master"))
    screen = Screen("watch", *state)
    log = (fleet.folder / "watch.txt").open("w+")
    piped = subprocess.Popen([*HOLDFAST, "watch", *state], stdout=log, env=environment())
    followed = subprocess.Popen(
        [*HOLDFAST, "events", "--follow", "--json", "--kind", "run", "--limit", "9", *state],
        stdout=subprocess.PIPE,
        env=environment(),
        text=True,
    )
    try:
        screen.until("alder")
        screen.until("birch")
        screen.until("committed by alder")
        wait_for_line(Path(log.name), "committed by alder")
        assert followed.stdout is not None
        assert any("supplied the initial weights" in line for line in followed.stdout)
        fleet.nodes["master"].process.kill()
        fleet.nodes["master"].wait()
        screen.until("the master has not answered")
        fleet.restart_master()
        screen.until("training")
        fleet.until(lambda s: s["counts"]["live"] == 2, "both are back")
        fleet.act("pause", {})
        screen.until("paused by")
        assert screen.press("q") == 0
        row = json.loads(next(line for line in followed.stdout if "paused" in line))
        assert (row["kind"], row["text"]) == ("run", "paused")
        wait_for_line(Path(log.name), "  paused, 2 members")
    finally:
        fleet.act("resume", {})
        for process in (piped, followed):
            process.send_signal(signal.SIGINT)
            process.communicate()
        log.close()
    assert (piped.returncode, followed.returncode) == (0, 0)
    lines = Path(log.name).read_text().splitlines()
    assert any(line.endswith("training, 2 members") for line in lines)


def wait_for_line(path: Path, wanted: str) -> None:
    polls = Polls(WAIT_S)
    while wanted not in path.read_text():
        assert polls.wait(), path.read_text()


def test_a_peer_is_watched_too_until_ctrl_c(fleet: Fleet) -> None:
    screen = Screen("watch", "--state", str(fleet.folder / "birch"))
    screen.until("birch (")
    screen.until("trainer: none")
    assert screen.press("\x03") == 0


def test_a_checkpoint_is_written_when_its_owner_wants_it(fleet: Fleet) -> None:
    text = said(fleet, "checkpoint", "now")
    assert text.startswith("writing: ")
    assert text.count("alder (") == text.count("birch (") == 1

    def written(name: str) -> bool:
        events, found = fleet.master()["events"], member(fleet.master(), name)
        assert found is not None
        wanted = f"{name} ({found['peer'][:8]}) has written checkpoint "
        return any(event["text"].startswith(wanted) for event in events)

    fleet.until(lambda _: written("alder") and written("birch"), "both have written one")
    assert list(fleet.folder.glob("birch/checkpoints/*.safetensors"))
