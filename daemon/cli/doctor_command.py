"""``holdfast doctor``: checks of this machine before it joins a run."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ...protocol.addresses import Address
from ...protocol.errors import UserError
from ...protocol.text import escaped, plural
from ..process.exit_codes import ExitCode
from ..process.paths import data_home, peer_state
from .options import (
    ADDRESS,
    FOLDER,
    advertise_option,
    json_option,
    parse_invite_option,
)

if TYPE_CHECKING:
    from ..doctor.findings import Finding


STYLES = {"ok": "green", "warning": "yellow", "fault": "bold red", "skipped": "dim"}
ORDER = ("ok", "skipped", "warning", "fault")  # faults last, next to the prompt


@click.command()
@click.argument("invite", required=False, callback=parse_invite_option)
@click.option("--state", type=FOLDER, help="As for `join`.")
@click.option(
    "--listen", multiple=True, default=("0.0.0.0:0",), type=ADDRESS, help="As for `join`."
)
@advertise_option
@click.option("--http", default="127.0.0.1:0", type=ADDRESS, help="As for `join`.")
@json_option
def doctor(
    invite: str | None,
    state: Path | None,
    listen: tuple[Address, ...],
    advertise: tuple[Address, ...],
    http: Address,
    as_json: bool,
) -> None:
    """Check whether this machine can take part in a run, and say how to fix what prevents it.

    With an INVITE the master checks this machine too: whether it can reach it, the clock offset,
    the line's speed, and the memory and disk that the run needs. The check does not use up the
    invite and sends at most eleven megabytes. Give the same options as to `join`. With the string
    for a further host (`holdfast host`) the head does it. The exit status is 14 if something must
    be fixed first.

    \b
    Examples:
      holdfast doctor
      holdfast doctor holdfast1.... --listen 0.0.0.0:29701
    """
    import msgspec
    import trio

    from ...protocol.trust.invite import HOST_PREFIX, PREFIX, Invite
    from ..doctor import line_checks, machine_checks
    from ..doctor.findings import fault, ok, unfit
    from ..peer.hosts.site import head_of

    findings: list[Finding] = list(machine_checks.check_versions())
    ticket: Invite | None = None
    for_host = invite is not None and invite.strip("\ufeff \r\n").startswith(HOST_PREFIX)
    asked = line_checks.HEAD if for_host else line_checks.MASTER
    missing = line_checks.NO_INVITE if invite is None else asked.unusable
    if invite is not None:
        try:
            ticket = Invite.decode(invite, prefix=HOST_PREFIX if for_host else PREFIX)
            what = f"for run {ticket.run_id[:8]}, as {ticket.role.value}"
            if for_host:
                what = f"for a further host of peer {head_of(ticket)[:8]}"
            findings.append(ok("invite", what))
        except UserError as error:
            findings.append(fault("invite", str(error), error.hint))
    folder = state or data_home() / "peers"
    if state is None and ticket is not None:
        own_id = ticket.run_id[-16:] if for_host else ticket.run_id  # as `host` and `join` do
        folder = peer_state(own_id, ticket.fingerprint)
    if for_host:
        line = trio.run(line_checks.check_host_line, ticket)
    else:
        line = trio.run(line_checks.check_line, ticket, listen, advertise, http, missing)
    findings += line.findings
    if not any(finding.check == "clock" for finding in findings):
        no_clock = missing if ticket is None else asked.unchecked
        findings.append(machine_checks.check_clock_alone(asked.name, no_clock))
    shared = state is None and ticket is None
    findings += machine_checks.check_state(folder, line.needs, shared=shared)
    findings.append(machine_checks.check_memory(line.needs))
    findings.append(machine_checks.check_files(line.needs))
    findings.append(machine_checks.check_buffers())
    findings.append(machine_checks.check_congestion())
    if as_json:
        answer = {"fit": not unfit(findings), "findings": msgspec.to_builtins(findings)}
        click.echo(json.dumps(answer, indent=2))
    else:
        show_findings(findings)
    if unfit(findings):
        sys.exit(ExitCode.UNFIT)


def show_findings(findings: Sequence[Finding]) -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False, markup=False, emoji=False, soft_wrap=True)
    wide = max(len(finding.check) for finding in findings)
    for finding in sorted(findings, key=lambda each: ORDER.index(each.verdict.value)):
        line = Text(f"{finding.verdict.value:8}", style=STYLES[finding.verdict.value])
        line.append(escaped(f"{finding.check:{wide}}  {finding.text}"), style="default")
        console.print(line)
        if finding.fix:
            console.print(Text(escaped(f"{'':{wide + 10}}fix: {finding.fix}")))
    faults = sum(finding.verdict.value == "fault" for finding in findings)
    if faults:
        console.print(f"\n{plural(faults, 'fault')} to fix before this machine can join")
    else:
        console.print("\nthis machine can take part")
