"""The layout of files on disk, and the lookup of a running daemon.

A state directory belongs to one process (a master or a peer), which locks it. While the process
lives, ``control.json`` in it holds the address of its HTTP API and the bearer token.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shlex
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

from attrs import asdict, field, frozen

from ...protocol.durable_files import write_private
from ...protocol.errors import UserError
from .exit_codes import ExitCode

CONTROL_FILE = "control.json"
CHECKPOINTS_FOLDER = "checkpoints"  # in a peer's state directory, by default
OWN_STATE_FILE = "trainer.safetensors"  # the trainer's local state, beside the checkpoints
LOCK_FILE = "lock"
SOURCE_FILE = "run_toml.path"  # in a master's state: the run.toml that it was started with
JOURNAL_FILE = "journal.sqlite"  # in a master's state
# Instead, if the journal is in a database: which, without its password.
PLACE_FILE = "journal.place"
MASTER_FILES = (JOURNAL_FILE, PLACE_FILE)
IDENTITY_FILE = "identity.key"  # in a peer's state
MASTERS_FILE = "masters"  # in a peer's state: where the run's master may be, as it said last
# What a peer writes into its state directory.
PEER_ENTRY = re.compile(
    r"\.?(identity\.key|masters|authority\.pem|certificate\.pem|control\.json|lock)\b.*"
    r"|checkpoints|partial|site|trainer(-\d+-of-\d+)?\.safetensors(\.part)?"
)
STANDBY = "standby"  # the kind of a master that waits for another one to end
SOCKET_FOLDER = "holdfast-peer-"  # beginning of its name, below the folder for temporary files
SOCKET_PLACE_BYTES_MAX = 67  # of the latter's path: a socket's has 107 bytes at most, on macOS 103
SHORT_PLACE = "/tmp"  # instead of a longer one
FRESH_S = 60.0  # a folder of this age may not be locked yet


@frozen
class DaemonAddress:
    """The HTTP address and the token of a running daemon."""

    kind: str  # "master", "peer" or ``STANDBY``
    url: str
    token: str = field(repr=False)
    pid: int


def data_home() -> Path:
    """Return ``$HOLDFAST_HOME``, or ``holdfast`` under the XDG data directory."""
    if home := os.environ.get("HOLDFAST_HOME"):
        return Path(home)
    base = os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share"
    return Path(base) / "holdfast"


def master_state(run_name: str) -> Path:
    """Return a run's folder directly below ``runs``, whatever its name contains."""
    name = quote(run_name, safe=" ")
    return data_home() / "runs" / (name.replace(".", "%2E") if name in (".", "..") else name)


def peer_state(run_id: str, fingerprint: str) -> Path:
    """Return the folder below ``peers`` for a run of an authority.

    The maker of an invite can choose the run id of another run, but not its authority's
    fingerprint.
    """
    return data_home() / "peers" / f"{run_id[:16]}-{fingerprint[:16]}"


def make_private(directory: Path) -> Path:
    """Make a directory, and its missing parents, that only this user can enter.

    UserError is raised if other users can write into an existing one: they could plant keys.
    """
    try:
        for parent in reversed(directory.parents):  # ``parents=True`` would let others enter them
            if not parent.exists():
                parent.mkdir(mode=0o700, exist_ok=True)
        directory.mkdir(mode=0o700, exist_ok=True)
        found = directory.stat()
    except OSError as error:
        raise _unusable(directory, error) from error
    shared = directory.parent.stat().st_mode & stat.S_ISVTX  # as /tmp; elsewhere root may serve
    foreign = (os.geteuid() != 0 or shared) and found.st_uid not in (os.geteuid(), 0)
    if foreign or found.st_mode & stat.S_IWOTH:
        raise UserError(
            f"other users of this machine can write into {directory}",
            exit_code=ExitCode.CONFIG,
            hint=f"chmod 700 {directory} if it is yours, or give another folder with --state DIR",
        )
    return directory


def check_kind(directory: Path, kind: str) -> None:
    """Raise UserError if a state directory is not of this ``kind`` ("master" or "peer")."""
    foreign, other = ((IDENTITY_FILE,), "peer") if kind == "master" else (MASTER_FILES, "master")
    if any((directory / name).exists() for name in foreign):
        raise UserError(
            f"{directory} is the state of a {other}, not of a {kind}",
            exit_code=ExitCode.CONFIG,
            hint=f"give this {kind} a folder of its own with --state DIR",
        )


def check_source(state: Path, run_toml: Path) -> None:
    """Raise UserError if the run in a master's state was started with another run.toml.

    The folder follows from the run's name. A file of that name elsewhere may be another run, or the
    same one moved: only the operator knows.
    """
    try:
        known = (state / SOURCE_FILE).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return
    if known != str(run_toml.resolve()):
        raise UserError(
            f"the run in {state} was started with {known}, not with {run_toml.resolve()}",
            exit_code=ExitCode.CONFIG,
            hint=(
                "if this is another run, give it another name in its run.toml, or a folder of its"
                f" own with --state DIR; if the file was moved, go on with --state {state}"
            ),
        )


