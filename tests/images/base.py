"""A bare Debian of debootstrap, and this machine's settings of package clients for what runs in it.

Both are found out, not written down here: pip's settings are those that ``pip config list`` tells,
apt's are the folders of this machine. A container or a chroot sees them read-only, at the same
paths.
"""

from __future__ import annotations

import ast
import contextlib
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "images"
SUITE = "bookworm"  # that of the Dockerfile's base image
DEFAULT_MIRROR = "http://deb.debian.org/debian"
PACKAGES = ("python3", "python3-venv", "ca-certificates")
CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")
APT_FOLDERS = (Path("/etc/apt"), Path("/usr/share/keyrings"))


def why_not() -> str:
    """Return why this machine can neither build nor run images, or nothing."""
    if os.geteuid() != 0:
        return "it needs root: chroots, mounts and network namespaces"
    missing = [name for name in ("buildah", "debootstrap", "ip") if shutil.which(name) is None]
    return f"{', '.join(missing)} missing: tools/install-packages images" if missing else ""


def bare_tree() -> Path:
    """Return the folder of a minimal Debian with Python and nothing else; made once, then kept."""
    tree = BUILD / "base"
    if tree.exists():
        return tree
    BUILD.mkdir(parents=True, exist_ok=True)
    unfinished = tree.with_suffix(".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    include = f"--include={','.join(PACKAGES)}"
    command = ["debootstrap", "--variant=minbase", include, SUITE, str(unfinished), mirror()]
    with (BUILD / "debootstrap.log").open("wb") as log:
        done = subprocess.run(command, stdout=log, stderr=log, check=False)
    assert done.returncode == 0, log_tail(BUILD / "debootstrap.log")
    for package in (unfinished / "var/cache/apt/archives").glob("*.deb"):
        package.unlink()
    unfinished.rename(tree)
    return tree


def mirror() -> str:
    """Return the mirror that this machine's apt has the suite from, or Debian's own."""
    told = [
        "apt-get",
        "indextargets",
        "--format",
        "$(CODENAME) $(REPO_URI)",
        "Created-By: Packages",
    ]
    done = subprocess.run(told, capture_output=True, text=True, check=False)
    found = (line.split() for line in done.stdout.splitlines())
    return next((words[1] for words in found if words[0] == SUITE), DEFAULT_MIRROR)


def pip_settings() -> dict[str, str]:
    """Return the settings of this machine's pip, ``section.key`` to value.

    Variables of the environment, which pip tells as the section ``:env:``, count more than files.
    """
    command = [sys.executable, "-m", "pip", "config", "list"]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    pairs = [line.partition("=") for line in told.splitlines() if "=" in line]
    settings = {name: str(ast.literal_eval(value)) for name, _, value in pairs}
    from_environment = {
        f"global.{name.removeprefix(':env:.')}": settings.pop(name)
        for name in list(settings)
        if name.startswith(":env:.")
    }
    return {**settings, **from_environment}


def mounts() -> dict[Path, Path]:
    """Return what pip and apt need to work as they do here: path inside to path here."""
    settings = pip_settings()
    seen = {CERTIFICATES: CERTIFICATES, Path("/etc/pip.conf"): _pip_file(settings)}
    for word in (word for value in settings.values() for word in value.split()):
        path = Path(word.removeprefix("file://"))
        if path.is_absolute() and path.exists():
            # An index may link to files that lie beside it.
            whole = path.parent if word.startswith("file://") else path
            seen[whole] = whole
    return seen | {folder: folder for folder in apt_folders()}


def apt_folders() -> list[Path]:
    """Return the folders of this machine's apt, if they are of use there."""
    ours = f"VERSION_CODENAME={SUITE}" in Path("/etc/os-release").read_text().splitlines()
    return [path for path in APT_FOLDERS if path.exists() and (ours or mirror() != DEFAULT_MIRROR)]


def _pip_file(settings: dict[str, str]) -> Path:
    sections: dict[str, list[str]] = {}
    for name, value in settings.items():
        section, _, key = name.partition(".")
        lines = "\n    ".join(value.split("\n"))
        sections.setdefault(section, []).append(f"{key} = {lines}")
    path = BUILD / "pip.conf"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        "".join(f"[{name}]\n" + "\n".join(body) + "\n" for name, body in sections.items())
    )
    return path


def bind(root: Path, inside: str, here: Path, *, read_only: bool) -> list[str]:
    """Return the commands that show a file or folder of this machine in a tree; make the place for
    it.
    """
    place = root / inside.removeprefix("/")
    if here.is_dir():
        place.mkdir(parents=True, exist_ok=True)
    else:
        place.parent.mkdir(parents=True, exist_ok=True)
        place.touch()
    commands = [f"mount --bind {here} {place}"]
    return [*commands, f"mount -o remount,bind,ro {place}"] if read_only else commands


def children(process: subprocess.Popen[bytes]) -> list[int]:
    """Return the process ids of its children; of ``unshare`` the first process of the new
    namespace.
    """
    with contextlib.suppress(OSError):
        path = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        return [int(word) for word in path.read_text().split()]
    return []


def end_namespace(unshare: subprocess.Popen[bytes]) -> None:
    """Kill all processes of the namespace that ``unshare`` has made: its first one takes the others
    with it.

    The death of ``unshare`` alone ends no process that has become another user since.
    """
    for pid in children(unshare):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    unshare.kill()
    unshare.wait()


def log_tail(path: Path, characters: int = 4_000) -> str:
    """Return the end of a log file."""
    return path.read_text(errors="replace")[-characters:]
