"""A trainer without a process: a numpy vector that drifts.

What is due at a step boundary is decided by the hook's own ``BoundaryMachine``.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np
import trio
from numpy.typing import NDArray

from ..client.boundary import BoundaryMachine
from ..daemon.peer.trainer.port import TrainerEvents
from ..protocol import messages as m
from ..protocol.arena import (
    LOSS_SLOT,
    SAMPLES_SLOT,
    STEP_SLOT,
    TOKENS_SLOT,
    WAITING_SLOT,
    Arena,
    arena_bytes,
)
from .witness import ViolationError, Witness

RESTART_S = 1.0
SAMPLES_PER_STEP = 3
SAMPLES_AHEAD = 6  # that its loader holds

Delta = Callable[[str, int, int], NDArray[np.float32]]  # (peer, round, count) -> pseudo-gradient


def small_layout(counts: Sequence[int] = (5, 3), counters: int = 1) -> m.ModelLayout:
    """Return the layout of a few vectors and a tensor of counters."""
    tensors = [
        m.TensorSpec(f"layer{i}.weight", (count,), "float32", "parameter")
        for i, count in enumerate(counts)
    ]
    if counters:
        tensors.append(m.TensorSpec("steps", (counters,), "int64", "counter"))
    return m.ModelLayout(tuple(tensors))


class SimTrainer:
    """A ``TrainerPort`` without a process: its parameters drift by a seeded amount per step.

    Args:
      samples: of its data set; 0: it has none.
    """

    def __init__(
        self,
        peer: str,
        layout: m.ModelLayout,
        witness: Witness,
        *,
        step_s: float,
        delta: Delta | None,
        samples: int = 0,
    ) -> None:
        self.peer = peer
        self.layout = layout
        self.witness = witness
        self.step_s = step_s
        self.delta = delta
        self.data = None if not samples else m.DrawHello(m.VERSION_MAX, 0, samples)
        self.finished = False
        self.poison: Callable[[int], float] | None = None  # round -> value added to its delta
        self.spoilt = False  # its weights are not finite, until it loads the shared ones
        self.cleared_count = 0  # loads that cleared its optimizer's state
        self.tokens_per_step = 64
        self.waited_s = 0.0  # time a contributing trainer spent waiting at its step limit
        self.stuck = False  # takes no more steps, as if stopped
        self.tell_failed: Callable[[m.TrainerFailed], None] = lambda _message: None
        self._failed: m.TrainerFailed | None = None
        self._retry = trio.Event()
        self._rng = np.random.default_rng(int(peer[:8], 16))
        self._send, self._receive = trio.open_memory_channel[m.Message](1_000)
        self._events: TrainerEvents | None = None
        self._life = trio.CancelScope()
        self._shared: Arena | None = None
        self._posted: Arena | None = None

    # ------------------------------------------------------------ TrainerPort

    async def run(self, events: TrainerEvents) -> None:
        self._events = events
        while not self.finished:
            self._send, self._receive = trio.open_memory_channel[m.Message](1_000)
            with trio.CancelScope() as self._life:
                events.trainer_came(self.layout)
                await self._train()
            if not self.finished:
                events.trainer_went("crashed")
                await self._recover()
        await trio.sleep_forever()

    async def _recover(self) -> None:
        failed, self._failed = self._failed, None
        if failed is None:
            await trio.sleep(RESTART_S)
            return
        self.tell_failed(failed)
        if failed.remedy is m.Remedy.NONE:
            await self._retry.wait()
        else:
            await trio.sleep(failed.restart_s)

    def crash(self, failed: m.TrainerFailed | None = None) -> None:
        """End the trainer; ``failed`` is the report of its supervisor."""
        self._failed, self._retry, self.stuck = failed, trio.Event(), False
        self._life.cancel()

    def retry(self) -> None:
        self._retry.set()

    def spoil(self) -> None:
        """Report a loss that is not finite."""
        assert self._events is not None
        self._machine.loaded = False
        self._events.trainer_sent(m.Failing(m.FailureKind.NAN, "the loss was not finite"))

    def end(self, kind: m.FailureKind, reason: str, sick_s: float) -> None:
        self.crash(m.TrainerFailed(kind, reason, m.Remedy.RESTART, 1, RESTART_S))

    def open_arenas(self, sizes: Sequence[m.FragmentSize]) -> tuple[Arena, Arena]:
        self._shared = Arena(bytearray(arena_bytes(sizes)), sizes)
        self._posted = Arena(bytearray(arena_bytes(sizes)), sizes)
        return self._shared, self._posted

    def samples(self) -> dict[int, int]:
        return {0: int(self._posted.slots[SAMPLES_SLOT])} if self._posted is not None else {}

    def tell(self, message: m.Message) -> None:
        try:
            self._send.send_nowait(message)
        except (trio.WouldBlock, trio.BrokenResourceError):
            self._life.cancel()

    # ------------------------------------------------------------ the loop of a training script

    async def _train(self) -> None:
        self._machine = machine = BoundaryMachine()
        self.spoilt = False
        self._versions: dict[int, int] = {}  # by fragment: before its open round
        self._overlap_steps = 0
        self._loader: deque[int] = deque()  # positions that were drawn and are not trained
        self._drawn_count = 0
        self._trained: list[int] = []  # positions, in the order in which they were trained
        self._counted: dict[int, int] = {}  # by fragment: how many are in its shared state
        self._lost_count = 0  # how many were trained before the last load
        self._taken: dict[int, int] = {}  # by fragment: how many when it was posted
        while not self.finished:
            await self._boundary()
            if self.finished:
                return
            await self._load_samples()
            await trio.sleep(math.inf if self.stuck else self.step_s)
            self._train_samples()
            machine.step += 1
            machine.tokens += self.tokens_per_step
            assert self._posted is not None
            self._posted.slots[STEP_SLOT] = machine.step
            self._posted.slots[TOKENS_SLOT] = machine.tokens
            self._posted.slots[LOSS_SLOT] = np.float64(1.0 / (1 + machine.step)).view(np.uint64)

    async def _load_samples(self) -> None:
        """Draw samples ahead, as a loader does; wait for those of a step."""
        assert self._events is not None
        if self.data is not None and not self._machine.draws:
            self._machine.draws = True
            self._events.begin_draws(self.data)
        while self.data is not None and len(self._loader) < SAMPLES_PER_STEP + SAMPLES_AHEAD:
            drawn = await self._events.draw(self.data, m.Draw(self._drawn_count, SAMPLES_PER_STEP))
            if isinstance(drawn, m.Rejected):
                raise ViolationError(drawn.reason)
            for each in drawn.ranges:
                self._loader.extend(range(each.start, each.stop))
                self._drawn_count += each.stop - each.start

    def _train_samples(self) -> None:
        if self.data is None:
            return
        assert self._posted is not None
        self._trained += [self._loader.popleft() for _ in range(SAMPLES_PER_STEP)]
        self._machine.samples = len(self._trained)
        self._posted.slots[SAMPLES_SLOT] = len(self._trained)

    async def _boundary(self) -> None:
        machine = self._machine
        while not self.finished:
            try:
                self._handle(self._receive.receive_nowait())
                continue
            except trio.WouldBlock:
                pass
            while (fragment := machine.next_to_post()) is not None:
                self._post(fragment)
            if not machine.must_wait(self._overlap_steps):
                return
            if self._posted is not None:
                self._posted.slots[WAITING_SLOT] = 1
            contributing, since_s = machine.loaded and machine.contributing, trio.current_time()
            message = await self._receive.receive()
            self.waited_s += trio.current_time() - since_s if contributing else 0.0
            if self._posted is not None:
                self._posted.slots[WAITING_SLOT] = 0
            self._handle(message)

    def _post(self, fragment: int) -> None:
        assert self._posted is not None
        assert self._events is not None
        self._machine.post(fragment)
        posted = self._machine.announce_post(fragment, self._versions[fragment], self.step_s)
        values = self._posted.values(fragment)
        if self.delta is not None:
            values[:] = self.delta(self.peer, posted.round, len(values))
        else:
            values[:] = self._rng.standard_normal(len(values)).astype(np.float32)
        if self.poison is not None:
            values[:1] += np.float32(self.poison(posted.round))
        self._posted.counters(fragment)[:] = posted.step
        if self.spoilt:
            values[:1] = np.nan
        self.witness.saw_contribution(self.peer, posted.round, values)
        if self.data is not None:
            self._taken[fragment] = len(self._trained)
            since = self._counted.get(fragment, self._lost_count)
            self.witness.leases.saw_post(self.peer, posted.round, self._trained[since:])
        self._events.trainer_sent(posted)

    def _handle(self, message: m.Message) -> None:
        machine = self._machine
        match message:
            case m.PostInitial():
                assert self._posted is not None
                assert self._events is not None
                for fragment in range(len(self._posted.sizes)):
                    values = self._posted.values(fragment)
                    values[:] = np.arange(len(values), dtype=np.float32)
                    self._posted.counters(fragment)[:] = 0
                self._events.trainer_sent(m.InitialPosted())
            case m.Load():
                machine.move_to(message.step, message.step_limit)
                machine.load()
                self.spoilt = False
                self.cleared_count += message.spoilt
                self._counted.clear()
                self._taken.clear()
                self._lost_count = len(self._trained)
                self.finished = message.finished
            case m.ExtendStepLimit():
                machine.extend_limit(message.step_limit)
            case m.SetRole():
                machine.contributing = message.contributing
            case m.RoundOpened():
                machine.open_round(message)
                self._versions[message.fragment] = message.version
            case m.RoundEnded():
                ended = machine.end_round(message)
                if ended.contributed and message.fragment in self._taken:
                    self._counted[message.fragment] = self._taken[message.fragment]
            case m.Finished():
                self.finished = True
            case m.Rejected():
                self._life.cancel()
            case m.ArenaOpened():
                self._overlap_steps = message.overlap_steps
