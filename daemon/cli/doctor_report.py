"""The doctor's report as text, with faults last, next to the prompt."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from ...protocol.text import escaped
from ..doctor.findings import Finding, Verdict

STYLES = {
    Verdict.OK: "green",
    Verdict.WARNING: "yellow",
    Verdict.FAULT: "bold red",
    Verdict.SKIPPED: "dim",
}
ORDER = (Verdict.OK, Verdict.SKIPPED, Verdict.WARNING, Verdict.FAULT)


def show_findings(findings: Sequence[Finding]) -> None:
    console = Console(highlight=False, markup=False, emoji=False, soft_wrap=True)
    wide = max(len(finding.check) for finding in findings)
    for finding in sorted(findings, key=lambda each: ORDER.index(each.verdict)):
        line = Text(f"{finding.verdict.value:8}", style=STYLES[finding.verdict])
        line.append(escaped(f"{finding.check:{wide}}  {finding.text}"), style="default")
        console.print(line)
        if finding.fix:
            console.print(Text(escaped(f"{'':{wide + 10}}fix: {finding.fix}")))
    faults = sum(finding.verdict is Verdict.FAULT for finding in findings)
    if faults:
        console.print(
            f"\n{faults} fault{'s' if faults > 1 else ''} to fix before this machine can join"
        )
    else:
        console.print("\nthis machine can take part")
