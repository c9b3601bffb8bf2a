"""Commands for who sits at a machine: logs, dashboard."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
import webbrowser
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import click

from ..log_ring import LINES_KEPT_MAX
from ..paths import DaemonAddress, find_control
from .daemon_client import Json, call, polled
from .options import json_option, state_option, tell

LINES_DEFAULT = 100
DISPLAYS = ("DISPLAY", "WAYLAND_DISPLAY")  # variables of a desktop's terminal


@click.command()
@state_option
@click.option(
    "-n",
    "--lines",
    type=click.IntRange(1, LINES_KEPT_MAX),
    default=LINES_DEFAULT,
    help="Number of past lines.",
)
@click.option("--follow", "-f", is_flag=True, help="Keep printing new lines, until Ctrl+C.")
@json_option
def logs(state: Path | None, lines: int, follow: bool, as_json: bool) -> None:
    """Print the newest lines of the peer on this machine: its notices, its training command's output.

    With --follow, --json prints one object per line.

    \b
    Examples:
      holdfast logs --follow
      holdfast logs -n 30
    """
    after = 0.0

    def see(control: DaemonAddress) -> Json:
        query: dict[str, str | int] = {"lines": lines, "after": repr(after)}
        return call(control, "logs", None, query=query)

    if as_json and not follow:
        click.echo(json.dumps(see(find_control(state, "peer")), indent=2))
        return
    with contextlib.suppress(KeyboardInterrupt):
        for seen in polled(state, "peer", see):
            for line in seen["lines"]:
                tell(json.dumps(line) if as_json else _format(line))
                after = line["at"]
            if not follow:
                return


def _format(line: dict[str, Any]) -> str:
    at = time.strftime("%H:%M:%S", time.localtime(line["at"]))
    return f"{at}  {line['source']:<7}  {line['text']}"


# ---------------------------------------------------------------- dashboard


@click.command()
@state_option
@click.option("--print", "only_print", is_flag=True, help="Print the address; open no browser.")
def dashboard(state: Path | None, only_print: bool) -> None:
    """Open the page of the master or peer on this machine, signed in.

    The address contains the token that allows the operator's actions: show it to nobody. Without a
    desktop, or over ssh, it is printed.

    \b
    Examples:
      holdfast dashboard
      holdfast dashboard --print
    """
    control = find_control(state, None)
    address = f"{control.url}/#token={control.token}"
    if not only_print and _has_desktop() and _open(address):
        tell(f"opened the page of the {control.kind} at {control.url} in your browser")
        return
    tell(address)
    if "SSH_CONNECTION" in os.environ:
        click.echo(_how_to_forward(control), err=True)


def _has_desktop() -> bool:
    """Return whether a browser would be seen by the person who types."""
    if "SSH_CONNECTION" in os.environ:
        return False
    return sys.platform == "darwin" or any(os.environ.get(name) for name in DISPLAYS)


def _open(address: str) -> bool:
    try:
        return webbrowser.open(address)
    except webbrowser.Error:
        return False


def _how_to_forward(control: DaemonAddress) -> str:
    """Return what makes the page's port reachable on the machine that ssh was started on."""
    own = urlsplit(control.url)
    here = (os.environ["SSH_CONNECTION"].split() + [""] * 3)[2] or "THIS-HOST"
    user = os.environ.get("USER") or "USER"
    return (
        "on the machine that you sit at, forward the port, then open that address there:\n"
        f"  ssh -N -L {own.port}:{own.hostname}:{own.port} {user}@{here}"
    )
