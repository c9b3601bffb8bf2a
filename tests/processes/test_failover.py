"""Several masters on one real PostgreSQL database: one leads, and another one does when it is
gone.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import httpx
import pytest

from benchmarks.postgres_server import PostgresServer
from holdfast.daemon.process.exit_codes import ExitCode
from holdfast.daemon.process.paths import MASTERS_FILE
from holdfast.protocol.trust.invite import Invite
from tests import needs
from tests.processes.harness import (
    WAIT_S,
    Fleet,
    Node,
    Polls,
    Status,
    contributing,
    in_sync,
    own_host,
    spec,
)

pytestmark = pytest.mark.slow

PAUSE = ("--pause", "0.02")
PEERS = "ab"


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    needs.need(needs.postgres())
    with PostgresServer() as server:
        yield server


def end_lease(server: PostgresServer) -> None:
    """Let the leader's lease be over now; no clock decides when: it would last for 20 s."""
    server.query("update holdfast_test.lease set expires = clock_timestamp()")


class Masters:
    """Masters of a fleet's run; ``nodes["master"]`` is the one that leads."""

    def __init__(self, fleet: Fleet, server: PostgresServer, toml: str) -> None:
        self.fleet = fleet
        self.server = server
        self.path = fleet.folder / "run.toml"
        self.path.write_text(toml)
        server.query("drop schema if exists holdfast_test cascade")

    def start(self, name: str, *more: str) -> Node:
        return self.fleet.spawn(
            name,
            "standby",
            str(self.path),
            *("--journal", self.server.url),
            *("--key-file", str(self.fleet.folder / "run.key")),
            *("--http", "127.0.0.1:0", "--no-invite"),
            *("--state", str(self.fleet.folder / name)),
            *(more if "--listen" in more else ("--listen", f"{own_host()}:29700", *more)),
        )

    def lead(self, name: str) -> None:
        """Wait until this master leads; the fleet asks it from now on."""
        self.lead_any([name], lambda _: True)

    def lead_any(self, names: Sequence[str], holds: Callable[[Status], bool]) -> None:
        """Wait until one of these masters leads and this holds of its status; the fleet asks it
        from now on.

        A master may say that it leads while it still learns that it does not.
        """
        polls = Polls(WAIT_S)
        nodes = [self.fleet.nodes[name] for name in names]
        while True:
            for node in nodes:
                found = status(node)
                if found.get("kind") == "master" and holds(found):
                    self.fleet.nodes["master"] = node
                    return
            assert polls.wait(), "\n".join(node.log for node in nodes)


def status(node: Node) -> Status:
    try:
        answer: Status = httpx.get(f"{node.control().url}/api/status").json()
    except httpx.HTTPError:  # between waiting and leading
        return {}
    return answer


def train(masters: Masters) -> Status:
    """Start two masters and two peers; return the status of the first one, which leads."""
    fleet = masters.fleet
    masters.start("m1")
    masters.lead("m1")
    second = f"{own_host()}:29700"
    masters.start("m2", "--listen", second)
    fleet.until(lambda _: second in addresses_of_invites(fleet), "m1 and all members know of m2")
    for rank, name in enumerate(PEERS):
        fleet.join(name, "--rank", str(rank), *PAUSE, founder=name == "a")
    return fleet.until(lambda s: contributing(s, *PEERS), "a and b train")


def addresses_of_invites(fleet: Fleet) -> list[str]:
    """Return the masters that the leader names in invites, so to members that join from now on."""
    invite = fleet.act("invite", {"role": "spare", "uses": 1, "hours": 1})["invite"]
    return [str(address) for address in Invite.decode(str(invite)).addresses]


def all_know(fleet: Fleet, address: str) -> bool:
    """Return whether the leader has told each member of a master that came after it joined.

    Invites name that master earlier: the members are told once the journal has its address.
    """
    known = [fleet.folder / name / MASTERS_FILE for name in PEERS]
    return all(path.exists() and address in path.read_text().splitlines() for path in known)


