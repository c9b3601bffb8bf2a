"""A trainer of ranks on two virtual hosts: a peer of several hosts in a swarm.

The head and the further host run production code (``daemon.peer.hosts``), with the bridges and the
group of ranks; ranks are tasks that follow the hook's protocol, each with half of every tensor.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import numpy as np
import trio
from trio.testing import memory_stream_pair

from ..client.boundary import BoundaryMachine
from ..daemon.fragment_layout import fragments_of
from ..daemon.peer.hosts.boxes import pieces_of
from ..daemon.peer.hosts.head import Head
from ..daemon.peer.hosts.host import FurtherHost, HostBridge
from ..daemon.peer.hosts.site import site_id
from ..daemon.peer.trainer.bridge import Caller, UnixBridge
from ..daemon.peer.trainer.failures import STOPPED, Failure
from ..daemon.peer.trainer.host_places import HostPlaces
from ..daemon.peer.trainer.port import TrainerEvents
from ..membership.peer.rank_parts import box_of
from ..protocol import messages as m
from ..protocol.addresses import Address
from ..protocol.arena import (
    NAMED_SLOT,
    NOTHING_WHOLE,
    STEP_SLOT,
    TOKENS_SLOT,
    Arena,
    NotWholeError,
    arena_bytes,
)
from ..protocol.errors import RemoteProtocolError
from ..protocol.network.stream import MessageStream
from ..protocol.trust.invite import Invite
from .drifting_trainer import SimTrainer
from .memory_network import MemoryNetwork
from .witness import ViolationError

SITE_PORT = 29801
COMMAND = ("train", "{host}", "{hosts}", "{head}")
HEAD_RANKS = 2  # so that a head that is left alone has ranks, too
HOST_BACK_S = 3.0  # from a further host's crash to its return


class _Connection:
    """Stands for the Unix socket of a rank."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def close(self) -> None:
        self.stream.send_stream.close()
        self.stream.receive_stream.close()


class _InMemory(UnixBridge):
    """A bridge whose ranks are tasks of this process."""

    _tasks: trio.Nursery | None = None
    _own_events: TrainerEvents

    async def run(self, events: TrainerEvents) -> None:
        self._own_events = events
        async with trio.open_nursery() as nursery:
            self._tasks = nursery
            self.listening.set()
            await trio.sleep_forever()

    def open_arenas(self, sizes: Sequence[m.FragmentSize]) -> tuple[Arena, Arena]:
        buffers = bytearray(arena_bytes(sizes)), bytearray(arena_bytes(sizes))
        self.arenas = Arena(buffers[0], sizes), Arena(buffers[1], sizes)
        self.arenas[0].slots[NAMED_SLOT] = 2**64 - 1
        return self.arenas

    def connect(self) -> MessageStream:
        """Return a rank's end of a new connection."""
        assert self._tasks is not None
        ours, theirs = memory_stream_pair()
        connection = cast("Any", _Connection(ours))
        caller = Caller(MessageStream(ours), connection, self._own_events)
        self._tasks.start_soon(self.serve, caller, self._tasks)
        return MessageStream(theirs)


class _FurtherBridge(_InMemory, HostBridge):
    pass


class _Posts:
    """The events of a trainer, of which the witness sees the posts."""

    def __init__(self, trainer: HostedTrainer, events: TrainerEvents) -> None:
        self._trainer, self._events = trainer, events

    def __getattr__(self, name: str) -> Any:
        return getattr(self._events, name)

    def trainer_sent(self, message: m.Message) -> None:
        if isinstance(message, m.Posted):
            self._trainer.check_posted(message)
        self._events.trainer_sent(message)


