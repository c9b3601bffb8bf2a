"""The handshakes that open links and their lanes, and the keys that they agree on.

A link (``>`` dialer, ``<`` acceptor), on its control stream:

    > LinkHello(link_id, secret)   < LinkHello(link_id, secret)   < LinkReady

A lane, as long as the link lives; the link is up with its first one:

    > preamble, OPEN               < OPEN

This file knows no views and no policy: the callers decide which peer may have a link, and how many
lanes a link has.
"""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import trio
from attrs import field, frozen

from ....protocol import messages as m
from ....protocol.errors import RemoteProtocolError
from ....protocol.network.interface import Network
from ....protocol.network.lane import (
    LINK_ID_BYTES,
    SECRET_BYTES,
    derive_lane_keys,
    receive_preamble,
    send_preamble,
)
from ....protocol.network.stream import MessageStream
from ..lane_pool import LanePool
from ..link_lane import LinkLane

M = TypeVar("M", bound=m.Message)

# Opens one more connection over the same route.
Connect = Callable[[], Awaitable[trio.abc.Stream]]


@frozen
class LinkKeys:
    """The secrets that only the two ends of a link know."""

    link_id: bytes
    secret_dialer: bytes = field(repr=False)
    secret_acceptor: bytes = field(repr=False)

    def derive_lane_keys(self, number: int) -> tuple[bytes, bytes]:
        """Return a lane's two keys: (dialer to acceptor, acceptor to dialer)."""
        return derive_lane_keys(self.secret_dialer, self.secret_acceptor, self.link_id, number)


# ---------------------------------------------------------------- the control stream


async def dial_link(messages: MessageStream) -> LinkKeys:
    """Do the dialer's half of the handshake on a control stream.

    Raises:
      RemoteProtocolError: the other side refused the link, or broke the protocol.
    """
    link_id = secrets.token_bytes(LINK_ID_BYTES)
    secret = secrets.token_bytes(SECRET_BYTES)
    await messages.send(_hello(link_id, secret))
    hello = await _receive_answer(messages, m.LinkHello)
    if version_refusal(hello) is not None:
        raise RemoteProtocolError(
            f"it speaks versions {hello.version_min} to {hello.version_max}, "
            f"this node speaks {m.VERSION_MIN} to {m.VERSION_MAX}"
        )
    await _receive_answer(messages, m.LinkReady)
    return LinkKeys(link_id, secret, hello.secret)


def keys_for(hello: m.LinkHello) -> LinkKeys:
    """Return the acceptor's keys for a dialer's hello, with a new secret of its own."""
    return LinkKeys(hello.link_id, hello.secret, secrets.token_bytes(SECRET_BYTES))


async def welcome_link(messages: MessageStream, keys: LinkKeys) -> None:
    """Do the acceptor's half of the handshake, once the link's lanes can be accepted."""
    await messages.send(_hello(keys.link_id, keys.secret_acceptor))
    await messages.send(m.LinkReady())


def version_refusal(hello: m.LinkHello) -> m.Refused | None:
    """Return a refusal if the two sides have no protocol version in common, else None."""
    if hello.version_min <= m.VERSION_MAX and hello.version_max >= m.VERSION_MIN:
        return None
    return m.Refused(
        m.RefusalCode.VERSION,
        f"you speak versions {hello.version_min} to {hello.version_max}, "
        f"I speak {m.VERSION_MIN} to {m.VERSION_MAX}",
    )


def _hello(link_id: bytes, secret: bytes) -> m.LinkHello:
    return m.LinkHello(m.VERSION_MIN, m.VERSION_MAX, link_id, secret)


async def _receive_answer(messages: MessageStream, expected: type[M]) -> M:
    message = await messages.receive_expected(expected, m.Refused)
    if isinstance(message, m.Refused):
        raise RemoteProtocolError(f"it refused the link: {message.reason}")
    return message


# ---------------------------------------------------------------- lanes


async def dial_lane(
    network: Network, connect: Connect, keys: LinkKeys, lane_pool: LanePool, number: int
) -> LinkLane:
    """Open one more lane of a link, over a new connection. The caller bounds the time.

    Raises:
      OSError, trio.BrokenResourceError, trio.EndOfChannel: the lane cannot be opened now.
      RemoteProtocolError: the other end does not have the keys.
    """
    stream = await connect()
    from_dialer, from_acceptor = keys.derive_lane_keys(number)
    lane = lane_pool.make_lane(number, stream, send_key=from_dialer, receive_key=from_acceptor)
    opened = False
    try:
        lane_pool.claim_lane(lane)
        await send_preamble(stream, keys.link_id, number)
        await lane.records.open()
        await lane.records.wait_open()
        lane.facts = network.prepare_lane(stream, lane_pool.rules.congestion)
        opened = True
    finally:
        if not opened:
            lane_pool.forget_lane(lane)
            await trio.aclose_forcefully(stream)
    return lane


class LaneAcceptor:
    """Table of the links whose lanes may be accepted. Made by ``LinkHub``.

    A lane's first bytes name a link that was accepted here and still lives. Its first record proves
    that its dialer has that link's keys.
    """

    def __init__(self, network: Network) -> None:
        self._network = network
        self._offers: dict[bytes, tuple[LinkKeys, LanePool]] = {}

    @contextmanager
    def offer(self, keys: LinkKeys, lane_pool: LanePool) -> Iterator[None]:
        """Accept lanes of a link while the block runs.

        Raises:
          RemoteProtocolError: another link has its id.
        """
        if keys.link_id in self._offers:
            raise RemoteProtocolError("that link id is in use")
        self._offers[keys.link_id] = (keys, lane_pool)
        try:
            yield
        finally:
            del self._offers[keys.link_id]

    async def accept(self, stream: trio.abc.Stream) -> LinkLane:
        """Add a lane to its link. The caller bounds the time.

        Raises:
          RemoteProtocolError: it belongs to no link, or its dialer does not have the keys.
        """
        preamble = await receive_preamble(stream)
        offer = self._offers.get(preamble.link_id)
        if offer is None:
            raise RemoteProtocolError("a lane names a link that this node does not have")
        keys, lane_pool = offer
        from_dialer, from_acceptor = keys.derive_lane_keys(preamble.lane)
        lane = lane_pool.make_lane(
            preamble.lane, stream, send_key=from_acceptor, receive_key=from_dialer
        )
        try:
            await lane.records.wait_open()
        except trio.EndOfChannel:
            raise RemoteProtocolError("a lane ended before it was opened") from None
        # The dialer has the keys. Nothing may wait between the claim and this side's first record:
        # a lane's keys must encrypt one stream only.
        lane_pool.claim_lane(lane)
        opened = False
        try:
            await lane.records.open()
            lane.facts = self._network.prepare_lane(stream, lane_pool.rules.congestion)
            opened = True
        finally:
            if not opened:
                lane_pool.forget_lane(lane)
        lane_pool.start_lane(lane)
        return lane
