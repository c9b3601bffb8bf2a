"""Service files that keep a daemon running: a systemd unit and a launchd plist.

Both run the given command in the folder and with the PATH of the installation. systemd does not restart
it after an error that a restart cannot fix. A stop sends SIGTERM to the daemon alone, which drains and
ends its trainer itself. A second SIGTERM stops it at once, and the manager kills it after ``STOP_S``.
"""

from __future__ import annotations

import plistlib
from collections.abc import Mapping, Sequence
from pathlib import Path

from attrs import frozen

from ..exit_codes import ExitCode
from ..this_machine import DESCRIPTORS_WANTED

STOP_S = 300  # to drain: the current round, the trainer's exit, a last checkpoint of many gigabytes
# For a system service. ProtectSystem=strict is left out because a training script may write anywhere,
# and options that hide devices (PrivateDevices, ProtectClock) because it computes on some of them.
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
RETRY_S = 10  # before a restart
# A restart would fail again with these; the operator must act first.
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
    """A service to install.

    Attributes:
      argv: the program's absolute path and its arguments.
      run_as: user of a system service; empty for a user service.
    """

    name: str
    argv: Sequence[str]
    folder: Path
    environment: Mapping[str, str]
    system: bool
    run_as: str = ""


def systemd_unit(service: ServiceUnit) -> str:
    """Return the text of a systemd unit."""
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
# SIGTERM goes to the daemon alone: it finishes its round, then ends its trainer itself.
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
    """Quote a word against systemd's splitting and specifiers; ExecStart must also escape ``$``."""
    text = word.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{_percent(text)}"'


def launchd_plist(service: ServiceUnit, log: Path) -> bytes:
    """Return the bytes of a property list. launchd restarts after any failure, with a delay."""
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
