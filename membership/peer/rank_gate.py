"""The step at which all ranks of one trainer handle the daemon's messages: the same one for all.

A trainer of several ranks (``torchrun``) holds one model in parts. A merge at step 7 of one part
and at step 8 of another would break it. So the daemon *names* a step that no rank has passed. Every
rank that comes to a named step waits for the word, and messages are handed out only while all ranks
wait at one step:

    running ──a message──> named ──all wait at one step──> handling ──all have said what they do──┐
       ^                   │  ^                               ^                                   │
       │                   '──' a rank has missed the name:   '──they all wait, and there are ────┤
       │                        name a later one              more messages                       │
       '────────────────────────────────────────────────────────they train on────────────────────-'

Ranks take ordinary steps without a message: they write the step that they have reached into shared
memory and then read the name there; the daemon writes the name and then reads the steps. Memory
keeps no order between a write and a later read of another word, so a rank can miss a name that is
written at the same moment. It is found by its step (``look``). Nothing is broken by then, since
nothing is handed out before *all* have said that they wait: the daemon names a later step and
passes the others on. The steps of ranks on other hosts are old when they are seen, and a name is
there late: each name that was missed doubles the lead of the next one.

What a rank does with messages depends on these and on its step only. So ranks that were given the
same messages at the same steps also agree, without a word, on the steps at which they must wait for
more.

The daemon's side is ``daemon.peer.trainer.group``, a rank's is ``client.ranks``.
No clock, no I/O. The owner calls ``look`` every few milliseconds while a step is named.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Sequence
from typing import Generic, TypeVar

from attrs import define, frozen

# At a rank that stands at the name, without a word from it, before it counts as past it.
LOOKS_MIN = 2
LOOKS_MAX = 64  # likewise, on a machine so busy that ranks say late that they wait
LEAD_MAX = 256  # steps from the furthest rank to the name: those of other hosts are seen late

M = TypeVar("M")


@frozen
class Name:
    """Write this step into shared memory.

    None: no step is named.
    """

    step: int | None


@frozen
class PassOn:
    """Tell a rank, which waits only for the word, to train on."""

    rank: int


@frozen
class HandOut(Generic[M]):
    """Give these messages to every rank."""

    messages: tuple[M, ...]


Effect = Name | PassOn | HandOut[M]


class _Doing(enum.Enum):
    RUNNING = "running"
    WAITING = "waiting"
    HANDLING = "handling"


@define
class _Rank:
    """What a rank does, by its own word; a rank that has just attached waits for its first message.

    Attributes:
      step: at which it waits.
      must: it waits for a message, and all others will at this step; else only for the word.
      looks: at it since it was seen to stand at the name.
    """

    doing: _Doing = _Doing.WAITING
    step: int = 0
    must: bool = True
    looks: int = 0


class RankGate(Generic[M]):
    """See the top of this file.

    ``steps`` of all methods are the ranks' steps in shared memory, as they are at this moment.

    Args:
      rank_count: of the trainer's ranks, all of which wait for a first message at step 0.

    Attributes:
      named: the step that is named, or None.
    """

    def __init__(self, rank_count: int) -> None:
        self.named: int | None = None
        self._ranks = [_Rank() for _ in range(rank_count)]
        self._messages: deque[M] = deque()
        self._patience = LOOKS_MIN
        self._lead = 1

    @property
    def idle(self) -> bool:
        """All ranks have handled all messages."""
        return not self._messages and not any(each.doing is _Doing.HANDLING for each in self._ranks)

    def push(self, message: M, steps: Sequence[int]) -> list[Effect[M]]:
        """Hand a message to all ranks, as soon as they wait at one step."""
        self._messages.append(message)
        return self._go_on(steps)

    def waits(self, number: int, step: int, steps: Sequence[int], *, must: bool) -> list[Effect[M]]:
        """Take note that a rank waits at this step, and has handled all messages that it was given.

        A rank that must wait says so again when it is passed on.

        Args:
          must: it cannot train on without a message; False: it waits because the step is named.
        """
        self._ranks[number] = _Rank(_Doing.WAITING, step, must)
        return self._go_on(steps)

    def trains_on(self, number: int, steps: Sequence[int]) -> list[Effect[M]]:
        """Take note that a rank has handled all messages that it was given, and trains on."""
        self._ranks[number] = _Rank(_Doing.RUNNING)
        return self._go_on(steps)

    def look(self, steps: Sequence[int]) -> list[Effect[M]]:
        """Name another step if a rank has passed the named one, or has stood there for long."""
        if self.named is None:
            return []
        for rank, step in zip(self._ranks, steps, strict=True):
            if rank.doing is _Doing.RUNNING and step >= self.named:
                rank.looks += 1
                if step > self.named or rank.looks >= self._patience:
                    self._patience = min(LOOKS_MAX, 2 * self._patience)
                    if step > self.named:
                        self._lead = min(LEAD_MAX, 2 * self._lead)
                    return self._name(steps)
        return []

    def _go_on(self, steps: Sequence[int]) -> list[Effect[M]]:
        waiting = [rank.step for rank in self._ranks if rank.doing is _Doing.WAITING]
        if any(rank.doing is _Doing.HANDLING for rank in self._ranks):
            return []
        if not self._messages:
            return self._pass_on()  # the rank has seen a name that is no longer there
        if self._all_wait_at_one_step():
            return self._hand_out()
        if self.named is None or max(waiting, default=0) > self.named:
            return self._name(steps)
        return self._pass_on()

    def _all_wait_at_one_step(self) -> bool:
        waiting = all(rank.doing is _Doing.WAITING for rank in self._ranks)
        return waiting and len({rank.step for rank in self._ranks}) == 1

    def _hand_out(self) -> list[Effect[M]]:
        messages = tuple(self._messages)
        self._messages.clear()
        self._patience, self.named = LOOKS_MIN, None
        self._lead = max(1, self._lead // 2)
        for rank in self._ranks:
            rank.doing = _Doing.HANDLING
        return [Name(None), HandOut(messages)]  # first the name: a rank must not stop there again

    def _name(self, steps: Sequence[int]) -> list[Effect[M]]:
        """Name a step after the furthest one."""
        self.named = max(steps) + self._lead
        for rank in self._ranks:
            rank.looks = 0
        return [Name(self.named), *self._pass_on()]

    def _pass_on(self) -> list[Effect[M]]:
        """Let ranks train on that wait for the word only, and not at the named step."""
        effects: list[Effect[M]] = []
        for number, rank in enumerate(self._ranks):
            if rank.doing is _Doing.WAITING and not rank.must and rank.step != self.named:
                rank.doing = _Doing.RUNNING
                effects.append(PassOn(number))
        return effects
