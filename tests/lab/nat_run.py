"""Which pairs of machines connect how, through real routers; and a run of six, four of them behind NAT.

As root:

    python benchmarks/nat.py pairs          the table, filled by real peers in namespaces
    python benchmarks/nat.py run            six peers, a relay: speed against the plan's, the relay's death
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from attrs import evolve, frozen

sys.path.insert(0, str(Path(__file__).parents[1]))  # for when this file itself is run
from benchmarks.commands import HOLDFAST, BenchError
from benchmarks.lab_run import MASTER_PORT, LabRun, Status, stop_on_signals
from benchmarks.namespaces import LabError
from tests.lab.nat_lab import NatLab, Place, Router
from benchmarks.progress import say
from benchmarks.report import Table
from benchmarks.sections import Measured

SETTLE_S = 150.0  # for all pairs to have tried their routes, on a busy machine
STEADY_S = 25.0  # more than one attempt of a pair to do without its relay takes
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

    def __init__(
        self, lab: NatLab, folder: Path, script: Sequence[str], *, inside: bool = False
    ) -> None:
        super().__init__(lab, folder, script)
        self._nat = lab
        self._inside = inside

    def restart_master(self) -> None:
        spec = str(self._folder / "run.toml")
        listen = ["--listen", f"0.0.0.0:{MASTER_PORT}", "--listen", f"[::]:{MASTER_PORT}"]
        outside = f"{self._nat.outside(MASTER_ROUTER)}:{MASTER_PORT}"
        inside_6 = f"[{self._nat.address_6(0)}]:{MASTER_PORT}"
        listen += ["--advertise", outside, "--advertise", inside_6]
        if self._inside:
            listen += ["--advertise", f"{self._nat.address(0)}:{MASTER_PORT}"]
        self._spawn("master", 0, "master", spec, "--no-invite", *listen)

    def start_peer(
        self,
        name: str,
        host: int,
        *,
        script: Sequence[str] = (),
        more: Sequence[str] = (),
        founder: bool = False,
        both: bool = False,
        anywhere: bool = False,
    ) -> None:
        """A peer; without a script it keeps a copy only, which is enough for its links.

        Args:
          anywhere: it listens at whatever address its host gets; else at the one that it has now.
        """
        self.invite(name, founder=founder)
        address = "0.0.0.0" if anywhere else self._nat.address(host)
        listen = ["--listen", f"{address}:{MASTER_PORT + 1}"]
        if both:
            listen += ["--listen", f"[{self._nat.address_6(host)}]:{MASTER_PORT + 1}"]
        command = [sys.executable, *script] if script else None
        arguments = ["join", self._invites[name], "--name", name, *listen, *more]
        self._spawn(name, host, *arguments, command=command)

    def doctor(self, name: str, host: int) -> dict[str, str]:
        """What ``holdfast doctor`` finds with a peer's invite and address, by check."""
        listen = f"{self._nat.address(host)}:{MASTER_PORT + 1}"
        more = ["--state", str(self._folder / f"{name}-doctor"), "--listen", listen, "--json"]
        command = [*HOLDFAST, "doctor", self._invites[name], *more]
        asked = self._nat.popen(host, command, stdout=subprocess.PIPE, text=True)
        report = json.loads(asked.communicate(timeout=SETTLE_S)[0])
        return {each["check"]: each["text"] for each in report["findings"]}

    def start_relay(self, name: str, host: int, *, rate: float) -> None:
        self.invite(name, role="relay")
        arguments = ["relay", self._invites[name], "--name", name, "--max-rate", f"{rate:g}"]
        for address in (self._nat.address(host), f"[{self._nat.address_6(host)}]"):
            arguments += ["--listen", f"{address}:{MASTER_PORT + 2}"]
        self._spawn(name, host, *arguments, http=False)


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


def measure_pairs(
    lab: NatLab, folder: Path, *, relay: bool = True, steady_s: float = 0.0
) -> tuple[Pairs, dict[str, str]]:
    """Start one peer of each kind, and wait until every pair has a link or nobody tries any more.

    Args:
      steady_s: for so long no link changes: routers map ports only once a relay was needed.

    Returns:
      How each pair is linked, and how the master classed each.
    """
    with NatRun(lab, folder, ()) as run:
        start_kinds(run, KINDS, relay=relay)
        until_s = time.monotonic() + SETTLE_S
        before: Pairs = {}
        while True:
            status, now_s = run.master(), time.monotonic()
            found = linked(run, status, KINDS)
            if found != before or "none" in found.values():
                before, since_s = found, now_s
            if now_s > until_s or (now_s >= since_s + steady_s and "none" not in found.values()):
                return found, {m["name"]: m["reach"] for m in status["members"]}
            time.sleep(0.5)


