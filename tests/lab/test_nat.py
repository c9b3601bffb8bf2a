"""Real routers: which pairs connect how, and what keeps their connections alive."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.lab_run import MASTER_PORT
from tests import needs
from tests.lab import nat_lab
from tests.lab import nat_run as nat

pytestmark = pytest.mark.nightly  # namespaces, and minutes on their clocks
needs_lab = needs.needed(needs.namespaces(nat_lab.missing, nat_lab.why_not))

# What the table in docs/internet.md says. Of a pair that is not named one dials the other.
HOMES = ("home1", "home1b", "home2")
DUALS = ("dual1", "dual2")
PUNCHED = {("home1", "home2"), ("home1b", "home2"), DUALS}
PUNCHED |= {(home, "shut") for home in HOMES}
PUNCHED |= {("beside", other) for other in (*HOMES, "shut", *DUALS)}
PUNCHED |= {(home, dual) for home in (*HOMES, "shut") for dual in DUALS}
RELAYED = {("public", "six"), *((other, "six") for other in HOMES)}
RELAYED |= {("beside", other) for other in ("carrier", "six")}
RELAYED |= {("carrier", dual) for dual in DUALS}
RELAYED |= {("home1", "carrier"), ("home1b", "carrier"), ("home2", "carrier")}
RELAYED |= {("carrier", "shut"), ("carrier", "six"), ("shut", "six")}

PATIENCE_S = 180.0
PUBLIC_PEERS = [nat_lab.Place(router=0, ipv6=True), nat_lab.Place(), nat_lab.Place()]

# One end behind a router, which forgets what is idle; then the other end says something.
IDLE = """
import sys, trio
from holdfast.protocol.network import socket_options, sockets
from holdfast.protocol.addresses import Address
socket_options.KEEPALIVE.update(TCP_KEEPIDLE=int(sys.argv[3]), TCP_KEEPINTVL=int(sys.argv[3]))
async def main():
    if sys.argv[1] == "inside":
        stream = await sockets.open_tcp(Address(sys.argv[2], 29700))
        with trio.move_on_after(float(sys.argv[4])):
            print((await stream.receive_some()).decode(), flush=True)
    else:
        async def wait(stream):
            await trio.sleep(6)
            await stream.send_all(b"still there")
            await trio.sleep(5)
        listeners = await trio.open_tcp_listeners(29700, host=sys.argv[2])
        print("ready", flush=True)
        await trio.serve_listeners(wait, listeners)
trio.run(main)
"""


@pytest.mark.fault("they are behind routers that keep ports")
@needs_lab
def test_every_pair_of_machines_has_a_route(tmp_path: Path) -> None:
    with nat.pairs_lab() as lab:
        found, reach = nat.measure_pairs(lab, tmp_path)
    expected = dict.fromkeys(found, "direct")
    expected.update(dict.fromkeys(PUNCHED, "punched"))
    expected.update(dict.fromkeys(RELAYED, "relayed"))
    assert found == expected
    outbound = {name for name, how in reach.items() if how == "outbound"}
    assert outbound == {*HOMES, *DUALS, "carrier", "shut"}


@pytest.mark.fault(
    "a router forgets idle connections", "nothing", "TCP's keepalives come more often"
)
@needs_lab
@pytest.mark.parametrize(
    ("keepalive_s", "wait_s", "heard"), [(1, PATIENCE_S, "still there"), (60, 10.0, "")]
)
def test_an_idle_connection_outlives_a_routers_patience(
    keepalive_s: int, wait_s: float, heard: str
) -> None:
    """The router forgets after 3 seconds; real ones after 60 or more, and ``KEEPALIVE_S`` is 20."""
    places = [nat_lab.Place(), nat_lab.Place(router=0)]
    with nat_lab.NatLab([nat_lab.Router(idle_cut_s=3)], places) as lab:
        arguments = [lab.address(0), str(keepalive_s), str(wait_s)]
        outside = lab.popen(
            0,
            [sys.executable, "-c", IDLE, "outside", *arguments],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert outside.stdout is not None
        assert outside.stdout.readline() == "ready\n"
        inside = lab.popen(
            1, [sys.executable, "-c", IDLE, "inside", *arguments], stdout=subprocess.PIPE, text=True
        )
        said, _ = inside.communicate(timeout=2 * PATIENCE_S)
        outside.kill()
        outside.communicate()
    assert said.strip() == heard


@needs_lab
@pytest.mark.parametrize("hairpin", [True, False])
def test_a_machine_behind_the_masters_own_router_takes_part(tmp_path: Path, hairpin: bool) -> None:
    """By the public address, if the router sends what comes from inside back inside; else by the
    other.
    """
    routers = [nat_lab.Router(forwards={MASTER_PORT: 0}, hairpin=hairpin)]
    places = [nat_lab.Place(router=0, ipv6=True), nat_lab.Place(router=0)]
    with (
        nat_lab.NatLab(routers, places) as lab,
        nat.NatRun(lab, tmp_path, inside=not hairpin) as run,
    ):
        run.start_master(nat.SPEC)
        run.start_peer("beside", 1)
        dial = "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), 10)"
        outside = [sys.executable, "-c", dial, lab.outside(0), str(MASTER_PORT)]
        with lab.popen(1, outside, stderr=subprocess.DEVNULL) as dialled:
            assert (dialled.wait() == 0) == hairpin
        run.until(lambda s: bool(s["members"]), "it is here", PATIENCE_S)


@needs_lab
def test_a_machine_whose_address_changes_carries_on(tmp_path: Path) -> None:
    """A laptop that roams: the same member in the same session, and a link to the other peer
    again.
    """
    with (
        nat_lab.NatLab([nat_lab.Router(forwards={MASTER_PORT: 0})], PUBLIC_PEERS) as lab,
        nat.NatRun(lab, tmp_path) as run,
    ):
        run.start_master(nat.SPEC)
        for host, name in enumerate(("stays", "roams"), 1):
            run.start_peer(name, host, anywhere=True)
        run.until(lambda s: len(s["members"]) == 2, "both are here", PATIENCE_S)
        run.until(lambda _: bool(run.peer("stays")["links"]), "they have a link", PATIENCE_S)
        numbers = {each["name"]: each["number"] for each in run.master()["members"]}
        lab.move(2, 77)
        told = f"{nat_lab.PUBLIC}.77"
        run.until(
            lambda s: any(
                told in address for each in s["members"] for address in each["addresses"]
            ),
            "its address is known",
            PATIENCE_S,
        )
        run.until(lambda _: bool(run.peer("stays")["links"]), "they have a link again", PATIENCE_S)
        after = run.master()
        assert {each["name"]: each["number"] for each in after["members"]} == numbers
