"""``holdfast service``: installation of a master or a peer as a system service."""

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

SERVED = ("master", "join")  # commands that keep running
KEPT_VARIABLES = ("PATH", "HOLDFAST_HOME", "XDG_DATA_HOME", "PYTHONPATH", "VIRTUAL_ENV")
MANAGER_S = 30.0  # for the service manager to answer

name_option = click.option(
    "--name", default="", show_default=False, help="Name of the service (default: master or peer)."
)
system_option = click.option(
    "--system", is_flag=True, help="A system service, started at boot, instead of a user service."
)
manager_option = click.option(
    "--manager",
    type=click.Choice(["systemd", "launchd"]),
    default="launchd" if sys.platform == "darwin" else "systemd",
    help="The service manager.",
)


@click.group()
def service() -> None:
    """Run a master or a peer under this machine's service manager."""


@service.command()
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
@name_option
@system_option
@manager_option
@click.option(
    "--run-as",
    default="",
    show_default=False,
    help="User of a --system service (default: the user who called sudo).",
)
@click.option("--start", is_flag=True, help="Start it now and at every boot.")
def install(
    command: tuple[str, ...], name: str, system: bool, manager: str, run_as: str, start: bool
) -> None:
    """Write a service file for COMMAND, which follows `--`: master ... or join ....

    The daemon runs in the current folder with the current PATH, so `python` is the same as here. A stop
    drains the daemon first. An error that a restart would not fix (a bad invite, a finished run) does
    not restart it. The file may contain a secret invite, so only its owner can read it.

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
        raise click.UsageError("name the service's user with --run-as USER: it does not need root")
    _check(command)
    if command[0] == "master" and not {"--invite", "--no-invite"} & set(command):
        command = (*command, "--no-invite")  # its output goes into the system's journal
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
            hint="--system requires root" if system else "",
        ) from error
    click.echo(f"wrote {path}")
    if system and command[0] == "join" and not any(word.startswith("@") for word in command):
        click.echo(
            "every user here can read this command, and so the invite, from the service manager: put "
            "the invite into a file that only the service's user can read, and give @FILE instead"
        )
    lines = _starting(manager, system, path)
    if start:
        for line in lines:
            _manage(line)
        click.echo(f"started {called}; `holdfast service status` shows its state")
        return
    click.echo("to start it now and at every boot:")
    for line in lines:
        click.echo(f"  {shlex.join(line)}")
    if manager == "systemd" and not system:
        click.echo("  loginctl enable-linger     # keep it running while you are logged out")


@service.command()
@name_option
@system_option
@manager_option
def uninstall(name: str, system: bool, manager: str) -> None:
    """Stop a service gracefully and remove its file. The daemon's state directory stays.

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
    """List the installed services and whether they run.

    \b
    Examples:
      holdfast service status
      holdfast service status --json
    """
    rows = []
    for path in _all(manager, system, name):
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
    """Raise an error if the command's arguments, its invite or its run.toml are invalid."""
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
        raise click.BadParameter("a service name has 1 to 64 letters, digits, - and _")
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


def _all(manager: str, system: bool, name: str) -> list[Path]:
    """Return the files of all services, or of those with a name."""
    pattern = "holdfast-*.service" if manager == "systemd" else "holdfast.*.plist"
    found = sorted(_folder(manager, system).glob(pattern))
    return [path for path in found if name in ("", _name_of(path))]


def _installed(name: str, manager: str, system: bool) -> Path:
    found = _all(manager, system, name)
    if len(found) == 1:
        return found[0]
    names = ", ".join(map(_name_of, found))
    raise UserError(
        f"several services are installed here: {names}"
        if found
        else "no such service is installed here",
        exit_code=ExitCode.USAGE,
        hint="select one with --name"
        if found
        else "`holdfast service status` lists them; a system service needs --system",
    )


def _systemctl(system: bool) -> list[str]:
    return ["systemctl"] if system else ["systemctl", "--user"]


def _starting(manager: str, system: bool, path: Path) -> list[list[str]]:
    if manager == "launchd":
        return [["launchctl", "load", "-w", str(path)]]
    base = _systemctl(system)
    return [[*base, "daemon-reload"], [*base, "enable", "--now", path.name]]


def _manage(argv: list[str], *, may_fail: bool = False) -> str:
    """Run a command of the service manager and return its output."""
    if shutil.which(argv[0]) is None:
        if may_fail:
            return ""
        raise UserError(
            f"{argv[0]} is not installed here",
            hint=f"run `{shlex.join(argv)}` on a machine with it",
        )
    from .service_units import STOP_S

    done = subprocess.run(
        argv, capture_output=True, text=True, timeout=STOP_S + MANAGER_S, check=False
    )
    if done.returncode != 0 and not may_fail:
        raise UserError(
            f"`{shlex.join(argv)}` failed: {done.stderr.strip()}",
            hint="over ssh, user services need `loginctl enable-linger` and XDG_RUNTIME_DIR",
        )
    return done.stdout.strip()
