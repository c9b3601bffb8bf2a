"""Images and containers without a container engine: buildah, network namespaces and process ids.

    Builder       builds images from a Dockerfile, in a storage of its own below ``build/images``
    Network       one switch; each container has an address on it, and a name that others look up
    Container     a working copy of an image, with a command that runs in namespaces of its own

Containers are chroots with their own processes, mounts and network. Not done here, but by an
engine: limits of memory and processor, restarts, publishing of ports on the host.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.grounds import Switch
from tests.images import base

STAGES = re.compile(r"^FROM (\S+) AS", re.M)
WAIT_S = 60.0
POLL_S = 0.2
Config = dict[str, Any]


def told(*command: str | Path) -> str:
    """Run a command, and return what it prints; a failure shows its errors."""
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    assert done.returncode == 0, f"{command}:\n{done.stdout[-4_000:]}\n{done.stderr[-4_000:]}"
    return done.stdout.strip()


class Builder:
    """Images in a storage of their own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        storage = [f"--root={folder / 'storage'}", f"--runroot={folder / 'runroot'}"]
        self._buildah = ["buildah", *storage]
        os.environ["BUILDAH_ISOLATION"] = "chroot"

    def __call__(self, *arguments: str | Path) -> str:
        return told(*self._buildah, *arguments)

    def command(self, *arguments: str) -> list[str]:
        return [*self._buildah, *arguments]

    def provide_base(self, dockerfile: Path) -> None:
        """Commit the bare tree under the name of the image that the Dockerfile starts from.

        Like that one it has a ``python``, and no compiled files of the library.
        """
        (name,) = {each for each in STAGES.findall(dockerfile.read_text()) if ":" in each}
        container = self("from", "scratch")
        self("add", "--quiet", container, base.bare_tree(), "/")
        root = Path(self("mount", container))
        (root / "usr/bin/python").symlink_to("python3")
        for folder in root.glob("usr/lib/python3*/**/__pycache__"):
            shutil.rmtree(folder)
        self("umount", container)
        self("commit", "--quiet", "--rm", container, f"docker.io/library/{name}")

    def build(self, dockerfile: Path, context: Path, target: str, tag: str) -> None:
        volumes = [f"-v={here}:{inside}:ro" for inside, here in base.mounts().items()]
        index = base.pip_settings().get("global.extra-index-url", "")
        words = [*volumes, f"--build-arg=TORCH_INDEX={' '.join(index.split())}"]
        words += [f"--target={target}", f"--tag={tag}", f"--file={dockerfile}", str(context)]
        command = self.command("bud", "--pull=never", "--format=docker", *words)
        with (self.folder / f"{target}.log").open("wb") as log:
            done = subprocess.run(command, stdout=log, stderr=log, check=False)
        assert done.returncode == 0, base.log_tail(self.folder / f"{target}.log")

    def config(self, tag: str) -> Config:
        """Return an image's configuration as an engine reads it."""
        inspected: Config = json.loads(self("inspect", "--type=image", tag))["Docker"]["config"]
        return inspected

    def drop(self) -> None:
        """Remove all containers and images, and the storage."""
        self("rm", "--all")
        shutil.rmtree(self.folder / "storage")


class Network(Switch):
    """A host of a switch for each name, and one more, ``outside``, for whoever is in no
    container.
    """

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__(len(names) + 1)
        self._numbers = {name: number for number, name in enumerate(names)}
        self.addresses = {name: self.address(number) for name, number in self._numbers.items()}

    def namespace(self, name: str) -> str:
        return self.host(self._numbers[name])

    @property
    def outside(self) -> str:
        return self.host(len(self._numbers))

    def table(self) -> str:
        """Return the table of names that an engine's name server would give out."""
        lines = [f"{address} {name}" for name, address in self.addresses.items()]
        return "\n".join(["127.0.0.1 localhost", *lines, ""])


