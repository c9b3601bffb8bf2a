"""Runs through real routers: a master behind one of them, and a machine of each kind."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from attrs import evolve, frozen

from benchmarks.lab_run import MASTER_PORT, LabRun
from holdfast.daemon.cli.fleet import Node, Status
from tests.lab.nat_lab import NatLab, Place, Router

SETTLE_S = 150.0  # for all pairs to have tried their routes, on a busy machine
MASTER_ROUTER = 0

SPEC = """
[run]
name = "nat"
[membership]
min_members = 2
deadline_s = 6
"""


class NatRun(LabRun):
    """A run whose master is behind a router that forwards its port.

    Args:
      inside: the master also names the address that it has behind its router.
    """

    def __init__(self, lab: NatLab, folder: Path, *, inside: bool = False) -> None:
        super().__init__(lab, folder, ())
        self._nat = lab
        self._inside = inside

    def start_master(self, toml: str, **how: Any) -> Node:
        outside = f"{self._nat.outside(MASTER_ROUTER)}:{MASTER_PORT}"
        named = [outside, f"[{self._nat.address_6(0)}]:{MASTER_PORT}"]
        if self._inside:
            named.append(f"{self._nat.address(0)}:{MASTER_PORT}")
        more = ["--listen", f"[::]:{MASTER_PORT}"]
        more += [word for address in named for word in ("--advertise", address)]
        return super().start_master(toml, listen=f"0.0.0.0:{MASTER_PORT}", more=more, **how)

    def start_peer(
        self, name: str, host: int, *, both: bool = False, anywhere: bool = False
    ) -> None:
        """Start a peer that only keeps a copy, which is enough for its links.

        Args:
          both: it listens at its IPv6 address, too.
          anywhere: it listens at whatever address its host gets; else at the one that it has now.
        """
        self.hosts[name] = host
        more = ["--listen", f"[{self._nat.address_6(host)}]:{MASTER_PORT + 1}"] if both else []
        address = "0.0.0.0" if anywhere else self._nat.address(host)
        self.join(name, listen=f"{address}:{MASTER_PORT + 1}", http=self.http(host), more=more)

    def doctor(self, name: str, host: int) -> dict[str, str]:
        """Return what ``holdfast doctor`` finds with a peer's invite and address, by check."""
        listen = f"{self._nat.address(host)}:{MASTER_PORT + 1}"
        more = ["--state", str(self.folder / f"{name}-doctor"), "--listen", listen, "--json"]
        command = [sys.executable, "-m", "holdfast", "doctor", self.invite(name), *more]
        asked = self._nat.popen(host, command, stdout=subprocess.PIPE, text=True)
        report = json.loads(asked.communicate(timeout=SETTLE_S)[0])
        return {each["check"]: each["text"] for each in report["findings"]}

    def start_relay(self, name: str, host: int, *, rate: float) -> None:
        self.hosts[name] = host
        arguments = ["relay", self.invite(name, role="relay"), "--name", name]
        arguments += ["--max-rate", f"{rate:g}", "--state", str(self.folder / name)]
        for address in (self._nat.address(host), f"[{self._nat.address_6(host)}]"):
            arguments += ["--listen", f"{address}:{MASTER_PORT + 2}"]
        self.spawn(name, *arguments)


# ---------------------------------------------------------------- pairs


@frozen
class Kind:
    """A machine of the table.

    Attributes:
      said: for people.
    """

    name: str
    said: str
    place: Place


ROUTERS = (
    Router(forwards={MASTER_PORT: 0}),
    Router(),
    Router(),
    Router(keeps_ports=False),
    Router(shuts_6=True),
    Router(shuts_6=True),
)
# The same, with routers that map ports for those who ask, each by other protocols.
MAPPING = tuple(
    evolve(router, maps=maps)
    for router, maps in zip(
        ROUTERS,
        (("pcp", "upnp"), ("upnp",), ("pcp",), ("upnp",), ("pcp",), ("pcp", "upnp")),
        strict=True,
    )
)
KINDS = (
    Kind("public", "a public address", Place()),
    Kind("beside", "behind the master's router", Place(router=MASTER_ROUTER)),
    Kind("home1", "behind a router that keeps ports", Place(router=1)),
    Kind("home1b", "behind the same router as home1", Place(router=1)),
    Kind("home2", "behind another router that keeps ports", Place(router=2)),
    Kind("carrier", "behind a router that draws ports at random", Place(router=3)),
    Kind("shut", "a public address, and a firewall that lets nothing in", Place(shut=True)),
    Kind("six", "IPv6 only", Place(ipv4=False, ipv6=True)),
    Kind("dual1", "IPv6 behind a router that shuts it, and IPv4", Place(router=4, ipv6=True)),
    Kind("dual2", "the same behind another router", Place(router=5, ipv6=True)),
)
Pairs = dict[tuple[str, str], str]


def pairs_lab(routers: Sequence[Router] = ROUTERS, kinds: Sequence[Kind] = KINDS) -> NatLab:
    places = [Place(router=MASTER_ROUTER, ipv6=True), *(kind.place for kind in kinds)]
    return NatLab(routers, [*places, Place(ipv6=True)])


def measure_pairs(lab: NatLab, folder: Path) -> tuple[Pairs, dict[str, str]]:
    """Start one peer of each kind, and wait until every pair has a link or nobody tries any more.

    Returns:
      How each pair is linked, and how the master classed each.
    """
    with NatRun(lab, folder) as run:
        start_kinds(run, KINDS)
        until_s = time.monotonic() + SETTLE_S
        while True:
            status, late = run.master(), time.monotonic() > until_s
            found = linked(run, status, KINDS)
            if late or "none" not in found.values():
                return found, {m["name"]: m["reach"] for m in status["members"]}
            time.sleep(0.5)


def start_kinds(run: NatRun, kinds: Sequence[Kind]) -> None:
    """Start the master, a relay, and one peer of each kind; wait until all are here."""
    run.start_master(SPEC)
    run.start_relay("relay", len(kinds) + 1, rate=50.0)
    run.until(lambda s: any(m["relay"] for m in s["members"]), "the relay", SETTLE_S)
    for number, kind in enumerate(kinds, 1):
        run.start_peer(kind.name, number, both=kind.place.ipv4 and kind.place.ipv6)
    everybody = {kind.name for kind in kinds}
    run.until(lambda s: everybody <= {m["name"] for m in s["members"]}, "all are here", SETTLE_S)


def linked(run: NatRun, status: Status, kinds: Sequence[Kind]) -> Pairs:
    """By pair: how it is linked at this moment; "none": it is not."""
    names = {m["peer"]: m["name"] for m in status["members"]}
    links = {
        kind.name: {names.get(link["peer"]) for link in run.peer(kind.name)["links"]}
        for kind in kinds
    }
    arranged = {
        frozenset(names[peer] for peer in row["peers"]): row["route"]
        for row in status["routes"]
        if all(peer in names for peer in row["peers"])
    }
    found = {}
    for one, other in itertools.combinations([kind.name for kind in kinds], 2):
        up = other in links[one] and one in links[other]
        route = arranged.get(frozenset((one, other)), "direct").partition(",")[0]
        found[one, other] = route if up else "none"
    return found
