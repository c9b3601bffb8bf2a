"""A pytest plugin: what each test costs in processor seconds, and how much a test that fails got.

A test's processor seconds are those of its process and of the children that it has waited for. Each
process of the run writes a line for each test into the folder ``DURATIONS``, and the run ends with
the tests that got slower by half than those of ``durations.json``: see ``tools/durations.py``. That
fails nothing.

The report of a test that fails says how much processor it got, and how busy the machine was
meanwhile: one that was starved is told from one that hangs.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Generator
from pathlib import Path

import psutil
import pytest
from attrs import frozen

from tools.durations import (
    BROWSER,
    COLLECTION,
    LABS,
    PACKAGING,
    PROCESSES,
    ROOMS,
    RUN,
    RUNNER,
    SEEDS,
    SWARM,
    WITH_TORCH,
    Cost,
    costs_in,
    kept_seconds,
    of_tests,
    slower,
)

FOLDERS = {"swarm": SWARM, "browser": BROWSER, "packaging": PACKAGING, "lab": LABS}


def processor_seconds() -> float:
    """Return what this process and the children that it has waited for have taken."""
    took = os.times()
    return took.user + took.system + took.children_user + took.children_system


def group_of(path: Path) -> str:
    """Return the group of the tests of a file."""
    folder = path.parent.name
    if folder == "swarm" and path.name.startswith("test_simulation"):
        return SEEDS
    if folder == "processes":
        return WITH_TORCH if _names_torch(path) else PROCESSES
    return FOLDERS.get(folder, ROOMS)


@functools.cache
def _names_torch(path: Path) -> bool:
    """Guess whether tests start trainers that import torch: their file says so, as in
    WITH_TORCH.
    """
    return "torch" in path.read_text().lower().replace("without torch", "")


@frozen
class Reading:
    """What the kernel counts, at an instant.

    Attributes:
      at_epoch_s: as start times of processes are given.
      waiting_s: time in which any process of the machine waited for a processor.
      ticks: of all processors, idle and stolen ones included.
    """

    at_s: float
    at_epoch_s: float
    processor_s: float
    waiting_s: float
    idle_ticks: int
    stolen_ticks: int
    ticks: int

    @classmethod
    def now(cls) -> Reading:
        # user nice system idle iowait irq softirq steal; guests are in the first two
        states = [int(each) for each in _first_line("/proc/stat").split()[1:9]] or [0] * 8
        waiting_us = _first_line("/proc/pressure/cpu").rpartition("total=")[2]
        return cls(
            at_s=time.monotonic(),
            at_epoch_s=time.time(),
            processor_s=processor_seconds(),
            waiting_s=int(waiting_us or 0) / 1e6,
            idle_ticks=states[3] + states[4],
            stolen_ticks=states[7],
            ticks=sum(states),
        )


def _first_line(path: str) -> str:
    try:
        return Path(path).read_text().partition("\n")[0]
    except OSError:
        return ""  # an old kernel, or a container that hides it


def running_children_s(since_epoch_s: float) -> float:
    """Return the processor seconds of children that run and were started since then."""
    seconds = 0.0
    for child in psutil.Process().children(recursive=True):
        try:
            if child.create_time() >= since_epoch_s:
                took = child.cpu_times()
                seconds += took.user + took.system
        except psutil.Error:
            continue  # it has just ended
    return seconds


def got(begun: Reading, now: Reading, running_s: float) -> str:
    """Say how much processor a test got, and how busy the machine was."""
    wall_s, ticks = max(now.at_s - begun.at_s, 1e-3), max(now.ticks - begun.ticks, 1)
    load = " ".join(_first_line("/proc/loadavg").split()[:3])
    return (
        f"{wall_s:.1f} s by the clock. Processor: {now.processor_s - begun.processor_s:.1f} s in"
        f" the test and children that have ended, {running_s:.1f} s in children that run.\nThe"
        " machine meanwhile: processes waited for a processor"
        f" {(now.waiting_s - begun.waiting_s) / wall_s:.0%} of the time; its {os.cpu_count()} cores"
        f" were idle {(now.idle_ticks - begun.idle_ticks) / ticks:.0%}, stolen by other machines"
        f" {(now.stolen_ticks - begun.stolen_ticks) / ticks:.0%}; load {load}."
    )


class Durations:
    """The plugin; each process of a run has one.

    Args:
      folder: where costs are written; None to write none.
    """

    def __init__(self, config: pytest.Config, folder: Path | None) -> None:
        self.folder = folder
        self._config = config
        self._file = os.environ.get("PYTEST_XDIST_WORKER", "pytest") + ".jsonl"
        self._begun = Reading.now()
        self._failed = False
        self._written_s = 0.0

    def _write(self, name: str, group: str, wall_s: float, seconds: float, passed: bool) -> None:
        self._written_s += seconds
        if self.folder is not None:
            cost = Cost(name, group, round(wall_s, 3), round(seconds, 3), passed)
            cost.append_to(self.folder / self._file)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_collection(self) -> Generator[None, object, object]:
        """Note the collection, with all that was imported before it."""
        result = yield
        wall_s = time.monotonic() - self._begun.at_s
        self._write("collection", COLLECTION, wall_s, processor_seconds(), True)
        return result

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        self._begun, self._failed = Reading.now(), False
        result = yield
        wall_s = time.monotonic() - self._begun.at_s
        seconds = processor_seconds() - self._begun.processor_s
        self._write(item.nodeid, group_of(item.path), wall_s, seconds, not self._failed)
        return result

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(self) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        if report.failed:
            self._failed = True
            running_s = running_children_s(self._begun.at_epoch_s)
            report.sections.append(("Processor", got(self._begun, Reading.now(), running_s)))
        return report

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self) -> None:
        """Note what is left; workers, the children of the process that controls them, say their
        own.
        """
        controls = bool(self._config.getoption("numprocesses", None))
        took = os.times()
        seconds = took.user + took.system if controls else processor_seconds()
        self._write("the rest", RUNNER, 0.0, seconds - self._written_s, True)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Name the slower tests. Workers have ended, so that their files are whole."""
        if self.folder is None:
            return
        whole = self._config.args_source is pytest.Config.ArgsSource.TESTPATHS
        self._write(RUN, RUNNER, 0.0, 0.0, whole and not self._config.getoption("keyword"))
        lines = slower(of_tests(costs_in(self.folder)), kept_seconds())
        if lines:
            terminalreporter.section("slower by half than tests/durations.json says")
            for line in lines:
                terminalreporter.line(line)
