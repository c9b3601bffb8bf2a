"""What tests need that not every machine has: root's rights, or a program from a system package.

A test without its rights is skipped. A test without its program is skipped at a desk, where only
root can install it, and fails in CI, where all packages are to be installed. The end of the run
names what was lacking.
"""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterable

import pytest
from attrs import frozen

from benchmarks.grounds import why_no_switch
from benchmarks.namespaces import missing_tool, why_none

# The first one that is there. The shell has no part for a screen, and takes half the processor.
BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
SKIPPED = "this machine: "  # what the reason of each such skip begins with


@frozen
class Lack:
    """What a test needs and this machine does not have.

    Attributes:
      reason: a clause that says what; empty: nothing is lacking.
      package: `make packages` installs it.
    """

    reason: str = ""
    package: bool = False

    @property
    def skips(self) -> bool:
        return bool(self.reason) and not (self.package and os.environ.get("CI"))


def needed(lack: Lack) -> pytest.MarkDecorator:
    """Return a mark that skips a test, unless its lack is to be seen in CI."""
    return pytest.mark.skipif(lack.skips, reason=SKIPPED + lack.reason)


def need(lack: Lack) -> None:
    """End a test or a fixture here if something is lacking: skip it, or fail in CI without a
    package.
    """
    if lack.skips:
        pytest.skip(SKIPPED + lack.reason)
    if lack.reason:
        pytest.fail(lack.reason)


def root(why: str) -> Lack:
    """Return whether root's rights are lacking; ``why`` is a clause that says what only root may
    do.
    """
    return Lack("" if os.geteuid() == 0 else why)


def missing_ip() -> str:
    return missing_tool("ip")


def missing_switch() -> str:
    return missing_tool("ip", "nsenter")


def namespaces(
    missing: Callable[[], str] = missing_ip, forbidden: Callable[[], str] = why_none
) -> Lack:
    """Return what hosts in network namespaces lack.

    Args:
      missing: says which program is missing.
      forbidden: says what the machine does not allow, once all programs are there.
    """
    if os.geteuid() != 0:
        return Lack(why_none())
    if reason := missing():
        return Lack(reason, package=True)
    return Lack(forbidden())


def switch() -> Lack:
    return namespaces(missing_switch, why_no_switch)


def postgres() -> Lack:
    # It imports psycopg, which most tests do not need, and `make gpu` neither.
    from benchmarks.postgres_server import why_no_postgres

    return Lack(why_no_postgres(), package=True)


def browser() -> Lack:
    found = any(map(shutil.which, BROWSERS))
    return Lack("" if found else "there is no Chromium (`make packages`)", package=True)


def told_skipped(reports: Iterable[pytest.TestReport]) -> str:
    """Return one sentence about the tests that this machine could not run; empty if it ran all."""
    reasons: Counter[str] = Counter()
    for report in reports:
        if isinstance(report.longrepr, tuple):
            _, found, reason = str(report.longrepr[2]).partition(SKIPPED)
            reasons.update([reason] if found else [])
    if not reasons:
        return ""
    told = "; ".join(f"{reason} ({count})" for reason, count in reasons.most_common())
    return f"{reasons.total()} tests were skipped on this machine: {told}."
