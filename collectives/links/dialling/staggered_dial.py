"""Dialling one of several addresses of a member, of which some may be good from elsewhere only."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import trio

from ....protocol.addresses import Address
from ....protocol.errors import RemoteProtocolError, UserError

DIAL_S = 5.0  # per address: longer than any round trip, short enough to try the next
STAGGER_S = 0.25  # from dialling one address to dialling the next one beside it (RFC 8305)

T = TypeVar("T")


async def dial_first(
    addresses: Sequence[str],
    dial: Callable[[Address], Awaitable[T]],
    close: Callable[[T], Awaitable[None]],
) -> tuple[Address, T]:
    """Dial addresses, each ``STAGGER_S`` later or as one fails; take what answers first.

    Args:
      dial: connects to an address.
      close: ends a connection that came at the same moment as another one.

    Raises:
      OSError, RemoteProtocolError, UserError, trio.BrokenResourceError, trio.EndOfChannel: the last
        error, if none answers. Each is given ``DIAL_S``.
    """
    error: Exception = OSError("it has no address")
    found: list[tuple[Address, T]] = []

    async def attempt(text: str, over: trio.Event) -> None:
        nonlocal error
        try:
            address = Address.parse(text)
            with trio.fail_after(DIAL_S):
                connection = await dial(address)
        except trio.TooSlowError:
            error = TimeoutError(f"{text} did not answer within {DIAL_S:g} s")
        except (
            OSError,
            UserError,
            RemoteProtocolError,
            trio.BrokenResourceError,
            trio.EndOfChannel,
        ) as failure:
            error = failure
        else:
            if found:
                with trio.CancelScope(shield=True):
                    await close(connection)
                return
            found.append((address, connection))
            nursery.cancel_scope.cancel()
        finally:
            over.set()

    async with trio.open_nursery() as nursery:
        for text in addresses:
            over = trio.Event()
            nursery.start_soon(attempt, text, over)
            with trio.move_on_after(STAGGER_S):
                await over.wait()
    if not found:
        raise error
    return found[0]
