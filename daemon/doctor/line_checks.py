"""Checks of the network: local ports, the path to the master, and the path back from it; for a
further host of a peer, the path to its head.
"""

from __future__ import annotations

import errno
import secrets
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial

import trio
from attrs import define, field, frozen

from ... import __version__
from ...protocol.addresses import Address
from ...protocol.errors import EvictedError, HoldfastError, RemoteProtocolError, UserError, cause_of
from ...protocol.machine_check import NONCE_BYTES, MachineCheckReport, ProbeRates, ask_master
from ...protocol.messages import CHECKED_ADDRESSES_MAX, CheckAnswer, RefusalCode
from ...protocol.network.socket_options import SmallSegments
from ...protocol.network.sockets import bind_all
from ...protocol.trust.authority import Party
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
PART_S = 15.0  # for a host's part of the model, one way; then the operator is told
MAPPED_LOOK_S = 0.05  # between two looks at whether routers have answered
NO_INVITE = "give the invite: holdfast doctor INVITE"


@frozen
class Asked:
    """The program that an invite, or the string of a head, leads to.

    Attributes:
      name: what it is, also the name of the check that it answers.
      words: what the other end gave to this machine.
      command: what starts it.
      ask: the beginning of a remedy that needs its operator.
      party: what its certificate says.
    """

    name: str
    words: str
    command: str
    ask: str
    party: Party

    @property
    def unchecked(self) -> str:
        return f"the {self.name} did not check this machine"

    @property
    def unusable(self) -> str:
        return f"the {self.words} is not usable"


MASTER = Asked("master", "invite", "holdfast master", "ask the run operator", Party.MASTER)
HEAD = Asked("head", "string", "holdfast join --hosts", "ask the head's owner", Party.PEER)


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
        await _ask(MASTER, line, invite, advertised, nonce)
        found = [(each.check, each.verdict) for each in line.findings]
        unreachable = ("reachable", Verdict.WARNING) in found
        if unreachable and not advertise and not isinstance(bound, UserError):
            line.findings.append(await _ask_routers(bound))
    return line


async def check_host_line(site: Invite | None) -> LineReport:
    """Ask the head that a host's string leads to, None if damaged; a host listens on no port."""
    line = LineReport()
    if site is None:
        line.findings += [skipped(check, HEAD.unusable) for check in (HEAD.name, "bandwidth")]
    else:
        await _ask(HEAD, line, site, (), secrets.token_bytes(NONCE_BYTES))
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
        "switch on UPnP or PCP in the router's settings, and `holdfast join` will ask for a port",
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


async def _ask(
    asked: Asked, line: LineReport, invite: Invite, advertised: Sequence[str], nonce: bytes
) -> None:
    """Use the first address that answers; failed addresses before it become warnings."""
    unreached: list[Finding] = []
    for address in invite.addresses:
        ask = partial(ask_master, address, invite, advertised, nonce, asked.party)
        try:
            with trio.fail_after(MASTER_S):
                seen = await ask()
        except (OSError, trio.TooSlowError) as error:
            unreached.append(_unreachable(asked, address, error, await _largest_packets(ask)))
        except RemoteProtocolError as error:
            text = f"{address} is not the right {asked.name}, or runs another version: {error}"
            fix = f"{asked.ask} for a new {asked.words}, and install the same holdfast on both"
            unreached.append(fault(asked.name, text, fix))
        except EvictedError as error:
            line.findings.append(_refused(asked, error))
            break
        except UserError as error:  # about this machine's clock
            line.findings.append(fault("clock", str(error), error.hint))
            break
        else:
            line.findings.append(ok(asked.name, f"answers at {address}"))
            line.needs = seen.answer
            line.findings += _report_findings(asked, seen, advertised)
            line.findings += [warning(each.check, each.text, each.fix) for each in unreached]
            return
    line.findings += unreached
    line.findings += [skipped(check, asked.unchecked) for check in ("reachable", "bandwidth")]


def check_version(theirs: str, name: str = "master") -> Finding:
    """Compare versions; one with another protocol version has already refused this machine."""
    if theirs == __version__:
        return ok("versions", f"the {name} runs holdfast {theirs} as well")
    return warning(
        "versions",
        f"the {name} runs holdfast {theirs or 'of an unknown version'}, this machine {__version__}",
        "install the same version on all machines of a run: `pip install"
        f" holdfast=={theirs or '...'}`",
    )


