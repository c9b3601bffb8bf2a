"""A real browser without a window, and one live run for all tests of the page.

The browser is Debian's chromium; Playwright drives it and downloads nothing.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
from playwright.sync_api import (
    Browser,
    ConsoleMessage,
    Error,
    Page,
    Request,
    expect,
    sync_playwright,
)

from tests import needs
from tests.processes.harness import Fleet, Status, in_sync, own_host, spec

WAIT_MS = 120_000.0  # for what a page is to show: two cores may be busy with other tests
STRANGE = "<i>cedar"  # a name that would be markup if anything took it for it

MEMBERS = ("alder", "birch", STRANGE)


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    needs.need(needs.browser())
    found = next(filter(None, map(shutil.which, needs.BROWSERS)))
    expect.set_options(timeout=WAIT_MS)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield browser
        browser.close()


def _in_sync(names: Sequence[str], status: Status) -> bool:
    return in_sync(status, *names)


@contextmanager
def training_run(folder: Path) -> Iterator[Fleet]:
    """A master at a fixed URL, two contributors that train without end, and a spare."""
    with Fleet(folder, strict=False) as made:
        made.start_master(spec(contributors=2), http=f"{own_host()}:29780")
        for rank, name in enumerate(MEMBERS):
            script = ("--rank", str(rank), "--pause", "0.05", "--figures")
            made.join(name, *script, founder=rank == 0)
            made.until(partial(_in_sync, MEMBERS[: rank + 1]), f"{name} is in sync")
        made.until_committed(2)
        yield made


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """A run for tests that leave it as it is."""
    with training_run(tmp_path_factory.mktemp("run")) as made:
        yield made


class Watched:
    """The errors that a page has reported."""

    def __init__(self, page: Page) -> None:
        self.complaints: list[str] = []
        self.hosts: set[str] = set()
        page.on("console", self._on_console)
        page.on("pageerror", self._on_error)
        page.on("request", self._on_request)

    def _on_console(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.complaints.append(message.text)

    def _on_error(self, error: Error) -> None:
        self.complaints.append(f"uncaught: {error}")

    def _on_request(self, request: Request) -> None:
        self.hosts.add(request.url.split("/")[2])

    def expect(self, pattern: str) -> None:
        """Ignore errors like this: the test has caused them."""
        self.complaints = [each for each in self.complaints if not re.search(pattern, each)]


_watched: dict[Page, Watched] = {}


def watch(page: Page) -> Watched:
    """Return the watch of this page; the first call starts it."""
    return _watched.setdefault(page, Watched(page))


@pytest.fixture
def page(browser: Browser, fleet: Fleet) -> Iterator[Page]:
    """Open the master's page, live; fail if it has reported errors in the end."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    page = context.new_page()
    watched = watch(page)
    open_live(page, url(fleet, "master"))
    yield page
    context.close()
    assert watched.complaints == []


def url(fleet: Fleet, name: str) -> str:
    return str(fleet.nodes[name].control().url)


def open_live(page: Page, where: str) -> None:
    """Open a daemon's page, and wait until it is live and has drawn a first status."""
    page.goto(where)
    expect(page.locator("#connection")).to_contain_text("live")
    expect(page.locator("#foot")).to_contain_text("holdfast")
