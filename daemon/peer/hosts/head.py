"""The head of a peer of several hosts: its hosts' ranks are ranks of its trainer.

    run
     ├── network.serve        newcomers with the string; links of hosts
     ├── hub.run
     ├── _pump                the daemon's messages to the trainer, in order
     └── _serve_host          per host, as long as its link lives
          ├── messages to it
          └── bridge.serve    per process: its words, each after the boxes that it speaks of

A message that announces a version (``RoundEnded``, ``Load``, ``Finished``) is told to the ranks
once all hosts have their boxes of it; training goes on meanwhile.
"""

from __future__ import annotations

import itertools
import logging
import math
import secrets
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import numpy as np
import trio

from .... import __version__
from ....collectives.links.hub import LinkHub
from ....collectives.links.link import Link
from ....protocol import messages as m
from ....protocol import wire
from ....protocol.addresses import Address, host_of
from ....protocol.arena import MAIL_SLOT, NAMED_SLOT, NotWholeError, arena_bytes
from ....protocol.enrolment import Refusal, answer_newcomer
from ....protocol.errors import PeerLostError, RemoteProtocolError
from ....protocol.machine_check import Checkups
from ....protocol.network.interface import Channel, Network
from ....protocol.trust.authority import Authority, Party
from ..trainer.bridge import Caller, UnixBridge
from ..trainer.group import TrainerGroup
from ..trainer.host_places import HostPlaces
from ..trainer.port import TrainerEvents
from .boxes import BoxSource, pieces_held, receive_boxes
from .host_peer import FarProcess, HostPeer
from .site import HOST_RULES, member_info, send_messages

log = logging.getLogger("holdfast.hosts")

SLOW_S = 15.0  # for a host's part of a fragment; then the operator is told
RENEW_S = 6 * 3600.0  # a certificate lasts for a day
LOOK_S = 0.01  # between two looks at ranks that read a fragment, or at one that is being written


