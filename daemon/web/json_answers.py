"""Records and plain values as JSON."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.responses import Response


def compact(value: object) -> bytes:
    """Return the value as JSON on one line; a float that is not finite becomes null."""
    try:
        return msgspec.json.encode(value)
    except UnicodeEncodeError:  # a path holds half of a surrogate pair, which UTF-8 does not have
        return msgspec.json.encode(_printable(msgspec.to_builtins(value)))


def _printable(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, dict):
        return {_printable(key): _printable(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_printable(each) for each in value]
    return value


def answer(value: object, status: int = 200) -> Response:
    return Response(compact(value), status, media_type="application/json")
