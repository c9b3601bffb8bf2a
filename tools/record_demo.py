"""The recording docs/pictures/kill.svg: a real ``holdfast demo``, and ``holdfast events --follow``
beside it.

    make recording

Both commands run in a pseudo-terminal each, and their output is kept with its times. A terminal
emulator turns it into screens, and these become the frames of one SVG that any browser plays,
without a script. The seconds around the kill run in real time, the rest faster; nothing else is
changed. It takes about two minutes on two free cores.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import pty
import select
import struct
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Iterator, Sequence
from html import escape
from itertools import groupby
from pathlib import Path

import pyte
from attrs import define, field, frozen

ROOT = Path(__file__).resolve().parents[1]
PICTURE = ROOT / "docs" / "pictures" / "kill.svg"
BYTES_MAX = 300_000  # every clone downloads it

COLUMNS = 108
DEMO_ROWS, WATCH_ROWS = 14, 19
RUN_S = 300.0  # limit for the whole run
LOOK_S = 0.05
READ_BYTES = 65_536

KILL = "SIGKILL"  # in the demo's line about it
BEFORE_S, AFTER_S = 5.0, 6.0  # shown in real time around the kill
FASTER = 5.0  # the rest
LEAD_S = 20.0  # shown of what came before
FRAME_S = 0.1  # between two frames at least
VERDICT_S = 8.0  # the last frame

# In pixels: a cell of the terminal, and the margin around it.
CELL_X, CELL_Y, MARGIN = 8.0, 18, 14
TITLE_Y = 26
PANEL, PAPER, INK, FAINT = "#161b22", "#0d1117", "#d0d7de", "#8b949e"
COLOURS = {"red": "#ff7b72", "green": "#7ee787", "brown": "#e3b341", "cyan": "#79c0ff"}


@frozen
class Span:
    """Text of one style in a row."""

    column: int
    text: str
    colour: str
    bold: bool


Row = tuple[Span, ...]


@frozen
class Frame:
    """All rows of both terminals from a time on."""

    at_s: float
    rows: tuple[Row, ...]


@define
class Recorded:
    """A command in a pseudo-terminal, and its output so far.

    Attributes:
      output: pieces with the time at which they came.
    """

    arguments: Sequence[str]
    rows: int
    output: list[tuple[float, bytes]] = field(factory=list)
    _process: subprocess.Popen[bytes] = field(init=False)
    _terminal: int = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._terminal, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", self.rows, COLUMNS, 0, 0))
        self._process = subprocess.Popen(
            [sys.executable, "-m", "holdfast", *self.arguments],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env={**os.environ, "TERM": "xterm-256color", "COLUMNS": str(COLUMNS)},
            start_new_session=True,
        )
        os.close(theirs)

    @property
    def status(self) -> int | None:
        return self._process.poll()

    def read(self) -> None:
        """Take what has come within ``LOOK_S``."""
        ready, _, _ = select.select([self._terminal], [], [], LOOK_S)
        if ready:
            try:
                data = os.read(self._terminal, READ_BYTES)
            except OSError:  # the command has ended
                time.sleep(LOOK_S)
                return
            self.output.append((time.monotonic(), data))

    def end(self) -> None:
        if self._process.poll() is None:
            self._process.terminate()
        self._process.wait()
        os.close(self._terminal)


def record(folder: Path) -> tuple[Recorded, Recorded]:
    """Run the demo to its end with its events beside it."""
    demo = Recorded(["demo", "--keep", str(folder)], DEMO_ROWS)
    until_s = time.monotonic() + RUN_S
    try:
        while not (folder / "master" / "control.json").exists():
            demo.read()
            _require(demo.status is None and time.monotonic() < until_s, "the demo did not start")
        watch = Recorded(["events", "--follow", "--state", str(folder / "master")], WATCH_ROWS)
        try:
            while demo.status is None:
                _require(time.monotonic() < until_s, "the demo did not end")
                demo.read()
                watch.read()
            demo.read()
        finally:
            watch.end()
    finally:
        demo.end()
    _require(demo.status == 0, "the demo's verdict is not ok")
    return demo, watch


def _require(holds: bool, why: str) -> None:
    if not holds:
        raise SystemExit(f"record_demo: {why}")


# ---------------------------------------------------------------- frames


class Replay:
    """A terminal that is played up to a time."""

    def __init__(self, recorded: Recorded) -> None:
        self._screen = pyte.Screen(COLUMNS, recorded.rows)
        self._stream = pyte.ByteStream(self._screen)
        self._left = list(recorded.output)

    def play(self, until_s: float) -> None:
        while self._left and self._left[0][0] <= until_s:
            self._stream.feed(self._left.pop(0)[1])

    def rows(self) -> Iterator[Row]:
        for line in range(self._screen.lines):
            yield tuple(self._spans(line))

    def _spans(self, line: int) -> Iterator[Span]:
        cells = [self._screen.buffer[line][column] for column in range(COLUMNS)]
        styled = groupby(enumerate(cells), key=lambda each: (each[1].fg, each[1].bold))
        for (colour, bold), group in styled:
            places = list(group)
            text = "".join(cell.data for _, cell in places)
            if kept := text.strip():
                column = places[0][0] + len(text) - len(text.lstrip())
                yield Span(column, kept, COLOURS.get(colour, INK), bold)


def kill_time(demo: Recorded) -> float:
    text = ((at_s, data.decode(errors="replace")) for at_s, data in demo.output)
    found = next((at_s for at_s, piece in text if KILL in piece), None)
    _require(found is not None, "no kill was recorded")
    assert found is not None
    return found


def shown_at(at_s: float, killed_s: float) -> float:
    """Return the second of the recording, from the kill on, that shows a second of the run."""
    since_s = at_s - killed_s
    if since_s < -BEFORE_S:
        return -BEFORE_S + (since_s + BEFORE_S) / FASTER
    if since_s > AFTER_S:
        return AFTER_S + (since_s - AFTER_S) / FASTER
    return since_s


def frames(demo: Recorded, watch: Recorded) -> list[Frame]:
    """Return the frames, the first one at 0 s."""
    killed_s = kill_time(demo)
    begin_s = max(killed_s - LEAD_S, watch.output[0][0] + 1.0)
    # The demo stops its daemons before the verdict; the events then only say that they leave.
    end_s = demo.output[-1][0]
    watch_end_s = max(at_s for at_s, data in demo.output if b"round" in data) + 1.0
    times = sorted({at_s for each in (demo, watch) for at_s, _ in each.output})
    upper, lower = Replay(demo), Replay(watch)
    made: list[Frame] = []
    zero_s = shown_at(begin_s, killed_s)
    for at_s in [begin_s, *(each for each in times if begin_s < each <= end_s)]:
        upper.play(at_s)
        lower.play(min(at_s, watch_end_s))
        shown_s = shown_at(at_s, killed_s) - zero_s
        rows = (*upper.rows(), *lower.rows())
        if made and shown_s - made[-1].at_s < FRAME_S:
            made[-1] = Frame(made[-1].at_s, rows)
        elif not made or rows != made[-1].rows:
            made.append(Frame(shown_s, rows))
    return made


# ---------------------------------------------------------------- the SVG


def row_markup(row: Row) -> str:
    spans = []
    for span in row:
        weight = ' font-weight="700"' if span.bold else ""
        colour = "" if span.colour == INK else f' fill="{span.colour}"'
        x, length = span.column * CELL_X, len(span.text) * CELL_X
        spans.append(
            f'<text x="{x:g}" textLength="{length:g}"{colour}{weight}>{escape(span.text)}</text>'
        )
    return "".join(spans)


def svg(shown: Sequence[Frame]) -> str:
    """Return an SVG of frames below each other in a strip that jumps from one to the next."""
    total_s = shown[-1].at_s + VERDICT_S
    width = COLUMNS * CELL_X + 2 * MARGIN
    pane_y = [TITLE_Y, 2 * TITLE_Y + DEMO_ROWS * CELL_Y + MARGIN]
    height = pane_y[1] + WATCH_ROWS * CELL_Y + MARGIN
    names: dict[Row, str] = {}
    strip = []
    for number, frame in enumerate(shown):
        rows = []
        for line, row in enumerate(frame.rows):
            if row:
                name = names.setdefault(row, f"r{len(names)}")
                pane, place = (0, line) if line < DEMO_ROWS else (1, line - DEMO_ROWS)
                y = number * height + pane_y[pane] + (place + 1) * CELL_Y
                rows.append(f'<use href="#{name}" y="{y}"/>')
        strip.append("".join(rows))
    steps = "".join(
        f"{100 * frame.at_s / total_s:.3f}%{{transform:translateY({-number * height}px)}}"
        for number, frame in enumerate(shown)
    )
    last = -(len(shown) - 1) * height
    style = (
        f"@keyframes play{{{steps}100%{{transform:translateY({last}px)}}}}"
        f".strip{{animation:play {total_s:.2f}s step-end infinite}}"
        "@media (prefers-reduced-motion:reduce)"
        f"{{.strip{{animation:none;transform:translateY({last}px)}}}}"
        "text{white-space:pre}"
    )
    definitions = "".join(f'<g id="{name}">{row_markup(row)}</g>' for row, name in names.items())
    titles = "".join(
        f'<rect y="{y - TITLE_Y}" width="{width:g}" height="{TITLE_Y}" fill="{PANEL}"/>'
        f'<text x="{MARGIN}" y="{y - 8}" fill="{FAINT}">{text}</text>'
        for y, text in zip(
            pane_y,
            (
                f"$ holdfast demo   (a real run, {FASTER:g} times as fast except around the kill)",
                "$ holdfast events --follow",
            ),
            strict=True,
        )
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height}"'
        f' width="{width:g}" height="{height}" fill="{INK}" font-family="ui-monospace,\'DejaVu Sans'
        ' Mono\',Menlo,Consolas,monospace" font-size="13"><title>A terminal: a run of three'
        " contributors and a spare; one contributor is killed, the spare takes its place, and the"
        f" killed peer comes back</title><style>{style}</style><defs>{definitions}</defs><rect"
        f' width="{width:g}" height="{height}" fill="{PAPER}"/><svg x="{MARGIN}"'
        f' width="{COLUMNS * CELL_X:g}" height="{height}"><g'
        f' class="strip">{"".join(strip)}</g></svg>{titles}</svg>\n'
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=PICTURE)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="holdfast-recording-") as folder:
        demo, watch = record(Path(folder) / "run")
    picture = svg(frames(demo, watch))
    _require(len(picture) <= BYTES_MAX, f"{len(picture)} bytes, at most {BYTES_MAX} are wanted")
    arguments.out.write_text(picture)
    print(f"{arguments.out}: {len(picture) / 1000:.0f} kB")  # noqa: T201


if __name__ == "__main__":
    main()
