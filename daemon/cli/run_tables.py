"""Members, rounds and events as text: tables of the rows from ``daemon_client``."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from .daemon_client import Status

# A pipe has no edge, so no table cell may be cut.
PIPE_COLUMNS = 1_000


def plain_console() -> Console:
    """Return a console as wide as the terminal; in a pipe as wide as the text and without colours.

    The console interprets no markup, so a name with brackets prints as it is. ``Text`` carries styles.
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


def show_peers(rows: Sequence[Status], *, gone: bool) -> None:
    console = plain_console()
    if not rows:
        console.print("no peer has left" if gone else "no peer is connected")
        return
    table = plain_table(
        *("#", "peer", "name", "role", "sync", "step", "loss", "tokens/s", "up", "down", "sent"),
        "software",
        "why it left" if gone else "why",
    )
    for row in rows:
        line = row["bandwidth"]
        add(
            table,
            row["number"],
            row["peer"][:8],
            row["name"],
            row["role"],
            "yes" if row["in_sync"] else "no",
            row["step"],
            "-" if row["loss"] is None else f"{row['loss']:.3f}",
            f"{row['tokens_per_s']:.0f}",
            _rate(line["up_bytes_per_s"], line["upload_cap_bytes_per_s"]),
            _rate(line["down_bytes_per_s"], line["download_cap_bytes_per_s"]),
            format_bytes(row["bytes"]["bulk_sent"]),
            row["software"] or "-",
            row["why"],
        )
    console.print(table)


def show_quarantined(status: Status) -> None:
    """Print the quarantined peers, and the peers that may not own chunks for now."""
    console = plain_console()
    for row in status["quarantined"]:
        console.print(f"in quarantine: {row['peer'][:8]} ({row['name']}): {row['why']}")
    names = {member["peer"]: member["name"] for member in status["members"]}
    for peer in status["barred"]:
        console.print(
            f"owns no chunks: {peer[:8]} ({names.get(peer, '')}): it sent no evidence to auditors"
        )


def _rate(bytes_per_s: float | None, cap_bytes_per_s: float | None) -> str:
    text = "-" if bytes_per_s is None else f"{bytes_per_s / 1e6:.1f} MB/s"
    return text if cap_bytes_per_s is None else f"{text} (cap {cap_bytes_per_s / 1e6:g})"


def show_rounds(rows: Sequence[Status]) -> None:
    console = plain_console()
    if not rows:
        console.print("no round has finished yet")
        return
    headings = ("round", "at", "fragment", "outcome", "contributors", "open", "reduce", "why")
    table = plain_table(*headings)
    for row in rows:
        add(
            table,
            row["round"],
            format_time(row["at"]),
            row["fragment"],
            row["outcome"],
            format_contributors(row) or "-",
            _seconds(row["open_s"]),
            _seconds(row["reduce_s"]),
            format_round_reason(row),
        )
    console.print(table)


def format_contributors(row: Status) -> str:
    """Format the contributors' names, with the share of chunks for those that are not in all."""
    # An aborted round's share is 0, and older versions recorded none.
    shares = [each.get("chunk_share", 1.0) or 1.0 for each in row["contributors"]]
    return ", ".join(
        name if share == 1.0 else f"{name} (in {share:.0%} of the chunks)"
        for name, share in zip(row["names"], shares, strict=True)
    )


def _seconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.1f} s"


def format_round_reason(row: Status) -> str:
    """Return what was unusual about a round, or an empty string."""
    unusual = row["outcome"] != "committed" or row["open_s"] is None
    parts = [row["why"]] if unusual and row["why"] else []
    if row["lost_names"]:
        parts.append(f"lost {', '.join(row['lost_names'])}")
    if row["repairs"]:
        parts.append(f"repaired {row['repairs']}x")
    if row["reruns"]:
        parts.append(f"run again {row['reruns']}x")
    return "; ".join(parts)


def format_round(row: Status) -> str:
    """Format a round as one line."""
    text = f"round {row['round']} {row['outcome']}"
    if row["outcome"] == "committed":
        text += f" by {format_contributors(row)}"
        if row["open_s"] is not None:
            text += f" in {row['open_s'] + row['reduce_s']:.1f} s"
    why = format_round_reason(row)
    return f"{text}: {why}" if why else text


def format_event(row: Status) -> str:
    """Format an event as one line."""
    return f"{format_time(row['at'])}  {row['kind']:5}  {row['text']}"


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
