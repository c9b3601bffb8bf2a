"""Simulated hosts whose processes are stopped, as by SIGSTOP or a machine's sleep.

A frozen link is different: behind it the process continues, its timers fire, and it gives up on
peers. A stopped process that continues finds that its clock has jumped ahead and all its timers are
late, and finds the data that arrived meanwhile.

All hosts share one trio loop. A task belongs to the host in whose context it was started. While the
host is stopped, its runnable tasks are set aside.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import trio

_HOST: ContextVar[str] = ContextVar("host")


@contextmanager
def on_host(name: str) -> Iterator[None]:
    """Assign the tasks started in this context, and their child tasks, to a host."""
    token = _HOST.set(name)
    try:
        yield
    finally:
        _HOST.reset(token)


class FrozenHosts(trio.abc.Instrument):
    """The set of stopped hosts.

    A host must continue before its tasks are cancelled, because stopped tasks cannot end.
    """

    def __init__(self) -> None:
        self._aside: dict[str, list[trio.lowlevel.Task]] = {}  # runnable tasks, by host

    def stop(self, name: str) -> None:
        if not self._aside:
            trio.lowlevel.add_instrument(self)
        self._aside.setdefault(name, [])

    def go_on(self, name: str) -> None:
        """Continue a host's tasks; those that are due run at once."""
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
        """Take a stopped host's task off the end of trio's run queue."""
        tasks = self._aside.get(task.context.get(_HOST, ""))
        if tasks is not None:
            tasks.append(task._runner.runq.pop())
