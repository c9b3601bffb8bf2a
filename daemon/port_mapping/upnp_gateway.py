"""A router that speaks UPnP IGD, which most do: a search over UDP, its description and calls over
HTTP.

Any machine of the network may answer the search, and with anything. So only the router is heard and
asked, and its answers are limited in size and time.
"""

from __future__ import annotations

import re
import socket
from contextlib import suppress
from urllib.parse import urljoin, urlsplit

import trio

from ...protocol.addresses import PORT_MAX, Address
from ...protocol.text import TEXT_CHARS_MAX
from .gateway import Gateway, MappingError, PortMapping, check_public

SEARCHED = ("239.255.255.250", 1_900)
DATAGRAM_BYTES_MAX = 2_048
WAITS_S = (1.0, 2.0)  # from a search to its repetition, and from that on
ANSWER_BYTES_MAX = 262_144  # over HTTP; descriptions have some thousands
ANSWER_S = 5.0  # after that, what has come of an answer counts
LIFETIME_S = 3_600
FOREVER_S = 86_400.0  # of a mapping that some routers keep until it is given back
TRIED_PORTS = 10  # the port may be another machine's already
DESCRIPTION = "holdfast"
KINDS = ("WANIPConnection:2", "WANIPConnection:1", "WANPPPConnection:1")  # that map ports
ONLY_PERMANENT = "725"  # an error of AddPortMapping
TAKEN = ("718", "729")  # in the mapping entry, or with another mechanism

SEARCH = (
    b'M-SEARCH * HTTP/1.1\r\nHOST: 239.255.255.250:1900\r\nMAN: "ssdp:discover"\r\nMX: 1\r\n'
    b"ST: urn:schemas-upnp-org:device:InternetGatewayDevice:1\r\n\r\n"
)
GET = "GET {path} HTTP/1.0\r\nHost: {place}\r\nConnection: close\r\n\r\n"
CALL = (
    "POST {path} HTTP/1.0\r\nHost: {place}\r\nConnection: close\r\nContent-Length: {size}\r\n"
    'Content-Type: text/xml; charset="utf-8"\r\nSOAPAction: "{kind}#{action}"\r\n\r\n{body}'
)
BODY = (
    '<?xml version="1.0"?>\r\n<s:Envelope xmlns:s="http://schemas.xmlsoap.org/soap/envelope/" '
    's:encodingStyle="http://schemas.xmlsoap.org/soap/encoding/"><s:Body>'
    '<u:{action} xmlns:u="{kind}">{fields}</u:{action}></s:Body></s:Envelope>\r\n'
)


