"""Screenshots of the dashboard for docs/pictures/, taken from a real run.

    make screenshots

The script runs ``holdfast demo`` (a master, three contributors, a spare, their trainers, a kill in
the middle), takes screenshots with chromium, and stops the run. It takes about two minutes on two
free cores. The pictures are not edited.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import shutil
import tempfile
import time
from pathlib import Path

from attrs import frozen
from PIL import Image
from playwright.sync_api import Browser, Page, sync_playwright
from rich.console import Console

from holdfast.daemon.cli.demo import Demo

ROOT = Path(__file__).resolve().parents[1]
PICTURES = ROOT / "docs" / "pictures"
ROUNDS = 36
POSED_AT = 2  # committed rounds
SHOWN_AT = 24  # a kill, a promotion and a return have happened by then
PEER = "alder"
RUN_S = 600.0  # limit for one part of the run
LOOK_S = 0.1
BYTES_MAX = 330_000  # of a picture: every clone downloads it


@frozen
class Picture:
    """One screenshot.

    Attributes:
      node: name of the daemon whose page is shown.
      member: name of the member whose page is shown; empty: the run's.
      scale: device pixels per page pixel.
      whole: show the whole page, not only the part that fits the window.
      seen: selector of the element to scroll to.
    """

    name: str
    node: str = "master"
    member: str = ""
    width: int = 1280
    height: int = 960
    scheme: str = "light"
    scale: int = 1
    whole: bool = True
    seen: str = ""


ALL = (
    Picture("dashboard-light"),
    Picture("dashboard-dark", scheme="dark"),
    Picture("dashboard-phone", width=390, height=844, scale=2, whole=False),
    Picture(
        "dashboard-phone-members",
        width=390,
        height=844,
        scale=2,
        scheme="dark",
        whole=False,
        seen="#members-title",
    ),
    Picture("dashboard-peer", node=PEER),
    Picture("dashboard-member", member=PEER, height=1120, whole=False),
    Picture("dashboard-member-dark", member=PEER, height=1120, scheme="dark", whole=False),
)


def follow_until(demo: Demo, count: int) -> None:
    """Run the demo until a number of rounds is committed."""
    until_s = time.monotonic() + RUN_S
    while demo.poll().committed < count:
        if time.monotonic() > until_s:
            raise SystemExit(f"fewer than {count} rounds in {RUN_S:.0f} s; is this machine busy?")
        time.sleep(LOOK_S)


def pose(browser: Browser, picture: Picture, url: str) -> Page:
    """Open a page and wait for its charts, which takes long with trainers on all cores."""
    page = browser.new_page(
        viewport={"width": picture.width, "height": picture.height},
        color_scheme="dark" if picture.scheme == "dark" else "light",
        device_scale_factor=picture.scale,
    )
    own = picture.node != "master" or picture.member
    page.goto(f"{url}/#member={picture.member}" if picture.member else url)
    page.wait_for_selector("#own-loss-chart canvas" if own else "#loss-chart canvas")
    return page


def take(page: Page, picture: Picture) -> bytes:
    """Take a screenshot as PNG."""
    if picture.seen:
        page.locator(picture.seen).evaluate("node => node.scrollIntoView()")
    return bytes(page.screenshot(full_page=picture.whole))


def smaller(png: bytes) -> bytes:
    """Compress a PNG without a palette, which would change rare colours such as a warning's."""
    out = io.BytesIO()
    Image.open(io.BytesIO(png)).convert("RGB").save(out, "PNG", optimize=True)
    return out.getvalue()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--into", type=Path, default=PICTURES)
    arguments = parser.parse_args()
    chromium = shutil.which("chromium-headless-shell") or shutil.which("chromium")
    if chromium is None:
        raise SystemExit("Chromium is not installed: install it with `make packages`")
    arguments.into.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="holdfast-"))) / "run"
        folder.mkdir()
        demo = Demo(folder, ROUNDS, Console(highlight=False))
        stack.callback(demo.fleet.kill_all)
        demo.start()
        browser = stack.enter_context(sync_playwright()).chromium.launch(
            executable_path=chromium, args=["--no-sandbox", "--hide-scrollbars"]
        )
        stack.callback(browser.close)
        follow_until(demo, POSED_AT)
        urls = {each: demo.fleet.nodes[each.node].control().url for each in ALL}
        pages = {each: pose(browser, each, urls[each]) for each in ALL}
        follow_until(demo, SHOWN_AT)
        taken = {each: take(page, each) for each, page in pages.items()}
    for picture, large in taken.items():
        png = smaller(large)
        if len(png) > BYTES_MAX:
            raise SystemExit(f"{picture.name}: {len(png)} bytes, more than {BYTES_MAX}")
        path = arguments.into / f"{picture.name}.png"
        path.write_bytes(png)
        print(f"{path}  {len(png) / 1000:.0f} kB")  # noqa: T201 - the tool's output


if __name__ == "__main__":
    main()
