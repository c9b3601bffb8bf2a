"""Invites: the one string that a newcomer needs, and all that it must trust beforehand."""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
import secrets
import time

import msgpack
from attrs import field, frozen
from attrs.validators import and_, ge, le, matches_re, max_len, min_len

from ..addresses import Address
from ..errors import UserError
from ..messages import COUNT_MAX, RUN_ID, Role
from ..text import printable

BAD_INVITE_EXIT_CODE = 5
PREFIX = "holdfast1."
HOST_PREFIX = "holdfasthost1."  # of the string of a peer of several hosts
TOKEN_BYTES = 24  # of randomness; infeasible to guess
TOKEN_CHARS_MAX = 128
ADDRESSES_MAX = 16
TEXT_LENGTH_MAX = 16_384  # 16 addresses of the longest names, twice
CHECKSUM_BYTES = 4  # detects a truncated copy; it gives no security

_HINT = "copy the whole string again, or ask for another invite"
_OTHER_KIND = {
    PREFIX: (
        "admits a further host of a peer, and no peer",
        "use it with `holdfast host`; ask the run's operator for an invite",
    ),
    HOST_PREFIX: (
        "admits a peer to a run, and no further host of a peer",
        "use it with `holdfast join`; `holdfast join --hosts N` prints the string for hosts",
    ),
}
_OF_ANOTHER_VERSION = re.compile(r"holdfast[0-9]+\.")


def generate_token() -> str:
    """Return a new random token, the invite's secret."""
    return secrets.token_urlsafe(TOKEN_BYTES)


def _bad(what: str, hint: str = _HINT) -> UserError:
    return UserError(f"that invite {what}", exit_code=BAD_INVITE_EXIT_CODE, hint=hint)


@frozen
class Invite:
    """The master's addresses, the authority's fingerprint, and the token to show.

    Attributes:
      fingerprint: of the run's authority, SHA-256, 64 hex digits.
      token: the secret; any machine that has it may join. Left out of ``repr``.
      role: the newcomer's role in the run.
      expires_s: Unix time. The master decides; this copy serves to tell people early.
    """

    run_id: str = field(validator=matches_re(RUN_ID))
    addresses: tuple[Address, ...] = field(validator=and_(min_len(1), max_len(ADDRESSES_MAX)))
    fingerprint: str = field(validator=matches_re(r"[0-9a-f]{64}"))
    token: str = field(repr=False, validator=and_(min_len(1), max_len(TOKEN_CHARS_MAX), printable))
    role: Role
    expires_s: int = field(validator=and_(ge(0), le(COUNT_MAX)))

    def encode(self, prefix: str = PREFIX) -> str:
        """Return the invite as a string, which is as secret as the token in it."""
        packed: bytes = msgpack.packb(
            [
                self.run_id,
                [str(address) for address in self.addresses],
                bytes.fromhex(self.fingerprint),
                self.token,
                self.role.value,
                self.expires_s,
            ]
        )
        checked = packed + hashlib.sha256(packed).digest()[:CHECKSUM_BYTES]
        return prefix + base64.urlsafe_b64encode(checked).decode("ascii").rstrip("=")

    @classmethod
    def decode(cls, text: str, now_s: float | None = None, prefix: str = PREFIX) -> Invite:
        """Parse a string that a person pasted; line breaks and a byte order mark in it are ignored.

        Args:
          now_s: Unix time, for tests; the wall clock otherwise.

        Raises:
          UserError: truncated, garbled, of another version, or expired; the hint tells what to do.
        """
        if len(text) > TEXT_LENGTH_MAX:
            raise _bad(f"has {len(text)} characters")
        text = "".join(text.removeprefix("\ufeff").split())
        if not text.startswith(prefix):
            if text.startswith((PREFIX, HOST_PREFIX)):
                raise _bad(*_OTHER_KIND[prefix])
            if _OF_ANOTHER_VERSION.match(text):
                raise _bad("was made by another version of holdfast", "upgrade the older side")
            raise _bad(f"does not start with {prefix}")
        invite = cls._unpack(_decode_base64(text.removeprefix(prefix)))
        if invite.expires_s <= (time.time() if now_s is None else now_s):
            when = _utc(invite.expires_s)
            raise _bad(f"expired at {when}", "ask for another one, or correct this machine's clock")
        return invite

    @classmethod
    def _unpack(cls, checked: bytes) -> Invite:
        packed, checksum = checked[:-CHECKSUM_BYTES], checked[-CHECKSUM_BYTES:]
        if hashlib.sha256(packed).digest()[:CHECKSUM_BYTES] != checksum:
            raise _bad("is incomplete or damaged")
        try:
            run_id, addresses, fingerprint, token, role, expires_s = msgpack.unpackb(
                packed, max_ext_len=0
            )
            if not isinstance(addresses, list) or not isinstance(fingerprint, bytes):
                raise TypeError("wrong types")
            if not all(isinstance(item, str) for item in (run_id, token, role, *addresses)):
                raise TypeError("wrong types")
            if type(expires_s) is not int:
                raise TypeError("wrong types")
            return cls(
                run_id,
                tuple(Address.parse(item) for item in addresses),
                fingerprint.hex(),
                token,
                Role(role),
                expires_s,
            )
        except (ValueError, TypeError, UserError, msgpack.UnpackException):
            raise _bad("is damaged") from None


def _decode_base64(text: str) -> bytes:
    try:
        padded = text.encode("ascii") + b"=" * (-len(text) % 4)
        return base64.b64decode(padded, altchars=b"-_", validate=True)
    except (UnicodeEncodeError, binascii.Error):
        raise _bad("is incomplete or damaged") from None


def _utc(unix_s: int) -> str:
    try:
        return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(unix_s))
    except (OverflowError, OSError, ValueError):
        return f"Unix time {unix_s}"