def check_same(fleet: Fleet, before: Status, restarts: int = 0) -> None:
    """Rounds go on under the new master, with the same processes, and all states are equal."""
    after = fleet.until(
        lambda s: s.get("committed", 0) > before["committed"] + 3 and in_sync(s, *PEERS),
        "rounds go on",
    )
    assert after["term"] > before["term"]
    assert [fleet.peer(name)["trainer_restarts"] for name in PEERS] == [restarts] * len(PEERS)
    fleet.check_equal(*PEERS)
    fleet.act("resume", {})


@pytest.mark.fault("the leading one of several masters is killed")
def test_a_standby_leads_when_the_master_is_killed_and_another_one_after_it(
    fleet: Fleet, server: PostgresServer
) -> None:
    masters = Masters(fleet, server, spec(contributors=2))
    before = train(masters)
    waiting = fleet.nodes["m2"]
    assert status(waiting)["state"] == "standby"
    leads_to = fleet.nodes["m1"].control().url

    def led(_status: Status) -> bool:
        """The leader tells its page with each renewal of its lease."""
        page = httpx.get(f"{waiting.control().url}/", follow_redirects=False)
        return page.status_code == 307 and page.headers["location"].startswith(leads_to)

    fleet.until(led, "the page of the one that waits leads to the leader's")

    number = fleet.until_committed(2)["committed"]
    fleet.kill("m1")
    end_lease(server)
    masters.lead("m2")
    check_same(fleet, before)
    url = fleet.nodes["m2"].control().url
    rounds = httpx.get(f"{url}/api/rounds", params={"limit": 100}).json()["rounds"]
    committed = [row for row in rounds if row["outcome"] == "committed"]
    earlier = committed[-number:]  # of the first master, as its journal has them
    assert all(row["contributors"] and row["marks"] and row["digest"] for row in earlier)

    def told(_status: Status) -> bool:
        events = httpx.get(f"{url}/api/events").json()["events"]
        return any("leads the run now (term 2)" in row["text"] for row in events)

    fleet.until(told, "an event tells of the takeover")

    third = f"{own_host()}:29700"  # on another machine, after the first one was lost
    masters.start("m3", "--listen", third)
    before = fleet.master()
    fleet.until(lambda _: all_know(fleet, third), "the members know of m3")
    fleet.end("m2")  # an upgrade: it leaves in good order
    masters.lead("m3")
    check_same(fleet, before)


@pytest.mark.nightly  # peers leave a frozen master when it was silent, by the clock
def test_a_master_that_was_frozen_stands_by_when_it_goes_on(
    fleet: Fleet, server: PostgresServer
) -> None:
    toml = spec(contributors=2).replace("deadline_s = 60\ngrace_s = 30", "deadline_s = 10")
    masters = Masters(fleet, server, toml)
    before = train(masters)
    fleet.nodes["m1"].signal(signal.SIGSTOP)
    end_lease(server)
    masters.lead("m2")
    check_same(fleet, before)
    fleet.nodes["m1"].signal(signal.SIGCONT)
    polls = Polls(WAIT_S)
    while status(fleet.nodes["m1"]).get("state") != "standby":
        assert polls.wait(), fleet.nodes["m1"].log
    assert "does not lead any more" in fleet.nodes["m1"].log
    check_same(fleet, {**fleet.master(), "term": before["term"]})


@pytest.mark.fault("the database of the masters is away")
def test_peers_train_on_while_the_database_is_away(fleet: Fleet, server: PostgresServer) -> None:
    masters = Masters(fleet, server, spec(contributors=2))
    before = train(masters)
    last, step = fleet.master(), fleet.peer("a")["step"]
    server.stop()
    try:
        polls = Polls(WAIT_S)
        last = {**last, **status(fleet.nodes["m1"])}  # nothing is committed from here on
        while "does not answer" not in status(fleet.nodes["m2"]).get("why_waiting", ""):
            assert polls.wait(), fleet.nodes["m2"].log
        step = max(step, *(round_["at_step"] for round_ in last["rounds"]))
        while fleet.peer("a")["step"] < step:  # to where it needs a round
            assert polls.wait(), fleet.nodes["a"].log
    finally:
        server.start()
    masters.lead_any(["m1", "m2"], lambda s: s["committed"] > last["committed"] + 1)
    check_same(fleet, {**before, "term": before["term"] - 1})  # the same one may lead


