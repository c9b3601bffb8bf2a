"""A member's credentials: its key, its certificate and the run's authority.

``ssl`` reads keys from files only, so credentials live in a directory of their own. Every new
connection asks for a context, so a renewed certificate is used from the next connection on.
"""

from __future__ import annotations

import datetime
import ssl
from pathlib import Path

from ..durable_files import write_private
from ..errors import RemoteProtocolError, UserError
from .authority import Holder, check_issued, holder_of, load_certificate
from .identity import Identity

KEY_FILE = "identity.key"
CERTIFICATE_FILE = "certificate.pem"
AUTHORITY_FILE = "authority.pem"


class Credentials:
    """A member's identity and its certificate from the run's authority, kept in a directory.

    Attributes:
      directory: the constructor writes the files there (0600).
      identity: the member's key.
      certificate_pem: issued by the authority for that key.
      authority_pem: the authority whose certificates this member accepts.
      holder: the certificate's statement about this member.
      expires_at: the end of the certificate, UTC.

    Raises:
      RemoteProtocolError: the certificate is not for this identity, or not by this authority.
    """

    def __init__(
        self, directory: Path, identity: Identity, certificate_pem: bytes, authority_pem: bytes
    ) -> None:
        self.directory = directory
        self.identity = identity
        self.authority_pem = authority_pem
        self._authority = load_certificate(authority_pem)
        self._server_contexts: dict[bool, ssl.SSLContext] = {}
        self._client_context: ssl.SSLContext | None = None
        self._take(certificate_pem)
        identity.save(directory / KEY_FILE)
        write_private(directory / AUTHORITY_FILE, authority_pem)
        write_private(directory / CERTIFICATE_FILE, certificate_pem)

    @classmethod
    def load(cls, directory: Path) -> Credentials:
        """Read the credentials that an earlier process wrote.

        Raises:
          FileNotFoundError: there are none.
          UserError: they are damaged, or other users may read the key.
        """
        certificate_pem = (directory / CERTIFICATE_FILE).read_bytes()
        authority_pem = (directory / AUTHORITY_FILE).read_bytes()
        if not (directory / KEY_FILE).exists():
            raise FileNotFoundError(directory / KEY_FILE)
        identity = Identity.load_or_create(directory / KEY_FILE)
        try:
            return cls(directory, identity, certificate_pem, authority_pem)
        except RemoteProtocolError as error:
            raise UserError(
                f"the credentials in {directory} are damaged: {error}",
                hint="delete the directory and join again with an invite",
            ) from None

    @property
    def peer_id(self) -> str:
        return self.identity.peer_id

    @property
    def run_id(self) -> str:
        return self.holder.run_id

    def expires_in_s(self) -> float:
        """Return the seconds until the certificate ends by the wall clock; negative later."""
        return (self.expires_at - datetime.datetime.now(datetime.UTC)).total_seconds()

    def replace_certificate(self, certificate_pem: bytes) -> None:
        """Use a renewed certificate from the next connection on, and keep it.

        Raises:
          RemoteProtocolError: it is not for this identity, or not by this authority.
        """
        self._take(certificate_pem)
        write_private(self.directory / CERTIFICATE_FILE, certificate_pem)

    def ssl_server_context(self, optional_client: bool) -> ssl.SSLContext:
        """Return the context to accept with: TLS 1.3 only, clients show a certificate of this run.

        Args:
          optional_client: accept clients without a certificate, too (newcomers at the master).
        """
        context = self._server_contexts.get(optional_client)
        if context is None:
            context = self._context(ssl.PROTOCOL_TLS_SERVER)
            context.verify_mode = ssl.CERT_OPTIONAL if optional_client else ssl.CERT_REQUIRED
            context.num_tickets = 0  # a resumed session would skip the certificate check
            self._server_contexts[optional_client] = context
        return context

    def ssl_client_context(self) -> ssl.SSLContext:
        """Return the context to dial with: TLS 1.3, the server has a certificate of this run.

        Names in certificates are peer ids, not hosts: the caller compares them.
        """
        if self._client_context is None:
            context = self._context(ssl.PROTOCOL_TLS_CLIENT)
            context.verify_mode = ssl.CERT_REQUIRED
            self._client_context = context
        return self._client_context

    def _context(self, protocol: int) -> ssl.SSLContext:
        context = ssl.SSLContext(protocol)
        context.check_hostname = False
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.load_verify_locations(cadata=self.authority_pem.decode("ascii"))
        context.load_cert_chain(self.directory / CERTIFICATE_FILE, self.directory / KEY_FILE)
        return context

    def _take(self, certificate_pem: bytes) -> None:
        certificate = load_certificate(certificate_pem)
        check_issued(certificate, self._authority)
        holder: Holder = holder_of(certificate)
        if holder.peer != self.identity.peer_id:
            raise RemoteProtocolError("a certificate for another key than this peer's")
        self.certificate_pem = certificate_pem
        self.holder = holder
        self.expires_at = certificate.not_valid_after_utc
        self._server_contexts = {}
        self._client_context = None
