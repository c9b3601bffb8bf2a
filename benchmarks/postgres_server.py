"""A PostgreSQL server for as long as a ``with`` block lasts: a new cluster on a loopback address.

Debian's package has the programs in /usr/lib/postgresql, outside the search path. The server
refuses to run as root, so root runs it as the package's user.
"""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any, Self

import psycopg

from benchmarks.grounds import Ground, Loopback
from benchmarks.report import BenchError

PACKAGED = Path("/usr/lib/postgresql")
SERVER_USER = "postgres"
DATABASE_USER = "holdfast"
PORT = 5_432  # on a ground of its own
START_S = 60.0
STOP_S = 30.0


def why_no_postgres() -> str:
    """Say why no server can be started here; empty if one can."""
    if _program("initdb") is None:
        return "PostgreSQL is not installed (`make packages` does it)"
    if os.geteuid() == 0 and SERVER_USER not in {each.pw_name for each in pwd.getpwall()}:
        return f"the server does not run as root, and there is no user {SERVER_USER}"
    return ""


def _program(name: str) -> str | None:
    found = shutil.which(name)
    packaged = sorted(PACKAGED.glob(f"*/bin/{name}"))
    return found or (str(packaged[-1]) if packaged else None)


class PostgresServer:
    """A server that can be killed, frozen and started again with its data.

    Args:
      ground, number: where it runs; its address there is also the one that it serves at.

    Attributes:
      url: of its database.
    """

    def __init__(self, ground: Ground | None = None, number: int = 0) -> None:
        self._ground: Ground = Loopback() if ground is None else ground
        self._number = number
        self.host = self._ground.address(number)
        self.port = PORT if ground is not None else 0
        self.url = ""
        self._folder = Path()
        self._server: subprocess.Popen[Any] | None = None

    def __enter__(self) -> Self:
        if reason := why_no_postgres():
            raise BenchError(reason)
        self._folder = Path(tempfile.mkdtemp(prefix="holdfast-postgres-"))
        if os.geteuid() == 0:
            user = pwd.getpwnam(SERVER_USER)
            os.chown(self._folder, user.pw_uid, user.pw_gid)
        if not self.port:
            with socket.socket() as free:
                free.bind((self.host, 0))
                self.port = free.getsockname()[1]
        self.url = f"postgresql://{DATABASE_USER}@{self.host}:{self.port}/postgres"
        try:
            self._run("initdb", f"--username={DATABASE_USER}", "--auth=trust", "--encoding=UTF8")
            with (self._folder / "data" / "pg_hba.conf").open("a") as rules:
                rules.write("host all all samenet trust\n")  # the hosts of its ground
            self.start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if self._server is not None and self._server.poll() is None:
            self._server.send_signal(signal.SIGCONT)
            self._server.send_signal(signal.SIGINT)  # a fast shutdown
            try:
                self._server.wait(STOP_S)
            except subprocess.TimeoutExpired:
                self._server.kill()
                self._server.wait()
        shutil.rmtree(self._folder, ignore_errors=True)

    def start(self) -> None:
        """Start the server, and wait until it answers."""
        options = {
            "listen_addresses": self.host,
            "port": str(self.port),
            "unix_socket_directories": str(self._folder),
            "max_connections": "50",
            "shared_buffers": "32MB",
        }
        given = [part for name, value in options.items() for part in ("-c", f"{name}={value}")]
        self._server = self._popen("postgres", *given)
        until_s = time.monotonic() + START_S
        while True:
            try:
                self.query("select 1")
                return
            except psycopg.OperationalError as error:
                if self._server.poll() is not None or time.monotonic() > until_s:
                    raise BenchError(f"the server does not start:\n{self._log()}") from error
            time.sleep(0.05)

    def stop(self) -> None:
        """Stop it as a power cut does: connections break, what is committed is there after
        ``start``.
        """
        assert self._server is not None
        self._server.send_signal(signal.SIGQUIT)
        self._server.wait(STOP_S)

    def query(self, text: str) -> list[tuple[Any, ...]]:
        """Return a statement's rows, if any, as somebody with psql sees them."""
        with (
            self._ground.inside(self._number),
            psycopg.connect(self.url, autocommit=True, connect_timeout=2) as connection,
        ):
            cursor = connection.execute(text.encode())
            return cursor.fetchall() if cursor.description is not None else []

    def _run(self, program: str, *arguments: str) -> None:
        if self._popen(program, *arguments).wait():
            raise BenchError(f"{program} failed:\n{self._log()}")

    def _popen(self, program: str, *arguments: str) -> subprocess.Popen[Any]:
        path = _program(program)
        assert path is not None
        argv = [path, "-D", str(self._folder / "data"), *arguments]
        if os.geteuid() == 0:
            as_user = ("--reuid", SERVER_USER, "--regid", SERVER_USER, "--clear-groups")
            argv = ["setpriv", *as_user, "--", *argv]
        with (self._folder / "log").open("ab") as log:
            return self._ground.popen(
                self._number,
                argv,
                cwd=self._folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env={"PATH": os.environ.get("PATH", ""), "LC_ALL": "C.UTF-8", "TZ": "UTC"},
            )

    def _log(self) -> str:
        return (self._folder / "log").read_text(errors="replace")[-2_000:]
