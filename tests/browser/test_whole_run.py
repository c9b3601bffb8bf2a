"""The page of a run from its beginning, with no machine, to its end, after its members have
left.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from tests.browser.conftest import url, watch
from tests.browser.test_page import figure, give_token, token_of
from tests.processes.harness import Fleet, spec

pytestmark = pytest.mark.slow

ROUNDS = 12


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    """A master that no machine has joined yet."""
    with Fleet(tmp_path, strict=False) as made:
        made.start_master(spec(rounds=ROUNDS, min_members=1, sync_every=50))
        yield made


def test_an_empty_page_says_how_to_join(page: Page, fleet: Fleet) -> None:
    start = page.locator("#start")
    expect(start).to_contain_text("No machine has joined yet")
    expect(page.locator("#join-command")).to_have_text("holdfast join INVITE -- python train.py")
    expect(start).to_contain_text("holdfast invite --founder")
    expect(page.locator("#run")).to_be_hidden()
    expect(page.locator("canvas:visible")).to_have_count(0)
    assert "1970" not in page.locator("body").inner_text()

    page.get_by_role("button", name="Make the join command").click()
    give_token(page, token_of(fleet))
    command = page.locator("#join-command")
    expect(command).to_have_text(re.compile(r"^holdfast join holdfast1\.\S+ -- python train\.py$"))
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.get_by_role("button", name="Copy the join command").click()
    expect(page.get_by_role("button", name="Copied")).to_be_visible()
    copied = page.evaluate("navigator.clipboard.readText()")
    assert copied == command.inner_text()
    fleet.invites["alder"] = copied.split()[2]  # the first machine joins with what was copied


def test_an_empty_chart_has_no_axes(page: Page, fleet: Fleet) -> None:
    fleet.join("alder", command=())  # a member without a trainer
    expect(page.locator("#start")).to_be_hidden()
    expect(page.locator("#run")).to_be_visible()
    expect(page.locator("#members tbody tr")).to_have_count(1)
    for chart in ("#loss-chart", "#speed-chart"):
        expect(page.locator(chart)).to_contain_text("No points yet.")
    expect(page.locator(".u-wrap")).to_have_count(0)
    fleet.nodes["alder"].process.terminate()
    fleet.nodes["alder"].wait()


def test_a_finished_run_has_an_ending_that_a_restart_of_the_master_keeps(
    page: Page, fleet: Fleet
) -> None:
    fleet.join("alder", "--pause", "0.01", "--figures", founder=True)
    expect(page.locator("#state")).to_contain_text("training")
    expect(page.locator("#state")).to_contain_text("finished", timeout=120_000)
    assert fleet.nodes["alder"].wait() == 0
    for _load in range(2):
        ending = page.locator("#ending")
        expect(ending).to_contain_text("The run is finished")
        expect(ending).to_contain_text("The final weights are in the checkpoints of alder.")
        expect(ending.locator(".command")).to_have_text("holdfast export model.safetensors")
        # It is known when the record that the run is finished is on disk.
        duration = ending.locator("dt", has_text="Duration").locator("xpath=following::dd[1]")
        expect(duration).to_have_text(re.compile(r"^[\d.]+ (s|min( \d+ s)?)"))
        facts = dict(
            zip(
                ending.locator("dt").all_inner_texts(),
                ending.locator("dd:not(.remark)").all_inner_texts(),
                strict=True,
            )
        )
        first, last = map(float, facts["Loss"].split(" → "))
        assert min(first, last) > 0.0  # the first point may come after the toy model has learnt
        assert facts["Rounds"] == str(ROUNDS)
        assert facts["Tokens"] not in ("0", "–")
        expect(page.locator("#why")).to_have_attribute("data-tone", "calm")
        expect(page.locator("#state")).to_have_attribute("data-state", "finished")
        expect(figure(page, "Loss")).to_have_text(facts["Loss"].split(" → ")[1])
        expect(page.locator("#actions")).to_be_hidden()
        expect(page.locator("#loss-chart canvas")).to_be_visible()
        page.reload()
    fleet.nodes["master"].process.terminate()
    fleet.nodes["master"].wait()
    fleet.restart_master()
    page.goto(url(fleet, "master"))
    expect(page.locator("#ending")).to_contain_text("The run is finished")
    expect(page.locator("#logged [data-figure='error'] canvas")).to_be_visible()
    expect(page.locator("#loss-chart canvas")).to_be_visible()
    page.goto(f"{url(fleet, 'master')}/#member=alder")
    expect(page.locator("#own-loss-chart canvas")).to_be_visible()
    expect(page.locator("#member [data-figure='rank'] canvas")).to_be_visible()
    watch(page).expect("net::ERR_")  # while the master was away
