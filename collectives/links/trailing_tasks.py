"""Tasks that send a round's result to members that no other node waits for."""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable

import trio

# Rounds that a member outside the contributors may lag behind in what it is sent. Each holds one
# encoded result in memory; a member that lags further has to be resynced anyway.
TRAILING_MAX = 4


class TrailingTasks:
    """The trailing tasks of a node, by member and round. Made and owned by ``LinkHub``."""

    def __init__(self) -> None:
        self._by_peer: dict[str, list[tuple[int, trio.CancelScope]]] = {}

    def start(
        self,
        nursery: trio.Nursery,
        peer: str,
        round_: int,
        task: Callable[[], Awaitable[None]],
    ) -> trio.CancelScope:
        """Run a task, and return its scope; cancel the member's oldest round if it has too many."""
        scope = trio.CancelScope()
        tasks = self._by_peer.setdefault(peer, [])
        tasks.append((round_, scope))
        rounds = list(dict.fromkeys(trailing_round for trailing_round, _scope in tasks))
        for trailing_round, trailing_scope in tasks:
            if trailing_round in rounds[:-TRAILING_MAX]:
                trailing_scope.cancel()
        nursery.start_soon(self._run, peer, (round_, scope), task)
        return scope

    async def _run(
        self,
        peer: str,
        entry: tuple[int, trio.CancelScope],
        task: Callable[[], Awaitable[None]],
    ) -> None:
        try:
            with entry[1]:
                await task()
        finally:
            self._by_peer[peer].remove(entry)
            if not self._by_peer[peer]:
                del self._by_peer[peer]

    def has(self, round_: int) -> bool:
        """Return whether any of the round's tasks still run."""
        tasks = itertools.chain.from_iterable(self._by_peer.values())
        return any(trailing_round == round_ for trailing_round, _scope in tasks)

    def stop(self, round_: int) -> None:
        for tasks in self._by_peer.values():
            for trailing_round, scope in tasks:
                if trailing_round == round_:
                    scope.cancel()