def note_source(state: Path, run_toml: Path) -> None:
    write_private(state / SOURCE_FILE, f"{run_toml.resolve()}\n".encode())


def _unusable(directory: Path, error: OSError) -> UserError:
    return UserError(
        f"cannot use {directory}: {error.strerror}",
        exit_code=ExitCode.CONFIG,
        hint="give another folder with --state DIR",
    )


@contextlib.contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Lock the state directory; raise UserError if another process holds it."""
    try:
        path = make_private(directory) / LOCK_FILE
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise _unusable(directory, error) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        running = read_control(directory / CONTROL_FILE)
        who = "process" if running is None else f"{running.kind} (process {running.pid})"
        raise UserError(
            f"{directory} is in use by another holdfast {who}",
            exit_code=ExitCode.ADDRESS,
            hint="for a second one on this machine name another folder with --state DIR; "
            "otherwise stop that process first",
        ) from None
    try:
        yield
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def socket_folder() -> Iterator[Path]:
    """Make a temporary folder with a short path for a socket; remove those of killed daemons."""
    try:
        place = tempfile.gettempdir()
        if len(os.fsencode(place)) > SOCKET_PLACE_BYTES_MAX:
            place = SHORT_PLACE
        folder = Path(tempfile.mkdtemp(prefix=SOCKET_FOLDER, dir=place))
    except OSError as error:
        raise UserError(
            f"no folder for temporary files: {error.strerror}",
            exit_code=ExitCode.CONFIG,
            hint=f"make {SHORT_PLACE} writable, or name another folder with a short path in TMPDIR",
        ) from error
    for old in folder.parent.glob(f"{SOCKET_FOLDER}*"):
        with contextlib.suppress(OSError, UserError):
            found = old.lstat()
            own = found.st_uid == os.geteuid() and stat.S_ISDIR(found.st_mode)
            if own and time.time() - found.st_mtime > FRESH_S:
                with locked(old):
                    shutil.rmtree(old, ignore_errors=True)
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
    """Return the daemon that a command means: in ``state``, or the only one; or raise UserError."""
    if state is not None:
        folders = [state]
    else:
        home = data_home()
        folders = sorted([*home.glob("runs/*"), *home.glob("peers/*")])
    found, standbys = [], []
    for folder in folders:
        control = read_control(folder / CONTROL_FILE)
        if control is not None and (kind is None or control.kind == kind):
            found.append((folder, control))
        elif control is not None and control.kind == STANDBY:
            standbys.append(folder)
    if not found and standbys and kind == "master":
        raise UserError(
            f"the master in {standbys[0]} waits while another one leads the run",
            exit_code=ExitCode.UNREACHABLE,
            hint="`holdfast status` here says which; give the command on its machine",
        )
    if not found and state is not None:
        raise _none_in(state, kind)
    if not found:
        what = {"master": "master", "peer": "peer daemon", None: "holdfast daemon"}[kind]
        raise UserError(
            f"no {what} runs here",
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


def _none_in(state: Path, kind: str | None) -> UserError:
    """Return the error of a command that finds no daemon of its kind in a state directory."""
    files = {"master": MASTER_FILES, "peer": (IDENTITY_FILE,)}
    here = next(
        (each for each, names in files.items() if any((state / name).exists() for name in names)),
        None,
    )
    if here is None:
        text = f"{state} is not the state of a master or a peer"
        hint = "the start of a daemon prints its folder"
        return UserError(text, exit_code=ExitCode.UNREACHABLE, hint=hint)
    if kind is not None and here != kind:
        text = f"{state} is the state of a {here}, and this command is for a {kind}"
        return UserError(text, exit_code=ExitCode.USAGE, hint=f"give the folder of a {kind}")
    starts = {"master": f"holdfast master --state {state}", "peer": "its `holdfast join` command"}
    return UserError(
        f"the {here} in {state} is not running",
        exit_code=ExitCode.UNREACHABLE,
        hint=f"start it: {starts[here]}",
    )


def join_line(invite: str, script: Path, state: Path | None = None) -> str:
    """Return the shell command with which a machine joins; ``state`` is a second peer's here."""
    own = () if state is None else ("--name", state.name, "--state", str(state))
    return f"holdfast join {invite} {shlex.join([*own, '--', 'python', str(script)])}"


def find_state() -> Path:
    """Return the state directory of the only run of a master here, or raise UserError."""
    found = sorted(path.parent for path in data_home().glob(f"runs/*/{JOURNAL_FILE}"))
    if len(found) != 1:
        names = ", ".join(str(folder) for folder in found)
        raise UserError(
            f"several runs are stored here: {names}" if found else "no run is stored here",
            exit_code=ExitCode.USAGE,
            hint="choose one with --state DIR"
            if found
            else "name its folder with --state DIR: the master's start prints it",
        )
    return found[0]


def read_control(path: Path) -> DaemonAddress | None:
    try:
        control = DaemonAddress(**json.loads(path.read_text()))
        os.kill(control.pid, 0)
    except (OSError, ValueError, TypeError):
        return None
    return control
