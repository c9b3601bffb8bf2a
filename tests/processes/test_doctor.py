"""``holdfast doctor`` finds what was really planted, and says what to do about it.

The master is a real one, the faults are the machine's: a full file system, a firewall, a control
group.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio

import holdfast
from holdfast.daemon.doctor import line_checks
from holdfast.daemon.doctor.findings import Verdict
from holdfast.daemon.doctor.line_checks import (
    check_clock,
    check_host_bandwidth,
    check_version,
)
from holdfast.daemon.peer.hosts.head import needs_of_host
from holdfast.daemon.process.exit_codes import ExitCode
from holdfast.protocol.addresses import Address
from holdfast.protocol.machine_check import MachineCheckReport, ProbeRates
from holdfast.protocol.messages import VERSION_MAX, VERSION_MIN, FragmentSize
from holdfast.protocol.network.socket_options import obtainable_congestion
from holdfast.protocol.trust.invite import Invite
from tests import needs
from tests.packaging.test_docs import sample, untrue
from tests.processes.harness import HOLDFAST, Fleet, environment, run_command, spec

as_root = needs.needed(needs.root("only root may mount, limit memory and set up networks"))
SKEW_S = 7_200
CHECKS = {
    "versions", "torch", "invite", "ports", "master", "clock", "reachable", "bandwidth",
    "state folder", "disk", "memory", "open files", "TCP buffers", "congestion",
}  # fmt: skip

# A master whose clock is wrong, or that is of another version: its own code, with that one thing
# changed.
SKEWED = """
import time
right = time.time
time.time = lambda: right() + {by}
from holdfast.daemon.cli.command_line import main
main()
"""
NEWER = """
from holdfast.protocol import messages
messages.VERSION_MIN = messages.VERSION_MAX = 99
from holdfast.daemon.cli.command_line import main
main()
"""


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with Fleet(tmp_path_factory.mktemp("doctor"), strict=False) as fleet:
        fleet.start_master(spec())
        yield fleet


@pytest.fixture(scope="module")
def invite(fleet: Fleet) -> str:
    return str(fleet.act("invite", {"uses": 2, "hours": 1})["invite"])


class Report:
    """The report of a doctor."""

    def __init__(self, done: subprocess.CompletedProcess[str]) -> None:
        assert done.stdout.startswith("{"), done.stdout + done.stderr
        told = json.loads(done.stdout)
        self.findings: list[dict[str, str]] = told["findings"]
        assert told["fit"] == (done.returncode == 0)
        assert done.returncode in (0, ExitCode.UNFIT)
        for finding in self.findings:
            assert finding["text"]
            assert bool(finding["fix"]) == (finding["verdict"] in ("fault", "warning")), finding

    def __getitem__(self, check: str) -> list[dict[str, str]]:
        return [finding for finding in self.findings if finding["check"] == check]

    def mentions(self, word: str) -> list[str]:
        return [f["text"] for f in self.findings if word in f["text"].split()]

    @property
    def faults(self) -> dict[str, dict[str, str]]:
        return {f["check"]: f for f in self.findings if f["verdict"] == "fault"}

    def only(self, check: str) -> dict[str, str]:
        """Return the only fault of the report."""
        assert set(self.faults) == {check}, self.findings
        return self.faults[check]


def doctor(
    *arguments: str,
    state: Path,
    before: Sequence[str] = (),
    preexec: Callable[[], None] | None = None,
    listen: str = "127.0.0.1:0",
) -> Report:
    words = ("doctor", *arguments, "--listen", listen, "--json")
    return Report(run_command(*words, state=state, before=before, preexec=preexec))


@contextlib.contextmanager
def tmpfs(folder: Path, *options: str) -> Iterator[Path]:
    """A small file system of its own."""
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", *options, "holdfast-test", folder], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)


@contextlib.contextmanager
def other_master(fleet: Fleet, name: str, script: str) -> Iterator[str]:
    """A real master of its own run, started by ``script``; yields an invite of it."""
    toml = fleet.folder / "run.toml"
    node = None
    with (fleet.folder / f"{name}.log").open("wb") as log:
        process = subprocess.Popen(
            [
                *(sys.executable, "-c", script, "master", toml, "--state", fleet.folder / name),
                *("--listen", "127.0.0.1:0", "--http", "127.0.0.1:0"),
            ],
            stdout=subprocess.PIPE,
            stderr=log,
            env=environment(),
            text=True,
        )
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if "holdfast join" in line:
                node = line.split()[2]
                break
        assert node is not None, (fleet.folder / f"{name}.log").read_text()
        yield node
    finally:
        process.kill()
        process.communicate()


def changed(invite: str, **changes: Any) -> str:
    return attrs.evolve(Invite.decode(invite), **changes).encode()


# ---------------------------------------------------------------- nothing is wrong


@pytest.mark.fault(
    "a machine cannot take part: its port, its clock, a firewall, no memory, disk or descriptors,"
    " another version, a bad invite"
)
def test_a_machine_that_is_fine_is_told_so_and_uses_nothing_up(
    fleet: Fleet, invite: str, tmp_path: Path
) -> None:
    report = doctor(invite, state=tmp_path / "state")
    assert report.faults == {}
    assert {finding["check"] for finding in report.findings} == CHECKS
    assert "reaches this machine at 127.0.0.1" in report["reachable"][0]["text"]
    assert [each["text"] for each in report["versions"]][-1].startswith("the master runs holdfast ")
    assert (
        "Mbit/s" in report["bandwidth"][0]["text"] or "too fast" in report["bandwidth"][0]["text"]
    )
    used = obtainable_congestion("bbr")
    assert report["congestion"][0]["text"].startswith(f"lanes use {used}")
    assert report["congestion"][0]["verdict"] == ("ok" if used == "bbr" else "warning")
    assert not (tmp_path / "state").exists(), "nothing is left behind"
    left = fleet.ask("master", "invites")["invites"]
    assert [each["uses_left"] for each in left if each["id"]] == [2]
    assert fleet.master()["members"] == []


def test_the_sample_of_the_lending_page_is_what_it_prints(invite: str, tmp_path: Path) -> None:
    """But for what is known of this machine, of its line, and of a run with weights."""
    words = ("doctor", invite, "--listen", "127.0.0.1:0")
    printed = run_command(*words, state=tmp_path / "state").stdout
    shown = sample("docs/lending.md", "$ holdfast doctor")
    always = ("ok      versions ", "ok      ports ", "ok      open files ", "this machine can")
    lines = [line for line in shown.splitlines() if line.startswith(always)]
    assert len(lines) == 5
    assert (
        untrue(
            "\n".join(lines),
            printed.replace("127.0.0.1", "0.0.0.0").replace("1 peer\n", "1 peers\n"),
        )
        == []
    )
    assert f"protocol {VERSION_MIN} to {VERSION_MAX}\n" in shown
    assert {line[8:22].strip() for line in shown.splitlines()[1:-1]} - {""} == {*CHECKS, "router"}


def test_for_people_it_says_the_fix_last(invite: str, tmp_path: Path) -> None:
    done = run_command("doctor", invite[:-9], state=tmp_path)
    assert done.returncode == ExitCode.UNFIT
    assert "\x1b" not in done.stdout, "plain where it is no terminal"
    *_, fault, fix, empty, verdict = done.stdout.splitlines()
    assert fault.startswith("fault   invite")
    assert "fix: copy the whole string again" in fix
    assert (empty, verdict) == ("", "1 fault to fix before this machine can join")


# ---------------------------------------------------------------- planted faults


def test_a_taken_port(invite: str, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        found = doctor(invite, state=tmp_path, listen=f"127.0.0.1:{port}").only("ports")
        assert f"port {port} on 127.0.0.1 is taken" in found["text"]
        assert "choose another port" in found["fix"]
        report = doctor("--http", f"127.0.0.1:{port}", state=tmp_path)
        assert "--http" in report.only("ports")["fix"]
    skipped = {f["check"] for f in report.findings if f["verdict"] == "skipped"}
    assert skipped == {"master", "reachable", "bandwidth"}, "there is no invite"


def test_a_version_that_is_not_the_masters() -> None:
    assert check_version(holdfast.__version__).verdict is Verdict.OK
    other = check_version("9.8.7")
    assert other.verdict is Verdict.WARNING
    assert "holdfast 9.8.7" in other.text
    assert "pip install holdfast==9.8.7" in other.fix
    assert "an unknown version" in check_version("").text


@pytest.mark.parametrize(
    ("model_bytes", "rate", "verdict", "words"),
    [
        (0, 1e5, Verdict.OK, "no weights yet"),
        (3_000_000_000, 125e6, Verdict.OK, "(1000 MB) takes 8.0 s each way"),
        (3_000_000_000, 12.5e6, Verdict.WARNING, "(1000 MB) takes 80.0 s each way"),
    ],
)
def test_a_line_between_hosts_that_is_too_slow_for_the_model(
    model_bytes: int, rate: float, verdict: Verdict, words: str
) -> None:
    answer = attrs.evolve(needs_of_host((), 3), checkpoint_bytes=model_bytes)
    seen = MachineCheckReport(answer, 0.0, ProbeRates(rate, 2 * rate, 2**20, 0.001))
    finding = check_host_bandwidth(seen)
    assert finding.verdict is verdict
    assert words in finding.text


def test_a_host_needs_an_even_part_of_the_values_twice_and_no_momentum() -> None:
    needs = needs_of_host([FragmentSize(10**6, 10**6, 0), FragmentSize(10**6, 0, 10**6)], 4)
    assert needs.checkpoint_bytes == pytest.approx(16e6, rel=0.01)
    assert needs.memory_bytes == needs.checkpoint_bytes // 2


@pytest.mark.fault(
    "a machine cannot take part: its port, its clock, a firewall, no memory, disk or descriptors,"
    " another version, a bad invite"
)
def test_a_clock_that_is_not_the_masters(fleet: Fleet, tmp_path: Path) -> None:
    with other_master(fleet, "skewed", SKEWED.format(by=SKEW_S)) as invite:
        found = doctor(invite, state=tmp_path).only("clock")
    seconds, _, rest = found["text"].partition(" s ")
    assert abs(float(seconds) - SKEW_S) < SKEW_S / 10
    assert rest == "behind the master's"
    assert "timedatectl set-ntp true" in found["fix"]
    contribution_checks = [
        check_clock(ahead_s, 0.1).verdict for ahead_s in (-20, 20, -40, 40, -3700, 3700)
    ]
    assert contribution_checks == [*2 * [Verdict.OK], *2 * [Verdict.WARNING], *2 * [Verdict.FAULT]]


@pytest.mark.fault(
    "a machine cannot take part: its port, its clock, a firewall, no memory, disk or descriptors,"
    " another version, a bad invite"
)
@as_root
def test_a_disk_that_is_full(invite: str, tmp_path: Path) -> None:
    with tmpfs(tmp_path / "small", "-o", "size=1m") as small:
        with contextlib.suppress(OSError):
            (small / "full").write_bytes(bytes(2**21))
        found = doctor(invite, state=small / "state").only("disk")
    assert "0 MiB free" in found["text"]
    assert "--state DIR" in found["fix"]


@as_root
def test_a_folder_that_cannot_be_written(invite: str, tmp_path: Path) -> None:
    with tmpfs(tmp_path / "read-only", "-o", "size=1g,ro") as folder:
        found = doctor(invite, state=folder / "state").only("state folder")
    assert "Read-only file system" in found["text"]
    assert "make it writable" in found["fix"]


@as_root
def test_a_control_group_without_memory(invite: str, tmp_path: Path) -> None:
    with cgroup(2**30) as enter:
        found = doctor(invite, state=tmp_path, preexec=enter).only("memory")
    assert "1.0 GiB for this process" in found["text"]
    assert "MemoryMax=" in found["fix"]


@contextlib.contextmanager
def cgroup(limit_bytes: int) -> Iterator[Callable[[], None]]:
    """A control group with so much memory; yields what makes a process a member of it."""
    root, name = Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"
    if not root.is_dir():
        root, name = Path("/sys/fs/cgroup"), "memory.max"
        if "memory" not in (root / "cgroup.subtree_control").read_text().split():
            (root / "cgroup.subtree_control").write_text("+memory")
    group = root / f"holdfast-test-{os.getpid()}"
    group.mkdir()
    try:
        (group / name).write_text(str(limit_bytes))

        def enter() -> None:
            (group / "cgroup.procs").write_text("0")

        yield enter
    finally:
        group.rmdir()


def test_too_little_memory_by_ulimit(invite: str, tmp_path: Path) -> None:
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_DATA, (2**30, 2**30))

    found = doctor(invite, state=tmp_path, preexec=limit).only("memory")
    assert "ulimit" in found["fix"]


def test_a_master_that_does_not_run(invite: str, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = Address("127.0.0.1", listener.getsockname()[1])
    report = doctor(changed(invite, addresses=(address,)), state=tmp_path)
    found = report.only("master")
    assert not report.mentions("give"), "an invite was given"
    assert f"no master answers at {address}" in found["text"]
    assert "nothing listens on that port" in found["fix"]
    name = Address("no-such-host.invalid", 29700)
    found = doctor(changed(invite, addresses=(name,)), state=tmp_path).only("master")
    assert "DNS" in found["fix"]


def test_a_second_address_of_the_master_is_enough(invite: str, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        gone = Address("127.0.0.1", listener.getsockname()[1])
    there = Invite.decode(invite).addresses
    report = doctor(changed(invite, addresses=(gone, *there)), state=tmp_path)
    assert report.faults == {}
    assert [each["verdict"] for each in report["master"]] == ["ok", "warning"]


def test_the_folder_of_all_peers_is_no_state_and_may_be_entered(tmp_path: Path) -> None:
    (tmp_path / "peers").mkdir(mode=0o755)
    home = {"HOLDFAST_HOME": str(tmp_path)}
    report = Report(run_command("doctor", "--listen", "127.0.0.1:0", "--json", env=home))
    assert [found["verdict"] for found in report["state folder"]] == ["ok"]
    assert len(report.mentions("give")) == 4, "none was given"
    own = doctor(state=tmp_path / "peers")
    assert "warning" in [found["verdict"] for found in own["state folder"]], "this one is a state"


def test_invites_that_are_none(fleet: Fleet, invite: str, tmp_path: Path) -> None:
    report = doctor(invite[:-9], state=tmp_path)
    cut = report.only("invite")
    assert not report.mentions("give"), "an invite was given"
    assert "incomplete or damaged" in cut["text"]
    late = doctor(changed(invite, expires_s=1_000_000_000), state=tmp_path).only("invite")
    assert "expired at 2001-09-09" in late["text"]
    fresh = str(fleet.act("invite", {"uses": 1, "hours": 1})["invite"])
    invites = fleet.ask("master", "invites")["invites"]
    fleet.act("withdraw", {"id": invites[-1]["id"]})
    gone = doctor(fresh, state=tmp_path).only("invite")
    assert gone["text"] == "this invite was withdrawn"
    assert "ask the run operator" in gone["fix"]


def test_too_few_descriptors(invite: str, tmp_path: Path) -> None:
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (96, 96))

    found = doctor(invite, state=tmp_path, preexec=limit).only("open files")
    assert found["text"].startswith("96 at most")
    assert found["fix"].startswith("raise the hard limit: LimitNOFILE=")


def test_a_master_of_another_version(fleet: Fleet, tmp_path: Path) -> None:
    with other_master(fleet, "newer", NEWER) as invite:
        found = doctor(invite, state=tmp_path).only("versions")
    assert "this run speaks protocol 99 to 99" in found["text"]
    assert "install the run's version" in found["fix"]


def test_another_daemon_with_the_same_state(fleet: Fleet, invite: str) -> None:
    state = fleet.folder / "master"
    found = doctor(invite, state=state).only("state folder")
    assert f"the master with process id {fleet.nodes['master'].process.pid}" in found["text"]
    assert "--state DIR" in found["fix"]


def test_a_key_that_others_can_read(invite: str, tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    (tmp_path / "identity.key").write_bytes(b"secret")
    (tmp_path / "identity.key").chmod(0o644)
    report = doctor(invite, state=tmp_path)
    assert report.only("state folder")["fix"] == f"`chmod 600 {tmp_path / 'identity.key'}`"
    assert f"`chmod 700 {tmp_path}`" in {f["fix"] for f in report["state folder"]}


@pytest.mark.fault(
    "a machine cannot take part: its port, its clock, a firewall, no memory, disk or descriptors,"
    " another version, a bad invite",
    "`holdfast doctor`, before it joins",
    "named, with the fix; nothing is copied, no invite is used up",
)
@as_root
def test_a_firewall_before_this_machine(fleet: Fleet, tmp_path: Path) -> None:
    """Two hosts; the master's packets to the peer's port are dropped, as by a router or
    firewall.
    """
    with two_hosts() as (home, away):
        more = ["--state", str(tmp_path / "m"), "--http", "127.0.0.1:0"]
        master = subprocess.Popen(
            [
                *(*home, *HOLDFAST, "master", str(fleet.folder / "run.toml")),
                *("--listen", "10.99.0.1:29700", *more),
            ],
            stdout=subprocess.PIPE,
            env=environment(),
            text=True,
        )
        try:
            assert master.stdout is not None
            invite = next(line.split()[2] for line in master.stdout if "holdfast join" in line)
            open_port = doctor(invite, state=tmp_path / "a", before=away, listen="10.99.0.2:29701")
            assert open_port.faults == {}
            drop = [
                "ip",
                "rule",
                "add",
                "pref",
                "5",
                "iif",
                "eth0",
                "ipproto",
                "tcp",
                "dport",
                "29701",
                "blackhole",
            ]
            # The kernel's local table comes first otherwise, and a packet to us never meets a rule.
            subprocess.run(
                [*away, "ip", "rule", "add", "pref", "10", "lookup", "local"], check=True
            )
            subprocess.run([*away, "ip", "rule", "del", "pref", "0"], check=True)
            subprocess.run([*away, *drop], check=True)
            report = doctor(invite, state=tmp_path / "a", before=away, listen="10.99.0.2:29701")
            assert report.faults == {}, "it can dial the others"
            (found,) = report["reachable"]
            assert found["verdict"] == "warning"
            assert (
                "cannot reach this machine at 10.99.0.2:29701: this machine did not answer"
                in found["text"]
            )
            assert "open TCP port 29701" in found["fix"]
            assert "sees this machine as 10.99.0.2" in found["fix"]
        finally:
            master.kill()
            master.communicate()


async def test_a_path_that_loses_large_packets_is_named() -> None:
    async def ask() -> None:
        with trio.socket.socket() as sock:
            if sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG) > 1_300:
                await trio.sleep_forever()

    fits = await line_checks._largest_packets(ask)
    found = line_checks._unreachable(
        line_checks.MASTER, Address("10.0.0.1", 29700), trio.TooSlowError(), fits
    )
    assert "loses large packets" in found.text
    assert "mtu 1280" in found.fix


@contextlib.contextmanager
def two_hosts() -> Iterator[tuple[list[str], list[str]]]:
    """Two network namespaces with a cable; yields what a command on each begins with."""
    needs.need(needs.namespaces())
    names = [f"holdfast-{os.getpid()}-{name}" for name in ("home", "away")]

    def ip(*arguments: str) -> None:
        subprocess.run(["ip", *arguments], check=True)

    try:
        for name in names:
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
        ip("-n", names[0], "link", "add", "eth0", "type", "veth", "peer", "eth0", "netns", names[1])
        for number, name in enumerate(names, 1):
            ip("-n", name, "addr", "add", f"10.99.0.{number}/24", "dev", "eth0")
            ip("-n", name, "link", "set", "eth0", "up")
        first, second = (["ip", "netns", "exec", name] for name in names)
        yield first, second
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False)
