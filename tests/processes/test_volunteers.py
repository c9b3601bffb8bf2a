"""A volunteer's limits on real daemons: they leave when the machine is wanted back, and come
again.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.protocol.errors import UserError
from holdfast.protocol.trust.credentials import CERTIFICATE_FILE
from tests import needs
from tests.processes.harness import WAIT_S, Fleet, Polls, Status, member, spec


def hours_that_are_not_now() -> str:
    """Some that began twelve hours ago, by this machine's clock, and are short."""
    hour = (time.localtime().tm_hour + 12) % 24
    return f"{hour}-{(hour + 1) % 24}"


def until_peer(fleet: Fleet, name: str, condition: Callable[[Status], object]) -> Status:
    """Its own status, as soon as it is like that; between two stays it serves nothing for a
    moment.
    """
    polls, status = Polls(WAIT_S), Status()
    while polls.wait():
        with contextlib.suppress(UserError):
            status = fleet.peer(name)
            if condition(status):
                return status
    raise AssertionError(f"{name} is not like that: {status}")


def until_away(fleet: Fleet, name: str, why: str) -> Status:
    return until_peer(fleet, name, lambda s: s["phase"] == "away" and why in s["why"])


def test_outside_its_hours_it_waits_and_says_so(fleet: Fleet) -> None:
    fleet.start_master(spec(min_members=1))
    hours = hours_that_are_not_now()
    fleet.join("alder", command=("sleep", "60"), more=("--hours", hours, "--max-upload", "2"))
    status = until_away(fleet, "alder", f"outside its hours ({hours}); back at ")
    assert status["limits"]["hours"] == hours
    assert fleet.master()["members"] == []
    fleet.join("birch", command=())
    fleet.until(lambda s: member(s, "birch"), "somebody is here")
    there = until_peer(fleet, "birch", lambda s: s["number"])
    assert set(there) == set(status), "a status is the same for programs"
    limits = f"limits of this machine: max-upload 2 MB/s, hours {hours}"
    assert limits in fleet.said("status", state="alder")
    fleet.end("alder")


@pytest.mark.fault("a machine's owner wants it back: its hours are over, it runs on battery")
@needs.needed(needs.root("only root may show a process other batteries"))
def test_on_battery_it_leaves_and_comes_back_by_itself(fleet: Fleet, tmp_path: Path) -> None:
    """The kernel's files about power are others for this one process; all else is as it is."""
    power = tmp_path / "power"
    (power / "BAT0").mkdir(parents=True)
    (power / "BAT0" / "type").write_text("Battery")
    plug = power / "BAT0" / "status"
    plug.write_text("Full")
    fleet.start_master(spec(min_members=1))
    node = fleet.join(
        "alder",
        command=("sleep", "600"),
        more=("--pause-on-battery",),
        before=(
            *("unshare", "-m", "sh", "-c"),
            f'mount --bind {power} /sys/class/power_supply && exec "$0" "$@"',
        ),
    )
    fleet.until(lambda s: member(s, "alder"), "it is here")
    trainer = until_peer(fleet, "alder", lambda s: s["command_pid"])["command_pid"]
    plug.write_text("Discharging")
    until_away(fleet, "alder", "on battery")
    status = fleet.until(lambda s: not s["members"], "it has left")
    assert status["departed"][-1]["why"] == "it left: on battery", "the run's operator reads why"
    with pytest.raises(ProcessLookupError):
        os.kill(trainer, 0)
    # Much later: its certificate is of no use any more, and its invite was for one machine, once.
    (node.folder / CERTIFICATE_FILE).unlink()
    plug.write_text("Charging")
    fleet.until(lambda s: member(s, "alder"), "it is back")
    until_peer(fleet, "alder", lambda s: s["command_pid"] not in (None, trainer))
    assert node.process.poll() is None, "all of that was one process"