class _Rank:
    """One rank: half of every tensor, by the hook's rules."""

    def __init__(self, trainer: HostedTrainer, bridge: _InMemory, number: int, count: int) -> None:
        self._trainer, self._bridge, self._number = trainer, bridge, number
        layout, boxes = trainer.layout, []
        for spec in layout.tensors:
            (length,) = spec.shape
            cuts = [length * each // count for each in range(count + 1)]
            boxes.append(m.TensorBox((cuts[number],), (cuts[number + 1] - cuts[number],)))
        self._part = m.RankPart(number, count, number, tuple(boxes))
        self._machine = BoundaryMachine(by_steps=True, data_rank=number)
        self._opened: m.ArenaOpened | None = None
        self._written: Sequence[int] = ()
        self._versions: dict[int, int] = {}

    async def run(self) -> None:
        """Train until the run is finished; raises OSError when the daemon is gone."""
        self._stream = self._bridge.connect()
        try:
            await self._stream.send(
                m.TrainerHello(m.VERSION_MAX, 1, self._trainer.layout, self._part)
            )
            await self._train()
        except (trio.EndOfChannel, trio.BrokenResourceError, trio.ClosedResourceError) as error:
            raise OSError("the daemon is gone") from error
        finally:
            with trio.CancelScope(shield=True):
                await self._stream.aclose()

    async def _train(self) -> None:
        first = await self._stream.receive()
        if not isinstance(first, m.RankWrites):
            raise OSError(f"rejected: {first}")
        self._written = first.tensors
        for message in await self._word():
            await self._handle(message)
        while not self._machine.loaded:
            for message in await self._wait(must=True):
                await self._handle(message)
        await self._stream.send(m.RankTrainsOn())
        machine = self._machine
        while not machine.finished:
            await trio.sleep(math.inf if self._trainer.stuck else self._step_s())
            machine.step += 1
            machine.tokens += self._trainer.tokens_per_step
            self._show_step()
            await self._cross()

    def _step_s(self) -> float:
        return self._trainer.step_s * self._trainer.chance.uniform(0.5, 1.5)

    def _show_step(self) -> None:
        assert self._bridge.arenas is not None
        slots = self._bridge.arenas[1].rank_slots(self._number)
        slots[STEP_SLOT], slots[TOKENS_SLOT] = self._machine.step, self._machine.tokens

    async def _cross(self) -> None:
        assert self._bridge.arenas is not None
        assert self._opened is not None
        shared, machine = self._bridge.arenas[0], self._machine
        handled = False
        while not machine.finished:
            fragment = machine.next_to_post()
            if fragment is not None:
                await self._post(fragment)
                continue
            must = machine.must_wait(self._opened.overlap_steps)
            if not must and int(shared.slots[NAMED_SLOT]) != machine.step:
                break
            messages = await self._wait(must=must)
            handled = bool(messages)
            for message in messages:
                await self._handle(message)
            if not messages and not must:
                break
        if not machine.finished and handled:
            await self._stream.send(m.RankTrainsOn())

    async def _wait(self, *, must: bool) -> Sequence[m.Message]:
        await self._stream.send(m.RankWaits(self._machine.step, must))
        return await self._word()

    async def _word(self) -> Sequence[m.Message]:
        match await self._stream.receive():
            case m.RankPassOn():
                return ()
            case m.RankOrders(count=count):
                return [await self._stream.receive() for _ in range(count)]
            case other:
                raise OSError(f"rejected: {other}")

    async def _handle(self, message: m.Message) -> None:
        machine = self._machine
        match message:
            case m.ArenaOpened():
                self._opened = message
            case m.PostInitial():
                for fragment in range(len(self._trainer.fragments)):
                    self._write(fragment, self._trainer.initial(fragment), 0)
                await self._stream.send(m.InitialPosted())
            case m.Load():
                machine.move_to(message.step, message.step_limit)
                for fragment in range(len(self._trainer.fragments)):
                    self._check_boxes(fragment)
                machine.load()
                machine.finished = message.finished
                self._show_step()
            case m.ExtendStepLimit():
                machine.extend_limit(message.step_limit)
            case m.SetRole():
                machine.contributing = message.contributing
            case m.RoundOpened():
                machine.open_round(message)
                self._versions[message.fragment] = message.version
            case m.RoundEnded():
                machine.end_round(message)
                if message.committed:
                    self._check_boxes(message.fragment, message.version)
                self._show_step()
            case m.Finished():
                machine.finished = True
            case m.Rejected():
                raise OSError("rejected")

    async def _post(self, fragment: int) -> None:
        self._machine.post(fragment)
        posted = self._machine.announce_post(
            fragment, self._versions[fragment], self._trainer.step_s
        )
        values = self._trainer.update(fragment, posted.round)
        self._write(fragment, values, posted.step)
        await self._stream.send(posted)

    def _write(self, fragment: int, values: Any, counters: int) -> None:
        """Write this rank's part of a fragment into the posted arena."""
        assert self._bridge.arenas is not None
        whole = Arena(bytearray(arena_bytes(self._trainer.sizes)), self._trainer.sizes)
        whole.values(fragment)[:] = values
        whole.counters(fragment)[:] = counters
        for piece in self._pieces(fragment, self._written):
            piece.of(self._bridge.arenas[1], fragment)[...] = piece.of(whole, fragment)

    def _pieces(self, fragment: int, named: Sequence[int] | None = None) -> Any:
        layout, tensors = self._trainer.layout, self._trainer.fragments[fragment].tensors
        chosen = tensors if named is None else [each for each in tensors if each in named]
        held = {index: [box_of(self._part, layout, index)] for index in chosen}
        return pieces_of(layout, tensors, held)

    def _check_boxes(self, fragment: int, least: int | None = None) -> None:
        """Check that this rank reads what the head's daemon holds."""
        assert self._bridge.arenas is not None
        here, there = self._bridge.arenas[0], self._trainer.shared
        try:
            version = here.read_once(fragment, lambda: None)
        except NotWholeError:
            if there.version(fragment) != NOTHING_WHOLE:
                raise ViolationError(f"rank {self._number} has nothing of {fragment}") from None
            return  # it is fetched from other peers, and ``Load`` follows
        if version is None:
            return  # a later version is being written: the hook waits for it
        if least is not None and version < least:
            raise ViolationError(f"rank {self._number} reads version {version} for {least}")
        if version == there.version(fragment):
            for piece in self._pieces(fragment):
                if not np.array_equal(piece.of(here, fragment), piece.of(there, fragment)):
                    raise ViolationError(f"rank {self._number} reads other bits of {fragment}")


class _Command:
    """The training command at one host: its ranks, to the end of one of them."""

    def __init__(self, ranks: Sequence[_Rank]) -> None:
        self._ranks = ranks
        self._scope = trio.CancelScope()
        self.ended = trio.Event()

    async def run_once(self) -> Failure | None:
        failed: list[str] = []

        async def run(rank: _Rank) -> None:
            try:
                await rank.run()
            except OSError as error:
                failed.append(str(error))
                self._scope.cancel()

        try:
            with self._scope:
                async with trio.open_nursery() as nursery:
                    for rank in self._ranks:
                        nursery.start_soon(run, rank)
        finally:
            self.ended.set()
        if self._scope.cancelled_caught or failed:
            return Failure(m.FailureKind.CRASH, next(iter(failed), STOPPED))
        return None

    def fail(self, *_why: object) -> None:
        self._scope.cancel()

    async def stop(self) -> None:
        self.fail()
        await self.ended.wait()


class HostedTrainer(SimTrainer):
    """A ``TrainerPort``: two ranks at the head, one at a further host that comes and goes.

    Args (beside those of ``SimTrainer``):
      swarm: in whose world the further host is called NAME+; until its faults end, faults of that
        host come by chance.
      network: the peer's own.
    """

    def __init__(self, *args: Any, swarm: Any, network: MemoryNetwork, **how: Any) -> None:
        super().__init__(*args, **how)
        self._swarm, self._world, self._network = swarm, swarm.world, network
        self.further = f"{network.name}+"
        self.fragments = fragments_of(self.layout, swarm.spec.diloco)
        self.sizes = tuple(
            m.FragmentSize(each.value_count, each.momentum_count, each.counter_count)
            for each in self.fragments
        )
        self.chance = random.Random(int(self.peer[:8], 16))
        self.bridge = _InMemory(Path("unused"), self.end)
        self.places = HostPlaces(
            2, 1, COMMAND, self.peer, network.name, lambda _line: None, lambda: None
        )
        self._command: _Command | None = None
        self._host_command: _Command | None = None
        self._host_scope = trio.CancelScope()
        self.starts = 0

    @property
    def shared(self) -> Arena:
        assert self.bridge.arenas is not None
        return self.bridge.arenas[0]

    # ------------------------------------------------------------ TrainerPort

    def open_arenas(self, sizes: Sequence[m.FragmentSize]) -> tuple[Arena, Arena]:
        self._shared, self._posted = self.bridge.open_arenas(sizes)
        return self._shared, self._posted

    def tell(self, message: m.Message) -> None:
        self.bridge.tell(message)

    def samples(self) -> dict[int, int]:
        return {}

    async def run(self, events: TrainerEvents) -> None:
        self._events = events
        posts = cast("TrainerEvents", _Posts(self, events))
        head = Head(
            self.peer,
            self._network.name,
            self._network,
            cast("Any", None),  # no newcomers in memory: a host is known by its name
            "",
            self.bridge,
            self.places,
            lambda: posts,
        )
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.bridge.run, posts)
            await nursery.start(head.run, [Address(self._network.name, SITE_PORT)])
            nursery.start_soon(self._keep_host)
            nursery.start_soon(self._harm)
            await self._keep_command()
            await trio.sleep_forever()

    # ------------------------------------------------------------ the command, and its faults

    async def _keep_command(self) -> None:
        while not self.finished:
            self.stuck = False
            await self.places.enough()
            words = self.places.filled(COMMAND)
            self.starts += 1
            count = HEAD_RANKS + int(words[2]) - 1
            ranks = [_Rank(self, self.bridge, each, count) for each in range(HEAD_RANKS)]
            self._command = command = _Command(ranks)
            self.places.fail = command.fail
            self.places.start(str(self.starts))
            async with trio.open_nursery() as nursery:

                async def renew(command: _Command = command) -> None:
                    await self.places.change()
                    command.fail()

                nursery.start_soon(renew)
                failure = await command.run_once()
                nursery.cancel_scope.cancel()
            await self.places.stop(finished=failure is None)
            self.finished = failure is None
            if not self.finished:
                await self._recover()

    def crash(self, failed: m.TrainerFailed | None = None) -> None:
        self._failed, self._retry, self.stuck = failed, trio.Event(), False
        if self._command is not None:
            self._command.fail()

    def spoil(self) -> None:
        """Report a loss that is not finite; ranks here have none."""

    def crash_host(self) -> None:
        """Cut the further host's power; it comes back soon."""
        if self._world.is_alive(self.further):
            self._world.crash(self.further)
            self._host_scope.cancel()

    async def _harm(self) -> None:
        """Let something of the further host fail, again and again, until the swarm is at peace."""
        mean_s = self._swarm.host_harm_s
        while math.isfinite(mean_s):
            await trio.sleep(self.chance.expovariate(1 / mean_s))
            if self._swarm.at_peace:
                return
            match self.chance.choice(("host", "line", "ranks")):
                case "host":
                    self.crash_host()
                case "line" if self._world.is_alive(self.further):
                    self._world.cut(self._network.name, self.further)
                case "ranks":
                    self.crash_host_command()

    def crash_host_command(self) -> None:
        """End the ranks at the further host."""
        if self._host_command is not None:
            self._host_command.fail()

    async def _keep_host(self) -> None:
        identity = f"{self.chance.getrandbits(128):032x}"
        site = Invite(
            site_id(self.peer),
            (Address(self._network.name, SITE_PORT),),
            "0" * 64,
            "x",
            m.Role.CONTRIBUTOR,
            m.COUNT_MAX,
        )
        try:
            while True:
                network = self._world.host(self.further, identity)
                host = FurtherHost(
                    identity,
                    self.further,
                    site,
                    network,
                    lambda say: _FurtherBridge(Path("unused"), say, ""),
                    self._make_command,
                    COMMAND,
                    lambda _line: None,
                )
                with trio.CancelScope() as self._host_scope:
                    await host.run_link(10.0)
                with suppress(RemoteProtocolError):
                    if self._world.is_alive(self.further):
                        self._world.crash(self.further)
                await trio.sleep(self.chance.uniform(0, HOST_BACK_S))
        finally:
            if self._world.is_alive(self.further):
                self._world.crash(self.further)

    def _make_command(
        self, command: Sequence[str], _member: str, _start: str, bridge: HostBridge
    ) -> Any:
        number, count = HEAD_RANKS + int(command[1]) - 1, HEAD_RANKS + int(command[2]) - 1
        self._host_command = _Command([_Rank(self, cast("_InMemory", bridge), number, count)])
        return self._host_command

    # ------------------------------------------------------------ what it learns

    def initial(self, fragment: int) -> Any:
        return np.arange(self.sizes[fragment].value_count, dtype=np.float32)

    def update(self, fragment: int, round_: int) -> Any:
        """Return the whole update of a fragment, of which each rank writes its part."""
        count = self.sizes[fragment].value_count
        if self.delta is not None:
            return self.delta(self.peer, round_, count)
        rng = np.random.default_rng([int(self.peer[:8], 16), fragment, round_])
        return rng.standard_normal(count).astype(np.float32)

    def check_posted(self, message: m.Posted) -> None:
        """Check that all ranks' parts have come before the daemon is told of them."""
        assert self._posted is not None
        values = self._posted.values(message.fragment)
        if not np.array_equal(values, self.update(message.fragment, message.round)):
            raise ViolationError(f"{self.peer[:8]} posts round {message.round} without all parts")
        self.witness.saw_contribution(self.peer, message.round, values)
