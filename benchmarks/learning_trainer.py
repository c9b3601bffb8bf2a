"""A real training script in a run that lives in virtual time.

The script is an ordinary one: a torch model, AdamW, the production hook in its loop. It runs in a
thread, because the hook blocks where it waits for its daemon. So that time stays virtual and a run
stays a function of its seed, only one of the two threads ever runs:

    trio's thread      go_on ──────────────┐                ┌── sleeps, or waits for the daemon
    script's thread                        └── steps ... ───┘   wait, or Connection.receive

Between the two is what is between any trainer and its daemon: a Unix socket pair with the
production framing, and two arenas in unnamed files that both map.
"""

from __future__ import annotations

import math
import os
import socket
import threading
from collections.abc import Callable, Sequence

import numpy as np
import trio

from benchmarks.learning_arms import Arm, Recipe
from benchmarks.learning_script import Learner, draw, weights_digest
from examples.train import CONTEXT
from holdfast.client.attach import attach_over
from holdfast.client.daemon_connection import DaemonConnection
from holdfast.daemon.peer.trainer.port import TrainerEvents
from holdfast.protocol import messages as m
from holdfast.protocol import wire
from holdfast.protocol.arena import MAIL_SLOT, Arena, create_arena_file, map_arena
from holdfast.simulation.drifting_trainer import SimTrainer
from holdfast.simulation.witness import Witness

# ---------------------------------------------------------------- two threads, one at a time


class Ended(BaseException):
    """The machine under the script is gone. Not an Exception, so that no script handles it."""


class Turns:
    """Runs a blocking function in turns with the trio task that owns this.

    Args:
      play: gets ``wait``, to be called with seconds, or ``inf`` for as long as it takes.
    """

    def __init__(self, play: Callable[[Callable[[float], None]], None]) -> None:
        self._play = play
        self._theirs, self._ours = threading.Semaphore(0), threading.Semaphore(0)
        self._wish_s: float | None = None
        self._ending = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def go_on(self) -> float | None:
        """Let it run until it waits: for how long. None: it has returned. Raises what it raised."""
        self._wish_s = None
        self._theirs.release()
        self._ours.acquire()
        if self._error is not None:
            raise self._error
        return self._wish_s

    def end(self) -> None:
        """Have its wait raise ``Ended``, and wait until it has ended. Harmless if it has."""
        self._ending = True
        self._theirs.release()
        self._thread.join()

    def _run(self) -> None:
        self._theirs.acquire()
        try:
            if not self._ending:
                self._play(self._wait)
        except Ended:
            pass
        except BaseException as error:  # noqa: BLE001 - ``go_on`` raises it where it is awaited
            self._error = error
        self._ours.release()

    def _wait(self, seconds: float) -> None:
        self._wish_s = seconds
        self._ours.release()
        self._theirs.acquire()
        if self._ending:
            raise Ended


class PatientConnection(DaemonConnection):
    """The hook's end of the socket, where waiting is a turn of the other thread's."""

    def __init__(self, stream: socket.socket, wait: Callable[[float], None]) -> None:
        super().__init__(stream)
        self._wait = wait

    def receive(self) -> m.Message:
        while (message := self.receive_nowait()) is None:
            self._wait(math.inf)
        return message


# ---------------------------------------------------------------- the trainer as its daemon sees it


class TorchTrainer(SimTrainer):
    """A ``TrainerPort`` with a real script behind it.

    Args:
      step_s: what an inner step takes, in virtual seconds.
      replica: which of the recipe's streams of windows it draws.

    Attributes:
      tokens: trained so far.
      began_s: when its first step began; infinite before.
      digest: of its model's weights when it had left its loop; empty before.
    """

    def __init__(
        self,
        peer: str,
        layout: m.ModelLayout,
        witness: Witness,
        *,
        step_s: float,
        arm: Arm,
        recipe: Recipe,
        replica: int,
    ) -> None:
        super().__init__(peer, layout, witness, step_s=step_s, delta=None)
        self.tokens = 0
        self.began_s = math.inf
        self.digest = b""
        self._arm = arm
        self._recipe = recipe
        self._replica = replica
        self._files: list[int] = []
        self._mail_count = 0
        self._now_s = 0.0  # for the script, which must not see how long this machine takes

    # ------------------------------------------------------------ TrainerPort

    async def run(self, events: TrainerEvents) -> None:
        try:
            await super().run(events)
        finally:
            self._close_files()

    def open_arenas(self, sizes: Sequence[m.FragmentSize]) -> tuple[Arena, Arena]:
        self._close_files()
        self._files = [create_arena_file(sizes) for _ in range(2)]
        self._shared, self._posted = (map_arena(each, sizes) for each in self._files)
        return self._shared, self._posted

    def _close_files(self) -> None:
        for each in self._files:
            os.close(each)
        self._files = []

    async def _train(self) -> None:
        assert self._events is not None
        ours, theirs = socket.socketpair()
        self._mail_count = 0

        def play(wait: Callable[[float], None]) -> None:
            self._script(PatientConnection(theirs, wait), wait)

        with ours, theirs:
            line, turns = DaemonConnection(ours), Turns(play)
            try:
                self._now_s = trio.current_time()
                while (wait_s := turns.go_on()) is not None:
                    self._hear(line)
                    if wait_s == math.inf:
                        self._put(ours, await self._receive.receive())
                    else:
                        self.began_s = min(self.began_s, trio.current_time())
                        await trio.sleep(wait_s)
                    self._put_all(ours)
                    self._now_s = trio.current_time()
            finally:
                turns.end()
        self.finished = True

    def _hear(self, line: DaemonConnection) -> None:
        """Pass on what the script has said."""
        assert self._events is not None
        while (message := line.receive_nowait()) is not None:
            if isinstance(message, m.TrainerHello):  # a daemon hears of it as ``trainer_came``
                assert message.layout == self.layout
            else:
                self._events.trainer_sent(message)

    def _put_all(self, line: socket.socket) -> None:
        while True:
            try:
                self._put(line, self._receive.receive_nowait())
            except trio.WouldBlock:
                return

    def _put(self, line: socket.socket, message: m.Message) -> None:
        """As the daemon's bridge does: frame, descriptors with the arenas, then the count."""
        body = wire.encode(message)
        frame = len(body).to_bytes(4, "big") + body
        files = self._files if isinstance(message, m.ArenaOpened) else []
        sent_bytes = socket.send_fds(line, [frame], files)
        assert sent_bytes == len(frame), "the script does not read"
        self._mail_count += 1
        if self._shared is not None:
            self._shared.slots[MAIL_SLOT] = np.uint64(self._mail_count)

    # ------------------------------------------------------------ the script

    def _script(self, connection: DaemonConnection, wait: Callable[[float], None]) -> None:
        recipe = self._recipe
        chance, batch = recipe.chance(self._replica), [recipe.batch]
        tokens = recipe.batch * CONTEXT
        learner = Learner(self._arm, recipe)
        model, optimizer = learner.model, learner.optimizers[0]
        with attach_over(lambda: connection, model, optimizer, lambda: self._now_s) as run:
            while not run.finished:
                starts = draw([chance], batch)
                loss = learner.step(run.global_step, starts, run.rate_scale)
                wait(self.step_s)
                self.tokens += tokens
                run.step(loss=loss, tokens=tokens)
            self.digest = weights_digest(learner.model)
