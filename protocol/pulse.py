"""A pulse wakes the tasks that wait for it, and no later ones."""

from __future__ import annotations

import trio


class Pulse:
    """Like a ``trio.Event`` that is replaced each time it is set."""

    def __init__(self) -> None:
        self._next = trio.Event()

    def notify_all(self) -> None:
        """Wake all tasks that wait now."""
        over, self._next = self._next, trio.Event()
        over.set()

    async def wait(self) -> None:
        await self._next.wait()
