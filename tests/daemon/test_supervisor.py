"""The training command's life beside the daemon, with short commands and a short back-off."""

from __future__ import annotations

import os
import shlex
import signal
import sys
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from holdfast.daemon.peer.trainer import supervisor as module
from holdfast.daemon.peer.trainer.failures import Failure
from holdfast.daemon.peer.trainer.output import PIPE_BYTES
from holdfast.daemon.peer.trainer.supervisor import TrainerEnd, TrainerSupervisor
from holdfast.daemon.process.exit_codes import ExitCode
from holdfast.protocol.errors import UserError
from holdfast.protocol.messages import Failing, FailureKind, Remedy, TrainerFailed
from tests.background import background, until
from tests.processes.harness import alive

pytestmark = pytest.mark.real_time


PATIENCE_S = 120.0  # for what takes a moment, unless the machine is very busy


@pytest.fixture(autouse=True)
def short_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BACKOFF_FIRST_S", 0.04)
    monkeypatch.setattr(module, "BACKOFF_MAX_S", 0.1)


def shell(script: str, tmp_path: Path, **how: Any) -> TrainerSupervisor:
    return TrainerSupervisor(["sh", "-c", script], tmp_path / "sock", member="me", **how)


async def until_exists(path: Path) -> str:
    await until(lambda: path.exists() and path.read_text().endswith("\n"))
    return path.read_text()


async def until_known(supervisor: TrainerSupervisor) -> None:
    """A process may do things before who started it has learnt its number."""
    await until(lambda: supervisor.pid is not None)


async def until_gone(*pids: int) -> None:
    await until(lambda: not any(alive(pid) for pid in pids))


async def test_status_0_is_the_end(tmp_path: Path) -> None:
    supervisor = shell("exit 0", tmp_path)
    assert await supervisor.run() is TrainerEnd.DONE
    assert (supervisor.restarts, supervisor.pid) == (0, None)


async def test_the_command_is_not_started_before_the_daemon_listens(tmp_path: Path) -> None:
    listens = trio.Event()
    touch = ["touch", str(tmp_path / "started")]
    supervisor = TrainerSupervisor(touch, tmp_path / "sock", member="me", ready=listens)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(supervisor.run)
        await trio.testing.wait_all_tasks_blocked()
        assert (supervisor.pid, (tmp_path / "started").exists()) == (None, False)
        listens.set()
    assert (tmp_path / "started").exists()


async def test_one_that_never_listens_can_be_stopped(tmp_path: Path) -> None:
    command = ["touch", str(tmp_path / "started")]
    supervisor = TrainerSupervisor(command, tmp_path / "sock", member="me", ready=trio.Event())
    async with trio.open_nursery() as nursery:
        nursery.start_soon(supervisor.run)
        await trio.testing.wait_all_tasks_blocked()
        await supervisor.stop()
    assert not (tmp_path / "started").exists()


async def test_it_is_told_where_the_daemon_is(tmp_path: Path) -> None:
    supervisor = shell(f'echo "$HOLDFAST_SOCKET $HOLDFAST_MEMBER" > {tmp_path}/told', tmp_path)
    await supervisor.run()
    assert (tmp_path / "told").read_text() == f"{tmp_path}/sock me\n"


