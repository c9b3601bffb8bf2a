"""Services: files that the service managers accept, and daemons that stop as these expect."""

from __future__ import annotations

import os
import plistlib
import shutil
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.daemon.cli.service_units import (
    FINAL,
    STOP_S,
    ServiceUnit,
    launchd_plist,
    systemd_unit,
)
from holdfast.daemon.exit_codes import ExitCode
from tests.daemon.test_cli import INVITE
from tests.processes.harness import Fleet, environment, spec

ODD = ["a b", 'say "x"', "100%", "$HOME", "back\\slash", "ünï", ""]


def holdfast(*arguments: str, folder: Path, **env: str) -> subprocess.CompletedProcess[str]:
    home = {"HOME": str(folder / "home"), "XDG_CONFIG_HOME": str(folder / "config")}
    return subprocess.run(
        [sys.executable, "-m", "holdfast", "service", *arguments],
        cwd=folder,
        env={**environment(), **home, **env},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="there is no systemd")
@pytest.mark.parametrize("system", [False, True])
def test_systemd_takes_the_unit(tmp_path: Path, system: bool) -> None:
    made = ServiceUnit(
        "peer",
        (sys.executable, "-m", "holdfast", "join", *ODD),
        tmp_path,
        {"PATH": "/usr/bin:/a b", "X": "50% of $Y"},
        system,
        "daemon" if system else "",
    )
    path = tmp_path / "holdfast-peer.service"
    path.write_text(systemd_unit(made))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", *([] if system else ["--user"]), path],
        capture_output=True,
        text=True,
        env={**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)},
        check=False,
    )
    assert [line for line in done.stderr.splitlines() if "holdfast" in line] == []
    assert done.returncode == 0, done.stderr
    assert ("CapabilityBoundingSet=\n" in path.read_text()) == system, "root's powers, if any"
    spoiled = path.read_text().replace("KillMode=mixed", "KillMode=often")
    path.write_text(spoiled)
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", path], capture_output=True, text=True, check=False
    )
    assert "kill mode" in done.stderr, "it looks at what is in the file"


def test_words_are_spelt_so_that_they_come_back() -> None:
    """Unquote words by systemd's rules: quotes and C escapes, then %% and $$."""
    made = ServiceUnit("x", ODD, Path("/"), {}, False)
    line = next(text for text in systemd_unit(made).splitlines() if text.startswith("ExecStart="))
    words: list[str] = []
    rest = iter(line.removeprefix("ExecStart="))
    for start in rest:
        word = ""
        if start == " ":
            continue
        assert start == '"'
        while (character := next(rest)) != '"':
            word += next(rest) if character == "\\" else character
        words.append(word)
    assert [each.replace("%%", "%").replace("$$", "$") for each in words] == ODD


def test_a_service_of_the_machine_runs_as_somebody(tmp_path: Path) -> None:
    join = ("join", INVITE.encode(), "--", "python", "train.py")
    done = holdfast("install", "--system", "--", *join, folder=tmp_path, SUDO_USER="")
    assert done.returncode == ExitCode.USAGE
    assert "--run-as USER" in done.stderr


def test_launchd_gets_a_property_list() -> None:
    made = ServiceUnit("peer", ("/bin/python", *ODD), Path("/runs"), {"PATH": "/bin"}, True, "ada")
    told = plistlib.loads(launchd_plist(made, Path("/log")))
    assert told["Label"] == "holdfast.peer"
    assert told["ProgramArguments"] == ["/bin/python", *ODD]
    assert (told["WorkingDirectory"], told["UserName"]) == ("/runs", "ada")
    assert told["KeepAlive"] == {"SuccessfulExit": False}
    assert told["ExitTimeOut"] == STOP_S


