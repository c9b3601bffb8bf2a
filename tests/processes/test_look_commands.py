"""``peers``, ``rounds``, ``events`` and ``status`` with a real run and a restart of its master."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import Iterator
from itertools import pairwise

import httpx
import pytest

from holdfast.protocol.network.socket_options import UNPACED
from tests.processes.harness import HOLDFAST, Fleet, environment, spec

NAME = "train.example.org"  # that the master's owner has given it


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """A run of two: one trains, the other keeps a copy."""
    with Fleet(tmp_path_factory.mktemp("looking")) as fleet:
        fleet.start_master(spec(min_members=1), more=("--http-host", NAME))
        fleet.join("alder", founder=True)
        fleet.join("birch", command=())
        fleet.until(lambda s: s["committed"] >= 3 and s["counts"]["live"] == 2, "three rounds")
        yield fleet


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
    heading, *rows = fleet.said("peers").splitlines()
    assert heading.split()[:4] == ["#", "peer", "name", "role"]
    by_name = {row.split()[2]: row for row in rows}
    assert sorted(by_name) == ["alder", "birch"]
    assert "waiting for its trainer" in by_name["birch"]
    told = json.loads(fleet.said("peers", "--json"))["peers"]
    assert {row["name"]: row["in_sync"] for row in told}["alder"] is True
    assert fleet.said("peers", "--gone") == "no peer has left\n"


def test_rounds_are_listed_the_newest_first(fleet: Fleet) -> None:
    told = json.loads(fleet.said("rounds", "--limit", "2", "--json"))["rounds"]
    assert [row["outcome"] for row in told] == ["committed", "committed"]
    assert told[0]["round"] == told[1]["round"] + 1
    names = {peer: mark["name"] for peer, mark in told[0]["marks"].items()}
    assert [names[each["peer"]] for each in told[0]["contributors"]] == ["alder"]
    assert abs(told[0]["ended_at"] - time.time()) < 60
    assert "committed" in fleet.said("rounds").splitlines()[1]


def test_events_are_filtered(fleet: Fleet) -> None:
    everything = json.loads(fleet.said("events", "--json"))["events"]
    joins = json.loads(fleet.said("events", "--kind", "join", "--json"))["events"]
    assert [row["text"] for row in joins] == [
        row["text"] for row in everything if row["kind"] == "join"
    ]
    assert {row["name"] for row in joins} == {"alder", "birch"}
    only = fleet.said("events", "--kind", "join", "--peer", "birch", "--text", "JOIN")
    assert "birch" in only
    assert "alder" not in only
    assert len(fleet.said("events", "--limit", "1").splitlines()) == 1
    assert fleet.said("events", "--text", "no such text") == ""


def test_a_peers_status_tells_how_its_links_do(fleet: Fleet) -> None:
    told = json.loads(fleet.said("status", "--json", state="alder"))
    (link,) = told["links"]
    assert link["lanes"] >= 1
    assert 0 < link["sent_bytes"] <= told["bulk_sent_bytes"]
    assert 0 <= link["retransmitted_bytes"] <= told["bulk_retransmitted_bytes"]
    # Over a path as short as this machine's BBR is not asked for.
    assert {*link["congestion"]} <= {told["congestion"]["used"], *UNPACED}
    assert told["congestion"]["wanted"] == "bbr"
    lines = fleet.said("status", state="alder").splitlines()
    (row,) = (after for head, after in pairwise(lines) if head.startswith("linked to  connections"))
    assert row.split()[0] == "birch"
    assert row.split()[-1] == "%"


def test_events_are_followed_over_a_restart_of_the_master(fleet: Fleet) -> None:
    state = ("--state", str(fleet.folder / "master"))
    followed = subprocess.Popen(
        [*HOLDFAST, "events", "--follow", "--json", "--kind", "run", "--limit", "9", *state],
        stdout=subprocess.PIPE,
        env=environment(),
        text=True,
    )
    try:
        assert followed.stdout is not None
        assert any("supplied the initial weights" in line for line in followed.stdout)
        fleet.kill("master")
        fleet.restart_master()
        fleet.until(lambda s: s["counts"]["live"] == 2, "both are back")
        fleet.act("pause", {})
        row = json.loads(next(line for line in followed.stdout if "paused" in line))
        assert (row["kind"], row["text"]) == ("run", "paused")
    finally:
        fleet.act("resume", {})
        followed.send_signal(signal.SIGINT)
        followed.communicate()
    assert followed.returncode == 0


def test_the_status_says_that_all_copies_are_equal(fleet: Fleet) -> None:
    fleet.until(lambda s: s["copies"]["equal"] == 2, "both have reported")
    assert "all 2 copies equal at version" in fleet.said("status")
