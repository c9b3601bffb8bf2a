"""Findings of the doctor's checks: a verdict, an observation, and a fix."""

from __future__ import annotations

import enum
from collections.abc import Iterable

from attrs import frozen


class Verdict(enum.Enum):
    OK = "ok"
    WARNING = "warning"  # works, but not as well as it could, or not permanently
    FAULT = "fault"  # prevents this machine from taking part
    SKIPPED = "skipped"  # could not be checked; the text says why


@frozen
class Finding:
    """One line of a doctor's report.

    Attributes:
      check: name of the checked item; several findings may share one.
      text: the observation.
      fix: the remedy; every fault and warning has one.
    """

    check: str
    verdict: Verdict
    text: str
    fix: str = ""


def ok(check: str, text: str) -> Finding:
    return Finding(check, Verdict.OK, text)


def warning(check: str, text: str, fix: str) -> Finding:
    return Finding(check, Verdict.WARNING, text, fix)


def fault(check: str, text: str, fix: str) -> Finding:
    return Finding(check, Verdict.FAULT, text, fix)


def skipped(check: str, text: str) -> Finding:
    return Finding(check, Verdict.SKIPPED, text)


def unfit(findings: Iterable[Finding]) -> bool:
    return any(finding.verdict is Verdict.FAULT for finding in findings)
