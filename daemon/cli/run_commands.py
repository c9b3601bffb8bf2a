"""Commands that run something until it is over: a master, a peer, a demo, measurements."""

from __future__ import annotations

import gc
import socket
import sys
from pathlib import Path

import click
import trio

from ...protocol.addresses import Address
from ...protocol.messages import NAME_CHARS_MAX
from ..bench.allreduce_bench import allreduce
from ..bench.lanes_bench import lanes
from ..bench.transfer_bench import transfer
from ..paths import locked, master_state, peer_state
from ..peer.volunteer_limits import Hours
from .options import (
    NumberInRange,
    advertise_option,
    entering,
    http_host_option,
    member_name,
    parse_address_option,
    parse_addresses,
    parse_hours,
    parse_invite_option,
    patience_option,
    site_name,
    tell,
)
from .relay_command import PAIRS_DEFAULT

MASTER_PORT = 29700


@click.command()
@click.argument("run_toml", type=click.Path(path_type=Path), required=False)
@click.option(
    "--state",
    type=click.Path(file_okay=False, path_type=Path),
    help="Keep the run's journal and keys here.",
)
@click.option(
    "--journal",
    type=click.Path(file_okay=False, path_type=Path),
    help="Take a run over: go on with this copy of another master's state (see `backup`).",
)
@click.option(
    "--standby",
    multiple=True,
    callback=parse_addresses,
    help="HOST:PORT of a machine that may take over; goes into invites; repeatable.",
)
@click.option(
    "--listen",
    multiple=True,
    default=(f"0.0.0.0:{MASTER_PORT}",),
    show_default=True,
    callback=parse_addresses,
    help="Bind here; repeatable.",
)
@advertise_option
@click.option(
    "--http",
    default="127.0.0.1:29780",
    show_default=True,
    callback=parse_address_option,
    help="Status and control over HTTP.",
)
@http_host_option
@click.option(
    "--invite/--no-invite", default=True, help="Print an invite for the run's first peers."
)
def master(
    run_toml: Path | None,
    state: Path | None,
    journal: Path | None,
    standby: tuple[Address, ...],
    listen: tuple[Address, ...],
    advertise: tuple[Address, ...],
    http: Address,
    http_host: tuple[str, ...],
    invite: bool,
) -> None:
    """Coordinate a run: admit peers, open rounds, commit them.

    The master carries no tensor bytes; any small machine does. Stopped and started again with the
    same state directory it goes on where it was. RUN_TOML may be left out then.

    With a copy of its state another machine can take the run over: --journal. That master opens no
    round before more than half of the contributors have come to it; the old one must then stop, and
    does as soon as it hears of the new one.

    \b
    Examples:
      holdfast master run.toml
      holdfast master run.toml --standby spare.example.org:29700
      holdfast master --journal /backup/run
      holdfast master run.toml --advertise train.example.org:29700
    """
    from ..master.run_master import Master, MasterOptions
    from ..spec_file import read_spec
    from ..this_machine import raise_descriptor_limit

    if state is not None and journal is not None:
        raise click.UsageError("--journal DIR is the state directory: leave out --state")
    folder = journal or state
    if folder is None:
        if run_toml is None:
            raise click.UsageError("give a RUN_TOML, or --state or --journal with a run's state")
        folder = master_state(read_spec(run_toml).run.name)
    options = MasterOptions(
        run_toml, folder, listen, advertise, http, invite, journal is not None, standby, http_host
    )
    with locked(folder):
        gc.freeze()  # what was imported is no garbage: let the collector look at the rest only
        raise_descriptor_limit()
        trio.run(Master(options, tell).run)


