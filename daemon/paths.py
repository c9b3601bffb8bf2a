"""The layout of files on disk, and the lookup of a running daemon.

A state directory belongs to one process (a master or a peer), which locks it. While the process
lives, ``control.json`` in it holds the address of its HTTP API and the bearer token.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

from attrs import asdict, field, frozen

from ..protocol.durable_files import write_private
from ..protocol.errors import UserError
from .exit_codes import ExitCode

CONTROL_FILE = "control.json"
CHECKPOINTS_FOLDER = "checkpoints"  # in a peer's state directory, by default
OWN_STATE_FILE = "trainer.safetensors"  # the trainer's local state, beside the checkpoints
LOCK_FILE = "lock"
SOCKET_FOLDER = "holdfast-peer-"  # beginning of its name, below the folder for temporary files
FRESH_S = 60.0  # a folder of this age may not be locked yet


@frozen
class DaemonAddress:
    """The HTTP address and the token of a running daemon."""

    kind: str  # "master" or "peer"
    url: str
    token: str = field(repr=False)
    pid: int


def data_home() -> Path:
    """Return ``$HOLDFAST_HOME``, or ``holdfast`` under the XDG data directory."""
    if "HOLDFAST_HOME" in os.environ:
        return Path(os.environ["HOLDFAST_HOME"])
    base = os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share"
    return Path(base) / "holdfast"


def master_state(run_name: str) -> Path:
    """Return a run's folder directly below ``runs``, whatever its name contains."""
    name = quote(run_name, safe=" ")
    return data_home() / "runs" / (name.replace(".", "%2E") if name in (".", "..") else name)


def peer_state(run_id: str, fingerprint: str) -> Path:
    """Return the folder below ``peers`` for a run of an authority.

    The maker of an invite can choose the run id of another run, but not its authority's fingerprint.
    """
    return data_home() / "peers" / f"{run_id[:16]}-{fingerprint[:16]}"


def make_private(directory: Path) -> Path:
    """Make a directory that only this user can enter, or check an existing one.

    Raises:
      UserError: it cannot be made, or other users can write into it. They could plant keys and
        records there.
    """
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = directory.stat()
    except OSError as error:
        raise _unusable(directory, error) from error
    foreign = os.geteuid() != 0 and found.st_uid not in (os.geteuid(), 0)
    if foreign or found.st_mode & stat.S_IWOTH:
        raise UserError(
            f"other users of this machine can write into {directory}",
            exit_code=ExitCode.CONFIG,
            hint=f"chmod 700 {directory} if it is yours, or give another folder with --state DIR",
        )
    return directory


def _unusable(directory: Path, error: OSError) -> UserError:
    return UserError(
        f"cannot use {directory}: {error.strerror}",
        exit_code=ExitCode.CONFIG,
        hint="give another folder with --state DIR",
    )


@contextlib.contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Lock the state directory: two processes with one identity would disturb each other.

    Raises:
      UserError: another process holds it.
    """
    try:
        descriptor = os.open(make_private(directory) / LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise _unusable(directory, error) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise UserError(
            f"{directory} is in use by another holdfast process",
            exit_code=ExitCode.ADDRESS,
            hint="stop that process first, or give this one its own --state DIR",
        ) from None
    try:
        yield
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def socket_folder() -> Iterator[Path]:
    """Make a temporary folder, because a socket's path must be short; remove those of killed daemons."""
    for old in Path(tempfile.gettempdir()).glob(f"{SOCKET_FOLDER}*"):
        with contextlib.suppress(OSError, UserError):
            if not old.is_symlink() and time.time() - old.stat().st_mtime > FRESH_S:
                with locked(old):
                    shutil.rmtree(old, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(prefix=SOCKET_FOLDER))
    try:
        with locked(folder):
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def published(directory: Path, control: DaemonAddress) -> Iterator[None]:
    """Publish this daemon's address for commands while it lives."""
    path = directory / CONTROL_FILE
    write_private(path, json.dumps(asdict(control)).encode())
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


def find_control(state: Path | None, kind: str | None) -> DaemonAddress:
    """Return the daemon that a command means: the one in ``state``, or the only running one.

    Raises:
      UserError: none runs, or several run and ``state`` is not given.
    """
    if state is not None:
        folders = [state]
    else:
        home = data_home()
        folders = sorted([*home.glob("runs/*"), *home.glob("peers/*")])
    found = []
    for folder in folders:
        control = read_control(folder / CONTROL_FILE)
        if control is not None and (kind is None or control.kind == kind):
            found.append((folder, control))
    if not found:
        what = {"master": "master", "peer": "peer daemon", None: "holdfast daemon"}[kind]
        raise UserError(
            f"no {what} runs here" + (f" in {state}" if state else ""),
            exit_code=ExitCode.UNREACHABLE,
            hint="name its folder with --state DIR (its start prints it), or start it",
        )
    masters = [pair for pair in found if pair[1].kind == "master"]
    if len(found) > 1 and len(masters) != 1:
        names = ", ".join(str(folder) for folder, _ in found)
        raise UserError(
            f"several daemons run here: {names}",
            exit_code=ExitCode.USAGE,
            hint="choose one with --state DIR",
        )
    return (masters or found)[0][1]


def find_state() -> Path:
    """Return the state directory of the only run of a master on this machine, running or not.

    Raises:
      UserError: there is none, or there are several.
    """
    found = sorted(path.parent for path in data_home().glob("runs/*/journal.sqlite"))
    if len(found) != 1:
        names = ", ".join(str(folder) for folder in found)
        raise UserError(
            f"several runs are stored here: {names}" if found else "no run is stored here",
            exit_code=ExitCode.USAGE,
            hint="choose one with --state DIR",
        )
    return found[0]


def read_control(path: Path) -> DaemonAddress | None:
    """Return the daemon of a control file, or None if it does not run."""
    try:
        control = DaemonAddress(**json.loads(path.read_text()))
        os.kill(control.pid, 0)
    except (OSError, ValueError, TypeError):
        return None
    return control
