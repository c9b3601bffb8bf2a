"""The pages of a run and a peer some of whose GPUs have failed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from playwright.sync_api import Locator, Page, expect

from tests.browser.conftest import url
from tests.browser.test_page import figure, row, too_wide
from tests.processes.harness import Fleet, contributing, spec

pytestmark = pytest.mark.slow

GPUS = 8
SICK = "it has fallen off the bus"


def write_gpus(fleet: Fleet, name: str, healthy: int) -> str:
    path = fleet.folder / f"{name}.gpus"
    lines = [f"{number} {'' if number < healthy else SICK}" for number in range(GPUS)]
    whole = path.with_suffix(".new")  # the daemon may look at any moment
    whole.write_text("\n".join(lines))
    whole.rename(path)
    return str(path)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Two peers; one of them has lost a GPU and needs six."""
    with Fleet(tmp_path_factory.mktemp("gpus")) as made:
        made.start_master(spec(min_members=1))
        for name, healthy in (("alder", GPUS), ("birch", GPUS - 1)):
            made.join(
                name,
                *("--pause", "0.02"),
                founder=name == "alder",
                more=("--require-gpus", "6"),
                env={"HOLDFAST_GPUS": write_gpus(made, name, healthy)},
            )
        made.until(lambda s: contributing(s, "alder", "birch"), "both contribute")
        yield made


def note(page: Page, fleet: Fleet, name: str) -> Locator:
    return row(page, fleet, name).locator("[data-key=why]")


def test_a_peer_that_has_lost_gpus_says_so_and_waits_if_too_few_are_left(
    page: Page, fleet: Fleet
) -> None:
    expect(note(page, fleet, "birch")).to_have_text("7 of 8 GPUs")
    expect(note(page, fleet, "alder")).to_have_text("")
    page.goto(url(fleet, "birch"))
    expect(page.locator(".figure", has_text="Tokens/s")).to_contain_text("7 of 8 GPUs")
    expect(figure(page, "Trainer")).to_have_text("running")

    write_gpus(fleet, "birch", 5)
    expect(page.locator("#state")).to_contain_text("waiting for GPUs")
    expect(page.locator("#why")).to_have_attribute("data-tone", "wait")
    expect(page.locator("#why")).to_contain_text(
        f"The trainer waits: 5 of 8 GPUs, 6 needed (GPU 5: {SICK};"
    )
    expect(figure(page, "Trainer")).to_have_text("waits")
    assert too_wide(page) == []
    page.goto(url(fleet, "master"))
    expect(note(page, fleet, "birch")).to_have_text("waiting for its trainer; 5 of 8 GPUs")

    write_gpus(fleet, "birch", 6)
    expect(note(page, fleet, "birch")).to_have_text("6 of 8 GPUs")
