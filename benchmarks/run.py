"""``make bench``: measure, section by section, and write RESULTS.md.

    make bench                               everything that this machine allows
    make bench ARGS='--only lossy,kill'      some sections; the others keep their old figures
    make bench ARGS=--render                 RESULTS.md again from results/*.json, nothing measured

A section that needs root, a tool or a command that is not there says so and is left out; then the
exit status is 1. Ctrl+C stops at once: namespaces and processes go, finished sections stay.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Callable, Sequence

from attrs import frozen

from benchmarks import (
    audits,
    beside_rounds,
    chaos,
    checkpoints,
    cuda,
    dashboard,
    deaths,
    failover,
    gpus,
    hostile,
    hot_swap,
    http_clients,
    join,
    kills,
    leases,
    master_kills,
    nat,
    nat_lab,
    one_way,
    outages,
    scale,
    sections,
    wan_lab,
)
from benchmarks.commands import BenchError
from benchmarks.copying import copies
from benchmarks.first_paint import first_paint, why_no_browser
from benchmarks.fuzzing import fuzzing, why_no_fuzzer
from benchmarks.grounds import why_no_switch
from benchmarks.lanes import lanes, why_no_lanes
from benchmarks.learning import learning, why_no_learning
from benchmarks.learning_found import NAME as FOUND
from benchmarks.learning_found import TITLE as FOUND_TITLE
from benchmarks.learning_found import found
from benchmarks.lines import lines, why_no_lines
from benchmarks.models import models
from benchmarks.namespaces import LabError
from benchmarks.overlap import overlap
from benchmarks.poison import poison, why_no_torch
from benchmarks.progress import say
from benchmarks.report import RESULTS, RESULTS_MD, Record, new_record, render
from benchmarks.sections import Measured
from benchmarks.transfer import transfer


def _anywhere() -> str:
    return ""


def _lab() -> str:
    return wan_lab.why_not() or wan_lab.missing()


def _routers() -> str:
    return nat_lab.why_not() or nat_lab.missing()


@frozen
class Section:
    """A part of RESULTS.md that is measured by itself.

    Attributes:
      why_not: why it cannot be measured here; empty if it can.
      measure: does it; takes seconds to minutes.
    """

    name: str
    title: str
    why_not: Callable[[], str]
    measure: Callable[[], Measured]


SECTIONS = (
    Section("codecs", "what a value takes on the wire", _anywhere, sections.codecs),
    Section("loopback", "on one machine, against gloo", _anywhere, sections.loopback),
    Section("lossy", "a long path that loses packets", _lab, sections.lossy),
    Section("residential", "homes with slow uplinks", _lab, sections.residential),
    Section("kill", "a peer dies in the middle of a round", _lab, deaths.deaths),
    Section("join", "a newcomer copies the state beside rounds", _lab, join.joins),
    Section("beside", "a copy beside rounds that fill the lines", _lab, beside_rounds.beside),
    Section("copy", "the state over slow lines, from donors that die or lie", _lab, copies),
    Section("transfer", "the state between processes of one machine", _anywhere, transfer),
    Section("memory", "what a round needs", _anywhere, sections.memory),
    Section("models", "what a peer needs for a model", why_no_torch, models),
    Section("gpus", "a GPU of a peer fails and returns", why_no_torch, gpus.gpus),
    Section("cuda", "what a run costs a GPU's training", cuda.why_no_cuda, cuda.cuda),
    Section("caps", "limits that a volunteer sets", _anywhere, sections.caps),
    Section("lines", "rounds over lines that nobody described", why_no_lines, lines),
    Section("lanes", "how many connections a link opens", why_no_lanes, lanes),
    Section("overlap", "communication that nobody waits for", _lab, overlap),
    Section("learning", "what is learned, arm by arm", why_no_learning, learning),
    Section(FOUND, FOUND_TITLE, why_no_learning, found),
    Section("poison", "what lying contributors do, and what bounds them", why_no_torch, poison),
    Section("audits", "owners that lie, and who looks", _anywhere, audits.audits),
    Section("nat", "machines behind routers", _routers, nat.nat),
    Section("one-way", "lines that carry nothing in one direction", why_no_switch, one_way.one_way),
    Section("outages", "a master, and a line, that are away for seconds", _lab, outages.outages),
    Section("chaos", "faults at random instants", _anywhere, chaos.chaos),
    Section(
        "master-kills", "a master that dies again and again", _anywhere, master_kills.master_kills
    ),
    Section(
        "failover",
        "the leading one of several masters is lost",
        failover.why_no_failover,
        failover.failover,
    ),
    Section("kills", "whoever dies when, and what is recorded of it", _anywhere, kills.kills),
    Section("leases", "every sample once an epoch", why_no_torch, leases.leases),
    Section("hot-swap", "a spare takes a dead contributor's place", _anywhere, hot_swap.hot_swap),
    Section("checkpoints", "a checkpoint at every round", _anywhere, checkpoints.checkpoints),
    Section("hostile", "strangers at the ports", _anywhere, hostile.hostile),
    Section(
        "http-clients", "clients of the dashboard's side", _anywhere, http_clients.http_clients
    ),
    Section("fuzz", "what every parser has taken", why_no_fuzzer, fuzzing),
    Section("scale", "many members", _anywhere, scale.scale),
    Section("dashboard", "what people look at", _anywhere, dashboard.dashboard),
    Section("first-paint", "how soon the dashboard is there", why_no_browser, first_paint),
)


def chosen(names: str | None) -> list[Section]:
    """The sections of a comma-separated list, in their own order; None: all of them.

    Raises:
      BenchError: there is no such section.
    """
    if names is None:
        return list(SECTIONS)
    wanted = set(names.split(","))
    if unknown := wanted - {section.name for section in SECTIONS}:
        known = ", ".join(section.name for section in SECTIONS)
        raise BenchError(f"no section {', '.join(sorted(unknown))}; there are {known}")
    return [section for section in SECTIONS if section.name in wanted]


def measure(which: Sequence[Section]) -> bool:
    """Measure these and keep their figures; whether all could be measured."""
    complete = True
    for section in which:
        if reason := section.why_not():
            say(f"{section.name}: left out, {reason}")
            complete = False
            continue
        say(f"{section.name}: {section.title}")
        load = os.getloadavg()[0]
        tables, raw = section.measure()
        new_record(section.name, section.title, tables, raw, load).save()
        write_page()
    return complete


def page() -> str:
    """RESULTS.md of whatever has been measured until now."""
    files = [RESULTS / f"{section.name}.json" for section in SECTIONS]
    return render([Record.load(path) for path in files if path.exists()])


def write_page() -> None:
    RESULTS_MD.write_text(page())


def _stop(_number: int, _frame: object) -> None:
    raise KeyboardInterrupt


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="make bench", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--only", metavar="NAME[,...]", help=", ".join(s.name for s in SECTIONS))
    parser.add_argument("--render", action="store_true", help="only make RESULTS.md again")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, _stop)
    try:
        if options.render:
            write_page()
            return 0
        return 0 if measure(chosen(options.only)) else 1
    except (BenchError, LabError) as error:
        print(f"bench: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("bench: stopped; finished sections are kept", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