async def test_the_trainer_does_not_get_the_daemons_invite(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOLDFAST_JOIN_INVITE", "holdfast1.secret")
    monkeypatch.setenv("HOLDFAST_HOME", "/somewhere")
    monkeypatch.setenv("OTHER", "kept")
    await shell(f"env > {tmp_path}/env", tmp_path).run()
    told = (tmp_path / "env").read_text()
    assert "secret" not in told
    assert {"HOLDFAST_HOME=/somewhere", "OTHER=kept", "HOLDFAST_MEMBER=me"} <= set(told.split("\n"))


async def test_a_failure_is_followed_by_another_try_after_longer_and_longer_pauses(
    tmp_path: Path,
) -> None:
    times = tmp_path / "times"
    supervisor = shell(f"date +%s.%N >> {times}; test $(wc -l < {times}) -ge 4", tmp_path)
    assert await supervisor.run() is TrainerEnd.DONE
    assert supervisor.restarts == 3
    at = [float(line) for line in times.read_text().split()]
    pauses = [after - before for before, after in pairwise(at)]
    assert all(pause >= least for pause, least in zip(pauses, (0.04, 0.08, 0.1), strict=True))


async def test_after_so_many_failures_in_a_row_it_waits_for_somebody_to_act(
    tmp_path: Path,
) -> None:
    count = tmp_path / "count"
    told: list[TrainerFailed] = []
    script = f"echo x >> {count}; test -e {tmp_path}/mended || exit 3"
    supervisor = shell(script, tmp_path, tell=told.append)
    assert not supervisor.retry(), "there is nothing to try again"
    async with trio.open_nursery() as nursery:
        ends: list[TrainerEnd] = []

        async def run() -> None:
            ends.append(await supervisor.run())

        nursery.start_soon(run)
        await until(lambda: told and told[-1].remedy is Remedy.NONE)
        assert len(count.read_text().split()) == module.FAILURES_MAX
        assert [each.failure_count for each in told] == [1, 2, 3, 4, 5]
        assert {each.kind for each in told} == {FailureKind.CRASH}
        assert {each.reason for each in told} == {"ended with exit status 3"}
        assert [each.restart_s for each in told] == [0.04, 0.08, 0.1, 0.1, 0.0]
        await trio.sleep(0.3)
        assert len(count.read_text().split()) == module.FAILURES_MAX, "and starts nothing"
        assert supervisor.failed == told[-1]

        (tmp_path / "mended").touch()
        assert supervisor.retry()
        await until(lambda: ends)
    assert ends == [TrainerEnd.DONE]
    assert supervisor.failed is None


async def test_what_the_process_said_is_worth_more_than_its_exit_status(tmp_path: Path) -> None:
    said = [Failing(FailureKind.MEMORY, "OutOfMemoryError: no"), None]
    told: list[TrainerFailed] = []

    async def words() -> Failing | None:
        return said.pop(0)

    script = f"echo x >> {tmp_path}/n; test $(wc -l < {tmp_path}/n) -ge 3 || exit 1"
    supervisor = shell(script, tmp_path, crash_report=words, tell=told.append)
    assert await supervisor.run() is TrainerEnd.DONE
    assert [(each.kind, each.reason) for each in told] == [
        (FailureKind.MEMORY, "OutOfMemoryError: no"),
        (FailureKind.CRASH, "ended with exit status 1"),
    ]


@pytest.mark.parametrize("stopped", [False, True])
async def test_one_that_hangs_is_ended_with_the_reason_and_started_again(
    tmp_path: Path, stopped: bool
) -> None:
    told: list[TrainerFailed] = []
    script = f"test -e {tmp_path}/ready && exit 0; echo $$ > {tmp_path}/ready; sleep 60"
    supervisor = shell(script, tmp_path, tell=told.append)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(supervisor.run)
        pid = int(await until_exists(tmp_path / "ready"))
        await until_known(supervisor)
        if stopped:
            os.kill(pid, signal.SIGSTOP)
        supervisor.fail(FailureKind.HANG, "no step for 300 s", 300.0)
        await until_gone(pid)
    assert [(each.kind, each.reason, each.failure_count) for each in told] == [
        (FailureKind.HANG, "no step for 300 s", 1)
    ]
    assert supervisor.restarts == 1


async def test_the_time_in_which_it_hung_is_no_good_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "GOOD_RUN_S", 0.2)
    told: list[TrainerFailed] = []
    script = f"echo x >> {tmp_path}/n; test $(wc -l < {tmp_path}/n) -ge 4 || sleep 60"
    supervisor = shell(script, tmp_path, tell=told.append)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(supervisor.run)
        pids: list[int | None] = [None]
        for sick_s in (1_000.0, 1_000.0, 0.0):
            # The next process; ``failed`` may be over before anybody has looked.
            await until(lambda: supervisor.pid not in pids)
            pids.append(supervisor.pid)
            await trio.sleep(0.3)
            supervisor.fail(FailureKind.HANG, "no step", sick_s)
        await until(lambda: len(told) == 3)
    assert [each.failure_count for each in told] == [1, 2, 1]


async def test_a_command_that_is_gone_later_is_a_failure_like_others(tmp_path: Path) -> None:
    command = tmp_path / "command"
    command.write_text("#!/bin/sh\nrm $0\nexit 1\n")
    command.chmod(0o700)
    told: list[TrainerFailed] = []
    supervisor = TrainerSupervisor([str(command)], tmp_path / "sock", member="me", tell=told.append)
    async with background() as nursery:
        nursery.start_soon(supervisor.run)
        await until(lambda: len(told) >= 2)
    assert "cannot start" in told[1].reason


