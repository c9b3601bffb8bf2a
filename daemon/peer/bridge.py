"""The daemon's end of the Unix socket and of the memory shared with the trainer.

    run
     └── _serve                 one trainer at a time; a second one is rejected
          ├── _write            queue -> socket, then the mailbox counter in the shared arena
          └── (read)            socket -> peer service

The arenas are unnamed files that belong to the daemon, so the crash of a trainer loses nothing of the
shared state: the next process maps the same memory.
"""

from __future__ import annotations

import array
import logging
import os
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import trio

from ...protocol import wire
from ...protocol.arena import MAIL_SLOT, Arena, create_arena_file, map_arena
from ...protocol.errors import RemoteProtocolError
from ...protocol.messages import (
    VERSION_MAX,
    ArenaOpened,
    Failing,
    FailureKind,
    FragmentSize,
    Message,
    Rejected,
    TrainerHello,
)
from ...protocol.network.stream import MessageStream
from .trainer_port import TrainerEvents

log = logging.getLogger("holdfast.bridge")

HELLO_S = 60.0  # from the connection to the layout; a large model takes its time to be walked
CRASH_REPORT_S = 1.0  # for what is left in the socket of a process that has ended
QUEUE_COUNT_MAX = 4_096  # messages for a trainer that does not reach a step boundary


class UnixBridge:
    """A ``TrainerPort`` over a Unix socket at ``path`` (mode 0600).

    Args:
      ends: ends the trainer's process; None: only its connection can be ended.
    """

    def __init__(
        self, path: Path, ends: Callable[[FailureKind, str, float], None] | None = None
    ) -> None:
        self.path = path
        self._ends = ends
        self.attached_pid: int | None = None
        self._files: tuple[int, int] | None = None
        self._shared: Arena | None = None
        self._queue: trio.MemorySendChannel[Message] | None = None
        self._busy = False
        self._cut = ""  # why the daemon ended the connection
        self._crash: Failing | None = None
        self._detached = trio.Event()
        self._detached.set()
        self._scope = trio.CancelScope()  # around the trainer's tasks

    # ------------------------------------------------------------ TrainerPort

    def open_arenas(self, sizes: Sequence[FragmentSize]) -> tuple[Arena, Arena]:
        """Create two arenas in unnamed files; earlier ones live while a process maps them."""
        self._close_files()
        files = (create_arena_file(sizes), create_arena_file(sizes))
        self._files = files
        self._shared = map_arena(files[0], sizes)
        return self._shared, map_arena(files[1], sizes)

    def tell(self, message: Message) -> None:
        if self._queue is None:
            return
        try:
            self._queue.send_nowait(message)
        except trio.WouldBlock:
            log.warning("the trainer does not take its messages: disconnecting it")
            self._queue = None
            self._cut = "it does not take its messages"
            self._scope.cancel()  # the writer may be in the middle of a message
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            self._queue = None

    def end(self, kind: FailureKind, reason: str, sick_s: float) -> None:
        if self._ends is not None:
            self._ends(kind, reason, sick_s)
        elif self._busy:
            self._cut = reason
            self._scope.cancel()

    async def crash_report(self) -> Failing | None:
        """Return the report that a process sent before it ended, or None."""
        with trio.move_on_after(CRASH_REPORT_S):
            await self._detached.wait()
        report, self._crash = self._crash, None
        return report

    async def run(self, events: TrainerEvents) -> None:
        self.path.unlink(missing_ok=True)
        listener = trio.socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with listener:
                await listener.bind(str(self.path))
                os.chmod(self.path, 0o600)
                listener.listen(4)
                async with trio.open_nursery() as nursery:
                    while True:
                        connection, _ = await listener.accept()
                        nursery.start_soon(self._serve, connection, events)
        finally:
            self.path.unlink(missing_ok=True)
            self._close_files()

    # ------------------------------------------------------------ one trainer

    async def _serve(self, connection: trio.socket.SocketType, events: TrainerEvents) -> None:
        stream = MessageStream(trio.SocketStream(connection))
        if self._busy:
            await _reject(stream, "another training process is attached to this daemon")
            return
        self._busy = True
        reason = "the training process closed its connection"
        came = False
        try:
            with trio.move_on_after(HELLO_S):
                hello = await stream.receive_expected(TrainerHello)
                if hello.version != VERSION_MAX:
                    await _reject(
                        stream, "the script uses another version of holdfast than this daemon"
                    )
                    return
                self.attached_pid = hello.pid
                self._crash, self._detached = None, trio.Event()
                self._queue, queue = trio.open_memory_channel[Message](QUEUE_COUNT_MAX)
                came = True
            if came:
                events.trainer_came(hello.layout)
                reason = "the training process is gone"
                async with trio.open_nursery() as nursery:
                    self._scope = nursery.cancel_scope
                    nursery.start_soon(self._write, stream, connection, queue)
                    reason = await self._read(stream, events)
                    nursery.cancel_scope.cancel()
        except (RemoteProtocolError, trio.BrokenResourceError, trio.EndOfChannel, OSError) as error:
            log.info("a training process did not attach: %r", error)
        finally:
            self._busy, self._queue, self.attached_pid = False, None, None
            connection.close()
            self._detached.set()
            if came:
                report = "" if self._crash is None else self._crash.reason
                events.trainer_went(self._cut or report or reason)
                self._cut = ""

    async def _read(self, stream: MessageStream, events: TrainerEvents) -> str:
        try:
            while True:
                message = await stream.receive()
                if isinstance(message, Failing) and message.kind is not FailureKind.NAN:
                    self._crash = message
                else:
                    events.trainer_sent(message)
        except RemoteProtocolError as error:
            return f"the training process broke the protocol: {error}"
        except trio.EndOfChannel:
            return "the training process closed its connection"
        except (trio.BrokenResourceError, trio.ClosedResourceError, OSError):
            return "the training process is gone"

    async def _write(
        self,
        stream: MessageStream,
        connection: trio.socket.SocketType,
        queue: trio.MemoryReceiveChannel[Message],
    ) -> None:
        sent_count = 0
        try:
            async with queue:  # closed at the end, so that ``tell`` drops messages
                async for message in queue:
                    if isinstance(message, ArenaOpened):
                        await self._send_arenas(connection, message)
                    else:
                        await stream.send(message)
                    sent_count += 1
                    if self._shared is not None:
                        self._shared.slots[MAIL_SLOT] = np.uint64(sent_count)
        except (trio.BrokenResourceError, trio.ClosedResourceError, OSError):
            # The trainer has left; the reader notices, too, after the messages before that.
            pass

    async def _send_arenas(self, connection: trio.socket.SocketType, message: ArenaOpened) -> None:
        """Send the frame of ``ArenaOpened`` with the two file descriptors at its first byte."""
        assert self._files is not None
        body = wire.encode(message)
        frame = len(body).to_bytes(4, "big") + body  # framed as MessageStream frames
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", self._files))]
        sent = await connection.sendmsg([frame], rights)
        while sent < len(frame):
            sent += await connection.send(frame[sent:])

    def _close_files(self) -> None:
        if self._files is not None:
            for descriptor in self._files:
                os.close(descriptor)
            self._files = None


async def _reject(stream: MessageStream, reason: str) -> None:
    with trio.move_on_after(1):
        with suppress(trio.BrokenResourceError, OSError):
            await stream.send(Rejected(reason))
    await stream.aclose()
