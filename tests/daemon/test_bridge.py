"""The daemon's end of the Unix socket, with the real client at the other end, on a thread."""

from __future__ import annotations

import os
import socket
import stat
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeVar

import numpy as np
import pytest
import torch
import trio
from torch import nn

from holdfast.client.attach import attach
from holdfast.client.attach_errors import AttachRefused, DaemonGone
from holdfast.client.daemon_connection import DaemonConnection
from holdfast.daemon.peer.trainer import bridge as module
from holdfast.daemon.peer.trainer.bridge import UnixBridge
from holdfast.protocol import messages as m
from holdfast.protocol import wire
from holdfast.protocol.arena import MAIL_SLOT
from tests.background import background

pytestmark = pytest.mark.real_time

T = TypeVar("T")

HANGS_S = 60.0  # whatever takes so long

LAYOUT = m.ModelLayout((m.TensorSpec("weight", (1, 3), "float32", "parameter"),))
SIZES = (m.FragmentSize(3, 3, 0),)


class Events:
    """The events that the bridge reports, in order."""

    def __init__(self) -> None:
        self.seen: list[m.ModelLayout | m.Message | str] = []

    def trainer_came(self, layout: m.ModelLayout) -> None:
        self.seen.append(layout)

    def trainer_sent(self, message: m.Message) -> None:
        self.seen.append(message)

    def trainer_went(self, reason: str) -> None:
        self.seen.append(reason)

    def begin_draws(self, hello: m.DrawHello) -> m.Drawn | m.Rejected:
        self.seen.append(hello)
        return m.Drawn((), b"key")

    async def draw(self, hello: m.DrawHello, message: m.Draw) -> m.Drawn | m.Rejected:
        return m.Drawn((m.LeaseRange(message.index, message.index + message.count),))

    async def until(self, kind: type[T], count: int = 1) -> T:
        """The ``count``-th report of this kind."""
        with trio.fail_after(HANGS_S):
            while True:
                found = [each for each in self.seen if isinstance(each, kind)]
                if len(found) >= count:
                    return found[count - 1]
                await trio.sleep(0.005)


@pytest.fixture
def folder() -> Iterator[Path]:
    """A short path: a socket's has 108 bytes at most."""
    with tempfile.TemporaryDirectory(prefix="hf-") as name:
        yield Path(name)


@asynccontextmanager
async def serving(folder: Path) -> AsyncIterator[tuple[UnixBridge, Events]]:
    bridge, events = UnixBridge(folder / "s"), Events()
    async with background() as nursery:
        nursery.start_soon(bridge.run, events)
        with trio.fail_after(HANGS_S):
            while not bridge.path.exists() or stat.S_IMODE(bridge.path.stat().st_mode) != 0o600:
                await trio.sleep(0.005)
        yield bridge, events


async def on_thread(function: Callable[[], T]) -> T:
    with trio.fail_after(HANGS_S):
        return await trio.to_thread.run_sync(function)


def dial(bridge: UnixBridge, *messages: m.Message) -> DaemonConnection:
    connection = DaemonConnection.open(str(bridge.path))
    for message in messages:
        connection.send(message)
    return connection


def hello(pid: int = 4711, version: int = m.VERSION_MAX) -> m.TrainerHello:
    return m.TrainerHello(version, pid, LAYOUT)


# ---------------------------------------------------------------- the real client