async def test_a_command_that_ran_well_for_long_has_its_tries_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "GOOD_RUN_S", 0.1)
    count = tmp_path / "count"
    lives = module.FAILURES_MAX + 2
    supervisor = shell(
        f"echo x >> {count}; sleep 0.12; test $(wc -l < {count}) -ge {lives}", tmp_path
    )
    assert await supervisor.run() is TrainerEnd.DONE
    assert supervisor.restarts == lives - 1


# ---------------------------------------------------------------- output


class Heard:
    """The lines of a command's output, as a screen would take them."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.rest = ""

    def __call__(self, lines: list[str], rest: str) -> None:
        self.lines += lines
        self.rest = rest


async def test_all_that_a_command_prints_is_heard_before_its_end_is_told(tmp_path: Path) -> None:
    heard, at_failure = Heard(), list[list[str]]()
    script = (
        "echo one; echo two >&2; echo three; printf 'no end'; "
        f"test -e {tmp_path}/again || {{ touch {tmp_path}/again; exit 3; }}"
    )
    supervisor = shell(
        script,
        tmp_path,
        output=heard,
        give_up=lambda _failure: at_failure.append(list(heard.lines)),
    )
    assert await supervisor.run() is TrainerEnd.DONE
    assert at_failure == [["one", "two", "three", "no end"]]
    assert heard.lines == 2 * ["one", "two", "three", "no end"]


async def test_python_prints_at_once_unless_the_user_wants_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    heard = Heard()
    await shell('echo "[$PYTHONUNBUFFERED]"', tmp_path, output=heard).run()
    monkeypatch.setenv("PYTHONUNBUFFERED", "")
    await shell('echo "[$PYTHONUNBUFFERED]"', tmp_path, output=heard).run()
    assert heard.lines == ["[1]", "[]"]


async def test_giving_up_ends_it_at_the_first_failure(tmp_path: Path) -> None:
    def give_up(failure: Failure) -> None:
        raise UserError(failure.reason)

    heard = Heard()
    supervisor = shell("echo x; exit 3", tmp_path, output=heard, give_up=give_up)
    with pytest.raises(UserError, match="ended with exit status 3"):
        await supervisor.run()
    assert heard.lines == ["x"]


async def test_a_flood_is_taken_and_stopped_with_its_command(tmp_path: Path) -> None:
    heard = Heard()
    counted = 0

    def count(lines: list[str], _rest: str) -> None:
        nonlocal counted
        counted += len(lines)

    supervisor = shell(f"echo > {tmp_path}/ready; exec yes flood", tmp_path, output=count)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(supervisor.run)
        await until_exists(tmp_path / "ready")
        await until(lambda: counted >= 100_000)
        pid = supervisor.pid
        await supervisor.stop()
    assert pid is not None
    assert not alive(pid)
    assert heard.lines == []


@pytest.mark.fault(
    "a process that the training command left running holds its output open",
    "none is needed",
    "nobody waits for the end of the output",
)
async def test_a_grandchild_that_keeps_the_output_open_delays_nothing(tmp_path: Path) -> None:
    script = (
        f"setsid sh -c 'echo $$ > {tmp_path}/left; echo it writes on; exec sleep 600' & "
        f"while test ! -s {tmp_path}/left; do sleep 0.02; done; echo done"
    )
    heard = Heard()
    supervisor = shell(script, tmp_path, output=heard)
    with trio.fail_after(PATIENCE_S):
        assert await supervisor.run() is TrainerEnd.DONE
    assert sorted(heard.lines) == ["done", "it writes on"]
    pid = int((tmp_path / "left").read_text())
    try:
        assert alive(pid), "it was left there on purpose"
    finally:
        os.kill(pid, signal.SIGKILL)


LISTENING_DAEMON = """
import functools, sys, trio
from pathlib import Path
from holdfast.daemon.peer.trainer.supervisor import TrainerSupervisor

