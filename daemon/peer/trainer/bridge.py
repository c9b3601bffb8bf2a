"""The daemon's end of the Unix socket and of the memory shared with the trainer.

    run
     └── _serve                 one trainer at a time; a second one is rejected
          ├── _write            queue -> socket, then the mailbox counter in the shared arena
          └── (read)            socket -> peer service, or of several ranks -> ``TrainerGroup``
     ``_serve_sampler``         draws of leased samples, on a connection of each sampler's own

The arenas are unnamed files that belong to the daemon, so the crash of a trainer loses nothing of
the shared state: the next process maps the same memory.
"""

from __future__ import annotations

import array
import logging
import os
import socket
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import Protocol

import numpy as np
import trio
from attrs import frozen

from ....protocol import messages as m
from ....protocol import wire
from ....protocol.arena import (
    MAIL_SLOT,
    NAMED_SLOT,
    NO_STEP_NAMED,
    SAMPLES_SLOT,
    Arena,
    create_arena_file,
    map_arena,
)
from ....protocol.errors import RemoteProtocolError
from ....protocol.network.stream import MessageStream
from .group import Process, Rank, TrainerGroup
from .port import TrainerEvents

log = logging.getLogger("holdfast.bridge")

HELLO_S = 60.0  # from the connection to the layout; a large model takes its time to be walked
CRASH_REPORT_S = 1.0  # for what is left in the socket of a process that has ended
RANKS_GO_S = 5.0  # after one of several ranks has gone: for the others to take their last messages
ANOTHER = "another training process is attached to this daemon"
GONE = "the training process is gone"
QUEUE_COUNT_MAX = 4_096  # messages for a trainer that does not reach a step boundary


class FurtherRanks(Protocol):
    """What carries a trainer's messages to its ranks on other hosts."""

    def tell(self, group: TrainerGroup, message: m.Message) -> None:
        """Tell all ranks a message, in order, once what it announces is at all hosts."""
        ...

    def passed(self, message: m.Message) -> None:
        """Take note that the trainer was told a message."""
        ...

    def slots_changed(self) -> None:
        """Carry the slots of the shared arena that ranks look at."""
        ...


class ProcessConnection(Protocol):
    """What carries a process's stream: a socket, but for processes of other hosts."""

    def close(self) -> None: ...


@frozen
class Caller:
    """A process that has connected, and what takes the events of its trainer.

    Attributes:
      where: the host on which it runs, in parentheses; empty: it is this one.
    """

    stream: MessageStream
    connection: ProcessConnection
    events: TrainerEvents
    where: str = ""


