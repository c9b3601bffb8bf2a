"""Lookup of host names that members gave, in threads that nothing else uses.

A name server that does not answer blocks a thread for half a minute, even after the lookup was
cancelled. Trio's 40 threads write the journal and digest the state, and a member that gives bad
names must not occupy them. So names from members are looked up in threads of a few *groups*, and
all of one member's in the same group: a member with bad names delays mostly itself.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import trio

GROUPS = 16  # a member shares its group with one in sixteen others
LOOKUPS_EACH = 2  # at once in a group: as many names as a member's addresses are tried for

_giver: ContextVar[str | None] = ContextVar("_giver", default=None)
_installed: trio.lowlevel.RunVar[bool] = trio.lowlevel.RunVar("_installed", default=False)


class _Lookups(trio.abc.HostnameResolver):
    """All lookups of one ``trio.run``; names from this node's operator use trio's threads."""

    def __init__(self) -> None:
        self._groups = [trio.CapacityLimiter(LOOKUPS_EACH) for _ in range(GROUPS)]

    async def getaddrinfo(
        self,
        host: bytes | None,
        port: bytes | str | int | None,
        family: int = 0,
        type: int = 0,
        proto: int = 0,
        flags: int = 0,
    ) -> list[Any]:
        giver = _giver.get()
        return await trio.to_thread.run_sync(
            partial(socket.getaddrinfo, host, port, family, type, proto, flags),
            abandon_on_cancel=True,
            limiter=None if giver is None else self._groups[hash(giver) % GROUPS],
        )

    async def getnameinfo(
        self, sockaddr: tuple[str, int] | tuple[str, int, int, int], flags: int
    ) -> tuple[str, str]:
        return await trio.to_thread.run_sync(
            partial(socket.getnameinfo, sockaddr, flags), abandon_on_cancel=True
        )


@contextmanager
def given_by(giver: str | None) -> Iterator[None]:
    """Attribute the names looked up in the block to a member, or (None) to this node's operator."""
    if not _installed.get():
        _installed.set(True)
        trio.socket.set_custom_hostname_resolver(_Lookups())
    token = _giver.set(giver)
    try:
        yield
    finally:
        _giver.reset(token)
