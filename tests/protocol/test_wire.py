"""The encoding: every message comes back unchanged, and nothing else is accepted."""

from __future__ import annotations

import enum
import math
import time
import types
import typing
from typing import Any

import attrs
import msgpack
import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.protocol import message_limits, messages, wire
from holdfast.protocol import messages as m
from holdfast.protocol.errors import LocalProtocolError, RemoteProtocolError
from holdfast.protocol.text import unprintable

PROGRESS = m.Progress(7, 8, 1.5, None, "training", 1, 2, 0, {"accuracy": m.LoggedFigure(0.5, 6)})


def figure(value: float) -> dict[str, object]:
    return {"value": value, "step": 1}


def framed(name: str, fields: object) -> bytes:
    data: bytes = msgpack.packb([name, fields])
    return data


# ---------------------------------------------------------------- strategies from the classes

SMALL = 4  # items of a tuple and characters of a text: wide limits have tests of their own

_TEXT = st.characters(codec="utf-8").filter(lambda character: not unprintable(character))
_FINITE = st.floats(min_value=0, allow_nan=False, allow_infinity=False)


def _validators(validator: object) -> list[object]:
    inner = getattr(validator, "_validators", None)
    return [validator] if inner is None else [v for item in inner for v in _validators(item)]


def _limits(validator: object) -> tuple[int, int, str | None]:
    """Return (least, most, pattern) of the validators."""
    least, most, pattern = 0, m.COUNT_MAX, None
    for item in _validators(validator):
        name = type(item).__name__
        if name == "_MinLengthValidator":
            least = item.min_length  # type: ignore[attr-defined]
        elif name == "_MaxLengthValidator":
            most = item.max_length  # type: ignore[attr-defined]
        elif name == "_NumberValidator":
            if item.compare_op == ">=":  # type: ignore[attr-defined]
                least = item.bound  # type: ignore[attr-defined]
            else:  # "<" or "<="
                most = item.bound - (item.compare_op == "<")  # type: ignore[attr-defined]
        elif name == "_MatchesReValidator":
            pattern = item.pattern.pattern  # type: ignore[attr-defined]
    return least, most, pattern


def values(wanted: Any, validator: object = None) -> st.SearchStrategy[Any]:
    """Generate values of a field's type that its validator accepts."""
    least, most, pattern = _limits(validator)
    origin, arguments = typing.get_origin(wanted), typing.get_args(wanted)
    if origin is types.UnionType or origin is typing.Union:
        return st.one_of(
            [st.none() if item is type(None) else values(item, validator) for item in arguments]
        )
    if origin is tuple:
        member = getattr(validator, "member_validator", None)
        return st.lists(values(arguments[0], member), max_size=SMALL).map(tuple)
    if origin is dict:
        return st.dictionaries(values(arguments[0]), values(arguments[1]), max_size=SMALL)
    if wanted is bool:
        return st.booleans()
    if wanted is int:
        return st.integers(least, most)
    if wanted is float:
        return _FINITE if most == m.COUNT_MAX else st.floats(min_value=least, max_value=most)
    if wanted is str:
        if pattern is not None:
            return st.from_regex(pattern, fullmatch=True)
        return st.text(_TEXT, min_size=least, max_size=min(most, SMALL))
    if wanted is bytes:
        return st.binary(min_size=least, max_size=max(least, min(most, SMALL)))
    if isinstance(wanted, type) and issubclass(wanted, enum.Enum):
        return st.sampled_from(wanted)
    return records(wanted)


def _fields_of(cls: Any) -> tuple[attrs.Attribute[Any], ...]:
    fields: tuple[attrs.Attribute[Any], ...] = attrs.fields(cls)
    return fields


def records(cls: Any) -> st.SearchStrategy[Any]:
    """Generate instances of an attrs class."""
    if cls is m.LeaseRange:  # an empty one is refused
        halves = st.integers(0, m.COUNT_MAX // 2), st.integers(1, m.COUNT_MAX // 2)
        return st.builds(lambda start, count: m.LeaseRange(start, start + count), *halves)
    attrs.resolve_types(cls)
    return st.builds(
        cls, **{field.name: values(field.type, field.validator) for field in _fields_of(cls)}
    )


any_message: st.SearchStrategy[m.Message] = st.sampled_from(sorted(wire.MESSAGES)).flatmap(
    lambda name: records(wire.MESSAGES[name])
)


# ---------------------------------------------------------------- tests


@pytest.mark.parametrize("name", sorted(wire.MESSAGES))
def test_every_message_round_trips(name: str) -> None:
    @settings(max_examples=15)
    @given(records(wire.MESSAGES[name]))
    def check(message: m.Message) -> None:
        back = wire.decode(wire.encode(message))
        assert back == message
        assert type(back) is type(message)
        assert hash(wire.encode(back)) == hash(wire.encode(message))

    check()


@pytest.mark.fault("a member sends junk", "strict decoding", "that member's connection ends")
@given(any_message, st.data())
@settings(max_examples=200)
def test_mutated_frames_are_refused_or_are_messages(
    message: m.Message, data: st.DataObject
) -> None:
    frame = bytearray(wire.encode(message))
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(frame) - 1))
        what = data.draw(st.sampled_from(["flip", "delete", "insert", "truncate"]))
        if what == "flip":
            frame[at] ^= data.draw(st.integers(1, 255))
        elif what == "delete" and len(frame) > 1:
            del frame[at]
        elif what == "insert":
            frame.insert(at, data.draw(st.integers(0, 255)))
        elif at:
            del frame[at:]
    _refused_or_message(bytes(frame))


_plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=4)
    | st.binary(max_size=40),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.text(max_size=8) | st.binary(max_size=3), inner, max_size=3),
    max_leaves=12,
)  # fmt: skip


@given(st.sampled_from(sorted(wire.MESSAGES)), st.data())
@settings(max_examples=300)
def test_fields_of_any_shape_are_refused_or_fit(name: str, data: st.DataObject) -> None:
    """With the right field names and any values, a record that is accepted keeps every limit."""
    names = [field.name for field in _fields_of(wire.MESSAGES[name])]
    good = wire.to_plain(data.draw(records(wire.MESSAGES[name])))
    for field in data.draw(st.lists(st.sampled_from(names or ["none"]), max_size=2)):
        good[field] = data.draw(_plain)
    _refused_or_message(framed(name, good))


def _refused_or_message(frame: bytes) -> None:
    try:
        message = wire.decode(frame)
    except RemoteProtocolError as error:
        reason = str(error)
    else:
        reason = ""
        assert wire.decode(wire.encode(message)) == message
    assert len(reason) < 1_000


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"step": "7"}, "Progress.step: str instead of int"),
        ({"step": True}, "Progress.step: bool instead of int"),
        ({"step": 7.0}, "Progress.step: float instead of int"),
        ({"step": None}, "Progress.step: NoneType instead of int"),
        ({"step": -1}, "'step' must be >= 0"),
        ({"step": 2**63}, "'step' must be <="),
        ({"tokens_per_s": "1"}, "Progress.tokens_per_s: str instead of float"),
        ({"tokens_per_s": False}, "Progress.tokens_per_s: bool instead of float"),
        ({"tokens_per_s": math.nan}, "Progress.tokens_per_s: nan is not finite"),
        ({"tokens_per_s": -1.0}, "tokens_per_s must be finite and not negative"),
        ({"loss": math.inf}, "Progress.loss: inf is not finite"),
        ({"loss": "0.5"}, "Progress.loss: str instead of float"),
        ({"phase": b"training"}, "Progress.phase: bytes instead of str"),
        ({"phase": "x" * 65}, "'phase' must be <= 64"),
        ({"metrics": []}, "Progress.metrics: list instead of a map"),
        ({"metrics": {"a": figure(-math.inf)}}, "Progress.metrics['a'].value: -inf is not finite"),
        ({"metrics": {b"a": figure(1.0)}}, "bytes instead of str"),
        ({"metrics": {"a" * 1_001: figure(1.0)}}, "a key of 1001 characters"),
        ({"metrics": {"a" * 65: figure(1.0)}}, "'metrics' must be <= 64"),
        ({"metrics": {str(n): figure(0.0) for n in range(33)}}, "'metrics' must be <= 32"),
        ({"unheard_of": 1}, "Progress.unheard_of: unknown field"),
    ],
)
def test_what_does_not_fit_is_refused_with_its_path(change: dict[str, Any], reason: str) -> None:
    with pytest.raises(RemoteProtocolError) as raised:
        wire.decode(framed("Progress", wire.to_plain(PROGRESS) | change))
    assert reason in str(raised.value)


def test_a_path_leads_into_lists_and_records() -> None:
    layout = m.ModelLayout((m.TensorSpec("a", (2, 3), "float32", "parameter"),) * 3)
    plain = wire.to_plain(m.TrainerAttached(layout))
    plain["layout"]["tensors"][2] = wire.to_plain(layout.tensors[2]) | {"shape": [2, "3"]}
    with pytest.raises(
        RemoteProtocolError, match=r"TrainerAttached\.layout\.tensors\[2\]\.shape\[1\]: str"
    ):
        wire.decode(framed("TrainerAttached", plain))
    del plain["layout"]
    with pytest.raises(RemoteProtocolError, match=r"TrainerAttached\.layout: missing field"):
        wire.decode(framed("TrainerAttached", plain))
    with pytest.raises(RemoteProtocolError, match=r"TrainerAttached\.layout: list instead"):
        wire.decode(framed("TrainerAttached", {"layout": []}))


