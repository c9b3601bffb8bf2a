"""A trainer without a process: a numpy vector that drifts and follows the hook's protocol."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import trio
from attrs import evolve, frozen
from numpy.typing import NDArray

from ...protocol.arena import LOSS_SLOT, STEP_SLOT, TOKENS_SLOT, WAITING_SLOT, Arena, arena_bytes
from ...protocol.messages import (
    ArenaOpened,
    ExtendStepLimit,
    Failing,
    FailureKind,
    Finished,
    FragmentSize,
    InitialPosted,
    Load,
    Message,
    ModelLayout,
    Posted,
    PostInitial,
    Rejected,
    Remedy,
    RoundEnded,
    RoundOpened,
    SetRole,
    TensorSpec,
    TrainerFailed,
)
from ..peer.trainer_port import TrainerEvents
from .witness import Witness

RESTART_S = 1.0

Delta = Callable[[str, int, int], NDArray[np.float32]]  # (peer, round, count) -> pseudo-gradient


def small_layout(counts: Sequence[int] = (5, 3), counters: int = 1) -> ModelLayout:
    """Return the layout of a few vectors and a tensor of counters."""
    tensors = [
        TensorSpec(f"layer{i}.weight", (count,), "float32", "parameter")
        for i, count in enumerate(counts)
    ]
    if counters:
        tensors.append(TensorSpec("steps", (counters,), "int64", "counter"))
    return ModelLayout(tuple(tensors))


@frozen
class _InFlight:
    """A posted round that is not over, and the trainer's position at that boundary."""

    fragment: int
    tokens: int
    step: int


