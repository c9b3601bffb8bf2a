"""Tasks that run beside a block and end with it, and waiting for what they do."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import trio

SOON_S = 120.0  # nothing takes this long unless something hangs


async def until(condition: Callable[[], object], look_s: float = 0.01) -> None:
    """Wait until something is so."""
    with trio.fail_after(SOON_S):
        while not condition():
            await trio.sleep(look_s)


@asynccontextmanager
async def background() -> AsyncIterator[trio.Nursery]:
    """Give a nursery whose tasks are cancelled at the end of the block."""
    async with trio.open_nursery() as nursery:
        yield nursery
        nursery.cancel_scope.cancel()
