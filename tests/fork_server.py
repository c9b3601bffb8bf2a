"""Processes of tests as forks of a server that has imported what they need, instead of new
interpreters.

A daemon needs three quarters of a second of a core until it serves, a trainer with torch two, most
of it for imports. ``enable`` replaces ``subprocess.Popen`` of the tests: a command that a server
can be is forked, and every other one is started as ever.

    tests ----- socket ---> server "rooms"   holdfast's modules      one thread, waits for requests
       '------- socket ---> server "torch"   and torch
    request: arguments, environment, folder, three files

    server --fork--> middle --fork--> process        the middle ends at once, so the process becomes
                                                     a child of the nearest subreaper: the asker

So the asker has a process id, signals, an exit status and processor times, as of any child.
``holdfast join`` is a subreaper, too, and has a server of its own, a fork of itself before its
first thread: its trainer is its child, in a session of its own.

What differs from a new interpreter: the forks of a server share one seed of hashes, and
``/proc/PID/cmdline`` and ``environ`` are the server's. A test of such things is marked
``new_interpreter``.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import pkgutil
import runpy
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

from attrs import define, field

ROOT = Path(__file__).resolve().parents[1]
HERE = Path(__file__).resolve()
TRAINER_WITHOUT_TORCH = ROOT / "tests" / "processes" / "tiny_trainer.py"
REQUEST_BYTES_MAX = 2**17  # arguments and environment; a socket takes about 200 KiB at once
ROOMS = ("protocol", "membership", "collectives", "checkpoint", "diloco", "daemon")
# What is read before a script's first line, so that a fork comes too late for another value.
EARLY_VARIABLES = ("ATEN_", "KMP_", "LD_", "MALLOC_", "MKL_", "NPY_", "OMP_", "OPENBLAS_", "PYTHON")
UNBUFFERED = "PYTHONUNBUFFERED"  # is handled in the fork
PR_SET_CHILD_SUBREAPER = 36
RUNPY = "<frozen runpy>"
FILES_MAX = 1_024  # that a server may have open
SERVER_VARIABLES = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}  # a fork needs a single thread

NewPopen = subprocess.Popen  # starts a new interpreter


@define(frozen=True)
class Kind:
    """What a server has imported."""

    name: str
    modules: tuple[str, ...] = ()


# The client's own modules import torch, but for those that the trainer without torch takes.
CLIENT = ("attach_errors", "boundary", "daemon_connection")
WITHOUT_TORCH = Kind("rooms", tuple(f"holdfast.client.{name}" for name in CLIENT))
WITH_TORCH = Kind(
    "torch",
    (
        *WITHOUT_TORCH.modules,
        "holdfast.client.attach",
        "safetensors.torch",
        "torch._dynamo",  # torch's optimizers import it late
        "torch.distributed.fsdp",
        "torch.distributed.tensor.parallel",
        "torch.utils.data",
    ),
)
KINDS = {kind.name: kind for kind in (WITHOUT_TORCH, WITH_TORCH)}


# ---------------------------------------------------------------- the server


def import_all(kind: Kind) -> None:
    """Import what forks of this kind need, and exempt it from their garbage collection."""
    for room in ROOMS:
        package = importlib.import_module(f"holdfast.{room}")
        for found in pkgutil.walk_packages(package.__path__, f"holdfast.{room}."):
            importlib.import_module(found.name)
    for name in kind.modules:
        importlib.import_module(name)
    threads = len(os.listdir("/proc/self/task"))
    if threads > 1:
        raise RuntimeError(f"{threads} threads after the imports: a fork would have one of them")
    gc.collect()
    gc.freeze()


def serve(channel: socket.socket) -> Callable[[], object]:
    """Fork at each request, until the asker is gone.

    Returns:
      In a fork, what it has to run; never in the server.
    """
    while True:
        message, files, _flags, _address = socket.recv_fds(channel, REQUEST_BYTES_MAX, 3)
        if not message:
            os._exit(0)
        read_end, write_end = os.pipe()
        middle = os.fork()
        if middle == 0:
            if os.fork():
                os._exit(0)
            request = json.loads(message)
            if request["session"]:
                os.setsid()
            os.write(write_end, b"%d" % os.getpid())
            for number, file in enumerate(files):
                os.dup2(file, number)
            channel.detach()
            os.closerange(3, FILES_MAX)
            return become(request)
        os.close(write_end)
        for file in files:
            os.close(file)
        os.waitpid(middle, 0)  # from now on the process is the asker's child
        pid = os.read(read_end, 16)
        os.close(read_end)
        channel.send(pid)


def become(request: Mapping[str, Any]) -> Callable[[], object]:
    """Turn this fork into a process with these arguments, and return what it has to run."""
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _open_streams(unbuffered=bool(os.environ.get(UNBUFFERED)))
    arguments: list[str] = request["arguments"]
    if arguments[:2] == ["-m", "holdfast"]:
        sys.argv = [str(ROOT / "__main__.py"), *arguments[2:]]
        sys.path[0] = os.getcwd()
        if "join" in arguments:
            serve_trainers()
        run: Callable[[], object] = importlib.import_module("holdfast.__main__").main
        return run
    script = arguments[0]
    sys.argv = arguments
    sys.path[0] = str(Path(script).parent.absolute())
    return lambda: run_script(script)


def run_script(path: str) -> None:
    """Run a script; its errors are shown as an interpreter shows them, without the lines of this
    file.
    """
    try:
        runpy.run_path(path, run_name="__main__")
    except Exception as error:  # noqa: BLE001
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename in (__file__, RUNPY):
            trace = trace.tb_next
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        sys.exit(1)


def _open_streams(*, unbuffered: bool) -> None:
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        line_by_line = name == "stderr" or os.isatty(number)
        stream = open(  # noqa: SIM115
            number,
            "r" if name == "stdin" else "w",
            buffering=1 if line_by_line else -1,
            encoding="utf-8",
            errors="backslashreplace" if name == "stderr" else "surrogateescape",
            closefd=False,
        )
        if unbuffered and name != "stdin":
            stream.reconfigure(write_through=True)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def serve_trainers() -> None:
    """Fork a server for the trainers of this daemon, which has no thread yet."""
    become_subreaper()
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork() == 0:
        ours.close()
        os.setsid()
        serve(its)()
        sys.exit()  # a trainer's script has come to its end
    its.close()
    loaded = WITH_TORCH if "torch" in sys.modules else WITHOUT_TORCH
    ForkedPopen.servers = {loaded.name: Server(ours)}
    ForkedPopen.may_start = False
    subprocess.Popen = ForkedPopen  # type: ignore[misc]


def become_subreaper() -> None:
    """Have orphaned descendants become children of this process (prctl(2), Linux)."""
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")


# ---------------------------------------------------------------- the asker


@define(eq=False)
class Server:
    """The asker's end of a server."""

    _channel: socket.socket
    _lock: threading.Lock = field(factory=threading.Lock)

    @classmethod
    def start(cls, kind: Kind) -> Server:
        ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with its:
            NewPopen(
                [sys.executable, str(HERE), kind.name, str(its.fileno())],
                stdin=subprocess.DEVNULL,
                env={**os.environ, **SERVER_VARIABLES},
                pass_fds=[its.fileno()],
                start_new_session=True,
            ).returncode = 0  # it ends with this process, which does not wait for it
        return cls(ours)

    def fork(
        self,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        folder: str,
        files: Sequence[int],
        *,
        session: bool,
    ) -> int:
        """Return the id of a process with these arguments, a child of this one."""
        request = {
            "arguments": list(arguments),
            "environment": dict(environment),
            "folder": folder,
            "session": session,
        }
        with self._lock:
            socket.send_fds(self._channel, [json.dumps(request).encode()], list(files))
            return int(self._channel.recv(16))


