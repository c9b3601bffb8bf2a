"""HTTP connections over real sockets: closed clients hold no descriptor, and there is a limit."""

from __future__ import annotations

import os
import resource
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest
import trio
import trio.testing
from starlette.types import Receive, Scope, Send

from holdfast.daemon.process.this_machine import DESCRIPTORS_WANTED, raise_descriptor_limit
from holdfast.daemon.web import connections as module
from holdfast.daemon.web.connections import SEND_S, Connections, connections_max
from holdfast.daemon.web.http_server import bind_http
from holdfast.protocol.addresses import Address
from tests.background import background, until

ASK = b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n"
ANSWER = b"here"
POLL_S = 0.01
LARGE = bytes(50_000_000)  # more than the kernel takes for a client that does not read


class App:
    """An application that answers at once; ``/wait`` on command; ``/large`` with an endless
    body.
    """

    def __init__(self) -> None:
        self.go_on = trio.Event()
        self.waiting = 0
        self.listener, _url = bind_http(Address("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.waiting += 1
        body = LARGE if scope["path"] == "/large" else ANSWER
        if scope["path"] == "/wait":
            await self.go_on.wait()
        size = [(b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": 200, "headers": size})
        await send({"type": "http.response.body", "body": body})

    async def dial(self) -> trio.SocketStream:
        return await trio.open_tcp_stream("127.0.0.1", self.port)

    async def ask(self, stream: trio.SocketStream, path: bytes = b"/") -> bool:
        """Return whether a request is answered; False if the daemon has closed the connection."""
        try:
            await stream.send_all(ASK.replace(b"/", path, 1))
            told = b""
            while not told.endswith(ANSWER):
                received = await stream.receive_some()
                if not received:
                    return False
                told += received
        except trio.BrokenResourceError:
            return False
        await trio.testing.wait_all_tasks_blocked(POLL_S)  # now the daemon knows, too
        return True

    async def wait_at(self, stream: trio.SocketStream) -> None:
        """Send a request that is not answered yet."""
        before = self.waiting
        await stream.send_all(ASK.replace(b"/", b"/wait", 1))
        await until(lambda: self.waiting > before)


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@asynccontextmanager
async def an_app() -> AsyncIterator[App]:
    app = App()
    async with background() as nursery:
        nursery.start_soon(Connections(app).serve, app.listener)
        yield app


@pytest.mark.real_time
@pytest.mark.parametrize(
    "said", [b"", b"GET / HT", ASK, ASK + ASK, b"\x00" * 64, b"PRI * HTTP/2.0", b"NO\r\n\r\n"]
)
@pytest.mark.parametrize("resets", [False, True])
async def test_a_client_that_has_gone_holds_no_descriptor(
    said: bytes, resets: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LINGER_S", 1_000.0)
    async with an_app() as app:
        before = descriptors()
        for _ in range(20):
            stream = await app.dial()
            await stream.send_all(said)
            if said.endswith(b"\r\n\r\n"):
                await stream.receive_some(1)
                await trio.testing.wait_all_tasks_blocked(POLL_S)
            if resets:
                stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            await stream.aclose()
        await until(lambda: descriptors() <= before)


@pytest.mark.real_time
async def test_a_client_that_has_closed_its_sending_side_is_answered() -> None:
    async with an_app() as app:
        before = descriptors()
        async with await app.dial() as stream:
            await app.wait_at(stream)
            await stream.send_eof()
            app.go_on.set()
            told = b"".join([bytes(part) async for part in stream])
            assert told.endswith(ANSWER)
        await until(lambda: descriptors() <= before)


@pytest.mark.real_time
async def test_the_longest_idle_connection_is_closed_for_a_new_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "CONNECTIONS_MAX", 4)
    async with an_app() as app:
        streams = [await app.dial() for _ in range(4)]
        await app.wait_at(streams[0])
        for number in (2, 1, 3):  # so the second has been idle for longest
            assert await app.ask(streams[number])
        newcomer = await app.dial()
        assert await app.ask(newcomer)
        assert await streams[2].receive_some() == b"", "hung up on"
        assert await app.ask(streams[3])
        assert await app.ask(streams[1])
        app.go_on.set()
        assert (await streams[0].receive_some()).startswith(b"HTTP/1.1 200"), "it was busy"
        for stream in (*streams, newcomer):
            await stream.aclose()


@pytest.mark.real_time
async def test_a_new_connection_is_closed_while_all_are_busy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "CONNECTIONS_MAX", 4)
    async with an_app() as app:
        streams = [await app.dial() for _ in range(4)]
        for stream in streams:
            await app.wait_at(stream)
        async with await app.dial() as newcomer:
            assert not await app.ask(newcomer)
        app.go_on.set()
        for stream in streams:
            assert (await stream.receive_some()).startswith(b"HTTP/1.1 200")
        await trio.testing.wait_all_tasks_blocked(POLL_S)  # now the daemon knows, too
        async with await app.dial() as newcomer:
            assert await app.ask(newcomer)
        for stream in streams:
            await stream.aclose()


@pytest.mark.real_time
async def test_http_leaves_the_last_descriptors_free(monkeypatch: pytest.MonkeyPatch) -> None:
    async with an_app() as app:
        first = await app.dial()
        assert await app.ask(first)
        monkeypatch.setattr(module, "descriptors_max", lambda: module.DESCRIPTORS_KEPT)
        second = await app.dial()
        assert await app.ask(second)
        assert await first.receive_some() == b"", "it yielded"
        await app.wait_at(second)
        async with await app.dial() as third:
            assert not await app.ask(third)
        for stream in (first, second):
            await stream.aclose()


async def test_a_client_that_reads_nothing_is_disconnected() -> None:
    closed = []
    stuck = SimpleNamespace(
        socket=SimpleNamespace(close=lambda: closed.append(trio.current_time())),
        send_all=lambda _data: trio.sleep_forever(),
    )
    connection = module._Connection(cast(Any, stuck))
    began_s = trio.current_time()
    with trio.CancelScope(shield=True), pytest.raises(trio.BrokenResourceError, match="nothing"):
        await connection.send_all(b"an answer")
    assert closed == [began_s + SEND_S]


async def test_a_slow_client_gets_its_whole_answer() -> None:
    taken = bytearray()

    async def take(data: bytes) -> None:
        await trio.sleep(0.9 * SEND_S)
        taken.extend(data)

    slow = SimpleNamespace(socket=None, send_all=take)
    answer = os.urandom(5 * module.SEND_BYTES + 1)
    await module._Connection(cast(Any, slow)).send_all(answer)
    assert taken == answer


@pytest.mark.real_time
async def test_a_client_that_does_not_read_does_not_delay_the_shutdown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "SEND_S", 1_000.0)
    app = App()
    async with background() as nursery:
        nursery.start_soon(Connections(app).serve, app.listener)
        stream = await app.dial()
        await stream.send_all(ASK.replace(b"/", b"/large", 1))
        await until(lambda: app.waiting > 0)
        await trio.testing.wait_all_tasks_blocked(0.1)
    await stream.aclose()


@pytest.mark.parametrize(
    ("soft", "most"), [(128, 32), (256, 64), (1_024, 128), (8, 4), (resource.RLIM_INFINITY, 128)]
)
def test_http_may_have_a_quarter_of_the_descriptors(
    soft: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _which: (soft, soft))
    assert connections_max() == most


@pytest.mark.parametrize(
    ("soft", "hard", "raised"),
    [
        (256, 256, None),
        (1_024, 4_096, 4_096),
        (1_024, 2**20, DESCRIPTORS_WANTED),
        (1_024, resource.RLIM_INFINITY, DESCRIPTORS_WANTED),
        (2**20, 2**20, None),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, None),
    ],
)
def test_a_daemon_raises_its_own_limit_as_far_as_it_may(
    soft: int, hard: int, raised: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [(soft, hard)]
    monkeypatch.setattr(resource, "getrlimit", lambda _which: now[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda _which, limits: now.append(limits))
    raise_descriptor_limit()
    assert now[1:] == ([] if raised is None else [(raised, hard)])
