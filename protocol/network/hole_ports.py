"""Holes: local TCP ports from which both ends of a stream dial at once.

A router lets in packets that answer outgoing ones. When both ends dial each other from ports that
both know, each router takes the other end's first packet for an answer, and TCP makes one
connection of the two (simultaneous open, RFC 9293, 3.5). This needs routers that keep a
connection's inner port number.
"""

from __future__ import annotations

import errno
import socket
import struct
from contextlib import suppress

import trio

from ..addresses import Address

AGAIN_S = 0.05  # before a refused dial is repeated: the other end may be a little late
# Errors after which the next dial may be answered.
_LATE = (errno.ECONNREFUSED, errno.ECONNRESET, errno.ETIMEDOUT, errno.EHOSTUNREACH)
_NO_LINGER = struct.pack("ii", 1, 0)


def share_port(sock: trio.socket.SocketType) -> None:
    """Allow other sockets to bind to a stream's local port."""
    with suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)


class SocketHole:
    """``network.Hole`` with real sockets."""

    def __init__(self, family: int, held: trio.socket.SocketType) -> None:
        self.port = int(held.getsockname()[1])
        self._family = family
        self._held: trio.socket.SocketType | None = held

    @classmethod
    async def open(cls, towards: Address, port: int) -> SocketHole:
        family = socket.AF_INET6 if ":" in towards.host else socket.AF_INET
        return cls(family, await _bound(family, port))

    async def connect(self, address: Address) -> trio.SocketStream:
        """See ``network.Hole.connect``."""
        while True:
            sock, self._held = self._held, None
            if sock is None:
                sock = await _bound(self._family, self.port)
            try:
                await sock.connect((address.host, address.port))
            except OSError as error:
                sock.close()
                if error.errno not in _LATE:
                    raise
                await trio.sleep(AGAIN_S)
            except BaseException:
                sock.close()
                raise
            else:
                stream = trio.SocketStream(sock)
                # No TIME_WAIT, during which the same two ports could not connect again.
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
                return stream

    def close(self) -> None:
        """See ``network.Hole.close``."""
        if self._held is not None:
            self._held.close()
            self._held = None


async def _bound(family: int, port: int) -> trio.socket.SocketType:
    sock = trio.socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        await sock.bind(("::" if family == socket.AF_INET6 else "0.0.0.0", port))
    except BaseException:
        sock.close()
        raise
    return sock
