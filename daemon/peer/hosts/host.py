"""``holdfast host``: a further machine of a peer; it runs the training command when the head says.

run                       again after a lost link, for ``patience_s``
 └── hub.run, _serve      as long as the link to the head lives
      ├── messages to the head, and changed slots of ranks
      ├── bridge.run      ranks and samplers of this host: their words go to the head
      └── _run_command    from ``HostStart`` to ``HostStop``, or to its own end
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import cast

import numpy as np
import trio
from attrs import define, evolve, field

from ....collectives.links.hub import LinkHub
from ....protocol import messages as m
from ....protocol import wire
from ....protocol.arena import (
    LOSS_SLOT,
    MAIL_SLOT,
    NAMED_SLOT,
    NO_STEP_NAMED,
)
from ....protocol.errors import PeerLostError, RemoteProtocolError
from ....protocol.network.interface import Network
from ....protocol.text import plain
from ....protocol.trust.invite import Invite
from ..trainer.bridge import QUEUE_COUNT_MAX, Caller, UnixBridge, reject
from ..trainer.failures import STOPPED
from ..trainer.group import Process, Rank
from ..trainer.host_places import fill
from ..trainer.port import TrainerEvents
from ..trainer.supervisor import TrainerSupervisor
from .boxes import BoxPiece, BoxSource, pieces_held, receive_boxes
from .site import HOST_RULES, head_of, member_info, send_messages

SLOTS_S = 0.02  # between two looks at the slots of ranks, which the head names steps by
GPUS_S = 2.0  # between two reports of GPUs


class HostBridge(UnixBridge):
    """Where the ranks of a host find a daemon: it hands on their words, and keeps their arenas.

    Args:
      say: sends a message to the head.
    """

    def __init__(self, path: Path, say: Callable[[m.Message], None], local_checkpoint: str) -> None:
        super().__init__(path)
        self._say = say
        self._local_checkpoint = local_checkpoint
        self.processes: dict[int, Process] = {}  # connections, by number
        self.hellos: dict[int, m.TrainerHello] = {}  # of all ranks of this start, gone ones, too
        self.written: dict[int, Sequence[int]] = {}
        self.opened: m.ArenaOpened | None = None
        self.opening = trio.Event()
        self._rows: dict[int, bytes] = {}  # as the head knows them
        self._numbers = itertools.count(1)

    def begin(self) -> None:
        """Forget the arenas and ranks of an earlier start."""
        self._close_files()
        self.arenas = self.opened = None
        self.opening = trio.Event()
        self.written.clear()
        self.hellos.clear()
        self._rows.clear()

    def end_all(self) -> None:
        """End all connections: the head is gone."""
        for process in self.processes.values():
            process.scope.cancel()

    # ------------------------------------------------------------ processes

    @property
    def ranks(self) -> list[int]:
        """The ranks that are here."""
        here = self.processes.values()
        return [each.hello.part.rank for each in here if isinstance(each, Rank)]

    async def _serve_alone(self, hello: m.TrainerHello, caller: Caller) -> None:
        why = "a peer of several hosts needs one process group over all of them: torchrun"
        await reject(caller.stream, why)

    async def _serve_rank(
        self, hello: m.TrainerHello, caller: Caller, nursery: trio.Nursery
    ) -> None:
        number = hello.part.rank
        if number in self.ranks:
            await reject(caller.stream, f"rank {number} has attached already")
            return
        if not self.ranks:
            self._crash, self._detached = None, trio.Event()
        self.hellos[number] = hello
        self.attached_pid, self.was_attached = hello.pid, True
        try:
            await self._relay(hello, caller, partial(Rank, hello=hello))
        finally:
            if not self.ranks:
                self.attached_pid = None
                self._detached.set()

    async def _serve_sampler(self, hello: m.DrawHello, caller: Caller) -> None:
        await self._relay(hello, caller, Process)

    async def _relay(
        self,
        hello: m.Message,
        caller: Caller,
        make: Callable[[trio.MemorySendChannel[m.Message]], Process],
    ) -> None:
        """Hand on what a process and the head say to each other, until one of them is gone."""
        number = next(self._numbers)
        sender, queue = trio.open_memory_channel[m.Message](QUEUE_COUNT_MAX)
        process = self.processes[number] = make(sender)
        self._took(number, hello)
        why = ""
        try:
            take = partial(self._took, number)
            why = await self._converse(caller, process, queue, take, counts=False)
        finally:
            del self.processes[number]
            self._say(m.ProcessGone(number, why))

    def _took(self, number: int, message: m.Message) -> None:
        self.say_slots()
        self._say(m.ProcessSays(number, wire.encode(message)))

    def tell_process(self, number: int, message: m.Message) -> None:
        """Hand a message of the head to a process."""
        process = self.processes.get(number)
        if process is None:
            return
        if isinstance(process, Rank) and isinstance(message, m.RankWrites):
            self.written[process.hello.part.rank] = message.tensors
        elif isinstance(message, m.ArenaOpened):
            message = evolve(
                message, local_checkpoint=message.local_checkpoint and self._local_checkpoint
            )
            if self.opened is None:
                self._open(message)
        process.send(message)

    def _open(self, message: m.ArenaOpened) -> None:
        _, posted = self.open_arenas(message.sizes)
        for number in range(m.RANKS_MAX):
            slots = posted.rank_slots(number)
            slots[LOSS_SLOT : LOSS_SLOT + 1].view(np.float64)[0] = math.nan
        self.opened = message
        self.opening.set()

    def end_process(self, number: int) -> None:
        """End a connection once it has taken its messages."""
        if (process := self.processes.get(number)) is not None:
            process.queue.close()

    # ------------------------------------------------------------ slots

    def say_slots(self) -> None:
        """Tell the head the slots of ranks that have changed."""
        if self.arenas is None:
            return
        changed = []
        for number in self.ranks:
            row = self.arenas[1].rank_slots(number).tobytes()
            if row != self._rows.get(number):
                self._rows[number] = row
                changed.append(m.RankSlots(number, row))
        if changed:
            self._say(m.SlotsChanged(tuple(changed)))

    def take_slots(self, message: m.HeadSlots) -> None:
        if self.arenas is not None:
            slots = self.arenas[0].slots
            slots[NAMED_SLOT] = NO_STEP_NAMED if message.named == m.COUNT_MAX else message.named
            slots[MAIL_SLOT] = message.mail

    # ------------------------------------------------------------ boxes

    def pieces(self, fragment: int, rank: int | None = None) -> tuple[BoxPiece, ...]:
        """Return what this host's ranks hold of a fragment, or what one of them writes."""
        assert self.opened is not None
        tensors = self.opened.fragments[fragment]
        if rank is None:
            return pieces_held(self.hellos.values(), tensors)
        hellos = [self.hellos[rank]] if rank in self.hellos else []
        return pieces_held(hellos, tensors, self.written.get(rank, ()))


