"""Message sizes: limits follow from the fields, and nothing is built from bytes that cannot be a
message.
"""

from __future__ import annotations

import tracemalloc
from typing import Any

import attrs
import msgpack
import pytest

from holdfast.protocol import message_limits, messages, wire
from holdfast.protocol import messages as m
from holdfast.protocol.connection_phases import NEWCOMER
from holdfast.protocol.errors import RemoteProtocolError
from holdfast.protocol.message_limits import ITEMS_MAX, PATTERN_CHARS_MAX

STRANGERS_BYTES = NEWCOMER.frame_bytes_max


def array(count: int) -> bytes:
    return b"\xdd" + count.to_bytes(4, "big")


def nested(name: str, size_bytes: int) -> bytes:
    """Make nested arrays that each claim to be long, then maps, as long as there is room."""
    frame: bytes = b"\x92" + msgpack.packb(name) + b"\xdc\x7d\x00" * 1_000
    return frame.ljust(size_bytes, b"\x80")


def test_limits_are_those_of_the_validators() -> None:
    of = wire.LIMITS
    assert (of[m.Heartbeat].array, of[m.Heartbeat].items) == (0, 2 * 3)
    assert of[m.Heartbeat].frame_bytes < 200
    assert of[m.Measured].array == m.MEMBERS_MAX
    fields, unknown = 2 * 6 + m.MEMBERS_MAX * (1 + 2 * 4), 2 + 2 * m.MEMBERS_MAX
    assert of[m.Measured].items == fields + unknown
    assert of[m.TrainerAttached].array == m.TENSORS_MAX
    assert of[m.TrainerAttached].items == ITEMS_MAX
    assert 4 * m.TEXT_CHARS_MAX < of[m.Notice].frame_bytes < 5 * m.TEXT_CHARS_MAX
    assert all(of[each].frame_bytes <= STRANGERS_BYTES for each in NEWCOMER.types or ())


def test_the_largest_of_a_type_is_within_its_limits() -> None:
    peer, count = "f" * 32, 2**63 - 1
    largest = m.Measured(
        count, 1.5, count, 1.5, (m.LinkLoad(peer, count, 1.5, 1.5),) * m.MEMBERS_MAX
    )
    assert wire.decode(wire.encode(largest)) == largest
    for message in (m.Notice("\U0001f600" * m.TEXT_CHARS_MAX), m.Heartbeat(count)):
        assert wire.decode(wire.encode(message)) == message


def test_what_matches_a_pattern_is_short() -> None:
    """Their limit is not their validator's, which has none."""
    accepted = {
        "[0-9a-f]{32}": 32,
        "([0-9a-f]{32})?": 32,
        "parameter|buffer|counter": 9,
        "[A-Za-z0-9][A-Za-z0-9._-]{0,63}": 64,
    }
    found = set()
    for cls in vars(messages).values():
        if isinstance(cls, type) and attrs.has(cls):
            for field in attrs.fields(cls):
                for each in (field.validator, getattr(field.validator, "member_validator", None)):
                    if (pattern := getattr(each, "pattern", None)) is not None:
                        found.add(pattern.pattern)
    assert found == set(accepted)
    assert max(accepted.values()) <= PATTERN_CHARS_MAX


@pytest.mark.fault(
    "a frame is made to waste time or memory",
    "its type, the lengths that it claims, its items",
    "refused before anything is built of it",
)
def test_what_a_type_is_is_known_before_anything_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_args: Any, **_options: Any) -> Any:
        raise AssertionError("something was built")

    monkeypatch.setattr(msgpack, "unpackb", never)
    for frame in (
        nested("EnrolHello", STRANGERS_BYTES),  # longer than any of its type
        nested("Heartbeat", 1_000),
        nested("Nonsense", STRANGERS_BYTES),
        wire.encode(m.Refused(messages.RefusalCode.FULL, "a type that may not come")),
    ):
        with pytest.raises(RemoteProtocolError):
            wire.decode(frame, NEWCOMER.types)
    for name in ("Hello", "Measured", "TrainerAttached"):  # arrays that are not there
        with pytest.raises(RemoteProtocolError, match="cannot be unpacked"):
            wire.decode(nested(name, STRANGERS_BYTES))


@pytest.mark.parametrize("name", ["EnrolHello", "CheckRequest", "Hello", "Reduced", "Audited"])
def test_a_frame_made_to_waste_memory_wastes_little(name: str) -> None:
    """32 KiB of claimed lengths took 82 MB."""
    frame = nested(name, STRANGERS_BYTES)
    tracemalloc.start()
    try:
        with pytest.raises(RemoteProtocolError):
            wire.decode(frame)
        assert tracemalloc.get_traced_memory()[1] < 2**19
    finally:
        tracemalloc.stop()


@pytest.mark.fault("a frame is made to waste time or memory")
def test_items_are_counted_while_they_are_built() -> None:
    """16 MiB of empty maps would take a gigabyte."""
    rows = m.TENSORS_MAX // 4 * b"\x80"
    frame = (
        wire.encode(m.TrainerAttached(m.ModelLayout(())))[:17] + b"\x81\xa6layout\x81\xa7tensors"
    )
    frame += array(1_000) + 1_000 * (array(len(rows)) + rows)
    assert len(frame) <= message_limits.FRAME_BYTES_MAX
    with pytest.raises(RemoteProtocolError, match=f"more than {ITEMS_MAX} items"):
        wire.decode(frame)


def test_a_field_at_fault_is_found_without_building_all_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tensor = m.TensorSpec("a", (2,), "float32", "parameter")
    plain = wire.to_plain(m.TrainerAttached(m.ModelLayout((tensor,) * 1_000)))
    plain["layout"]["tensors"][-1] = wire.to_plain(tensor) | {"kind": "none", "shape": [2]}
    built = 0
    init = m.TensorSpec.__init__

    def count(self: m.TensorSpec, *args: Any, **fields: Any) -> None:
        nonlocal built
        built += 1
        init(self, *args, **fields)

    monkeypatch.setattr(m.TensorSpec, "__init__", count)
    with pytest.raises(RemoteProtocolError, match=r"layout\.tensors\[999\].*'kind' must match"):
        wire.decode(msgpack.packb(["TrainerAttached", plain]))
    assert built == 1_000
