"""A daemon that follows a test's script, over a real socket and real arenas, on its own thread.

    with talking(script) as path:              script(daemon) runs on a thread once we connect
        run = attach(model, socket_path=path)

What the script raises is raised again when the block ends.

Both sides run freely between the messages, so a script must not count on who is faster. It says
nothing that the trainer may not be there for: a trainer waits for what comes next at its
``step_limit``, while a round without overlap that it posted is not over, as a spare, and in a loop
of steps until something has happened. The real daemon gives a ``step_limit`` with everything it
says for the same reason.
"""

from __future__ import annotations

import array
import os
import shutil
import socket
import struct
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
from attrs import evolve
from numpy.typing import ArrayLike

from holdfast.diloco.fragments import TensorShape, split
from holdfast.protocol import messages as m
from holdfast.protocol import wire
from holdfast.protocol.arena import MAIL_SLOT, Arena, create_arena_file, map_arena

WAIT_S = 60.0  # for a trainer that is alive; then the test fails

START_S = 150.0  # until it connects: a process of its own imports torch first

POLL_S = 0.001  # between two looks at what the trainer's thread is about to do

M = TypeVar("M", bound=m.Message)


def settled(condition: Callable[[], bool]) -> None:
    """Wait for the other thread's next action."""
    deadline_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline_s, "it never came"
        time.sleep(POLL_S)


def wait_for(event: threading.Event) -> None:
    """Wait until the other thread sets the event."""
    assert event.wait(WAIT_S), "the other thread never came to it"


