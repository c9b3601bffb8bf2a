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
# BBR sends each packet by a timer. Over a path with a shorter round trip than this (one machine, one switch) nothing
# is gained by that, and the timers take more of a processor than all else that sending does: 2 GiB over loopback cost
# 0.41 s with BBR, 0.14 s without.
PACED_ROUND_TRIP_S_MIN = 0.000_5
PACED = "bbr"
UNPACED = (
    "cubic",
    "reno",
)  # used there, the first that the kernel has and permits; it always permits the last
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
