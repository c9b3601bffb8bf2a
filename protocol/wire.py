"""Records to bytes and back: msgpack on the wire, attrs classes in the program.

A message is ``[class name, {field: value}]``. Decoding is strict: what comes out is a record that
keeps every limit of ``messages``, or ``RemoteProtocolError`` with the path of the field that does
not fit. Nothing is coerced ("5" is no int, True is no int; an int is fine where a float is due),
nothing unknown is skipped, and no float is ever infinite or NaN.

How deep a frame may nest is limited twice: msgpack stops at 1,024 containers, whose claimed lengths
``ITEMS_MAX`` bounds (a frame made to waste memory costs 80 MB for a moment), and the records' types
allow no more depth than they have.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar, get_args, get_origin

import attrs
import msgpack
from cattrs import Converter
from cattrs.errors import ForbiddenExtraKeysError
from cattrs.gen import make_dict_structure_fn

from . import messages
from .errors import LocalProtocolError, RemoteProtocolError
from .messages import Message

FRAME_BYTES_MAX = 16 * 2**20  # a layout of 65,536 tensors takes 5 to 12 MB; the rest is tiny
ITEMS_MAX = messages.TENSORS_MAX  # in one array or map; no record has a longer one
REASON_CHARS_MAX = 300  # of an error's text, some of which the other side wrote
KEPT_BYTES_MIN = 1_024  # shorter encodings are made again as fast as they are found
KEPT_MAX = 8  # encodings that are kept for the same message to somebody else

T = TypeVar("T")

MESSAGES: dict[str, type[Message]] = {
    name: value
    for name, value in vars(messages).items()
    if isinstance(value, type) and issubclass(value, Message) and value is not Message
}


class _MisfitError(Exception):
    """A value that does not fit its type; ``path`` grows on the way out."""

    def __init__(self, reason: str, path: str = "") -> None:
        super().__init__(reason)
        self.reason = reason
        self.path = path

    def under(self, step: str) -> _MisfitError:
        return _MisfitError(self.reason, step + self.path)


# All that msgpack, cattrs, attrs' validators and constructors throw at data that they do not like.
_ZOO = (
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
            raise _MisfitError(f"{type(value).__name__} instead of {wanted.__name__}")
        return value

    return structure


def _structure_float(value: Any, _: Any) -> float:
    if type(value) is not float and type(value) is not int:
        raise _MisfitError(f"{type(value).__name__} instead of float")
    number = float(value)
    if not math.isfinite(number):
        raise _MisfitError(f"{number} is not finite")
    return number


def _unstructure_float(value: float) -> float:
    if not math.isfinite(value):
        raise ValueError(f"{value} is not finite")
    return float(value)


def _is_tuple(wanted: Any) -> bool:
    arguments = get_args(wanted)
    return get_origin(wanted) is tuple and len(arguments) == 2 and arguments[1] is Ellipsis


def _tuple_hook(wanted: Any, converter: Converter) -> Callable[[Any, Any], Any]:
    member = get_args(wanted)[0]
    hook = converter.get_structure_hook(member)

    def structure(value: Any, _: Any) -> tuple[Any, ...]:
        if type(value) is not list and type(value) is not tuple:
            raise _MisfitError(f"{type(value).__name__} instead of a list")
        result: list[Any] = []
        try:
            for item in value:
                result.append(hook(item, member))  # its length names the misfit
        except _ZOO as error:
            raise _describe(error).under(f"[{len(result)}]") from None
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
            raise _MisfitError(f"{type(value).__name__} instead of a map")
        key = None
        try:
            result = {}
            for key, item in value.items():
                if type(key) is str and len(key) > messages.TEXT_CHARS_MAX:
                    raise _MisfitError(f"a key of {len(key)} characters")
                result[key_hook(key, key_type)] = value_hook(item, value_type)
            return result
        except _ZOO as error:
            raise _describe(error).under(f"[{str(key)[:REASON_CHARS_MAX]!r}]") from None

    return structure


def _record_hook(cls: Any, converter: Converter) -> Callable[[Any, Any], Any]:
    build: Any = make_dict_structure_fn(
        cls, converter, _cattrs_forbid_extra_keys=True, _cattrs_detailed_validation=False
    )
    attrs.resolve_types(cls)
    fields = {field.name: field.type for field in attrs.fields(cls)}

    def misfit(value: dict[Any, Any], error: Exception) -> _MisfitError:
        """Find the field at fault; only a record that is refused anyway pays for it."""
        for name in value:
            if name not in fields:
                return _MisfitError("unknown field", f".{str(name)[:REASON_CHARS_MAX]}")
        for name, wanted in fields.items():
            if name not in value:
                return _MisfitError("missing field", f".{name}")
            try:
                converter.structure(value[name], wanted)
            except _ZOO as inner:
                return _describe(inner).under(f".{name}")
        return _describe(error)  # a validator's, which names the field itself

    def structure(value: Any, _: Any) -> Any:
        if type(value) is not dict:
            raise _MisfitError(f"{type(value).__name__} instead of a {cls.__name__}")
        try:
            return build(value, cls)
        except _ZOO as error:
            raise misfit(value, error) from None

    return structure


def _make_converter() -> Converter:
    converter = Converter(forbid_extra_keys=True, detailed_validation=False)
    for primitive in (int, bool, str, bytes):
        converter.register_structure_hook(primitive, _exactly(primitive))
    converter.register_structure_hook(float, _structure_float)
    converter.register_unstructure_hook(float, _unstructure_float)
    converter.register_structure_hook_factory(_is_tuple, _tuple_hook)
    converter.register_structure_hook_factory(_is_dict, _dict_hook)
    converter.register_structure_hook_factory(attrs.has, _record_hook)
    return converter


_CONVERTER = _make_converter()


def to_plain(record: Any) -> dict[str, Any]:
    """A record as dicts, lists and scalars; bytes stay bytes.

    Raises:
      LocalProtocolError: a float in it is not finite.
    """
    try:
        plain: dict[str, Any] = _CONVERTER.unstructure(record)
    except (TypeError, ValueError) as error:
        raise LocalProtocolError(f"cannot encode {type(record).__name__}: {error}") from error
    return plain


def from_plain(cls: type[T], data: object) -> T:
    """The inverse of ``to_plain``.

    Raises:
      RemoteProtocolError: names the field that does not fit, and why.
    """
    try:
        return _CONVERTER.structure(data, cls)
    except _ZOO as error:
        misfit = _describe(error)
        raise RemoteProtocolError(
            f"{cls.__name__}{misfit.path}: {misfit.reason}"[: 2 * REASON_CHARS_MAX]
        ) from None


# What a master says to everybody is one object, which grows with the members: a thousand of them
# must not have it encoded a thousand times. By identity; the object is kept, so its id is its own.
_lately: dict[int, tuple[Message, bytes]] = {}


def encode(message: Message) -> bytes:
    """A message's bytes; a long one that was encoded a moment ago costs nothing.

    Raises:
      LocalProtocolError: not a message, a value that cannot travel, or over-long.
    """
    if (known := _lately.get(id(message))) is not None:
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
        _lately[id(message)] = (message, data)
        if len(_lately) > KEPT_MAX:
            del _lately[next(iter(_lately))]
    return data


def decode(data: bytes | bytearray | memoryview) -> Message:
    """Raises RemoteProtocolError: whatever is wrong with ``data``."""
    if len(data) > FRAME_BYTES_MAX:
        raise RemoteProtocolError(f"a frame of {len(data)} bytes is over-long")
    try:
        plain = msgpack.unpackb(
            data,
            max_array_len=min(len(data), ITEMS_MAX),
            max_map_len=min(len(data), ITEMS_MAX),
            max_ext_len=0,
        )
    except _ZOO as error:
        reason = f"{type(error).__name__}: {error}"[:REASON_CHARS_MAX]
        raise RemoteProtocolError(f"not msgpack: {reason}") from None
    if type(plain) is not list or len(plain) != 2 or type(plain[0]) is not str:
        raise RemoteProtocolError("a frame is [name, fields]")
    cls = MESSAGES.get(plain[0])
    if cls is None:
        raise RemoteProtocolError(f"no message is called {plain[0][:64]!r}")
    return from_plain(cls, plain[1])
