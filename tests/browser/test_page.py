"""The page in a real browser, against a live run that the tests leave as it is."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Locator, Page, expect

from tests.browser.conftest import MEMBERS, STRANGE, open_live, url, watch
from tests.processes.harness import Fleet, member

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


def number(shown: Locator) -> int:
    expect(shown).to_have_text(re.compile(r"^[\d,]+$"))  # it is drawn after the state arrived
    return int(shown.inner_text().replace(",", ""))


def until_rounds(page: Page, least: int) -> None:
    """Wait until the page shows so many rounds, without looking at it in between."""
    page.wait_for_function(
        """least => [...document.querySelectorAll('.figure')].some(each =>
             each.querySelector('dt').textContent === 'Rounds' &&
             Number(each.querySelector('dd').textContent.replace(',', '')) >= least)""",
        arg=least,
    )


def too_wide(page: Page) -> list[str]:
    """Return the figures that are wider than their cells."""
    found: list[str] = page.locator(".figures dd").evaluate_all(
        "cells => cells.filter(each => each.scrollWidth > each.clientWidth + 1)"
        ".map(each => each.textContent)"
    )
    return found


def give_token(page: Page, token: str) -> None:
    dialog = page.get_by_role("dialog", name="Bearer token")
    dialog.get_by_label("Token").fill(token)
    dialog.get_by_role("button", name="Use token").click()


def token_of(fleet: Fleet, name: str = "master") -> str:
    return str(fleet.nodes[name].control().token)


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
    until_rounds(page, number(figure(page, "Rounds")) + 2)
    assert page.evaluate("window.sameDocument") is True
    expect(page.locator("#connection")).to_contain_text("live")


def test_without_a_stream_the_page_polls(browser: Browser, fleet: Fleet) -> None:
    context = browser.new_context()
    page = context.new_page()
    page.route("**/api/live", lambda route: route.abort())
    page.goto(url(fleet, "master"))
    expect(page.locator("#connection")).to_contain_text("polling")
    before = number(figure(page, "Rounds"))
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


def test_a_healthy_run_looks_healthy(page: Page) -> None:
    expect(page.locator("#why")).to_have_attribute("data-tone", "calm")
    expect(page.locator("#why")).to_have_text(
        re.compile(r"^(Training up to step \d+, where the|The next round waits|Averaging)")
    )
    expect(page.locator("#state")).to_have_attribute("data-state", "training")
    expect(page.locator("#warnings")).to_be_hidden()
    for name in ("alder", "birch"):
        expect(row_named(page, name)).to_have_attribute("data-tone", "ok")
    expect(page.locator("#rounds .legend")).to_contain_text("waiting for others")
    expect(page.locator("#rounds .legend .swatch.lost")).to_be_hidden()


def test_no_figure_is_wider_than_its_cell(page: Page, fleet: Fleet) -> None:
    for name in ("master", "alder"):
        open_live(page, url(fleet, name))
        expect(page.locator("canvas").first).to_be_visible()
        assert too_wide(page) == []


def legend(page: Page, chart: str) -> Locator:
    return page.locator(f"{chart} .u-legend .u-label")


def test_figures_of_the_script_have_charts_that_a_reload_keeps(page: Page) -> None:
    for _load in range(2):
        chart = "#logged [data-figure='error']"
        expect(page.locator(f"{chart} canvas")).to_be_visible()
        expect(legend(page, chart)).to_contain_text(["Time", "alder", "birch", "Mean"])
        expect(page.locator("#logged section")).to_have_count(2)
        page.reload()


def test_the_mean_of_a_figure_is_that_of_the_status(page: Page) -> None:
    """The script logs its rank. Which members contribute is another test's to change."""
    for _look in range(150):
        shown, mean = page.evaluate("""async () => {
            const rows = [...document.querySelectorAll("#logged [data-figure='rank'] .u-series")];
            const read = (row, part) => row.querySelector(part).textContent;
            const valued = (row) => [read(row, ".u-label"), Number(read(row, ".u-value"))];
            const { figures } = await (await fetch("api/status?past=0")).json();
            return [Object.fromEntries(rows.slice(1).map(valued)), figures.rank];
        }""")
        if shown.get("Mean") == mean and {"alder", "birch"} <= shown.keys():
            break
        page.wait_for_timeout(200)
    assert shown["Mean"] == pytest.approx(mean, rel=1e-3)
    assert (shown["alder"], shown["birch"]) == (0, 1)
    assert 0 < mean < 3, "of several"