class ForkedPopen(subprocess.Popen[Any]):
    """``subprocess.Popen`` that forks what a server can be, and starts everything else.

    It replaces ``_execute_child``, which the standard library does not document: the one place
    between the pipes that are made and the process that is waited for.

    Attributes:
      servers: by kind.
      may_start: a server that is missing is started.
      forks: number of processes that were not started.
    """

    servers: ClassVar[dict[str, Server]] = {}
    may_start: ClassVar[bool] = True
    enabled: ClassVar[bool] = True
    forks: ClassVar[int] = 0
    owned: ClassVar[set[int]] = set()  # processes that somebody waits for

    def _execute_child(self, args: Any, executable: Any, preexec_fn: Any, close_fds: Any,
                       pass_fds: Any, cwd: Any, env: Any, *more: Any) -> None:  # fmt: skip
        _startupinfo, _flags, shell, *pipes = more[:9]
        _restore_signals, gid, gids, uid, umask, session, group = more[9:]
        plain = not (shell or executable or preexec_fn or pass_fds) and (
            (gid, gids, uid, umask, group) == (None, None, None, -1, -1)
        )
        environment = dict(os.environ if env is None else env)
        server = self._server(args, environment, cwd) if plain else None
        if server is None:
            super()._execute_child(  # type: ignore[misc]
                args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *more
            )
            self.owned.add(self.pid)
            return
        p2cread, _, _, c2pwrite, _, errwrite = pipes
        files = [
            given if given >= 0 else n for n, given in enumerate((p2cread, c2pwrite, errwrite))
        ]
        folder = os.path.abspath(os.fspath(cwd or "."))
        words = [os.fspath(each) for each in args[1:]]
        self.pid = server.fork(words, environment, folder, files, session=bool(session))
        self.owned.add(self.pid)
        ForkedPopen.forks += 1
        self._child_created = True
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]

    def _server(self, args: Any, environment: Mapping[str, str], folder: Any) -> Server | None:
        if not self.enabled or isinstance(args, (str, bytes)):
            return None
        words = [os.fspath(each) for each in args]
        if words[0] != sys.executable or early(environment) != EARLY:
            return None
        if _network() != _network("self"):  # this thread has moved into a namespace
            return None
        kind = kind_of(words[1:], Path(folder or "."))
        if kind is None:
            return None
        if kind.name not in self.servers and self.may_start:
            self.servers[kind.name] = Server.start(kind)
        return self.servers.get(kind.name)


