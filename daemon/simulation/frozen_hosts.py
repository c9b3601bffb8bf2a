"""Hosts whose processes stand still, as after SIGSTOP or on a machine that sleeps.

A frozen link is not the same: behind it the process goes on, its timers fire, it gives up on others.
A process that stood still finds, when it goes on, that its clock has leapt ahead, that all its
timers are late, and whatever came meanwhile.

All hosts share one trio loop. A task belongs to the host in whose context it was started; while the
host stands still, its tasks that could run are put aside instead, until it goes on.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import trio

_HOST: ContextVar[str] = ContextVar("host")


@contextmanager
def on_host(name: str) -> Iterator[None]:
    """What is started in here belongs to this host, and so does all that that starts."""
    token = _HOST.set(name)
    try:
        yield
    finally:
        _HOST.reset(token)


class FrozenHosts(trio.abc.Instrument):
    """Which hosts stand still.

    Whoever stops a host must let it go on before its tasks are cancelled: they could not end.
    """

    def __init__(self) -> None:
        self._aside: dict[str, list[trio.lowlevel.Task]] = {}  # tasks that could run, by host

    def stop(self, name: str) -> None:
        """Let nothing of this host run any more."""
        if not self._aside:
            trio.lowlevel.add_instrument(self)
        self._aside.setdefault(name, [])

    def go_on(self, name: str) -> None:
        """Let this host's tasks run again; all that are due run at once."""
        tasks = self._aside.pop(name, None)
        if tasks is None:
            return
        if not self._aside:
            trio.lowlevel.remove_instrument(self)
        for task in tasks:
            task._runner.runq.append(task)

    def stopped(self, name: str) -> bool:
        return name in self._aside

    def all_go_on(self) -> None:
        for name in list(self._aside):
            self.go_on(name)

    def task_scheduled(self, task: trio.lowlevel.Task) -> None:
        """Trio has just put this task at the end of its queue: take it out again."""
        tasks = self._aside.get(task.context.get(_HOST, ""))
        if tasks is not None:
            tasks.append(task._runner.runq.pop())