def test_the_charts_go_by_time_or_by_step(page: Page) -> None:
    loss = "#loss-chart"
    expect(legend(page, loss)).to_contain_text(["Time", "alder", "birch", "Mean"])
    switch = page.get_by_role("group", name="Axis of the charts")
    switch.get_by_role("button", name="by step").click()
    for _load in range(2):
        for chart in (loss, "#speed-chart", "#logged [data-figure='error']"):
            expect(legend(page, chart).first).to_have_text("Step")
        expect(switch.get_by_role("button", name="by step")).to_have_attribute(
            "aria-pressed", "true"
        )
        step = page.locator(f"{loss} .u-legend .u-value").first
        expect(step).to_have_text(re.compile(r"^[\d,]+$"))
        page.reload()
    switch.get_by_role("button", name="by time").click()
    expect(legend(page, loss).first).to_have_text("Time")


def test_a_member_that_was_away_leaves_a_gap_in_its_line(page: Page) -> None:
    """Live points, made up: the daemon's own answers are tested with the history."""
    line = page.evaluate("""async () => {
        const { Lines } = await import("/static/history.js");
        const lines = new Lines({ column: "loss" });
        for (const at of [100, 102, 104, 164, 166])
            lines.add({ peer: "1", name: "alder", at, step: at }, at);
        lines.add({ peer: "1", name: "alder", at: 150, step: 150 }, 1);  // late
        for (let at = 50; at < 1000; at += 50)
            lines.add({ peer: "2", name: "birch", at, step: at }, at);
        // Logged now and then; away from 230 to 330.
        for (let at = 100; at < 400; at += 2)
            if (at < 230 || at > 330)
                lines.add({ peer: "3", name: "cedar", at, step: at }, at % 50 ? undefined : at);
        return [...lines.lines.values()].map((each) => each.value);
    }""")
    assert line[:2] == [[100, 102, 104, None, 164, 166], [*range(50, 1000, 50)]]
    assert line[2] == [100, 150, 200, None, 350]


def test_a_rewind_is_a_banner_and_a_mark_and_a_run_that_waits_has_no_speed(page: Page) -> None:
    """Made up: a run that is rewound, and waits."""
    expect(page.locator("#loss-chart canvas")).to_be_visible()
    expect(page.locator("#speed-chart canvas")).to_be_visible()
    at = page.evaluate("""async () => {
        const { columns } = await (await fetch("api/history")).json();
        return columns.at.filter((_each, index) => columns.loss[index] !== null).at(-2);
    }""")
    texts = {1: "REWOUND by 22 rounds", 2: "paused"}
    events = [{"id": n, "at": at, "kind": "run", "peer": None, "text": texts[n]} for n in texts]
    page.route("**/api/events*", lambda route: route.fulfill(json={"events": events}))
    open_live(page, page.url)
    shown = page.evaluate("""async () => {
        const { Headline } = await import("/static/headline.js");
        const status = await (await fetch("api/status?past=0")).json();
        const headline = { ...status.headline, utilisation: null, eta_s: null, tokens_per_s: 0 };
        const warnings = ["REWOUND from round 46 to round 24", "one invite"];
        new Headline().show({ ...status, headline, warnings, state: "waiting for members" });
        const texts = (css) => [...document.querySelectorAll(css)].map((each) => each.textContent);
        return [
            [...document.querySelectorAll("#warnings p")].map((each) => each.dataset.tone),
            texts("#warnings p"),
            texts(".figure dd:not(.remark)").filter((_text, index) => [2, 3, 5].includes(index)),
        ];
    }""")
    warnings = ["REWOUND from round 46 to round 24", "one invite"]
    assert shown == [["bad", "wait"], warnings, ["–", "–", "–"]]
    for chart in ("#loss-chart", "#speed-chart"):
        expect(page.locator(f"{chart} .mark")).to_have_count(2)
        bad = page.locator(f"{chart} .mark[data-tone=bad]")
        expect(bad).to_have_attribute("title", re.compile(r"^[\d:]+ REWOUND by 22 rounds$"))


