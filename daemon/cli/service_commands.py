"""``holdfast service``: a master or a peer that starts with the machine."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import click

from ...protocol.durable_files import write_private
from ...protocol.errors import UserError
from ..exit_codes import ExitCode
from .options import json_option

SERVED = ("master", "join")  # commands that run until something is over
KEPT_VARIABLES = ("PATH", "HOLDFAST_HOME", "XDG_DATA_HOME", "PYTHONPATH", "VIRTUAL_ENV")
MANAGER_S = 30.0  # for the service manager to answer

name_option = click.option(
    "--name", default="", help="What the service is called (default: master or peer)."
)
system_option = click.option(
    "--system", is_flag=True, help="Of the machine, from its start on; else of this user."
)
manager_option = click.option(
    "--manager",
    type=click.Choice(["systemd", "launchd"]),
    default="launchd" if sys.platform == "darwin" else "systemd",
    show_default=True,
    help="What keeps it running.",
)


@click.group()
def service() -> None:
    """Let this machine's service manager keep a master or a peer running."""


@service.command()
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
@name_option
@system_option
@manager_option
@click.option(
    "--run-as", default="", help="The user of a --system service (default: who calls sudo)."
)
@click.option("--start", is_flag=True, help="Start it now, and with the machine from now on.")
def install(
    command: tuple[str, ...], name: str, system: bool, manager: str, run_as: str, start: bool
) -> None:
    """Write the service's file for COMMAND, which follows `--`: master ... or join ....

    The daemon runs from this folder with this PATH, so `python` is the one that it is here. Stopped, it
    drains first; what a restart would not mend (a bad invite, a run that is over) is not tried again.
    An invite in the file is a secret: only its owner can read it.

    \b
    Examples:
      holdfast service install -- master run.toml
      holdfast service install --start -- join holdfast1.... -- python train.py
    """
    from .service_units import ServiceUnit, launchd_plist, systemd_unit

    if run_as and not system:
        raise click.UsageError("--run-as is for --system")
    run_as = run_as or os.environ.get("SUDO_USER", "") if system else ""
    if system and not run_as:
        raise click.UsageError(
            "say whom the service runs as, with --run-as USER: it needs nothing of root's"
        )
    _check(command)
    if command[0] == "master" and not {"--invite", "--no-invite"} & set(command):
        command = (*command, "--no-invite")  # what it prints is in the system's journal
    called = _name(name or ("master" if command[0] == "master" else "peer"))
    made = ServiceUnit(
        called,
        (sys.executable, "-m", "holdfast", *command),
        Path.cwd(),
        {key: os.environ[key] for key in KEPT_VARIABLES if key in os.environ},
        system,
        run_as,
    )
    path = _path(called, manager, system)
    if manager == "systemd":
        text = systemd_unit(made).encode()
    else:
        logs = Path("/Library/Logs") if system else Path.home() / "Library" / "Logs"
        text = launchd_plist(made, logs / f"holdfast-{called}.log")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_private(path, text)
    except OSError as error:
        raise UserError(
            f"cannot write {path}: {error.strerror}",
            hint="with --system this takes root" if system else "",
        ) from error
    click.echo(f"wrote {path}")
    if system and command[0] == "join" and not any(word.startswith("@") for word in command):
        click.echo(
            "everybody here may ask the manager for this command, and so for the invite: better put "
            "it into a file that only the service's user can read, and say @FILE instead"
        )
    lines = _starting(manager, system, path)
    if start:
        for line in lines:
            _manage(line)
        click.echo(f"started {called}; `holdfast service status` says how it goes")
        return
    click.echo("to start it now, and with the machine from now on:")
    for line in lines:
        click.echo(f"  {shlex.join(line)}")
    if manager == "systemd" and not system:
        click.echo("  loginctl enable-linger     # so that it runs when nobody is logged in")


@service.command()
@name_option
@system_option
@manager_option
def uninstall(name: str, system: bool, manager: str) -> None:
    """Stop a service, in good order, and remove its file. What the daemon keeps stays.

    \b
    Examples:
      holdfast service uninstall
      holdfast service uninstall --name peer
    """
    path = _installed(name, manager, system)
    called = _name_of(path)
    if manager == "systemd":
        _manage([*_systemctl(system), "disable", "--now", path.name], may_fail=True)
    else:
        _manage(["launchctl", "unload", "-w", str(path)], may_fail=True)
    path.unlink()
    if manager == "systemd":
        _manage([*_systemctl(system), "daemon-reload"], may_fail=True)
    click.echo(f"removed {called} ({path})")


