"""The TCP congestion control that lanes get on this machine, and what its owner can do for a better
one.

Linux lets a process without CAP_NET_ADMIN choose only the congestion controls in the sysctl
``tcp_allowed_congestion_control``. BBR is in it as soon as its module is loaded, unless somebody
wrote another list. List and modules are one for all network namespaces; the list can be written in
the first one only, so not in a container, unless it has the host's network.
"""

from __future__ import annotations

import stat
import time
from collections.abc import Callable
from pathlib import Path

from attrs import define, field, frozen

from ..protocol.network.socket_options import obtainable_congestion
from .status_records import CongestionReport

SYSCTL = Path("/proc/sys/net/ipv4")
CONTAINER_MARKS = (Path("/.dockerenv"), Path("/run/.containerenv"))  # Docker's, Podman's
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
      default: of connections that ask for none; empty: not known.
      allowed: those that any process may choose; None: not known.
      loaded: the module of the wanted one is.
      elsewhere: they can be changed on the container's host or in the first network namespace only.
    """

    default: str
    allowed: tuple[str, ...] | None
    loaded: bool
    elsewhere: bool


def read_settings(wanted: str, sysctl: Path = SYSCTL) -> CongestionSettings:
    allowed_file = sysctl / "tcp_allowed_congestion_control"
    allowed = _read(allowed_file)
    return CongestionSettings(
        default=_read(sysctl / "tcp_congestion_control") or "",
        allowed=None if allowed is None else tuple(allowed.split()),
        loaded=wanted in (_read(sysctl / "tcp_available_congestion_control") or "").split(),
        elsewhere=_is_elsewhere(allowed_file),
    )


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return None


def _is_elsewhere(allowed_file: Path) -> bool:
    """Return whether this process is in a container, or in a network namespace that is not the
    first.

    Recent kernels let not even root write the list there. A file system that is mounted read-only
    tells nothing: a system service has /proc/sys like that, on the host itself.
    """
    if any(map(Path.exists, CONTAINER_MARKS)):
        return True
    try:
        return not allowed_file.stat().st_mode & stat.S_IWUSR
    except OSError:
        return False


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
    elif settings.allowed is not None and wanted not in (*settings.allowed, settings.default):
        text += (
            ", because this process has CAP_NET_ADMIN; without it they would use"
            f" {settings.default}"
        )
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
    where = " on the host, not in this container or network namespace" if settings.elsewhere else ""
    return f"as root{where}: `{now}`, for after a reboot `{later}`{unless}"


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
