"""A run at its master: how it is taken up, how it ends, and how it goes on after its end."""

from __future__ import annotations

import os
import re
import signal
from functools import partial

from holdfast.daemon.process.exit_codes import ExitCode
from holdfast.daemon.process.paths import CONTROL_FILE, read_control
from tests.packaging.test_docs import sample, untrue
from tests.processes.harness import (
    WAIT_S,
    Fleet,
    Polls,
    Status,
    alive,
    member,
    run_command,
    spec,
)


def train_to_the_end(fleet: Fleet, pause_s: float = 0.0) -> None:
    for name in ("alder", "birch"):
        fleet.join(name, "--pause", str(pause_s), founder=True)
    fleet.until_finished("alder", "birch")


def since_restart(fleet: Fleet) -> str:
    return "resuming run" + fleet.nodes["master"].log.rpartition("resuming run")[2]


def test_a_finished_run_says_how_it_ended_and_goes_on(fleet: Fleet) -> None:
    fleet.start_master(spec(rounds=3))
    train_to_the_end(fleet, pause_s=0.3)  # long enough for peers to report a loss
    log = fleet.nodes["master"].log
    assert re.search(
        r"^run test is finished: all 3 rounds committed in .* s, loss \d.*, [\d,]+ tokens$",
        log,
        re.MULTILINE,
    )
    assert "in the last checkpoints of alder, birch: `holdfast export OUT" in log
    birch = fleet.nodes["birch"].log
    assert "the run is finished: all 3 rounds are committed" in birch
    exported = re.findall(r"^  (holdfast export .*)$", birch, re.MULTILINE)
    assert len(exported) == 1, "the peer says how to make a file of its weights"
    done = run_command(*exported[0].split()[1:], cwd=fleet.folder)
    assert (done.returncode, (fleet.folder / "model.safetensors").exists()) == (0, True), done
    assert not [e for e in fleet.master()["events"] if "lost its trainer" in e["text"]]
    shown = fleet.typed("status").stdout
    assert "all 3 rounds are committed; `holdfast resume --rounds N` goes on" in shown

    refused = fleet.typed("resume")
    assert (refused.returncode, refused.stdout) == (ExitCode.FAILED, "")
    assert "the run is finished" in refused.stderr
    fewer = fleet.typed("resume", "--rounds", "2")
    assert (fewer.returncode, "3 rounds are committed already" in fewer.stderr) == (2, True)
    resumed = fleet.typed("resume", "--rounds", "5")
    assert resumed.returncode == 0
    assert "the run goes on to round 5" in resumed.stdout
    assert "start each again with its `holdfast join` command" in resumed.stdout
    assert fleet.typed("resume").stdout == "the run was not paused\n"
    train_to_the_end(fleet)
    assert fleet.master()["committed"] == 5
    assert fleet.nodes["master"].log.count("run test is finished: all ") == 2

    # The run.toml still has 3 rounds: the master says what it reads there, and that there is no
    # more to do.
    fleet.end("master")
    fleet.restart_master()
    fleet.until(lambda s: s["state"] == "finished", "what it knows")
    log = since_restart(fleet)
    assert re.match(r"resuming run test \(\w{8}\), term 2: 5 rounds committed, last on \d{4}-", log)
    assert "changed: run.rounds from 5 to 3\n" in log
    log = fleet.nodes["master"].log.replace("run test", "run my-run")
    first, *_invites = sample("docs/operating.md", "resuming run").splitlines()
    assert untrue(sample("docs/operating.md", "is finished") + first, log) == []
    log = since_restart(fleet)
    assert "run test is finished: all 5 rounds committed" in log
    texts = [event["text"] for event in fleet.master()["events"]]
    assert texts[:2] == [
        "the master was started again (term 2)",
        "settings changed with the restart: run.rounds from 5 to 3",
    ]

    # Raised in the file, as the docs say.
    path = fleet.folder / "run.toml"
    path.write_text(path.read_text().replace("rounds = 3", "rounds = 7"))
    fleet.end("master")
    fleet.restart_master()
    train_to_the_end(fleet)
    assert fleet.master()["committed"] == 7