def test_it_is_installed_listed_and_removed(tmp_path: Path) -> None:
    join = ("join", INVITE.encode(), "--name", "a b", "--", "python", "train.py", "--lr", "1")
    done = holdfast("install", "--", *join, folder=tmp_path, PATH="/usr/bin:/bin")
    assert (done.returncode, done.stderr) == (0, "")
    path = tmp_path / "config/systemd/user/holdfast-peer.service"
    assert f"wrote {path}" in done.stdout
    assert "systemctl --user enable --now holdfast-peer.service" in done.stdout
    assert stat.S_IMODE(path.stat().st_mode) == 0o600, "an invite is a secret"
    text = path.read_text()
    assert '"--name" "a b" "--" "python" "train.py" "--lr" "1"' in text
    assert f"WorkingDirectory={tmp_path}\n" in text
    assert 'Environment="PATH=/usr/bin:/bin"' in text
    (tmp_path / "run.toml").write_text(spec())
    assert holdfast("install", "--", "master", "run.toml", folder=tmp_path).returncode == 0
    listed = holdfast("status", folder=tmp_path).stdout.splitlines()
    assert [line.split()[0] for line in listed] == ["master", "peer"]
    done = holdfast("uninstall", folder=tmp_path)
    assert (done.returncode, "--name" in done.stderr) == (ExitCode.USAGE, True)
    assert holdfast("uninstall", "--name", "peer", folder=tmp_path).returncode == 0
    assert not path.exists()
    done = holdfast("install", "--manager", "launchd", "--", *join, folder=tmp_path)
    (made,) = (tmp_path / "home/Library/LaunchAgents").iterdir()
    assert plistlib.loads(made.read_bytes())["ProgramArguments"][3:] == list(join)


@pytest.mark.parametrize(
    ("command", "status", "named"),
    [
        (["status"], ExitCode.USAGE, "`master ...` or `join ...`"),
        (["join"], ExitCode.USAGE, "INVITE"),
        (["join", "holdfast1.zzz"], ExitCode.INVITE, "invite"),
        (["master", "none.toml"], ExitCode.CONFIG, "none.toml"),
        (["master", "--frob"], ExitCode.USAGE, "--frob"),
    ],
)
def test_a_command_that_cannot_start_is_not_installed(
    command: list[str], status: int, named: str, tmp_path: Path
) -> None:
    done = holdfast("install", "--", *command, folder=tmp_path)
    assert (done.returncode, named in done.stderr) == (status, True), done.stderr
    assert not (tmp_path / "config").exists()


# ---------------------------------------------------------------- signals


@pytest.mark.fault(
    "a service is stopped",
    "SIGTERM",
    "it drains, and ends with status 0; a second one ends it at once",
)
def test_term_drains_and_a_second_one_stops_at_once(tmp_path: Path) -> None:
    """systemd sends SIGTERM once; an impatient operator sends it again."""
    fleet = Fleet(tmp_path)
    try:
        master = fleet.start_master(spec())
        for name in ("alder", "birch"):
            fleet.join(name, command=())
        fleet.until(lambda s: s["counts"]["live"] == 2, "both are here")
        alder, birch = fleet.nodes["alder"], fleet.nodes["birch"]
        while not (fleet.peer("alder")["attached"] and fleet.peer("birch")["attached"]):
            assert alder.process.poll() is None
        alder.signal(signal.SIGTERM)
        assert alder.wait() == 0
        assert "leaving after the round in flight" in alder.log
        fleet.until(lambda s: s["counts"]["live"] == 1, "one has left")
        assert any("leaves: stopped by its operator" in e["text"] for e in fleet.master()["events"])
        master.signal(signal.SIGSTOP)  # nobody lets the other one go
        birch.signal(signal.SIGTERM)
        while "leaving after" not in birch.log:
            assert birch.process.poll() is None
        assert birch.process.poll() is None, "it drains"
        birch.signal(signal.SIGTERM)
        assert birch.wait() == ExitCode.INTERRUPTED, "without waiting for the master"
        master.signal(signal.SIGCONT)
        master.signal(signal.SIGTERM)
        assert master.wait() == 0
    finally:
        fleet.stop_all()


def test_errors_that_need_an_operator_are_not_retried() -> None:
    again = {ExitCode.FAILED, ExitCode.ADDRESS, ExitCode.UNREACHABLE}
    others = {
        ExitCode.OK,
        ExitCode.VIOLATION,
        ExitCode.DIFFERS,
        ExitCode.UNFIT,
        ExitCode.INTERRUPTED,
    }
    assert set(FINAL) | again | others == set(ExitCode)
    assert not set(FINAL) & again
