"""Commands that run until their work is over: join, host, relay, demo."""

from __future__ import annotations

import socket
import sys
from collections.abc import Sequence
from pathlib import Path

import click
import trio

from ...protocol.addresses import Address
from ...protocol.errors import UserError
from ...protocol.messages import HOSTS_MAX, NAME_CHARS_MAX
from ..peer.trainer.host_places import HEAD_PLACEHOLDER, HOST_PLACEHOLDER, HOSTS_PLACEHOLDER
from ..peer.volunteer_limits import Hours
from ..process.exit_codes import ExitCode
from ..process.paths import peer_state
from .options import (
    ADDRESS,
    FILE,
    FOLDER,
    MEMBER_NAME,
    POSITIVE,
    Parsed,
    advertise_option,
    entering,
    http_host_option,
    name_option,
    parse_invite_option,
    patience_option,
    quiet_option,
    ready,
    screen,
    tell,
)
from .training_command import TakesCommand, check_command

RELAY_PORT = 29702
PAIRS_DEFAULT = 32
PAIRS_MAX = 4_096  # more streams than one process should hold
RATE_MBYTES_DEFAULT = 10.0
EXAMPLE = (
    "-- torchrun --nnodes {hosts} --node-rank {host} --master-addr {head} --nproc-per-node 8"
    " train.py"
)
UNITS = {"max_upload": "MB/s", "max_download": "MB/s", "max_memory": "GB", "max_disk": "GB"}
LIMITS = (*UNITS, "hours", "pause_on_battery")  # set by the owner of a machine that is lent


