"""Encoding and decoding of messages: msgpack on the wire, attrs classes in the program.

A message is ``[class name, {field: value}]``. Decoding is strict: it gives a record that keeps
every limit of ``messages``, or raises ``RemoteProtocolError`` with the path of the field that does
not fit. Nothing is coerced ("5" is not an int, nor is True; an int is accepted for a float),
unknown fields are refused, and no float is ever infinite or NaN.

Nothing is built before the frame passes these checks. Its first bytes name its type, which must be
allowed in this phase, and the frame must not be longer than the type allows. The bytes of every
claimed length must be there, because msgpack allocates an array as soon as it has read its length.
Arrays, maps and the count of all items must stay within the type's limits: see ``message_limits``.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Collection
from typing import Any, TypeVar, get_args, get_origin

import attrs
import msgpack
from cattrs import Converter
from cattrs.errors import ForbiddenExtraKeysError
from cattrs.gen import make_dict_structure_fn

from . import messages
from .errors import LocalProtocolError, RemoteProtocolError
from .message_limits import FRAME_BYTES_MAX, MessageLimits, limits_of
from .messages import Message

HEAD_BYTES_MAX = 64  # enough bytes of a frame to know its type
# Shorter frames are not scanned: false claimed lengths in them cost 3 MB at most.
CLAIMS_BYTES_MIN = 1_024
REASON_CHARS_MAX = 300  # of an error's text, part of which the other side may have written
# A frame up to this size may have an item in every byte: building it takes 70 ms and 20 MB at most.
# The items of a longer frame are counted while they are built.
UNCOUNTED_BYTES_MAX = 256 * 2**10
BYTES_PER_ITEM = 2  # assumed where items are not counted; honest messages have 5 to 10
NAMED_MAX = 4  # message types that an error lists by name
KEPT_BYTES_MIN = 1_024  # encoding a shorter message again is as fast as finding it
KEPT_MAX = 8  # encodings that are kept for sending the same message to other members

T = TypeVar("T")

MESSAGES: dict[str, type[Message]] = {
    name: value
    for name, value in vars(messages).items()
    if isinstance(value, type) and issubclass(value, Message) and value is not Message
}


class _MisfitError(Exception):
    """A value that does not fit its type; each level that it passes adds its step to ``path``.

    Attributes:
      at: the value at which the path begins; the record around it finds the field by this value.
    """

    def __init__(self, reason: str, at: object = None, path: str = "") -> None:
        super().__init__(reason)
        self.reason = reason
        self.at = at
        self.path = path

    def under(self, step: str, at: object) -> _MisfitError:
        return _MisfitError(self.reason, at, step + self.path)


# The errors that msgpack, cattrs, attrs' validators and constructors raise for bad data.
_DATA_ERRORS = (
    _MisfitError,
    ValueError,
    TypeError,
    LookupError,
    ArithmeticError,
    AttributeError,
    ForbiddenExtraKeysError,
    msgpack.UnpackException,
)


def _describe(error: Exception) -> _MisfitError:
    if isinstance(error, _MisfitError):
        return error
    return _MisfitError(str(error)[:REASON_CHARS_MAX] or type(error).__name__)


def _exactly(wanted: type) -> Callable[[Any, Any], Any]:
    def structure(value: Any, _: Any) -> Any:
        if type(value) is not wanted:
            raise _MisfitError(f"{type(value).__name__} instead of {wanted.__name__}", value)
        return value

    return structure


def _structure_float(value: Any, _: Any) -> float:
    if type(value) is not float and type(value) is not int:
        raise _MisfitError(f"{type(value).__name__} instead of float", value)
    number = float(value)
    if not math.isfinite(number):
        raise _MisfitError(f"{number} is not finite", value)
    return number


def _unstructure_float(value: float) -> float:
    if not math.isfinite(value):
        raise ValueError(f"{value} is not finite")
    return float(value)


def _is_enum(wanted: Any) -> bool:
    return isinstance(wanted, type) and issubclass(wanted, enum.Enum)


def _enum_hook(wanted: Any) -> Callable[[Any, Any], Any]:
    def structure(value: Any, _: Any) -> Any:
        try:
            return wanted(value)
        except _DATA_ERRORS as error:
            raise _MisfitError(str(error)[:REASON_CHARS_MAX], value) from None

    return structure


def _is_tuple(wanted: Any) -> bool:
    arguments = get_args(wanted)
    return get_origin(wanted) is tuple and len(arguments) == 2 and arguments[1] is Ellipsis


def _tuple_hook(wanted: Any, converter: Converter) -> Callable[[Any, Any], Any]:
    member = get_args(wanted)[0]
    hook = converter.get_structure_hook(member)

    def structure(value: Any, _: Any) -> tuple[Any, ...]:
        if type(value) is not list and type(value) is not tuple:
            raise _MisfitError(f"{type(value).__name__} instead of a list", value)
        result: list[Any] = []
        try:
            for item in value:
                result.append(hook(item, member))  # its length names the misfit
        except _DATA_ERRORS as error:
            raise _describe(error).under(f"[{len(result)}]", value) from None
        return tuple(result)

    return structure


def _is_dict(wanted: Any) -> bool:
    return get_origin(wanted) is dict


def _dict_hook(wanted: Any, converter: Converter) -> Callable[[Any, Any], Any]:
    key_type, value_type = get_args(wanted)
    key_hook = converter.get_structure_hook(key_type)
    value_hook = converter.get_structure_hook(value_type)

    def structure(value: Any, _: Any) -> dict[Any, Any]:
        if type(value) is not dict:
            raise _MisfitError(f"{type(value).__name__} instead of a map", value)
        key = None
        try:
            result = {}
            for key, item in value.items():
                if type(key) is str and len(key) > messages.TEXT_CHARS_MAX:
                    raise _MisfitError(f"a key of {len(key)} characters")
                result[key_hook(key, key_type)] = value_hook(item, value_type)
            return result
        except _DATA_ERRORS as error:
            raise _describe(error).under(f"[{str(key)[:REASON_CHARS_MAX]!r}]", value) from None

    return structure


def _record_hook(cls: Any, converter: Converter) -> Callable[[Any, Any], Any]:
    build: Any = make_dict_structure_fn(
        cls, converter, _cattrs_forbid_extra_keys=True, _cattrs_detailed_validation=False
    )
    attrs.resolve_types(cls)
    fields = {field.name: field.type for field in attrs.fields(cls)}
    required = [each.name for each in attrs.fields(cls) if each.default is attrs.NOTHING]

    def misfit(value: dict[Any, Any], error: Exception) -> _MisfitError:
        """Find the field at fault, without checking long values again: that would double the cost
        of a large record, and quadruple that of a record within it.
        """
        for name in value:
            if name not in fields:
                return _MisfitError("unknown field", value, f".{str(name)[:REASON_CHARS_MAX]}")
        for name in required:
            if name not in value:
                return _MisfitError("missing field", value, f".{name}")
        if isinstance(error, _MisfitError):
            for name, item in value.items():
                if item is error.at and not _fits(item, fields[name], converter):
                    return error.under(f".{name}", value)
        return _MisfitError(_describe(error).reason, value)  # a validator's text names the field

    def structure(value: Any, _: Any) -> Any:
        if type(value) is not dict:
            raise _MisfitError(f"{type(value).__name__} instead of a {cls.__name__}", value)
        try:
            return build(value, cls)
        except _DATA_ERRORS as error:
            raise misfit(value, error) from None

    return structure


def _fits(value: Any, wanted: Any, converter: Converter) -> bool:
    """Return whether a value fits a type. It finds the wrong field among several with one value."""
    if type(value) in (dict, list, tuple):  # each container stands in one field only
        return False
    try:
        converter.structure(value, wanted)
    except _DATA_ERRORS:
        return False
    return True


def _make_converter() -> Converter:
    converter = Converter(forbid_extra_keys=True, detailed_validation=False)
    for primitive in (int, bool, str, bytes):
        converter.register_structure_hook(primitive, _exactly(primitive))
    converter.register_structure_hook(float, _structure_float)
    converter.register_unstructure_hook(float, _unstructure_float)
    converter.register_structure_hook_factory(_is_enum, _enum_hook)
    converter.register_structure_hook_factory(_is_tuple, _tuple_hook)
    converter.register_structure_hook_factory(_is_dict, _dict_hook)
    converter.register_structure_hook_factory(attrs.has, _record_hook)
    return converter


_CONVERTER = _make_converter()


def to_plain(record: Any) -> dict[str, Any]:
    """Convert a record to dicts, lists and scalars; bytes stay bytes.

    Raises:
      LocalProtocolError: a float in it is not finite.
    """
    try:
        plain: dict[str, Any] = _CONVERTER.unstructure(record)
    except (TypeError, ValueError) as error:
        raise LocalProtocolError(f"cannot encode {type(record).__name__}: {error}") from error
    return plain


def from_plain(cls: type[T], data: object) -> T:
    """Build a record from the output of ``to_plain``.

    Raises:
      RemoteProtocolError: a field does not fit; the text gives its path and the reason.
    """
    try:
        return _CONVERTER.structure(data, cls)
    except _DATA_ERRORS as error:
        misfit = _describe(error)
        raise RemoteProtocolError(
            f"{cls.__name__}{misfit.path}: {misfit.reason}"[: 2 * REASON_CHARS_MAX]
        ) from None


# A message from the master to all members is one object, and grows with their number: it must not
# be encoded once for each. The key is the object's id, which stays unique because the object is
# kept.
_recent: dict[int, tuple[Message, bytes]] = {}


def encode(message: Message) -> bytes:
    """Encode a message. A long message that was encoded a moment ago is not encoded again.

    Raises:
      LocalProtocolError: not a message, a value that cannot be encoded, or over-long.
    """
    if (known := _recent.get(id(message))) is not None:
        return known[1]
    cls = type(message)
    if MESSAGES.get(cls.__name__) is not cls:
        raise LocalProtocolError(f"{cls.__name__} is not a message")
    plain = to_plain(message)
    try:
        data: bytes = msgpack.packb([cls.__name__, plain])
    except (TypeError, ValueError, OverflowError) as error:
        raise LocalProtocolError(f"cannot encode {cls.__name__}: {error}") from error
    if len(data) > FRAME_BYTES_MAX:
        raise LocalProtocolError(f"a {cls.__name__} of {len(data)} bytes is over-long")
    if len(data) >= KEPT_BYTES_MIN:
        _recent[id(message)] = (message, data)
        if len(_recent) > KEPT_MAX:
            del _recent[next(iter(_recent))]
    return data


LIMITS: dict[type[Message], MessageLimits] = {cls: limits_of(cls) for cls in MESSAGES.values()}
# By the first bytes of a frame: an array of two elements, the first of which is a name.
_HEADS = {msgpack.packb([name, {}])[:-1]: cls for name, cls in MESSAGES.items()}


def check_head(head: bytes, size_bytes: int, types: Collection[type[Message]] | None) -> None:
    """Check a frame's first bytes; ``HEAD_BYTES_MAX`` of them are enough.

    Args:
      types: the types that may come; None: all.

    Raises:
      RemoteProtocolError: not a message, of a type that may not come, or over-long for its type.
    """
    cls = _type_of(head)
    if cls is None:
        if size_bytes > FRAME_BYTES_MAX:
            raise RemoteProtocolError(f"a frame of {size_bytes} bytes is over-long")
        if head[:1] != b"\x92" or len(head) < 2 or head[1] & 0xE0 != 0xA0:
            raise RemoteProtocolError("a frame is [name, fields]")
        raise RemoteProtocolError(f"no message is called {head[2 : 2 + (head[1] & 0x1F)]!r}")
    if types is not None and cls not in types:
        names = [each.__name__ for each in types]
        wanted = " or ".join(names) if len(names) <= NAMED_MAX else "a message of this phase"
        raise RemoteProtocolError(f"{cls.__name__} instead of {wanted}")
    if size_bytes > LIMITS[cls].frame_bytes:
        raise RemoteProtocolError(f"a {cls.__name__} of {size_bytes} bytes is over-long")


def _type_of(head: bytes) -> type[Message] | None:
    # Names are short texts: the byte before them has their length in its lower five bits.
    return _HEADS.get(head[: 2 + (head[1] & 0x1F)]) if len(head) > 1 else None


def decode(data: bytes, types: Collection[type[Message]] | None = None) -> Message:
    """Decode a message; see ``decode_counted``.

    Raises:
      RemoteProtocolError: ``data`` is not a valid message of these types.
    """
    return decode_counted(data, types)[0]


def decode_counted(
    data: bytes, types: Collection[type[Message]] | None = None
) -> tuple[Message, int]:
    """Decode a message and count its items: entries of arrays, keys and values of maps.

    Counting takes time: the items of a short frame are estimated by ``BYTES_PER_ITEM`` each.

    Args:
      types: the types that may come; None: all.

    Raises:
      RemoteProtocolError: ``data`` is not a valid message of these types.
    """
    size_bytes = len(data)
    cls = _type_of(data)
    if (
        cls is None
        or size_bytes > (limits := LIMITS[cls]).frame_bytes
        or (types is not None and cls not in types)
    ):
        check_head(data[:HEAD_BYTES_MAX], size_bytes, types)
        raise AssertionError("unreachable")
    array_max = max(2, limits.array)  # the frame is one itself
    items = size_bytes // BYTES_PER_ITEM
    try:
        if array_max > 2 and size_bytes >= CLAIMS_BYTES_MIN:
            _check_claims(data)
        if size_bytes <= UNCOUNTED_BYTES_MAX:
            frame = msgpack.unpackb(
                data,
                max_array_len=array_max if array_max < size_bytes else size_bytes,
                max_map_len=limits.map,
                max_ext_len=0,
            )
        else:
            frame, items = _unpack_counted(data, limits)
    except _DATA_ERRORS as error:
        reason = f"{type(error).__name__}: {error}"[:REASON_CHARS_MAX]
        raise RemoteProtocolError(f"{cls.__name__} cannot be unpacked: {reason}") from None
    return from_plain(cls, frame[1]), items


def _unpack_counted(data: bytes, limits: MessageLimits) -> tuple[Any, int]:
    items, items_max = 0, limits.items + 2

    def count(container: Any, each: int = 1) -> Any:
        nonlocal items
        items += each * len(container)
        if items > items_max:
            raise ValueError(f"more than {limits.items} items")
        return container

    frame = msgpack.unpackb(
        data,
        max_array_len=max(2, limits.array),
        max_map_len=limits.map,
        max_ext_len=0,
        list_hook=count,
        object_hook=lambda container: count(container, 2),
    )
    return frame, items


def _check_claims(data: bytes) -> None:
    """Raise an error unless the bytes of all claimed lengths are there; build nothing."""
    scan = msgpack.Unpacker(max_buffer_size=len(data))
    scan.feed(data)
    scan.skip()
