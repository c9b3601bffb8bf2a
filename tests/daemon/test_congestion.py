"""Which TCP congestion control a machine's lanes get, and the commands that its owner is given."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import attrs
import msgspec
import pytest
import trio

from holdfast.collectives.links.link_parts import LaneRules
from holdfast.daemon.congestion import (
    CHECK_AGAIN_S,
    CongestionCheck,
    CongestionSettings,
    examine,
    explain,
    read_settings,
)
from holdfast.daemon.peer.peer_config import CurrentSpec
from holdfast.daemon.peer.relay import make_forwarder
from holdfast.daemon.status_records import CongestionReport
from holdfast.membership.spec.spec import ReduceTable, RunSpec
from holdfast.protocol.addresses import Address
from holdfast.protocol.messages import RelayOffer, RelayPair
from holdfast.protocol.network.interface import Channel
from holdfast.protocol.network.relay_ticket import (
    PAIRED,
    TICKET_BYTES,
    RelayPreamble,
    RelayRole,
)
from holdfast.protocol.network.socket_options import congestion_of, obtainable_congestion
from holdfast.protocol.network.sockets import SocketNetwork
from holdfast.protocol.trust.authority import Authority
from tests import needs
from tests.background import background
from tests.processes.harness import environment
from tests.trust import admitted

STOCK = CongestionSettings(allowed=("reno", "cubic"), loaded=False)
SYSCTL = Path("/proc/sys/net/ipv4")
# A process of root that may do anything but choose a restricted congestion control.
WITHOUT_NET_ADMIN = ("setpriv", "--bounding-set=-net_admin", "--inh-caps=-net_admin")
EXAMINE = """
import sys, msgspec
from holdfast.daemon.congestion import examine
print(msgspec.json.encode(examine(sys.argv[1])).decode())
"""


# ---------------------------------------------------------------- in words


def test_what_is_used_as_wanted_needs_no_fix() -> None:
    loaded = attrs.evolve(STOCK, allowed=("reno", "cubic", "bbr"), loaded=True)
    report = explain("bbr", "bbr", loaded)
    assert (report.text, report.fix) == ("lanes use bbr", "")
    assert explain("bbr", "bbr", attrs.evolve(STOCK, allowed=None)).text == "lanes use bbr"
    assert explain("", "cubic", STOCK).text == "lanes use cubic, the kernel's default"


def test_a_module_that_is_not_loaded_is_to_be_loaded_now_and_after_a_reboot() -> None:
    report = explain("bbr", "cubic", STOCK)
    assert report.text.startswith(
        "lanes use cubic, not bbr: the kernel module tcp_bbr is not loaded;"
    )
    assert "carried 948 of 1000 Mbit/s with bbr, 60 with cubic" in report.text
    assert report.fix == (
        "as root (of a container: on its host) `modprobe tcp_bbr`, for after a reboot "
        "`echo tcp_bbr > /etc/modules-load.d/holdfast.conf` (unless this kernel lacks that module)"
    )


def test_a_module_that_is_loaded_but_not_allowed_is_added_to_the_machines_list() -> None:
    loaded = attrs.evolve(STOCK, allowed=("reno", "cubic", "cdg"), loaded=True)
    report = explain("bbr", "cubic", loaded)
    assert "this machine's settings do not allow it" in report.text
    line = "net.ipv4.tcp_allowed_congestion_control=reno cubic cdg bbr"
    assert report.fix == (
        f"as root (of a container: on its host) `sysctl -w '{line}'`, for after a reboot "
        f"`echo '{line}' > /etc/sysctl.d/90-holdfast.conf`"
    )
    unread = explain("bbr", "cubic", attrs.evolve(loaded, allowed=None))
    assert "control=reno cubic bbr'" in unread.fix


def test_another_one_that_a_spec_wants_gets_no_figures_of_bbr() -> None:
    report = explain("westwood", "cubic", STOCK)
    assert (
        report.text == "lanes use cubic, not westwood: the kernel module tcp_westwood is not loaded"
    )
    assert "`modprobe tcp_westwood`" in report.fix


def test_a_system_that_does_not_tell_is_not_told_anything() -> None:
    report = explain("bbr", "", STOCK)
    assert (report.text, report.fix) == ("this system does not tell which one lanes use", "")


def test_the_doctor_asks_for_what_lanes_ask_for() -> None:
    assert LaneRules().congestion == ReduceTable().congestion == "bbr"


# ---------------------------------------------------------------- the kernel's files


def test_settings_are_read(tmp_path: Path) -> None:
    assert read_settings("bbr", tmp_path) == CongestionSettings(None, False)
    (tmp_path / "tcp_allowed_congestion_control").write_text("reno cubic\n")
    (tmp_path / "tcp_available_congestion_control").write_text("reno cubic bbr\n")
    assert read_settings("bbr", tmp_path) == attrs.evolve(STOCK, loaded=True)
    assert read_settings("cdg", tmp_path) == STOCK


# ---------------------------------------------------------------- this machine


def restricted() -> str:
    """Return a congestion control that this kernel has and lets root only choose."""
    names = {
        kind: (SYSCTL / f"tcp_{kind}_congestion_control").read_text().split()
        for kind in ("available", "allowed")
    }
    found = [name for name in names["available"] if name not in names["allowed"]]
    needs.need(needs.root("only root may give up a right"))
    if not found or shutil.which("setpriv") is None:
        pytest.skip("needs setpriv, and a congestion control that not all may choose")
    return found[0]


def examined(*before: str, wanted: str) -> CongestionReport:
    done = subprocess.run(
        [*before, sys.executable, "-c", EXAMINE, wanted],
        env=environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    return msgspec.convert(json.loads(done.stdout), CongestionReport)


def test_a_process_without_the_capability_gets_the_default_and_the_command() -> None:
    wanted = restricted()
    report = examined(*WITHOUT_NET_ADMIN, wanted=wanted)
    default = (SYSCTL / "tcp_congestion_control").read_text().strip()
    assert report.used == default
    assert report.text.startswith(
        f"lanes use {default}, not {wanted}: this machine's settings do not allow it"
    )
    allowed = (SYSCTL / "tcp_allowed_congestion_control").read_text().strip()
    assert f"`sysctl -w 'net.ipv4.tcp_allowed_congestion_control={allowed} {wanted}'`" in report.fix
    assert examine(wanted).used == wanted


def test_what_is_reported_is_what_a_socket_gets() -> None:
    for wanted in ("bbr", "reno", "", "no-such-thing"):
        report = examine(wanted)
        assert report.used == obtainable_congestion(wanted)
        assert bool(report.fix) == (wanted not in ("", report.used))


# ---------------------------------------------------------------- a peer's checks


def test_a_peer_looks_again_while_something_is_to_be_done() -> None:
    asked: list[str] = []
    now_s, fix = 0.0, "do something"

    def answer(wanted: str) -> CongestionReport:
        asked.append(wanted)
        return CongestionReport(wanted=wanted, used="cubic", text="x", fix=fix)

    check = CongestionCheck(answer, lambda: now_s)
    assert check.look("bbr") is check.look("bbr")
    now_s = CHECK_AGAIN_S - 1
    check.look("bbr")
    assert asked == ["bbr"], "not at every status"
    now_s = CHECK_AGAIN_S
    fix = ""
    assert check.look("bbr").fix == ""
    assert asked == ["bbr", "bbr"]
    now_s = 10 * CHECK_AGAIN_S
    check.look("bbr")
    assert asked == ["bbr", "bbr"], "nothing is left to be done"
    assert check.look("cubic").wanted == "cubic"
    assert asked == ["bbr", "bbr", "cubic"]


@pytest.mark.real_time
async def test_what_a_relay_forwards_uses_the_congestion_control_of_the_runs_lanes(
    tmp_path: Path,
) -> None:
    network = SocketNetwork(admitted(Authority.load_or_create(tmp_path, "demo"), tmp_path))
    spec = CurrentSpec(RunSpec(reduce=ReduceTable(congestion="reno")))
    forwarder = make_forwarder(RelayOffer(1e9, 1, 0, only=True), network, spec)
    ticket, accepted = b"t" * TICKET_BYTES, []
    forwarder.carry(RelayPair(ticket, ()))

    async def handle(stream: trio.abc.Stream) -> None:
        assert isinstance(stream, trio.SocketStream)
        accepted.append(stream)
        await forwarder.handle(stream)

    async with background() as nursery:
        serve = partial(network.serve, on_relay=handle)
        (address,) = await nursery.start(serve, [Address("127.0.0.1", 0)], no_channel, None)
        parked, call = [await trio.open_tcp_stream(address.host, address.port) for _ in range(2)]
        await parked.send_all(RelayPreamble(RelayRole.PARK, ticket).pack())
        await call.send_all(RelayPreamble(RelayRole.CALL, ticket).pack())
        assert await parked.receive_some() == await call.receive_some() == PAIRED
        assert [congestion_of(stream.socket) for stream in accepted] == ["reno", "reno"]
        for stream in (parked, call):
            await stream.aclose()


async def no_channel(_channel: Channel) -> None:
    raise AssertionError("only relayed streams come here")
