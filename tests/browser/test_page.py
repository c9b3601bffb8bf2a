"""The page in a real browser, against a live run. One run for all: later tests find what earlier left."""

from __future__ import annotations

import re
import signal

import pytest
from playwright.sync_api import Browser, Locator, Page, expect

from holdfast.daemon.master.journal_store import JournalStore
from holdfast.daemon.paths import JOURNAL_FILE
from holdfast.membership.master.state.journal import PeerQuarantined
from tests.browser.conftest import STRANGE, url, watch
from tests.processes.harness import Fleet, in_sync, member, role

pytestmark = pytest.mark.slow

PHONE = {"width": 360, "height": 740}
DRAGS_MAX = 20


def figure(page: Page, name: str) -> Locator:
    return page.locator(
        ".figure", has=page.locator("dt", has_text=re.compile(f"^{name}$"))
    ).locator("dd:not(.remark)")


def row(page: Page, fleet: Fleet, name: str) -> Locator:
    found = member(fleet.master(), name)
    assert found is not None
    return page.locator(f"#members tr[data-peer='{found['peer']}']")


def number(text: str) -> int:
    return int(text.replace(",", ""))


def give_token(page: Page, token: str) -> None:
    dialog = page.get_by_role("dialog", name="Bearer token")
    dialog.get_by_label("Token").fill(token)
    dialog.get_by_role("button", name="Use token").click()


def token_of(fleet: Fleet, name: str = "master") -> str:
    return str(fleet.nodes[name].control()["token"])


# ---------------------------------------------------------------- looking


def test_the_page_shows_the_run_and_asks_nobody_else(page: Page, fleet: Fleet) -> None:
    expect(page.locator("#name")).to_have_text("test")
    expect(page.locator("#state")).to_contain_text("training")
    for name in ("alder", "birch", STRANGE):
        expect(row(page, fleet, name).locator("[data-key=name]")).to_have_text(name)
    expect(row(page, fleet, "alder").locator("[data-key=role]")).to_have_text("contributor")
    expect(row(page, fleet, STRANGE).locator("[data-key=why]")).to_contain_text("places are taken")
    expect(row(page, fleet, "alder").locator("[data-key=weight]")).to_contain_text("%")
    expect(figure(page, "Loss")).to_have_text(re.compile(r"^\d+\.\d{3}$"))
    expect(figure(page, "Sent")).to_have_text(re.compile(r"^[\d.]+ k?M?B$"))
    expect(page.locator("#loss-chart canvas")).to_be_visible()
    expect(page.locator("#events li").first).to_be_visible()
    expect(page.locator("#members i")).to_have_count(0)  # the strange name is text
    assert watch(page).hosts == {url(fleet, "master").removeprefix("http://")}


def test_the_page_updates_live(page: Page) -> None:
    page.evaluate("window.sameDocument = true")
    before = number(figure(page, "Rounds").inner_text())
    page.wait_for_function(
        """before => [...document.querySelectorAll('.figure')].some(each =>
             each.querySelector('dt').textContent === 'Rounds' &&
             Number(each.querySelector('dd').textContent.replace(',', '')) >= before + 2)""",
        arg=before,
    )
    assert page.evaluate("window.sameDocument") is True
    expect(page.locator("#connection")).to_contain_text("live")


def test_without_a_stream_the_page_polls(browser: Browser, fleet: Fleet) -> None:
    context = browser.new_context()
    page = context.new_page()
    page.route("**/api/live", lambda route: route.abort())
    page.goto(url(fleet, "master"))
    expect(page.locator("#connection")).to_contain_text("polling")
    before = number(figure(page, "Rounds").inner_text())
    expect(figure(page, "Rounds")).not_to_have_text(f"{before:,}")
    context.close()


def test_members_are_sorted_by_a_click_on_a_heading(page: Page) -> None:
    heading = page.get_by_role("columnheader", name="Name")
    names = page.locator("#members td[data-key=name]")
    heading.get_by_role("button").click()
    expect(heading).to_have_attribute("aria-sort", "ascending")
    expect(names.first).to_have_text(STRANGE)
    heading.get_by_role("button").click()
    expect(heading).to_have_attribute("aria-sort", "descending")
    expect(names.first).to_have_text("birch")


def test_drawings_are_read_with_the_arrow_keys(page: Page) -> None:
    page.locator("#rounds canvas").focus()
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("ArrowLeft")
    readout = page.locator("#rounds .readout")
    expect(readout).to_contain_text(re.compile(r"^Round \d+, alder; ready after "))
    page.keyboard.press("ArrowDown")
    expect(readout).to_contain_text(re.compile(r"^Round \d+, birch"))
    page.locator("#matrix canvas").focus()
    page.keyboard.press("ArrowLeft")
    expect(page.locator("#matrix .readout")).to_have_text(
        re.compile(r"^alder to birch: [\d.]+ [kM]?B/s$")
    )


