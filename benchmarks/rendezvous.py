"""The rendezvous of a benchmark's ranks, where they exchange small messages and start together.

Rank 0 listens on a plain TCP port and the others dial it. Messages are JSON, one per line. Only a token
in clear text protects the port, so this is for benchmarks in a lab only.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any

import trio
from attrs import frozen

from holdfast.protocol.addresses import Address
from holdfast.protocol.errors import UserError
from holdfast.protocol.network.sockets import open_tcp

RENDEZVOUS_S = 60.0  # limit for all ranks, which may be started by hand on several machines
REDIAL_S = 0.1  # rank 0 may not be up yet
LINE_BYTES_MAX = 2**20  # enough for the certificates of all ranks
PINGS = 3  # the shortest of these round trips counts


@frozen
class RankSeat:
    """The rank of this process among ``count``, and the address and token of the rendezvous."""

    rank: int
    count: int
    master: Address
    token: str


class LineStream:
    """A stream of JSON objects, one per line."""

    def __init__(self, stream: trio.SocketStream) -> None:
        self._stream = stream
        self._buffer = bytearray()

    async def send(self, what: dict[str, Any]) -> None:
        await self._stream.send_all(json.dumps(what).encode() + b"\n")

    async def receive(self) -> dict[str, Any]:
        while (end := self._buffer.find(b"\n")) < 0:
            data = await self._stream.receive_some()
            if not data or len(self._buffer) > LINE_BYTES_MAX:
                raise UserError("the connection to another rank ended")
            self._buffer += data
        line = self._buffer[:end]
        del self._buffer[: end + 1]
        what = json.loads(line)
        if not isinstance(what, dict):
            raise UserError("another rank sent an invalid message")
        return what


class Rendezvous:
    """An exchange of messages between all ranks, after which they continue at the same moment.

    Attributes:
      host: this rank's address in its connection to rank 0, which other ranks can probably reach.
    """

    def __init__(self, rank: int, streams: dict[int, LineStream], host: str) -> None:
        self._rank = rank
        self._streams = streams  # at rank 0 to all others, elsewhere to rank 0
        self._delays_s: dict[int, float] = {}
        self.host = host

    @classmethod
    @asynccontextmanager
    async def open(cls, seat: RankSeat) -> AsyncGenerator[Rendezvous]:
        """Connect to the rendezvous; the block runs once all ranks are connected.

        Raises:
          UserError: not all ranks came in time, or rank 0 has another token.
        """
        async with AsyncExitStack() as stack:
            nursery = await stack.enter_async_context(trio.open_nursery())
            stack.callback(nursery.cancel_scope.cancel)
            met = None
            with trio.move_on_after(RENDEZVOUS_S):
                if seat.rank == 0:
                    met = await cls._gather_ranks(seat, nursery)
                else:
                    stream = await stack.enter_async_context(await _dial_patiently(seat.master))
                    met = await cls._greet_master(stream, seat)
            if met is None:
                raise UserError(f"not all {seat.count} ranks came within {RENDEZVOUS_S:g} s")
            yield met

    @classmethod
    async def _greet_master(cls, stream: trio.SocketStream, seat: RankSeat) -> Rendezvous:
        lines = LineStream(stream)
        await lines.send({"token": seat.token, "rank": seat.rank})
        for _ping in range(PINGS):
            await lines.receive()
            await lines.send({})
        return cls(seat.rank, {0: lines}, str(stream.socket.getsockname()[0]))

    @classmethod
    async def _gather_ranks(cls, seat: RankSeat, nursery: trio.Nursery) -> Rendezvous:
        streams: dict[int, LineStream] = {}
        complete = trio.Event()
        count = seat.count

        async def greet(stream: trio.SocketStream) -> None:
            lines = LineStream(stream)
            hello = await lines.receive()
            rank = hello.get("rank")
            known = secrets.compare_digest(str(hello.get("token")), seat.token)
            if not known or type(rank) is not int or not 0 < rank < count or rank in streams:
                return
            streams[rank] = lines
            if len(streams) == count - 1:
                complete.set()
            await trio.sleep_forever()  # to return would close the stream

        master = seat.master
        await nursery.start(partial(trio.serve_tcp, greet, master.port, host=master.host))
        if count > 1:
            await complete.wait()
        rendezvous = cls(0, streams, master.host)
        for rank, lines in streams.items():
            times = []
            for _ping in range(PINGS):
                started_s = trio.current_time()
                await lines.send({})
                await lines.receive()
                times.append(trio.current_time() - started_s)
            rendezvous._delays_s[rank] = min(times) / 2
        return rendezvous

    async def exchange(self, mine: dict[str, Any]) -> list[dict[str, Any]]:
        """Send ``mine`` and return all ranks' objects, by rank, at about the same moment everywhere.

        Rank 0's answer takes longer to some ranks; the nearer ones wait for the farthest.
        """
        if self._rank != 0:
            await self._streams[0].send(mine)
            answer = await self._streams[0].receive()
        else:
            everything = [mine]
            for rank in sorted(self._streams):
                everything.append(await self._streams[rank].receive())
            farthest_s = max(self._delays_s.values(), default=0.0)
            for rank in sorted(self._streams, key=lambda rank: -self._delays_s[rank]):
                wait_s = farthest_s - self._delays_s[rank]
                await self._streams[rank].send({"all": everything, "wait_s": wait_s})
            answer = {"all": everything, "wait_s": farthest_s}
        await trio.sleep(answer["wait_s"])
        gathered: list[dict[str, Any]] = answer["all"]
        return gathered


async def _dial_patiently(address: Address) -> trio.SocketStream:
    while True:
        try:
            return await open_tcp(address)
        except OSError:
            await trio.sleep(REDIAL_S)
