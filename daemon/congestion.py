"""The TCP congestion control that lanes get on this machine, and what its owner can do for a better
one.

Linux lets a process without CAP_NET_ADMIN choose only the congestion controls in the sysctl
``tcp_allowed_congestion_control``. BBR is in it as soon as its module is loaded, unless somebody
wrote another list. List and modules are one for all network namespaces; the list can be written in
the first one only, so not in a container, unless it has the host's network.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from attrs import define, field, frozen

from ..protocol.network.socket_options import obtainable_congestion
from .status_records import CongestionReport

SYSCTL = Path("/proc/sys/net/ipv4")
BBR = "bbr"
# Measured in the lab: one connection, a line of 1 Gbit/s, a round trip of 100 ms, 0.02 % of packets
# lost.
GAIN = (
    "over 100 ms with 0.02 % loss one connection carried 948 of 1000 Mbit/s with bbr, 60 with cubic"
    " (a link opens more connections to make up for it)"
)
ALLOWED_KEY = "net.ipv4.tcp_allowed_congestion_control"
SYSCTL_FILE = "/etc/sysctl.d/90-holdfast.conf"
MODULES_FILE = "/etc/modules-load.d/holdfast.conf"
ALLOWED_USUALLY = ("reno", "cubic")  # where the kernel does not publish the list
CHECK_AGAIN_S = 60.0  # the machine's owner may have changed the settings meanwhile


@frozen
class CongestionSettings:
    """The kernel's settings that decide which congestion control a connection gets.

    Attributes:
      allowed: those that any process may choose; None: not known.
      loaded: the module of the wanted one is.
    """

    allowed: tuple[str, ...] | None
    loaded: bool


def read_settings(wanted: str, sysctl: Path = SYSCTL) -> CongestionSettings:
    allowed = _read(sysctl / "tcp_allowed_congestion_control")
    return CongestionSettings(
        allowed=None if allowed is None else tuple(allowed.split()),
        loaded=wanted in (_read(sysctl / "tcp_available_congestion_control") or "").split(),
    )


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return None


def examine(wanted: str) -> CongestionReport:
    """Try which congestion control this process's lanes get, and explain it."""
    used = obtainable_congestion(wanted)
    return explain(wanted, used, read_settings(wanted))


def explain(wanted: str, used: str, settings: CongestionSettings) -> CongestionReport:
    """Say in words what lanes get that ask for ``wanted`` and get ``used``."""
    text = f"lanes use {used}"
    fix = ""
    if not used:
        text = "this system does not tell which one lanes use"
    elif not wanted:
        text += ", the kernel's default"
    elif used != wanted:
        not_allowed = "this machine's settings do not allow it"
        reason = not_allowed if settings.loaded else f"the kernel module tcp_{wanted} is not loaded"
        text += f", not {wanted}: {reason}" + (f"; {GAIN}" if wanted == BBR else "")
        fix = _remedy(wanted, settings)
    return CongestionReport(wanted=wanted, used=used, text=text, fix=fix)


def _remedy(wanted: str, settings: CongestionSettings) -> str:
    """Return the two commands for this machine: one for now, one for after a reboot."""
    unless = ""
    if settings.loaded:
        allowed = ALLOWED_USUALLY if settings.allowed is None else settings.allowed
        line = f"{ALLOWED_KEY}={' '.join((*allowed, wanted))}"
        now, later = f"sysctl -w '{line}'", f"echo '{line}' > {SYSCTL_FILE}"
    else:
        # Loaded, bbr may be chosen by every process.
        now, later = f"modprobe tcp_{wanted}", f"echo tcp_{wanted} > {MODULES_FILE}"
        unless = " (unless this kernel lacks that module)"
    return f"as root (of a container: on its host) `{now}`, for after a reboot `{later}`{unless}"


@define
class CongestionCheck:
    """A peer's check of its congestion control, made again for another one or a fix."""

    examine: Callable[[str], CongestionReport] = examine
    clock: Callable[[], float] = time.monotonic
    _report: CongestionReport | None = field(default=None, init=False)
    _at_s: float = field(default=0.0, init=False)

    def look(self, wanted: str) -> CongestionReport:
        now_s = self.clock()
        report = self._report
        if (
            report is None
            or report.wanted != wanted
            or (report.fix and now_s - self._at_s >= CHECK_AGAIN_S)
        ):
            report = self._report = self.examine(wanted)
            self._at_s = now_s
        return report