class Join(TakesCommand):
    """``holdfast join``: its help shows the limits of a lent machine apart from other options."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        options = [each for each in self.get_params(ctx) if isinstance(each, click.Option)]
        for title, limits in (("Options", False), ("Limits of a machine that is lent", True)):
            records = (
                each.get_help_record(ctx) for each in options if (each.name in LIMITS) is limits
            )
            with formatter.section(title):
                formatter.write_dl([record for record in records if record])


@click.command(cls=Join)
@click.argument("invite", callback=parse_invite_option)
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
@name_option
@click.option("--state", type=FOLDER, help="Directory for this peer's identity and state.")
@click.option(
    "--listen",
    multiple=True,
    default=("0.0.0.0:0",),
    type=ADDRESS,
    help="Address to bind; port 0 means any free port; repeatable.",
)
@advertise_option
@click.option(
    "--http", default="127.0.0.1:0", type=ADDRESS, help="Address for this peer's status over HTTP."
)
@http_host_option
@click.option("--max-upload", type=POSITIVE, help="Upload limit to other peers, in MB/s.")
@click.option("--max-download", type=POSITIVE, help="Download limit from other peers, in MB/s.")
@click.option(
    "--hours",
    metavar="FROM-TO",
    type=Parsed("hours", Hours.parse),
    help="Take part only in these hours of local time, e.g. 22-07.",
)
@click.option("--pause-on-battery", is_flag=True, help="Pause while the machine runs on battery.")
@click.option(
    "--max-memory",
    type=POSITIVE,
    help="Memory limit in GB: do not join a run whose state plus 1 GiB needs more.",
)
@click.option(
    "--max-disk", type=POSITIVE, help="Disk limit in GB for checkpoints and partial downloads."
)
@click.option(
    "--relay",
    type=POSITIVE,
    metavar="MB/S",
    help="Forward up to this rate between machines that cannot reach each other.",
)
@click.option(
    "--map-port/--no-map-port",
    default=True,
    help="Ask the router for a port (PCP or UPnP) if other machines cannot dial this one.",
)
@patience_option
@click.option(
    "--checkpoints",
    metavar="DIR|URL",
    help=(
        "Location of this peer's checkpoints; a peer with this option always writes them "
        "(default: the state directory, if run.toml selects this peer as a writer)."
    ),
)
@click.option(
    "--require-gpus",
    type=click.IntRange(1),
    metavar="N",
    help=(
        "Train only while N GPUs are healthy; with fewer this peer is a spare. `{gpus}` in the"
        " command is the number of healthy ones."
    ),
)
@click.option(
    "--hosts",
    type=click.IntRange(2, HOSTS_MAX),
    metavar="N",
    help=(
        "This peer is N hosts of one site, this one included; `holdfast host` takes part on each"
        " other one. `{host}`, `{hosts}` and `{head}` in the command are a host's number, how many"
        " there are, and this one's address."
    ),
)
@click.option(
    "--require-hosts",
    type=click.IntRange(1, HOSTS_MAX),
    metavar="N",
    help="Train with N hosts or more of a command with `{hosts}`; with fewer this peer is a spare.",
)
@quiet_option
def join(
    invite: str,
    command: tuple[str, ...],
    name: str,
    state: Path | None,
    listen: tuple[Address, ...],
    advertise: tuple[Address, ...],
    http: Address,
    http_host: tuple[str, ...],
    max_upload: float | None,
    max_download: float | None,
    hours: Hours | None,
    pause_on_battery: bool,
    max_memory: float | None,
    max_disk: float | None,
    relay: float | None,
    map_port: bool,
    patience: float,
    checkpoints: str | None,
    require_gpus: int | None,
    hosts: int | None,
    require_hosts: int | None,
    quiet: bool,
) -> None:
    """Take part in a run with this machine.

    INVITE is the string that the run operator gave you, or @FILE to read it from a file. The
    training COMMAND follows `--`; without a command this peer keeps a copy of the state but does
    not train. Ctrl+C finishes the round and leaves; a second Ctrl+C stops at once.

    The command's output is printed here and kept for `holdfast logs`. A command that fails before
    it has attached ends this peer; later it is started again.

    \b
    Examples:
      holdfast join holdfast1.... -- python train.py
      holdfast join holdfast1.... --advertise home.example.org:29701 -- python train.py
      holdfast join holdfast1.... -- torchrun --nproc-per-node {gpus} train.py
      holdfast join holdfast1.... --hours 22-07 --max-upload 2 -- python train.py
    """
    from ...protocol.messages import RelayOffer
    from ..peer.availability import Volunteer
    from ..peer.peer_options import PeerOptions
    from ..peer.volunteer_limits import DiskQuota, VolunteerLimits

    ticket, folder = entering(invite, state, peer_state)
    check_command(command)
    if require_hosts is not None and hosts is None:
        raise click.UsageError("--require-hosts goes with --hosts")
    if hosts is not None:
        _check_hosts(command, hosts, require_hosts)
    given = click.get_current_context().params
    limits = {name: f"{given[name]:g} {unit}" for name, unit in UNITS.items() if given[name]}
    if hours is not None:
        limits["hours"] = hours.text
    if pause_on_battery:
        limits["pause_on_battery"] = "yes"
    options = PeerOptions(
        invite=ticket,
        command=command,
        name=name,
        state=folder,
        listen=listen,
        advertise=advertise,
        map_ports=map_port and not advertise,
        http=http,
        http_names=http_host,
        upload_bytes_per_s=None if max_upload is None else max_upload * 1e6,
        download_bytes_per_s=None if max_download is None else max_download * 1e6,
        patience_s=patience or None,
        checkpoints=checkpoints,
        memory_bytes=None if max_memory is None else int(max_memory * 1e9),
        disk_quota=None if max_disk is None else DiskQuota(int(max_disk * 1e9)),
        relay=None if relay is None else RelayOffer(relay * 1e6, PAIRS_DEFAULT, 0, only=False),
        gpus_min=require_gpus or 0,
        hosts=hosts or 1,
        hosts_min=require_hosts or 0,
        limits=limits,
    )
    volunteered = VolunteerLimits(hours, pause_on_battery)
    with ready(options.state), screen(quiet=quiet) as shown:
        trio.run(Volunteer(options, volunteered, shown.tell, shown).run)


def _check_hosts(command: Sequence[str], hosts: int, minimum: int | None) -> None:
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
    _check_hosts(command, HOSTS_MAX, None)
    folder = state or peer_state(site.run_id[-16:], site.fingerprint)
    options = HostOptions(site, command, name, folder, patience or None)
    with ready(folder), screen(quiet=quiet) as shown:
        trio.run(run_host, options, shown)


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


@click.command()
@click.option("--json", "json_path", type=FILE, help="Write the verdict to this file.")
@click.option("--rounds", type=click.IntRange(6), default=24, help="Rounds to commit.")
@click.option("--keep", type=FOLDER, help="Keep logs and state in this folder.")
def demo(json_path: Path | None, rounds: int, keep: Path | None) -> None:
    """Train a small GPT with four peers on this machine and kill one of them.

    The demo starts a master, three contributors and a spare, each in its own process. It kills one
    contributor in the middle of a reduction, the spare takes its place, and the killed peer
    returns.

    \b
    Examples:
      holdfast demo
      holdfast demo --json verdict.json
    """
    from .demo import run_demo

    sys.exit(run_demo(json_path, rounds, keep))
