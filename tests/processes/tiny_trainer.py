"""A training script without torch: numpy values that move towards data of rank and step.

It is run as a script under ``holdfast join``. Torch's import would be most of such a process's
time, and the daemon does not see the difference: connection, arenas and step boundaries are the
client's own. ``torch_trainer`` is the script for what the hook itself does.
"""

from __future__ import annotations

import argparse
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from holdfast.client.attach_errors import AttachRefused
from holdfast.client.boundary import BoundaryMachine
from holdfast.client.daemon_connection import DaemonConnection
from holdfast.diloco.fragments import PARAMETER
from holdfast.diloco.outer import merged
from holdfast.protocol import messages as m
from holdfast.protocol.arena import (
    FOUNDING_VERSION,
    STEP_SLOT,
    TOKENS_SLOT,
    WAITING_SLOT,
    Arena,
    NotWholeError,
    map_arena,
)

INPUTS = 8
TOKENS = 16  # of a step
RATE = 1e-2
PAUSE_S = 0.03  # rounds of ten steps are enough: more of them only heat the machine

WAITED, STEPPED = 0, 1  # indices into ``Arena.seconds``


def make_layout(width: int) -> m.ModelLayout:
    """A model of two linear layers."""
    tensors = [
        m.TensorSpec("0.weight", (width, INPUTS), "float32", PARAMETER),
        m.TensorSpec("0.bias", (width,), "float32", PARAMETER),
        m.TensorSpec("2.weight", (1, width), "float32", PARAMETER),
        m.TensorSpec("2.bias", (1,), "float32", PARAMETER),
    ]
    return m.ModelLayout(tuple(tensors))


class Fragment:
    """A fragment's local values, their anchor, and its counters, as in ``fragment_replica``.

    All values are float32, whatever type the layout names. Each post takes a snapshot.
    """

    def __init__(self, index: int, shared: Arena, posted: Arena) -> None:
        self.index = index
        self.version = FOUNDING_VERSION
        count = shared.sizes[index].value_count
        self.values = np.random.default_rng(index).standard_normal(count, np.float32)
        self._counters = np.ones(shared.sizes[index].counter_count, np.int64)
        self._anchor = self._snapshot = self.values.copy()
        self._shared = shared
        self._posted = posted

    def train(self, rank: int, step: int) -> float:
        """Take one step towards a target of rank and step, and return the loss."""
        noise = np.random.default_rng((rank, step)).standard_normal(self.values.size, np.float32)
        error = np.sin(np.arange(self.values.size, dtype=np.float32)) + noise / 4 - self.values
        self.values += np.float32(RATE) * error
        return float(np.square(error).mean())

    def post_present(self) -> None:
        with self._posted.writing(self.index, FOUNDING_VERSION):
            self._posted.values(self.index)[:] = self.values
            self._posted.counters(self.index)[:] = self._counters

    def post(self) -> None:
        self._snapshot = self.values.copy()
        with self._posted.writing(self.index, self.version):
            self._posted.values(self.index)[:] = self._anchor - self.values
            self._posted.counters(self.index)[:] = self._counters

    def load(self, connection: DaemonConnection) -> None:
        self._anchor, self._counters = self._read(connection)
        self.values = self._anchor.copy()

    def merge(self, connection: DaemonConnection, contributed: bool) -> None:
        base = self._snapshot if contributed else self._anchor
        self._anchor, self._counters = self._read(connection)
        self.values = merged(self._anchor, self.values, base)

    def _read(self, connection: DaemonConnection) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        values, counters = np.empty_like(self.values), np.empty_like(self._counters)

        def copy() -> None:
            values[:] = self._shared.values(self.index)
            counters[:] = self._shared.counters(self.index)

        self.version = self._shared.read(self.index, copy, connection.pause)
        return values, counters