def wait_until_it_says(node: Node, words: str) -> None:
    """Wait until a master that does not lead gives this reason to those who ask whether it is
    ready.
    """
    polls = Polls(WAIT_S)
    while words not in httpx.get(f"{node.control().url}/readyz").json()["why"]:
        assert polls.wait(), node.log


@pytest.mark.fault("a standby lacks the run's key", "it opens the key", "it says so, never leads")
def test_a_master_without_the_runs_key_says_so_and_leads_once_it_has_it(
    fleet: Fleet, server: PostgresServer
) -> None:
    masters = Masters(fleet, server, spec())
    masters.start("m1")
    masters.lead("m1")
    key = fleet.folder / "other.key"
    second = masters.start("m2", "--key-file", str(key))
    wait_until_it_says(second, f"cannot lead: the key file {key} cannot be read")
    assert not key.exists(), "only a new run's first master makes one"
    key.write_text("another secret of many characters")
    wait_until_it_says(second, "same key file")
    fleet.end("m1")
    key.write_bytes((fleet.folder / "run.key").read_bytes())
    masters.lead("m2")


@pytest.mark.fault("the database of the masters is away")
def test_a_master_that_starts_before_its_database_waits_for_it(
    fleet: Fleet, server: PostgresServer
) -> None:
    masters = Masters(fleet, server, spec())
    server.stop()
    try:
        wait_until_it_says(masters.start("m1"), "does not answer")
    finally:
        server.start()
    masters.lead("m1")


def test_a_database_that_was_put_back_is_taken_over_by_hand(
    fleet: Fleet, server: PostgresServer
) -> None:
    masters = Masters(fleet, server, spec(contributors=1, min_members=1))
    listen = f"{own_host()}:29700"
    masters.start("m1", "--listen", listen)
    masters.lead("m1")
    fleet.join("a", *PAUSE, founder=True)
    fleet.until_committed(2)
    last = server.query("select max(id) from holdfast_test.records")[0][0]
    before = fleet.until_committed(2)
    fleet.end("m1")
    server.query(f"delete from holdfast_test.records where id > {last}")
    fleet.spawn(
        "m2",
        "master",
        str(masters.path),
        *("--journal", server.url, "--key-file", str(fleet.folder / "run.key")),
        *("--http", "127.0.0.1:0", "--no-invite", "--listen", listen),
        *("--state", str(fleet.folder / "m2")),
    )
    masters.lead("m2")
    after = fleet.until(lambda s: s.get("committed", 0) > before["committed"], "rounds go on")
    assert after["term"] > before["term"] + 1


def test_a_run_with_a_file_is_moved_into_the_database(fleet: Fleet, server: PostgresServer) -> None:
    masters = Masters(fleet, server, spec(contributors=1, min_members=1))
    listen = f"{own_host()}:29700"
    fleet.start_master(spec(contributors=1, min_members=1), listen=listen)
    fleet.join("a", *PAUSE, founder=True)
    fleet.until(lambda s: s["committed"] >= 2, "rounds")
    before = fleet.master()
    fleet.end("master")

    masters.start("master", "--listen", listen)
    masters.lead("master")
    assert "records into postgresql://" in fleet.nodes["master"].log
    assert "delete it once you trust the database" in fleet.nodes["master"].log
    state = fleet.folder / "master"
    assert (state / "authority.moved" / "authority.key").exists()
    assert not (state / "authority").exists()
    after = fleet.until(lambda s: s["committed"] > before["committed"] + 2, "rounds go on")
    assert after["run_id"] == before["run_id"]
    fleet.end("master")
    again = fleet.spawn(
        "again", "master", "--state", str(fleet.folder / "master"), "--http", "127.0.0.1:0"
    )
    assert again.wait() == ExitCode.CONFIG
    assert "`holdfast standby RUN_TOML`" in again.log


def test_the_key_lies_nowhere_in_the_clear(fleet: Fleet, server: PostgresServer) -> None:
    masters = Masters(fleet, server, spec())
    masters.start("m1")
    masters.lead("m1")
    ((sealed,),) = server.query("select sealed_key from holdfast_test.authority")
    assert b"ENCRYPTED" in bytes(sealed)
    assert not list(Path(fleet.folder / "m1").rglob("authority.key"))
    assert os.stat(fleet.folder / "run.key").st_mode & 0o777 == 0o600