command, socket = ["sh", "-c", sys.argv[1]], Path(sys.argv[2])
trio.run(TrainerSupervisor(command, socket, member="me", output=lambda lines, rest: None).run)
"""


async def test_an_output_that_is_held_open_does_not_keep_the_daemon_alive(tmp_path: Path) -> None:
    script = (
        f"setsid sh -c 'echo $$ > {tmp_path}/left; exec sleep 600' & "
        f"while test ! -s {tmp_path}/left; do sleep 0.02; done"
    )
    with trio.fail_after(PATIENCE_S):
        await trio.run_process(
            [sys.executable, "-c", LISTENING_DAEMON, script, str(tmp_path / "sock")]
        )
    pid = int((tmp_path / "left").read_text())
    assert alive(pid)
    os.kill(pid, signal.SIGKILL)


MORE_BYTES = 3 * PIPE_BYTES  # than a pipe takes
BUSY_DAEMON = """
import sys, time, trio
from pathlib import Path
from holdfast.daemon.peer.trainer.supervisor import TrainerSupervisor

async def main():
    async with trio.open_nursery() as nursery:
        supervisor = TrainerSupervisor(
            ["sh", "-c", sys.argv[1]],
            Path(sys.argv[2]),
            member="me",
            output=lambda lines, rest: None,
        )
        nursery.start_soon(supervisor.run)
        while not Path(sys.argv[3]).exists():
            await trio.sleep(0.01)
        while not Path(sys.argv[4]).exists():
            time.sleep(0.01)  # the event loop stands still

trio.run(main)
"""


@pytest.mark.fault(
    "a daemon stalls while its trainer prints",
    "none is needed",
    "a thread of its own reads what the trainer prints",
)
async def test_a_trainer_prints_on_while_its_daemon_stalls(tmp_path: Path) -> None:
    script = (
        f"echo > {tmp_path}/ready; sleep 0.3; yes | head -c {MORE_BYTES}; echo > {tmp_path}/done"
    )
    paths = [str(tmp_path / name) for name in ("sock", "ready", "done")]
    with trio.fail_after(PATIENCE_S):
        await trio.run_process([sys.executable, "-c", BUSY_DAEMON, script, *paths])


async def test_a_signal_is_named(tmp_path: Path) -> None:
    told: list[TrainerFailed] = []
    script = f"test -e {tmp_path}/again && exit 0; touch {tmp_path}/again; kill -SEGV $$"
    supervisor = shell(script, tmp_path, tell=told.append)
    assert await supervisor.run() is TrainerEnd.DONE
    assert told[0].reason == "was killed by SIGSEGV"


@pytest.mark.parametrize("how", ["missing", "not executable", "a folder"])
async def test_a_command_that_cannot_be_started(tmp_path: Path, how: str) -> None:
    command = tmp_path / "a command"
    if how == "not executable":
        command.write_text("echo\n")
    elif how == "a folder":
        command.mkdir()
    supervisor = TrainerSupervisor([str(command), "--flag"], tmp_path / "sock", member="me")
    with pytest.raises(UserError) as raised:
        await supervisor.run()
    assert shlex.quote(str(command)) in str(raised.value)
    assert raised.value.exit_code == ExitCode.TRAINER
    assert "--" in raised.value.hint
    await supervisor.stop()  # returns at once


# A child, and a grandchild that ignores SIGTERM, as a data loader under a shell might.
FAMILY = """\
trap '' TERM
sh -c 'trap "" TERM; echo $$ > {folder}/grandchild; while :; do sleep 0.05; done' &
trap - TERM
echo $$ > {folder}/child
{then}
"""


@pytest.mark.parametrize("how", ["cancelled", "stopped"])
async def test_the_whole_session_ends_with_the_daemon(tmp_path: Path, how: str) -> None:
    supervisor = shell(FAMILY.format(folder=tmp_path, then="wait"), tmp_path)
    ends: list[TrainerEnd] = []
    async with trio.open_nursery() as nursery:

        async def run() -> None:
            ends.append(await supervisor.run())

        nursery.start_soon(run)
        pids = [int(await until_exists(tmp_path / name)) for name in ("child", "grandchild")]
        await until_known(supervisor)
        assert supervisor.pid == pids[0]
        assert os.getsid(pids[0]) == pids[0] != os.getsid(0), "Ctrl+C does not reach it"
        if how == "stopped":
            await supervisor.stop()
            assert not alive(pids[0])
        else:
            nursery.cancel_scope.cancel()
    await until_gone(*pids)
    assert ends == ([TrainerEnd.STOPPED] if how == "stopped" else [])


DAEMON = """
import sys, trio
from pathlib import Path
from holdfast.daemon.peer.trainer.supervisor import TrainerSupervisor

