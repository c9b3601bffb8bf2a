"""The command line as users see it: help texts, and one clear line and exit status per mistake.

Wrong uses that need no daemon run in this process; everything else is a real ``holdfast`` process.
None of them starts a trainer that imports torch.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import attrs
import click
import pytest

import holdfast
from holdfast.daemon.cli.command_line import SECTIONS, commands, main
from holdfast.daemon.cli.options import screen
from holdfast.daemon.process.exit_codes import ExitCode
from holdfast.daemon.process.paths import locked
from holdfast.protocol.addresses import Address
from holdfast.protocol.errors import UserError
from holdfast.protocol.messages import Role
from holdfast.protocol.trust.invite import Invite
from tests.processes.harness import Fleet, Node, member, run_command, spec

ROOT = Path(__file__).resolve().parents[2]
INVITE = Invite(
    run_id="ab" * 16,
    addresses=(Address("127.0.0.1", 1),),
    fingerprint="cd" * 32,
    token="token",
    role=Role.CONTRIBUTOR,
    expires_s=4_000_000_000,
)


@attrs.frozen
class Said:
    """The outcome of a command."""

    status: int
    out: str
    err: str

    @property
    def line(self) -> str:
        """The line that names the error."""
        assert "Traceback" not in self.err, self.err
        lines = [line for line in self.err.splitlines() if line.strip()]
        told = [line for line in lines if line.startswith(("holdfast: ", "Error: "))]
        assert len(told) == 1, self.err
        assert len(lines) <= 4, "the line, a hint, at most click's usage: " + self.err
        return told[0]


Run = Callable[..., Said]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> Run:
    """Run ``holdfast ARGUMENTS`` in this process, with an empty data home."""
    for name in list(os.environ):
        if name.startswith("HOLDFAST_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOLDFAST_HOME", str(tmp_path / "home"))

    def call(*arguments: str, **env: str) -> Said:
        with monkeypatch.context() as patch:
            patch.setattr(sys, "argv", ["holdfast", *arguments])
            for name, value in env.items():
                patch.setenv(name, value)
            capfd.readouterr()
            with pytest.raises(SystemExit) as ended:
                main()
        out, err = capfd.readouterr()
        return Said(int(ended.value.code or 0), out, err)

    return call


@pytest.fixture
def run_toml(tmp_path: Path) -> str:
    path = tmp_path / "run.toml"
    path.write_text(spec())
    return str(path)


# ---------------------------------------------------------------- help


def test_version(run: Run) -> None:
    said = run("--version")
    assert (said.status, said.err) == (0, "")
    assert holdfast.__version__ in said.out


def all_commands(group: click.Group, *path: str) -> list[tuple[str, ...]]:
    """The names of every command, those of groups within the group too."""
    found: list[tuple[str, ...]] = []
    for name, command in sorted(group.commands.items()):
        inner = (*path, name)
        found += all_commands(command, *inner) if isinstance(command, click.Group) else [inner]
    return found


@pytest.mark.parametrize("names", all_commands(commands), ids=" ".join)
def test_every_command_has_help_with_an_example(run: Run, names: tuple[str, ...]) -> None:
    said = run(*names, "--help")
    assert said.status == 0
    assert re.search(rf"Examples?:\n\s+holdfast {' '.join(names)}\b", said.out), said.out


def test_without_a_command_it_shows_what_there_is(run: Run) -> None:
    said = run()
    assert said.status == ExitCode.USAGE
    for name in commands.commands:
        assert name in said.err
    assert run("-h") == run("--help")
    assert run("join", "-h") == run("join", "--help")
    assert run("join", "-h").status == 0


# ---------------------------------------------------------------- forget


def test_what_a_peer_left_is_listed_and_removed_and_nothing_else(run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "home" / "peers" / "5f9d2c1a0b7e4d35-9c41d0e2b87f6a53"
    (folder / "checkpoints").mkdir(parents=True)
    for name in ("identity.key", ".authority.pem.x", "trainer-0-of-2.safetensors", "checkpoints/a"):
        (folder / name).write_bytes(bytes(500))
    assert run("forget").out == f"5f9d2c1a  2.0 kB in {folder}\n"
    foreign = folder / "train.py"
    foreign.touch()
    refused = run("forget", "5f9d")
    assert (refused.status, "also holds train.py" in refused.line) == (ExitCode.CONFIG, True)
    foreign.unlink()
    with locked(folder):
        assert run("forget", "5f9d").status == ExitCode.ADDRESS, "a process uses it"
    assert run("forget", "abc").status == run("forget", str(tmp_path)).status == ExitCode.USAGE
    assert run("forget", "5f9d").out == f"removed 2.0 kB in {folder}\n"
    assert not folder.exists()
    assert "no peer has left anything" in run("forget").out


# ---------------------------------------------------------------- wrong use: 2


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--nonsense"], "--nonsense"),
        (["frobnicate"], "frobnicate"),
        (["join"], "INVITE"),
        (["master"], "RUN_TOML"),
        (["master", "run.toml", "more"], "more"),
        (["master", "--journal", "copy", "--state", "other"], "omit --state"),
        (["master", "--journal", "postgresql://host/runs"], "RUN_TOML"),
        (["master", "--state", "there", "--key-file", "run.key"], "--journal URL"),
        (["standby"], "RUN_TOML"),
        (["master", "run.toml", "--listen", "nowhere"], "--listen"),
        (["master", "run.toml", "--listen", "host:99999"], "99999"),
        (["master", "run.toml", "--http", "::1:x"], "--http"),
        (["master", "run.toml", "--advertise", "a b:1"], "--advertise"),
        (["join", "x", "--max-upload", "0"], "--max-upload"),
        (["join", "x", "--max-upload", "nan"], "--max-upload"),
        (["join", "x", "--patience", "-1"], "--patience"),
        (["join", "x", "--name", ""], "--name"),
        (["join", "x", "--name", "a\nb"], "--name"),
        (["join", "x", "--name", "n" * 65], "--name"),
        (["invite", "--uses", "0"], "--uses"),
        (["invite", "--hours", "0"], "--hours"),
        (["invite", "--hours", "1e9"], "--hours"),
        (["invite", "--role", "king"], "--role"),
        (["kick"], "PEER"),
        (["config", "plan", "--params", "many"], "--params"),
        (["demo", "--rounds", "1"], "--rounds"),
        (["--log-level", "loud", "status"], "--log-level"),
    ],
)
def test_a_wrong_option_or_argument_is_named(run: Run, arguments: list[str], named: str) -> None:
    said = run(*arguments)
    assert said.status == ExitCode.USAGE
    assert named in said.line


@pytest.mark.parametrize("variable", ["HOLDFAST_JOIN_NAMES", "HOLDFAST_LOGLEVEL"])
def test_a_misspelt_variable_is_named(run: Run, variable: str) -> None:
    said = run("status", **{variable: "x"})
    assert said.status == ExitCode.USAGE
    assert variable in said.line


def test_variables_that_others_set_are_named_and_ignored(run: Run) -> None:
    """Kubernetes sets some for a service of this name, in whichever pod."""
    names = ("HOLDFAST_PORT", "HOLDFAST_MASTER_PORT", "HOLDFAST_MASTER_HTTP_PORT")
    said = run("forget", **dict.fromkeys(names, "tcp://10.0.0.1:80"))
    assert said.status == 0
    assert all(name in said.err for name in names)


def test_every_variable_that_is_read_is_known(run: Run) -> None:
    read = (path for path in [*ROOT.glob("daemon/**/*.py"), *ROOT.glob("docker/*.yaml")])
    names = {
        name for path in read for name in re.findall(r"\bHOLDFAST_[A-Z_]*[A-Z]\b", path.read_text())
    }
    said = run("forget", **dict.fromkeys(names, ""))
    assert (said.status, said.err) == (0, "")


def test_closed_standard_streams_are_no_fault(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("stdin", "stdout", "stderr"):
        monkeypatch.setattr(sys, name, None)
    assert run("forget").status == 0
    with screen(quiet=False) as shown, sys.stdin, sys.stdout, sys.stderr:
        shown.tell("to nobody")


def test_options_come_from_variables_and_flags_win(run: Run) -> None:
    said = run("join", "x", HOLDFAST_JOIN_PATIENCE="often")
    assert (said.status, "--patience" in said.line) == (ExitCode.USAGE, True)
    said = run("join", "x", "--patience", "3", HOLDFAST_JOIN_PATIENCE="often")
    assert said.status == ExitCode.INVITE, "it got as far as the invite"
    said = run("master", "x.toml", HOLDFAST_MASTER_LISTEN="127.0.0.1:1 nowhere")
    assert "nowhere" in said.line
    said = run("status", HOLDFAST_CHECKPOINT_LIST_AS_JSON="x")
    assert said.status == ExitCode.UNREACHABLE, "an option of a command within a command"
    said = run("status", HOLDFAST_SOCKET="/tmp/x", HOLDFAST_MEMBER="a", HOLDFAST_LOG_LEVEL="info")
    assert said.status == ExitCode.UNREACHABLE, "what a trainer's environment holds is known"


# ---------------------------------------------------------------- run.toml: 3


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-8"])
def test_text_files_of_other_systems_are_read(run: Run, tmp_path: Path, encoding: str) -> None:
    text = '[run]\r\nname = "ünï"\r\n\r\n[reduce]\rlanes = 2\r\n'
    (tmp_path / "run.toml").write_bytes(text.encode(encoding))
    said = run("config", "check", str(tmp_path / "run.toml"))
    assert (said.status, said.err) == (0, "")
    (tmp_path / "invite").write_bytes(f"{INVITE.encode()}\r\n".encode(encoding))
    said = run("join", f"@{tmp_path / 'invite'}", "--patience", "0.1", "--", "true")
    assert said.status == ExitCode.UNREACHABLE, said.err
    assert Invite.decode(f"\ufeff{INVITE.encode()}\r\n") == INVITE, "of a shell's $(cat invite)"
    (tmp_path / "run.toml").write_bytes("[run] # \xfc".encode("latin-1"))
    assert "is not UTF-8 text" in run("config", "check", str(tmp_path / "run.toml")).line


def test_a_run_toml_that_cannot_be_read(run: Run, tmp_path: Path) -> None:
    missing = tmp_path / "none.toml"
    said = run("master", str(missing))
    assert said.status == ExitCode.CONFIG
    assert str(missing) in said.line
    assert run("master", str(tmp_path)).status == ExitCode.CONFIG


def test_a_state_directory_that_cannot_be_one(run: Run, run_toml: str) -> None:
    said = run("master", run_toml, "--state", f"{run_toml}/below")
    assert said.status == ExitCode.CONFIG
    assert "cannot use" in said.line


def test_a_password_for_the_database_stands_in_no_command(run: Run, run_toml: str) -> None:
    said = run("standby", run_toml, "--journal", "postgresql://me:secret@host/runs")
    assert said.status == ExitCode.USAGE
    assert "~/.pgpass" in said.line


# ---------------------------------------------------------------- invites: 5


@pytest.mark.parametrize(
    ("invite", "told"),
    [
        (INVITE.encode()[:-5], "incomplete or damaged"),
        ("", "does not start with"),
        ("x" * 50_000, "50000 characters"),
    ],
    ids=["cut", "empty", "long"],
)
def test_a_bad_invite(run: Run, invite: str, told: str) -> None:
    said = run("join", invite, "--", "true")
    assert said.status == ExitCode.INVITE
    assert told in said.line


def test_a_training_command_that_cannot_be_started(run: Run) -> None:
    said = run("join", INVITE.encode(), "--", "no-such-command", "--flag")
    assert said.status == ExitCode.TRAINER
    assert "no-such-command --flag" in said.line


# ---------------------------------------------------------------- no daemon: 6


@pytest.mark.parametrize(
    "arguments", [["status"], ["invite"], ["invite", "--list"], ["leave"], ["kick", "x"]]
)
def test_a_command_that_finds_no_daemon(run: Run, tmp_path: Path, arguments: list[str]) -> None:
    said = run(*arguments)
    assert said.status == ExitCode.UNREACHABLE
    assert "runs here" in said.line
    said = run(*arguments, "--state", str(tmp_path / "nowhere"))
    assert said.status == ExitCode.UNREACHABLE
    assert "nowhere" in said.line


def test_a_daemon_that_does_not_answer(run: Run, tmp_path: Path) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
        control = {
            "kind": "master",
            "url": f"http://127.0.0.1:{port}",
            "token": "t",
            "pid": os.getpid(),
        }
        (tmp_path / "control.json").write_text(json.dumps(control))
        said = run("status", "--state", str(tmp_path))
    assert said.status == ExitCode.UNREACHABLE
    assert str(port) in said.line


def test_no_master_at_the_invites_address(run: Run) -> None:
    said = run("join", INVITE.encode(), "--patience", "0.3", "--", "true")
    assert said.status == ExitCode.UNREACHABLE
    assert "127.0.0.1:1" in said.line
    assert "trying again" in said.out
    assert said.out.count("the invite names only this machine (127.0.0.1:1)") == 1, "at once"
    assert "--advertise HOST" in said.out


# ---------------------------------------------------------------- against a live master


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """A running master."""
    with Fleet(tmp_path_factory.mktemp("live"), strict=False) as fleet:
        fleet.start_master(spec(min_members=1))
        yield fleet


def told(node: Node) -> str:
    """Return the line of a process's log that names the error."""
    return Said(0, "", "\n".join(ours(node))).line


