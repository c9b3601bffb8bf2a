"""A peer's leases at work: its trainer's samplers draw here, and the master is asked in time.

``LeaseBook`` decides; this part carries messages, waits, and looks at how far the trainer is.

    sampler --Draw--> draw: from the pool, or wait --Drawn-->
                        '--LeasesWanted--> master --Leased--> leased: wakes those that wait
"""

from __future__ import annotations

import trio
from attrs import define, field

from ...membership.shared.lease_ranges import order_key
from ...protocol import messages as m
from ...protocol.wakeups import Pulse
from .peer_config import PeerContext

LOOK_S = 0.25  # between two looks at how far the trainer is
# The trainer goes on for this many deadlines without a master: it does so for one by itself, and
# then for the steps of a round.
AHEAD_DEADLINES = 2.0
# A trainer that is no contributor gets samples without a lease after this time. One that has just
# attached becomes a contributor in less.
PRACTICE_S = 2.0


@define(eq=False, slots=False)
class DataService:
    """The peer's side of the samplers of its trainer."""

    _peer: PeerContext
    _changed: Pulse = field(factory=Pulse, init=False)

    async def run(self) -> None:
        while True:
            await trio.sleep(LOOK_S)
            if self._peer.replica.leases.length:
                self._look()

    def _look(self) -> None:
        # A trainer is barred from rounds while it trains on void samples.
        replica = self._peer.replica
        barred = replica.leases.barred(self._peer.trainer.samples())
        self._peer.perform(replica.trainer.bar(barred=barred))
        self._want()

    # ------------------------------------------------------------ the master

    def session_begins(self) -> None:
        """Tell the master what is held, and ask for what is wanted."""
        claim = self._peer.replica.leases.claim()
        if claim is not None:
            self._peer.tell(claim)
        self._want()

    def leased(self, message: m.Leased) -> None:
        self._peer.replica.leases.leased(message)
        self._changed.notify_all()
        if self._peer.replica.leases.length:
            self._look()

    def _want(self) -> None:
        spec, trainer = self._peer.spec.known, self._peer.replica.trainer
        if spec is None or trainer.away or not trainer.attached or trainer.finished:
            return
        ahead_s = AHEAD_DEADLINES * spec.membership.deadline_s
        wanted = self._peer.replica.leases.want(trio.current_time(), ahead_s)
        if wanted is not None:
            self._peer.tell(wanted)

    # ------------------------------------------------------------ the trainer

    def begin(self, hello: m.DrawHello) -> m.Drawn | m.Rejected:
        """Answer a sampler's first message, with the key of the samples' order."""
        book = self._peer.replica.leases
        if not book.begin(hello.length, hello.ahead):
            return m.Rejected(
                f"the trainer's samplers disagree: one has {book.length} samples, "
                f"another one {hello.length}"
            )
        self._want()
        seed = self._peer.spec.value.data.seed
        return self._refused(hello) or m.Drawn((), order_key(self._peer.config.run_id, seed))

    def _refused(self, hello: m.DrawHello) -> m.Rejected | None:
        run_length = self._peer.replica.leases.run_length
        if run_length in (0, hello.length):
            return None
        return m.Rejected(
            f"the run's data set has {run_length} samples, and this trainer's {hello.length}: all "
            "trainers of a run need the same one"
        )

    async def draw(self, hello: m.DrawHello, message: m.Draw) -> m.Drawn | m.Rejected:
        """Return a data rank's next samples; wait until there are some."""
        book, trainer = self._peer.replica.leases, self._peer.replica.trainer
        idle_since_s = trio.current_time()
        while True:
            if (refused := self._refused(hello)) is not None:
                return refused
            now_s = trio.current_time()
            if trainer.training and not trainer.finished:
                idle_since_s = now_s
            leased = not trainer.finished and now_s - idle_since_s < PRACTICE_S
            ranges = book.draw(hello.data_rank, message.index, message.count, leased=leased)
            self._want()
            if ranges:
                return m.Drawn(tuple(ranges))
            await self._wait()

    async def _wait(self) -> None:
        """Wait for leases, or a moment: the peer's role may change meanwhile."""
        with trio.move_on_after(LOOK_S):
            await self._changed.wait()
