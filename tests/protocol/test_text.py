"""Untrusted text reaches no terminal and no log unescaped."""

from __future__ import annotations

import typing
from collections.abc import Callable
from typing import Any

import attrs
import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.protocol import messages, wire
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

AROUND: dict[Any, Callable[[str], Any]] = {  # by a field's type: a value with this text in it
    str: lambda text: text,
    tuple[str, ...]: lambda text: (text,),
    dict[str, float]: lambda text: {text: 0.5},
    dict[str, messages.LoggedFigure]: lambda text: {text: messages.LoggedFigure(0.5, 1)},
}
FIELDS = {
    f"{name}.{field.name}": field
    for name, cls in vars(messages).items()
    if attrs.has(cls)
    for field in attrs.fields(attrs.resolve_types(cls))
}
TEXTS = [name for name, field in FIELDS.items() if field.type in AROUND]


def holds_text(kind: Any) -> bool:
    """Return whether a type has texts in it, but for those of a record."""
    return kind is str or any(map(holds_text, typing.get_args(kind)))


def test_the_fields_are_all_that_hold_text() -> None:
    for name, field in FIELDS.items():
        assert name in TEXTS or not holds_text(field.type), name
    assert {"MemberInfo.name", "Progress.metrics", "TensorSpec.aliases", "Refused.reason"} <= {
        *TEXTS
    }


@pytest.mark.parametrize("name", TEXTS)
def test_no_message_carries_text_that_a_terminal_obeys(name: str) -> None:
    field = FIELDS[name]

    def refusal(text: str) -> str:
        try:
            field.validator(None, field, AROUND[field.type](text))
        except ValueError as error:
            return str(error)
        return ""

    # One of them fits whatever pattern there may be.
    assert not all(map(refusal, ("alder", "0" * 32, "run", "buffer"))), "no text is accepted"
    for kind, text in HOSTILE.items():
        if name not in TOML_FIELDS or any(character in text for character in "\x00\x07\x1b\x7f"):
            assert field.name in refusal(text), kind


@pytest.mark.parametrize("hostile", HOSTILE.values(), ids=HOSTILE)
def test_what_is_said_of_such_a_message_is_plain_and_names_the_field(hostile: str) -> None:
    member = wire.to_plain(MemberInfo("0" * 32, "", 1, (), Role.SPARE, in_sync=False))
    view = {"number": 1, "members": [member | {"name": hostile}], "step": 1}
    for cls, plain_fields, field in (("Notice", {"text": hostile}, "text"), ("View", view, "name")):
        with pytest.raises(RemoteProtocolError, match=field) as refused:
            wire.decode(msgpack.packb([cls, plain_fields]))
        assert str(refused.value).isprintable()


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