def ours(node: Node) -> list[str]:
    """A log without the stamped lines."""
    assert "Traceback" not in node.log, node.log
    return [
        line
        for line in node.log.splitlines()
        if line.startswith(("holdfast: ", "  ")) and not re.match(r"\d{4}-", line)
    ]


def ask(fleet: Fleet, *arguments: str) -> Said:
    """Run ``holdfast ARGUMENTS`` as a process with this fleet's master."""
    done = run_command(*arguments, state=fleet.folder / "master")
    return Said(done.returncode, done.stdout, done.stderr)


def joined(fleet: Fleet, name: str) -> Node:
    """Start a peer that trains nothing, and wait until it is in the run."""
    node = fleet.join(name, command=())
    fleet.until(lambda s: member(s, name), f"{name} is in the run")
    return node


@pytest.fixture(scope="module")
def taken() -> Iterator[str]:
    """An address on which another socket listens."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"127.0.0.1:{listener.getsockname()[1]}"


@pytest.mark.slow
@pytest.mark.parametrize("option", ["--listen", "--http"])
def test_a_taken_port_for_a_peer(live: Fleet, taken: str, option: str) -> None:
    node = live.join(f"peer{option}", more=(option, taken), command=())
    assert node.wait() == ExitCode.ADDRESS
    assert taken.rpartition(":")[2] in told(node)
    assert "asking the master" not in node.log, "the invite is not used up"


@pytest.mark.slow
def test_status_and_invite_and_leave(live: Fleet) -> None:
    peer = joined(live, "looker")
    said = ask(live, "status")
    assert said.status == 0
    assert "looker" in said.out
    assert "waiting" in said.out, "why it waits"
    as_json = json.loads(ask(live, "status", "--json").out)
    assert member(as_json, "looker")
    made = json.loads(ask(live, "invite", "--json", "--role", "spare", "--uses", "3").out)
    assert Invite.decode(made["invite"]).role is Role.SPARE
    assert Invite.decode(ask(live, "invite").out).run_id == as_json["run_id"]

    for more in ([], ["--json"]):
        done = run_command("status", *more, state=peer.folder)
        assert (done.returncode, "looker" in done.stdout) == (0, True), done.stderr
    assert run_command("leave", state=peer.folder).returncode == 0
    assert peer.wait() == 0
    assert ours(peer) == []


@pytest.mark.slow
def test_a_withdrawn_invite(live: Fleet) -> None:
    invite = str(live.act("invite", {"uses": 5})["invite"])
    listed = json.loads(ask(live, "invite", "--list", "--json").out)["invites"]
    assert listed[-1]["uses_left"] == 5
    assert listed[-1]["id"] in ask(live, "invite", "--list").out
    assert ask(live, "invite", "--withdraw", listed[-1]["id"]).status == 0
    said = ask(live, "invite", "--withdraw", "00000000")
    assert said.status == ExitCode.USAGE
    assert "00000000" in said.line
    live.invites["late"] = invite
    node = live.join("late", command=())
    assert node.wait() == ExitCode.INVITE
    assert "withdrawn" in told(node)


@pytest.mark.slow
@pytest.mark.parametrize(
    "body",
    [
        {"uses": 0},
        {"uses": "many"},
        {"uses": 10**30},
        {"hours": -1},
        {"hours": "nan"},
        {"hours": "inf"},
        {"hours": 1e300},
        {"role": "king"},
        {"role": ["spare"]},
        {"founder": "yes"},
    ],
)
def test_a_bad_invite_over_http_is_refused_plainly(live: Fleet, body: dict[str, object]) -> None:
    with pytest.raises(UserError) as refused:
        live.act("invite", body)
    assert refused.value.exit_code == 2


@pytest.mark.slow
def test_something_else_at_the_masters_address(live: Fleet) -> None:
    invite = Invite.decode(str(live.act("invite", {})["invite"]))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = Address("127.0.0.1", listener.getsockname()[1])
        live.invites["stray"] = attrs.evolve(invite, addresses=(address,)).encode()
        node = live.join("stray", command=())
        connection, _ = listener.accept()
        connection.sendall(b"HTTP/1.0 400 Bad Request\r\n\r\n")
        connection.close()
        assert node.wait() == ExitCode.REFUSED
    assert str(address) in told(node)


@pytest.mark.slow
def test_a_kicked_peer_stays_out(live: Fleet) -> None:
    node = joined(live, "rude")
    said = ask(live, "kick", "rude", "--reason", "sends garbage")
    assert (said.status, said.out[:8], said.out[-8:]) == (0, "removed ", " (rude)\n")
    assert node.wait() == ExitCode.EVICTED
    assert "sends garbage" in told(node)
    again = live.join("rude", command=())
    assert again.wait() == ExitCode.EVICTED
    said = ask(live, "kick", "nobody")
    assert said.status == ExitCode.USAGE
    assert "nobody" in said.line


# ---------------------------------------------------------------- help and the demo


def test_every_command_stands_under_one_heading(run: Run) -> None:
    said = run("--help")
    assert said.status == 0
    listed = [name for section in SECTIONS.values() for name in (each.name for each in section)]
    assert sorted(str(name) for name in listed) == sorted(commands.commands)
    lines = said.out.splitlines()
    for title, section in SECTIONS.items():
        begin = lines.index(f"{title}:") + 1
        block = lines[begin : begin + len(section)]
        assert [line.split()[0] for line in block] == [each.name for each in section]


def test_a_demo_without_torch_says_so_before_it_starts_anything(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    said = run("demo", "--keep", str(tmp_path / "kept"))
    assert (said.status, said.out) == (ExitCode.CONFIG, "")
    assert said.line.startswith("holdfast: the demo trains with torch, which ")
    assert "pip install" in said.err
    assert not (tmp_path / "kept").exists()


@pytest.mark.slow
def test_a_demo_whose_peer_fails_ends_with_that_peers_log(tmp_path: Path) -> None:
    broken = tmp_path / "torch"
    broken.mkdir()
    (broken / "__init__.py").write_text("raise ImportError('this torch is broken')\n")
    path = f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"
    done = run_command("demo", env={"PYTHONPATH": path})
    assert done.returncode == ExitCode.FAILED
    assert " ended with exit status 9" in done.stderr, "whichever is seen first"
    assert "ImportError: this torch is broken" in done.stderr


# ---------------------------------------------------------------- Ctrl+C


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Fleet]:
    with Fleet(tmp_path) as fleet:
        fleet.start_master(spec(min_members=1))
        yield fleet


@pytest.mark.slow
def test_ctrl_c_before_admission(small: Fleet) -> None:
    small.act("invite", {})
    small.invites["p"] = str(small.act("invite", {})["invite"])
    small.nodes["master"].signal(signal.SIGSTOP)  # it accepts, and says nothing
    peer = small.join("p", command=("sleep", "600"))
    small.until_log("p", "admission")
    peer.signal(signal.SIGINT)
    assert peer.wait() == ExitCode.INTERRUPTED
    assert "stopped" in told(peer)


@pytest.mark.slow
def test_a_peer_that_loses_its_master_gives_up_after_its_patience(small: Fleet) -> None:
    peer = small.join("p", more=("--patience", "1"), command=("sleep", "600"))
    small.until(lambda s: member(s, "p"), "it is in the run")
    small.nodes["master"].process.kill()
    assert peer.wait() == ExitCode.UNREACHABLE
    assert "no master of this run at 127.0.0.1:" in told(peer)
