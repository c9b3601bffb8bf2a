"""The little run that a head and its hosts are: its authority, its string, its members."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import trio
from attrs import frozen

from ....collectives.links.link import Link
from ....collectives.links.link_parts import LinkRules
from ....protocol.addresses import Address
from ....protocol.connection_phases import HOST_LINK
from ....protocol.durable_files import write_private
from ....protocol.errors import PeerLostError
from ....protocol.messages import COUNT_MAX, MemberInfo, Message, Role
from ....protocol.trust.authority import Authority, Party
from ....protocol.trust.credentials import Credentials
from ....protocol.trust.identity import Identity
from ....protocol.trust.invite import HOST_PREFIX, Invite, generate_token
from ...process.paths import make_private

SITE_FOLDER = "site"  # in the head's state directory
TOKEN_FILE = "token"
PORT_FILE = "port"
HOST_RULES = LinkRules(silence_s=15.0, phase=HOST_LINK)


@frozen
class Site:
    """What the head needs to be the head."""

    authority: Authority
    credentials: Credentials
    token: str
    folder: Path

    @classmethod
    def open(cls, state: Path, identity: Identity, name: str) -> Site:
        """Load a site from the head's state directory, or make a new one."""
        folder = make_private(state / SITE_FOLDER)
        authority = Authority.load_or_create(folder, site_id(identity.peer_id))
        certificate = authority.issue(identity.request_pem(name), name, Party.PEER)
        own = make_private(folder / "head")
        credentials = Credentials(own, identity, certificate, authority.certificate_pem)
        token = _kept(folder / TOKEN_FILE) or generate_token()
        write_private(folder / TOKEN_FILE, token.encode())
        return cls(authority, credentials, token, folder)

    def renew(self) -> None:
        """Give the head another certificate: each lasts for a day."""
        identity = self.credentials.identity
        certificate = self.authority.issue(identity.request_pem(""), "", Party.PEER)
        self.credentials.replace_certificate(certificate)

    @property
    def port(self) -> int:
        """The port of the last process, which the string names; 0: there was none."""
        text = _kept(self.folder / PORT_FILE)
        return int(text) if text.isdecimal() else 0

    def keep_port(self, port: int) -> None:
        write_private(self.folder / PORT_FILE, str(port).encode())

    def string(self, addresses: tuple[Address, ...]) -> str:
        """Return the string that admits hosts to this peer."""
        invite = Invite(
            self.authority.run_id,
            addresses,
            self.authority.fingerprint,
            self.token,
            Role.CONTRIBUTOR,
            COUNT_MAX,
        )
        return invite.encode(HOST_PREFIX)


def site_id(head: str) -> str:
    return f"site-{head}"


def head_of(invite: Invite) -> str:
    """Return the head's peer id."""
    return invite.run_id.removeprefix("site-")


def member_info(peer: str, name: str, number: int, addresses: tuple[str, ...] = ()) -> MemberInfo:
    """Return the head (with addresses), or a host, as links know members: hosts dial the head."""
    return MemberInfo(
        peer, name, number, addresses, Role.CONTRIBUTOR, in_sync=True, reachable=bool(addresses)
    )


async def send_messages(link: Link, to_send: trio.MemoryReceiveChannel[Message]) -> None:
    """Send messages over a link, in order, until it is lost."""
    with suppress(PeerLostError):
        async for message in to_send:
            await link.send(message)


def _kept(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return ""