class FakeDaemon:
    """One trainer's daemon; every method is a line of the conversation.

    A ``step_limit`` makes the trainer wait there for what comes next. Scripts that go on after a
    message need it: else the trainer may be past the next round's step before that is opened, or
    at its own end before the next message is said.
    """

    def __init__(self, stream: socket.socket) -> None:
        stream.settimeout(WAIT_S)
        self.stream = stream
        self.layout = m.ModelLayout(())
        self.sizes: tuple[m.FragmentSize, ...] = ()
        self.overlap_steps = 0
        self._arenas: tuple[Arena, Arena] | None = None
        self._sent_count = 0

    @property
    def shared(self) -> Arena:
        assert self._arenas is not None
        return self._arenas[0]

    @property
    def posted(self) -> Arena:
        assert self._arenas is not None
        return self._arenas[1]

    # ------------------------------------------------------------ single messages

    def say(self, message: m.Message, descriptors: Sequence[int] = ()) -> None:
        body = wire.encode(message)
        frame = struct.pack(">I", len(body)) + body
        self._sent_count += 1
        if self._arenas is not None:
            self.shared.slots[MAIL_SLOT] = self._sent_count
        try:
            if descriptors:
                rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))
                sent = self.stream.sendmsg([frame], [rights])
                frame = frame[sent:]
            if frame:  # sending nothing fails too where the trainer has left
                self.stream.sendall(frame)
        except BrokenPipeError as error:
            raise EOFError(f"the trainer closed the socket before it was told {message}") from error

    def hear(self, expected: type[M]) -> M:
        (length,) = struct.unpack(">I", self._read(4))
        message = wire.decode(self._read(length))
        assert isinstance(message, expected), f"{message} instead of {expected.__name__}"
        return message

    def hear_posted(self) -> m.Posted:
        """Receive ``Posted``, without its step time."""
        return evolve(self.hear(m.Posted), step_s=0.0)

    def hears_nothing(self, seconds: float = 0.05) -> bool:
        """Check that the trainer sends nothing for a moment: it waits, or it trains."""
        self.stream.settimeout(seconds)
        try:
            self.stream.recv(1, socket.MSG_PEEK)
        except TimeoutError:
            return True
        finally:
            self.stream.settimeout(WAIT_S)
        return False

    def _read(self, wanted_bytes: int) -> bytes:
        data = b""
        while len(data) < wanted_bytes:
            more = self.stream.recv(wanted_bytes - len(data))
            if not more:
                raise EOFError("the trainer closed the socket")
            data += more
        return data

    # ------------------------------------------------------------ whole turns

    def open_arenas(
        self,
        fragment_count: int = 1,
        overlap_steps: int = 0,
        nan_steps: int = 0,
        local_checkpoint: str = "",
    ) -> None:
        """Run the conversation up to the arenas."""
        self.layout = self.hear(m.TrainerHello).layout
        shapes = [TensorShape(each.name, each.shape, each.kind) for each in self.layout.tensors]
        fragments = split(shapes, fragment_count)
        self.overlap_steps = overlap_steps
        self.sizes = tuple(
            m.FragmentSize(each.value_count, each.momentum_count, each.counter_count)
            for each in fragments
        )
        files = [create_arena_file(self.sizes) for _ in range(2)]
        self._arenas = (map_arena(files[0], self.sizes), map_arena(files[1], self.sizes))
        self.say(
            m.ArenaOpened(
                tuple(each.tensors for each in fragments),
                self.sizes,
                overlap_steps,
                nan_steps,
                local_checkpoint=local_checkpoint,
            ),
            files,
        )
        for file in files:
            os.close(file)

    def found(self) -> None:
        """Take the model's weights as the run's initial weights."""
        self.say(m.PostInitial())
        self.hear(m.InitialPosted)
        for fragment in range(len(self.sizes)):
            values, counters = self.posted.values(fragment), self.posted.counters(fragment)
            self.share(fragment, 0, values, counters)

    def share(
        self,
        fragment: int,
        version: int,
        values: ArrayLike | None = None,
        counters: ArrayLike | None = None,
    ) -> None:
        """Put a version into the shared arena."""
        with self.shared.writing(fragment, version):
            if values is not None:
                self.shared.values(fragment)[:] = values
            if counters is not None:
                self.shared.counters(fragment)[:] = counters

    def load(
        self,
        step: int = 0,
        step_limit: int = m.COUNT_MAX,
        finished: bool = False,
        spoilt: bool = False,
    ) -> None:
        self.say(m.Load(step, step_limit, finished, spoilt))

    def start(self, fragment_count: int = 1, step_limit: int = m.COUNT_MAX, **how: Any) -> None:
        """Run the conversation until ``attach`` returns, at the model's own weights.

        Args:
          how: see ``open_arenas``.
        """
        self.open_arenas(fragment_count, **how)
        self.found()
        self.load(step_limit=step_limit)

    def open_round(
        self, number: int, at_step: int, fragment: int = 0, step_limit: int = m.COUNT_MAX
    ) -> None:
        version = self.shared.version(fragment)
        self.say(m.RoundOpened(number, fragment, version, at_step, step_limit))

    def post_round(self, number: int, at_step: int, **how: int) -> m.Posted:
        """Open a round, and receive what the trainer posts; ``how``: see ``open_round``."""
        self.open_round(number, at_step, **how)
        return self.hear(m.Posted)

    def end_round(
        self,
        number: int,
        fragment: int = 0,
        committed: bool = True,
        contributed: bool = True,
        step: int = 0,
        step_limit: int = m.COUNT_MAX,
    ) -> None:
        version = self.shared.version(fragment)
        self.say(m.RoundEnded(number, fragment, committed, contributed, version, step, step_limit))

    def commit(self, number: int, values: ArrayLike, fragment: int = 0, **how: Any) -> None:
        """Put the next version into the shared arena, and end the round by it.

        Args:
          how: see ``end_round``.
        """
        self.share(fragment, self.shared.version(fragment) + 1, values)
        self.end_round(number, fragment, **how)

    def round(
        self,
        number: int,
        at_step: int,
        change: float,
        fragment: int = 0,
        step_limit: int = m.COUNT_MAX,
    ) -> m.Posted:
        """Run a round with this trainer's contribution, after which the shared values are ``-
        change``.
        """
        posted = self.post_round(number, at_step, fragment=fragment)
        values = self.shared.values(fragment) - np.float32(change)
        self.commit(number, values, fragment, step=at_step, step_limit=step_limit)
        return posted


Script = Callable[[FakeDaemon], None]


@contextmanager
def talking(script: Script, *, stay: bool = False) -> Iterator[str]:
    """Run ``script`` on a thread against the trainer that connects; yields the socket's path.

    Args:
      stay: keep the connection open after the script, until the block ends.
    """
    folder = tempfile.mkdtemp(prefix="holdfast-")  # short: a socket's path has 108 bytes at most
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(f"{folder}/s")
    listener.listen()
    listener.settimeout(START_S)
    failures: list[BaseException] = []
    leave = threading.Event()

    def run() -> None:
        try:
            stream, _ = listener.accept()
            with stream:
                script(FakeDaemon(stream))
                if stay:
                    leave.wait(WAIT_S)
        except BaseException as error:  # noqa: BLE001 - carried to the test's thread
            failures.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield f"{folder}/s"
    except BaseException:
        leave.set()
        thread.join()
        if failures:
            failures[0].add_note("(the daemon's thread; the trainer failed too)")
            raise failures[0]  # noqa: B904 - it is the cause of what the trainer saw
        raise
    else:
        leave.set()
        thread.join()
        if failures:
            raise failures[0]
    finally:
        listener.close()
        shutil.rmtree(folder)
