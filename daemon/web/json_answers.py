"""Answers in JSON, as fast as the standard library goes, and never without an answer."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping

from starlette.responses import Response


def compact(value: object) -> bytes:
    """As JSON on one line. What is no number in JSON becomes null."""
    try:
        return _said(value)
    except ValueError:  # somebody's loss is "not a number"
        return _said(_finite(value))


def _said(value: object) -> bytes:
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    # A name may hold half of a pair of surrogates, which no UTF-8 has.
    return text.encode("utf-8", "replace")


def _finite(value: object) -> object:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return value


def answer(value: object, status: int = 200) -> Response:
    return Response(compact(value), status, media_type="application/json")