@service.command("status")
@name_option
@system_option
@manager_option
@json_option
def peer_status(name: str, system: bool, manager: str, as_json: bool) -> None:
    """Say which services are installed here, and whether they run.

    \b
    Examples:
      holdfast service status
      holdfast service status --json
    """
    found = _all(manager, system)
    if name:
        found = [path for path in found if _name_of(path) == name]
    rows = []
    for path in found:
        if manager == "systemd":
            state = _manage([*_systemctl(system), "is-active", path.name], may_fail=True)
        else:
            listed = _manage(["launchctl", "list", f"holdfast.{_name_of(path)}"], may_fail=True)
            state = "active" if listed else "inactive"
        rows.append({"name": _name_of(path), "path": str(path), "state": state or "unknown"})
    if as_json:
        click.echo(json.dumps({"services": rows}, indent=2))
        return
    if not rows:
        click.echo("no service is installed here")
    for row in rows:
        click.echo(f"{row['name']}  {row['state']}  {row['path']}")


# ---------------------------------------------------------------- parts


def _check(command: tuple[str, ...]) -> None:
    """Whether the command would start, as far as its words tell."""
    if command[0] not in SERVED:
        raise click.UsageError(f"a service runs `master ...` or `join ...`, not {command[0]!r}")
    root = click.get_current_context().find_root().command
    assert isinstance(root, click.Group)
    inner = root.commands[command[0]]
    given = inner.make_context(command[0], list(command[1:]), auto_envvar_prefix="HOLDFAST").params
    if command[0] == "join":
        from ...protocol.trust.invite import Invite

        Invite.decode(given["invite"])
    elif given["run_toml"] is not None:
        from ..spec_file import read_spec

        read_spec(given["run_toml"])


def _name(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9_-]{1,64}", name):
        raise click.BadParameter("a service's name is up to 64 letters, digits, - and _")
    return name


def _folder(manager: str, system: bool) -> Path:
    if manager == "launchd":
        return Path("/Library/LaunchDaemons") if system else Path.home() / "Library/LaunchAgents"
    if system:
        return Path("/etc/systemd/system")
    config = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return Path(config) / "systemd" / "user"


def _path(name: str, manager: str, system: bool) -> Path:
    file = f"holdfast-{name}.service" if manager == "systemd" else f"holdfast.{name}.plist"
    return _folder(manager, system) / file


def _name_of(path: Path) -> str:
    return path.stem.removeprefix("holdfast").lstrip("-.")


def _all(manager: str, system: bool) -> list[Path]:
    pattern = "holdfast-*.service" if manager == "systemd" else "holdfast.*.plist"
    return sorted(_folder(manager, system).glob(pattern))


def _installed(name: str, manager: str, system: bool) -> Path:
    found = _all(manager, system)
    if name:
        found = [path for path in found if _name_of(path) == name]
    if len(found) == 1:
        return found[0]
    names = ", ".join(map(_name_of, found))
    raise UserError(
        f"several services are installed here: {names}"
        if found
        else "no such service is installed here",
        exit_code=ExitCode.USAGE,
        hint="say which with --name"
        if found
        else "`holdfast service status` lists them; --system?",
    )


def _systemctl(system: bool) -> list[str]:
    return ["systemctl"] if system else ["systemctl", "--user"]


def _starting(manager: str, system: bool, path: Path) -> list[list[str]]:
    if manager == "launchd":
        return [["launchctl", "load", "-w", str(path)]]
    base = _systemctl(system)
    return [[*base, "daemon-reload"], [*base, "enable", "--now", path.name]]


def _manage(argv: list[str], *, may_fail: bool = False) -> str:
    """Ask the service manager; what it said."""
    if shutil.which(argv[0]) is None:
        if may_fail:
            return ""
        raise UserError(f"there is no {argv[0]} here", hint=f"run `{shlex.join(argv)}` where it is")
    from .service_units import STOP_S

    done = subprocess.run(
        argv, capture_output=True, text=True, timeout=STOP_S + MANAGER_S, check=False
    )
    if done.returncode != 0 and not may_fail:
        raise UserError(
            f"`{shlex.join(argv)}` failed: {done.stderr.strip()}",
            hint="over ssh a user's services want `loginctl enable-linger` and XDG_RUNTIME_DIR",
        )
    return done.stdout.strip()