def test_a_text_is_not_a_list_of_its_characters() -> None:
    junk: object
    for junk in ("ab", {"a": 1}, b"ab"):
        with pytest.raises(RemoteProtocolError, match="instead of a list"):
            wire.decode(
                framed(
                    "BlocksRequest", wire.to_plain(m.BlocksRequest(0, 0, 0, ())) | {"blocks": junk}
                )
            )


def test_an_int_is_fine_where_a_float_is_due() -> None:
    message = wire.decode(
        framed("Progress", wire.to_plain(PROGRESS) | {"loss": 2, "tokens_per_s": 3})
    )
    assert isinstance(message, m.Progress)
    assert (message.loss, message.tokens_per_s) == (2.0, 3.0)
    assert type(message.loss) is float


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        framed("Nonsense", {}),
        framed("Message", {}),
        framed("ModelLayout", {"tensors": []}),  # a record, but no message
        framed("Heartbeat", [1]),
        framed("Heartbeat", {"sequence": 1}) + b"\x00",
        framed("Heartbeat", {"sequence": 1})[:-1],
        msgpack.packb(["Heartbeat"]),
        msgpack.packb([["Heartbeat"], {}]),
        msgpack.packb({"Heartbeat": {"sequence": 1}}),
        msgpack.packb(["Heartbeat", {"sequence": msgpack.ExtType(1, b"")}]),
        msgpack.packb(["Heartbeat", {"sequence": msgpack.Timestamp(1)}]),
        b"\x91" * 2_000 + b"\x01",
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\xdb\xff\xff\xff\xff",
        b"\x92\xa5\xff\xfe\xfd\xfc\xfb\x80",
    ],
)
def test_what_is_no_message_is_refused(frame: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        wire.decode(frame)


def test_an_over_long_frame_is_not_even_looked_at() -> None:
    with pytest.raises(RemoteProtocolError, match="over-long"):
        wire.decode(bytes(message_limits.FRAME_BYTES_MAX + 1))


def test_refused_enums() -> None:
    good = wire.to_plain(m.Refused(m.RefusalCode.FULL, "x"))
    assert good["code"] == "full"
    junk: object
    for junk in ("FULL", "nonsense", None, 1, [], {}):
        with pytest.raises(RemoteProtocolError, match=r"Refused\.code"):
            wire.decode(framed("Refused", good | {"code": junk}))


@pytest.mark.parametrize(
    "message",
    [
        evolve(PROGRESS, loss=math.nan),
        evolve(PROGRESS, loss=-math.inf),
        evolve(PROGRESS, metrics={"a": m.LoggedFigure(math.inf, 1)}),
        m.Metrics(1, {"a": "b"}),  # type: ignore[dict-item]
    ],
)
def test_a_message_that_cannot_be_encoded_is_a_local_error(message: m.Message) -> None:
    with pytest.raises(LocalProtocolError):
        wire.encode(message)


def test_only_messages_travel() -> None:
    class Heartbeat(m.Message):  # not the one of ``messages``
        pass

    for other in (m.Message(), Heartbeat(), m.ModelLayout(())):
        with pytest.raises(LocalProtocolError, match="not a message"):
            wire.encode(other)  # type: ignore[arg-type]


def test_the_largest_messages_fit() -> None:
    tensor = m.TensorSpec(
        "model.layers.61.mlp.experts.255.down_proj.weight", (7_168, 2_048), "bfloat16", "parameter"
    )
    layout = m.TrainerAttached(m.ModelLayout((tensor,) * m.TENSORS_MAX))
    assert wire.decode(wire.encode(layout)) == layout
    index = m.Index(m.FragmentHead(0, m.COUNT_MAX, bytes(32)), bytes(32 * messages.BLOCKS_MAX))
    assert wire.decode(wire.encode(index)) == index
    blocks = m.BlocksRequest(0, 0, 0, tuple(range(messages.BLOCKS_MAX)))
    assert wire.decode(wire.encode(blocks)) == blocks


def test_an_empty_message_is_small_and_a_small_one_is_quick() -> None:
    assert len(wire.encode(m.InitialPosted())) < 20
    start_s = time.process_time()  # whoever else is busy here
    for _ in range(1_000):
        wire.decode(wire.encode(PROGRESS))
    assert (time.process_time() - start_s) / 1_000 < 200e-6  # measured: 7 microseconds
