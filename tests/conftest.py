"""Runs every ``async def`` test under trio: in virtual time, unless it is marked ``real_time``."""

from __future__ import annotations

import functools
import gc
import inspect
import os
import signal
import zlib
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence

import pytest
import trio
from hypothesis import HealthCheck, settings

from holdfast.simulation.batch import collect_rarely
from holdfast.simulation.virtual_time import run_virtually
from tests import fork_server
from tests.durations import Durations
from tests.needs import told_skipped
from tests.planting import told_to_record
from tests.rewriting import rewrite_share
from tools.durations import folder

REAL_SECONDS_MAX = 900.0  # for what hangs: it is told by name before pytest's own timeout

# CI tries the same examples every time: a red build is the change's doing. At a desk every run
# tries others and keeps the failing ones in .hypothesis/. How long an example takes says nothing
# where other tests run beside it.
settings.register_profile(
    "dev",
    settings.get_profile("default"),
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("ci", settings.get_profile("dev"), derandomize=True, database=None)
settings.load_profile("ci" if os.environ.get("CI") else "dev")
fork_server.enable()


_left_out: Counter[str] = Counter()  # nightly tests that were not run, by file


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Durations(config, folder()), "durations")


def pytest_sessionstart(session: pytest.Session) -> None:
    if session.config.getoption("dist", "no") == "no":  # this process collects the tests
        gc.disable()  # until they are: all that is made stays
    rewrite_share(session.config)


def pytest_deselected(items: Sequence[pytest.Item]) -> None:
    """Count the nightly tests that are not run; the end of the run says so."""
    _left_out.update(item.path.name for item in items if item.get_closest_marker("nightly"))


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Hand the count of a worker to the process that prints; all workers collect the same."""
    output: dict[str, object] | None = getattr(session.config, "workeroutput", None)
    if output is not None:
        output["left out"] = dict(_left_out)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: object) -> None:
    for name, count in getattr(node, "workeroutput", {}).get("left out", {}).items():
        _left_out[name] = count


def nightly_line(left_out: Counter[str]) -> str:
    """Say in one line what was left to the nightly run."""
    files = ", ".join(f"{count} of {name}" for name, count in sorted(left_out.items()))
    return f"Left to `make nightly`: {left_out.total()} tests ({files})"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the slow tests first: short ones then fill what is left of the time of each worker."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


def pytest_collection_finish() -> None:
    """Exempt what was collected from garbage collection: tests make much garbage, this is none."""
    gc.enable()
    collect_rarely()


@pytest.fixture(autouse=True)
def signal_handlers() -> Iterator[None]:
    """Restore the handlers: two daemons in one process that listen for signals leave one of
    theirs.
    """
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(autouse=True)
def forks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Start new interpreters where the test is marked so; leave no process that has ended."""
    if request.node.get_closest_marker("new_interpreter") is not None:
        monkeypatch.setattr(fork_server.ForkedPopen, "enabled", False)
    yield
    fork_server.reap_orphans()


async def _bounded(test: Callable[[], Awaitable[None]], seconds: float) -> None:
    with trio.fail_after(seconds):
        await test()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Take over coroutine tests; plain functions are left to pytest."""
    function = pyfuncitem.obj
    if not inspect.iscoroutinefunction(function):
        return None
    names = inspect.signature(function).parameters
    bound = functools.partial(function, **{name: pyfuncitem.funcargs[name] for name in names})
    if pyfuncitem.get_closest_marker("real_time") is None:
        run_virtually(bound, seed=zlib.crc32(pyfuncitem.nodeid.encode()))
    else:
        trio.run(_bounded, bound, REAL_SECONDS_MAX)
    return True


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """End with the planted bugs that what is recorded shows no longer, and with what was left out
    or skipped.
    """
    told = told_to_record(terminalreporter.getreports("passed"))
    if told:
        terminalreporter.section("searched for, since what is recorded does not show it any more")
        for line in told:
            terminalreporter.line(line)
    if _left_out:
        terminalreporter.line(nightly_line(_left_out))
    if skipped := told_skipped(terminalreporter.getreports("skipped")):
        terminalreporter.line(skipped)
