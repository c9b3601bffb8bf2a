"""Helpers for the tasks of every process: signals, and one error out of a group."""

from __future__ import annotations

import signal
from collections.abc import Callable

import trio

from ...protocol.errors import HoldfastError


async def wait_for_signals(
    on_signal: Callable[[], None], *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
) -> None:
    """Call ``on_signal`` at every SIGINT and SIGTERM, and at SIGHUP if it comes first.

    A terminal or an ssh connection that is closed sends SIGHUP, often twice, which must not pass
    for an impatient second Ctrl+C. Under ``nohup`` it stays ignored.
    """
    hang_up = {signal.SIGHUP} if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN else set()
    first = True
    with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM, *hang_up) as signals:
        task_status.started()
        async for number in signals:
            if first or number not in hang_up:
                on_signal()
            first = False


def only_error(group: BaseExceptionGroup[BaseException]) -> HoldfastError | None:
    """Return the first error of a group that holds only HoldfastErrors, else None."""
    ours, others = group.split(HoldfastError)
    first: BaseException | None = ours
    while isinstance(first, BaseExceptionGroup):
        first = first.exceptions[0]
    return first if others is None and isinstance(first, HoldfastError) else None
