"""``make bench``: measure, section by section, and write RESULTS.md.

    make bench                               everything that this machine allows
    make bench ARGS='--only lines,kill'      some sections; the others keep their text

A section that needs root, or a tool that is not there, says so and is left out; then the exit
status is 1. Ctrl+C stops at once: namespaces and processes go, finished sections stay.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence

from attrs import frozen

from benchmarks import (
    allreduce_sections,
    chaos,
    deaths,
    failover,
    hosts,
    hot_swap,
    join,
    learning,
    lines,
    poison,
    scale,
    spot,
    step_bytes,
    transfer,
    wan_lab,
)
from benchmarks.grounds import why_no_switch
from benchmarks.report import BenchError, Measured, keep_section, listed, run_main, say


def _anywhere() -> str:
    return ""


def _lab() -> str:
    return wan_lab.why_not() or wan_lab.missing()


@frozen
class Section:
    """A part of RESULTS.md that is measured by itself.

    Attributes:
      measure: does it; takes seconds to minutes.
      why_not: why it cannot be measured here; empty if it can.
    """

    name: str
    title: str
    measure: Callable[[], Measured]
    why_not: Callable[[], str] = _anywhere


SECTIONS = (
    Section("loopback", "on one machine, against gloo", allreduce_sections.loopback),
    Section("kill", "a peer dies in the middle of a round", deaths.deaths, _lab),
    Section("join", "a newcomer copies the state beside rounds", join.joins, _lab),
    Section("transfer", "the state between processes of one machine", transfer.transfer),
    Section("lines", "rounds over lines that nobody described", lines.lines, _lab),
    Section("step-bytes", "what a peer sends in a step", step_bytes.step_bytes, _lab),
    Section("learning", "what is learned, arm by arm", learning.learning),
    Section("found", "what the field found since", learning.found),
    Section("tuned", "inner rates that suit data parallel", learning.tuned),
    Section("poison", "members that do not do what they say", poison.poison),
    Section("chaos", "faults at random instants", chaos.chaos),
    Section(
        "failover",
        "the leading one of several masters is lost",
        failover.failover,
        failover.why_no_failover,
    ),
    Section("hot-swap", "a spare takes a dead contributor's place", hot_swap.hot_swap),
    Section("hosts", "a peer of two hosts", hosts.hosts, why_no_switch),
    Section("scale", "many members", scale.scale),
    Section("spot", "machines that are lost and come back", spot.spot, _lab),
)


def chosen(names: str | None) -> list[Section]:
    """Return the sections of a comma-separated list, in their own order; None: all of them.

    Raises:
      BenchError: there is no such section.
    """
    if names is None:
        return list(SECTIONS)
    wanted = set(listed(names))
    if unknown := wanted - {section.name for section in SECTIONS}:
        known = ", ".join(section.name for section in SECTIONS)
        raise BenchError(f"no section {', '.join(sorted(unknown))}; there are {known}")
    return [section for section in SECTIONS if section.name in wanted]


def measure(which: Sequence[Section]) -> bool:
    """Measure these and keep their figures; return whether all could be measured."""
    complete = True
    for section in which:
        if reason := section.why_not():
            say(f"{section.name}: left out, {reason}")
            complete = False
            continue
        say(f"{section.name}: {section.title}")
        load = os.getloadavg()[0]
        keep_section(section.name, section.title, section.measure(), load)
    return complete


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="make bench", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--only", metavar="NAME[,...]", help=", ".join(s.name for s in SECTIONS))
    return 0 if measure(chosen(parser.parse_args().only)) else 1


if __name__ == "__main__":
    sys.exit(run_main("bench", main))