@click.command()
@click.argument("invite", callback=parse_invite_option)
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
@click.option(
    "--name",
    default=lambda: socket.gethostname()[:NAME_CHARS_MAX],
    show_default="this host's name",
    callback=member_name,
    help="How others see this peer.",
)
@click.option(
    "--state",
    type=click.Path(file_okay=False, path_type=Path),
    help="Keep this peer's identity here.",
)
@click.option(
    "--listen",
    multiple=True,
    default=("0.0.0.0:0",),
    show_default=True,
    callback=parse_addresses,
    help="Bind here; port 0 takes a free one; repeatable.",
)
@advertise_option
@click.option(
    "--http",
    default="127.0.0.1:0",
    show_default=True,
    callback=parse_address_option,
    help="This peer's status over HTTP.",
)
@http_host_option
@click.option(
    "--max-upload",
    type=NumberInRange(min=0, min_open=True),
    help="Send at most so many megabytes a second to other peers.",
)
@click.option(
    "--max-download",
    type=NumberInRange(min=0, min_open=True),
    help="Receive at most so many megabytes a second from other peers.",
)
@click.option(
    "--hours",
    metavar="FROM-TO",
    callback=parse_hours,
    help="Take part only then, by this machine's local time, e.g. 22-07; wait in between.",
)
@click.option(
    "--pause-on-battery",
    is_flag=True,
    help="Take part only while the machine does not run on its battery.",
)
@click.option(
    "--max-memory",
    type=NumberInRange(min=0, min_open=True),
    help="Join no run whose state, with a GiB beside it, takes more gigabytes of memory.",
)
@click.option(
    "--max-disk",
    type=NumberInRange(min=0, min_open=True),
    help="Keep at most so many gigabytes of checkpoints and of what has come of a copy.",
)
@click.option(
    "--nice",
    type=click.IntRange(0, 19),
    default=0,
    show_default=True,
    help="Give way to other programs, the training command too; 19: to all.",
)
@click.option(
    "--ionice",
    type=click.Choice(["low", "idle"]),
    help="Give way to other programs' use of the disk.",
)
@click.option(
    "--relay",
    type=NumberInRange(min=0, min_open=True),
    metavar="MB/S",
    help="Forward up to so many megabytes a second for machines that cannot reach each other.",
)
@patience_option
@click.option(
    "--site",
    default="",
    show_default="told by addresses",
    callback=site_name,
    help="Machines that name the same site share one line to the others.",
)
@click.option(
    "--checkpoints",
    metavar="DIR|URL",
    help="Write and look for checkpoints here, even if run.toml asks others for them "
    "(default: in the state directory, if run.toml asks this peer).",
)
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
    nice: int,
    ionice: str | None,
    relay: float | None,
    patience: float,
    site: str,
    checkpoints: str | None,
) -> None:
    """Take part in a run with this machine.

    INVITE is the string that the run's owner gave you, or @FILE with it in there; the training
    COMMAND follows `--`. Without a command this peer keeps a copy of the state but trains nothing.
    Ctrl+C leaves in good order; a second Ctrl+C stops at once.

    \b
    Examples:
      holdfast join holdfast1.... -- python train.py
      holdfast join holdfast1.... --advertise home.example.org:29701 -- python train.py
      holdfast join holdfast1.... --hours 22-07 --max-upload 2 --nice 19 -- python train.py
    """
    from ...protocol.messages import RelayOffer
    from ..peer.availability import Volunteer
    from ..peer.run_peer import PeerOptions
    from ..peer.volunteer_limits import DiskQuota, VolunteerLimits
    from ..this_machine import be_nice, raise_descriptor_limit

    ticket, folder = entering(invite, state, peer_state)
    be_nice(nice, ionice or "")
    options = PeerOptions(
        invite=ticket,
        command=command,
        name=name,
        state=folder,
        listen=listen,
        advertise=advertise,
        http=http,
        http_names=http_host,
        upload_bytes_per_s=None if max_upload is None else max_upload * 1e6,
        download_bytes_per_s=None if max_download is None else max_download * 1e6,
        patience_s=patience or None,
        site=site,
        checkpoints=checkpoints,
        memory_bytes=None if max_memory is None else int(max_memory * 1e9),
        disk_quota=None if max_disk is None else DiskQuota(int(max_disk * 1e9)),
        relay=None if relay is None else RelayOffer(relay * 1e6, PAIRS_DEFAULT, 0, only=False),
        limits={
            "max_upload": max_upload,
            "max_download": max_download,
            "hours": None if hours is None else hours.text,
            "pause_on_battery": pause_on_battery,
            "max_memory": max_memory,
            "max_disk": max_disk,
            "nice": nice,
            "ionice": ionice,
        },
    )
    with locked(options.state):
        gc.freeze()  # as the master does
        raise_descriptor_limit()
        trio.run(Volunteer(options, VolunteerLimits(hours, pause_on_battery), tell).run)


@click.command()
@click.option(
    "--json",
    "json_path",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write the verdict here.",
)
@click.option(
    "--rounds", type=click.IntRange(6), default=24, show_default=True, help="Rounds to commit."
)
@click.option(
    "--keep",
    type=click.Path(file_okay=False, path_type=Path),
    help="Keep all logs and state in this folder.",
)
def demo(json_path: Path | None, rounds: int, keep: Path | None) -> None:
    """Train a small GPT on this machine with four peers, kill one, watch the run go on.

    A master, three contributors and a spare, each a process of its own. One contributor is killed
    in the middle of a reduction; the spare takes its place; later the killed one comes back.

    \b
    Examples:
      holdfast demo
      holdfast demo --json verdict.json
    """
    from .demo import run_demo

    sys.exit(run_demo(json_path, rounds, keep))


@click.group()
def bench() -> None:
    """Measure what this machine can do."""


bench.add_command(allreduce)
bench.add_command(lanes)
bench.add_command(transfer)


@bench.command()
@click.option(
    "--json",
    "json_path",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write the measurements here, too.",
)
def codecs(json_path: Path | None) -> None:
    """Measure every codec: bits a value, speed on one core, signal-to-noise.

    \b
    Examples:
      holdfast bench codecs
      holdfast bench codecs --json codecs.json
    """
    from ..bench.codec_bench import bench_codecs

    bench_codecs(json_path)
