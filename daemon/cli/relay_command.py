"""``holdfast relay``: a small process that forwards for machines that cannot reach each other."""

from __future__ import annotations

import gc
import socket
from pathlib import Path

import click
import trio

from ...protocol.addresses import Address
from ...protocol.messages import NAME_CHARS_MAX
from ..paths import locked, peer_state
from .options import (
    NumberInRange,
    advertise_option,
    entering,
    member_name,
    parse_addresses,
    parse_invite_option,
    patience_option,
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
    callback=member_name,
    help="How others see this relay.",
)
@click.option(
    "--state",
    type=click.Path(file_okay=False, path_type=Path),
    help="Keep this relay's identity here.",
)
@click.option(
    "--listen",
    multiple=True,
    default=(f"0.0.0.0:{RELAY_PORT}",),
    show_default=True,
    callback=parse_addresses,
    help="Bind here; repeatable.",
)
@advertise_option
@click.option(
    "--max-rate",
    type=NumberInRange(min=0, min_open=True),
    default=RATE_MBYTES_DEFAULT,
    show_default=True,
    help="Forward at most so many megabytes a second, of all pairs, both ways together.",
)
@click.option(
    "--max-pairs",
    type=click.IntRange(1, PAIRS_MAX),
    default=PAIRS_DEFAULT,
    show_default=True,
    help="Forward for so many pairs of machines at most.",
)
@click.option(
    "--quota",
    type=NumberInRange(min=0, min_open=True),
    help="Forward no more than so many gigabytes, then nothing until it is started again.",
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
    """Forward for machines of a run that cannot reach each other, with a machine that all can dial.

    It trains nothing and holds no state; a cheap host with bandwidth will do. What it forwards is
    encrypted between the two. Who uses it the run's master decides.

    \b
    Examples:
      holdfast relay holdfast1....
      holdfast relay holdfast1.... --advertise relay.example.org:29702 --max-rate 50 --quota 900
    """
    from ...protocol.messages import RelayOffer
    from ..peer.run_peer import PeerOptions
    from ..peer.run_relay import Relay
    from ..this_machine import raise_descriptor_limit

    ticket, folder = entering(invite, state, _relay_state)
    options = PeerOptions(
        invite=ticket,
        command=(),
        name=name,
        state=folder,
        listen=listen,
        advertise=advertise,
        http=Address("127.0.0.1", 0),
        patience_s=patience or None,
    )
    quota_bytes = 0 if quota is None else int(quota * 1e9)
    offer = RelayOffer(max_rate * 1e6, max_pairs, quota_bytes, only=True)
    with locked(folder):
        gc.freeze()  # what was imported is no garbage: let the collector look at the rest only
        raise_descriptor_limit()
        trio.run(Relay(options, offer, tell).run)


def _relay_state(run_id: str, fingerprint: str) -> Path:
    folder = peer_state(run_id, fingerprint)
    return folder.with_name(f"{folder.name}-relay")
