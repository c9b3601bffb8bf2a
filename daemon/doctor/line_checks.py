"""Checks of the network: local ports, the path to the master, and the path back from it."""

from __future__ import annotations

import errno
import secrets
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial

import trio
from attrs import define, field

from ... import __version__
from ...protocol.addresses import Address
from ...protocol.errors import EvictedError, HoldfastError, RemoteProtocolError, UserError, cause_of
from ...protocol.machine_check import NONCE_BYTES, MachineCheckReport, ask_master
from ...protocol.messages import CHECKED_ADDRESSES_MAX, CheckAnswer, RefusalCode
from ...protocol.network.socket_options import SmallSegments
from ...protocol.network.sockets import bind_all
from ...protocol.trust.invite import Invite
from ..advertised_hosts import dialable
from ..port_mapping.gateway_search import find_gateways
from ..port_mapping.port_mapper import PortMapper
from ..web.http_server import bind_http
from .findings import Finding, Verdict, fault, ok, skipped, warning

MASTER_S = 30.0  # for one address of the master: dial, dial back, measure
PACKETS_S = 10.0  # for the same with smaller packets
PACKETS_BYTES = (576, 1_280, 1_400)  # what every path carries, what IPv6 asks for, most tunnels
HEADERS_BYTES = 40  # of IPv4 and TCP
CLOCK_WARN_S = 30.0  # beyond this, logs of two machines cannot be compared
CLOCK_FAULT_S = 3_600.0  # certificates last a day; their renewal tolerates a slowly drifting clock
LINE_SLOW_BYTES_PER_S = 125_000.0  # 1 Mbit/s
MAPPED_LOOK_S = 0.05  # between two looks at whether routers have answered
NO_INVITE = "give the invite: holdfast doctor INVITE"
BAD_INVITE = "the invite is not usable"
NO_MASTER = "the master did not check this machine"


@define
class LineReport:
    """The findings, and the master's answer if it was reached."""

    findings: list[Finding] = field(factory=list)
    needs: CheckAnswer | None = None


async def check_line(
    invite: Invite | None,
    listen: Sequence[Address],
    advertise: Sequence[Address],
    http: Address,
    missing: str = NO_INVITE,
) -> LineReport:
    """Bind a peer's ports and make the master dial them; ``missing``: why there is no invite."""
    line = LineReport()
    try:
        bind_http(http)[0].close()
    except UserError as error:
        line.findings.append(fault("ports", str(error), error.hint))
    nonce = secrets.token_bytes(NONCE_BYTES)
    async with _serve_nonce(listen, nonce) as bound:
        if isinstance(bound, UserError):
            hint = "stop the program on that port, or choose another with --listen HOST:PORT"
            line.findings.append(fault("ports", str(bound), bound.hint or hint))
            advertised: tuple[str, ...] = ()
        else:
            line.findings.append(ok("ports", f"can listen on {', '.join(map(str, bound))}"))
            towards = invite.addresses[0].host if invite is not None else ""
            advertised = dialable(bound, advertise, towards)[:CHECKED_ADDRESSES_MAX]
        if invite is None:
            line.findings += [
                skipped(check, missing) for check in ("master", "reachable", "bandwidth")
            ]
            return line
        await _ask_masters(line, invite, advertised, nonce)
        found = [(each.check, each.verdict) for each in line.findings]
        unreachable = ("reachable", Verdict.WARNING) in found
        if unreachable and not advertise and not isinstance(bound, UserError):
            line.findings.append(await _ask_routers(bound))
    return line


async def _ask_routers(bound: Sequence[Address]) -> Finding:
    """Have a router map a port, and give it back."""
    mapper = PortMapper(lambda: find_gateways(bound), changed=lambda: None)
    mapper.need()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(mapper.run)
        while not mapper.said:
            await trio.sleep(MAPPED_LOOK_S)
        nursery.cancel_scope.cancel()
    if mapper.mappings:
        return ok("router", f"`holdfast join` will have the router map a port: {mapper.said}")
    return warning(
        "router",
        f"no router maps a port to this machine: {mapper.why_not}",
        "switch on UPnP, NAT-PMP or PCP in the router's settings, and `holdfast join` will ask for"
        " a port",
    )


