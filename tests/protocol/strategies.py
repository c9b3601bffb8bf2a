"""Hypothesis strategies for every message, made from the classes' own fields and validators."""

from __future__ import annotations

import enum
import types
import typing
from typing import Any

import attrs
from hypothesis import strategies as st

from holdfast.protocol import wire
from holdfast.protocol.messages import COUNT_MAX, Message

SMALL = 4  # items of a tuple and characters of a text: wide limits have tests of their own

_TEXT = st.characters(exclude_categories=("Cs",))
_FINITE = st.floats(min_value=0, allow_nan=False, allow_infinity=False)


def _validators(validator: object) -> list[object]:
    inner = getattr(validator, "_validators", None)
    return [validator] if inner is None else [v for item in inner for v in _validators(item)]


def _limits(validator: object) -> tuple[int, int, str | None]:
    """(least, most, pattern) as far as the validators say."""
    least, most, pattern = 0, COUNT_MAX, None
    for item in _validators(validator):
        name = type(item).__name__
        if name == "_MinLengthValidator":
            least = item.min_length  # type: ignore[attr-defined]
        elif name == "_MaxLengthValidator":
            most = item.max_length  # type: ignore[attr-defined]
        elif name == "_NumberValidator":
            if item.compare_op == ">=":  # type: ignore[attr-defined]
                least = item.bound  # type: ignore[attr-defined]
            else:
                most = item.bound  # type: ignore[attr-defined]
        elif name == "_MatchesReValidator":
            pattern = item.pattern.pattern  # type: ignore[attr-defined]
    return least, most, pattern


def values(wanted: Any, validator: object = None) -> st.SearchStrategy[Any]:
    """Values of a field's type that its validator accepts."""
    least, most, pattern = _limits(validator)
    origin, arguments = typing.get_origin(wanted), typing.get_args(wanted)
    if origin is types.UnionType or origin is typing.Union:
        return st.one_of(
            st.none() if item is type(None) else values(item, validator) for item in arguments
        )
    if origin is tuple:
        member = getattr(validator, "member_validator", None)
        return st.lists(values(arguments[0], member), max_size=SMALL).map(tuple)
    if origin is dict:
        return st.dictionaries(
            values(arguments[0]), st.floats(allow_nan=False, allow_infinity=False), max_size=SMALL
        )
    if wanted is bool:
        return st.booleans()
    if wanted is int:
        return st.integers(least, most)
    if wanted is float:
        return _FINITE
    if wanted is str:
        if pattern is not None:
            return st.from_regex(pattern, fullmatch=True)
        return st.text(_TEXT, min_size=least, max_size=min(most, SMALL))
    if wanted is bytes:
        return st.binary(min_size=least, max_size=max(least, min(most, SMALL)))
    if isinstance(wanted, type) and issubclass(wanted, enum.Enum):
        return st.sampled_from(wanted)
    return records(wanted)


def records(cls: Any) -> st.SearchStrategy[Any]:
    """Instances of an attrs class."""
    attrs.resolve_types(cls)
    return st.builds(
        cls, **{field.name: values(field.type, field.validator) for field in attrs.fields(cls)}
    )


messages: st.SearchStrategy[Message] = st.sampled_from(sorted(wire.MESSAGES)).flatmap(
    lambda name: records(wire.MESSAGES[name])
)