def start_kinds(run: NatRun, kinds: Sequence[Kind], *, relay: bool) -> None:
    """Start the master, a relay, and one peer of each kind; wait until all are here."""
    run.start_master(SPEC)
    if relay:
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


def table(pairs: Pairs, reach: dict[str, str]) -> str:
    """As Markdown."""
    names = [kind.name for kind in KINDS]
    lines = [f"| | {' | '.join(names[1:])} |", f"| --- |{' --- |' * (len(names) - 1)}"]
    for at, one in enumerate(names[:-1]):
        cells = [""] * at + [pairs[one, other] for other in names[at + 1 :]]
        lines.append(f"| **{one}** ({reach.get(one, '?')}) | {' | '.join(cells)} |")
    said = [f"- *{kind.name}*: {kind.said}" for kind in KINDS]
    return "\n".join([*lines, "", *said])


# ---------------------------------------------------------------- a run of six


RUN_SPEC = """
[run]
name = "nat"
[diloco]
sync_every = 4
overlap = 0
[membership]
min_members = 6
deadline_s = 6
[reduce]
codec_up = "fp32"
codec_down = "fp32"
"""
# Steps that only take their time, of a model of some megabytes: what is measured is the lines.
TRAINER = ("-m", "benchmarks.overlap_trainer", "--width", "128", "--layers", "2", "--step-s", "0.2")
LINE_MBYTES_S = 2.0  # each peer's own cap, each way: what the plan may count on
RELAY_MBYTES_S = 4.0
ROUNDS_BEFORE = 4  # until rates are known
ROUNDS = 8  # measured


def run_lab() -> NatLab:
    """The master, two public peers, two behind each of two routers, and two hosts for relays."""
    homes = [Place(router=1), Place(router=1), Place(router=2), Place(router=2)]
    hosts = [Place(router=MASTER_ROUTER, ipv6=True), Place(), Place(), *homes]
    relays = [Place(ipv6=True), Place(ipv6=True)]
    routers = [Router(forwards={MASTER_PORT: 0}), Router(), Router(keeps_ports=False)]
    return NatLab(routers, [*hosts, *relays])


def measure_run(lab: NatLab, folder: Path, rounds: int) -> dict[str, Any]:
    """Train with six; then kill the relay that is used, and train on."""
    with NatRun(lab, folder, ()) as run:
        run.start_master(RUN_SPEC)
        run.start_relay("relay", 7, rate=RELAY_MBYTES_S)
        caps = ["--max-upload", f"{LINE_MBYTES_S:g}", "--max-download", f"{LINE_MBYTES_S:g}"]
        for number in range(1, 7):
            name = f"p{number}"
            script = [*TRAINER, "--log", str(folder / f"{name}.jsonl")]
            run.start_peer(name, number, script=script, more=caps, founder=number == 1)
        run.until(lambda s: s["counts"]["contributed"] == 6, "six contribute", 2 * SETTLE_S)
        run.note_trainers()
        first = run.until(
            lambda s: all(row["works"] for row in s["routes"]), "all routes work", SETTLE_S
        )
        settled = first["committed"] + ROUNDS_BEFORE
        run.until(lambda s: s["committed"] >= settled, "rates are known", 2 * SETTLE_S)
        goal = settled + rounds
        status = run.until(lambda s: s["committed"] >= goal, "rounds", 4 * SETTLE_S)
        before = speeds(status, rounds)
        routes = {" and ".join(row["names"]): row["route"] for row in status["routes"]}
        run.kill("relay")
        run.start_relay("other", 8, rate=RELAY_MBYTES_S)
        goal = run.master()["committed"] + rounds
        status = run.until(lambda s: s["committed"] >= goal, "rounds after it", 4 * SETTLE_S)
        again = run.until(
            lambda s: all(row["works"] for row in s["routes"]) and s["counts"]["contributed"] == 6,
            "all routes work again",
            2 * SETTLE_S,
        )
        members = {m["name"]: m["number"] for m in again["members"]}
        return {
            "routes": routes,
            "before": before,
            "after": speeds(status, rounds),
            "members": members,
            "aborted": status["aborted"],
        }


def speeds(status: Status, rounds: int) -> dict[str, float]:
    """Medians of the last rounds: what the plan predicted of a reduction, and what it took."""
    ended = [r for r in status["past_rounds"] if r["outcome"] == "committed"][-rounds:]
    known = [s for r in ended if (s := r["plan"]["predicted_s"]) is not None]
    predicted = statistics.median(known)
    taken = statistics.median(r["plan"]["took_s"] for r in ended)
    return {"predicted_s": predicted, "taken_s": taken, "share": predicted / taken}


