"""What the network lets through: our ports, the way to the master, the way from it back to us."""

from __future__ import annotations

import errno
import secrets
import socket
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from functools import partial

import trio
from attrs import define, field

from ... import __version__
from ...protocol.addresses import Address
from ...protocol.errors import EvictedError, RemoteProtocolError, UserError, cause_of
from ...protocol.machine_check import NONCE_BYTES, MachineCheckReport, ask_master
from ...protocol.messages import CHECKED_ADDRESSES_MAX, CheckAnswer, RefusalCode
from ...protocol.network.sockets import bind_all
from ...protocol.trust.invite import Invite
from ..advertised_hosts import dialable
from ..web.http_server import bind_http
from .findings import Finding, fault, ok, skipped, warning

MASTER_S = 30.0  # for one address of the master: dialling, dialling back, timing
CLOCK_WARN_S = 30.0  # logs of two machines cannot be read side by side
CLOCK_FAULT_S = (
    3_600.0  # certificates last a day and are renewed in time for a clock that drifts on
)
LINE_SLOW_BYTES_PER_S = 125_000.0  # 1 Mbit/s
NO_INVITE = "give the invite: holdfast doctor INVITE"


@define
class LineReport:
    """What was found, and what the master said, if it was reached."""

    findings: list[Finding] = field(factory=list)
    needs: CheckAnswer | None = None


async def look_at_line(
    invite: Invite | None,
    listen: Sequence[Address],
    advertise: Sequence[Address],
    http: Address,
) -> LineReport:
    """Bind what a peer would bind, and have the master dial it."""
    line = LineReport()
    line.findings += look_at_http(http)
    nonce = secrets.token_bytes(NONCE_BYTES)
    async with _nonce_said(listen, nonce) as bound:
        if isinstance(bound, UserError):
            hint = "stop what listens there, or choose another port with --listen HOST:PORT"
            line.findings.append(fault("ports", str(bound), bound.hint or hint))
            advertised: tuple[str, ...] = ()
        else:
            line.findings.append(ok("ports", f"can listen on {', '.join(map(str, bound))}"))
            towards = invite.addresses[0].host if invite is not None else ""
            advertised = dialable(bound, advertise, towards)[:CHECKED_ADDRESSES_MAX]
        if invite is None:
            line.findings += [
                skipped(check, NO_INVITE) for check in ("master", "reachable", "bandwidth")
            ]
            return line
        await _ask_masters(line, invite, advertised, nonce)
    return line


def look_at_http(address: Address) -> Iterator[Finding]:
    try:
        listener, _url = bind_http(address)
    except UserError as error:
        yield fault("ports", str(error), error.hint)
    else:
        listener.close()


@asynccontextmanager
async def _nonce_said(
    listen: Sequence[Address], nonce: bytes
) -> AsyncIterator[list[Address] | UserError]:
    """Answer at the addresses that a peer would have; yields them, or why they cannot be had."""
    try:
        listeners = await bind_all(listen)
    except UserError as error:
        yield error
        return

    async def say(stream: trio.SocketStream) -> None:
        await stream.send_all(nonce)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(partial(trio.serve_listeners, say, listeners))
        yield [Address(*listener.socket.getsockname()[:2]) for listener in listeners]
        nursery.cancel_scope.cancel()


async def _ask_masters(
    line: LineReport, invite: Invite, advertised: Sequence[str], nonce: bytes
) -> None:
    """The first master that answers tells all; what is wrong with the addresses before it, too."""
    unreached: list[Finding] = []
    for address in invite.addresses:
        try:
            with trio.fail_after(MASTER_S):
                seen = await ask_master(address, invite, advertised, nonce)
        except (OSError, trio.TooSlowError) as error:
            unreached.append(_unreachable(address, error))
        except RemoteProtocolError as error:
            unreached.append(_not_it(address, error))
        except EvictedError as error:
            line.findings.append(_refused(error))
            break
        except UserError as error:  # of our clock
            line.findings.append(fault("clock", str(error), error.hint))
            break
        else:
            line.findings.append(ok("master", f"answers at {address}"))
            line.needs = seen.answer
            line.findings += _said(seen, advertised)
            line.findings += [
                warning(each.check, each.said, each.fix) for each in unreached
            ]  # another one answers
            return
    line.findings += unreached
    line.findings += [
        skipped(check, "the master did not look at this machine")
        for check in ("reachable", "bandwidth")
    ]


