"""Commands that coordinate a run until they are stopped: master, standby."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
import trio

from ...protocol.addresses import Address
from ...protocol.errors import UserError
from ..process.exit_codes import ExitCode
from ..process.paths import check_kind, check_source, master_state
from .options import (
    ADDRESS,
    FILE,
    FOLDER,
    advertise_option,
    http_host_option,
    quiet_option,
    ready,
    screen,
)

if TYPE_CHECKING:
    from ...membership.spec.spec import RunSpec
    from ..master.opened_run import MasterOptions
    from ..process.screen import Screen

MASTER_PORT = 29700
DATABASE_SCHEMES = ("postgresql://", "postgres://")
F = TypeVar("F", bound=Callable[..., Any])

key_file_option = click.option(
    "--key-file",
    type=FILE,
    help=(
        "With a journal in PostgreSQL: the file whose content seals the run's key there, the same"
        " for all masters; made if the run is new. Instead: a passphrase in the variable"
        " HOLDFAST_PASSPHRASE."
    ),
)


def serving_options(command: F) -> F:
    """Add the options of a process that can lead a run: where it serves, and what it prints."""
    for option in (
        quiet_option,
        click.option(
            "--invite/--no-invite", default=True, help="Print an invite for the run's first peers."
        ),
        http_host_option,
        click.option(
            "--http",
            default="127.0.0.1:29780",
            type=ADDRESS,
            help="Address for status and control over HTTP.",
        ),
        advertise_option,
        click.option(
            "--listen",
            multiple=True,
            default=(f"0.0.0.0:{MASTER_PORT}",),
            type=ADDRESS,
            help="Address to bind; repeatable.",
        ),
    ):
        command = option(command)
    return command


@click.command()
@click.argument("run_toml", type=click.Path(path_type=Path), required=False)
@click.option("--state", type=FOLDER, help="Directory for the run's journal and keys.")
@click.option(
    "--journal",
    metavar="DIR|URL",
    help=(
        "Take a run over by hand from a backup of its journal: a directory (see `backup`), or a"
        " database that was put back, postgresql://USER@HOST/DATABASE."
    ),
)
@key_file_option
@click.option(
    "--also",
    multiple=True,
    type=ADDRESS,
    help="HOST:PORT of a machine that may take over by hand; listed in invites; repeatable.",
)
@serving_options
def master(
    run_toml: Path | None,
    state: Path | None,
    journal: str | None,
    key_file: Path | None,
    also: tuple[Address, ...],
    listen: tuple[Address, ...],
    advertise: tuple[Address, ...],
    http: Address,
    http_host: tuple[str, ...],
    invite: bool,
    quiet: bool,
) -> None:
    """Coordinate a run: admit peers, open rounds, commit them.

    The master carries no tensor bytes, so any small machine will do. A master that is restarted
    with the same state directory continues the run; RUN_TOML may then be omitted.

    With --journal another machine takes the run over by hand, from a backup. The new master opens
    no round before more than half of the contributors have connected to it. The old master stops as
    soon as it learns of the new one. For a takeover that needs nobody see `holdfast standby`.

    \b
    Examples:
      holdfast master run.toml
      holdfast master run.toml --advertise train.example.org:29700
      holdfast master run.toml --also spare.example.org:29700
      holdfast master --journal /backup/run
    """
    from ..master.opened_run import MasterOptions
    from ..master.run_master import Master

    spec = None if run_toml is None else _read(run_toml)
    url = journal if journal is not None and journal.startswith(DATABASE_SCHEMES) else None
    copy = None if journal is None or url is not None else Path(journal)
    if copy is not None and state is not None:
        raise click.UsageError("--journal DIR is the state directory: omit --state")
    if key_file is not None and url is None:
        raise click.UsageError("--key-file is for a journal in a database: --journal URL")
    if url is not None and spec is None:
        raise click.UsageError(
            "a journal in a database is found by the run's name: give a RUN_TOML"
        )
    if journal is None and spec is not None and spec.run.journal:
        raise click.UsageError(
            f"{run_toml} keeps the journal in a database: start this run's masters with "
            f"`holdfast standby {run_toml}`; the first one leads at once"
        )
    options = MasterOptions(
        run_toml,
        copy or _folder(state, run_toml, spec),
        listen,
        advertise,
        http,
        invite=invite,
        takes_over=journal is not None,
        also=also,
        http_names=http_host,
    )
    check_kind(options.state, "master")
    with ready(options.state), screen(quiet=quiet) as shown:
        if url is not None and spec is not None:
            trio.run(_shared(options, spec, url, key_file, shown))
        else:
            trio.run(Master(options, shown.tell, shown).run)


@click.command()
@click.argument("run_toml", type=click.Path(path_type=Path))
@click.option("--state", type=FOLDER, help="Directory for this master's own keys and history.")
@click.option(
    "--journal",
    metavar="URL",
    help="postgresql://USER@HOST/DATABASE: where the run's journal is; the same for all masters. "
    "Default: `journal` under [run] in RUN_TOML.",
)
@key_file_option
@serving_options
def standby(
    run_toml: Path,
    state: Path | None,
    journal: str | None,
    key_file: Path | None,
    listen: tuple[Address, ...],
    advertise: tuple[Address, ...],
    http: Address,
    http_host: tuple[str, ...],
    invite: bool,
    quiet: bool,
) -> None:
    """Wait while another master leads the run, and lead it once that one is gone.

    The masters of a run keep its journal in one PostgreSQL database. Start this command on several
    machines: one of them leads at once, and begins the run if it is new. When it is gone another
    one leads, within seconds and without losing a round.

    \b
    Examples:
      holdfast standby run.toml --journal postgresql://holdfast@db.example.org/runs --key-file
      run.key holdfast standby run.toml --advertise train.example.org:29700
    """
    from ..master.opened_run import MasterOptions

    spec = _read(run_toml)
    url = journal or spec.run.journal
    if not url.startswith(DATABASE_SCHEMES):
        raise click.UsageError(
            "masters that follow each other share a database: give --journal"
            " postgresql://USER@HOST/DATABASE, or `journal` under [run]; without one, take over by"
            " hand with `holdfast master --journal DIR`"
        )
    options = MasterOptions(
        run_toml,
        _folder(state, run_toml, spec),
        listen,
        advertise,
        http,
        invite=invite,
        http_names=http_host,
    )
    check_kind(options.state, "master")
    with ready(options.state), screen(quiet=quiet) as shown:
        trio.run(_shared(options, spec, url, key_file, shown))


def _read(run_toml: Path) -> RunSpec:
    from ..spec_file import read_spec

    return read_spec(run_toml)


def _folder(state: Path | None, run_toml: Path | None, spec: RunSpec | None) -> Path:
    if state is not None:
        return state
    if run_toml is None or spec is None:
        raise click.UsageError("give a RUN_TOML, or --state or --journal with a run's state")
    folder = master_state(spec.run.name)
    check_source(folder, run_toml)
    return folder


def _shared(
    options: MasterOptions, spec: RunSpec, url: str, key_file: Path | None, shown: Screen
) -> Callable[[], Any]:
    """Return the work of a master with a journal in a database; raise UserError if unusable."""
    from ...membership.spec.spec import has_password

    if has_password(url):
        raise click.UsageError(
            "--journal must not contain the password, which the list of processes would show: put"
            " it into ~/.pgpass or the variable PGPASSWORD"
        )
    try:
        from ..master.journal.shared_journal import SharedOptions
        from ..master.standby import SharedMaster
    except ImportError as error:
        raise UserError(
            f"a journal in PostgreSQL needs psycopg: {error}",
            exit_code=ExitCode.CONFIG,
            hint="pip install 'holdfast[postgres]'",
        ) from error
    passphrase = os.environ.get("HOLDFAST_PASSPHRASE", "")
    if key_file is None and not passphrase:
        raise UserError(
            "a journal in a database keeps the run's key sealed: give the masters a key file",
            exit_code=ExitCode.CONFIG,
            hint="--key-file FILE (the first master makes it; copy it to the others), or the "
            "variable HOLDFAST_PASSPHRASE",
        )
    shared = SharedOptions(url, spec.run.name, key_file, passphrase, spec.journal_lease_s)
    return SharedMaster(options, shared, shown.tell, shown).run