class UnixBridge:
    """A ``TrainerPort`` over a Unix socket at ``path`` (mode 0600).

    Args:
      ends: ends the trainer's process; None: only its connection can be ended.

    Attributes:
      attached_pid: of the trainer that is attached, or None.
      was_attached: a trainer has attached, now or earlier.
      listening: a trainer can connect.
      further: of a peer of several hosts; None: all ranks are on this one.
      arenas: the shared and the posted one; None before there are any.
    """

    def __init__(
        self, path: Path, ends: Callable[[m.FailureKind, str, float], None] | None = None
    ) -> None:
        self.path = path
        self._ends = ends
        self.attached_pid: int | None = None
        self.was_attached = False
        self.listening = trio.Event()
        self.further: FurtherRanks | None = None
        self.arenas: tuple[Arena, Arena] | None = None
        self._files: tuple[int, int] | None = None
        self.group: TrainerGroup | None = None
        self._alone: Process | None = None  # a trainer of one process
        self._busy = False
        self._cut = ""  # why the daemon ended the connection
        self._crash: m.Failing | None = None
        self._detached = trio.Event()
        self._detached.set()
        self._scope = trio.CancelScope()  # around the trainer's tasks
        self._samplers: set[trio.CancelScope] = set()  # around their connections
        self._data_ranks: dict[int, int] = {}  # by rank

    # ------------------------------------------------------------ TrainerPort

    def open_arenas(self, sizes: Sequence[m.FragmentSize]) -> tuple[Arena, Arena]:
        """Create two arenas in unnamed files; earlier ones live while a process maps them."""
        self._close_files()
        files = (create_arena_file(sizes), create_arena_file(sizes))
        self._files = files
        self.arenas = shared, posted = map_arena(files[0], sizes), map_arena(files[1], sizes)
        shared.slots[NAMED_SLOT] = NO_STEP_NAMED
        return shared, posted

    def tell(self, message: m.Message) -> None:
        if self.group is not None:
            if self.group.complete and not self.group.ended:
                if self.further is None:
                    self.group.tell(message)
                else:
                    self.further.tell(self.group, message)
        elif self._alone is not None:
            self._alone.send(message)
            if self.further is not None:
                self.further.passed(message)

    def samples(self) -> dict[int, int]:
        trained: dict[int, int] = {}
        for rank, data_rank in self._data_ranks.items():
            if self.arenas is not None:
                posted = self.arenas[1]
                slots = posted.slots if rank < 0 else posted.rank_slots(rank)
                count, other = int(slots[SAMPLES_SLOT]), trained.get(data_rank, 0)
                # 0: maybe a stage of a pipeline, which needs no sampler.
                trained[data_rank] = min(count, other) if count and other else max(count, other)
        return trained

    def end(self, kind: m.FailureKind, reason: str, sick_s: float) -> None:
        if self._ends is not None:
            self._ends(kind, reason, sick_s)
        elif self._busy:
            self._cut = reason
            self._scope.cancel()

    async def crash_report(self) -> m.Failing | None:
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
                self.listening.set()
                async with trio.open_nursery() as nursery:
                    while True:
                        connection, _ = await listener.accept()
                        stream = MessageStream(trio.SocketStream(connection))
                        caller = Caller(stream, connection, events)
                        nursery.start_soon(self.serve, caller, nursery)
        finally:
            self.path.unlink(missing_ok=True)
            self._close_files()

    # ------------------------------------------------------------ one trainer

    async def serve(self, caller: Caller, nursery: trio.Nursery) -> None:
        """Carry a process's connection to its end.

        Args:
          nursery: for the trainer's group of ranks, which outlives single connections.
        """
        try:
            hello = await self._hello(caller.stream)
        except (RemoteProtocolError, trio.BrokenResourceError, trio.EndOfChannel, OSError) as error:
            log.info("a training process did not attach: %r", error)
            hello = None
        if hello is None:
            caller.connection.close()
        elif isinstance(hello, m.DrawHello):
            await self._serve_sampler(hello, caller)
        elif hello.part.world_size > 1:
            await self._serve_rank(hello, caller, nursery)
        else:
            await self._serve_alone(hello, caller)

    async def _hello(self, stream: MessageStream) -> m.TrainerHello | m.DrawHello | None:
        """Return a process's first message, or None if it was sent away."""
        with trio.move_on_after(HELLO_S):
            hello = await stream.receive_expected(m.TrainerHello, m.DrawHello)
            if hello.version != m.VERSION_MAX:
                why = "the script uses another version of holdfast than this daemon"
                await reject(stream, why)
                return None
            if isinstance(hello, m.DrawHello) or not self._busy or self.group is not None:
                return hello
            await reject(stream, ANOTHER)
        return None

    async def _serve_sampler(self, hello: m.DrawHello, caller: Caller) -> None:
        """Answer a sampler's draws, one after the other, until its trainer has gone."""
        stream, events = caller.stream, caller.events
        with closing(caller.connection), trio.CancelScope() as scope:
            if self.attached_pid is None:
                await reject(stream, "no training process is attached to this daemon")
                return
            self._samplers.add(scope)
            try:
                answer = events.begin_draws(hello)
                while not isinstance(answer, m.Rejected):
                    await stream.send(answer)
                    answer = await events.draw(hello, await stream.receive_expected(m.Draw))
                await reject(stream, answer.reason)
            except (RemoteProtocolError, trio.BrokenResourceError, trio.EndOfChannel, OSError):
                pass  # the process has ended, or closed the sampler
            finally:
                self._samplers.discard(scope)

    async def _serve_alone(self, hello: m.TrainerHello, caller: Caller) -> None:
        if self._busy:
            await reject(caller.stream, ANOTHER)
            return
        self._busy = True
        self._data_ranks = {-1: hello.part.data_rank}
        self.attached_pid, self.was_attached = hello.pid, True
        self._crash, self._detached = None, trio.Event()
        sender, queue = trio.open_memory_channel[m.Message](QUEUE_COUNT_MAX)
        self._alone = Process(sender)
        self._scope = self._alone.scope
        reason = GONE
        try:
            caller.events.trainer_came(hello.layout)
            take = caller.events.trainer_sent
            reason = await self._converse(caller, self._alone, queue, take, counts=True)
        finally:
            self._leave(reason, caller.events)

    def _leave(self, reason: str, events: TrainerEvents | None) -> None:
        """Take note that the trainer's process, or the last of several, has left.

        Args:
          events: None: the trainer never came.
        """
        self._busy, self._alone, self.attached_pid, self.group = False, None, None, None
        self._detached.set()
        for scope in list(self._samplers):
            scope.cancel()
        report = "" if self._crash is None else self._crash.reason
        if events is not None:
            events.trainer_went(self._cut or report or reason)
        self._cut = ""

    # ------------------------------------------------------------ one trainer of several ranks

    async def _serve_rank(
        self, hello: m.TrainerHello, caller: Caller, nursery: trio.Nursery
    ) -> None:
        """Take a rank into the group, which the first one begins."""
        events = caller.events
        if self.group is None:
            if self._busy:
                await reject(caller.stream, ANOTHER)
                return
            self._busy = True
            self._crash, self._detached = None, trio.Event()
            self.group = TrainerGroup(
                hello.part.world_size,
                lambda: self.arenas,
                events.trainer_sent,
                lambda: None if self.further is None else self.further.slots_changed(),
            )
            nursery.start_soon(self._run_group, self.group, events)
        group = self.group
        if why := group.why_not(hello):
            await reject(caller.stream, why)
            return
        sender, queue = trio.open_memory_channel[m.Message](QUEUE_COUNT_MAX)
        rank = Rank(sender, hello=hello, far=bool(caller.where))
        group.came(rank)
        why = GONE
        try:
            take = partial(group.took, hello.part.rank)
            why = await self._converse(caller, rank, queue, take, counts=False)
        finally:
            group.gone(hello.part.rank, why + caller.where)

    async def _run_group(self, group: TrainerGroup, events: TrainerEvents) -> None:
        """Wait for all ranks, look after them as one trainer, and end them together."""
        came = False
        try:
            with trio.move_on_after(HELLO_S):
                await group.gathered.wait()
            if group.complete and not group.ended:
                self.attached_pid, self.was_attached = group.ranks[0].hello.pid, True
                self._data_ranks = {
                    number: rank.hello.part.data_rank for number, rank in group.ranks.items()
                }
                if why := group.begin():
                    group.reject(why)
                else:
                    came = True
                    events.trainer_came(group.ranks[0].hello.layout)
                    with trio.CancelScope() as self._scope:
                        await group.look_after()
            elif not group.ended:
                why = f"rank {group.missing()} did not attach within {HELLO_S:.0f} s: "
                group.reject(why + "all ranks of a peer run under one `holdfast join`")
            group.ended = group.ended or self._cut
            with trio.move_on_after(0 if self._cut else RANKS_GO_S):
                await group.all_gone.wait()
        finally:
            for rank in group.ranks.values():
                rank.scope.cancel()
            self._leave(group.ended, events if came else None)

    # ------------------------------------------------------------ a connection

    async def _converse(
        self,
        caller: Caller,
        process: Process,
        queue: trio.MemoryReceiveChannel[m.Message],
        take: Callable[[m.Message], None],
        *,
        counts: bool,
    ) -> str:
        """Carry a process's messages both ways until it is gone; return why it is."""
        reason = GONE
        with (
            closing(caller.connection),
            process.scope,
        ):  # its writer may be in the middle of a message
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._write, caller, queue, counts)
                reason = await self._read(caller.stream, take)
                nursery.cancel_scope.cancel()
        return "it does not take its messages" if process.slow else reason

    async def _read(self, stream: MessageStream, take: Callable[[m.Message], None]) -> str:
        try:
            while True:
                self._take(await stream.receive(), take)
        except RemoteProtocolError as error:
            return f"the training process broke the protocol: {error}"
        except trio.EndOfChannel as error:
            return str(error) or "the training process closed its connection"
        except (trio.BrokenResourceError, trio.ClosedResourceError, OSError):
            return GONE

    def _take(self, message: m.Message, take: Callable[[m.Message], None]) -> None:
        """Take a message of a training process: keep its last words, hand on all others."""
        if isinstance(message, m.Failing) and message.kind is not m.FailureKind.NAN:
            # Of several ranks the first one's is the cause.
            self._crash = self._crash or message
        else:
            take(message)

    async def _write(
        self,
        caller: Caller,
        queue: trio.MemoryReceiveChannel[m.Message],
        counts: bool,
    ) -> None:
        sent_count = 0
        try:
            async with queue:  # closed at the end, so that ``tell`` drops messages
                async for message in queue:
                    connection = caller.connection
                    if isinstance(message, m.ArenaOpened) and isinstance(
                        connection, trio.socket.SocketType
                    ):
                        await self._send_arenas(connection, message)
                    else:
                        await caller.stream.send(message)
                    sent_count += 1
                    if counts and self.arenas is not None:
                        self.arenas[0].slots[MAIL_SLOT] = np.uint64(sent_count)
            caller.connection.close()  # it has taken its last message
        except (trio.BrokenResourceError, trio.ClosedResourceError, OSError):
            # The trainer has left; the reader notices, too, after the messages before that.
            pass

    async def _send_arenas(
        self, connection: trio.socket.SocketType, message: m.ArenaOpened
    ) -> None:
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


async def reject(stream: MessageStream, reason: str) -> None:
    with trio.move_on_after(1):
        with suppress(trio.BrokenResourceError, OSError):
            await stream.send(m.Rejected(reason))
    await stream.aclose()