def test_peers_follow_another_number_of_rounds_without_a_restart(fleet: Fleet) -> None:
    fleet.start_master(spec(rounds=0))
    for name in ("alder", "birch"):
        fleet.join(name, founder=True)
    fleet.until_committed(2)
    assert fleet.typed("resume", "--rounds", "100000").returncode == 0
    early = fleet.typed("finish").stdout
    said = re.match(r"the run ends with its round (\d+)\nwrite rounds = \1 into run.toml", early)
    assert said is not None, early
    goal = said[1]
    fleet.until_finished("alder", "birch")
    for name in ("alder", "birch"):
        assert f"the run is finished: all {goal} rounds are committed" in fleet.nodes[name].log


def freeze_a_trainer_in_an_open_round(fleet: Fleet, name: str) -> int:
    """Stop a peer's trainer before it posts, so that the round stays open; return its process
    id.
    """
    trainer: int = fleet.peer(name)["command_pid"]
    while True:
        number = fleet.until(open_round, "an open round")["rounds"][0]["round"]
        os.kill(trainer, signal.SIGSTOP)
        fleet.until(partial(others_are_ready, name, number), "all others have posted")
        fleet.peer(name)  # its daemon has handled what the trainer had posted before
        if open_round(fleet.master()) == number:
            return trainer
        os.kill(trainer, signal.SIGCONT)


def others_are_ready(name: str, number: int, status: Status) -> bool:
    """Return whether the round has the updates of all but this peer, or is not open any more."""
    if open_round(status) != number:
        return True
    found, row = member(status, name), status["rounds"][0]
    return found is not None and set(row["expected"]) - set(row["ready"]) == {found["peer"]}


def open_round(status: Status) -> int | None:
    """Return the number of the round that waits for its updates."""
    rounds = status["rounds"]
    return rounds[0]["round"] if rounds and rounds[0]["phase"] == "open" else None


def test_a_killed_master_leaves_a_row_for_the_round_that_was_open(fleet: Fleet) -> None:
    fleet.start_master(spec())
    for name in ("alder", "birch"):
        fleet.join(name, "--pause", "0.3", founder=True)
    fleet.until_committed(2)
    trainer = freeze_a_trainer_in_an_open_round(fleet, "birch")
    fleet.kill("master")
    os.kill(trainer, signal.SIGCONT)
    fleet.restart_master()
    status = fleet.until_committed(1)
    assert status["aborted"] == 1, "a restart does not forget it"
    rows = [line.split() for line in fleet.typed("rounds").stdout.splitlines()[1:]]
    numbers = [int(row[0]) for row in rows]
    assert numbers == list(range(numbers[0], 0, -1)), "no round is missing"
    aborted = [" ".join(row) for row in rows if "aborted" in row]
    assert len(aborted) == 1
    assert "master" in aborted[0]


def again(fleet: Fleet, term: int) -> None:
    """Stop the master, and start it in its next term."""
    fleet.end("master")
    fleet.restart_master()
    fleet.until(lambda s: s["term"] == term, "its start")


def test_a_master_prints_an_invite_when_the_run_begins(fleet: Fleet) -> None:
    fleet.start_master(spec())
    fleet._master_arguments.remove("--no-invite")
    again(fleet, 2)
    assert "holdfast join holdfast1." not in fleet.nodes["master"].log
    _resumed, *invites = sample("docs/operating.md", "resuming run").splitlines()
    assert untrue("\n".join(invites), since_restart(fleet)) == []
    shown = fleet.typed("invite", "--uses", "3")
    named = re.match(r"invite (\w{8}): admits 3 machines for 24 hours\n", shown.stderr)
    assert named is not None
    assert fleet.typed("invite", "--withdraw", named[1]).stdout == f"withdrew {named[1]}\n"


