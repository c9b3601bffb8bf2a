"""Host names that others gave: looked up in threads that nothing else needs.

A name server that says nothing keeps a thread for half a minute, also when nobody waits for it any more.
Trio's own threads write the journal and digest the state, and there are 40 of them; a member that gives bad
names must not get at these. So whatever a member gave is looked up in threads of a few *lanes*, and all of
one member's in the same: those with bad names wait for themselves.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import trio

LANES = 16  # a member shares its lane with every sixteenth other one
LOOKUPS_EACH = 2  # at once: as many names as a member's addresses are tried for

_giver: ContextVar[str | None] = ContextVar("_giver", default=None)
_installed: trio.lowlevel.RunVar[bool] = trio.lowlevel.RunVar("_installed", default=False)


class _Lookups(trio.abc.HostnameResolver):
    """All lookups of one ``trio.run``; names of our own owner in trio's threads, as ever."""

    def __init__(self) -> None:
        self._lanes = [trio.CapacityLimiter(LOOKUPS_EACH) for _ in range(LANES)]

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
            limiter=None if giver is None else self._lanes[hash(giver) % LANES],
        )

    async def getnameinfo(
        self, sockaddr: tuple[str, int] | tuple[str, int, int, int], flags: int
    ) -> tuple[str, str]:
        return await trio.to_thread.run_sync(
            partial(socket.getnameinfo, sockaddr, flags), abandon_on_cancel=True
        )


@contextmanager
def given_by(giver: str | None) -> Iterator[None]:
    """Names that are looked up in this block are this member's; None: our own owner's."""
    if not _installed.get():
        _installed.set(True)
        trio.socket.set_custom_hostname_resolver(_Lookups())
    token = _giver.set(giver)
    try:
        yield
    finally:
        _giver.reset(token)
