"""Images and containers without a container engine: buildah, network namespaces and process ids.

    Builder       builds images from a Dockerfile, in a storage of its own below ``build/images``
    Network       one bridge; each container has an address on it, and a name that others look up
    Container     a working copy of an image, with a command that runs in namespaces of its own

Containers are chroots with their own processes, mounts and network. Not done here, but by an engine: limits of
memory and processor, restarts, publishing of ports on the host.
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
        # Copies of files instead of overlays: they work on every file system, and leave no mounts.
        self._buildah = ["buildah", "--storage-driver=vfs", *storage]
        os.environ["BUILDAH_ISOLATION"] = "chroot"

    def __call__(self, *arguments: str | Path) -> str:
        return told(*self._buildah, *arguments)

    def command(self, *arguments: str) -> list[str]:
        return [*self._buildah, *arguments]

    def provide_base(self, dockerfile: Path) -> None:
        """Commit the bare tree under the name of the image that the Dockerfile starts from."""
        (name,) = {each for each in STAGES.findall(dockerfile.read_text()) if ":" in each}
        container = self("from", "scratch")
        self("add", "--quiet", container, base.bare_tree(), "/")
        self("run", container, "--", "ln", "-s", "python3", "/usr/bin/python")
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


class Network:
    """A bridge in a namespace, whose other inhabitants have a namespace and an address each."""

    def __init__(self, names: Sequence[str]) -> None:
        self._prefix = f"holdfast-{os.getpid()}"
        self.addresses = {name: f"10.89.0.{2 + i}" for i, name in enumerate(names)}
        self.host = f"{self._prefix}-host"
        self._made: list[str] = []
        try:
            self._make()
        except BaseException:
            self.remove()
            raise

    def namespace(self, name: str) -> str:
        return f"{self._prefix}-{name}"

    def _make(self) -> None:
        self._add(self.host)
        told("ip", "-n", self.host, "link", "add", "bridge", "type", "bridge")
        told("ip", "-n", self.host, "addr", "add", "10.89.0.1/24", "dev", "bridge")
        told("ip", "-n", self.host, "link", "set", "bridge", "up")
        for i, (name, address) in enumerate(self.addresses.items()):
            space = self.namespace(name)
            self._add(space)
            ends = ["link", "add", "eth0", "type", "veth", "peer", "name", f"port{i}"]
            told("ip", "-n", space, *ends, "netns", self.host)
            told("ip", "-n", self.host, "link", "set", f"port{i}", "master", "bridge", "up")
            told("ip", "-n", space, "addr", "add", f"{address}/24", "dev", "eth0")
            told("ip", "-n", space, "link", "set", "eth0", "up")

    def _add(self, space: str) -> None:
        told("ip", "netns", "add", space)
        self._made.append(space)
        told("ip", "-n", space, "link", "set", "lo", "up")

    def hosts(self) -> str:
        """Return the table of names that an engine's name server would give out."""
        lines = [f"{address} {name}" for name, address in self.addresses.items()]
        return "\n".join(["127.0.0.1 localhost", *lines, ""])

    def remove(self) -> None:
        for space in self._made:
            subprocess.run(["ip", "netns", "delete", space], check=False)


class Container:
    """A working copy of an image, and the process that runs in it.

    Args:
      volumes: path inside to folder or file here, with ``:ro`` behind it where it may not be written.
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
        self._builder = builder
        self._space = space
        self._log = log
        self._mounts = [f"--volume={here}:{inside}" for inside, here in volumes.items()]
        self._mounts += [f"--mount=type=tmpfs,destination={path}" for path in tmpfs]
        self._read_only = read_only
        self.id = builder("from", "--pull=never", image)
        self.root = Path(builder("mount", self.id))
        self._process: subprocess.Popen[bytes] | None = None
        # Places to mount on are made now: what is read-only gets none later.
        told(*builder.command("run", *self._mounts, self.id, "--", "true"))

    def start(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Run a command as the image's user, in a namespace of processes that ends with its first."""
        variables = [f"--env={name}={value}" for name, value in environment.items()]
        inside = self._builder.command(
            "run", "--cap-drop=all", *self._mounts, *variables, self.id, "--", *command
        )
        if self._read_only:
            root = f"mount --bind {self.root} {self.root} && mount -o remount,bind,ro {self.root}"
            inside = ["sh", "-c", f'{root} && exec "$@"', "sh", *inside]
        alone = [
            "unshare",
            "--pid",
            "--fork",
            "--kill-child",
            "--mount-proc",
            "--propagation=private",
        ]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                ["ip", "netns", "exec", self._space, *alone, *inside],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def wait(self, seconds: float = WAIT_S) -> int:
        assert self._process is not None
        return self._process.wait(seconds)

    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def first_pid(self) -> int | None:
        """Return the process id, here, of the command; none while it is not executed yet."""
        assert self._process is not None
        found = [self._process.pid]
        for pid in found:  # grows meanwhile
            with contextlib.suppress(OSError):
                if (Path(f"/proc/{pid}/root")).readlink() == self.root:
                    return pid
                for task in Path(f"/proc/{pid}/task").iterdir():
                    found += map(int, (task / "children").read_text().split())
        return None

    def execute(self, command: Sequence[str]) -> subprocess.CompletedProcess[str]:
        """Run a command in the running container, as ``docker exec`` does."""
        pid = self.first_pid()
        if pid is None:
            return subprocess.CompletedProcess(list(command), 1, "", "it does not run")
        process = Path(f"/proc/{pid}")
        environment = [word for word in (process / "environ").read_text().split("\0") if word]
        ids = [f"--setuid={process.stat().st_uid}", f"--setgid={process.stat().st_gid}"]
        spaces = ["--mount", "--net", "--pid", "--root", "--wd"]
        return subprocess.run(
            ["nsenter", f"--target={pid}", *spaces, *ids, "env", "-i", *environment, *command],
            capture_output=True,
            text=True,
            check=False,
        )

    def stop(self) -> int:
        """Ask it to stop as an engine does, and return its exit status."""
        pid = self.first_pid()
        assert pid is not None
        os.kill(pid, signal.SIGTERM)
        return self.wait()

    def kill(self) -> None:
        """Kill all its processes at once, as a power cut does."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def log(self) -> str:
        return base.log_tail(self._log)


def until(what: str, condition: Any, logs: Any, seconds: float = 2 * WAIT_S) -> None:
    """Poll until the condition holds; the test fails, and shows logs, if it never does."""
    until_s = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until_s, f"not within {seconds:.0f} s: {what}\n{logs()}"
        time.sleep(POLL_S)