def test_a_smoothed_line_keeps_its_ends_and_its_gaps_and_begins_where_there_is_a_value(
    page: Page,
) -> None:
    expect(page.locator("#loss-chart canvas")).to_be_visible()
    values, times = page.evaluate("""async () => {
        const { joined, smoothed } = await import("/static/charts.js");
        const odd = (_each, index) => (index === 50 ? null : index % 2);
        const values = Array.from({ length: 100 }, odd);
        const at = [1, 2, 3, 4];
        return [smoothed(values), joined(uPlot, [{ at, step: at, value: [null, null, 5, 6] }])[0]];
    }""")
    assert values[:4] == [0, pytest.approx(1 / 3), 0.4, 0.6]
    assert values[48:53] == [pytest.approx(2 / 3), 1, None, 1, pytest.approx(2 / 3)]
    assert values[-1] == 1
    assert times == [3, 4]


def test_a_gap_lasts_until_the_members_next_point(page: Page) -> None:
    """Also where other members have points in between, and by steps, which have no gaps."""
    expect(page.locator("#loss-chart canvas")).to_be_visible()
    columns = page.evaluate("""async () => {
        const { joined } = await import("/static/charts.js");
        const lines = [
            { at: [1, 2, 3, 4, 5], step: [10, 20, 30, 40, 50], value: [1, 1, 1, 1, 1] },
            { at: [1, 1.5, 4, 5], step: [10, null, 20, 15], value: [7, null, 8, 9] },
        ];
        const told = (value) => value ?? String(value);
        const show = () => joined(uPlot, lines).map((each) => [...each].map(told));
        const byTime = show();
        const { axis } = await import("/static/charts.js");
        axis.now = "step";
        return [byTime, show()];
    }""")
    assert columns == [
        [[1, 1.5, 2, 3, 4, 5], [1, "undefined", 1, 1, 1, 1], [7, "null", "null", "null", 8, 9]],
        [[10, 15, 20, 30, 40, 50], [1, "undefined", 1, 1, 1, 1], [7, 9, 8, *["undefined"] * 3]],
    ]


def test_drawings_have_names_for_screen_readers(page: Page) -> None:
    expect(page.locator("#loss-chart canvas")).to_be_visible()
    expect(page.locator("#logged canvas").first).to_be_visible()
    expect(page.locator("canvas:not([role='img'])")).to_have_count(0)
    labels = page.locator("canvas").evaluate_all("all => all.map(each => each.ariaLabel)")
    assert all(labels), labels
    assert len(set(labels)) == len(labels)


def test_a_members_page_says_what_is_odd_and_has_buttons_for_it(page: Page) -> None:
    said = page.evaluate("""async () => {
        const { MemberPage } = await import("/static/member.js");
        const { get } = await import("/static/api.js");
        const status = await get("status");
        const done = [];
        const act = (what) => (member) => done.push(`${what} ${member.name}`);
        const shown = new MemberPage("birch", { Demote: act("demote"), "Kick…": act("kick") });
        const notice = document.querySelector("#member .suspicion");
        const birch = status.members.find((member) => member.name === "birch");
        const odd = "its updates point against the others', for 12 rounds";
        const hidden = ["", odd].map((suspicion) => {
            birch.suspicion = suspicion;
            shown.show(status);
            return notice.hidden;
        });
        for (const button of notice.querySelectorAll("button")) button.click();
        const text = notice.textContent;
        shown.end();
        return [hidden, text, done];
    }""")
    assert said == [
        [True, False],
        "its updates point against the others', for 12 rounds Demote Kick…",
        ["demote birch", "kick birch"],
    ]


