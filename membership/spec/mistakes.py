"""Mistakes in a ``run.toml``: no TOML, no known table or key, or no value that a key takes."""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs
from attrs import frozen

from ...protocol.errors import UserError
from .preset import Document, gone_reason

SPEC_EXIT_CODE = 3
SPEC_CHARS_MAX = 65_536  # what a Welcome can carry
_AT_LINE = re.compile(r"\(at line (\d+), column \d+\)")


@frozen
class Mistake:
    """One mistake.

    Attributes:
      keys: the settings (``table.key``) or the table that it is about; none: the whole text.
      near: the known name that was probably meant, or empty.
      line: of the text, where TOML itself is violated; 0: see ``keys``.
    """

    keys: tuple[str, ...]
    text: str
    near: str = ""
    line: int = 0


class SpecError(UserError):
    """A ``run.toml`` with mistakes; the error's text has the first of them."""

    def __init__(self, mistakes: Sequence[Mistake]) -> None:
        first = mistakes[0]
        text = first.text
        if first.keys:
            key = first.keys[0]
            text = f"{key}: {text.removeprefix(key.rpartition('.')[2] + ' ')}"
        more = f" (and {len(mistakes) - 1} more)" if len(mistakes) > 1 else ""
        super().__init__(f"run.toml: {text}{more}", exit_code=SPEC_EXIT_CODE)
        self.mistakes = mistakes


def read_document(toml_text: str) -> Document:
    """Read TOML; raise SpecError if the text is none, or too long."""
    check_length(toml_text)
    try:
        return tomllib.loads(toml_text)
    except ValueError as error:  # of TOML, or a number of too many digits
        found = _AT_LINE.search(str(error))  # else it is at the end of the document
        line = int(found.group(1)) if found else len(toml_text.splitlines())
        raise SpecError([Mistake((), str(error), line=line)]) from error
    except RecursionError as error:
        raise SpecError([Mistake((), "its values are nested too deeply")]) from error


def check_length(toml_text: str) -> None:
    if len(toml_text) > SPEC_CHARS_MAX:
        raise SpecError([Mistake((), f"it is longer than {SPEC_CHARS_MAX} characters")])


def check_tables(
    document: Document, kinds: Mapping[str, type]
) -> tuple[dict[str, Any], list[Mistake]]:
    """Return the valid tables of a document, by name, and all mistakes.

    Args:
      kinds: the class of each table, by name.
    """
    mistakes = [_unknown("table", name, kinds, name) for name in document if name not in kinds]
    tables: dict[str, Any] = {}
    for name, kind in kinds.items():
        values = document.get(name, {})
        if not isinstance(values, dict):
            mistakes.append(Mistake((name,), f"must be a table: [{name}]"))
            continue
        fields = {field.name: field for field in attrs.fields(kind)}
        known = {key: value for key, value in values.items() if key in fields}
        for key in [key for key in values if key not in fields]:
            place = f"{name}.{key}"
            reason = gone_reason(place, values[key])
            gone = Mistake((place,), reason)
            mistakes.append(gone if reason else _unknown("key", key, fields, place))
        refused = [
            Mistake((f"{name}.{key}",), reason)
            for key, value in known.items()
            if (reason := _refusal(fields[key], value))
        ]
        mistakes += refused
        if not refused:
            tables[name] = kind(**known)
    return tables, mistakes


def _unknown(what: str, name: str, known: Iterable[str], place: str) -> Mistake:
    near = next(iter(difflib.get_close_matches(name, known, n=1)), "")
    hint = f"did you mean {near!r}?" if near else f"known: {', '.join(known)}"
    return Mistake((place,), f"unknown {what} ({hint})", near)


def _refusal(field: attrs.Attribute[Any], value: object) -> str:
    """Return why a setting may not have a value; empty if it may."""
    convert: Any = field.converter
    if field.validator is None:
        return ""
    try:
        field.validator(None, field, value if convert is None else convert(value))
    except ValueError as error:
        return str(error)
    return ""