def look_at_version(masters: str) -> Finding:
    """Ours beside the master's; what speaks another protocol has been refused before."""
    if masters == __version__:
        return ok("versions", f"the master runs holdfast {masters}, too")
    return warning(
        "versions",
        f"the master runs holdfast {masters or 'of an unknown version'}, here is {__version__}",
        f"install the same on both, as upgrades are for all machines of a run: "
        f"`pip install holdfast=={masters or '...'}`",
    )


def _said(seen: MachineCheckReport, advertised: Sequence[str]) -> Iterator[Finding]:
    yield look_at_version(seen.answer.software)
    yield look_at_clock(seen.clock_ahead_s, seen.rates.round_trip_s)
    for address, reason in zip(advertised, seen.answer.faults, strict=False):
        port = address.rpartition(":")[2]
        if not reason:
            seen_at = str(Address(seen.answer.host, int(port)))
            other = "" if address == seen_at else f"; it looks at no other address, as {address} is"
            yield ok("reachable", f"the master reaches this machine at {seen_at}{other}")
            continue
        yield warning(
            "reachable",
            f"the master cannot reach this machine at {address}: {reason}; it can take part and "
            "dials the others, but owns less",
            f"open TCP port {port} in this machine's firewall and forward it "
            f"at the router; if others dial another address than this, give it with --advertise "
            f"HOST:PORT (the master sees this machine as {seen.answer.host})",
        )
    if not advertised:
        yield skipped("reachable", "this machine listens nowhere")
    yield _bandwidth(seen)


def look_at_clock(ahead_s: float, unsure_s: float) -> Finding:
    """Our clock beside the master's, which may be wrong itself."""
    off_s = abs(ahead_s)
    said = f"{off_s:.1f} s {'ahead of' if ahead_s > 0 else 'behind'} the master's"
    fix = (
        "set the clock: `timedatectl set-ntp true`; if it is right, tell the run's owner that the "
        "master's is wrong"
    )
    if off_s > CLOCK_FAULT_S + unsure_s:
        return fault("clock", said, fix)
    if off_s > CLOCK_WARN_S + unsure_s:
        return warning("clock", said, fix)
    return ok("clock", said)


def _bandwidth(seen: MachineCheckReport) -> Finding:
    rates = seen.rates
    said = (
        f"to the master {_mbit(rates.up_bytes_per_s)}, from it {_mbit(rates.down_bytes_per_s)}, "
        f"measured with {rates.junk_bytes / 2**20:.1f} MiB over one connection; "
        f"first answer after {1e3 * rates.round_trip_s:.0f} ms"
    )
    if min(rates.up_bytes_per_s, rates.down_bytes_per_s) < LINE_SLOW_BYTES_PER_S:
        return warning(
            "bandwidth",
            said,
            "see with `holdfast plan --bandwidth ...` whether the run's settings suit such a line; "
            "end other traffic on it",
        )
    return ok("bandwidth", said)


def _mbit(bytes_per_s: float) -> str:
    return f"{8 * bytes_per_s / 1e6:.0f} Mbit/s" if bytes_per_s < 1e12 else "too fast to tell"


def _unreachable(address: Address, error: OSError | trio.TooSlowError) -> Finding:
    cause = cause_of(error)
    number = cause.errno if isinstance(cause, OSError) else None
    said = f"no master answers at {address}: {cause if str(cause) else 'no answer in time'}"
    if isinstance(cause, socket.gaierror):
        fix = (
            f"is {address.host} spelt right, and does DNS work here? `getent hosts {address.host}`"
        )
    elif number == errno.ECONNREFUSED:
        fix = (
            "the machine is there, but nothing listens at that port: ask the run's owner whether "
            "`holdfast master` runs, and whether its port is forwarded"
        )
    elif number in (errno.ENETUNREACH, errno.EHOSTUNREACH):
        fix = f"this machine has no way there: `ip route get {address.host}`; is the network up?"
    else:
        fix = (
            f"a firewall drops what goes there: ask the run's owner to open TCP port "
            f"{address.port}, or whether the master's machine runs"
        )
    return fault("master", said, fix)


def _not_it(address: Address, error: RemoteProtocolError) -> Finding:
    return fault(
        "master",
        f"at {address} is not the run's master, or another version of it: {error}",
        "ask the run's owner for a new invite, and install the same version of holdfast on both",
    )


def _refused(error: EvictedError) -> Finding:
    if error.code == RefusalCode.VERSION.value:
        fix = "install the run's version of holdfast here, or have its owner upgrade the master"
        return fault("versions", f"the master refuses this version: {error.reason}", fix)
    if error.code == RefusalCode.TOKEN.value:
        return fault("invite", error.reason, "ask the run's owner for another one")
    return fault("master", f"the master refuses: {error.reason}", "tell the run's owner")
