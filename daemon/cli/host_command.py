"""``holdfast host``: a further machine of a peer of several hosts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click
import trio

from ...protocol.errors import UserError
from ...protocol.messages import HOSTS_MAX
from ..peer.trainer.host_places import HEAD_PLACEHOLDER, HOST_PLACEHOLDER, HOSTS_PLACEHOLDER
from ..process.exit_codes import ExitCode
from ..process.paths import peer_state
from .options import (
    FOLDER,
    name_option,
    parse_invite_option,
    patience_option,
    quiet_option,
    ready,
    screen,
)
from .training_command import TakesCommand, check_command

EXAMPLE = (
    "-- torchrun --nnodes {hosts} --node-rank {host} --master-addr {head} --nproc-per-node 8"
    " train.py"
)


def check_hosts(command: Sequence[str], hosts: int, minimum: int | None) -> None:
    """Raise UserError for a command that cannot run on several hosts."""
    words = " ".join(command)
    if not command or HOST_PLACEHOLDER not in words or HEAD_PLACEHOLDER not in words:
        raise UserError(
            f"a peer of several hosts needs a command with {HOST_PLACEHOLDER} and"
            f" {HEAD_PLACEHOLDER} in it",
            exit_code=ExitCode.USAGE,
            hint=f"for example {EXAMPLE}",
        )
    if minimum is not None and (minimum > hosts or HOSTS_PLACEHOLDER not in words):
        raise UserError(
            f"--require-hosts {minimum} needs {HOSTS_PLACEHOLDER} in the command, and no more than"
            f" --hosts {hosts}",
            exit_code=ExitCode.USAGE,
            hint=f"for example {EXAMPLE}",
        )


class TakesString(TakesCommand):
    """``holdfast host``, which has no invite."""

    first = "STRING"
    missing = "the string is missing: what `holdfast join --hosts` has printed on the head"


@click.command(cls=TakesString)
@click.argument("string", callback=parse_invite_option)
@click.argument("command", nargs=-1, type=click.UNPROCESSED, required=True)
@name_option
@click.option("--state", type=FOLDER, help="Directory for this host's identity and state.")
@patience_option
@quiet_option
def host(
    string: str,
    command: tuple[str, ...],
    name: str,
    state: Path | None,
    patience: float,
    quiet: bool,
) -> None:
    """Take part in a peer of several hosts with this machine.

    STRING is what `holdfast join --hosts` has printed on the head, or @FILE to read it from a file.
    COMMAND is the head's. It is started and ended when the head's is. Ctrl+C ends it, and the head
    goes on without this host.

    \b
    Example:
      holdfast host holdfasthost1.... -- torchrun --nnodes {hosts} --node-rank {host}
        --master-addr {head} --nproc-per-node 8 train.py
    """
    from ...protocol.trust.invite import HOST_PREFIX, Invite
    from ..peer.hosts.run_host import HostOptions, run_host

    site = Invite.decode(string, 0.0, HOST_PREFIX)
    check_command(command)
    check_hosts(command, HOSTS_MAX, None)
    folder = state or peer_state(site.run_id[-16:], site.fingerprint)
    options = HostOptions(site, command, name, folder, patience or None)
    with ready(folder), screen(quiet=quiet) as shown:
        trio.run(run_host, options, shown)
