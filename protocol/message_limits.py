"""Size limits of each message type, added up from its fields' types and validators.

No limit is listed here by hand, so none can differ from the validator that it comes from. ``wire``
checks these limits before it builds anything: a claimed length that no message of the type can have
is refused.
"""

from __future__ import annotations

import enum
import types
import typing
from typing import Any

import attrs
from attrs import frozen

from . import messages

FRAME_BYTES_MAX = 16 * 2**20  # a layout of 65,536 tensors takes 5 to 12 MB; the rest is tiny
# In one message; an item is an entry of an array, a key or a value of a map. A layout of 65,536
# tensors of four dimensions, each with four aliases, has this many; building it takes a second or
# less.
ITEMS_MAX = 24 * messages.TENSORS_MAX
PATTERN_CHARS_MAX = 64  # in a text that has to match a pattern: ids and words
SCALAR_BYTES = 9  # an integer or a float, with its type byte
HEAD_BYTES = 5  # before a text, bytes, an array or a map: its type and length
CHAR_BYTES = 4  # a character in UTF-8, at most
# Every record has room for one unknown field, and every map for one key too many: they are then
# refused by name, so that people learn that the other side runs another version.
UNKNOWN_NAME_BYTES = 64


@frozen
class MessageLimits:
    """The size limits of a message type, or of a value within one.

    Attributes:
      frame_bytes: bytes of the message or value, with everything in it.
      items: items in it, see ``ITEMS_MAX``.
      array: entries of the longest array in it.
      map: entries of the longest map in it.
    """

    frame_bytes: int = SCALAR_BYTES
    items: int = 0
    array: int = 0
    map: int = 0

    def beside(self, other: MessageLimits) -> MessageLimits:
        """Return the limits of both values together, in one message."""
        return self._joined(other, self.frame_bytes + other.frame_bytes, self.items + other.items)

    def either(self, other: MessageLimits) -> MessageLimits:
        """Return the limits of a value that is one or the other."""
        both = max(self.frame_bytes, other.frame_bytes), max(self.items, other.items)
        return self._joined(other, *both)

    def times(self, count: int) -> MessageLimits:
        return attrs.evolve(self, frame_bytes=count * self.frame_bytes, items=count * self.items)

    def _joined(self, other: MessageLimits, frame_bytes: int, items: int) -> MessageLimits:
        return MessageLimits(
            frame_bytes,
            items,
            max(self.array, other.array),
            max(self.map, other.map),
        )


def limits_of(cls: type[messages.Message]) -> MessageLimits:
    found = _record(cls)
    return attrs.evolve(
        found,
        frame_bytes=min(found.frame_bytes + HEAD_BYTES + len(cls.__name__), FRAME_BYTES_MAX),
        items=min(found.items, ITEMS_MAX),
    )


def _record(cls: Any) -> MessageLimits:
    attrs.resolve_types(cls)
    fields: tuple[attrs.Attribute[Any], ...] = attrs.fields(cls)
    total = MessageLimits(HEAD_BYTES + SCALAR_BYTES, 2 * (len(fields) + 1), map=len(fields) + 1)
    total = total.beside(_text(UNKNOWN_NAME_BYTES))
    for field in fields:
        name = _text(len(field.name.encode()))
        total = total.beside(name).beside(_value(field.type, field.validator))
    return total


def _value(wanted: Any, validator: object) -> MessageLimits:
    origin, arguments = typing.get_origin(wanted), typing.get_args(wanted)
    if origin in (types.UnionType, typing.Union):
        found = MessageLimits()
        for each in arguments:
            found = found.either(_value(each, validator))
        return found
    if origin is tuple:
        count = _longest(validator, messages.TENSORS_MAX)
        inner = _value(arguments[0], getattr(validator, "member_validator", None))
        outer = MessageLimits(HEAD_BYTES, count, array=count)
        return outer.beside(inner.times(count))
    if origin is dict:
        count = _longest(validator, messages.TENSORS_MAX)
        pair = _text(CHAR_BYTES * messages.TEXT_CHARS_MAX).beside(_value(arguments[1], None))
        outer = MessageLimits(HEAD_BYTES, 2 * (count + 1), map=count + 1)
        return outer.beside(pair.times(count + 1))
    if wanted is str:
        return _text(CHAR_BYTES * _longest(validator, PATTERN_CHARS_MAX))
    if wanted is bytes:
        size = _longest(validator, FRAME_BYTES_MAX)
        return MessageLimits(HEAD_BYTES + size)
    if isinstance(wanted, type) and issubclass(wanted, enum.Enum):
        return _text(PATTERN_CHARS_MAX)
    return _record(wanted) if attrs.has(wanted) else MessageLimits()


def _text(size_bytes: int) -> MessageLimits:
    return MessageLimits(HEAD_BYTES + size_bytes)


def _longest(validator: object, otherwise: int) -> int:
    """Return the length that a validator allows, or ``otherwise`` if it sets none."""
    each = getattr(validator, "_validators", None) or (validator,)
    each = [getattr(one, "iterable_validator", None) or one for one in each]
    lengths = [one.max_length for one in each if hasattr(one, "max_length")]
    return min(lengths, default=otherwise)
