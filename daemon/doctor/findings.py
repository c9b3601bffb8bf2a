"""What a check comes to: a verdict, what was seen, and what to do about it."""

from __future__ import annotations

import enum
from collections.abc import Iterable

from attrs import frozen


class Verdict(enum.Enum):
    OK = "ok"
    WARNING = "warning"  # it works, but not as well as it could, or not for ever
    FAULT = "fault"  # this machine cannot take part like this
    SKIPPED = "skipped"  # it could not be looked at; the text says why


@frozen
class Finding:
    """One line of a doctor's report.

    Attributes:
      check: a word for what was looked at; several findings may have the same.
      said: what was seen.
      fix: what to do; every fault and warning has one.
    """

    check: str
    verdict: Verdict
    said: str
    fix: str = ""


def ok(check: str, said: str) -> Finding:
    return Finding(check, Verdict.OK, said)


def warning(check: str, said: str, fix: str) -> Finding:
    return Finding(check, Verdict.WARNING, said, fix)


def fault(check: str, said: str, fix: str) -> Finding:
    return Finding(check, Verdict.FAULT, said, fix)


def skipped(check: str, said: str) -> Finding:
    return Finding(check, Verdict.SKIPPED, said)


def unfit(findings: Iterable[Finding]) -> bool:
    """Whether this machine cannot take part."""
    return any(finding.verdict is Verdict.FAULT for finding in findings)