def test_the_page_says_whether_all_copies_are_equal(page: Page) -> None:
    place = page.locator("#copies-equal")
    expect(place).to_have_text(re.compile(r"^all 3 copies equal at version.* \(compared .* ago\)$"))
    shown = page.evaluate("""async () => {
        const { showCopies } = await import("/static/members.js");
        const unequal = [{ peer: "b", name: "birch", why: "it differs" }];
        const text = "2 of 3 copies equal at version 12; birch is being healed";
        showCopies({ text, unequal, compared_s: 75 });
        const place = document.getElementById("copies-equal");
        return [place.textContent, place.title];
    }""")
    assert shown == [
        "2 of 3 copies equal at version 12; birch is being healed (compared 1 min 15 s ago)",
        "birch: it differs",
    ]


def test_a_member_has_a_page_with_an_address(page: Page, fleet: Fleet) -> None:
    row_named(page, "birch").get_by_role("link", name="birch").click()
    for _load in range(2):
        assert page.url.endswith("/#member=birch")
        expect(page.locator("#run")).to_be_hidden()
        expect(page.locator("#member .member-title")).to_have_text("birch")
        expect(page.locator("#member .figure", has_text="Role")).to_contain_text("contributor")
        for chart in ("#own-loss-chart", "#own-speed-chart", "#own-traffic-chart"):
            expect(page.locator(f"#member {chart} canvas")).to_be_visible()
        expect(page.locator("#member [data-figure='error'] canvas")).to_be_visible()
        expect(page.locator("#member .events li", has_text="joined as member")).to_be_visible()
        expect(page.locator("#member .events li").filter(has_not_text="birch")).to_have_count(0)
        page.reload()
    page.get_by_role("link", name="The run").click()
    expect(page.locator("#run")).to_be_visible()
    expect(page.locator("#member")).to_be_hidden()


def test_a_name_that_no_member_has_is_said_to_be_unknown(page: Page, fleet: Fleet) -> None:
    page.goto(f"{url(fleet, 'master')}/#member=<b>nobody</b>")
    expect(page.locator("#member .notice")).to_have_text(
        "No curves: the history has no member '<b>nobody</b>'."
    )
    expect(page.locator("#member b")).to_have_count(0)
    watch(page).expect("404")


def test_rates_that_were_not_measured_again_stay_with_their_age(page: Page) -> None:
    """Show the view with made-up rows: which links a round uses is not for a test to choose."""
    expect(page.locator("#matrix .legend")).to_have_count(1)  # the page's own view took its place
    page.evaluate("""async () => {
        const { Matrix } = await import("/static/matrix.js");
        window.membersOf = (links, count = 3) => ({ members: [
            { peer: "1", name: "alder", bandwidth: { links } },
            { peer: "2", name: "birch", bandwidth: { links: { 1: 2e6 } } },
            { peer: "3", name: "cedar", bandwidth: { links: {} } },
        ].slice(0, count) });
        document.getElementById("matrix").id = "shown-before";
        const made = Object.assign(document.createElement("div"), { id: "matrix" });
        document.getElementById("shown-before").after(made);
        window.matrix = new Matrix();
        matrix.show(membersOf({ 2: 1e6 }));
        await new Promise((resolve) => setTimeout(resolve, 1100));
        matrix.show(membersOf({}));
    }""")
    expect(page.locator("#matrix .swatch.aged")).to_be_visible()
    page.locator("#matrix canvas").focus()
    page.keyboard.press("ArrowLeft")
    expect(page.locator("#matrix .readout")).to_have_text(
        re.compile(r"^alder to birch: 1 MB/s, measured [\d.]+ s ago$")
    )
    page.evaluate("matrix.show(membersOf({}, 2))")
    expect(page.locator("#matrix .empty")).to_have_text(
        "alder to birch: 1 MB/s, birch to alder: 2 MB/s"
    )
    expect(page.locator("#matrix canvas")).to_be_hidden()


