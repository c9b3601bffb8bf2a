"""One of the two ranks of ``holdfast bench lanes``: the code of a peer, without a master."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from typing import Any

import trio
from attrs import define, frozen

from ...collectives.links.lane_count import COUNT_FIRST, COUNT_MAX
from ...collectives.links.link import Link
from ...collectives.links.link_parts import LaneRules
from ...collectives.links.send_queue import Frame, Load
from ...protocol.errors import PeerLostError
from ...protocol.network.lane import FrameHeader, FrameKind
from ...protocol.network.sockets import SocketNetwork
from .rank_links import LINK_S, BenchRank, joined
from .rank_processes import ADAPTIVE, RankSeat, Report

FRAME_BYTES = 2**20  # a chunk


@frozen
class LanesOptions:
    """The options of the command, equal at both ranks except the seat's rank.

    Attributes:
      counts: numbers of lanes, and ``ADAPTIVE``.
      adaptive_warm_up_s: warm-up with adaptive lanes.
      max_mbit: upload limit.
    """

    seat: RankSeat
    counts: Sequence[str]
    congestion: Sequence[str]
    seconds: float
    warm_up_s: float
    adaptive_warm_up_s: float
    max_mbit: float | None = None

    @property
    def rows(self) -> list[tuple[str, str]]:
        """The measurements in order: (lanes, congestion control)."""
        return [(count, control) for control in self.congestion for count in self.counts]


class Endless:
    """A source of chunks that never ends."""

    def __init__(self, round_: int) -> None:
        self._frame: Frame = (
            FrameHeader(FrameKind.CONTRIBUTION, round_, 1, 0, 0, FRAME_BYTES),
            bytes(FRAME_BYTES),
        )

    def next_frame(self) -> Load | None:
        return lambda: self._frame

    def left(self) -> int:
        return 1


class Counting:
    """A sink that counts and discards what arrives."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # lanes deliver from threads
        self._rooms: list[memoryview] = []
        self.arrived_bytes = 0

    def place(self, _peer: str, header: FrameHeader) -> memoryview:
        with self._lock:
            return self._rooms.pop() if self._rooms else memoryview(bytearray(FRAME_BYTES))

    def deliver(self, _peer: str, header: FrameHeader, payload: memoryview) -> None:
        with self._lock:
            self.arrived_bytes += header.payload_bytes
            self._rooms.append(payload)

    def abandon(self, _peer: str, _header: FrameHeader, view: memoryview) -> None:
        with self._lock:
            self._rooms.append(view)


@define
class LanesBench:
    """One rank, connected to the other at the rendezvous."""

    options: LanesOptions
    node: BenchRank[SocketNetwork]
    round: int = 0

    async def row(self, lanes: str, congestion: str) -> dict[str, Any]:
        """Measure a new link with a number of lanes; return the same row at both ranks."""
        options, hub, exchange = self.options, self.node.hub, self.node.rendezvous.exchange
        rank = options.seat.rank
        first, most = (COUNT_FIRST, COUNT_MAX) if lanes == ADAPTIVE else (int(lanes), int(lanes))
        hub.configure(rules=LaneRules(first, most, congestion))
        self.round += 1
        await exchange({})
        hub.set_members(self.node.members)
        link = await hub.link(self.node.members[1 - rank].peer, LINK_S)
        while len(link.lanes) < first:
            await trio.sleep(0.01)
        await exchange({})
        warm_up_s = options.adaptive_warm_up_s if lanes == ADAPTIVE else options.warm_up_s
        mine = await (self._send(link) if rank == 0 else self._count(warm_up_s))
        both = await exchange(mine)
        hub.set_members([])
        await link.finished.wait()
        return {"lanes": lanes, "congestion": both[0]["congestion"], **both[1], **both[0]}

    async def _send(self, link: Link) -> dict[str, Any]:
        """Send until the other rank has finished measuring."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_keep_sending, link, Endless(self.round))
            await self.node.rendezvous.exchange({})
            nursery.cancel_scope.cancel()
        lanes = link.lanes
        return {
            "congestion": ", ".join(sorted({lane.facts.congestion for lane in lanes})),
            "lanes_open": len(lanes),
            "round_trip_ms": 1e3 * link.round_trip_s if link.round_trip_s < math.inf else None,
        }

    async def _count(self, warm_up_s: float) -> dict[str, Any]:
        sink = Counting()
        with self.node.hub.register((FrameKind.CONTRIBUTION, self.round, 1), sink, threads=True):
            await trio.sleep(warm_up_s)
            began_s, before = trio.current_time(), sink.arrived_bytes
            await trio.sleep(self.options.seconds)
            carried, took_s = sink.arrived_bytes - before, trio.current_time() - began_s
            await self.node.rendezvous.exchange({})
        return {"mbit_per_s": 8 * carried / took_s / 1e6}


async def _keep_sending(link: Link, source: Endless) -> None:
    try:
        await link.send_from(source)
    except PeerLostError as error:
        raise ConnectionError(str(error)) from error


async def run_rank(options: LanesOptions) -> Report | None:
    """Run one rank and return the report, at rank 0 only."""
    async with joined(options.seat, SocketNetwork, upload_mbit=options.max_mbit) as node:
        bench = LanesBench(options, node)
        rows = [await bench.row(lanes, congestion) for lanes, congestion in options.rows]
    trips = [row.pop("round_trip_ms") for row in rows]
    known = [trip for trip in trips if trip is not None]
    if options.seat.rank != 0:
        return None
    return {
        "seconds": options.seconds,
        "max_mbit": options.max_mbit,
        "round_trip_ms": min(known, default=None),
        "rows": rows,
    }
