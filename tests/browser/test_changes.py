"""What the page does to a run, and what it shows of what happens to one: each test has a run of its
own.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from tests.browser.conftest import STRANGE, training_run, watch
from tests.browser.test_page import give_token, row, row_named, token_of, until_rounds
from tests.processes.harness import Fleet, member, role

pytestmark = pytest.mark.slow


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    with training_run(tmp_path) as made:
        yield made


def test_actions_work_with_the_token(page: Page, fleet: Fleet) -> None:
    page.get_by_role("button", name="Pause").click()
    give_token(page, token_of(fleet))
    expect(page.locator("#state")).to_contain_text("paused")
    expect(page.locator("#why")).to_contain_text("Paused by the operator")
    assert fleet.master()["state"] == "paused"

    page.get_by_role("button", name="Resume").click()  # it asks for the token no more
    expect(page.locator("#state")).to_contain_text("training")

    page.get_by_role("button", name="Invite").click()
    page.get_by_label("Number of machines").fill("3")
    page.get_by_role("button", name="Create invite").click()
    line = page.get_by_label("Command for the new machine").input_value()
    assert re.fullmatch(r"holdfast join holdfast1\.\S+ -- python train\.py", line)
    page.get_by_role("button", name="Close").click()

    fleet.invites["cedar"] = str(fleet.act("invite", {"approve": True})["invite"])
    cedar = fleet.join("cedar", command=())
    expect(page.locator("#pending")).to_contain_text("asks to join as contributor")
    page.get_by_role("button", name="Approve cedar").click()
    expect(row_named(page, "cedar")).to_be_visible()
    expect(page.locator("#pending")).to_be_hidden()
    fleet.until(lambda s: "cedar" in {m["name"] for m in s["members"]}, "cedar is in")
    cedar.signal(signal.SIGTERM)
    assert cedar.wait() == 0, cedar.log

    page.get_by_role("button", name="Sign out").click()
    assert page.evaluate("sessionStorage.length + localStorage.length") == 0
    page.get_by_role("button", name="Pause").click()
    expect(page.get_by_role("dialog", name="Bearer token")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_have_count(0)
    assert fleet.master()["state"] == "training"


def test_a_restart_of_the_master_is_survived(page: Page, fleet: Fleet) -> None:
    page.evaluate("window.sameDocument = true")
    fleet.kill("master")
    expect(page.locator("#away")).to_contain_text("The master has not answered since")
    expect(page.locator("#connection")).to_contain_text("disconnected")
    expect(row_named(page, "alder")).to_be_visible()  # what was known stays

    fleet.restart_master()
    expect(page.locator("#connection")).to_contain_text("live")
    expect(page.locator("#away")).to_be_hidden()
    expect(page.locator("#foot")).to_contain_text("term 2")
    until_rounds(page, fleet.until_committed(1)["committed"])
    assert page.evaluate("window.sameDocument") is True
    watch(page).expect("net::ERR_")  # while it was away


def test_a_kill_and_its_reason_are_shown(page: Page, fleet: Fleet) -> None:
    birch = row(page, fleet, "birch")
    expect(birch).to_be_visible()
    fleet.kill("birch")
    expect(birch.locator("[data-key=place]")).to_have_text("gone")
    expect(birch.locator("[data-key=why]")).to_have_text(re.compile(r"\S+.*, .* ago$"))
    expect(birch).to_have_attribute("data-tone", "bad")
    expect(birch.get_by_role("button")).to_have_count(0)
    expect(page.locator("#events li[data-kind=leave]", has_text="birch").first).to_be_visible()
    expect(row(page, fleet, STRANGE).locator("[data-key=role]")).to_have_text("contributor")
    assert role(fleet.master(), STRANGE) == "contributor"


def test_a_kick_is_confirmed_first(page: Page, fleet: Fleet) -> None:
    page.get_by_role("button", name=f"Kick {STRANGE}", exact=True).click()
    dialog = page.get_by_role("dialog", name=f"Kick {STRANGE}?")
    dialog.get_by_role("button", name="Cancel").click()
    assert member(fleet.master(), STRANGE) is not None
    page.get_by_role("button", name=f"Kick {STRANGE}", exact=True).click()
    dialog.get_by_label("Reason").fill("it was <b>only</b> a test")
    dialog.get_by_role("button", name="Kick").click()
    give_token(page, token_of(fleet))
    expect(page.locator(".toast")).to_have_text(f"{STRANGE} was removed.")
    why = row_named(page, STRANGE).locator("[data-key=why]")
    expect(why).to_contain_text("it was <b>only</b> a test")
    assert member(fleet.master(), STRANGE) is None
