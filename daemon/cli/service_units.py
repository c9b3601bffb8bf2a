"""Files that let a machine's service manager keep a daemon running: a systemd unit, a launchd plist.

Both run the very command that was given, from the folder and with the PATH in which it was given. What
no second try would mend is not tried again. To stop is SIGTERM to the daemon alone: it drains, and ends
its trainer itself; a second SIGTERM stops it at once, and so does the manager after ``STOP_S``.
"""

from __future__ import annotations

import plistlib
from collections.abc import Mapping, Sequence
from pathlib import Path

from attrs import frozen

from ..exit_codes import ExitCode
from ..this_machine import DESCRIPTORS_WANTED

STOP_S = (
    300  # to drain: the round in flight, the trainer's end, a last checkpoint of many gigabytes
)
# For a service of the machine. No ProtectSystem=strict: a training script writes where it likes; and
# nothing that hides devices (PrivateDevices, ProtectClock): it computes on some of them.
HARDENING = """\
CapabilityBoundingSet=
AmbientCapabilities=
ProtectSystem=full
ProtectControlGroups=true
ProtectKernelLogs=true
ProtectKernelModules=true
ProtectKernelTunables=true
PrivateTmp=true
RestrictSUIDSGID=true
LockPersonality=true
"""
RETRY_S = 10  # before it is started again
# A restart would find the same again; somebody has to do something.
FINAL = (
    ExitCode.USAGE,
    ExitCode.CONFIG,
    ExitCode.INVITE,
    ExitCode.REFUSED,
    ExitCode.EVICTED,
    ExitCode.TRAINER,
    ExitCode.SUPERSEDED,
    ExitCode.MEMORY,
)


@frozen
class ServiceUnit:
    """What is to run.

    Attributes:
      argv: all of it, the program's absolute path first.
      run_as: the user that it runs as, of a system's service; empty: who installs it.
    """

    name: str
    argv: Sequence[str]
    folder: Path
    environment: Mapping[str, str]
    system: bool
    run_as: str = ""


def systemd_unit(service: ServiceUnit) -> str:
    """The text of a unit."""
    environment = "\n".join(
        f"Environment={_quoted(f'{name}={value}')}" for name, value in service.environment.items()
    )
    user = f"User={service.run_as}\n" if service.run_as else ""
    target = "multi-user.target" if service.system else "default.target"
    return f"""\
# Written by `holdfast service install`; `holdfast service uninstall` removes it.
[Unit]
Description=holdfast {_percent(service.name)}
Wants=network-online.target
After=network-online.target
StartLimitIntervalSec=0

[Service]
Type=exec
ExecStart={" ".join(_quoted(word).replace("$", "$$") for word in service.argv)}
WorkingDirectory={_percent(str(service.folder))}
{user}{environment}
Restart=on-failure
RestartSec={RETRY_S}
RestartPreventExitStatus={" ".join(str(code.value) for code in FINAL)}
# To the daemon alone: it finishes its round, then ends its trainer itself.
KillMode=mixed
KillSignal=SIGTERM
TimeoutStopSec={STOP_S}
LimitNOFILE={DESCRIPTORS_WANTED}
NoNewPrivileges=true
{HARDENING if service.system else ""}
[Install]
WantedBy={target}
"""


def _percent(text: str) -> str:
    return text.replace("%", "%%")


def _quoted(word: str) -> str:
    """A word as systemd reads it: no specifiers, no splitting. Variables are those of ExecStart alone."""
    text = word.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{_percent(text)}"'


def launchd_plist(service: ServiceUnit, log: Path) -> bytes:
    """The bytes of a property list. launchd tries again whatever the status, but not at once."""
    made: dict[str, object] = {
        "Label": f"holdfast.{service.name}",
        "ProgramArguments": list(service.argv),
        "WorkingDirectory": str(service.folder),
        "EnvironmentVariables": dict(service.environment),
        "RunAtLoad": True,
        "KeepAlive": {"SuccessfulExit": False},
        "ThrottleInterval": RETRY_S,
        "ExitTimeOut": STOP_S,
        "SoftResourceLimits": {"NumberOfFiles": DESCRIPTORS_WANTED},
        "StandardOutPath": str(log),
        "StandardErrorPath": str(log),
    }
    if service.run_as:
        made["UserName"] = service.run_as
    return plistlib.dumps(made)
