"""Members, rounds and events as text: tables of the rows from ``run_client``."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ...membership.shared.run_status import DepartedRow, RecordedRound
from ..metrics_store import PastEvent

# A pipe has no edge, so no table cell may be cut.
PIPE_COLUMNS = 1_000
FIGURE_MEMBERS_SHOWN = 8  # with more, a figure's lowest and highest value stand beside its mean


def plain_console() -> Console:
    """Return a console as wide as the terminal; in a pipe as wide as the text and without colours.

    It interprets no markup, so a name with brackets prints as it is.
    """
    if sys.stdout.isatty() or "COLUMNS" in os.environ:
        return Console(highlight=False, markup=False, emoji=False)
    return Console(highlight=False, markup=False, emoji=False, width=PIPE_COLUMNS)


def plain_table(*headings: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for heading in headings:
        table.add_column(heading)
    return table


def add(table: Table, *cells: object) -> None:
    """Add a row whose cells are not read as markup."""
    table.add_row(*(Text(str(cell)) for cell in cells))


Cell = Callable[[DepartedRow], object]
MEMBER_CELLS: dict[str, Cell] = {
    "#": lambda m: m.number,
    "peer": lambda m: m.peer[:8],
    "name": lambda m: m.name,
    "role": lambda m: m.role,
    "sync": lambda m: "yes" if m.in_sync else "no",
    "step": lambda m: m.step,
    "loss": lambda m: format_loss(m.loss),
    "tokens/s": lambda m: f"{m.tokens_per_s:.0f}",
    "up": lambda m: _rate(m.bandwidth.up_bytes_per_s, m.bandwidth.upload_cap_bytes_per_s),
    "down": lambda m: _rate(m.bandwidth.down_bytes_per_s, m.bandwidth.download_cap_bytes_per_s),
    "sent": lambda m: format_bytes(m.bytes.bulk_sent),
    "software": lambda m: m.software or "-",
    "why": lambda m: m.why,
}


def show_members(console: Console, members: Iterable[DepartedRow], headings: Sequence[str]) -> None:
    table = plain_table(*headings)
    for member in members:
        add(table, *(MEMBER_CELLS[heading](member) for heading in headings))
    console.print(table)


def show_figures(
    console: Console, members: Sequence[DepartedRow], means: Mapping[str, float]
) -> None:
    """Print a table of the figures of ``run.log``, if any."""
    logging = [member for member in members if member.metrics]
    names = sorted({name for member in logging for name in member.metrics})
    if not names:
        return
    many = len(logging) > FIGURE_MEMBERS_SHOWN
    table = plain_table(
        "figure", "mean", *(["lowest", "highest"] if many else [m.name for m in logging])
    )
    for name in names:
        values = [member.metrics.get(name) for member in logging]
        known = [value for value in values if value is not None]
        cells = [min(known), max(known)] if many else values
        mean = means.get(name, sum(known) / len(known))  # no mean yet: of all that is known
        add(table, name, *map(format_figure, [mean, *cells]))
    console.print()
    console.print(table)


def format_figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def format_loss(loss: float | None) -> str:
    return "-" if loss is None else f"{loss:.3f}"


def show_peers(rows: Sequence[DepartedRow], *, gone: bool) -> None:
    console = plain_console()
    if not rows:
        console.print("no peer has left" if gone else "no peer is connected")
        return
    show_members(console, rows, list(MEMBER_CELLS))


def _rate(bytes_per_s: float | None, cap_bytes_per_s: float | None) -> str:
    text = "-" if bytes_per_s is None else f"{bytes_per_s / 1e6:.1f} MB/s"
    return text if cap_bytes_per_s is None else f"{text} (cap {cap_bytes_per_s / 1e6:g})"


def show_rounds(rows: Sequence[RecordedRound]) -> None:
    console = plain_console()
    if not rows:
        console.print("no round has finished yet")
        return
    headings = ("round", "at", "fragment", "outcome", "contributors", "open", "reduce", "why")
    table = plain_table(*headings)
    for row in rows:
        add(
            table,
            row.round,
            format_time(row.ended_at if row.opened_at is None else row.opened_at),
            row.fragment,
            row.outcome,
            format_contributors(row) or "-",
            _seconds(row.open_s),
            _seconds(row.reduce_s),
            format_round_reason(row),
        )
    console.print(table)


def format_contributors(row: RecordedRound) -> str:
    """Their names; with the share of the chunks that it is in, who is not in all."""
    # In an aborted round all shares are 0.
    shares = [(_name(row, each.peer), each.chunk_share or 1.0) for each in row.contributors]
    return ", ".join(
        name if share == 1.0 else f"{name} (in {share:.0%} of the chunks)" for name, share in shares
    )


def _name(row: RecordedRound, peer: str) -> str:
    return row.marks[peer].name if peer in row.marks else peer[:8]


def _seconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.1f} s"


def format_round_reason(row: RecordedRound) -> str:
    """Return what was unusual about a round; empty if nothing was."""
    unusual = row.outcome != "committed" or row.open_s is None
    parts = [row.why] if unusual and row.why else []
    # A contributor that dies before the reduction is only marked.
    marked = [peer for peer, mark in row.marks.items() if mark.state == "lost"]
    lost = dict.fromkeys([*row.lost, *marked])
    if lost:
        parts.append(f"lost {', '.join(_name(row, peer) for peer in lost)}")
    declined = {peer: why for peer, why in row.declined.items() if peer not in lost}
    if declined:
        told = (f"{_name(row, peer)} ({why})" for peer, why in declined.items())
        parts.append(f"without {', '.join(told)}")
    if row.repairs:
        parts.append(f"repaired {row.repairs}x")
    if row.reruns:
        parts.append(f"run again {row.reruns}x")
    return "; ".join(parts)


def format_event(row: PastEvent) -> str:
    return f"{format_time(row.at)}  {row.kind:5}  {row.text}"


def format_time(at: float) -> str:
    """Format a Unix time as local time, with the date unless it is today."""
    then = time.localtime(at)
    today = time.strftime("%Y-%m-%d") == time.strftime("%Y-%m-%d", then)
    return time.strftime("%H:%M:%S" if today else "%Y-%m-%d %H:%M:%S", then)


def format_bytes(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1_000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1_000
    return f"{count:.1f} TB"


def format_retransmitted(sent_bytes: int, retransmitted_bytes: int | None) -> str:
    """Return the share of all sent bytes that TCP sent again, as a percentage."""
    if retransmitted_bytes is None:
        return "-"
    return f"{100 * retransmitted_bytes / max(1, sent_bytes + retransmitted_bytes):.3g} %"