def test_events_are_filtered_by_kind_and_text(page: Page) -> None:
    events = page.locator("#events li")
    expect(events.first).to_be_visible()
    page.get_by_role("button", name="joins").click()
    expect(page.locator("#events li:not([data-kind=join])")).to_have_count(0)
    expect(events.first).to_be_visible()
    page.get_by_label("Filter events by text").fill("birch")
    expect(events.filter(has_not_text="birch")).to_have_count(0)
    expect(events.first).to_contain_text("birch")
    page.get_by_label("Filter events by text").fill("no such thing")
    expect(page.locator("#events .empty")).to_have_text("No event matches.")


def test_a_chart_is_zoomed_by_a_drag(page: Page) -> None:
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    for _try in range(DRAGS_MAX):
        _drag(page)
        page.wait_for_timeout(500)
        if zoomed := [
            url for url in asked if re.search(r"api/history.*from=[\d.]+&to=[\d.]+", url)
        ]:
            break
    assert zoomed
    whole = page.get_by_role("button", name="Whole run")
    whole.click()
    expect(whole).to_be_hidden()


def _drag(page: Page) -> None:
    """Drag over the middle of the chart; on a busy machine the page may move below the pointer."""
    box = page.locator("#loss-chart .u-over").bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + box["width"] * 0.3, box["y"] + 40)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.7, box["y"] + 60, steps=4)
    page.mouse.up()


def test_a_phone_has_nothing_to_scroll_sideways(page: Page, fleet: Fleet) -> None:
    page.set_viewport_size(PHONE)  # type: ignore[arg-type]
    for name in ("master", "alder"):
        page.goto(url(fleet, name))
        expect(page.locator("#run:not([hidden]), #peer:not([hidden])")).to_be_visible()
        expect(page.locator("#loss-chart canvas, #own-loss-chart canvas")).to_be_visible()
        assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
        assert page.evaluate("document.body.scrollWidth") <= PHONE["width"]


def test_dark_is_the_systems_or_chosen(page: Page) -> None:
    def paper() -> str:
        return str(page.evaluate("getComputedStyle(document.body).backgroundColor"))

    light = paper()
    page.emulate_media(color_scheme="dark")
    dark = paper()
    assert dark != light
    toggle = page.get_by_role("button", name="Theme")
    toggle.click()
    expect(toggle).to_have_text("Theme: light")
    assert paper() == light
    page.reload()
    expect(toggle).to_have_text("Theme: light")
    assert paper() == light
    toggle.click()
    assert paper() == dark


def test_a_peer_has_a_page_of_its_own(page: Page, fleet: Fleet) -> None:
    page.goto(url(fleet, "alder"))
    expect(page.locator("#name")).to_have_text("alder")
    expect(page.locator("#connection")).to_contain_text("live")
    expect(figure(page, "Role")).to_have_text("contributor")
    expect(figure(page, "Trainer")).to_have_text("running")
    expect(page.locator("#why")).not_to_contain_text("initial weights")  # which it gave long ago
    expect(page.locator("#links tbody tr").first).to_be_visible()
    expect(page.locator("#own-loss-chart canvas")).to_be_visible()
    expect(page.locator("#run")).to_be_hidden()
    step = page.locator(".figure", has_text="Loss").locator(".remark")
    before = step.inner_text()
    expect(step).not_to_have_text(before)
    page.get_by_role("button", name="Restart the trainer").click()
    give_token(page, token_of(fleet, "alder"))
    expect(page.locator(".toast")).to_contain_text("the training command runs")
    watch(page).expect("422")


# ---------------------------------------------------------------- acting


def test_actions_need_the_token(page: Page, fleet: Fleet) -> None:
    page.get_by_role("button", name="Pause").click()
    give_token(page, "wrong")
    expect(page.get_by_role("alert")).to_have_text(re.compile("refused this token"))
    page.get_by_role("button", name="Cancel").click()
    assert fleet.master()["state"] == "training"
    assert page.evaluate("sessionStorage.length") == 0
    watch(page).expect("401")


