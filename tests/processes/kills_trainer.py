"""A trainer without torch whose updates say whose they are: the training script under kills.

    holdfast join INVITE -- python kills_trainer.py --place 2 --steps-s 0.02 --seen seen/c

Its update is ``2 ** ((place + v) % PLACES)`` at value ``v``, and every update has the same weight
and norm. So a mean is, wherever one looks, the sum of distinct powers of two by their number: it
tells who is in it. After every version that it gets, the trainer appends a line of JSON to a file
of its own: the digest of the shared values, and who is in the mean that led to them, run of values
by run of values.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from attrs import evolve
from blake3 import blake3

from holdfast.client.attach_errors import DaemonGone
from holdfast.client.daemon_connection import DaemonConnection
from holdfast.protocol.arena import Arena, Values
from holdfast.protocol.messages import ModelLayout, Posted, RoundEnded, TensorSpec

sys.path.insert(0, str(Path(__file__).parents[2]))  # a daemon starts this file
from tests.processes.tiny_trainer import Fragment, TinyRun

PLACES = 4  # of peers; each has its power of two at every value
VALUES = 2**18  # a mebibyte; a power of two, so that it is cut into equal chunks
TOKENS = 100  # of each update
# Of a mean; two sets differ by 0.08 somewhere, float32 by 0.0003 after 1,000 rounds.
TOLERANCE = 0.01


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
    """Who is in a mean, as runs: a bit for each place (0: nobody's mean is like that), and
    values.
    """
    groups = mean.reshape(-1, 1, PLACES)
    fits = (np.abs(groups - means()[np.newaxis]) < TOLERANCE).all(axis=2)
    bits = np.where(fits.any(axis=1), fits.argmax(axis=1), 0)
    ends = [*(np.flatnonzero(np.diff(bits)) + 1).tolist(), len(bits)]
    starts = [0, *ends[:-1]]
    return [
        (int(bits[start]), PLACES * (end - start)) for start, end in zip(starts, ends, strict=True)
    ]


class Whose(Fragment):
    """A fragment whose updates say whose they are; it holds what is shared, and nothing more."""

    def __init__(self, shared: Arena, posted: Arena, place: int) -> None:
        super().__init__(0, shared, posted)
        self.values = np.zeros(VALUES, np.float32)
        self._update = update_of(place)

    def post(self) -> None:
        with self._posted.writing(self.index, self.version):
            self._posted.values(self.index)[:] = self._update

    def merge(self, connection: DaemonConnection, contributed: bool) -> None:
        self.load(connection)


class KillsRun(TinyRun):
    """A run of one such fragment, in which every version that is held is noted."""

    def __init__(self, place: int, seen: Path) -> None:
        self._place = place
        self._seen = seen
        self._values: Values = np.zeros(VALUES, np.float32)
        self._version: int | None = None
        tensor = TensorSpec("values", (VALUES,), "float32", "parameter")
        super().__init__(ModelLayout((tensor,)))

    def make_fragment(self, index: int, shared: Arena, posted: Arena) -> Fragment:
        return Whose(shared, posted, self._place)

    def announce(self, number: int, version: int) -> Posted:
        """Every update has the same weight, however many steps a peer took."""
        return evolve(super().announce(number, version), tokens=TOKENS)

    def _load(self) -> None:
        super()._load()
        self._look(None)

    def _end_round(self, message: RoundEnded) -> None:
        super()._end_round(message)
        if message.committed:
            self._look(message.round)

    def _look(self, round_id: int | None) -> None:
        """Note what is held now, and the round that led to it, if it is one that ended here."""
        fragment = self.fragments[0]
        values, version = fragment.values, fragment.version
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
    try:
        run = KillsRun(options.place, options.seen)
        while not run.machine.finished:
            time.sleep(options.step_s)
            run.step(0.0)
    except DaemonGone:
        pass  # it was killed: so are we


if __name__ == "__main__":
    main()