@asynccontextmanager
async def _serve_nonce(
    listen: Sequence[Address], nonce: bytes
) -> AsyncIterator[list[Address] | UserError]:
    """Serve the nonce at a peer's addresses; yield the bound addresses, or why none are bound."""
    try:
        listeners = await bind_all(listen)
    except UserError as error:
        yield error
        return

    async def answer(stream: trio.SocketStream) -> None:
        await stream.send_all(nonce)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(partial(trio.serve_listeners, answer, listeners))
        yield [Address(*listener.socket.getsockname()[:2]) for listener in listeners]
        nursery.cancel_scope.cancel()


async def _ask_masters(
    line: LineReport, invite: Invite, advertised: Sequence[str], nonce: bytes
) -> None:
    """Use the first master that answers; failed addresses before it become warnings."""
    unreached: list[Finding] = []
    for address in invite.addresses:
        try:
            with trio.fail_after(MASTER_S):
                seen = await ask_master(address, invite, advertised, nonce)
        except (OSError, trio.TooSlowError) as error:
            ask = partial(ask_master, address, invite, advertised, nonce)
            unreached.append(_unreachable(address, error, await _largest_packets(ask)))
        except RemoteProtocolError as error:
            text = f"{address} is not the run's master, or runs another version: {error}"
            fix = (
                "ask the run operator for a new invite, and install the same version of holdfast on"
                " both"
            )
            unreached.append(fault("master", text, fix))
        except EvictedError as error:
            line.findings.append(_refused(error))
            break
        except UserError as error:  # about this machine's clock
            line.findings.append(fault("clock", str(error), error.hint))
            break
        else:
            line.findings.append(ok("master", f"answers at {address}"))
            line.needs = seen.answer
            line.findings += _report_findings(seen, advertised)
            line.findings += [warning(each.check, each.text, each.fix) for each in unreached]
            return
    line.findings += unreached
    line.findings += [skipped(check, NO_MASTER) for check in ("reachable", "bandwidth")]


def check_version(masters: str) -> Finding:
    """Compare versions; a master with another protocol version has already refused this machine."""
    if masters == __version__:
        return ok("versions", f"the master runs holdfast {masters} as well")
    return warning(
        "versions",
        f"the master runs holdfast {masters or 'of an unknown version'}, this machine"
        f" {__version__}",
        "install the same version on all machines of a run: `pip install"
        f" holdfast=={masters or '...'}`",
    )


def _report_findings(seen: MachineCheckReport, advertised: Sequence[str]) -> Iterator[Finding]:
    yield check_version(seen.answer.software)
    yield check_clock(seen.clock_ahead_s, seen.rates.round_trip_s)
    for address, reason in zip(advertised, seen.answer.faults, strict=False):
        port = address.rpartition(":")[2]
        if not reason:
            seen_at = str(Address(seen.answer.host, int(port)))
            other = (
                "" if address == seen_at else f"; it does not dial other addresses like {address}"
            )
            yield ok("reachable", f"the master reaches this machine at {seen_at}{other}")
            continue
        yield warning(
            "reachable",
            f"the master cannot reach this machine at {address}: {reason}; it can still take part"
            " and dial other peers, but owns fewer chunks",
            f"open TCP port {port} in this machine's firewall and forward it at the router; if"
            " other machines must dial another address, give it with --advertise HOST:PORT (the"
            f" master sees this machine as {seen.answer.host})",
        )
    if not advertised:
        yield skipped("reachable", "this machine listens on no port")
    yield _bandwidth(seen)


