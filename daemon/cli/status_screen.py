"""``holdfast status`` as text: one screen with the essentials."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Console
from rich.text import Text

from .daemon_client import format_pending
from .run_tables import add, plain_console, plain_table

ROUTES_SHOWN_MAX = 12  # pairs; those without a link come first


def show_status(kind: str, status: Mapping[str, Any]) -> None:
    """Print the status of a master or a peer."""
    console = plain_console()
    if kind == "master":
        _show_master(console, status)
    else:
        _show_peer(console, status)


def _show_master(console: Console, status: Mapping[str, Any]) -> None:
    counts = f"{status['committed']} rounds committed, {status['aborted']} aborted"
    console.print(_headed(status["name"], f"  {status['state']}  {counts}"))
    if status.get("why_waiting"):
        console.print(f"waiting: {status['why_waiting']}")
    for warning in status.get("warnings", ()):
        console.print(f"warning: {warning}", markup=False)
    for row in status.get("pending", ()):
        console.print(format_pending(row))
    for line in _routes(status):
        console.print(line)
    tree = _tree(status)
    if tree:
        console.print(tree)
    table = plain_table("#", "peer", "name", "role", "sync", "step", "loss", "tokens/s", "why")
    for member in status["members"]:
        loss = member.get("loss")
        add(
            table,
            member["number"],
            member["peer"][:8],
            member["name"],
            member["role"],
            "yes" if member["in_sync"] else "no",
            member.get("step", 0),
            "-" if loss is None else f"{loss:.3f}",
            f"{member.get('tokens_per_s') or 0:.0f}",
            member.get("why") or "",
        )
    console.print(table)


def _headed(head: object, rest: str) -> Text:
    return Text().append(str(head), "bold").append(rest)


def _routes(status: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line for each pair that is not linked by simply dialling each other."""
    rows = sorted(status["routes"], key=lambda row: row["works"])
    names = {member["peer"]: member["name"] for member in status["members"]}
    for row in rows[:ROUTES_SHOWN_MAX]:
        by = f" by {names.get(row['relay'], 'a peer that left')}" if row["relay"] else ""
        how = f"{row['route']}{by}" if row["works"] else f"no link; tried now: {row['route']}{by}"
        why = "" if row["works"] or not row["tried"] else f" ({row['tried'][-1]})"
        yield f"route: {' and '.join(row['names'])}: {how}{why}"
    if len(rows) > ROUTES_SHOWN_MAX:
        yield f"route: {len(rows) - ROUTES_SHOWN_MAX} more pairs, see --json"


def _tree(status: Mapping[str, Any]) -> str:
    """Describe the newest reduction's tree; return an empty string if it is no tree."""
    rounds = [r for r in (*status["past_rounds"], *status["rounds"]) if r["plan"]]
    if not rounds or not rounds[-1]["plan"]["tree"]:
        return ""
    plan = rounds[-1]["plan"]
    names = {member["peer"]: member["name"] for member in status["members"]}
    sites = "; ".join(", ".join(names.get(p, p[:8]) for p in site) for site in plan["sites"])
    return (
        f"round {rounds[-1]['round']}: a tree, {plan['predicted_s']:.1f} s expected, "
        f"{plan['star_s']:.1f} s as a star; sites: {sites}"
    )


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


def show_verified(answer: Mapping[str, Any]) -> None:
    """Print which peers hold which bytes."""
    console = plain_console()
    for peer in answer["peers"]:
        console.print(f"{peer['peer'][:8]} ({peer['name']}): {peer['text']}")
    for each in answer["differences"]:
        head = f"{each['peer'][:8]} ({each['name']}) differs in fragment {each['fragment']}"
        console.print(_headed(head, f", version {each['version']}: {each['text']}"))
    if answer["same"]:
        console.print("all peers hold the same bytes")
    elif not answer["differences"]:
        console.print("not all peers could be compared")
    else:
        console.print(
            "the fragment's next committed round repairs a peer that differs; "
            "a machine that differs again has faulty memory: remove it with `holdfast kick`"
        )


def _show_peer(console: Console, status: Mapping[str, Any]) -> None:
    loss = status["loss"]
    sync = "in sync" if status["in_sync"] else "not in sync"
    rest = f" ({status['peer'][:8]})  {status['role']}, {sync}, {status['phase']}"
    console.print(_headed(status["name"], rest))
    if status["why"]:
        console.print(f"why: {status['why']}")
    console.print(
        f"step {status['step']}, {status['tokens']} tokens, {status['tokens_per_s']:.0f} tokens/s, "
        f"loss {'-' if loss is None else format(loss, '.3f')}"
    )
    console.print(f"trainer: {status['trainer_state']}")
    limits = {name: value for name, value in (status.get("limits") or {}).items() if value}
    if limits:
        console.print(
            "volunteer limits: "
            + ", ".join(
                name.replace("_", "-") + ("" if value is True else f" {value}")
                for name, value in limits.items()
            )
        )
    saved = status.get("checkpoints") or {}
    if saved.get("newest"):
        console.print(f"checkpoint: step {saved['step']}, in {saved['place']}")
    if saved.get("error"):
        console.print(f"! no checkpoint: {saved['error']}")
    for line in status["told"]:
        console.print(f"! {line}")