class UpnpGateway(Gateway):
    """A router at an address of this network, asked to map ``own``."""

    def __init__(self, router: str, own: Address) -> None:
        super().__init__(router, own)
        self._services: list[tuple[str, str]] = []  # kinds, and where they are called
        self._lifetime_s = LIFETIME_S

    async def map(self) -> PortMapping:
        services = self._services or await self._find()
        self._services = []  # look for the router again if none maps the port
        why = MappingError(f"the router {self._router} maps no ports by UPnP")
        for service in services:
            try:
                self._given = await self._map(service)
            except MappingError as error:
                why = error
                continue
            self._services = [service]
            return PortMapping(self._given, self._lifetime_s or FOREVER_S, "UPnP")
        raise why

    async def unmap(self) -> None:
        if self._given is not None:
            for service in self._services:
                with suppress(MappingError):  # the router is gone, or has lost it
                    await self._call(service, "DeletePortMapping", **_outside(self._given.port))
            self._given = None

    async def _map(self, service: tuple[str, str]) -> Address:
        """Have the port mapped; return where."""
        host = _inside(await self._call(service, "GetExternalIPAddress"), "NewExternalIPAddress")
        check_public(host)
        wanted = self._own.port if self._given is None else self._given.port
        for port in range(wanted, min(wanted + TRIED_PORTS, PORT_MAX + 1)):
            error = await self._add(service, port)
            if error == ONLY_PERMANENT:
                self._lifetime_s = 0
                error = await self._add(service, port)
            if not error:
                return Address(host, port)
            if error not in TAKEN:
                raise MappingError(f"the router refuses by UPnP: error {error}")
        raise MappingError(f"the router's ports from {wanted} on lead to other machines")

    async def _add(self, service: tuple[str, str], port: int) -> str:
        """Return the router's error, or an empty text."""
        answer = await self._call(
            service,
            "AddPortMapping",
            **_outside(port),
            NewInternalPort=self._own.port,
            NewInternalClient=self._own.host,
            NewEnabled=1,
            NewPortMappingDescription=DESCRIPTION,
            NewLeaseDuration=self._lifetime_s,
        )
        done = "AddPortMappingResponse" in answer
        return "" if done else _inside(answer, "errorCode") or "without a code"

    # ------------------------------------------------------------ the router's answers

    async def _find(self) -> list[tuple[str, str]]:
        url = await self._search()
        description = await self._ask(url, GET)
        base = _inside(description, "URLBase") or url
        found = []
        for name in KINDS:
            kind = f"urn:schemas-upnp-org:service:{name}"
            _, _, rest = description.partition(f"{kind}</serviceType>")
            if path := _inside(rest, "controlURL"):
                found.append((kind, urljoin(base, path)))
        return found

    async def _search(self) -> str:
        """Return where the router's description is."""
        with suppress(OSError), trio.socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp:
            await udp.bind((self._own.host, 0))
            own = socket.inet_aton(self._own.host)
            udp.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, own)
            for wait_s in WAITS_S:
                for host in (SEARCHED[0], self._router):
                    await udp.sendto(SEARCH, (host, SEARCHED[1]))
                with trio.move_on_after(wait_s):
                    while True:
                        data, (host, *_) = await udp.recvfrom(DATAGRAM_BYTES_MAX)
                        found = re.search(rb"(?im)^location:\s*([!-~]+)", data)
                        if host == self._router and found:
                            return found[1].decode("ascii")
        raise MappingError(f"the router {self._router} does not answer by UPnP")

    async def _call(self, service: tuple[str, str], action: str, **arguments: object) -> str:
        kind, url = service
        fields = "".join(f"<{name}>{value}</{name}>" for name, value in arguments.items())
        body = BODY.format(action=action, kind=kind, fields=fields)
        return await self._ask(url, CALL, kind=kind, action=action, size=len(body), body=body)

    async def _ask(self, url: str, request: str, **more: object) -> str:
        """Return the beginning of the router's answer over HTTP; raise MappingError without one."""
        answer = bytearray()
        try:
            parts = urlsplit(url)
            if parts.scheme != "http" or parts.hostname != self._router:
                raise MappingError(f"the router {self._router} names another machine by UPnP")
            path = parts._replace(scheme="", netloc="").geturl() or "/"
            with trio.move_on_after(ANSWER_S):
                async with await trio.open_tcp_stream(self._router, parts.port or 80) as stream:
                    sent = request.format(path=path, place=parts.netloc, **more)
                    await stream.send_all(sent.encode("ascii"))
                    while len(answer) < ANSWER_BYTES_MAX and (part := await stream.receive_some()):
                        answer += part
        except (OSError, ValueError, trio.BrokenResourceError):
            raise MappingError(f"the router {self._router} does not answer by UPnP") from None
        return answer.decode("latin-1")


def _outside(port: int) -> dict[str, object]:
    return {"NewRemoteHost": "", "NewExternalPort": port, "NewProtocol": "TCP"}


def _inside(text: str, name: str) -> str:
    """Return the word in an XML element; empty if there is none, or one that may not be shown."""
    found = re.search(rf"<{name}>\s*([!-;=?-~]{{1,{TEXT_CHARS_MAX}}})\s*</{name}>", text)
    return found[1] if found else ""