def check_clock(ahead_s: float, uncertainty_s: float) -> Finding:
    """Compare this machine's clock with the master's, which may be the wrong one."""
    off_s = abs(ahead_s)
    text = f"{off_s:.1f} s {'ahead of' if ahead_s > 0 else 'behind'} the master's"
    fix = (
        "set the clock: `timedatectl set-ntp true`; if it is right, tell the run operator that the "
        "master's clock is wrong"
    )
    if off_s > CLOCK_FAULT_S + uncertainty_s:
        return fault("clock", text, fix)
    if off_s > CLOCK_WARN_S + uncertainty_s:
        return warning("clock", text, fix)
    return ok("clock", text)


def _bandwidth(seen: MachineCheckReport) -> Finding:
    rates = seen.rates
    text = (
        f"to the master {_mbit(rates.up_bytes_per_s)}, from it {_mbit(rates.down_bytes_per_s)}, "
        f"measured with {rates.junk_bytes / 2**20:.1f} MiB over one connection; "
        f"first answer after {1e3 * rates.round_trip_s:.0f} ms"
    )
    if min(rates.up_bytes_per_s, rates.down_bytes_per_s) < LINE_SLOW_BYTES_PER_S:
        return warning(
            "bandwidth",
            text,
            "check with `holdfast config plan --bandwidth ...` whether the run's settings suit this"
            " line; stop other traffic on it",
        )
    return ok("bandwidth", text)


async def _largest_packets(ask: Callable[[], Awaitable[object]]) -> int:
    """Return the size of the largest packets with which the master answers; 0 if it never does."""
    largest_bytes = 0
    with suppress(OSError, trio.TooSlowError, HoldfastError):
        for packet_bytes in PACKETS_BYTES:
            trio.socket.set_custom_socket_factory(SmallSegments(packet_bytes - HEADERS_BYTES))
            with trio.fail_after(PACKETS_S):
                await ask()
            largest_bytes = packet_bytes
    trio.socket.set_custom_socket_factory(None)
    return largest_bytes


def _mbit(bytes_per_s: float) -> str:
    return f"{8 * bytes_per_s / 1e6:.0f} Mbit/s" if bytes_per_s < 1e12 else "too fast to measure"


def _unreachable(address: Address, error: OSError | trio.TooSlowError, fits: int) -> Finding:
    """Return the fault of a silent master; ``fits``: it answers packets of so many bytes."""
    cause = cause_of(error)
    number = cause.errno if isinstance(cause, OSError) else None
    text = f"no master answers at {address}: {cause if str(cause) else 'no answer in time'}"
    if fits:
        text = (
            f"the path to {address} loses large packets: the master answers those of {fits} bytes"
        )
        fix = f"let this machine send smaller ones: `ip link set dev DEVICE mtu {fits}`"
    elif isinstance(cause, socket.gaierror):
        fix = f"check the spelling of {address.host}, and DNS here: `getent hosts {address.host}`"
    elif number == errno.ECONNREFUSED:
        fix = (
            "the machine answers, but nothing listens on that port: ask the run operator whether "
            "`holdfast master` runs, and whether its port is forwarded"
        )
    elif number in (errno.ENETUNREACH, errno.EHOSTUNREACH):
        fix = f"check the network and the route to the master: `ip route get {address.host}`"
    else:
        fix = (
            "the master's machine is off, or a firewall drops the packets: ask the run operator to"
            f" open TCP port {address.port}"
        )
    return fault("master", text, fix)


def _refused(error: EvictedError) -> Finding:
    if error.code == RefusalCode.VERSION.value:
        fix = (
            "install the run's version of holdfast here, or ask the run operator to upgrade the"
            " master"
        )
        return fault("versions", f"the master refuses this version: {error.reason}", fix)
    if error.code == RefusalCode.TOKEN.value:
        return fault("invite", error.reason, "ask the run operator for a new invite")
    return fault("master", f"the master refuses: {error.reason}", "ask the run operator")
