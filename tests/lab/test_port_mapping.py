"""Routers that map ports, by the real miniupnpd: each protocol, and peers that no longer need a
relay.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.lab_run import MASTER_PORT
from tests.lab import nat_lab
from tests.lab import nat_run as nat
from tests.lab.test_nat import PATIENCE_S, needs_lab

pytestmark = pytest.mark.nightly  # namespaces

PORT = 29_701
INSIDE = """
import sys, trio
from holdfast.daemon.port_mapping.pcp_gateway import PcpGateway
from holdfast.daemon.port_mapping.upnp_gateway import UpnpGateway
from holdfast.protocol.addresses import Address

def gateway(protocol, host, router):
    own = Address(host, 29701)
    return {"UPnP": UpnpGateway, "PCP": PcpGateway}[protocol](router, own)

async def main():
    asked = gateway(*sys.argv[1:])
    listeners = await trio.open_tcp_listeners(29701, host=sys.argv[2])  # the kernel accepts
    for line in sys.stdin:
        if line == "map\\n":
            mapping = await asked.map()
            print(mapping.address.host, mapping.address.port, mapping.protocol, flush=True)
        else:
            await asked.unmap()
            print("unmapped", flush=True)

trio.run(main)
"""
NFT_LIST = ("nft", "list", "table", "inet", "mapped")
DIAL = "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), 3)"


def dials(lab: nat_lab.NatLab, host: str, port: str) -> bool:
    """Whether a host outside can connect."""
    command = [sys.executable, "-c", DIAL, host, port]
    with lab.popen(0, command, stderr=subprocess.DEVNULL) as dialled:
        return bool(dialled.wait() == 0)


def mappings(lab: nat_lab.NatLab, router: int) -> str:
    """Return the rules of the ports that a router has mapped."""
    listed = ["ip", "netns", "exec", lab.router_name(router), *NFT_LIST]
    return subprocess.run(listed, capture_output=True, text=True, check=True).stdout


@pytest.mark.fault("a machine is behind a home's router", "", "the router maps a port to it")
@needs_lab
@pytest.mark.parametrize(
    ("protocol", "family"),
    [("PCP", 4), ("UPnP", 4), ("PCP", 6)],
    ids=["PCP", "UPnP", "PCP, IPv6"],
)
def test_a_real_router_lets_others_in_for_as_long_as_it_is_asked(
    protocol: str, family: int
) -> None:
    router = nat_lab.Router(maps=("pcp", "upnp"), shuts_6=True)
    places = [nat_lab.Place(ipv6=True), nat_lab.Place(router=0, ipv6=True)]
    with nat_lab.NatLab([router], places) as lab:
        own, gate, outside = lab.address(1), "10.77.0.1", lab.outside(0)
        if family == 6:
            own = outside = lab.address_6(1)
            gate = "2001:db8:77:1::1"
        lab.until_mapping(0)
        with lab.popen(
            1,
            [sys.executable, "-c", INSIDE, protocol, own, gate],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as inside:
            heard, said = inside.stdout, inside.stdin
            assert heard is not None
            assert said is not None

            def say(what: str) -> str:
                print(what, file=said, flush=True)
                return str(heard.readline())

            assert not dials(lab, outside, str(PORT))
            host, port, by = say("map").split()
            assert (host, by) == (outside, protocol)
            assert dials(lab, host, port)
            assert say("map").split() == [host, port, by], "renewed"
            assert say("unmap") == "unmapped\n"
            # miniupnpd 2.3.1 opens its IPv6 firewall for a lifetime, and does not shut it before.
            assert dials(lab, host, port) == (family == 6)


KINDS = [kind for kind in nat.KINDS if kind.name in ("beside", "home2", "carrier", "dual1")]


@pytest.mark.fault("a machine is behind a home's router")
@needs_lab
def test_homes_whose_routers_map_ports_leave_the_relay(tmp_path: Path) -> None:
    with nat.pairs_lab(nat.MAPPING, KINDS) as lab, nat.NatRun(lab, tmp_path) as run:
        nat.start_kinds(run, KINDS)
        run.until(
            lambda s: (
                set(nat.linked(run, s, KINDS).values()) <= {"direct", "punched"}
                and all(run.peer(name)["mapped_port"] for name in ("home2", "carrier"))
            ),
            "all pairs are direct, and both ports mapped",
            PATIENCE_S,
        )
        mapped = {kind.name: run.peer(kind.name)["mapped_port"] for kind in KINDS}
        assert mapped["carrier"] == f"{lab.outside(3)}:{MASTER_PORT + 1} by UPnP"
        assert mapped["home2"] == f"{lab.outside(2)}:{MASTER_PORT + 1} by PCP"
        status = run.master()
        assert all(m["reach"] == "reachable" for m in status["members"] if not m["relay"])
        assert f"dnat ip to {lab.address(3)}:" in mappings(lab, 3)
        run.nodes["carrier"].signal(signal.SIGINT)
        run.nodes["carrier"].wait()
        assert "dnat" not in mappings(lab, 3), "the port is given back"
        found = run.doctor("guest", 3)
        assert found["reachable"].startswith("the master cannot reach this machine at 10.77.3.")
        assert found["router"].endswith(f"map a port: {mapped['carrier']}")
        assert "dnat" not in mappings(lab, 3), "this one, too"
