"""``holdfast status`` as text: one screen with the essentials."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Console
from rich.text import Text

from ...protocol.text import format_duration
from ..progress_lines import committed_rounds, format_left, format_rounds
from ..status_records import Ending, MasterStatus, PeerStatus
from .run_client import Status, format_pending
from .run_tables import (
    add,
    format_bytes,
    format_figure,
    format_loss,
    format_retransmitted,
    format_time,
    plain_console,
    plain_table,
    show_figures,
    show_members,
)

ROUTES_SHOWN_MAX = 12  # pairs; those without a link come first
LINKS_SHOWN_MAX = 12  # those over which most was sent
EXPORT_COMMAND = "holdfast export model.safetensors"


LINK_COLUMNS = (
    "linked to",
    "connections",
    "round trip",
    "congestion control",
    "sent",
    "retransmitted",
)
STATUS_COLUMNS = ("#", "peer", "name", "role", "sync", "step", "loss", "tokens/s", "why")


def show_status(status: Status) -> None:
    console = plain_console()
    if isinstance(status, MasterStatus):
        _show_master(console, status)
    else:
        _show_peer(console, status)


def _show_master(console: Console, status: MasterStatus) -> None:
    figures = status.headline
    rounds = f"{format_rounds(figures.rounds, figures.rounds_wanted)}, {status.aborted} aborted"
    parts = (status.state, rounds, f"step {figures.step}", format_left(figures.eta_s))
    console.print(_headed(status.name, "".join(f"  {part}" for part in parts if part)))
    if status.why_waiting:
        console.print(status.why_waiting)
    if status.copies.text:
        compared_s = status.copies.compared_s
        age = "" if compared_s is None else f" (compared {format_duration(compared_s)} ago)"
        console.print(status.copies.text + age, markup=False)
    if figures.outer_text:
        console.print(figures.outer_text)
    if status.ending is not None:
        for line in _ending(status, status.ending):
            console.print(line)
    for warning in status.warnings:
        console.print(f"warning: {warning}", markup=False)
    for row in status.pending:
        console.print(format_pending(row))
    for line in _routes(status):
        console.print(line)
    if status.members or status.ending is None:
        show_members(console, status.members, STATUS_COLUMNS)
    show_figures(console, status.members or status.departed, status.figures)


def _ending(status: MasterStatus, ending: Ending) -> Iterator[str]:
    """Yield lines about a finished run: how it went, and where its weights are."""
    text = "finished"
    if ending.finished_at is not None:
        text += f" at {format_time(ending.finished_at)}"
    if ending.duration_s is not None:
        text += f", after {format_duration(ending.duration_s)}"
    losses = f"{format_loss(ending.loss_start)} -> {format_loss(ending.loss_end)}"
    yield f"{text}: loss {losses}, {status.headline.tokens} tokens"
    if ending.weights_at:
        yield f"final weights: in the checkpoints of {', '.join(ending.weights_at)}"
        yield f"to get a file of them, run there: {EXPORT_COMMAND}"


def _headed(head: object, rest: str) -> Text:
    return Text().append(str(head), "bold").append(rest)


def _routes(status: MasterStatus) -> Iterator[str]:
    """Yield a line for each pair that has an arranged route, or no link."""
    rows = sorted(status.routes, key=lambda row: row.works)
    names = {member.peer: member.name for member in status.members}
    for row in rows[:ROUTES_SHOWN_MAX]:
        by = f" by {names.get(row.relay, 'a peer that left')}" if row.relay else ""
        how = f"{row.route}{by}" if row.works else f"no link; tried now: {row.route}{by}"
        why = "" if row.works or not row.tried else f" ({row.tried[-1]})"
        yield f"route: {' and '.join(row.names)}: {how}{why}"
    if len(rows) > ROUTES_SHOWN_MAX:
        yield f"route: {len(rows) - ROUTES_SHOWN_MAX} more pairs, see --json"


def show_invites(answer: Mapping[str, Any]) -> None:
    """Print a master's invites, without their secret tokens."""
    console = plain_console()
    table = plain_table("id", "role", "founder", "uses left", "expires", "withdrawn", "approval")
    for invite in answer["invites"]:
        expires = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(invite["expires_s"]))
        add(
            table,
            invite["id"],
            invite["role"],
            "yes" if invite["founder"] else "no",
            invite["uses_left"],
            expires,
            "yes" if invite["withdrawn"] else "no",
            "yes" if invite["approve"] else "no",
        )
    console.print(table)


def _show_peer(console: Console, status: PeerStatus) -> None:
    sync = "in sync" if status.in_sync else "not in sync"
    console.print(
        _headed(status.name, f" ({status.peer[:8]})  {status.role}, {sync}, {status.phase}")
    )
    if status.why:
        console.print(status.why)
    console.print(
        f"step {status.step}, {status.tokens} tokens, {status.tokens_per_s:.0f} tokens/s, "
        f"loss {format_loss(status.loss)}"
    )
    rounds = format_rounds(committed_rounds(status), status.rounds_wanted or None)
    console.print("  ".join(filter(None, (rounds, format_left(status.left_s)))))
    console.print(f"trainer: {status.trainer_state}")
    if status.mapped_port:
        console.print(f"port of the router: {status.mapped_port}")
    if status.limits:
        limits = (f"{name.replace('_', '-')} {value}" for name, value in status.limits.items())
        console.print(f"limits of this machine: {', '.join(limits)}")
    if status.metrics:
        figures = (f"{name} {format_figure(value)}" for name, value in status.metrics.items())
        console.print(f"figures: {', '.join(figures)}")
    saved = status.checkpoints
    if saved.newest:
        console.print(f"checkpoint: step {saved.step}, in {saved.place}")
    if saved.error:
        console.print(f"! no checkpoint: {saved.error}")
    _show_links(console, status)
    for line in status.notices:
        console.print(f"! {line}")


def _show_links(console: Console, status: PeerStatus) -> None:
    if status.bulk_sent_bytes or status.bulk_received_bytes:
        again = ""
        if status.bulk_retransmitted_bytes is not None:
            share = format_retransmitted(status.bulk_sent_bytes, status.bulk_retransmitted_bytes)
            again = f", of which {share} retransmitted"
        console.print(
            f"sent {format_bytes(status.bulk_sent_bytes)}{again}; "
            f"received {format_bytes(status.bulk_received_bytes)}"
        )
    names = {member.peer: member.name for member in status.members}
    rows = sorted(status.links, key=lambda link: -link.sent_bytes)
    table = plain_table(*LINK_COLUMNS)
    for link in rows[:LINKS_SHOWN_MAX]:
        add(
            table,
            names.get(link.peer, link.peer[:8]),
            link.lanes,
            "-" if link.round_trip_s is None else f"{1e3 * link.round_trip_s:.3g} ms",
            ", ".join(filter(None, link.congestion)) or "-",
            format_bytes(link.sent_bytes),
            format_retransmitted(link.sent_bytes, link.retransmitted_bytes),
        )
    if rows:
        console.print(table)
    if len(rows) > LINKS_SHOWN_MAX:
        console.print(f"{len(rows) - LINKS_SHOWN_MAX} more links, see --json")
    if status.congestion is not None and status.congestion.fix:
        console.print(f"congestion control: {status.congestion.text}")
        console.print(f"  fix: {status.congestion.fix}")
