"""This machine's power source and file descriptor limits."""

from __future__ import annotations

import resource
from pathlib import Path

# File descriptors of a daemon: enough for links to a thousand peers. A million would slow down
# programs that close all possible descriptors before they start another program.
DESCRIPTORS_WANTED = 65_536

POWER = Path("/sys/class/power_supply")


def on_battery() -> bool:
    """Return whether the machine runs on a battery now; False if that is not known."""
    discharging = False
    for supply in POWER.glob("*"):
        kind, online = _read(supply / "type"), _read(supply / "online")
        if kind in ("Mains", "USB") and online == "1":
            return False
        # A device's battery may be a mouse's.
        if kind == "Battery" and _read(supply / "scope") != "Device":
            discharging |= _read(supply / "status") == "Discharging"
    return discharging


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def descriptor_limit() -> int:
    """Return the number of file descriptors that a daemon may open with its limit raised."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return DESCRIPTORS_WANTED
    most = DESCRIPTORS_WANTED if hard == resource.RLIM_INFINITY else hard
    return max(soft, min(most, DESCRIPTORS_WANTED))


def raise_descriptor_limit() -> None:
    """Raise the limit of this process, mostly 1,024, as far as it may without privileges."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < descriptor_limit():
        resource.setrlimit(resource.RLIMIT_NOFILE, (descriptor_limit(), hard))
