"""Enrolment: a newcomer exchanges an invite for a certificate.

    newcomer                                        master
       │  TLS 1.3, without a client certificate        │
       │ EnrolHello(versions) ───────────────────────► │
       │ ◄──────────────── EnrolAuthority(certificate) │
       │   Check: it is the invite's authority; it     │
       │   signed the server certificate of this TLS   │
       │   connection; that certificate says "master"  │
       │ EnrolRequest(token, request, name) ─────────► │   Check the token
       │ ◄─────────── Enrolled(certificate) or Refused │

Instead of the last two lines the newcomer may ask for a check of its machine: see
``machine_check``.

The token is sent only after all three checks passed, so an impostor of the master never sees it,
not even an impostor that is a member of the run.
"""

from __future__ import annotations

import datetime
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import trio
from cryptography import x509

from . import messages as m
from .addresses import Address
from .connection_phases import ADMITTING, NEWCOMER
from .errors import (
    WRONG_CLOCK_EXIT_CODE,
    WRONG_CLOCK_HINT,
    EvictedError,
    HoldfastError,
    RemoteProtocolError,
    UserError,
)
from .network.interface import Channel
from .network.sockets import handshake, open_tcp
from .network.stream import MessageStream
from .text import plain
from .trust.authority import (
    Authority,
    Party,
    check_issued,
    fingerprint_of,
    holder_of,
    load_certificate,
)
from .trust.identity import NOT_X509, Identity
from .trust.invite import Invite

ENROL_S = 20.0  # for the whole conversation, on either side: some round trips


class Refusal(HoldfastError):
    """A refusal of a newcomer, which is sent to it.

    Attributes:
      code: tells the newcomer what to do.
      reason: a sentence for the newcomer's operator.
    """

    def __init__(self, code: m.RefusalCode, reason: str) -> None:
        super().__init__(reason)
        self.code = code
        self.reason = plain(reason)


# ---------------------------------------------------------------- the newcomer


async def enrol(
    invite: Invite, identity: Identity, name: str, giver: Party = Party.MASTER
) -> tuple[bytes, bytes]:
    """Get a certificate with an invite, trying its addresses in order.

    Args:
      giver: what the other end is; a peer: the head of a peer of several hosts.

    Returns:
      The newcomer's certificate and the authority's, in PEM, as ``Credentials`` takes them.

    Raises:
      EvictedError: the master refuses; the text gives the reason.
      OSError: no address answers.
      RemoteProtocolError: the other end is not the run's master; it has not seen the token.
      UserError: this machine's clock is wrong.
    """
    failure: OSError | RemoteProtocolError | None = None
    for address in invite.addresses:
        try:
            with trio.fail_after(ENROL_S):
                async with newcomers_channel(address) as channel:
                    return await ask_for_certificate(channel, invite, identity, name, giver)
        except trio.TooSlowError:
            failure = failure or OSError(f"{address} did not answer within {ENROL_S:.0f} s")
        except (trio.BrokenResourceError, trio.EndOfChannel) as error:
            failure = failure or OSError(f"{address} hung up: {error}")
        except OSError as error:
            failure = failure or error
        except RemoteProtocolError as error:
            # It tells the operator more than another address that did not answer.
            failure = failure if isinstance(failure, RemoteProtocolError) else error
    assert failure is not None  # an invite has an address
    raise failure