async def test_the_real_client_trains_a_round_through_shared_memory(folder: Path) -> None:
    model = nn.Linear(3, 1, bias=False)
    nn.init.constant_(model.weight, 2.0)

    def train() -> list[float]:
        with attach(model, socket_path=str(folder / "s")) as run:
            with torch.no_grad():
                model.weight.sub_(0.5)
            run.log(figure=7.0)
            while run.round_count < 1:
                run.step(loss=1.0, tokens=5)
            return [float(value) for value in model.weight.reshape(-1).tolist()]

    async with serving(folder) as (bridge, events):
        weights: list[list[float]] = []

        async def trainer() -> None:
            weights.append(await on_thread(train))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(trainer)
            layout = await events.until(m.ModelLayout)
            assert layout == LAYOUT
            assert bridge.attached_pid == os.getpid()
            shared, posted = bridge.open_arenas(SIZES)
            bridge.tell(m.ArenaOpened(((0,),), SIZES, 0))
            bridge.tell(m.PostInitial())
            await events.until(m.InitialPosted)
            assert posted.values(0).tolist() == [2.0] * 3
            with shared.writing(0, 0):
                shared.values(0)[:] = posted.values(0)
            bridge.tell(m.Load(0, 1, False))
            bridge.tell(m.RoundOpened(1, 0, 0, 1, 2))
            said = await events.until(m.Posted)
            assert (said.tokens, said.step) == (5, 1)
            assert posted.values(0).tolist() == [0.5] * 3
            with shared.writing(0, 1):
                shared.values(0)[:] -= np.float32(0.25)
            bridge.tell(m.RoundEnded(1, 0, True, True, 1, 1, 2))
        assert weights == [[1.75] * 3]
        metrics = await events.until(m.Metrics)
        assert metrics.values == {"figure": 7.0}
        reason = await events.until(str)
        assert "closed" in reason
        assert bridge.attached_pid is None
        assert int(shared.slots[MAIL_SLOT]) == 5, "one for each message that was told"


async def test_a_successor_finds_the_state_that_a_crashed_trainer_left(folder: Path) -> None:
    async with serving(folder) as (bridge, events):
        first = await on_thread(lambda: dial(bridge, hello()))
        await events.until(m.ModelLayout)
        shared, _posted = bridge.open_arenas(SIZES)
        with shared.writing(0, 3):
            shared.values(0)[:] = 1.25
        bridge.tell(m.ArenaOpened(((0,),), SIZES, 0))
        await on_thread(first.receive)
        first.close()
        await events.until(str)

        model = nn.Linear(3, 1, bias=False)
        weights: list[object] = []

        def successor() -> None:
            with attach(model, socket_path=str(folder / "s")) as run:
                weights.append((model.weight.reshape(-1).tolist(), run.global_step))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(on_thread, successor)
            await events.until(m.ModelLayout, 2)
            bridge.tell(m.ArenaOpened(((0,),), SIZES, 0))
            bridge.tell(m.Load(300, 400, False))
        assert weights == [([1.25] * 3, 300)]


# ---------------------------------------------------------------- one at a time


async def test_a_second_trainer_is_turned_away_with_a_reason(folder: Path) -> None:
    async with serving(folder) as (bridge, events):
        first = await on_thread(lambda: dial(bridge, hello(pid=1)))
        await events.until(m.ModelLayout)
        with pytest.raises(AttachRefused, match="another training process"):
            await on_thread(lambda: attach(nn.Linear(3, 1), socket_path=str(folder / "s")))
        assert bridge.attached_pid == 1
        assert events.seen == [LAYOUT], "the first one did not notice"
        bridge.tell(m.Rejected("still here"))
        assert await on_thread(first.receive) == m.Rejected("still here")
        first.close()
        await events.until(str)
        second = await on_thread(lambda: dial(bridge, hello(pid=2)))
        await events.until(m.ModelLayout, 2)
        assert bridge.attached_pid == 2
        second.close()


async def test_a_script_of_another_version_is_turned_away(folder: Path) -> None:
    async with serving(folder) as (bridge, events):
        odd = await on_thread(lambda: dial(bridge, hello(version=m.VERSION_MAX + 1)))
        answer = await on_thread(odd.receive)
        assert isinstance(answer, m.Rejected)
        assert "version" in answer.reason
        odd.close()
        good = await on_thread(lambda: dial(bridge, hello()))
        await events.until(m.ModelLayout)
        assert events.seen == [LAYOUT]
        good.close()


# ---------------------------------------------------------------- descriptors


async def test_each_trainer_gets_two_descriptors_of_the_same_memory(folder: Path) -> None:
    async with serving(folder) as (bridge, events):
        bridge.open_arenas(SIZES)
        inodes = []
        for number in (1, 2):
            connection = await on_thread(lambda: dial(bridge, hello()))
            await events.until(m.ModelLayout, number)
            bridge.tell(m.ArenaOpened(((0,),), SIZES, 0))
            await on_thread(connection.receive)
            files = connection.take_descriptors()
            assert len(files) == 2
            inodes.append([os.fstat(each).st_ino for each in files])
            assert not any(os.get_inheritable(each) for each in files)
            for each in files:
                os.close(each)
            connection.close()
            await events.until(str, number)
        assert inodes[0] == inodes[1]


