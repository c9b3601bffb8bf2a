"""Helpers for the tasks of every process: signals, and one error out of a group."""

from __future__ import annotations

import signal
from collections.abc import Callable

import trio

from ..protocol.errors import HoldfastError


async def wait_for_signals(
    on_signal: Callable[[], None], *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
) -> None:
    """Call ``on_signal`` at every SIGINT and SIGTERM, until cancelled.

    Args:
      task_status: says when no signal ends the process any more.
    """
    with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        task_status.started()
        async for _ in signals:
            on_signal()


def only_error(group: BaseExceptionGroup[BaseException]) -> HoldfastError | None:
    """Return the first error of a group that holds only HoldfastErrors, else None."""
    leaves = list(_leaves(group))
    ours = [leaf for leaf in leaves if isinstance(leaf, HoldfastError)]
    return ours[0] if ours and len(ours) == len(leaves) else None


def _leaves(error: BaseException) -> list[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        return [leaf for part in error.exceptions for leaf in _leaves(part)]
    return [error]