class Head:
    """See the top of this file; a ``FurtherRanks`` of the bridge.

    Args:
      me: this peer's id.
      network: of head and hosts.
      token: what the string shows.
      events: takes what the trainer's samplers ask.
      renew: gives the head another certificate.

    Attributes:
      places: which hosts take part.
    """

    def __init__(
        self,
        me: str,
        name: str,
        network: Network,
        authority: Authority,
        token: str,
        bridge: UnixBridge,
        places: HostPlaces,
        events: Callable[[], TrainerEvents],
        renew: Callable[[], None] = lambda: None,
    ) -> None:
        self.places = places
        self._me, self._name = me, name
        self._network, self._authority, self._token = network, authority, token
        self._bridge, self._events, self._renew = bridge, events, renew
        self._hosts: dict[str, HostPeer] = {}
        self._members: dict[str, int] = {}  # numbers in the view of the hub, by peer
        self._hub = LinkHub(network, me, on_message=self._on_message, rules=HOST_RULES)
        self._told, self._to_tell = trio.open_memory_channel[tuple[TrainerGroup, m.Message]](
            math.inf
        )
        self._opened: m.ArenaOpened | None = None
        self._checkups = Checkups(
            network, self._look_at_token, lambda: needs_of_host(self._sizes, places.wanted)
        )
        self._transfers = itertools.count(1)
        self._nursery: trio.Nursery
        bridge.further = self

    async def run(
        self,
        bind: Sequence[Address],
        *,
        task_status: trio.TaskStatus[Sequence[Address]] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            self._set_members()
            await nursery.start(self._hub.run)
            bound = await nursery.start(self._serve, bind)
            nursery.start_soon(self._pump)
            task_status.started(bound)
            while True:
                await trio.sleep(RENEW_S)
                self._renew()

    async def _serve(
        self,
        bind: Sequence[Address],
        task_status: trio.TaskStatus[Sequence[Address]] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        await self._network.serve(
            bind, self._on_channel, self._hub.handle_lane, task_status=task_status
        )

    # ------------------------------------------------------------ who is a host

    async def _on_channel(self, channel: Channel) -> None:
        if channel.party is Party.NEWCOMER:
            check = partial(self._checkups.answer, host=host_of(channel.remote_address))
            await answer_newcomer(
                channel, self._authority, self._admit, check=check, known=lambda _peer: False
            )
        elif channel.party is Party.PEER and channel.peer != self._me:
            if channel.peer not in self._members:
                self._members[channel.peer] = 1 + max(self._members.values(), default=0)
                self._set_members()
            await self._hub.handle_channel(channel)

    async def _look_at_token(self, token: str) -> None:
        if not secrets.compare_digest(token.encode(), self._token.encode()):
            raise Refusal(m.RefusalCode.TOKEN, "the head of this peer has another string by now")

    async def _admit(self, request: m.EnrolRequest, peer: str) -> None:
        await self._look_at_token(request.token)
        if why := self.places.why_full(peer):
            raise Refusal(m.RefusalCode.BUSY, why)

    def _set_members(self) -> None:
        hosts = [member_info(peer, "", number) for peer, number in self._members.items()]
        self._hub.set_members([member_info(self._me, self._name, 0, ("unused:1",)), *hosts])

    # ------------------------------------------------------------ a host

    async def _on_message(self, peer: str, message: m.Message) -> None:
        host = self._hosts.get(peer)
        if host is not None and host.gone:
            self._went(host)
            host = None
        match message:
            case m.HostHello():
                if host is not None:
                    host.hello = message
                    self.places.changed()
                elif (link := self._hub.links.get(peer)) is None:
                    pass
                elif why := self.places.why_full(peer):
                    await link.send(m.Refused(m.RefusalCode.BUSY, why))
                else:
                    await self._nursery.start(self._serve_host, link, message)
            case _ if host is None:
                raise RemoteProtocolError(f"a {type(message).__name__} before a HostHello")
            case m.ProcessSays(process=number, body=body):
                self._process_says(host, number, wire.decode(body))
            case m.ProcessGone(process=number, reason=reason):
                if (process := host.processes.pop(number, None)) is not None:
                    process.end(reason)
            case m.SlotsChanged(ranks=ranks):
                self._take_slots(host, ranks)
            case m.BoxesWanted():
                host.nursery.start_soon(self._send_boxes, host, message)
            case m.BoxesTaken(start=start, fragment=fragment, version=version):
                if start == self.places.started:
                    host.versions[fragment] = version
                    host.changed.notify_all()
            case m.HostEnded():
                self.places.ended(host, message)
            case _:
                raise RemoteProtocolError(f"a host sent a {type(message).__name__}")

    async def _serve_host(
        self,
        link: Link,
        hello: m.HostHello,
        *,
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        queue, to_send = trio.open_memory_channel[m.Message](math.inf)
        async with trio.open_nursery() as nursery:
            host = self._hosts[link.peer] = HostPeer(link.peer, link, hello, queue, nursery)
            nursery.start_soon(send_messages, link, to_send)
            self.places.came(host)
            self.slots_changed()
            task_status.started()
            await link.lost.wait()
            self._went(host)
            nursery.cancel_scope.cancel()

    def _went(self, host: HostPeer) -> None:
        """Take note, once, that a host's link is lost."""
        if self._hosts.get(host.peer) is host:
            del self._hosts[host.peer]
            self.places.went(host, host.link.reason)
            host.changed.notify_all()
            for process in host.processes.values():
                process.end(f"its host {host.name} is gone")

    # ------------------------------------------------------------ its processes

    def _process_says(self, host: HostPeer, number: int, message: m.Message) -> None:
        process = host.processes.get(number)
        if process is None:
            if number <= host.newest:
                return  # it was ended here, and the host does not know yet
            host.newest = number
            process = FarProcess(host, number, partial(self._before, host))
            host.processes[number] = process
            caller = Caller(process, process, self._events(), f" (on {host.name})")
            host.nursery.start_soon(self._bridge.serve, caller, self._nursery)
        process.hear(message)

    async def _before(self, host: HostPeer, rank: int, message: m.Message) -> None:
        """Copy the boxes of which a rank speaks into the posted arena here."""
        fragments: Iterable[int] = ()
        if isinstance(message, m.InitialPosted):
            fragments = range(len(self._sizes))
        elif isinstance(message, m.Posted) and message.fragment < len(self._sizes):
            fragments = (message.fragment,)
        group = self._bridge.group
        for fragment in fragments:
            if group is not None and rank in group.ranks:
                await self._fetch_boxes(host, group, rank, fragment)

    @property
    def _sizes(self) -> tuple[m.FragmentSize, ...]:
        return () if self._opened is None else self._opened.sizes

    # ------------------------------------------------------------ slots

    def slots_changed(self) -> None:
        arenas = self._bridge.arenas
        if arenas is None:
            return
        mail, named = (int(arenas[0].slots[each]) for each in (MAIL_SLOT, NAMED_SLOT))
        message = m.HeadSlots(mail, min(named, m.COUNT_MAX))  # that is for no step
        for host in self._hosts.values():
            host.tell(message)

    def _take_slots(self, host: HostPeer, ranks: Iterable[m.RankSlots]) -> None:
        arenas = self._bridge.arenas
        for each in ranks:
            if arenas is not None and each.rank in host.ranks:
                arenas[1].rank_slots(each.rank)[:] = np.frombuffer(each.slots, np.uint64)

    # ------------------------------------------------------------ boxes

    def tell(self, group: TrainerGroup, message: m.Message) -> None:
        if isinstance(message, m.ArenaOpened):
            self._opened = message
        self._told.send_nowait((group, message))

    async def _pump(self) -> None:
        async for group, message in self._to_tell:
            fragments: Iterable[int] = ()
            match message:
                case m.RoundEnded(committed=True, fragment=fragment):
                    fragments = (fragment,)
                case m.Load() | m.Finished():
                    fragments = range(len(self._sizes))
            for host in list(self._hosts.values()):
                if host.ranks:
                    for fragment in fragments:
                        await self._bring(host, group, fragment)
            if not group.ended:
                group.tell(message)
            self.passed(message)

    def passed(self, message: m.Message) -> None:
        if isinstance(message, m.RoundEnded | m.Load):
            self.places.boundary()

    async def _bring(self, host: HostPeer, group: TrainerGroup, fragment: int) -> None:
        """Wait until a host has the boxes of the present version of a fragment.

        They are sent once its ranks have read those of the version before.
        """
        while not (group.idle or group.ended):
            await trio.sleep(LOOK_S)
        while not host.gone and not group.ended:
            version = await self._version(fragment)
            if version is None or host.versions.get(fragment) == version:
                return
            began_s = trio.current_time()
            host.tell(m.BoxesReady(self.places.started, fragment, version))
            await host.changed.wait()
            if host.versions.get(fragment) == version:
                self._measured(host, fragment, "to", host.sent_bytes.get(fragment, 0), began_s)

    def _measured(
        self, host: HostPeer, fragment: int, way: str, size_bytes: int, began_s: float
    ) -> None:
        """Log what a host's boxes took; tell once that the line to it is too slow for them."""
        took_s = trio.current_time() - began_s
        said = "boxes of fragment %d: %d bytes %s %s in %.3f s"
        log.info(said, fragment, size_bytes, way, host.name, took_s)
        if host.slow or way == "from" or took_s < SLOW_S:
            return
        host.slow = True
        self.places.tell(
            f"the {size_bytes / 1e6:.0f} MB that host {host.name} holds of fragment {fragment} took"
            f" {took_s:.0f} s ({size_bytes / took_s / 1e6:.1f} MB/s): a round moves them both ways,"
            " so the line between these machines should be faster, or hold a smaller part"
        )

    async def _version(self, fragment: int) -> int | None:
        """Return the fragment's version, once nothing writes it; None if nothing is whole."""
        assert self._bridge.arenas is not None
        shared = self._bridge.arenas[0]
        try:
            while (version := shared.read_once(fragment, lambda: None)) is None:
                await trio.sleep(LOOK_S)
        except NotWholeError:
            return None
        return version

    async def _send_boxes(self, host: HostPeer, wanted: m.BoxesWanted) -> None:
        arenas = self._bridge.arenas
        group = self._bridge.group
        fragment, opened = wanted.fragment, self._opened
        if arenas is None or opened is None or group is None or not group.written:
            return  # of an earlier group
        if fragment >= len(opened.fragments):
            return
        hellos = [group.ranks[rank].hello for rank in host.ranks if rank in group.ranks]
        pieces = pieces_held(hellos, opened.fragments[fragment])
        host.sent_bytes[fragment] = sum(each.size_bytes for each in pieces)
        source = BoxSource(arenas[0], fragment, pieces, wanted.transfer, wanted.version)
        try:
            await host.link.send_from(source)
        except PeerLostError:
            return
        if source.stale:
            host.tell(m.BoxesGone(wanted.transfer))
            host.changed.notify_all()

    async def _fetch_boxes(
        self, host: HostPeer, group: TrainerGroup, rank: int, fragment: int
    ) -> None:
        """Copy what a rank has posted of a fragment into the posted arena here."""
        arenas, opened = self._bridge.arenas, self._opened
        if arenas is None or opened is None or not group.written:
            return  # what the rank says is refused then
        hellos, written = [group.ranks[rank].hello], group.written[rank]
        pieces = pieces_held(hellos, opened.fragments[fragment], written)
        if pieces:
            transfer = next(self._transfers)
            wanted, began_s = m.BoxesWanted(transfer, fragment, rank), trio.current_time()
            await receive_boxes(self._hub, host.peer, arenas[1], pieces, wanted, host.tell)
            size_bytes = sum(each.size_bytes for each in pieces)
            self._measured(host, fragment, "from", size_bytes, began_s)


def needs_of_host(sizes: Sequence[m.FragmentSize], host_count: int) -> m.CheckAnswer:
    """Return what a further host needs that holds an even part of the model.

    Args:
      sizes: of the model's fragments, of which hosts hold no momentum; empty: not known yet.
    """
    model_bytes = arena_bytes(sizes) if sizes else 0
    return m.CheckAnswer(
        now_s=0.0,
        host="",
        faults=(),
        member_count=host_count,
        lanes_max=HOST_RULES.lanes.count_max,
        memory_bytes=2 * model_bytes // host_count,  # shared and posted
        checkpoint_bytes=model_bytes,
        checkpoint_count=0,
        software=__version__,
    )
