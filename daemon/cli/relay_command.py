"""``holdfast relay``: a small process that forwards between machines that others cannot dial."""

from __future__ import annotations

import socket
from pathlib import Path

import click
import trio

from ...protocol.addresses import Address
from ...protocol.messages import NAME_CHARS_MAX
from ..process.paths import peer_state
from .options import (
    ADDRESS,
    FOLDER,
    MEMBER_NAME,
    POSITIVE,
    advertise_option,
    entering,
    parse_invite_option,
    patience_option,
    ready,
    tell,
)

RELAY_PORT = 29702
PAIRS_DEFAULT = 32
PAIRS_MAX = 4_096  # more streams than one process should hold
RATE_MBYTES_DEFAULT = 10.0


@click.command()
@click.argument("invite", callback=parse_invite_option)
@click.option(
    "--name",
    default=lambda: f"relay {socket.gethostname()}"[:NAME_CHARS_MAX],
    show_default="relay and this host's name",
    type=MEMBER_NAME,
    help="This relay's name in status and logs.",
)
@click.option("--state", type=FOLDER, help="Directory for this relay's identity.")
@click.option(
    "--listen",
    multiple=True,
    default=(f"0.0.0.0:{RELAY_PORT}",),
    type=ADDRESS,
    help="Address to bind; repeatable.",
)
@advertise_option
@click.option(
    "--max-rate",
    type=POSITIVE,
    default=RATE_MBYTES_DEFAULT,
    metavar="MB/S",
    help="Forwarding limit, all pairs and both directions together.",
)
@click.option(
    "--max-pairs",
    type=click.IntRange(1, PAIRS_MAX),
    default=PAIRS_DEFAULT,
    help="Maximum number of pairs of machines to forward for.",
)
@click.option(
    "--quota",
    type=POSITIVE,
    metavar="GB",
    help="Forward this amount, then nothing more until the relay is restarted.",
)
@patience_option
def relay(
    invite: str,
    name: str,
    state: Path | None,
    listen: tuple[Address, ...],
    advertise: tuple[Address, ...],
    max_rate: float,
    max_pairs: int,
    quota: float | None,
    patience: float,
) -> None:
    """Forward between machines of a run that cannot reach each other, on a machine that all can
    dial.

    A relay trains nothing and holds no state; a cheap host with bandwidth will do. The forwarded
    bytes are encrypted end to end. The master decides which pairs use the relay.

    \b
    Examples:
      holdfast relay holdfast1....
      holdfast relay holdfast1.... --advertise relay.example.org:29702 --max-rate 50 --quota 900
    """
    from ...protocol.messages import RelayOffer
    from ..peer.peer_options import PeerOptions
    from ..peer.relay import run_relay

    ticket, folder = entering(invite, state, lambda *run: Path(f"{peer_state(*run)}-relay"))
    quota_bytes = 0 if quota is None else int(quota * 1e9)
    options = PeerOptions(
        invite=ticket,
        command=(),
        name=name,
        state=folder,
        listen=listen,
        advertise=advertise,
        http=Address("127.0.0.1", 0),
        patience_s=patience or None,
        relay=RelayOffer(max_rate * 1e6, max_pairs, quota_bytes, only=True),
    )
    with ready(folder):
        trio.run(run_relay, options, tell)