class TinyRun:
    """A trainer's part in the run; does for ``Fragment`` what ``hook.Run`` does for a model."""

    def __init__(self, layout: m.ModelLayout) -> None:
        self.machine = BoundaryMachine()
        self.fragments: list[Fragment] = []
        self._overlap_steps = 0
        self._posted: Arena | None = None
        self._connection = DaemonConnection.open(os.environ["HOLDFAST_SOCKET"])
        self._connection.send(m.TrainerHello(m.VERSION_MAX, os.getpid(), layout))
        while not self.machine.loaded:
            self._handle(self._connection.receive())
        self._left_at_s = time.monotonic()
        self._step_s = 0.0

    @property
    def posted(self) -> Arena:
        assert self._posted is not None, "the daemon has not opened its arenas"
        return self._posted

    def step(self, loss: float) -> None:
        """Report a step, and do what is due at it."""
        machine = self.machine
        machine.step += 1
        machine.tokens += TOKENS
        self.posted.slots[STEP_SLOT] = machine.step
        self.posted.slots[TOKENS_SLOT] = machine.tokens
        self.posted.loss[0] = loss
        self._step_s = time.monotonic() - self._left_at_s
        self.posted.seconds[STEPPED] += self._step_s
        while not machine.finished:
            message = self._connection.receive_nowait()
            if message is None and not self._post_due():
                if not machine.must_wait(self._overlap_steps):
                    break
                with self._waiting():
                    message = self._connection.receive()
            if message is not None:
                self._handle(message)
        self._left_at_s = time.monotonic()

    def log(self, **figures: float) -> None:
        self._connection.send(m.Metrics(self.machine.step, figures))

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        self.posted.slots[WAITING_SLOT] = self._connection.received_count + 1
        started_s = time.monotonic()
        yield
        self.posted.slots[WAITING_SLOT] = 0
        if self.machine.contributing:
            self.posted.seconds[WAITED] += time.monotonic() - started_s

    def _post_due(self) -> bool:
        number = self.machine.next_to_post()
        if number is None:
            return False
        fragment = self.fragments[number]
        fragment.post()
        self.machine.post(number)
        self._connection.send(self.announce(number, fragment.version))
        return True

    def announce(self, number: int, version: int) -> m.Posted:
        """Return what the daemon is told of a posted fragment."""
        return self.machine.announce_post(number, version, self._step_s)

    def _handle(self, message: m.Message) -> None:
        try:
            self._obey(message)
        except NotWholeError:
            self.machine.loaded = False  # ``Load`` comes when the fragment is whole

    def _obey(self, message: m.Message) -> None:
        machine = self.machine
        match message:
            case m.ArenaOpened():
                self._open_arenas(message)
            case m.PostInitial():
                for fragment in self.fragments:
                    fragment.post_present()
                self._connection.send(m.InitialPosted())
            case m.Load():
                machine.move_to(message.step, message.step_limit)
                self._load()
                machine.finished = message.finished
            case m.RoundOpened():
                machine.open_round(message)
            case m.RoundEnded():
                self._end_round(message)
            case m.SetRole():
                machine.contributing = message.contributing
            case m.ExtendStepLimit():
                machine.extend_limit(message.step_limit)
            case m.Finished():
                self._load()
                machine.finished = True
            case m.KeepState():
                pass  # it has no optimizer
            case m.Rejected():
                raise AttachRefused(f"the run does not take this trainer: {message.reason}")
            case _:
                raise AssertionError(f"the daemon sent a {type(message).__name__}")

    def _open_arenas(self, message: m.ArenaOpened) -> None:
        files = self._connection.take_descriptors()
        shared, self._posted = (map_arena(each, message.sizes) for each in files)
        for file in files:
            os.close(file)
        self._overlap_steps = message.overlap_steps
        self._posted.slots[WAITING_SLOT] = 0
        self.fragments = [
            self.make_fragment(index, shared, self._posted)
            for index in range(len(message.fragments))
        ]

    def make_fragment(self, index: int, shared: Arena, posted: Arena) -> Fragment:
        return Fragment(index, shared, posted)

    def _end_round(self, message: m.RoundEnded) -> None:
        contributed = self.machine.end_round(message).contributed
        if not message.committed:
            return
        self.posted.slots[STEP_SLOT] = self.machine.step
        fragment = self.fragments[message.fragment]
        if not self.machine.contributing and not contributed:
            fragment.load(self._connection)
        elif contributed or fragment.version < message.version:
            fragment.merge(self._connection, contributed)

    def _load(self) -> None:
        self.posted.slots[STEP_SLOT] = self.machine.step
        for fragment in self.fragments:
            fragment.load(self._connection)
        self.machine.load()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--pause", type=float, default=PAUSE_S, help="seconds after every step")
    parser.add_argument("--crash", type=Path, help="kill itself while this file exists; removes it")
    parser.add_argument("--figures", action="store_true", help="log two figures at every step")
    parser.add_argument("--save", type=Path, help="the final values")
    arguments = parser.parse_args()

    run = TinyRun(make_layout(arguments.width))
    while not run.machine.finished:
        loss = max(each.train(arguments.rank, run.machine.step) for each in run.fragments)
        run.step(loss)
        if arguments.figures:
            run.log(error=loss**0.5, rank=arguments.rank)
        time.sleep(arguments.pause)
        if arguments.crash is not None and arguments.crash.exists():
            arguments.crash.unlink()
            os.kill(os.getpid(), signal.SIGKILL)
    if arguments.save is not None:
        np.savez(arguments.save, *(each.values for each in run.fragments))


if __name__ == "__main__":
    main()
