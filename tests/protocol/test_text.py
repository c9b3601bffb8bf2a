"""Untrusted text reaches no terminal and no log unescaped."""

from __future__ import annotations

import enum
import types
import typing
from typing import Any

import attrs
import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.protocol import wire
from holdfast.protocol.errors import HoldfastError, RemoteProtocolError, UserError
from holdfast.protocol.messages import MemberInfo, Notice, Role
from holdfast.protocol.text import TEXT_CHARS_MAX, escaped, escaped_lines, plain, unprintable

# One of each kind, and what was done with it.
HOSTILE = {
    "clipboard": "\x1b]52;c;cm0gLXJmIH4=\x07",
    "colour": "\x1b[31m",
    "C1 escape": "\x9b2J",
    "forged line": "alder\nholdfast: approved birch",
    "carriage return": "alder\rbirch",
    "line separator": "alder\u2028birch",
    "paragraph": "alder\u2029birch",
    "next line": "alder\x85birch",
    "override": "alder\u202ehcrib",
    "isolate": "alder\u2066birch",
    "mark": "alder\u200ebirch",
    "unseen": "al\u200bder",
    "joiner": "al\u200dder",
    "byte order": "\ufeffalder",
    "tag": "alder\U000e0041",
    "delete": "alder\x7f",
    "null": "al\x00der",
}
# Of which TOML allows all that follow the first few; it is parsed before anything of it is shown.
TOML_FIELDS = {"NewSpec.spec_toml", "Welcome.spec_toml"}


def _texts(wanted: Any, path: str) -> list[tuple[str, Any]]:
    """Yield each place of a text in a value of this type: (path, value with {} there)."""
    origin, arguments = typing.get_origin(wanted), typing.get_args(wanted)
    if origin is types.UnionType or origin is typing.Union:
        return [found for each in arguments for found in _texts(each, path)]
    if origin is tuple:
        return [(where, [value]) for where, value in _texts(arguments[0], f"{path}[]")]
    if origin is dict:
        return [(f"{path}{{}}", "KEY")]
    if wanted is str:
        return [(path, "TEXT")]
    if attrs.has(wanted) and not isinstance(wanted, enum.EnumMeta):
        attrs.resolve_types(wanted)
        return [
            (where, {field.name: value})
            for field in attrs.fields(wanted)
            for where, value in _texts(field.type, f"{path}.{field.name}")
        ]
    return []


def _put(value: Any, text: str) -> Any:
    if value == "TEXT":
        return text
    if value == "KEY":
        return {text: 0.5}
    if isinstance(value, list):
        return [_put(each, text) for each in value]
    return {name: _put(each, text) for name, each in value.items()}


def _fill(wanted: Any, given: Any, validator: Any = None) -> Any:
    """Make a value of the type with the given fields; the others are as small as possible."""
    origin, arguments = typing.get_origin(wanted), typing.get_args(wanted)
    if origin is types.UnionType or origin is typing.Union:
        if given is None and type(None) in arguments:
            return None
        return _fill(next(each for each in arguments if each is not type(None)), given)
    if origin is tuple:
        return [] if given is None else [_fill(arguments[0], each) for each in given]
    if origin is dict:
        return {} if given is None else given
    if isinstance(wanted, type) and issubclass(wanted, enum.Enum):
        return next(iter(wanted)).value
    if attrs.has(wanted):
        attrs.resolve_types(wanted)
        parts = given or {}
        return {
            field.name: _fill(field.type, parts.get(field.name), field.validator)
            for field in attrs.fields(wanted)
        }
    if given is not None:
        return given
    patterns = [
        v.pattern.pattern
        for v in getattr(validator, "_validators", (validator,))
        if type(v).__name__ == "_MatchesReValidator"
    ]
    if wanted is str and patterns:
        return {
            "[0-9a-f]{32}": "0" * 32,
            "([0-9a-f]{32})?": "",
            "parameter|buffer|counter": "buffer",
        }.get(patterns[0], "run")
    if wanted is bytes:
        least = [
            v.min_length
            for v in getattr(validator, "_validators", (validator,))
            if type(v).__name__ == "_MinLengthValidator"
        ]
        return bytes(max(least, default=0))
    return {str: "", int: 1, float: 1.0, bool: False}[wanted]


CASES = [
    (f"{name}{path}", cls, value)
    for name, cls in sorted(wire.MESSAGES.items())
    for path, value in _texts(cls, "")
]


def test_the_cases_are_all_there_are() -> None:
    paths = {path for path, _cls, _value in CASES}
    assert len(CASES) > 50
    assert {
        "Hello.name",
        "View.members[].name",
        "Progress.metrics{}",
        "TrainerAttached.layout.tensors[].aliases[]",
        "Refused.reason",
        "CheckAnswer.faults[]",
    } <= paths


@pytest.mark.parametrize(
    ("path", "cls", "value"), CASES, ids=[path for path, _cls, _value in CASES]
)
def test_no_message_carries_text_that_a_terminal_obeys(path: str, cls: Any, value: Any) -> None:
    fine = [
        "alder",
        "0" * 32,
        "run",
        "buffer",
    ]  # one of them fits whatever pattern there may be

    def decoded(text: str) -> object:
        plain_value = _fill(cls, _put(value, text))
        return wire.decode(msgpack.packb([cls.__name__, plain_value]))

    accepted = 0
    for text in fine:
        try:
            decoded(text)
            accepted += 1
        except RemoteProtocolError:
            pass
    assert accepted, f"the test knows no text that {path} takes"
    for kind, text in HOSTILE.items():
        if path in TOML_FIELDS and not any(character in text for character in "\x00\x07\x1b\x7f"):
            continue
        with pytest.raises(RemoteProtocolError) as refused:
            decoded(text)
        assert str(refused.value).isprintable(), kind  # what is said of it is plain, too
        field = path.rpartition(".")[2].strip("[]{}")
        assert field in str(refused.value), kind  # and names the field


def test_whoever_makes_such_a_record_is_told() -> None:
    with pytest.raises(ValueError, match=r"text has the character U\+001B"):
        Notice("\x1b[2J")
    with pytest.raises(ValueError, match=r"name has the character U\+202E"):
        MemberInfo("0" * 32, "\u202e", 1, (), Role.SPARE, in_sync=False)


def test_names_of_machines_all_over_the_world_are_fine() -> None:
    for name in ("Erle-7", "λ3", "木", "ольха", "أرز", "अश्वत्थ", "🌲", "❤️", "gpu [2]", "a\u00a0b"):
        assert not unprintable(name), name
        assert escaped(name) == plain(name) == name


@given(st.text(st.characters() | st.sampled_from("".join(HOSTILE.values())), max_size=40))
@settings(max_examples=200)
def test_escaped_text_is_printable_and_stays_what_it_was_otherwise(text: str) -> None:
    assert not unprintable(escaped(text))
    assert "\n" not in escaped(text)
    assert escaped_lines(text).count("\n") == text.count("\n")
    if not unprintable(text):
        assert escaped(text) == plain(text) == text
    assert not unprintable(plain(text))
    assert len(plain(3_000 * text)) <= TEXT_CHARS_MAX


def test_errors_are_escaped_whatever_their_text_quotes() -> None:
    for hostile in HOSTILE.values():
        assert not unprintable(str(HoldfastError(hostile)))
        assert not unprintable(str(RemoteProtocolError(f"it said {hostile}")))
        error = UserError(hostile, hint=hostile.replace("\n", ""))
        assert not unprintable(str(error) + error.hint)