def kind_of(words: Sequence[str], folder: Path) -> Kind | None:
    """Return the kind of server that can be ``python WORDS``, or None."""
    if list(words[:2]) == ["-m", "holdfast"]:
        if "--" not in words:
            return WITHOUT_TORCH
        command = words[words.index("--") + 1 :]
        script = kind_of(command[1:], folder) if command[:1] == [sys.executable] else None
        return script or WITHOUT_TORCH
    if not words or not words[0].endswith(".py"):
        return None
    script_path = folder / words[0]
    if script_path == TRAINER_WITHOUT_TORCH:
        return WITHOUT_TORCH
    return WITH_TORCH if script_path.is_file() else None


def early(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that are read before a script's first line."""
    return {
        name: value
        for name, value in {**SERVER_VARIABLES, **variables}.items()
        if name.startswith(EARLY_VARIABLES) and name != UNBUFFERED
    }


EARLY = early({**os.environ, **SERVER_VARIABLES})  # of servers, and so of what they are


def _network(who: str = "thread-self") -> str:
    return os.readlink(f"/proc/{who}/ns/net")


def enable() -> None:
    """Let this process and all that it imports start processes as forks."""
    become_subreaper()
    subprocess.Popen = ForkedPopen  # type: ignore[misc]


def reap_orphans() -> None:
    """Take note of the end of processes that became children of this one, for which nobody
    waits.
    """
    for pid in _children():
        if pid not in ForkedPopen.owned:
            with suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)


def _children() -> list[int]:
    found: list[int] = []
    for path in Path("/proc/self/task").glob("*/children"):
        with suppress(OSError):  # the thread has just ended
            found.extend(map(int, path.read_text().split()))
    return found


def main() -> None:
    kind, number = KINDS[sys.argv[1]], int(sys.argv[2])
    channel = socket.socket(fileno=number)
    import_all(kind)
    command = serve(channel)
    command()


if __name__ == "__main__":
    main()
