"""A router that speaks PCP, over UDP."""

from __future__ import annotations

import os
import socket
from contextlib import suppress

import trio

from ...protocol.addresses import Address
from .gateway import Gateway, MappingError, PortMapping, check_public
from .pcp_messages import (
    ANSWER_BYTES_MAX,
    NONCE_BYTES,
    PORT,
    MapAnswer,
    MapRequest,
    pcp_request,
    read_pcp_answer,
)

LIFETIME_S = 7_200  # as RFC 6886 recommends; it is renewed at its half
# From a request to its repetition, doubled each time: RFC 6886, section 3.1, but given up sooner.
WAITS_S = (0.25, 0.5, 1.0, 2.0)


class PcpGateway(Gateway):
    """A router that is asked by PCP to map ``own``."""

    def __init__(self, router: str, own: Address, port: int = PORT) -> None:
        super().__init__(router, own)
        self._port = port
        self._nonce = os.urandom(NONCE_BYTES)

    async def map(self) -> PortMapping:
        answer = await self._ask(LIFETIME_S)
        self._given = Address(answer.host, answer.port)
        check_public(answer.host)
        if not answer.port:
            raise MappingError(f"the router {self._router} gives no port")
        return PortMapping(self._given, answer.lifetime_s, "PCP")

    async def unmap(self) -> None:
        if self._given is None:
            return
        with suppress(MappingError):  # it ends by itself, too
            await self._ask(0)
        self._given = None

    async def _ask(self, lifetime_s: int) -> MapAnswer:
        """Send a request until it is answered; raises MappingError if it is not."""
        request = MapRequest(self._own, self._nonce, lifetime_s, self._given)
        family = socket.AF_INET6 if ":" in self._own.host else socket.AF_INET
        with trio.socket.socket(family, socket.SOCK_DGRAM) as udp:
            try:
                await udp.bind((self._own.host, 0))
                await udp.connect((self._router, self._port))  # others' datagrams do not come in
                for wait_s in WAITS_S:
                    await udp.send(pcp_request(request))
                    with trio.move_on_after(wait_s):
                        while True:
                            answer = read_pcp_answer(await udp.recv(ANSWER_BYTES_MAX), request)
                            if answer is not None:
                                return answer
            except OSError as error:
                raise MappingError(
                    f"the router {self._router} does not speak PCP ({error.strerror})"
                ) from None
        raise MappingError(f"the router {self._router} does not answer PCP")
