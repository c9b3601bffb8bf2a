"""``holdfast doctor``: looks at this machine before it takes part."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ...protocol.addresses import Address
from ...protocol.errors import UserError
from ..exit_codes import ExitCode
from ..paths import data_home, peer_state
from .options import (
    advertise_option,
    json_option,
    parse_address_option,
    parse_addresses,
    parse_invite_option,
)

if TYPE_CHECKING:
    from ..doctor.findings import Finding


@click.command()
@click.argument("invite", required=False, callback=parse_invite_option)
@click.option(
    "--state",
    type=click.Path(file_okay=False, path_type=Path),
    help="As it will be given to `join`.",
)
@click.option(
    "--listen",
    multiple=True,
    default=("0.0.0.0:0",),
    show_default=True,
    callback=parse_addresses,
    help="As it will be given to `join`.",
)
@advertise_option
@click.option(
    "--http",
    default="127.0.0.1:0",
    show_default=True,
    callback=parse_address_option,
    help="As it will be given to `join`.",
)
@json_option
def doctor(
    invite: str | None,
    state: Path | None,
    listen: tuple[Address, ...],
    advertise: tuple[Address, ...],
    http: Address,
    as_json: bool,
) -> None:
    """Say what would keep this machine from taking part, and how to mend it.

    With the INVITE that it will join with, the master looks at this machine, too: whether it reaches
    it, how far the clocks are apart, how fast the line is, how much memory and disk the run takes.
    The invite is not used up, and nothing large is sent: eleven megabytes at most. Give the same
    options as to `join`. The exit status is 14 if anything must be mended first.

    \b
    Examples:
      holdfast doctor
      holdfast doctor holdfast1.... --listen 0.0.0.0:29701
    """
    import trio

    from ...protocol.trust.invite import Invite
    from ..doctor import line_checks as its_line
    from ..doctor import machine_checks
    from ..doctor.findings import fault, ok, unfit

    findings: list[Finding] = list(machine_checks.look_at_versions())
    ticket: Invite | None = None
    if invite is not None:
        try:
            ticket = Invite.decode(invite)
            findings.append(ok("invite", f"for run {ticket.run_id[:8]}, as {ticket.role.value}"))
        except UserError as error:
            findings.append(fault("invite", str(error), error.hint))
    folder = state or data_home() / "peers"
    if state is None and ticket is not None:
        folder = peer_state(ticket.run_id, ticket.fingerprint)
    line = trio.run(its_line.look_at_line, ticket, listen, advertise, http)
    findings += line.findings
    if not any(finding.check == "clock" for finding in findings):
        findings.append(machine_checks.look_at_clock_alone())
    findings += machine_checks.look_at_state(folder)
    findings.append(machine_checks.look_at_disk(folder, line.needs))
    findings.append(machine_checks.look_at_memory(line.needs))
    findings.append(machine_checks.look_at_files(line.needs))
    findings.append(machine_checks.look_at_buffers())
    if as_json:
        rows = [
            {"check": f.check, "verdict": f.verdict.value, "said": f.said, "fix": f.fix}
            for f in findings
        ]
        click.echo(json.dumps({"fit": not unfit(findings), "findings": rows}, indent=2))
    else:
        from .doctor_report import show_findings

        show_findings(findings)
    if unfit(findings):
        sys.exit(ExitCode.UNFIT)
