"""Short runs in which somebody is lost in the middle of a reduction, each a function of its seed.

``simulate_deaths`` is the one line that reproduces one. Everything is small, so that thousands of
them are cheap: a fragment of a few chunks, three to five peers, slow lines between them, so that a
reduction is a good part of a round. A history is: everybody joins, a round, a loss at some instant of
the next one, its end, peace, a round more. In half of the histories a mean tells who is in it, so
that the witness can tell a wrong divisor from a right one.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from functools import partial

import numpy as np
import trio
from attrs import define
from numpy.typing import NDArray

from ...membership.effects import EventKind
from ...membership.ledger import Ledger
from ...membership.rounds import Round
from ...protocol.messages import Role
from ...protocol.virtual_time import run_virtually
from .swarm import Swarm
from .trainer import small_layout
from .witness import ViolationError

QUIET_S = 60.0  # after a loss: by then a round is committed, after its end: by then all is whole
FOUND_S = 60.0  # until everybody has joined and the first round is committed
INSTANT_S = 0.002  # how exactly an instant of a round is met

TOML = """
[run]
name = "deaths"
[diloco]
sync_every = 2
[membership]
contributors = 0
min_members = {min_members}
deadline_s = 3
grace_s = 1
[reduce]
codec_up = "{codec}"
codec_down = "{codec}"
chunk_bytes = 4096
"""


@define
class Deaths:
    """What one seed led to.

    Attributes:
      loss: who was lost, and when.
      repairs, reruns, aborts: that the master made until the round after the loss was committed.
    """

    seed: int
    loss: str
    committed: int
    repairs: int
    reruns: int
    aborts: int
    trace: str  # digest of all that the witness saw, with times


def simulate_deaths(seed: int) -> Deaths:
    """``lose_somebody`` in virtual time, from outside of trio; raises what it raises."""
    return run_virtually(partial(lose_somebody, seed), seed=seed)


def telling(peer: str, _round: int, count: int) -> NDArray[np.float32]:
    """Every element says whose it is: the n-th peer's are 64 + 2 to the n.

    A mean then tells who is in it; and no norm is far from the others'.
    """
    return np.full(count, 64 + 2.0 ** (int(peer[:8], 16) - 1), np.float32)


async def lose_somebody(seed: int) -> Deaths:
    """One history.

    Raises:
      ViolationError: a promise was broken, or the run did not go on.
    """
    rng = random.Random(seed)
    count = rng.choice([3, 4, 5, 5])
    layout = small_layout([rng.choice([3_000, 5_000, 9_000])], rng.randint(0, 1))
    rate = rng.choice([1e5, 4e5])
    async with trio.open_nursery() as nursery:
        swarm = Swarm(
            nursery,
            TOML.format(codec=rng.choice(["fp32", "fp32", "int8"]), min_members=max(2, count - 2)),
            seed=rng.getrandbits(32),
            layout=layout,
            step_s=0.15,
            delay_s=rng.choice([0.001, 0.01]),
            jitter_s=rng.choice([0.0, 0.005]),
            bytes_per_s=rate,
            delta=telling if rng.random() < 0.5 else None,
        )
        names = [f"p{index}" for index in range(count)]
        with_spare = rng.random() < 0.5
        for name in [*names, "s0"]:
            swarm.world.link("master", name, bytes_per_s=1e7)
            swarm.world.link(name, "master", bytes_per_s=1e7)
        await swarm.start_master()
        for name in names:
            swarm.add_peer(name)
        if with_spare:
            swarm.add_peer("s0", role=Role.SPARE)
        loss = _Loss(swarm, rng, names)
        try:
            await swarm.until(lambda: swarm.committed >= 1 and loss.all_in(), within_s=FOUND_S)
            await loss.befall()
            await loss.make_peace()
        except trio.TooSlowError as error:
            raise ViolationError(f"seed {seed}, {loss.said}: {swarm.story()}") from error
        except ViolationError as error:
            raise ViolationError(f"seed {seed}, {loss.said}: {error}") from error
        nursery.cancel_scope.cancel()
    trace = swarm.witness.trace.hexdigest()[:32]
    return Deaths(seed, loss.said, swarm.committed, *loss.cost, trace)


class _Loss:
    """Who is lost, and how, in the swarm of one history.

    Attributes:
      said: what happened, for the report.
      cost: repairs, reruns and aborts until the next round was committed.
    """

    def __init__(self, swarm: Swarm, rng: random.Random, names: list[str]) -> None:
        self.swarm = swarm
        self.rng = rng
        self.names = names  # of those that shall contribute, in the end as in the beginning
        self.said = "nothing"
        self.cost = 0, 0, 0

    @property
    def ledger(self) -> Ledger:
        assert self.swarm.master is not None
        return self.swarm.master.coordinator.conductor.ledger

    def _counts(self) -> tuple[int, int, int]:
        ledger = self.ledger
        return ledger.repair_count, ledger.rerun_count, ledger.abort_count

    def all_in(self) -> bool:
        """Everybody takes part as in the beginning."""
        peers = self.swarm.peers
        return all(self.swarm.in_sync(name) for name in peers) and all(
            peers[name].service.replica.contributing for name in self.names
        )

    async def befall(self) -> None:
        """Let it happen in the middle of a reduction.

        Returns when the next round is committed, at once if too few are left for one.
        """
        kind = self.rng.choice(list(LOSSES))
        swarm, victims = self.swarm, self.rng.sample(self.names, 2)
        self.said = f"{kind}: {' '.join(victims)}"
        await self._reduction()
        before, target = self._counts(), swarm.committed + 1
        await LOSSES[kind](self, *victims)
        self.said = f"at {trio.current_time():.3f} {self.said}"
        alive = [name for name in self.names if swarm.peers[name].alive]
        if len(alive) >= swarm.spec.membership.min_members:
            await swarm.until(lambda: swarm.committed >= target, within_s=QUIET_S)
        repairs, reruns, aborts = map(int.__sub__, self._counts(), before)
        self.cost = repairs, reruns, aborts

    async def make_peace(self) -> None:
        """End what lasts, then demand that the run is whole again."""
        swarm = self.swarm
        await trio.sleep(self.rng.uniform(0, 0.5))
        for name in sorted(swarm.peers):
            swarm.world.thaw(name)
        swarm.heal_all()
        for name in sorted(swarm.peers):
            if not swarm.peers[name].alive:
                swarm.restart(name)
        await swarm.until(self.all_in, within_s=QUIET_S)
        target = swarm.committed + 1
        await swarm.until(lambda: swarm.committed >= target, within_s=QUIET_S)
        assert swarm.master is not None
        await swarm.come_to_rest(sorted(swarm.peers), within_s=QUIET_S)
        swarm.check_final(sorted(swarm.peers))
        swarm.master.coordinator.validate()
        for event in swarm.master.coordinator.context.events:
            if event.kind is EventKind.BAD:  # nobody lies here
                raise ViolationError(event.text)

    # ------------------------------------------------------------ instants

    async def _until(self, condition: Callable[[], object]) -> None:
        """An instant; the round may as well end without it."""
        with trio.move_on_after(QUIET_S):
            while not condition():
                await trio.sleep(INSTANT_S)

    def _reducing(self) -> Round | None:
        return next(iter(self.ledger.reducing()), None)

    async def _reduction(self) -> None:
        """The master orders a reduction of everybody; nobody has heard of it yet."""
        seen = self.swarm.committed  # not one that is half over already
        if self._reducing():
            await self._until(lambda: self.swarm.committed > seen)
        await self._until(self._reducing)

    async def _somewhere(self) -> None:
        """Some instant of the reduction, as likely as any other."""
        size = 4 * sum(tensor.shape[0] for tensor in self.swarm.layout.tensors[:1])
        rate = self.swarm.world.direction("p0", "p1").bytes_per_s
        # A pair's line is the bottleneck: it carries its share of contributions, then of results.
        await trio.sleep(self.rng.uniform(0, 2.4 * size / len(self.names) / rate))

    def _holding(self, name: str) -> int:
        """How many chunks' results are at this peer."""
        for running in self.swarm.peers[name].service.reducer.running():
            return int.from_bytes(running.flush(()), "little").bit_count()
        return 0

    # ------------------------------------------------------------ losses

    async def at_once(self, name: str, _other: str) -> None:
        self.swarm.crash(name)

    async def anywhere(self, name: str, _other: str) -> None:
        await self._somewhere()
        self.swarm.crash(name)

    async def with_its_first_result(self, name: str, _other: str) -> None:
        await self._until(lambda: self._holding(name) or not self._reducing())
        self.swarm.crash(name)

    async def at_the_commit(self, name: str, _other: str) -> None:
        seen = self.swarm.committed
        await self._until(lambda: self.swarm.committed > seen)
        await trio.sleep(self.rng.uniform(0, 0.05))
        self.swarm.crash(name)

    async def when_all_but_one_have_reported(self, name: str, _other: str) -> None:
        def late() -> bool:
            round_ = self._reducing()
            return round_ is None or len(round_.running().unreported()) <= 1

        await self._until(late)
        self.swarm.crash(name)

    async def two_at_once(self, name: str, other: str) -> None:
        await self._somewhere()
        self.swarm.crash(name)
        self.swarm.crash(other)

    async def one_after_the_other(self, name: str, other: str) -> None:
        await self._somewhere()
        self.swarm.crash(name)
        await self._somewhere()
        self.swarm.crash(other)

    async def the_heir_too(self, name: str, other: str) -> None:
        """The first one's chunks go to others; one of these dies as well, on the way."""
        await self._somewhere()
        before = self.ledger.repair_count
        self.swarm.crash(name)
        await self._until(lambda: self.ledger.repair_count > before or not self._reducing())
        await trio.sleep(self.rng.uniform(0, 0.1))
        lost = self.swarm.peers[name].peer
        round_ = self._reducing()
        owners = set(round_.running().owners) - {lost} if round_ is not None else set()
        heirs = [n for n in self.names if self.swarm.peers[n].peer in owners]
        self.swarm.crash(self.rng.choice(heirs) if heirs else other)

    async def during_the_flush(self, name: str, other: str) -> None:
        await self._somewhere()
        self.swarm.crash(name)

        def flushing() -> bool:
            round_ = self._reducing()
            return round_ is None or round_.running().flushing

        await self._until(flushing)
        await trio.sleep(self.rng.uniform(0, 0.05))
        self.swarm.crash(other)

    async def cut_off_from_the_master(self, name: str, _other: str) -> None:
        await self._somewhere()
        self.swarm.world.cut(name, "master")
        if self.rng.random() < 0.5:
            self.swarm.world.partition(name, "master")

    async def cut_off_from_the_others(self, name: str, _other: str) -> None:
        await self._somewhere()
        for each in sorted(self.swarm.peers):
            if each != name:
                self.swarm.world.partition(name, each)

    async def cut_off_from_one(self, name: str, other: str) -> None:
        await self._somewhere()
        self.swarm.world.partition(name, other)

    async def their_link_breaks(self, name: str, other: str) -> None:
        await self._somewhere()
        self.swarm.world.cut(name, other)

    async def stalls(self, name: str, _other: str) -> None:
        await self._somewhere()
        self.swarm.world.freeze(name)
        if self.rng.random() < 0.5:
            await trio.sleep(self.rng.uniform(0, 6))
            self.swarm.world.thaw(name)


LOSSES: dict[str, Callable[[_Loss, str, str], Awaitable[None]]] = {
    "before the first byte": _Loss.at_once,
    "anywhere": _Loss.anywhere,
    "with its first result": _Loss.with_its_first_result,
    "at the commit": _Loss.at_the_commit,
    "when one has not reported": _Loss.when_all_but_one_have_reported,
    "two at once": _Loss.two_at_once,
    "one after the other": _Loss.one_after_the_other,
    "the heir too": _Loss.the_heir_too,
    "another one during the flush": _Loss.during_the_flush,
    "cut off from the master": _Loss.cut_off_from_the_master,
    "cut off from the others": _Loss.cut_off_from_the_others,
    "cut off from one": _Loss.cut_off_from_one,
    "their link breaks": _Loss.their_link_breaks,
    "stalls": _Loss.stalls,
}