def test_drawings_are_read_with_the_arrow_keys(page: Page) -> None:
    page.get_by_text("These rounds as a table").click()
    expect(page.locator("#rounds tbody tr").nth(1)).to_be_visible()  # two are fetched and drawn
    page.locator("#rounds canvas").focus()
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("ArrowLeft")
    readout = page.locator("#rounds .readout")
    expect(readout).to_contain_text(re.compile(r"^Round #\d+, alder; ready after "))
    page.keyboard.press("ArrowDown")
    expect(readout).to_contain_text(re.compile(r"^Round #\d+, birch"))
    expect(page.locator("#matrix canvas")).to_be_visible()  # once something was measured
    assert True in list(_matrix_readouts(page))


def _matrix_readouts(page: Page) -> Iterator[bool]:
    """Walk over all pairs of members; yield for each whether its readout is a rate.

    Which direction of a pair is measured first is not the test's choice.
    """
    alder, birch, cedar = MEMBERS
    page.locator("#matrix canvas").focus()
    rate = r"[\d.]+ [kM]?B/s(, measured [\d.]+ m?s ago)?"
    for key, sender, receiver in (
        ("ArrowLeft", alder, birch),  # the first press, whichever key
        ("ArrowRight", alder, cedar),
        ("ArrowDown", birch, cedar),
        ("ArrowLeft", birch, birch),
        ("ArrowLeft", birch, alder),
        ("ArrowDown", cedar, alder),
        ("ArrowRight", cedar, birch),
        ("ArrowUp", birch, birch),
    ):
        page.keyboard.press(key)
        readout = page.locator("#matrix .readout")
        if sender == receiver:
            expect(readout).to_have_text(sender)
        else:
            pair = re.escape(f"{sender} to {receiver}: ")
            expect(readout).to_have_text(re.compile(f"^{pair}({rate}|not measured)$"))
            yield "B/s" in readout.inner_text()


def test_events_are_filtered_by_kind_and_text(page: Page) -> None:
    events = page.locator("#events li")
    expect(events.first).to_be_visible()
    page.get_by_role("button", name="join", exact=True).click()
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
    open_live(page, url(fleet, "alder"))
    expect(page.locator("#name")).to_have_text("alder")
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


def test_a_peers_links_say_how_tcp_does(page: Page, fleet: Fleet) -> None:
    page.goto(url(fleet, "alder"))
    row = page.locator("#links tbody tr", has_text="birch").locator("td")
    measured = map(re.compile, (r"^[1-9]\d*$", "ms$", "^[a-z]+$", "B$", " %$"))
    expect(row).to_have_text(["birch", *measured])
    sent = page.locator(".figure", has_text="Sent").locator(".remark")
    expect(sent).to_have_text(re.compile(r"^[\d.]+ % retransmitted$"))


