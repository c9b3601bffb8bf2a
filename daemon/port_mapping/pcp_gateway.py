"""A router that speaks PCP or NAT-PMP, over UDP."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

import trio

from ...protocol.addresses import Address
from .gateway import Gateway, MappingError, NotUnderstoodError, PortMapping, check_public
from .pcp_messages import (
    ANSWER_BYTES_MAX,
    NONCE_BYTES,
    PORT,
    MapAnswer,
    MapRequest,
    nat_pmp_address_request,
    nat_pmp_request,
    pcp_request,
    read_nat_pmp_address,
    read_nat_pmp_answer,
    read_pcp_answer,
)

LIFETIME_S = 7_200  # as RFC 6886 recommends; it is renewed at its half
# From a request to its repetition, doubled each time: RFC 6886, section 3.1, but given up sooner.
WAITS_S = (0.25, 0.5, 1.0, 2.0)

Answer = TypeVar("Answer")


class PcpGateway(Gateway):
    """A router, asked by PCP first and by NAT-PMP if it does not speak that, to map ``own``."""

    def __init__(self, router: str, own: Address, port: int = PORT) -> None:
        super().__init__(router, own)
        self._port = port
        self._nonce = os.urandom(NONCE_BYTES)
        self._is_old = False  # it speaks NAT-PMP only

    async def map(self) -> PortMapping:
        if not self._is_old:
            try:
                return self._note(await self._ask_pcp(LIFETIME_S), "PCP")
            except NotUnderstoodError:
                if ":" in self._own.host:
                    raise
                self._is_old = True
        return self._note(await self._ask_nat_pmp(LIFETIME_S), "NAT-PMP")

    async def unmap(self) -> None:
        if self._given is None:
            return
        ask = self._ask_nat_pmp if self._is_old else self._ask_pcp
        with suppress(MappingError):  # it ends by itself, too
            await ask(0)
        self._given = None

    def _note(self, answer: MapAnswer, protocol: str) -> PortMapping:
        self._given = Address(answer.host, answer.port)
        check_public(answer.host)
        if not answer.port:
            raise MappingError(f"the router {self._router} gives no port")
        return PortMapping(self._given, answer.lifetime_s, protocol)

    async def _ask_pcp(self, lifetime_s: int) -> MapAnswer:
        request = MapRequest(self._own, self._nonce, lifetime_s, self._given)
        return await self._exchange(
            pcp_request(request), lambda data: read_pcp_answer(data, request)
        )

    async def _ask_nat_pmp(self, lifetime_s: int) -> MapAnswer:
        request = MapRequest(self._own, self._nonce, lifetime_s, self._given)
        mapped = await self._exchange(
            nat_pmp_request(request), lambda data: read_nat_pmp_answer(data, self._own.port)
        )
        if not lifetime_s:
            return mapped
        host = await self._exchange(nat_pmp_address_request(), read_nat_pmp_address)
        return MapAnswer(host, mapped.port, mapped.lifetime_s)

    async def _exchange(self, data: bytes, read: Callable[[bytes], Answer | None]) -> Answer:
        """Send a request until it is answered; raises MappingError if it is not."""
        family = socket.AF_INET6 if ":" in self._own.host else socket.AF_INET
        with trio.socket.socket(family, socket.SOCK_DGRAM) as udp:
            try:
                await udp.bind((self._own.host, 0))
                await udp.connect((self._router, self._port))  # others' datagrams do not come in
                for wait_s in WAITS_S:
                    await udp.send(data)
                    with trio.move_on_after(wait_s):
                        while True:
                            answer = read(await udp.recv(ANSWER_BYTES_MAX))
                            if answer is not None:
                                return answer
            except OSError as error:
                raise MappingError(
                    f"the router {self._router} speaks neither PCP nor NAT-PMP ({error.strerror})"
                ) from None
        raise MappingError(f"the router {self._router} answers neither PCP nor NAT-PMP")
