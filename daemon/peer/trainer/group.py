"""A trainer of several ranks, as one: each has a connection; all handle messages at the same step.

    rank 0 --hello--.
    rank 1 --hello--+--> all there, their parts make the model whole --> one trainer has come
    rank 2 --hello--'            RankGate: a message --> a named step --> all wait --> RankOrders
                                 Posted of all ranks --> one Posted
    any rank ends ---------------------------------------------------> the trainer is gone

Each rank writes its step, its tokens and its loss into slots of its own in the posted arena. The
trainer's own slots are made from these, so that nothing else in the daemon knows of ranks.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import trio
from attrs import define, evolve, field

from ....membership.peer.rank_gate import Effect, HandOut, Name, PassOn, RankGate
from ....membership.peer.rank_parts import RankPartsError, writers
from ....protocol import messages as m
from ....protocol.arena import (
    LOSS_SLOT,
    MAIL_SLOT,
    NAMED_SLOT,
    NO_STEP_NAMED,
    SAMPLES_SLOT,
    SECONDS_SLOT,
    STEP_SLOT,
    TOKENS_SLOT,
    WAITING_SLOT,
    Arena,
)
from ....protocol.errors import RemoteProtocolError
from ....protocol.text import plain
from ....protocol.wakeups import Pulse

log = logging.getLogger("holdfast.bridge")

LOOK_S = 0.005  # between two looks at the ranks' steps, while a step is named
SUM_UP_S = 0.25  # between two sums over the ranks' slots


@define(eq=False)
class Process:
    """The connection of a process: a trainer of one, a rank, or at a further host a sampler.

    Attributes:
      queue: of messages to it.
      scope: around the connection.
      slow: it was disconnected because it takes no messages.
    """

    queue: trio.MemorySendChannel[m.Message]
    scope: trio.CancelScope = field(factory=trio.CancelScope, init=False)
    slow: bool = field(default=False, init=False)

    def send(self, message: m.Message) -> None:
        """Send a message, in order; end the connection of a process that takes none."""
        if self.slow:
            return
        try:
            self.queue.send_nowait(message)
        except trio.WouldBlock:
            log.warning("%s does not take its messages: disconnecting it", self)
            self.slow = True
            self.scope.cancel()
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass

    def __str__(self) -> str:
        return "the trainer"


@define(eq=False)
class Rank(Process):
    """The connection of a rank.

    Attributes:
      far: it runs on another host.
    """

    hello: m.TrainerHello = field(kw_only=True)
    far: bool = field(default=False, kw_only=True)

    def __str__(self) -> str:
        return f"rank {self.hello.part.rank}"


@define(eq=False)
class TrainerGroup:
    """The ranks of one trainer.

    Args:
      world_size: how many there are.
      arenas: returns the shared and the posted arena, or None before there are any.
      sent: takes the trainer's messages, those of all ranks as one.
      slots_changed: called when a slot of the shared arena that ranks look at has changed.

    Attributes:
      ranks: those that have come, by number.
      written: the tensors that each rank writes into the posted arena, once all are there.
      ended: why the group is over; empty while it is not.
      gathered: all ranks have come, or one has gone.
      all_gone: no rank is connected any more.
    """

    world_size: int
    _arenas: Callable[[], tuple[Arena, Arena] | None]
    _sent: Callable[[m.Message], None]
    _slots_changed: Callable[[], None] = lambda: None
    written: list[list[int]] = field(factory=list, init=False)
    ranks: dict[int, Rank] = field(factory=dict, init=False)
    ended: str = field(default="", init=False)
    gathered: trio.Event = field(factory=trio.Event, init=False)
    all_gone: trio.Event = field(factory=trio.Event, init=False)
    _one_gone: trio.Event = field(factory=trio.Event, init=False)
    _gone: set[int] = field(factory=set, init=False)
    _gate: RankGate[m.Message] = field(init=False)
    _waiting: set[int] = field(factory=set, init=False)  # ranks that wait for the daemon
    _posts: dict[int, dict[int, m.Posted]] = field(factory=dict, init=False)  # by fragment and rank
    _begun: bool = field(default=False, init=False)
    _spoilt: bool = field(default=False, init=False)  # weights, until ``Load`` is handed out
    _initial: set[int] = field(factory=set, init=False)
    _pushed_count: int = field(default=0, init=False)
    _handed_count: int = field(default=0, init=False)
    _named: Pulse = field(factory=Pulse, init=False)

    def __attrs_post_init__(self) -> None:
        self._gate = RankGate(self.world_size)
        self._waiting.update(range(self.world_size))

    @property
    def complete(self) -> bool:
        return len(self.ranks) == self.world_size

    @property
    def idle(self) -> bool:
        """All ranks have handled all messages."""
        return self._gate.idle

    def why_not(self, hello: m.TrainerHello) -> str:
        """Return why a process cannot be one of these ranks, or nothing if it can."""
        part = hello.part
        if self.ended:
            return f"the trainer's other processes have ended: {self.ended}"
        if (
            part.world_size != self.world_size
            or part.rank in self.ranks
            or part.rank >= self.world_size
        ):
            return (
                "another training process is attached to this daemon: a group of"
                f" {self.world_size}, and this is rank {part.rank} of {part.world_size}"
            )
        first = next(iter(self.ranks.values()), None)
        if first is not None and first.hello.layout != hello.layout:
            two = sorted((part.rank, first.hello.part.rank))
            return (
                f"ranks {two[0]} and {two[1]} have different models: all ranks of a peer attach the"
                " same one, and the stages of a pipeline the same whole= beside it"
            )
        if first is not None and first.hello.software != hello.software:
            return (
                f"rank {part.rank} has {hello.software} and rank {first.hello.part.rank} has"
                f" {first.hello.software}: install the same one on all hosts"
            )
        if first is not None and first.hello.script != hello.script:
            return (
                f"rank {part.rank} runs another script than rank {first.hello.part.rank}: copy the"
                " same one to all hosts"
            )
        return ""

    def missing(self) -> str:
        numbers = [str(rank) for rank in range(self.world_size) if rank not in self.ranks]
        return ", ".join(numbers)

    def came(self, rank: Rank) -> None:
        """Take note of a rank for which ``why_not`` has nothing to say."""
        self.ranks[rank.hello.part.rank] = rank
        if self.complete:
            self.gathered.set()

    def gone(self, number: int, why: str) -> None:
        """Take note that a rank is gone, which ends the group."""
        if not self.ended:
            self.ended = f"rank {number}: {why}"
            if not self._begun:  # the others wait for it
                self.reject(f"rank {number} did not stay: {why}")
        self._gone.add(number)
        self.gathered.set()
        self._one_gone.set()
        if len(self._gone) == len(self.ranks):
            self.all_gone.set()

    def reject(self, why: str) -> None:
        self.ended = self.ended or why
        for rank in self.ranks.values():
            rank.send(m.Rejected(plain(why)))

    def begin(self) -> str:
        """Tell each rank what it writes, as all are there; return why they are no trainer."""
        parts = self._parts()
        try:
            far = {number for number, rank in self.ranks.items() if rank.far}
            self.written = writers(self.ranks[0].hello.layout, parts, far)
        except RankPartsError as error:
            return str(error)
        arenas = self._arenas()
        if arenas is not None:  # what an earlier trainer left there
            arenas[0].slots[NAMED_SLOT] = NO_STEP_NAMED
            for rank in self.ranks:
                slots = arenas[1].rank_slots(rank)
                slots[STEP_SLOT:SECONDS_SLOT] = slots[SAMPLES_SLOT] = 0
                slots[LOSS_SLOT : LOSS_SLOT + 1].view(np.float64)[0] = math.nan
        self._begun = True
        for number, tensors in enumerate(self.written):
            self.ranks[number].send(m.RankWrites(tuple(tensors)))
        return ""

    def _parts(self) -> list[m.RankPart]:
        return [self.ranks[number].hello.part for number in range(self.world_size)]

    # ------------------------------------------------------------ messages

    def tell(self, message: m.Message) -> None:
        """Hand a message to all ranks at one step."""
        self._spoilt |= isinstance(message, m.Load) and message.spoilt
        self._pushed_count += 1
        self._carry_out(self._gate.push(message, self._steps()))
        arenas = self._arenas()
        if arenas is not None:
            arenas[0].slots[MAIL_SLOT] = self._pushed_count
            self._slots_changed()

    def took(self, number: int, message: m.Message) -> None:
        """Take a rank's message.

        Raises:
          RemoteProtocolError: not all ranks are there yet, or the message fits no rank.
        """
        if not self._begun:
            raise RemoteProtocolError(f"a {type(message).__name__} before all ranks have come")
        if self.ended:
            return
        match message:
            case m.RankWaits(step=step, must=must):
                self._waiting.add(number)
                self._carry_out(self._gate.waits(number, step, self._steps(), must=must))
            case m.RankTrainsOn():
                self._waiting.discard(number)
                self._carry_out(self._gate.trains_on(number, self._steps()))
            case m.Posted():
                self._posted(number, message)
            case m.InitialPosted():
                self._initial.add(number)
                if len(self._initial) == self.world_size:
                    self._initial.clear()
                    self._sent(message)
            case m.Failing(kind=m.FailureKind.NAN):
                if not self._spoilt:  # the same steps spoil all ranks
                    self._spoilt = True
                    self._sent(message)
            case _:
                self._sent(message)

    def _posted(self, number: int, message: m.Posted) -> None:
        """Take a rank's part of a contribution; the last one makes it whole."""
        fragment = message.fragment
        if fragment >= m.FRAGMENTS_MAX:
            raise RemoteProtocolError(f"a model has no fragment {fragment}")
        earlier = self._posts.get(fragment, {})
        offer = message.round, message.offer
        posts = {r: each for r, each in earlier.items() if (each.round, each.offer) == offer}
        posts[number] = message
        self._posts[fragment] = posts
        if len(posts) < self.world_size:
            return
        del self._posts[fragment]
        if self._spoilt:  # the round is offered again after ``Load``
            return
        tokens: dict[int, int] = {}
        for part in self._parts():
            trained = posts[part.rank].tokens
            tokens[part.data_rank] = max(tokens.get(part.data_rank, 0), trained)
        versions = {each.version for each in posts.values()}
        if len(versions) > 1:
            log.warning("the ranks' parts of fragment %d are of several versions", message.fragment)
        self._sent(
            evolve(
                message,
                version=min(versions),
                # At least 1: all of them have trained a step, and a round of no tokens is repeated.
                tokens=min(m.COUNT_MAX, max(1, sum(tokens.values()))),
                step=max(each.step for each in posts.values()),
                step_s=max(each.step_s for each in posts.values()),
                samples=_joined(posts.values()),
                first_batches=posts[0].first_batches,
            )
        )

    def _carry_out(self, effects: Sequence[Effect[m.Message]]) -> None:
        arenas = self._arenas()
        for effect in effects:
            match effect:
                case Name(step=step):
                    if arenas is not None:
                        arenas[0].slots[NAMED_SLOT] = NO_STEP_NAMED if step is None else step
                        self._slots_changed()
                    self._named.notify_all()
                case PassOn(rank=number):
                    self._waiting.discard(number)
                    self.ranks[number].send(m.RankPassOn())
                case HandOut(messages=messages):
                    self._handed_count += len(messages)
                    self._waiting.clear()
                    # All ranks wait here, so what they reported before has come.
                    if any(isinstance(message, m.Load) for message in messages):
                        self._spoilt = False
                    for rank in self.ranks.values():
                        rank.send(m.RankOrders(len(messages)))
                        for message in messages:
                            rank.send(message)

    def _steps(self) -> list[int]:
        """Return the steps that the ranks have reached; zeros before they have memory for them."""
        arenas = self._arenas()
        if arenas is None:
            return [0] * self.world_size
        slots = [arenas[1].rank_slots(rank)[STEP_SLOT] for rank in range(self.world_size)]
        return [min(m.COUNT_MAX, int(step)) for step in slots]

    # ------------------------------------------------------------ shared memory

    async def look_after(self) -> None:
        """Look at the ranks' steps and sum up their slots, until a rank is gone."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._look)
            await self._one_gone.wait()
            nursery.cancel_scope.cancel()

    async def _look(self) -> None:
        summed_s = -math.inf
        while True:
            if self._gate.named is None:
                with trio.move_on_after(SUM_UP_S):
                    await self._named.wait()
            else:
                await trio.sleep(LOOK_S)
                self._carry_out(self._gate.look(self._steps()))
            if trio.current_time() - summed_s >= SUM_UP_S:
                summed_s = trio.current_time()
                self._sum_up()

    def _sum_up(self) -> None:
        """Make the trainer's slots from those of its ranks."""
        arenas = self._arenas()
        if arenas is None:
            return
        posted = arenas[1]
        tokens: dict[int, int] = {}
        losses = []
        for part in self._parts():
            slots = posted.rank_slots(part.rank)
            trained = int(slots[TOKENS_SLOT])
            tokens[part.data_rank] = max(tokens.get(part.data_rank, 0), trained)
            loss = float(slots[LOSS_SLOT : LOSS_SLOT + 1].view(np.float64)[0])
            if math.isfinite(loss):
                losses.append(loss)
        posted.slots[STEP_SLOT] = min(self._steps())
        posted.slots[TOKENS_SLOT] = min(m.COUNT_MAX, sum(tokens.values()))
        posted.loss[0] = sum(losses) / len(losses) if losses else math.nan
        waits = len(self._waiting) == self.world_size
        posted.slots[WAITING_SLOT] = 1 + self._handed_count if waits else 0
        posted.seconds[:] = posted.rank_slots(0)[SECONDS_SLOT : SECONDS_SLOT + 2].view(np.float64)


def _joined(posts: Iterable[m.Posted]) -> tuple[m.RankSamples, ...]:
    """Return the samples of all data ranks; ranks of one data rank have trained the same ones."""
    joined: dict[int, m.RankSamples] = {}
    for each in (samples for post in posts for samples in post.samples):
        other = joined.setdefault(each.data_rank, each)
        joined[each.data_rank] = evolve(
            each, lost=max(each.lost, other.lost), trained=max(each.trained, other.trained)
        )
    return tuple(joined[data_rank] for data_rank in sorted(joined))