def test_a_peers_page_says_what_its_owner_can_do_for_its_connections(
    page: Page, fleet: Fleet
) -> None:
    """Show the view with a made-up status: which congestion control a machine allows is not a
    test's choice.
    """
    page.goto(url(fleet, "alder"))
    expect(
        page.locator("#links tbody tr").first
    ).to_be_visible()  # the page's own view took its place
    page.evaluate("""async () => {
        const { Peer } = await import("/static/peer.js");
        const status = await (await fetch("/api/status")).json();
        const congestion = ["", "bbr", "cubic"];
        const link = { peer: "c".repeat(32), lanes: 5, congestion, round_trip_s: 0.1 };
        window.made = new Peer();
        window.told = {
            ...status,
            bulk_sent_bytes: 990, bulk_retransmitted_bytes: 10,
            links: [{ ...link, sent_bytes: 750, retransmitted_bytes: 250 },
                    { ...link, round_trip_s: null, congestion: [], sent_bytes: 0,
                      retransmitted_bytes: null }],
            limits: { max_upload: "2 MB/s", hours: "22-07" },
            congestion: {
                wanted: "bbr", used: "cubic", text: "lanes use <b>cubic</b>",
                fix: "as root: `modprobe`",
            },
        };
        window.made.show(window.told);
    }""")
    expect(page.locator("#holds")).to_contain_text(
        "Limits of this machine: max-upload 2 MB/s, hours 22-07."
    )
    rows = page.locator("#links tbody tr")
    expect(rows.nth(0).locator("td")).to_have_text(
        ["cccccccc", "5", "100 ms", "bbr, cubic", "750 B", "25 %"]
    )
    expect(rows.nth(1).locator("td")).to_have_text(["cccccccc", "5", "–", "–", "0 B", "–"])
    expect(page.locator("#links p")).to_have_text(
        ["Congestion control: lanes use <b>cubic</b>.", "Fix: as root: `modprobe`."]
    )
    expect(page.locator(".figure", has_text="Sent").locator(".remark")).to_have_text(
        "1 % retransmitted"
    )
    page.set_viewport_size(PHONE)  # type: ignore[arg-type]
    page.evaluate("""() => {
        const fix = `sysctl -w net.ipv4.tcp_allowed_congestion_control=${"reno,".repeat(20)}`;
        window.made.show({ ...window.told, congestion: { ...window.told.congestion, fix } });
    }""")
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
    page.evaluate("""() => {
        const congestion = { ...window.told.congestion, fix: "" };
        window.made.show({ ...window.told, congestion, bulk_retransmitted_bytes: null });
    }""")
    expect(page.locator("#links p:visible")).to_have_count(0)
    expect(page.locator(".figure", has_text="Sent").locator(".remark")).to_have_text("")
    page.evaluate("window.made.show({ ...window.told, congestion: null })")
    expect(page.locator("#links p:visible")).to_have_count(0)


def test_a_peers_page_has_its_past_after_a_reload(page: Page, fleet: Fleet) -> None:
    page.route("**/api/live", lambda route: route.abort())  # no point comes live
    page.goto(url(fleet, "alder"))
    for chart in ("#own-loss-chart", "#own-speed-chart", "#own-traffic-chart"):
        expect(page.locator(f"{chart} canvas")).to_be_visible()
    expect(page.locator("#peer [data-figure='error'] canvas")).to_be_visible()
    watch(page).expect("ERR_FAILED")


# ---------------------------------------------------------------- acting


def test_a_token_in_the_address_signs_in_and_disappears(page: Page, fleet: Fleet) -> None:
    page.goto("about:blank")
    page.goto(f"{url(fleet, 'master')}/#token={token_of(fleet)}&member=alder")
    expect(page.locator("#member .member-title")).to_have_text("alder")
    assert page.url.endswith("/#member=alder")
    assert page.evaluate("sessionStorage.length") == 1
    page.get_by_role("button", name="Sign out").click()
    assert page.evaluate("sessionStorage.length") == 0


def test_the_dialog_names_the_file_of_the_token(page: Page, fleet: Fleet) -> None:
    page.get_by_role("button", name="Pause").click()
    dialog = page.get_by_role("dialog", name="Bearer token")
    expect(dialog).to_contain_text(str(fleet.folder / "master" / "control.json"))
    expect(dialog).to_contain_text("holdfast dashboard")
    page.keyboard.press("Escape")


def test_actions_need_the_token(page: Page, fleet: Fleet) -> None:
    page.get_by_role("button", name="Pause").click()
    give_token(page, "wrong")
    expect(page.get_by_role("alert")).to_have_text(re.compile("refused this token"))
    page.get_by_role("button", name="Cancel").click()
    assert fleet.master()["state"] == "training"
    assert page.evaluate("sessionStorage.length") == 0
    watch(page).expect("401")


def test_assisted_links_are_listed(page: Page) -> None:
    """Show the view with made-up rows, because this fleet's machines dial each other directly."""
    page.evaluate("""async () => {
        const { Routes } = await import("/static/routes.js");
        const tried = ["punched: <b>no</b> answer"];
        const pair = { peers: ["1", "2"], names: ["alder", "birch"], tried };
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


def row_named(page: Page, name: str) -> Locator:
    return page.locator("#members tr", has=page.locator("[data-key=name]", has_text=name)).first