@define(eq=False)
class BoxPulls:
    """Copies a host's boxes from the head into its shared arena, a version in the last one's place.

    Args:
      head: its peer id.
      say: sends a message to the head.
    """

    _bridge: HostBridge
    _hub: LinkHub
    _head: str
    _say: Callable[[m.Message], None]
    _numbers: itertools.count[int] = field(factory=lambda: itertools.count(1), init=False)
    # By fragment: the transfer, and its scope.
    _under_way: dict[int, tuple[int, trio.CancelScope]] = field(factory=dict, init=False)
    _writing: trio.Lock = field(factory=trio.Lock, init=False)

    async def pull(self, message: m.BoxesReady) -> None:
        """Copy the boxes of a version; a version of the same fragment that is under way ends."""
        bridge, fragment, transfer = self._bridge, message.fragment, next(self._numbers)
        if (earlier := self._under_way.get(fragment)) is not None:
            earlier[1].cancel()
        with trio.CancelScope() as scope:
            self._under_way[fragment] = (transfer, scope)
            await bridge.opening.wait()
            assert bridge.arenas is not None
            shared, pieces = bridge.arenas[0], bridge.pieces(fragment)
            wanted = m.BoxesWanted(transfer, fragment, version=message.version)
            async with self._writing:  # a pull that was ended has left the arena
                with shared.writing(fragment, message.version):
                    if pieces:
                        where = self._hub, self._head, shared
                        await receive_boxes(*where, pieces, wanted, self._say)
            self._say(m.BoxesTaken(message.start, fragment, message.version))
        if self._under_way.get(fragment) == (transfer, scope):
            del self._under_way[fragment]

    def end(self, transfer: int | None = None) -> None:
        """End a transfer, or all: what a pull has written is whole or nothing."""
        for number, scope in self._under_way.values():
            if transfer in (None, number):
                scope.cancel()


