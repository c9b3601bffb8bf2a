"""Real sockets whose incoming packets the kernel drops; no privileges are needed."""

from __future__ import annotations

import contextlib
import ctypes
import socket
import struct
from collections.abc import Iterator

import trio

# Of linux/asm-generic/socket.h; Python has no names for them.
SO_ATTACH_FILTER, SO_DETACH_FILTER = 26, 27
RETURN = 0x06  # of linux/filter.h: BPF_RET | BPF_K; returns how many bytes of a packet are kept


@contextlib.contextmanager
def drops_everything(sock: socket.socket | trio.socket.SocketType) -> Iterator[None]:
    """Drop every packet that comes for this connection, so that its sender must send it again."""
    program = ctypes.create_string_buffer(struct.pack("@HBBI", RETURN, 0, 0, 0))
    filters = struct.pack("@HP", 1, ctypes.addressof(program))
    sock.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, filters)
    try:
        yield
    finally:
        sock.setsockopt(socket.SOL_SOCKET, SO_DETACH_FILTER, 0)
