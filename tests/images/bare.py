"""``make`` on a bare machine: Debian with Python, make and git, and a clone of this tree in another
folder.

    python -m tests.images.bare                             make demo, as root
    python -m tests.images.bare --user person -- test ARGS=tests/protocol/test_invite.py

The machine is a chroot with its own mounts and processes. It sees the package clients' settings of
this one (see ``base``), and its network. What was printed stays in ``build/images``, each line with
the seconds since the start.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.images import base

FOLDER = "any-name-will-do"  # the clone, in the user's home
SYSTEM_FILES = ("/etc/resolv.conf", "/etc/hosts")


class Machine:
    """A copy of the bare tree to which make and git were added, for one user's commands.

    Args:
      user: ``root`` or the name of an ordinary user, who is made.
    """

    def __init__(self, folder: Path, user: str) -> None:
        self.root = folder
        self.user = user
        self._mounts = [f"mount --bind {folder} {folder}"]
        self._mounts += [f"mount --rbind /{name} {folder}/{name}" for name in ("dev", "sys")]
        self._mounts += [f"mount -t proc proc {folder}/proc", f"mount -t tmpfs tmpfs {folder}/tmp"]
        system = {Path(path): Path(path) for path in SYSTEM_FILES}
        for inside, here in {**base.mounts(), **system}.items():
            if inside not in base.APT_FOLDERS:
                self._mounts += base.bind(folder, str(inside), here, read_only=True)

    @classmethod
    def make(cls, folder: Path, user: str) -> Machine:
        """Make a machine with a clone of this tree, what is committed, in the user's home."""
        shutil.rmtree(folder, ignore_errors=True)
        subprocess.run(["cp", "-a", base.bare_tree(), folder], check=True)
        made = cls(folder, user)
        for apt in base.apt_folders():  # copies, for some packages add settings of their own
            shutil.copytree(apt, folder / apt.relative_to("/"), symlinks=True, dirs_exist_ok=True)
        made.run_as_root("apt-get update -q")
        made.run_as_root("apt-get install -q -y --no-install-recommends git make")
        if user != "root":
            made.run_as_root(f"useradd --create-home --shell /bin/bash {user}")
        clone = [
            "git",
            "clone",
            "-q",
            "--no-hardlinks",
            f"{base.ROOT}",
            f"{folder}{made.home}/{FOLDER}",
        ]
        subprocess.run(clone, check=True)
        made.run_as_root(f"chown -R {user}: {made.home}/{FOLDER}")
        return made

    @property
    def home(self) -> str:
        return "/root" if self.user == "root" else f"/home/{self.user}"

    def run_as_root(self, command: str) -> None:
        done = subprocess.run(
            self._inside("root", "/root", command),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"{command}:\n{done.stdout}"

    def make_target(self, arguments: Sequence[str], say: Callable[[str], None]) -> int:
        """Run make as the user, tell every line that it prints, and return its exit status."""
        words = " ".join(f"'{word}'" for word in arguments)
        command = self._inside(self.user, self.home, f"cd {FOLDER} && exec make {words}")
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        assert process.stdout is not None
        try:
            for line in process.stdout:
                say(line.decode(errors="replace").rstrip())
            return process.wait()
        finally:
            base.end_namespace(process)

    def _inside(self, user: str, home: str, command: str) -> list[str]:
        """Return a command that runs a shell's command as a user, in namespaces that end with
        it.
        """
        become = "exec bash -c" if user == "root" else f"exec setpriv {_rights(user)} bash -c"
        variables = f"HOME={home} USER={user} LANG=C.UTF-8 PATH={_path(user)}"
        script = (
            f"set -e; {'; '.join(self._mounts)}; "
            f"exec chroot {self.root} env -i {variables} "
            f'bash -c \'cd && {become} "$1"\' bash "$1"'
        )
        alone = ["unshare", "--mount", "--pid", "--fork", "--kill-child"]
        return [*alone, "bash", "-c", script, "bash", command]


def _rights(user: str) -> str:
    return f"--reuid={user} --regid={user} --init-groups --inh-caps=-all"


def _path(user: str) -> str:
    ordinary = "/usr/local/bin:/usr/bin:/bin"
    return f"/usr/local/sbin:/usr/sbin:/sbin:{ordinary}" if user == "root" else ordinary


def run(user: str, arguments: Sequence[str]) -> tuple[int, Path]:
    """Run make on a fresh bare machine, and return its exit status and the transcript."""
    folder = base.BUILD / f"bare-{user}"
    transcript = base.BUILD / f"bare-{user}-{arguments[0]}.log"
    machine = Machine.make(folder, user)
    began_s = time.monotonic()
    with transcript.open("w") as file:

        def say(line: str) -> None:
            stamped = f"{time.monotonic() - began_s:7.1f}  {line}"
            print(stamped, flush=True)
            print(stamped, file=file, flush=True)

        say(f"make {' '.join(arguments)}, as {user}")
        status = machine.make_target(arguments, say)
        say(f"exit status {status}")
    shutil.rmtree(folder)
    return status, transcript


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--user", default="root")
    parser.add_argument("make", nargs="*", default=["demo"], help="make's arguments")
    arguments = parser.parse_args()
    if why := base.why_not():
        print(why, file=sys.stderr)
        return 1
    status, transcript = run(arguments.user, arguments.make)
    print(f"transcript: {transcript}")
    return status


if __name__ == "__main__":
    raise SystemExit(main())