@asynccontextmanager
async def newcomers_channel(address: Address) -> AsyncIterator[Channel]:
    """Open a TLS channel whose server certificate is not verified yet.

    Raises: as ``sockets.open_tcp`` and ``sockets.handshake``.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE  # of the authority only the fingerprint is known so far
    stream = await open_tcp(address)
    try:
        tls = trio.SSLStream(stream, context)
        await handshake(tls, address)
        leaf_der: bytes | None = tls.getpeercert(binary_form=True)
        yield Channel(tls, Party.NEWCOMER, "", leaf_der or b"", str(address))
    finally:
        await trio.aclose_forcefully(stream)


async def ask_for_certificate(
    channel: Channel,
    invite: Invite,
    identity: Identity,
    name: str,
    giver: Party = Party.MASTER,
) -> tuple[bytes, bytes]:
    """Run the newcomer's side of the conversation, over TLS whose other end is not verified yet.

    Args:
      channel: its ``certificate_der`` is the TLS server's, which proved to hold the key.

    Returns, raises: as ``enrol``.
    """
    messages = MessageStream(channel.stream, ADMITTING)
    served = await meet_master(messages, channel, invite, giver)
    await messages.send(m.EnrolRequest(invite.token, identity.request_pem(name), name))
    answer = await messages.receive_expected(m.Enrolled, m.Refused)
    if isinstance(answer, m.Refused):
        raise EvictedError(answer.code.value, answer.reason)
    certificate = load_certificate(answer.certificate_pem)
    check_issued(certificate, load_certificate(served.authority_pem))
    holder = holder_of(certificate)
    if (holder.peer, holder.party) != (identity.peer_id, Party.PEER):
        raise RemoteProtocolError(f"{channel.remote_address} sent a certificate of another peer")
    return answer.certificate_pem, served.authority_pem


async def meet_master(
    messages: MessageStream, channel: Channel, invite: Invite, giver: Party = Party.MASTER
) -> m.EnrolAuthority:
    """Send ``EnrolHello``, and check that the other end is the invite's master.

    Raises: as ``enrol``.
    """
    await messages.send(m.EnrolHello(m.VERSION_MIN, m.VERSION_MAX))
    served = await messages.receive_expected(m.EnrolAuthority, m.Refused)
    if isinstance(served, m.Refused):
        raise EvictedError(served.code.value, served.reason)
    _check_master(channel, served, invite, giver)
    return served


def _check_master(channel: Channel, served: m.EnrolAuthority, invite: Invite, giver: Party) -> None:
    """Raise an error unless the other end of the channel is the invite's master, or head."""
    where = channel.remote_address
    authority = load_certificate(served.authority_pem)
    if fingerprint_of(authority) != invite.fingerprint or served.run_id != invite.run_id:
        raise RemoteProtocolError(f"{where} is not the master of the invite's run")
    try:
        leaf = x509.load_der_x509_certificate(channel.certificate_der)
    except NOT_X509:
        raise RemoteProtocolError(f"{where} showed no certificate") from None
    check_issued(leaf, authority)
    holder = holder_of(leaf)
    if holder.party is not giver or holder.run_id != invite.run_id:
        raise RemoteProtocolError(f"{where} is a {holder.party.value} of the run, not its master")
    if giver is Party.PEER and not invite.run_id.endswith(holder.peer):
        raise RemoteProtocolError(f"{where} is another host, not the head")
    now = datetime.datetime.now(datetime.UTC)
    if not leaf.not_valid_before_utc <= now <= leaf.not_valid_after_utc:
        raise UserError(
            f"by this machine's clock it is {now:%Y-%m-%d %H:%M} UTC, but the master's certificate"
            f" is valid from {leaf.not_valid_before_utc:%Y-%m-%d %H:%M}"
            f" to {leaf.not_valid_after_utc:%Y-%m-%d %H:%M}",
            exit_code=WRONG_CLOCK_EXIT_CODE,
            hint=WRONG_CLOCK_HINT,
        )


# ---------------------------------------------------------------- the master


async def answer_newcomer(
    channel: Channel,
    authority: Authority,
    admit: Callable[[m.EnrolRequest, str], Awaitable[None]],
    *,
    check: Callable[[MessageStream, m.CheckRequest], Awaitable[None]],
    known: Callable[[str], bool],
) -> None:
    """Run the master's side of the conversation, on a channel of ``Party.NEWCOMER``.

    A newcomer that is refused is sent the reason.

    Args:
      admit: takes the request and the peer id of the key that signed it, uses the token up and
        records the admission, or raises ``Refusal``. Called once, just before the reply.
      known: returns whether a peer was admitted before. Such a peer gets another certificate for
        its key, which signed the request, and no token is used up.
      check: answers a newcomer that asks only for a machine check; may raise ``Refusal``.

    Raises:
      RemoteProtocolError: it breaks the protocol; and what ``MessageStream`` raises.
      trio.TooSlowError: it took too long.
    """
    messages = MessageStream(channel.stream, NEWCOMER)
    with trio.fail_after(ENROL_S):
        hello = await messages.receive_expected(m.EnrolHello)
        if hello.version_min > m.VERSION_MAX or hello.version_max < m.VERSION_MIN:
            reason = (
                f"this run speaks protocol {m.VERSION_MIN} to {m.VERSION_MAX},"
                f" you speak {hello.version_min} to {hello.version_max}"
            )
            await messages.send_final(m.Refused(m.RefusalCode.VERSION, reason))
            return
        await messages.send(m.EnrolAuthority(authority.run_id, authority.certificate_pem))
        request = await messages.receive_expected(m.EnrolRequest, m.CheckRequest)
        try:
            if isinstance(request, m.CheckRequest):
                await check(messages, request)
                return
            certificate_pem = authority.issue(request.request_pem, request.name, Party.PEER)
            peer = holder_of(load_certificate(certificate_pem)).peer
            if not known(peer):
                await admit(request, peer)
        except Refusal as refusal:
            await messages.send_final(m.Refused(refusal.code, refusal.reason))
        else:
            await messages.send_final(m.Enrolled(certificate_pem))
