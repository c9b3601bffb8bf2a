"""Enrolment, before a certificate: a newcomer and the master."""

from __future__ import annotations

from attrs import field, frozen
from attrs.validators import max_len

from . import fields
from .limits import CHECKED_ADDRESSES_MAX, JUNK_BYTES_MAX
from .parts import Message, RefusalCode


@frozen
class EnrolHello(Message):
    """Newcomer: the first message on a stream without a client certificate, with its versions."""

    version_min: int = field(validator=fields.count)
    version_max: int = field(validator=fields.count)


@frozen
class EnrolAuthority(Message):
    """Master: the run's CA certificate; the newcomer compares its fingerprint with the invite."""

    run_id: str = field(validator=fields.run_id)
    authority_pem: bytes = field(validator=fields.blob)


@frozen
class EnrolRequest(Message):
    """Newcomer: the invite's token and a certificate request signed by its identity."""

    token: str = field(repr=False, validator=fields.token)
    request_pem: bytes = field(validator=fields.blob)
    name: str = field(validator=fields.name)


@frozen
class Enrolled(Message):
    """Master: the newcomer's certificate."""

    certificate_pem: bytes = field(validator=fields.blob)


@frozen
class CheckRequest(Message):
    """Newcomer, instead of ``EnrolRequest``: asks the master to check this machine from outside.

    The token is checked, not used up.
    """

    token: str = field(repr=False, validator=fields.token)
    addresses: tuple[str, ...] = field(validator=fields.each(fields.text, CHECKED_ADDRESSES_MAX))
    nonce: bytes = field(validator=fields.digest)  # sent to every connection at these addresses


@frozen
class CheckAnswer(Message):
    """Master: the results of the check, and the resources that a member of this run needs."""

    now_s: float = field(validator=fields.finite)  # Unix time, by the master's clock
    host: str = field(validator=fields.text)  # the newcomer's address as the master sees it
    # For each address of the request; empty: reached.
    faults: tuple[str, ...] = field(validator=fields.each(fields.text, CHECKED_ADDRESSES_MAX))
    member_count: int = field(validator=fields.count)
    lanes_max: int = field(validator=fields.count)  # of each link
    # For daemon and hook, beside the script's own; 0: the run has no weights yet.
    memory_bytes: int = field(validator=fields.count)
    checkpoint_bytes: int = field(validator=fields.count)  # of one checkpoint
    checkpoint_count: int = field(validator=fields.count)  # kept on disk
    software: str = field(default="", validator=fields.word)  # the master's version


@frozen
class ProbeBytes(Message):
    """Either side, after a ``CheckAnswer``: bytes that time the line."""

    data: bytes = field(validator=max_len(JUNK_BYTES_MAX))
    last: bool


@frozen
class ProbeBytesCounted(Message):
    """Master: bytes received, and the seconds from the first message to the last."""

    count_bytes: int = field(validator=fields.count)
    took_s: float = field(validator=fields.finite)


@frozen
class Refused(Message):
    """Either side, at any time: this stream ends now, for this reason."""

    code: RefusalCode
    reason: str = field(validator=fields.text)
