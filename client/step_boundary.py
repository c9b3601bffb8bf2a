"""A step boundary at which something is due: messages are handled in the order in which they came,
and due rounds are posted.

``boundary.BoundaryMachine`` decides what is due at which step. The trainer waits here, and only
here: while a round that it posted runs and no overlap is left, while it is a spare, and at the step
limit, which no trainer of the run may pass. A trainer that passed it while the master was away
posts each due round at its present step.

The ranks of a trainer handle the same messages at the same steps (see ``ranks``), so that all of
what ``BoundaryMachine`` decides is the same in all.
"""

from __future__ import annotations

import os

import torch
from attrs import define, evolve, field

from ..protocol import messages as m
from ..protocol.errors import RemoteProtocolError
from .boundary import BoundaryMachine, StepTimes
from .daemon_connection import DaemonConnection
from .data.first_batches import FirstBatches
from .orders import Orders
from .quiet_step import QuietStep
from .ranks import RankWord, script_digest
from .state.inner_optimizer import InnerOptimizer
from .state.tensors import layout_of
from .state.trained_parameters import TrainedParameters


@define(eq=False)
class StepBoundary:
    """See the top of this file."""

    _connection: DaemonConnection
    _trained: TrainedParameters
    _inner_optimizer: InnerOptimizer
    _machine: BoundaryMachine
    _quiet: QuietStep
    _orders: Orders
    _first_batches: FirstBatches | None
    _word: RankWord | None = field(default=None, init=False)  # of one rank of several
    _step_times: StepTimes = field(factory=StepTimes, init=False)

    def attach(self, part: m.RankPart) -> None:
        """Introduce this trainer, and handle messages until the model is loaded."""
        connection, orders = self._connection, self._orders
        hello = m.TrainerHello(m.VERSION_MAX, os.getpid(), layout_of(orders.tensors), part)
        if part.world_size > 1:
            hello = evolve(hello, software=f"torch {torch.__version__}", script=script_digest())
        orders.send(hello)
        with torch.no_grad():
            if part.world_size > 1:
                self._word = RankWord(connection)
                self._attach_rank(self._word)
            while not self._machine.loaded:
                orders.handle(connection.receive())
        orders.restore_local()
        self._quiet.end_boundary(self._next_due_step())
        self._measure_steps()

    def _attach_rank(self, word: RankWord) -> None:
        first = self._connection.receive()
        if isinstance(first, m.Rejected):
            self._orders.handle(first)
        if not isinstance(first, m.RankWrites):
            raise RemoteProtocolError(f"the daemon sent a {type(first).__name__}")
        self._orders.writes = first.tensors
        messages = word.receive()
        while True:
            for message in messages or ():
                self._orders.handle(message)
            if self._machine.loaded:
                word.train_on()
                self._quiet.mail[0] = self._connection.received_count
                return
            messages = word.wait(0, must=True)

    @torch.no_grad()
    def cross(self) -> None:
        """Do all that is due at this step, waiting where the run requires it."""
        machine, quiet = self._machine, self._quiet
        if machine.step >= quiet.due_step:  # not at each look at the mail: 10 us a tensor
            self._trained.check()
        self._inner_optimizer.name_copies()
        quiet.begin_boundary()
        if self._word is not None:
            self._cross_in_rank(self._word)
            return
        while not machine.finished:
            message = self._connection.receive_nowait()
            if message is not None:
                self._orders.handle(message)
                continue
            if self._post_due():
                continue  # messages may have come in the meantime
            arenas = self._orders.arenas
            must_wait = machine.must_wait(arenas.overlap_steps)
            arenas.advance(wait=must_wait)
            if machine.loaded and arenas.lost:
                machine.loaded = False  # see ``Orders.handle``
                continue
            if self._announce_post():
                continue
            if not must_wait:
                break
            with quiet.waiting():
                awaited = self._connection.receive()
            self._orders.handle(awaited)
        quiet.end_boundary(self._next_due_step())

    def _cross_in_rank(self, word: RankWord) -> None:
        """Do what is due at this step as ``cross`` does, in one rank of several.

        What is done depends on the step and on messages only, never on how long a copy takes: one
        that begins at a boundary ends at the next one.
        """
        arenas, machine, quiet = self._orders.arenas, self._machine, self._quiet
        arenas.advance(wait=True)
        while not machine.finished:
            if self._announce_post() or self._post_due():
                continue
            must_wait = machine.must_wait(arenas.overlap_steps)
            arenas.advance(wait=must_wait)
            if self._announce_post():
                continue
            if not must_wait and quiet.named[0] != machine.step:
                break
            with quiet.waiting():
                messages = word.wait(machine.step, must=must_wait)
            if messages is None and not must_wait:
                break  # it was named, and is not any more
            for message in messages or ():
                self._orders.handle(message)
        if machine.finished:
            return
        word.train_on()
        self._connection.check()
        quiet.mail[0] = self._connection.received_count
        quiet.end_boundary(self._next_due_step())

    def _post_due(self) -> bool:
        """Post the fragment of one due round, and return whether there was one."""
        arenas, machine = self._orders.arenas, self._machine
        fragment = machine.next_to_post()
        if fragment is None:
            return False
        arenas.release_spent({fragment, *machine.posted_fragments})
        arenas.replicas[fragment].post()
        machine.post(fragment)
        self._inner_optimizer.mark_used()
        self._measure_steps()
        self._announce_post()
        return True

    def _announce_post(self) -> bool:
        """Send ``Posted`` for one round whose data is in the arena; return whether there was
        one.
        """
        for fragment in self._machine.unannounced_fragments():
            replica = self._orders.arenas.replicas[fragment]
            if replica.written:
                step_s = self._step_times.step_s
                posted = self._machine.announce_post(fragment, replica.version, step_s)
                if self._first_batches is not None:
                    posted = evolve(posted, first_batches=self._first_batches.digest)
                self._orders.send(posted)
                return True
        return False

    def _next_due_step(self) -> int:
        """Return the first step at which something is due even if no message comes."""
        if self._machine.finished:
            return m.COUNT_MAX
        arenas = self._orders.arenas
        if arenas.under_way:
            return self._machine.step + 1
        return self._machine.next_due_step(arenas.overlap_steps)

    def _measure_steps(self) -> None:
        self._step_times.measure(self._machine.own_step, self._quiet.stepping_s)
