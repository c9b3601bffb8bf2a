"""Errors and warnings of a ``run.toml``, with their lines.

``RunSpec.parse`` stops at the first error, as a master should; an author wants to see all of them.
This module has no rules of its own: the spec's validators and contradictions decide.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Iterator, Mapping
from typing import Any

import attrs
from attrs import frozen

from ...protocol.errors import UserError
from .preset import gone_reason, with_preset
from .spec import SPEC_CHARS_MAX, TABLES, RunSpec, contradictions
from .spec_warnings import spec_warnings

_TABLE = re.compile(r"\s*\[\s*([^\[\]]+?)\s*\]\s*(#.*)?")
_KEY = re.compile(r"""\s*([\w.-]+|"[^"]*"|'[^']*')\s*=""")
_AT_LINE = re.compile(r"\(at line (\d+), column \d+\)")


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
    if len(toml_text) > SPEC_CHARS_MAX:
        return [SpecFault(0, "", f"it is longer than {SPEC_CHARS_MAX} characters")], []
    try:
        document = tomllib.loads(toml_text)
    except ValueError as error:  # of TOML, or a number of too many digits
        found = _AT_LINE.search(str(error))  # else it is at the end of the document
        line = int(found.group(1)) if found else len(toml_text.splitlines())
        return [SpecFault(line, "", str(error))], []
    except RecursionError:
        return [SpecFault(0, "", "its values are nested too deeply")], []
    lines = key_lines(toml_text)
    errors = list(_errors(with_preset(document), lines))
    warnings: list[SpecFault] = []
    if not errors:
        try:
            spec = RunSpec.parse(toml_text)
        except UserError as error:  # it is too long with all settings
            errors.append(SpecFault(0, "", str(error).removeprefix("run.toml: ")))
        else:
            warnings = [
                SpecFault(lines.get(key, 0), key, text) for key, text in spec_warnings(spec)
            ]
    return sorted(errors, key=_by_line), sorted(warnings, key=_by_line)


def _by_line(fault: SpecFault) -> tuple[int, str]:
    return fault.line, fault.key


def _errors(document: Mapping[str, Any], lines: Mapping[str, int]) -> Iterator[SpecFault]:
    made: dict[str, Any] = {}
    for name in document:
        if name not in TABLES:
            yield _unknown_fault(name, list(TABLES), "table", name, lines)
    for name, kind in TABLES.items():
        values = document.get(name, {})
        if not isinstance(values, dict):
            yield SpecFault(lines.get(name, 0), name, f"must be a table: [{name}]")
            continue
        known = [attribute.name for attribute in attrs.fields(kind)]
        for key in values:
            place = f"{name}.{key}"
            if reason := gone_reason(place, values[key]):
                yield SpecFault(lines.get(place, 0), place, f"{key}: {reason}")
            elif key not in known:
                yield _unknown_fault(key, known, "key", place, lines)
        faults = list(_value_faults(name, kind, values, lines))
        yield from faults
        if not faults:
            made[name] = {key: value for key, value in values.items() if key in known}
    if {"diloco", "membership", "reduce"} <= set(made):
        yield from _contradictions(made, lines)


def _unknown_fault(
    name: str, known: list[str], what: str, key: str, lines: Mapping[str, int]
) -> SpecFault:
    near = next(iter(difflib.get_close_matches(name, known, n=1)), "")
    hint = f"did you mean {near!r}?" if near else f"known: {', '.join(known)}"
    return SpecFault(lines.get(key, 0), key, f"unknown {what} ({hint})", near)


def _value_faults(
    table: str, kind: type, values: Mapping[str, Any], lines: Mapping[str, int]
) -> Iterator[SpecFault]:
    for attribute in attrs.fields(kind):
        if attribute.name not in values or attribute.validator is None:
            continue
        value = values[attribute.name]
        convert: Any = attribute.converter
        try:
            attribute.validator(None, attribute, value if convert is None else convert(value))
        except ValueError as error:
            key = f"{table}.{attribute.name}"
            yield SpecFault(lines.get(key, 0), key, str(error))


def _contradictions(made: Mapping[str, Any], lines: Mapping[str, int]) -> Iterator[SpecFault]:
    diloco, groups = made["diloco"], made["diloco"].get("groups")
    if groups:
        diloco = {"fragments": len(groups), **diloco}
    tables = [
        TABLES[name](**values)
        for name, values in (
            ("diloco", diloco),
            ("membership", made["membership"]),
            ("reduce", made["reduce"]),
        )
    ]
    for each in contradictions(*tables):
        key = next((key for key in each.keys if key in lines), each.keys[0])
        yield SpecFault(lines.get(key, 0), key, each.text)


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
