"""Options of TCP sockets, and what the kernel reports of a connection."""

from __future__ import annotations

import math
import socket
import sys
from contextlib import suppress

import trio
from attrs import frozen

# Seconds between the kernel's probes on an idle connection; routers forget it after 60 s or more.
KEEPALIVE_S = 20
KEEPALIVE = {"TCP_KEEPIDLE": KEEPALIVE_S, "TCP_KEEPINTVL": KEEPALIVE_S, "TCP_KEEPCNT": 6}

# Limit on the growing retransmission timeout: after an outage of seconds, a connection would else stand
# still for seconds more. The option's number on Linux (6.15 or later; Python has no name for it), and its
# value in milliseconds, the lowest that the kernel takes.
TCP_RTO_MAX_MS, RETRANSMIT_MS_MAX = 44, 1_000

CONGESTION_NAME_BYTES = 16  # the kernel's limit
MIN_RTT_OFFSET = 148  # of tcpi_min_rtt in Linux's struct tcp_info
RTT_OFFSET, ACKED_OFFSET = 68, 120  # of tcpi_rtt (32 bits) and tcpi_bytes_acked (64 bits)
UNKNOWN_RTT = 2**32 - 1


def keep_alive(sock: trio.socket.SocketType) -> None:
    """Make the kernel send probes on an idle connection.

    Routers forget idle connections, some after a minute. Dead connections are not found by this: their
    messages fail long before the kernel gives up.
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


def choose_congestion(sock: trio.socket.SocketType, name: str) -> None:
    """Use this congestion control if the kernel has and permits it; else keep the default."""
    if name and hasattr(socket, "TCP_CONGESTION"):
        with suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name.encode())


def congestion_of(sock: trio.socket.SocketType) -> str:
    """Return the congestion control of a connection, or an empty text if the kernel does not tell it."""
    if not hasattr(socket, "TCP_CONGESTION"):
        return ""
    try:
        name = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, CONGESTION_NAME_BYTES)
    except OSError:
        return ""
    return name.partition(b"\0")[0].decode("ascii", "replace")


def shortest_round_trip_s(sock: trio.socket.SocketType) -> float:
    """Return the shortest round trip that the kernel saw, or infinity if it does not tell it."""
    if not hasattr(socket, "TCP_INFO"):
        return math.inf
    try:
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, MIN_RTT_OFFSET + 4)
    except OSError:
        return math.inf
    if len(info) < MIN_RTT_OFFSET + 4:
        return math.inf
    microseconds = int.from_bytes(info[MIN_RTT_OFFSET:], sys.byteorder)
    return math.inf if microseconds == 2**32 - 1 else microseconds / 1e6


@frozen
class PathNow:
    """What the kernel says of a connection's path at this moment.

    Attributes:
      round_trip_s: smoothed, over the last round trips.
      shortest_s: the shortest round trip of the last minutes.
      acked_bytes: bytes that the other side has acknowledged since the connection began.
    """

    round_trip_s: float
    shortest_s: float
    acked_bytes: int


def path_now(sock: socket.socket) -> PathNow | None:
    """Return what the kernel says of a connection's path; None if it tells nothing, or does not know yet."""
    if sys.platform != "linux":
        return None
    size = MIN_RTT_OFFSET + 4
    try:
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, size)
    except OSError:
        return None
    if len(info) < size:
        return None
    round_trip, shortest, acked = (
        int.from_bytes(info[offset : offset + count], sys.byteorder)
        for offset, count in ((RTT_OFFSET, 4), (MIN_RTT_OFFSET, 4), (ACKED_OFFSET, 8))
    )
    if not round_trip or shortest == UNKNOWN_RTT:
        return None
    return PathNow(round_trip / 1e6, shortest / 1e6, acked)