class SimTrainer:
    """A ``TrainerPort`` without a process: its parameters drift by a seeded amount per step."""

    def __init__(
        self,
        peer: str,
        layout: ModelLayout,
        witness: Witness,
        *,
        step_s: float,
        delta: Delta | None,
    ) -> None:
        self.peer = peer
        self.layout = layout
        self.witness = witness
        self.step_s = step_s
        self.delta = delta
        self.finished = False
        self.poison: Callable[[int], float] | None = None  # round -> value added to its delta
        self.tokens_per_step = 64
        self.waited_s = 0.0  # time a contributing trainer spent waiting at its step limit
        self.stuck = False  # takes no more steps, as if stopped
        self.tell_failed: Callable[[TrainerFailed], None] = lambda _message: None
        self._failed: TrainerFailed | None = None
        self._retry = trio.Event()
        self._rng = np.random.default_rng(int(peer[:8], 16))
        self._send, self._receive = trio.open_memory_channel[Message](1_000)
        self._events: TrainerEvents | None = None
        self._life = trio.CancelScope()
        self._shared: Arena | None = None
        self._posted: Arena | None = None

    # ------------------------------------------------------------ TrainerPort

    async def run(self, events: TrainerEvents) -> None:
        self._events = events
        while not self.finished:
            self._send, self._receive = trio.open_memory_channel[Message](1_000)
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
        if failed.remedy is Remedy.NONE:
            await self._retry.wait()
        else:
            await trio.sleep(failed.restart_s)

    def crash(self, failed: TrainerFailed | None = None) -> None:
        """End the trainer; ``failed`` is the report of its supervisor."""
        self._failed, self._retry, self.stuck = failed, trio.Event(), False
        self._life.cancel()

    def retry(self) -> None:
        self._retry.set()

    def spoil(self) -> None:
        """Report a loss that is not finite."""
        assert self._events is not None
        self._loaded = False
        self._events.trainer_sent(Failing(FailureKind.NAN, "the loss was not finite"))

    def end(self, kind: FailureKind, reason: str, sick_s: float) -> None:
        self.crash(TrainerFailed(kind, reason, Remedy.RESTART, 1, RESTART_S))

    def open_arenas(self, sizes: Sequence[FragmentSize]) -> tuple[Arena, Arena]:
        self._shared = Arena(bytearray(arena_bytes(sizes)), sizes)
        self._posted = Arena(bytearray(arena_bytes(sizes)), sizes)
        return self._shared, self._posted

    def tell(self, message: Message) -> None:
        try:
            self._send.send_nowait(message)
        except (trio.WouldBlock, trio.BrokenResourceError):
            self._life.cancel()

    # ------------------------------------------------------------ the loop of a training script

    async def _train(self) -> None:
        self._step = self._tokens = 0
        # By fragment: the token count at its last contribution; before the first, at the last load.
        self._tokens_from: dict[int, int] = {}
        self._tokens_loaded = 0
        self._step_limit, self._contributing, self._loaded = 0, True, False
        self._open: dict[int, RoundOpened] = {}
        self._in_flight: dict[int, _InFlight] = {}  # by round
        self._overlap_steps = 0
        self._limit_extended = False
        self._ahead_step: int | None = None  # step at which a round was due with nothing trained
        while not self.finished:
            await self._boundary()
            if self.finished:
                return
            await trio.sleep(math.inf if self.stuck else self.step_s)
            self._step += 1
            self._tokens += self.tokens_per_step
            assert self._posted is not None
            self._posted.slots[STEP_SLOT] = self._step
            self._posted.slots[TOKENS_SLOT] = self._tokens
            self._posted.slots[LOSS_SLOT] = np.float64(1.0 / (1 + self._step)).view(np.uint64)

    async def _boundary(self) -> None:
        while not self.finished:
            try:
                self._handle(self._receive.receive_nowait())
                continue
            except trio.WouldBlock:
                pass
            self._post_due()
            if not self._must_wait():
                return
            if self._posted is not None:
                self._posted.slots[WAITING_SLOT] = 1
            contributing, since_s = self._loaded and self._contributing, trio.current_time()
            message = await self._receive.receive()
            self.waited_s += trio.current_time() - since_s if contributing else 0.0
            if self._posted is not None:
                self._posted.slots[WAITING_SLOT] = 0
            self._handle(message)

    def _must_wait(self) -> bool:
        if not (self._loaded and self._contributing):
            return True
        if self._limit_extended:
            return self._step >= self._step_limit
        for posted in self._in_flight.values():
            if self._step >= posted.step + self._overlap_steps:
                return True
        due = any(opened.at_step <= self._step for opened in self._open.values())
        return self._step >= self._step_limit and not due

    def _post_due(self) -> None:
        if not (self._loaded and self._contributing) or self._limit_extended:
            return
        for opened in list(self._open.values()):
            if opened.at_step > self._step or self._awaits(opened.fragment):
                continue
            tokens = self._tokens - self._tokens_from.get(opened.fragment, self._tokens_loaded)
            if not tokens:
                if self._ahead_step is None:
                    self._ahead_step = self._step
                if self._ahead_step == self._step:
                    continue  # one more step first
            self._ahead_step = None
            assert self._posted is not None
            assert self._events is not None
            values = self._posted.values(opened.fragment)
            if self.delta is not None:
                values[:] = self.delta(self.peer, opened.round, len(values))
            else:
                values[:] = self._rng.standard_normal(len(values)).astype(np.float32)
            if self.poison is not None:
                values[:1] += np.float32(self.poison(opened.round))
            self._posted.counters(opened.fragment)[:] = self._step
            self.witness.saw_contribution(self.peer, opened.round, values)
            self._in_flight[opened.round] = _InFlight(opened.fragment, self._tokens, self._step)
            del self._open[opened.round]
            self._events.trainer_sent(
                Posted(
                    opened.round,
                    opened.fragment,
                    opened.version,
                    tokens,
                    self._step,
                    self.step_s,
                )
            )

    def _awaits(self, fragment: int) -> bool:
        return any(posted.fragment == fragment for posted in self._in_flight.values())

    def _handle(self, message: Message) -> None:
        match message:
            case PostInitial():
                assert self._posted is not None
                assert self._events is not None
                for fragment in range(len(self._posted.sizes)):
                    values = self._posted.values(fragment)
                    values[:] = np.arange(len(values), dtype=np.float32)
                    self._posted.counters(fragment)[:] = 0
                self._events.trainer_sent(InitialPosted())
            case Load():
                self._loaded, self.finished = True, message.finished
                self._step = message.step
                self._step_limit, self._limit_extended = message.step_limit, False
                self._tokens_from, self._tokens_loaded = {}, self._tokens
                self._in_flight.clear()
            case ExtendStepLimit():
                self._step_limit, self._limit_extended = message.step_limit, True
            case SetRole():
                self._contributing = message.contributing
            case RoundOpened():
                if message.round not in self._in_flight:  # else this is a nudge for a posted round
                    self._open[message.round] = message
                self._step_limit, self._limit_extended = message.step_limit, False
            case RoundEnded():
                self._open.pop(message.round, None)
                posted = self._in_flight.pop(message.round, None)
                if message.committed or not self._limit_extended:
                    self._step_limit, self._limit_extended = message.step_limit, False
                if message.committed:
                    self._catch_up(message.step)
                    if message.contributed and posted is not None:
                        self._tokens_from[message.fragment] = posted.tokens
            case Finished():
                self.finished = True
            case Rejected():
                self._life.cancel()
            case ArenaOpened():
                self._overlap_steps = message.overlap_steps

    def _catch_up(self, step: int) -> None:
        """Skip to the run's step; as in the hook, skipped steps do not use up an overlap."""
        skipped = step - self._step
        if skipped > 0:
            self._step = step
            self._in_flight = {
                number: evolve(posted, step=posted.step + skipped)
                for number, posted in self._in_flight.items()
            }
