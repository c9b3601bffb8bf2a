"""Which address a machine tells others, where it has no way to the internet."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from holdfast.daemon.advertised_hosts import doubt_of_loopback, only_loopback
from holdfast.protocol.addresses import Address
from holdfast.protocol.trust.invite import Invite
from tests import needs
from tests.processes.harness import HOLDFAST, START_S, environment, run_command, spec
from tests.processes.test_doctor import doctor, two_hosts

CODE = (
    "from holdfast.daemon.advertised_hosts import dialable; from holdfast.protocol.addresses import"
    " Address; print(*dialable([Address(host, 5) for host in {bound!r}], [], {towards!r}))"
)
POLL_S = 0.1


def told(begin: list[str], *bound: str, towards: str = "") -> str:
    """Return the addresses that a process there advertises when it listens on these."""
    command = [*begin, sys.executable, "-c", CODE.format(bound=bound, towards=towards)]
    return subprocess.check_output(command, text=True, env=environment()).strip()


@contextmanager
def alone() -> Iterator[list[str]]:
    """A network namespace with nothing but loopback; yields what a command there begins with."""
    needs.need(needs.namespaces())
    name = f"holdfast-{os.getpid()}-alone"
    subprocess.run(["ip", "netns", "add", name], check=True)
    try:
        subprocess.run(["ip", "-n", name, "link", "set", "lo", "up"], check=True)
        yield ["ip", "netns", "exec", name]
    finally:
        subprocess.run(["ip", "netns", "del", name], check=False)


def test_a_machine_in_a_local_network_names_its_address_there() -> None:
    with two_hosts() as (home, away):
        assert told(home, "0.0.0.0", towards="10.99.0.2") == "10.99.0.1:5"
        assert told(away, "0.0.0.0", towards="10.99.0.1") == "10.99.0.2:5"
        assert told(away, "0.0.0.0", towards="10.99.0.2") == "10.99.0.2:5"  # a master right here
        assert told(home, "0.0.0.0", towards="train.example.org") == "10.99.0.1:5"
        assert told(home, "0.0.0.0") == "10.99.0.1:5"
        # It has no IPv6 but what means something else on each link: that is told to nobody.
        assert told(home, "0.0.0.0", "::") == "10.99.0.1:5"
        assert told(home, "127.0.0.1", "0.0.0.0") == "127.0.0.1:5 10.99.0.1:5"


def test_networks_that_are_down_are_not_named() -> None:
    with two_hosts() as (home, _away):
        for command in (
            ("link", "add", "bridge0", "type", "bridge"),
            ("addr", "add", "172.17.0.1/16", "dev", "bridge0"),
            ("addr", "add", "10.98.0.1/24", "dev", "eth0"),
            ("-6", "addr", "add", "fd00::7/64", "dev", "eth0", "nodad"),
        ):
            subprocess.run([*home, "ip", *command], check=True)
        assert told(home, "0.0.0.0") == "10.99.0.1:5 10.98.0.1:5"
        assert told(home, "0.0.0.0", "::") == "10.99.0.1:5 10.98.0.1:5 [fd00::7]:5"


def test_only_a_machine_in_no_network_names_loopback() -> None:
    with alone() as here:
        assert told(here, "0.0.0.0") == "127.0.0.1:5"
        assert told(here, "0.0.0.0", "::") == "127.0.0.1:5 [::1]:5"


def test_a_master_on_loopback_says_nothing_about_the_others() -> None:
    here: list[str] = []
    assert told(here, "0.0.0.0", towards="127.0.0.1") == told(here, "0.0.0.0")


@contextmanager
def a_master(begin: list[str], folder: Path) -> Iterator[str]:
    """One that listens everywhere; yields what it says at its start."""
    (folder / "run.toml").write_text(spec())
    command = ["master", str(folder / "run.toml"), "--state", str(folder / "state")]
    command += ["--listen", "0.0.0.0:29700", "--http", "127.0.0.1:0"]
    log = folder / "master.log"
    with log.open("wb") as out:
        master = subprocess.Popen(
            [*begin, *HOLDFAST, *command], stdout=out, stderr=out, env=environment()
        )
    try:
        until_s = time.monotonic() + START_S
        while "holdfast join" not in log.read_text() and time.monotonic() < until_s:
            time.sleep(POLL_S)
        yield log.read_text()
    finally:
        master.terminate()
        master.wait()


def invite_in(text: str) -> Invite:
    found = re.search(r"holdfast join (\S+)", text)
    assert found is not None, text
    return Invite.decode(found[1])


def test_the_invite_of_a_master_without_a_way_out_leads_to_it(tmp_path: Path) -> None:
    with two_hosts() as (home, away):
        with a_master(home, tmp_path) as said:
            invite = invite_in(said)
            assert invite.addresses == (Address("10.99.0.1", 29700),)
            assert "WARNING" not in said
            report = doctor(invite.encode(), state=tmp_path / "peer", before=away)
            contribution_checks = {found["check"]: found["verdict"] for found in report.findings}
            assert (contribution_checks["invite"], contribution_checks["master"]) == ("ok", "ok"), (
                report.findings
            )


def test_an_invite_to_loopback_is_warned_of_at_both_ends(tmp_path: Path) -> None:
    with alone() as here, a_master(here, tmp_path) as said:
        assert "WARNING: this machine has no network address" in said
        assert "--advertise HOST" in said
        invite = invite_in(said)
        assert invite.addresses == (Address("127.0.0.1", 29700),)
        done = run_command("invite", state=tmp_path / "state", before=here)
        assert Invite.decode(done.stdout.strip()).addresses == invite.addresses
        assert "works only on the master's own machine" in done.stderr
    with two_hosts() as (_home, away):
        command = ["join", invite.encode(), "--state", str(tmp_path / "peer"), "--patience", "600"]
        with (tmp_path / "peer.log").open("wb") as out:
            peer = subprocess.Popen(
                [*away, *HOLDFAST, *command, "--http", "127.0.0.1:0"],
                stdout=out,
                stderr=out,
                env=environment(),
            )
        try:
            until_s = time.monotonic() + START_S
            wanted = "the invite names only this machine (127.0.0.1:29700)"
            while wanted not in (text := (tmp_path / "peer.log").read_text()):
                assert time.monotonic() < until_s, text
                time.sleep(POLL_S)
        finally:
            peer.terminate()
            peer.wait()


def test_what_leads_only_to_oneself() -> None:
    here = [Address("127.0.0.1", 7), Address("::1", 7), Address("localhost", 7)]
    assert only_loopback(here)
    assert "--advertise" in doubt_of_loopback(here)
    assert doubt_of_loopback([*here, Address("10.0.0.1", 7)]) == ""
