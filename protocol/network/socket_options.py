"""Options of TCP sockets, and what the kernel reports of a connection."""

from __future__ import annotations

import functools
import math
import socket
import sys
from contextlib import suppress

import trio
from attrs import frozen

# Seconds between the kernel's probes on an idle connection; routers forget it after 60 s or more.
KEEPALIVE_S = 20
KEEPALIVE = {"TCP_KEEPIDLE": KEEPALIVE_S, "TCP_KEEPINTVL": KEEPALIVE_S, "TCP_KEEPCNT": 6}

# Limit on the growing retransmission timeout: after an outage of seconds, a connection would else
# stand still for seconds more. The option's number on Linux (6.15 or later; Python has no name for
# it), and its value in milliseconds, the lowest that the kernel takes.
TCP_RTO_MAX_MS, RETRANSMIT_MS_MAX = 44, 1_000

CONGESTION_NAME_BYTES = 16  # the kernel's limit
# Places in Linux's struct tcp_info: tcpi_rtt and tcpi_min_rtt (32 bits, microseconds),
# tcpi_bytes_acked and tcpi_bytes_retrans (64 bits; the latter since Linux 4.19).
RTT_OFFSET, MIN_RTT_OFFSET, ACKED_OFFSET, RETRANSMITTED_OFFSET = 68, 148, 120, 208
SEGMENT_OFFSET, SELECTIVE_OFFSET = 16, 28
UNKNOWN_RTT = 2**32 - 1

AnySocket = trio.socket.SocketType | socket.socket
# BBR sends each packet by a timer. Over a path with a shorter round trip than this (one machine,
# one switch) nothing is gained by that, and the timers take more of a processor than all else that
# sending does: 2 GiB over loopback cost 0.41 s with BBR, 0.14 s without.
PACED_ROUND_TRIP_S_MIN = 0.000_5
PACED = "bbr"
UNPACED = (
    "cubic",
    "reno",
)  # used there: the first that the kernel permits; it permits the last always


def keep_alive(sock: trio.socket.SocketType) -> None:
    """Make the kernel send probes on an idle connection.

    Routers forget idle connections, some after a minute. Dead connections are not found by this:
    their messages fail long before the kernel gives up.
    """
    with suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in KEEPALIVE.items():
            if (option := getattr(socket, name, None)) is not None:
                sock.setsockopt(socket.IPPROTO_TCP, option, value)


def retry_soon(sock: trio.socket.SocketType) -> None:
    """Limit the kernel's retransmission timeout, if it can."""
    if sys.platform == "linux":
        with suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, TCP_RTO_MAX_MS, RETRANSMIT_MS_MAX)


def choose_congestion(sock: AnySocket, name: str) -> None:
    """Use this congestion control if the kernel has and permits it; else keep the default.

    Over a short path BBR is replaced: see ``PACED_ROUND_TRIP_S_MIN``.
    """
    if not name or not hasattr(socket, "TCP_CONGESTION"):
        return
    is_short = name == PACED and shortest_round_trip_s(sock) < PACED_ROUND_TRIP_S_MIN
    for each in UNPACED if is_short else (name,):
        with suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, each.encode())
            return


@frozen
class SmallSegments(trio.abc.SocketFactory):
    """Makes TCP sockets that send and take segments of this size at most (``TCP_MAXSEG``)."""

    segment_bytes: int

    def socket(self, *kind: int) -> trio.socket.SocketType:
        sock = trio.socket.from_stdlib_socket(socket.socket(*kind))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, self.segment_bytes)
        return sock


def congestion_of(sock: AnySocket) -> str:
    """Return the congestion control of a connection; empty if the kernel does not tell it."""
    if not hasattr(socket, "TCP_CONGESTION"):
        return ""
    try:
        name = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, CONGESTION_NAME_BYTES)
    except OSError:
        return ""
    return name.partition(b"\0")[0].decode("ascii", "replace")


def obtainable_congestion(name: str) -> str:
    """Return the congestion control that a connection of this process gets if it asks for ``name``.

    An empty text: the kernel does not tell, or lets no program choose. A kernel whose module for
    ``name`` is not loaded loads it for a process with CAP_NET_ADMIN.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as sock:
        choose_congestion(sock, name)
        return congestion_of(sock)


def shortest_round_trip_s(sock: AnySocket) -> float:
    """Return the shortest round trip that the kernel saw, or infinity if it does not tell it."""
    info = _tcp_info(sock, MIN_RTT_OFFSET + 4)
    microseconds = UNKNOWN_RTT if info is None else _number(info, MIN_RTT_OFFSET, 4)
    return math.inf if microseconds == UNKNOWN_RTT else microseconds / 1e6


def retransmitted_bytes(sock: AnySocket) -> int:
    """Return how many bytes the kernel sent again; 0 if closed, or if it does not tell it."""
    info = _tcp_info(sock, RETRANSMITTED_OFFSET + 8)
    return 0 if info is None else _number(info, RETRANSMITTED_OFFSET, 8)


@functools.cache
def counts_retransmissions() -> bool:
    """Return whether this kernel tells how many bytes it sent again."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as sock:
        return _tcp_info(sock, RETRANSMITTED_OFFSET + 8) is not None


@frozen
class PathNow:
    """What the kernel says of a connection's path at this moment.

    Attributes:
      round_trip_s: smoothed, over the last round trips.
      shortest_s: the shortest round trip of the last minutes.
      delivered_bytes: that the other side has acknowledged since the connection began; in whole
        packets those after a lost one, which it has, too (RFC 2018).
    """

    round_trip_s: float
    shortest_s: float
    delivered_bytes: int


def path_now(sock: AnySocket) -> PathNow | None:
    """Return what the kernel says of a connection's path; None if it does not know it yet."""
    info = _tcp_info(sock, MIN_RTT_OFFSET + 4)
    if info is None:
        return None
    round_trip, shortest = _number(info, RTT_OFFSET, 4), _number(info, MIN_RTT_OFFSET, 4)
    if not round_trip or shortest == UNKNOWN_RTT:
        return None
    selective = _number(info, SELECTIVE_OFFSET, 4) * _number(info, SEGMENT_OFFSET, 4)
    delivered = _number(info, ACKED_OFFSET, 8) + selective
    return PathNow(round_trip / 1e6, shortest / 1e6, delivered)


def _tcp_info(sock: AnySocket, size_bytes: int) -> bytes | None:
    """Return the kernel's report of a connection up to a place; None if it is shorter."""
    if sys.platform != "linux" or not hasattr(socket, "TCP_INFO"):
        return None
    try:
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, size_bytes)
    except OSError:
        return None
    return info if len(info) == size_bytes else None


def _number(info: bytes, offset: int, size_bytes: int) -> int:
    return int.from_bytes(info[offset : offset + size_bytes], sys.byteorder)
