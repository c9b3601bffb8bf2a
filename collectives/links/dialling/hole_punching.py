"""A punched route: streams that both ends of a pair dial at once, through routers that keep ports.

The first stream connects ports of which the master has told both ends. On it the dialling end asks
for further streams, each with its own two ports:

    > port from which I dial       < port from which I dial; now both dial

These numbers travel in clear; over the streams go TLS or a lane, as over any other route.
"""

from __future__ import annotations

import struct
from collections.abc import Awaitable, Callable

import trio

from ....protocol.addresses import Address
from ....protocol.errors import RemoteProtocolError
from ....protocol.messages import LANES_OPEN_MAX
from ....protocol.network.interface import Hole, Network

PUNCH_S = 8.0  # for the first stream: the master tells both ends at once, so some repeated dials
MEET_S = 5.0  # for a further stream
# Streams that are open or being dialled, at the answering end: the lanes of a link, a control
# stream, its successor.
STREAMS_MAX = LANES_OPEN_MAX + 2

_PORT = struct.Struct(">H")


async def meet(network: Network, address: Address, port: int) -> trio.abc.Stream:
    """Open the first stream of a punched route; raise OSError if that fails."""
    hole = await network.open_hole(address, port)
    return await _connected(hole, address, PUNCH_S)


class HolePuncher:
    """The dialling end of a punched route.

    Args:
      stream: the first stream; closed when the route is given up.
      host: the address from which the other end dials.
    """

    def __init__(self, network: Network, stream: trio.abc.Stream, host: str) -> None:
        self._network = network
        self._stream = stream
        self._host = host
        self._lock = trio.Lock()
        self._unanswered = 0  # requests; the other end answers all of them, in their order
        self._received = bytearray()  # of an answer that has not come whole

    async def connect(self) -> trio.abc.Stream:
        """Open a further stream; raise OSError, or as a broken stream does, if that fails."""
        address = Address(self._host, 0)
        hole = await self._network.open_hole(address)
        try:
            async with self._lock:
                with trio.fail_after(MEET_S):
                    await self._stream.send_all(_PORT.pack(hole.port))
                    self._unanswered += 1
                    while self._unanswered:  # first the late answers to requests that were given up
                        theirs = await _receive_port(self._stream, self._received)
                        self._unanswered -= 1
        except trio.TooSlowError:
            hole.close()
            raise TimeoutError(f"{self._host} did not answer on the punched route") from None
        except BaseException:
            hole.close()
            raise
        return await _connected(hole, Address(self._host, theirs), MEET_S)


async def answer(
    network: Network,
    stream: trio.abc.Stream,
    host: str,
    nursery: trio.Nursery,
    met: Callable[[trio.abc.Stream], Awaitable[None]],
) -> None:
    """Dial whenever the other end asks for a stream, until the first stream ends.

    Args:
      met: handles each further stream to its end.

    Raises:
      RemoteProtocolError: the other end asks for more streams than a link has.
    """
    room = trio.Semaphore(STREAMS_MAX)

    async def dial(hole: Hole, address: Address) -> None:
        try:
            await met(await _connected(hole, address, MEET_S))
        except OSError:
            pass  # the other end will ask again
        finally:
            room.release()

    while True:
        theirs = await _receive_port(stream, bytearray())
        with trio.move_on_after(MEET_S) as patience:
            await room.acquire()
        if patience.cancelled_caught:
            raise RemoteProtocolError(f"it asks for more than {STREAMS_MAX} streams at once")
        hole = await network.open_hole(Address(host, 0))
        try:
            await stream.send_all(_PORT.pack(hole.port))
        except BaseException:
            hole.close()
            raise
        nursery.start_soon(dial, hole, Address(host, theirs))


async def _connected(hole: Hole, address: Address, within_s: float) -> trio.abc.Stream:
    try:
        with trio.fail_after(within_s):
            return await hole.connect(address)
    except trio.TooSlowError:
        raise TimeoutError(f"no punched connection to {address} within {within_s:g} s") from None
    finally:
        hole.close()


async def _receive_port(stream: trio.abc.Stream, received: bytearray) -> int:
    """Receive a port; ``received`` keeps its first byte if the call is cancelled."""
    while len(received) < _PORT.size:
        more = await stream.receive_some(_PORT.size - len(received))
        if not more:
            raise OSError("the other end of a punched route hung up")
        received += more
    (port,) = _PORT.unpack(received)
    received.clear()
    if port == 0:
        raise RemoteProtocolError("the other end of a punched route sent port 0")
    return int(port)