def test_actions_work_with_the_token(page: Page, fleet: Fleet) -> None:
    page.get_by_role("button", name="Pause").click()
    give_token(page, token_of(fleet))
    expect(page.locator("#state")).to_contain_text("paused")
    expect(page.locator("#why")).to_contain_text("Paused by the operator")
    assert fleet.master()["state"] == "paused"

    page.get_by_role("button", name="Verify copies").click()  # it asks for the token no more
    expect(page.get_by_role("dialog")).to_contain_text("All copies are identical.")
    page.get_by_role("button", name="Close").click()

    page.get_by_role("button", name="Resume").click()
    expect(page.locator("#state")).to_contain_text("training")

    page.get_by_role("button", name="Invite").click()
    page.get_by_label("Number of machines").fill("3")
    page.get_by_role("button", name="Create invite").click()
    line = page.get_by_label("Command for the new machine").input_value()
    assert re.fullmatch(r"holdfast join holdfast1\.\S+ -- python train\.py", line)
    page.get_by_role("button", name="Close").click()

    page.get_by_role("button", name="Checkpoint now").click()
    expect(page.locator("#toasts")).to_contain_text("writing: ")

    fleet.invites["cedar"] = str(fleet.act("invite", {"approve": True})["invite"])
    cedar = fleet.join("cedar", command=())
    expect(page.locator("#pending")).to_contain_text("asks to join as contributor")
    page.get_by_role("button", name="Approve cedar").click()
    expect(row_named(page, "cedar")).to_be_visible()
    expect(page.locator("#pending")).to_be_hidden()
    fleet.until(lambda s: "cedar" in {m["name"] for m in s["members"]}, "cedar is in")
    cedar.signal(signal.SIGTERM)
    assert cedar.wait() == 0, cedar.log

    page.get_by_role("button", name="Forget the token").click()
    assert page.evaluate("sessionStorage.length + localStorage.length") == 0
    page.get_by_role("button", name="Pause").click()
    expect(page.get_by_role("dialog", name="Bearer token")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_have_count(0)
    assert fleet.master()["state"] == "training"


def test_assisted_links_are_listed(page: Page) -> None:
    """Show the view with made-up rows, because this fleet's machines dial each other directly."""
    page.evaluate("""async () => {
        const { Routes } = await import("/static/routes.js");
        const pair = { peers: ["1", "2"], names: ["alder", "birch"], tried: ["punched: <b>no</b> answer"] };
        new Routes().show({
            members: [{ peer: "3", name: "hub" }],
            routes: [
                { ...pair, route: "relayed", relay: "3", works: true },
                { ...pair, names: ["alder", "cedar"], route: "punched", relay: null, works: false },
            ],
        });
    }""")
    lines = page.locator("#routes li")
    expect(lines).to_have_text(
        [
            "alder and cedar: no link; trying: punched (punched: <b>no</b> answer)",
            "alder and birch: relayed by hub",
        ]
    )


# ---------------------------------------------------------------- faults


def test_a_restart_of_the_master_is_survived(page: Page, fleet: Fleet) -> None:
    page.evaluate("window.sameDocument = true")
    fleet.master()
    fleet.nodes["master"].signal(signal.SIGKILL)
    fleet.nodes["master"].wait()
    expect(page.locator("#away")).to_contain_text("The master has not answered since")
    expect(page.locator("#connection")).to_contain_text("disconnected")
    expect(row_named(page, "alder")).to_be_visible()  # what was known stays

    fleet.restart_master()
    expect(page.locator("#connection")).to_contain_text("live")
    expect(page.locator("#away")).to_be_hidden()
    expect(page.locator("#foot")).to_contain_text("term 2")
    committed = fleet.until_committed(1)["committed"]
    page.wait_for_function(
        """least => [...document.querySelectorAll('.figure')].some(each =>
             each.querySelector('dt').textContent === 'Rounds' &&
             Number(each.querySelector('dd').textContent.replace(',', '')) >= least)""",
        arg=committed,
    )
    assert page.evaluate("window.sameDocument") is True
    watch(page).expect("net::ERR_")  # while it was away


def row_named(page: Page, name: str) -> Locator:
    return page.locator("#members tr", has=page.locator("[data-key=name]", has_text=name)).first


def test_a_kill_and_its_reason_are_shown(page: Page, fleet: Fleet) -> None:
    fleet.until(lambda status: in_sync(status, "alder", "birch", STRANGE), "all are back")
    birch = row(page, fleet, "birch")
    expect(birch).to_be_visible()
    fleet.kill("birch")
    expect(birch).to_have_count(0)
    gone = page.locator("#members .gone li", has_text="birch")
    expect(gone).to_contain_text(re.compile(r"birch \(\w{8}\): \S+"))
    expect(page.locator("#events li[data-kind=leave]", has_text="birch").first).to_be_visible()
    expect(row(page, fleet, STRANGE).locator("[data-key=role]")).to_have_text("contributor")
    assert role(fleet.master(), STRANGE) == "contributor"


def test_a_quarantined_member_is_cleared_from_the_page(page: Page, fleet: Fleet) -> None:
    """Write a conviction into the journal, as a master does after an audit."""
    birch = next(each for each in fleet.master()["departed"] if each["name"] == "birch")["peer"]
    fleet.nodes["master"].signal(signal.SIGKILL)
    fleet.nodes["master"].wait()
    store = JournalStore(fleet.folder / "master" / JOURNAL_FILE)
    store.append(PeerQuarantined(birch, "chunk 3 of round 7 is <i>not</i> what it was given"))
    store.close()
    fleet.restart_master()
    line = page.locator("#quarantine .notice")
    expect(line).to_contain_text("birch (")
    expect(line).to_contain_text("is in quarantine: chunk 3 of round 7 is <i>not</i> what")
    page.get_by_role("button", name="Clear… birch").click()
    dialog = page.get_by_role("dialog", name="Clear birch?")
    dialog.get_by_role("button", name="Clear").click()
    give_token(page, token_of(fleet))
    expect(page.locator("#toasts")).to_contain_text("birch was cleared.")
    expect(page.locator("#quarantine")).to_be_hidden()
    assert fleet.master()["quarantined"] == []
    watch(page).expect("net::ERR_")  # while the master was away


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
    gone = page.locator("#members .gone li", has_text=STRANGE)
    expect(gone).to_contain_text("it was <b>only</b> a test")
    assert member(fleet.master(), STRANGE) is None