def test_no_state_is_taken_for_another_runs_or_another_daemons(fleet: Fleet) -> None:
    text = spec()
    fleet.start_master(text)
    home = {"HOLDFAST_HOME": str(fleet.folder / "home")}
    files = [fleet.folder / name / "run.toml" for name in ("one", "two")]
    for path in files:
        path.parent.mkdir()
        path.write_text(text)

    def begin(*arguments: str) -> tuple[int | None, str]:
        """Start a master, or try to; return its exit status and what it printed."""
        name = f"try{len(fleet.nodes)}"
        common = ("--listen", "127.0.0.1:0", "--http", "127.0.0.1:0", "--no-invite")
        node = fleet.spawn(name, "master", *arguments, *common, env=home)
        fleet.strict = False
        fleet.until(
            lambda _s: node.process.poll() is not None or "dashboard at" in node.log, "its start"
        )
        status = node.process.poll()
        if status is None:
            node.signal(signal.SIGTERM)
            node.wait()
        return status, node.log

    assert begin(str(files[0]))[0] is None
    status, log = begin(str(files[1]))
    assert status == ExitCode.CONFIG
    assert f"was started with {files[0]}, not with {files[1]}" in log
    assert "give it another name in its run.toml" in log
    assert (
        f"if the file was moved, go on with --state {fleet.folder / 'home' / 'runs' / 'test'}"
        in log
    )
    moved = str(fleet.folder / "home" / "runs" / "test")
    status, log = begin(str(files[1]), "--state", moved)
    assert (status, "resuming run test" in log) == (None, True), "the same run, moved"
    assert begin(str(files[0]))[0] == ExitCode.CONFIG, "it is known by its new path"
    files[0].write_text(text.replace('"test"', '"other"'))
    status, log = begin(str(files[0]), "--state", moved)
    assert (status, "has the run 'test'" in log) == (ExitCode.CONFIG, True), "no silent new name"

    invite = fleet.act("invite", {"role": "contributor", "uses": 9, "hours": 1})["invite"]
    as_peer = fleet.typed("join", str(invite))
    assert as_peer.returncode == ExitCode.CONFIG
    assert "is the state of a master, not of a peer" in as_peer.stderr
    (fleet.folder / "peer").mkdir()
    (fleet.folder / "peer" / "identity.key").write_bytes(b"")
    status, log = begin(str(files[1]), "--state", str(fleet.folder / "peer"))
    assert (status, "is the state of a peer, not of a master" in log) == (ExitCode.CONFIG, True)


def test_commands_that_find_nobody_say_so(fleet: Fleet) -> None:
    fleet.start_master(spec(min_members=1))
    fleet.join("alder", founder=True)
    fleet.until_committed(1)
    fleet.nodes["alder"].signal(signal.SIGTERM)
    fleet.nodes["alder"].wait()
    fleet.until(lambda s: not s["members"], "it left")
    assert fleet.typed("pause").stdout.startswith("paused; ")
    assert fleet.typed("pause").stdout.startswith("the run was paused already; ")
    assert fleet.typed("resume").stdout == "resumed\n"
    assert fleet.typed("finish").stdout.startswith("the run ends with its round ")
    fleet.until(lambda s: s["state"] == "finished", "at once, since nobody can make another round")
    assert "the run is finished: " in fleet.typed("finish").stderr


def test_a_demo_whose_terminal_closes_leaves_no_process(fleet: Fleet) -> None:
    kept, polls = fleet.folder / "kept", Polls(WAIT_S)
    demo = fleet.spawn("demo", "demo", "--keep", str(kept))
    while (control := read_control(kept / "master" / CONTROL_FILE)) is None:
        assert polls.wait(), demo.log
    demo.signal(signal.SIGHUP)
    assert demo.wait() == ExitCode.INTERRUPTED
    assert not alive(control.pid)