def _report_findings(
    asked: Asked, seen: MachineCheckReport, advertised: Sequence[str]
) -> Iterator[Finding]:
    yield check_version(seen.answer.software, asked.name)
    yield check_clock(seen.clock_ahead_s, seen.rates.round_trip_s, asked.name)
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
    yield check_host_bandwidth(seen) if asked is HEAD else _bandwidth(seen)


def check_clock(ahead_s: float, uncertainty_s: float, name: str = "master") -> Finding:
    """Compare this machine's clock with the other end's, which may be the wrong one."""
    off_s = abs(ahead_s)
    text = f"{off_s:.1f} s {'ahead of' if ahead_s > 0 else 'behind'} the {name}'s"
    fix = (
        "set the clock: `timedatectl set-ntp true`; if it is right, tell the run operator that the "
        f"{name}'s clock is wrong"
    )
    if off_s > CLOCK_FAULT_S + uncertainty_s:
        return fault("clock", text, fix)
    if off_s > CLOCK_WARN_S + uncertainty_s:
        return warning("clock", text, fix)
    return ok("clock", text)


def _bandwidth(seen: MachineCheckReport) -> Finding:
    rates, text = seen.rates, _rates("master", seen.rates)
    if min(rates.up_bytes_per_s, rates.down_bytes_per_s) < LINE_SLOW_BYTES_PER_S:
        return warning(
            "bandwidth",
            text,
            "check with `holdfast config plan --bandwidth ...` whether the run's settings suit this"
            " line; stop other traffic on it",
        )
    return ok("bandwidth", text)


def check_host_bandwidth(seen: MachineCheckReport) -> Finding:
    """Compare the line with an even part of the model, which a round moves both ways."""
    rates, text = seen.rates, _rates("head", seen.rates)
    part_bytes = seen.answer.checkpoint_bytes / max(seen.answer.member_count, 1)
    if not part_bytes:
        return ok("bandwidth", f"{text}; the run has no weights yet")
    part_s = part_bytes / min(rates.up_bytes_per_s, rates.down_bytes_per_s)
    text += (
        f"; an even part of the model ({part_bytes / 1e6:.0f} MB) takes {part_s:.1f} s each way,"
        " whenever all of it is synchronised"
    )
    if part_s > PART_S:
        return warning(
            "bandwidth",
            text,
            "connect these machines by a faster line, let this one hold a smaller part, or"
            " synchronise less often (`sync_every`)",
        )
    return ok("bandwidth", text)


def _rates(name: str, rates: ProbeRates) -> str:
    return (
        f"to the {name} {_mbit(rates.up_bytes_per_s)}, from it {_mbit(rates.down_bytes_per_s)}, "
        f"measured with {rates.junk_bytes / 2**20:.1f} MiB over one connection; "
        f"first answer after {1e3 * rates.round_trip_s:.0f} ms"
    )


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


def _unreachable(
    asked: Asked, address: Address, error: OSError | trio.TooSlowError, fits: int
) -> Finding:
    """Return the fault of a silent address; ``fits``: it answers packets of so many bytes."""
    cause = cause_of(error)
    number = cause.errno if isinstance(cause, OSError) else None
    text = f"no {asked.name} answers at {address}: {cause if str(cause) else 'no answer in time'}"
    if fits:
        text = (
            f"the path to {address} loses large packets: the {asked.name} answers those of {fits}"
            " bytes"
        )
        fix = f"let this machine send smaller ones: `ip link set dev DEVICE mtu {fits}`"
    elif isinstance(cause, socket.gaierror):
        fix = f"check the spelling of {address.host}, and DNS here: `getent hosts {address.host}`"
    elif number == errno.ECONNREFUSED:
        fix = (
            f"the machine answers, but nothing listens on that port: {asked.ask} whether "
            f"`{asked.command}` runs, and whether its port is forwarded"
        )
    elif number in (errno.ENETUNREACH, errno.EHOSTUNREACH):
        fix = f"check the network and the route to the {asked.name}: `ip route get {address.host}`"
    else:
        fix = (
            f"the {asked.name}'s machine is off, or a firewall drops the packets: {asked.ask} to"
            f" open TCP port {address.port}"
        )
    return fault(asked.name, text, fix)


def _refused(asked: Asked, error: EvictedError) -> Finding:
    if error.code == RefusalCode.VERSION.value:
        fix = f"install the run's version of holdfast here, or {asked.ask} to upgrade"
        return fault("versions", f"the {asked.name} refuses this version: {error.reason}", fix)
    if error.code == RefusalCode.TOKEN.value:
        return fault("invite", error.reason, f"{asked.ask} for a new {asked.words}")
    return fault(asked.name, f"the {asked.name} refuses: {error.reason}", asked.ask)
