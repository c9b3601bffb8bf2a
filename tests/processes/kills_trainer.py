"""A trainer without torch whose updates say whose they are: the training script under kills.

    holdfast join INVITE -- python kills_trainer.py --place 2 --steps-s 0.02 --seen seen/c

Its update is ``2 ** ((place + v) % PLACES)`` at value ``v``, and every update has the same weight and norm.
So a mean is, wherever one looks, the sum of distinct powers of two by their number: it tells who is in it.
After every version that it gets, the trainer appends a line of JSON to a file of its own: the digest of the
shared values, and who is in the mean that led to them, run of values by run of values.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
from blake3 import blake3

from holdfast.client.attach_errors import DaemonGone
from holdfast.client.daemon_connection import DaemonConnection
from holdfast.protocol.arena import STEP_SLOT, TOKENS_SLOT, WAITING_SLOT, Arena, Values, map_arena
from holdfast.protocol.messages import (
    VERSION_MAX,
    ArenaOpened,
    ExtendStepLimit,
    Finished,
    InitialPosted,
    Load,
    Message,
    ModelLayout,
    Posted,
    PostInitial,
    RoundEnded,
    RoundOpened,
    SetRole,
    TensorSpec,
    TrainerHello,
)

PLACES = 4  # of peers; each has its power of two at every value
VALUES = 2**18  # a mebibyte; a power of two, so that it is cut into equal chunks
TOKENS = 100  # of each update
TOLERANCE = (
    0.01  # of a mean; two sets differ by 0.08 somewhere, float32 by 0.0003 after 1,000 rounds
)


def update_of(place: int, count: int = VALUES) -> Values:
    powers = np.array([2.0 ** ((place + v) % PLACES) for v in range(PLACES)], np.float32)
    return np.tile(powers, count // PLACES)


def means() -> Values:
    """By set of places, a bit each: the first values of its mean. Of nobody: none that can be."""
    updates = np.array([update_of(place, PLACES) for place in range(PLACES)])
    found = np.full((2**PLACES, PLACES), np.inf, np.float32)
    for bits in range(1, 2**PLACES):
        inside = [place for place in range(PLACES) if bits >> place & 1]
        found[bits] = updates[inside].mean(axis=0)
    return found


def sets_in(mean: Values) -> list[tuple[int, int]]:
    """Who is in a mean, as runs: a bit for each place (0: nobody's mean is like that), and values."""
    groups = mean.reshape(-1, 1, PLACES)
    fits = (np.abs(groups - means()[np.newaxis]) < TOLERANCE).all(axis=2)
    bits = np.where(fits.any(axis=1), fits.argmax(axis=1), 0)
    ends = [*(np.flatnonzero(np.diff(bits)) + 1).tolist(), len(bits)]
    starts = [0, *ends[:-1]]
    return [
        (int(bits[start]), PLACES * (end - start)) for start, end in zip(starts, ends, strict=True)
    ]


class Trainer:
    """The hook's conversation with the daemon, for one fragment and no model."""

    def __init__(self, connection: DaemonConnection, place: int, seen: Path) -> None:
        self._connection = connection
        self._update = update_of(place)
        self._seen = seen
        self._shared: Arena | None = None
        self._posted: Arena | None = None
        self._values: Values = np.zeros(VALUES, np.float32)
        self._version: int | None = None
        self._open: RoundOpened | None = None
        self._waits_for: int | None = None  # the round that was posted
        self._step = self._step_limit = 0
        self._contributing, self._loaded = True, False
        self.finished = False

    def train(self, step_s: float) -> None:
        layout = ModelLayout((TensorSpec("values", (VALUES,), "float32", "parameter"),))
        self._connection.send(TrainerHello(VERSION_MAX, os.getpid(), layout))
        while not self.finished:
            while (message := self._connection.receive_nowait()) is not None:
                self._handle(message)
            self._post_due()
            if self._must_wait():
                self._handle(self._wait())
                continue
            time.sleep(step_s)
            self._step += 1
            assert self._posted is not None
            self._posted.slots[STEP_SLOT] = self._step
            self._posted.slots[TOKENS_SLOT] = self._step * TOKENS

    def _wait(self) -> Message:
        if self._posted is not None:
            self._posted.slots[WAITING_SLOT] = self._connection.received_count + 1
        message = self._connection.receive()
        if self._posted is not None:
            self._posted.slots[WAITING_SLOT] = 0
        return message

    def _must_wait(self) -> bool:
        if not (self._loaded and self._contributing) or self._waits_for is not None:
            return True
        due = self._open is not None and self._open.at_step <= self._step
        return self._step >= self._step_limit and not due

    def _post_due(self) -> None:
        opened = self._open
        if opened is None or opened.at_step > self._step or self._waits_for is not None:
            return
        if not (self._loaded and self._contributing) or self._version is None:
            return
        assert self._posted is not None
        self._posted.values(0)[:] = self._update
        posted = Posted(opened.round, 0, self._version, TOKENS, self._step, 0.01)
        self._connection.send(posted)
        self._waits_for, self._open = opened.round, None

    def _handle(self, message: Message) -> None:
        match message:
            case ArenaOpened():
                shared, posted = self._connection.take_descriptors()
                self._shared = map_arena(shared, message.sizes)
                self._posted = map_arena(posted, message.sizes)
            case PostInitial():
                assert self._posted is not None
                self._posted.values(0)[:] = 0.0
                self._connection.send(InitialPosted())
            case Load():
                self._step, self._step_limit = message.step, message.step_limit
                self._loaded, self.finished = True, message.finished
                self._open = self._waits_for = None
                self._look(None)
            case SetRole():
                self._contributing = message.contributing
            case ExtendStepLimit():
                self._step_limit, self._waits_for = message.step_limit, None
            case RoundOpened():
                self._step_limit = message.step_limit
                if message.round != self._waits_for:
                    self._open = message
            case RoundEnded():
                self._step_limit = message.step_limit
                if self._waits_for == message.round:
                    self._waits_for = None
                if self._open is not None and self._open.round == message.round:
                    self._open = None
                if message.committed:
                    self._step = max(self._step, message.step)
                    self._look(message.round)
            case Finished():
                self.finished = True
            case _:
                pass

    def _look(self, round_id: int | None) -> None:
        """What the daemon holds now; the round that led to it, if it is one that we saw end."""
        assert self._shared is not None
        shared, values = self._shared, np.empty(VALUES, np.float32)

        def copy() -> None:
            np.copyto(values, shared.values(0))

        version = shared.read(0, copy, self._connection.pause)
        line: dict[str, Any] = {"version": version, "digest": blake3(values.tobytes()).hexdigest()}
        if round_id is not None and self._version == version - 1:
            line |= {"round": round_id, "sets": sets_in(self._values - values)}
        self._values, self._version = values, version
        with self._seen.open("a") as file:  # one write a line: a kill leaves a whole one, or none
            file.write(json.dumps(line) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--place", type=int, required=True)
    parser.add_argument("--step-s", type=float, default=0.02)
    parser.add_argument("--seen", type=Path, required=True)
    options = parser.parse_args()
    connection = DaemonConnection.open(os.environ["HOLDFAST_SOCKET"])
    try:
        Trainer(connection, options.place, options.seen).train(options.step_s)
    except DaemonGone:
        pass  # it was killed: so are we
    finally:
        connection.close()


if __name__ == "__main__":
    main()
