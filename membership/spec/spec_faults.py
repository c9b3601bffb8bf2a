"""Errors and warnings of a ``run.toml``, with their lines."""

from __future__ import annotations

import re

from attrs import frozen

from .mistakes import SpecError
from .spec import RunSpec
from .spec_warnings import spec_warnings

_TABLE = re.compile(r"\s*\[\s*([^\[\]]+?)\s*\]\s*(#.*)?")
_KEY = re.compile(r"""\s*([\w.-]+|"[^"]*"|'[^']*')\s*=""")


@frozen
class SpecFault:
    """One error or warning.

    Attributes:
      line: in the file, from 1 on; 0: no particular line.
      key: ``table.key``, ``table`` or empty.
      near: the known name that was probably meant, or empty.
    """

    line: int
    key: str
    text: str
    near: str = ""


def find_faults(toml_text: str) -> tuple[list[SpecFault], list[SpecFault]]:
    """Return errors and warnings, by line. There are warnings only where there is no error."""
    lines = key_lines(toml_text)
    errors: list[SpecFault] = []
    warnings: list[SpecFault] = []
    try:
        spec = RunSpec.parse(toml_text)
    except SpecError as error:
        for each in error.mistakes:
            key = next((key for key in each.keys if key in lines), "".join(each.keys[:1]))
            errors.append(SpecFault(each.line or lines.get(key, 0), key, each.text, each.near))
    else:
        warnings = [SpecFault(lines.get(key, 0), key, text) for key, text in spec_warnings(spec)]
    return sorted(errors, key=_by_line), sorted(warnings, key=_by_line)


def _by_line(fault: SpecFault) -> tuple[int, str]:
    return fault.line, fault.key


def key_lines(toml_text: str) -> dict[str, int]:
    """Return the line of each ``table`` and ``table.key``, where it stands first."""
    found: dict[str, int] = {}
    table = ""
    for number, line in enumerate(toml_text.splitlines(), 1):
        if header := _TABLE.fullmatch(line):
            table = header.group(1).replace(" ", "")
            found.setdefault(table, number)
        elif assigned := _KEY.match(line):
            key = assigned.group(1).strip("\"'")
            found.setdefault(f"{table}.{key}" if table else key, number)
    return found