@define(eq=False)
class FurtherHost:
    """See the top of this file.

    Args:
      me: this host's id among those of the site.
      make_bridge: makes the bridge, which sends messages to the head.
      command: the training command, with its places.
      make_supervisor: makes the supervisor of a command, for a member, in front of the bridge.
      tell: takes sentences for the operator.
      gpus: returns how many GPUs are healthy here, and how many there are.
      last_error: returns the error that the command's output ends with; empty if there is none.

    Attributes:
      finished: the training command ended with the run.
    """

    me: str
    name: str
    site: Invite
    network: Network
    make_bridge: Callable[[Callable[[m.Message], None]], HostBridge]
    make_supervisor: Callable[[Sequence[str], str, str, HostBridge], TrainerSupervisor]
    command: Sequence[str]
    tell: Callable[[str], None]
    gpus: Callable[[], tuple[int, int]] = lambda: (0, 0)
    last_error: Callable[[], str] = str
    finished: bool = field(default=False, init=False)
    linked: bool = field(default=False, init=False)
    bridge: HostBridge = field(init=False)
    _hub: LinkHub = field(init=False)
    _queue: trio.MemorySendChannel[m.Message] | None = field(default=None, init=False)
    _pulls: BoxPulls = field(init=False)
    _nursery: trio.Nursery = field(init=False)
    _supervisor: TrainerSupervisor | None = field(default=None, init=False)
    _start: m.HostStart | None = field(default=None, init=False)  # that is wanted
    _command_ended: trio.Event = field(factory=trio.Event, init=False)

    def __attrs_post_init__(self) -> None:
        self.bridge = self.make_bridge(self._say)
        self._hub = LinkHub(self.network, self.me, on_message=self._on_message, rules=HOST_RULES)
        self._pulls = BoxPulls(self.bridge, self._hub, self.head, self._say)

    def _say(self, message: m.Message) -> None:
        if self._queue is not None:
            self._queue.send_nowait(message)

    @property
    def head(self) -> str:
        return head_of(self.site)

    async def run_link(self, link_wait_s: float) -> str:
        """Be the head's host as long as one link lives; return why it ended, or never was."""
        members = (
            member_info(self.head, "", 0, tuple(map(str, self.site.addresses))),
            member_info(self.me, self.name, 1),
        )
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            await nursery.start(self._hub.run)
            self._hub.set_members(members)
            try:
                link = await self._hub.link(self.head, link_wait_s)
            except PeerLostError as error:
                nursery.cancel_scope.cancel()
                return error.reason
            self.linked = True
            self._queue, to_send = trio.open_memory_channel[m.Message](math.inf)
            try:
                nursery.start_soon(send_messages, link, to_send)
                # What ranks and samplers say goes to the head's events.
                nursery.start_soon(self.bridge.run, cast("TrainerEvents", None))
                nursery.start_soon(self._look)
                await link.lost.wait()
            finally:
                self._queue = None
                self.bridge.end_all()
                if self._supervisor is not None:
                    with trio.CancelScope(shield=True):
                        await self._supervisor.stop()
            nursery.cancel_scope.cancel()
        return link.reason

    async def _look(self) -> None:
        """Report the GPUs, and the slots of ranks, whenever they have changed."""
        gpus, looked_s = None, -math.inf
        while True:
            if trio.current_time() >= looked_s + GPUS_S:
                looked_s = trio.current_time()
                if (now := await self.network.run_sync(self.gpus)) != gpus:
                    gpus = now
                    self._say(m.HostHello(self.name, *gpus))
            self.bridge.say_slots()
            await trio.sleep(SLOTS_S)

    # ------------------------------------------------------------ what the head says

    async def _on_message(self, _peer: str, message: m.Message) -> None:
        match message:
            case m.HostStart():
                self._nursery.start_soon(self._run_command, message)
            case m.HostStop():
                self._stop(message)
            case m.ProcessSays(process=number, body=body):
                self.bridge.tell_process(number, wire.decode(body))
            case m.ProcessGone(process=number):
                self.bridge.end_process(number)
            case m.HeadSlots():
                self.bridge.take_slots(message)
            case m.BoxesReady(start=start):
                if self._start is not None and self._start.start == start:
                    self._nursery.start_soon(self._pulls.pull, message)
            case m.BoxesWanted():
                self._nursery.start_soon(self._send_boxes, message)
            case m.BoxesGone(transfer=transfer):
                self._pulls.end(transfer)
            case _:
                raise RemoteProtocolError(f"the head sent a {type(message).__name__}")

    def _stop(self, message: m.HostStop) -> None:
        start = self._start
        if start is None or start.start != message.start:
            return  # it has ended here
        self.finished = message.finished
        if not message.finished:
            self._start = None
            if self._supervisor is not None:
                self._nursery.start_soon(self._supervisor.stop)

    async def _send_boxes(self, wanted: m.BoxesWanted) -> None:
        bridge = self.bridge
        link = self._hub.links.get(self.head)
        if bridge.arenas is None or link is None:
            return
        pieces = bridge.pieces(wanted.fragment, wanted.rank)
        source = BoxSource(bridge.arenas[1], wanted.fragment, pieces, wanted.transfer, None)
        with suppress(PeerLostError):
            await link.send_from(source)

    async def _run_command(self, start: m.HostStart) -> None:
        """Run the training command once, and tell the head how it ended."""
        self._start, self.finished = start, False
        while self._supervisor is not None:
            await self._command_ended.wait()
        if self._start is not start:  # it was ended, or another one was asked for
            self._say(m.HostEnded(start.start, m.FailureKind.CRASH, STOPPED))
            return
        self._command_ended = trio.Event()
        self.bridge.begin()
        command = fill(self.command, start.host, start.hosts, start.head)
        self._supervisor = self.make_supervisor(command, start.member, start.start, self.bridge)
        self.tell(f"the training command starts here: host {start.host} of {start.hosts}")
        try:
            failure = await self._supervisor.run_once()
        finally:
            self._supervisor = None
            self._pulls.end()
            self._command_ended.set()
        if failure is None:
            self._say(m.HostEnded(start.start, m.FailureKind.CRASH, ""))
        else:
            error = self.last_error()
            reason = plain(f"{failure.reason}: {error}" if error else failure.reason)
            self.tell(f"the training command ended: {reason}")
            self._say(m.HostEnded(start.start, failure.kind, reason))