async def test_the_daemon_keeps_no_descriptor_of_those_that_went(folder: Path) -> None:
    def opened() -> int:
        return len(os.listdir("/proc/self/fd"))

    async with serving(folder) as (bridge, events):
        bridge.open_arenas(SIZES)
        await trio.sleep(0.05)
        before = opened()
        for number in range(1, 6):
            connection = await on_thread(lambda: dial(bridge, hello()))
            await events.until(m.ModelLayout, number)
            bridge.open_arenas(SIZES)  # a resync to another lineage makes new ones
            connection.close()
            await events.until(str, number)
        await trio.sleep(0.05)
        assert opened() <= before + 2, "mmap keeps one for each arena that somebody still maps"


# ---------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    "junk",
    [
        b"\xff" * 64,
        b"\x00\x00\x00\x05hello",
        b"GET / HTTP/1.0\r\n\r\n",
        b"\x00\x00",
        b"",
        len(wire.encode(m.InitialPosted())).to_bytes(4, "big") + wire.encode(m.InitialPosted()),
    ],
    ids=["long frame", "no msgpack", "http", "half a length", "nothing", "no hello"],
)
async def test_junk_instead_of_a_hello_disturbs_nobody(folder: Path, junk: bytes) -> None:
    async with serving(folder) as (bridge, events):
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(bridge.path))
            client.sendall(junk)
            client.shutdown(socket.SHUT_WR)
            client.settimeout(5)
            assert await on_thread(lambda: read_to_end(client)) == b""
        good = await on_thread(lambda: dial(bridge, hello()))
        await events.until(m.ModelLayout)
        assert events.seen == [LAYOUT]
        good.close()


async def test_junk_after_the_hello_ends_the_trainer_with_a_reason(folder: Path) -> None:
    async with serving(folder) as (bridge, events):
        connection = await on_thread(lambda: dial(bridge, hello()))
        await events.until(m.ModelLayout)
        connection._stream.sendall(b"\xff" * 8)
        reason = await events.until(str)
        assert "broke the protocol" in reason
        with pytest.raises(DaemonGone):
            await on_thread(connection.receive)
        connection.close()


async def test_a_trainer_that_takes_no_messages_is_disconnected(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "QUEUE_COUNT_MAX", 16)
    async with serving(folder) as (bridge, events):
        stuck = await on_thread(lambda: dial(bridge, hello()))
        await events.until(m.ModelLayout)
        for _ in range(1_000):  # more than the socket's buffer holds
            bridge.tell(m.Rejected("x" * 900))
            await trio.sleep(0.0005)  # the writer is stuck in the middle of a message
        assert "does not take" in await events.until(str)
        assert bridge.attached_pid is None
        stuck.close()
        good = await on_thread(lambda: dial(bridge, hello()))
        await events.until(m.ModelLayout, 2)
        good.close()


async def test_what_a_trainer_said_last_is_heard_even_if_it_left_while_it_was_told_something(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(folder) as (bridge, events):
        leaving = await on_thread(lambda: dial(bridge, hello()))
        await events.until(m.ModelLayout)
        send_all = trio.SocketStream.send_all

        async def leave_just_before(stream: trio.SocketStream, data: bytes) -> None:
            leaving.send(m.Metrics(1, {"figure": 7.0}))
            leaving.close()
            await send_all(stream, data)

        monkeypatch.setattr(trio.SocketStream, "send_all", leave_just_before)
        bridge.tell(m.Rejected("nobody hears this"))
        assert await events.until(m.Metrics) == m.Metrics(1, {"figure": 7.0})
        assert "closed its connection" in await events.until(str)
        bridge.tell(m.Rejected("nor this"))


async def test_the_socket_is_gone_with_the_daemon_and_the_trainer_hears_it(folder: Path) -> None:
    async with serving(folder) as (bridge, events):
        connection = await on_thread(lambda: dial(bridge, hello()))
        await events.until(m.ModelLayout)
    with pytest.raises(DaemonGone, match="closed the connection"):
        await on_thread(connection.receive)
    assert not bridge.path.exists()
    assert not list(folder.iterdir())
    connection.close()


def read_to_end(stream: socket.socket) -> bytes:
    data = b""
    while more := stream.recv(4096):
        data += more
    return data
