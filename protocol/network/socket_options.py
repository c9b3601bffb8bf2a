"""Options of TCP sockets, and what the kernel reports of a connection."""

from __future__ import annotations

import math
import socket
import sys
from contextlib import suppress

import trio

# Seconds between the kernel's probes on an idle connection; routers forget it after 60 s or more.
KEEPALIVE_S = 20
KEEPALIVE = {"TCP_KEEPIDLE": KEEPALIVE_S, "TCP_KEEPINTVL": KEEPALIVE_S, "TCP_KEEPCNT": 6}

# Limit on the growing retransmission timeout: after an outage of seconds, a connection would else stand
# still for seconds more. The option's number on Linux (6.15 or later; Python has no name for it), and its
# value in milliseconds, the lowest that the kernel takes.
TCP_RTO_MAX_MS, RETRANSMIT_MS_MAX = 44, 1_000

CONGESTION_NAME_BYTES = 16  # the kernel's limit
RTT_OFFSET = 68  # of tcpi_rtt in Linux's struct tcp_info; both are microseconds
MIN_RTT_OFFSET = 148  # of tcpi_min_rtt in Linux's struct tcp_info


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


def round_trips_s(sock: trio.socket.SocketType | socket.socket) -> tuple[float, float] | None:
    """Return a connection's recent and its shortest round trip, or None if the kernel does not tell them.

    The recent one is the kernel's mean over the last few; the shortest is that of some minutes.
    """
    if not hasattr(socket, "TCP_INFO"):
        return None
    try:
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, MIN_RTT_OFFSET + 4)
    except OSError:
        return None
    if len(info) < MIN_RTT_OFFSET + 4:
        return None
    recent, shortest = (
        int.from_bytes(info[offset : offset + 4], sys.byteorder)
        for offset in (RTT_OFFSET, MIN_RTT_OFFSET)
    )
    return None if shortest == 2**32 - 1 else (recent / 1e6, shortest / 1e6)


def shortest_round_trip_s(sock: trio.socket.SocketType) -> float:
    """Return the shortest round trip that the kernel saw, or infinity if it does not tell it."""
    round_trips = round_trips_s(sock)
    return math.inf if round_trips is None else round_trips[1]