class Container:
    """A working copy of an image, and the process that runs in it: the first of its namespace, as
    in an engine.

    Args:
      volumes: path inside to folder or file here, with ``:ro`` behind it where it may not be
        written.
    """

    def __init__(
        self,
        builder: Builder,
        image: str,
        space: str,
        log: Path,
        volumes: Mapping[str, str],
        tmpfs: Sequence[str] = (),
        read_only: bool = False,
    ) -> None:
        self._space = space
        self._log = log
        self._config = builder.config(image)
        self.root = Path(builder("mount", builder("from", "--pull=never", image)))
        self._mounts = [f"mount --bind {self.root} {self.root}"]
        for inside, here in volumes.items():
            path, _, option = inside.partition(":")
            self._mounts += base.bind(self.root, path, Path(here), read_only=option == "ro")
        for path in tmpfs:
            self._mounts.append(f"mount -t tmpfs tmpfs {self.root}{path}")
        if read_only:
            self._mounts.append(f"mount -o remount,bind,ro {self.root}")
        self._mounts += [
            f"mount -t proc proc {self.root}/proc",
            f"mount --rbind /dev {self.root}/dev",
            f"mount --rbind -o ro /sys {self.root}/sys",
        ]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Run a command as the image's user, without capabilities and ways to get them."""
        user = self._config["User"]
        variables = [
            *self._config["Env"],
            *(f"{name}={each}" for name, each in environment.items()),
        ]
        alone = ["unshare", "--mount", "--pid", "--uts", "--ipc", "--fork", "--kill-child"]
        rights = ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups"]
        rights += ["--bounding-set=-all", "--inh-caps=-all", "--no-new-privs"]
        inside = [
            *rights,
            "env",
            "-i",
            f"--chdir={self._config['WorkingDir']}",
            *variables,
            *command,
        ]
        script = f'set -e; {"; ".join(self._mounts)}; exec chroot {self.root} "$@"'
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                ["ip", "netns", "exec", self._space, *alone, "sh", "-c", script, "sh", *inside],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def wait(self, seconds: float = WAIT_S) -> int:
        """Wait for its end, and return its exit status."""
        assert self._process is not None
        return self._process.wait(seconds)

    def pid(self) -> int | None:
        """Return its process id as seen here; none before the command is executed, and after its
        end.
        """
        assert self._process is not None
        with contextlib.suppress(OSError):
            for pid in base.children(self._process):
                if Path(f"/proc/{pid}").stat().st_uid != 0:
                    return pid
        return None

    def execute(self, command: Sequence[str]) -> subprocess.CompletedProcess[str]:
        """Run a command in the running container, as ``docker exec`` does."""
        pid = self.pid()
        if pid is None:
            return subprocess.CompletedProcess(list(command), 1, "", "it does not run")
        environment = Path(f"/proc/{pid}/environ").read_text().split("\0")
        variables = [word for word in environment if word]
        user = self._config["User"]
        spaces = ["--mount", "--net", "--pid", "--uts", "--ipc", "--root", "--wd"]
        enter = ["nsenter", f"--target={pid}", *spaces, f"--setuid={user}", f"--setgid={user}"]
        inside = [*enter, "env", "-i", *variables, *command]
        return subprocess.run(inside, capture_output=True, text=True, check=False)

    def stop(self) -> int:
        """Ask it to stop as an engine does, and return its exit status."""
        pid = self.pid()
        assert pid is not None
        os.kill(pid, signal.SIGTERM)
        return self.wait()

    def kill(self) -> None:
        """Kill all its processes at once, as a power cut does: its first one takes the others with
        it.
        """
        if self._process is not None:
            base.end_namespace(self._process)

    def log(self) -> str:
        return base.log_tail(self._log)


def until(what: str, condition: Any, logs: Any, seconds: float = 2 * WAIT_S) -> None:
    """Poll until the condition holds; the test fails, and shows logs, if it never does."""
    until_s = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until_s, f"not within {seconds:.0f} s: {what}\n{logs()}"
        time.sleep(POLL_S)