# ---------------------------------------------------------------- as a section of RESULTS.md


def nat() -> Measured:
    say("a run of six, four of them behind routers")
    with tempfile.TemporaryDirectory(prefix="holdfast-bench-") as folder, run_lab() as lab:
        six = measure_run(lab, Path(folder), ROUNDS)
    say(f"a peer of each of {len(KINDS)} kinds, every pair")
    with tempfile.TemporaryDirectory(prefix="holdfast-bench-") as folder, pairs_lab() as lab:
        found = measure_pairs(lab, Path(folder))
    say("the same with routers that map ports")
    with tempfile.TemporaryDirectory(prefix="holdfast-bench-") as folder, pairs_lab(MAPPING) as lab:
        mapped = measure_pairs(lab, Path(folder), steady_s=STEADY_S)
    raw = {
        "run": six,
        "pairs": {" and ".join(pair): route for pair, route in found[0].items()},
        "reach": found[1],
        "pairs_mapped": {" and ".join(pair): route for pair, route in mapped[0].items()},
        "reach_mapped": mapped[1],
    }
    plain = "How each pair of machines is linked, through real routers in namespaces"
    tables = [
        _run_table(six),
        _pairs_table(found, plain, "python -m benchmarks.nat pairs"),
        _pairs_table(
            mapped,
            "The same, with miniupnpd in every router",
            "python -m benchmarks.nat pairs --mapping",
        ),
    ]
    return tables, raw


def _run_table(six: dict[str, Any]) -> Table:
    rows = [
        [
            when,
            f"{six[key]['predicted_s']:.3f}",
            f"{six[key]['taken_s']:.3f}",
            f"{six[key]['share']:.0%}",
        ]
        for key, when in (
            ("before", "four behind two routers"),
            ("after", "after the relay's death"),
        )
    ]
    relayed = sum(route.startswith("relayed") for route in six["routes"].values())
    return Table(
        "Six peers, of which two are behind one router and two behind another; "
        f"{relayed} of 15 pairs need the relay",
        ["python -m benchmarks.nat run"],
        ["when", "the plan's estimate, s", "a reduction, s", "speed of the estimate's"],
        rows,
        [
            f"Medians of {ROUNDS} rounds; every peer lets {LINE_MBYTES_S:g} MB/s through each way, the "
            f"relay {RELAY_MBYTES_S:g}. Asked: 80 % of the estimate. The relay is killed with SIGKILL "
            f"and another enrols; rounds aborted in all: {six['aborted']}.",
            "Routes: " + _routes(six["routes"]) + "; the other pairs dial each other.",
        ],
    )


def _routes(routes: dict[str, str]) -> str:
    said: dict[str, list[str]] = {}
    for pair, route in routes.items():
        said.setdefault(route, []).append(pair)
    return "; ".join(
        f"{route}: {', '.join(sorted(pairs))}" for route, pairs in sorted(said.items())
    )


def _pairs_table(found: tuple[Pairs, dict[str, str]], title: str, command: str) -> Table:
    pairs, reach = found
    names = [kind.name for kind in KINDS]
    rows = [
        [
            f"**{one}** ({reach.get(one, '?')})",
            *[""] * at,
            *(pairs[one, other] for other in names[at + 1 :]),
        ]
        for at, one in enumerate(names[:-1])
    ]
    return Table(
        title,
        [command],
        ["", *names[1:]],
        rows,
        [f"*{kind.name}*: {kind.said}." for kind in KINDS],
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("what", choices=["pairs", "run"])
    parser.add_argument("--without-relay", action="store_true", help="of pairs: with none")
    parser.add_argument("--mapping", action="store_true", help="of pairs: routers map ports")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    options = parser.parse_args()
    stop_on_signals()
    try:
        with tempfile.TemporaryDirectory() as folder:
            if options.what == "pairs":
                routers, steady_s = (MAPPING, STEADY_S) if options.mapping else (ROUTERS, 0.0)
                with pairs_lab(routers) as lab:
                    relay = not options.without_relay
                    found = measure_pairs(lab, Path(folder), relay=relay, steady_s=steady_s)
                    print(table(*found))
            else:
                with run_lab() as lab:
                    found_run = measure_run(lab, Path(folder), options.rounds)
                    print(json.dumps(found_run, indent=1))
    except (LabError, BenchError) as error:
        print(f"nat: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
