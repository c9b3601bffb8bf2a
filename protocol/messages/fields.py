"""Validators of fields: what makes a count, a name or a peer id."""

from __future__ import annotations

import math
import re
from typing import Any

import attrs
from attrs.validators import and_, ge, le, matches_re, max_len, min_len

from ..text import TEXT_CHARS_MAX, printable
from .limits import (
    CERTIFICATE_BYTES_MAX,
    COUNT_MAX,
    LEASE_RANGES_MAX,
    MEMBERS_MAX,
    METRICS_MAX,
    NAME_CHARS_MAX,
    OWNER_RUNS_MAX,
    PEER_ADDRESSES_MAX,
    RUN_ID,
    SAMPLES_MAX,
    WORD_CHARS_MAX,
)

count: Any = and_(ge(0), le(COUNT_MAX))
u32: Any = and_(ge(0), le(2**32 - 1))  # what a frame's header has room for
text: Any = and_(max_len(TEXT_CHARS_MAX), printable)
name: Any = and_(max_len(NAME_CHARS_MAX), printable)
word: Any = and_(max_len(WORD_CHARS_MAX), printable)
_NOT_TOML = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff]")
run_id: Any = matches_re(RUN_ID)
peer: Any = matches_re(r"[0-9a-f]{32}")
peer_or_none: Any = matches_re(r"([0-9a-f]{32})?")
digest: Any = and_(min_len(32), max_len(32))
port: Any = and_(ge(0), le(65_535))
token: Any = and_(max_len(128), printable)
ticket: Any = max_len(32)
nonce: Any = max_len(128)  # of a term: random bytes and the run authority's signature of them
blob: Any = max_len(CERTIFICATE_BYTES_MAX)


def finite(_instance: object, attribute: attrs.Attribute[Any], value: float) -> None:
    if not math.isfinite(value) or value < 0:
        raise ValueError(f"{attribute.name} must be finite and not negative, got {value}")


def metrics(instance: object, attribute: Any, value: dict[str, Any]) -> None:
    max_len(METRICS_MAX)(instance, attribute, value)  # type: ignore[arg-type]
    for each_name in value:
        name(instance, attribute, each_name)


def toml_text(_instance: object, attribute: Any, value: str) -> None:
    """Refuse characters that TOML does not allow. The text is parsed, and never shown as it is."""
    if _NOT_TOML.search(value):
        raise ValueError(f"{attribute.name} has a control character")


def each(validator: Any, count_max: int) -> Any:
    return attrs.validators.deep_iterable(
        member_validator=validator, iterable_validator=max_len(count_max)
    )


peers = each(peer, MEMBERS_MAX)
addresses = each(text, PEER_ADDRESSES_MAX)
manifest: Any = max_len(OWNER_RUNS_MAX)  # the first run begins at chunk 0
leases: Any = max_len(LEASE_RANGES_MAX)
samples: Any = and_(ge(1), le(SAMPLES_MAX))