trio.run(TrainerSupervisor(["sh", "-c", sys.argv[1]], Path(sys.argv[2]), member="me").run)
"""


@pytest.mark.fault(
    "a daemon is killed",
    "the end of a pipe, at a small process beside the training command"
    " (`daemon/peer/trainer/watcher.py`)",
    "the command ends, and all that it has started, whatever sessions these have",
)
async def test_all_that_a_command_started_ends_with_a_daemon_that_is_killed(tmp_path: Path) -> None:
    """Its children, and those with sessions of their own, as torchrun's ranks have."""
    script = f"setsid sh -c 'echo $$ > {tmp_path}/rank; sleep 600; true' & " + FAMILY.format(
        folder=tmp_path, then="wait"
    )
    command = [sys.executable, "-c", DAEMON, script, str(tmp_path / "sock")]
    daemon = await trio.lowlevel.open_process(command)
    try:
        names = ("child", "grandchild", "rank")
        pids = [int(await until_exists(tmp_path / name)) for name in names]
        assert os.getsid(pids[2]) == pids[2] != os.getsid(pids[0])
        with trio.fail_after(PATIENCE_S):
            while not (watchers := watchers_of(pids[0])):
                await trio.sleep(0.01)
    finally:
        daemon.kill()
        await daemon.wait()
    await until_gone(*pids, *watchers)


async def test_what_a_command_that_ended_well_left_running_stays(tmp_path: Path) -> None:
    script = f"setsid sh -c 'echo $$ > {tmp_path}/left; sleep 600' & sleep 0.2; exit 0"
    command = [sys.executable, "-c", DAEMON, script, str(tmp_path / "sock")]
    await trio.run_process(command)
    pid = int(await until_exists(tmp_path / "left"))
    try:
        assert alive(pid)
    finally:
        os.kill(pid, signal.SIGKILL)


def watchers_of(group: int) -> list[int]:
    """Processes that wait for the end of the daemon of this command."""
    wanted = [module.WATCHER.encode(), str(group).encode()]
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            if path.read_bytes().split(b"\0")[3:5] == wanted:
                found.append(int(path.parent.name))
    return found


async def test_what_a_crashed_command_left_running_is_killed_before_the_next_try(
    tmp_path: Path,
) -> None:
    once = f"test -e {tmp_path}/second && exit 0; touch {tmp_path}/second; "
    supervisor = shell(
        once + FAMILY.format(folder=tmp_path, then="sleep 0.3; kill -KILL $$"), tmp_path
    )
    assert await supervisor.run() is TrainerEnd.DONE
    assert supervisor.restarts == 1
    await until_gone(int((tmp_path / "grandchild").read_text()))


async def test_it_may_save_its_work_when_it_is_asked_to_end(tmp_path: Path) -> None:
    supervisor = shell(
        f"trap 'sleep 0.2; echo saved > {tmp_path}/work; exit 0' TERM;"
        f"echo ready > {tmp_path}/ready; while :; do sleep 0.02; done",
        tmp_path,
    )
    async with trio.open_nursery() as nursery:
        nursery.start_soon(supervisor.run)
        await until_exists(tmp_path / "ready")
        await supervisor.stop()
        assert (tmp_path / "work").read_text() == "saved\n"


async def test_one_that_ignores_sigterm_is_killed_in_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "TERM_S", 0.2)
    script = (
        "import signal, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        f"open({str(tmp_path / 'ready')!r}, 'w').write('x\\n')\n"
        "time.sleep(600)\n"
    )
    supervisor = TrainerSupervisor([sys.executable, "-c", script], tmp_path / "sock", member="me")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(supervisor.run)
        await until_exists(tmp_path / "ready")
        pid = supervisor.pid
        assert pid is not None
        with trio.fail_after(PATIENCE_S):
            await supervisor.stop()
        assert not alive(pid)


async def test_no_new_try_begins_after_stop(tmp_path: Path) -> None:
    count = tmp_path / "count"
    supervisor = shell(f"echo x >> {count}; exit 1", tmp_path)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(supervisor.run)
        await until_exists(count)
        await supervisor.stop()
        before = count.read_text()
        await trio.sleep(0.3)
        assert count.read_text() == before
