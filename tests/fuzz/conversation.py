"""Members that send arbitrary messages to the master: bytes become a conversation, the rules must
hold.

Every message is a well-formed record (what is not never gets past ``wire``, which is a target of
its own), but nothing in it need be true: rounds that are not open, roots that nobody has, peers
that do not exist. The master may drop whoever said it. It must not raise, and after every call all
that ``Coordinator.validate`` promises must hold, for those who were honest, too.
"""

from __future__ import annotations

import enum
import types
import typing
from typing import Any

import attrs

from holdfast.membership.master.coordinator import Grant
from holdfast.protocol import wire
from holdfast.protocol.messages import Hello, Message
from tests.membership.table import (
    CONTRIBUTOR,
    DIGEST,
    FOUNDER,
    LINEAGE,
    OTHER_DIGEST,
    RUN_ID,
    SPARE,
    A,
    B,
    C,
    D,
    E,
    Table,
    root_of,
)

PEERS = (A, B, C, D, E)
GRANTS: tuple[Grant, ...] = (CONTRIBUTOR, SPARE, FOUNDER)
TURNS_MAX = 24  # of one conversation
ITEMS_MAX = 3  # of a tuple or a map
KINDS: tuple[type[Message], ...] = tuple(
    sorted(wire.MESSAGES.values(), key=lambda kind: kind.__name__)
)
WORDS = ("", "w", "float32", "parameter", "fp32", "nf4", "127.0.0.1:1", "training", RUN_ID, *PEERS)
BLOBS = (b"", DIGEST, OTHER_DIGEST, LINEAGE, b"\x01", b"\x03", root_of(0, 1), root_of(1, 1))
FLOATS = (0.0, 1.0, 0.5, 1e-30, 1e30, 10.0)


class _ExhaustedError(Exception):
    pass


class _MisfitError(Exception):
    """The bytes gave a record beyond its limits, which ``wire`` would have refused."""


class Source:
    """Choices, from bytes."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def below(self, count: int) -> int:
        """Return a number from 0 to ``count - 1``; ``count`` is 256 at most."""
        if self._at >= len(self._data):
            raise _ExhaustedError
        self._at += 1
        return self._data[self._at - 1] % count


def talk(data: bytes) -> None:
    """Have a conversation."""
    source = Source(data)
    try:
        shape = source.below(8)
        table = Table(f"[membership]\nmin_members = {1 + shape % 2}\n", fragments=1 + shape // 4)
        if shape // 2 % 2:
            table.start(A, B, spares=[C])
        for _turn in range(TURNS_MAX):
            _turn_of(table, source)
            if table.master.succession.superseded:
                # Its process ends; the daemon has checked that the run's authority signed the term.
                break
    except _ExhaustedError:
        pass


def _turn_of(table: Table, source: Source) -> None:
    peer = PEERS[source.below(len(PEERS))]
    attached = peer in table.master.context.roster
    match source.below(12):
        case 0 | 1:
            hello = _said(table, Hello, source)
            if hello is not None:
                table.join(peer, GRANTS[source.below(len(GRANTS))], hello)
        case 2:
            table.join(peer, GRANTS[source.below(len(GRANTS))])
        case 3 if attached:
            table.leave(peer)
        case 4:
            honest = [each for each in PEERS if each in table.master.context.roster]
            table.wait(float(1 + source.below(60)), *honest[: source.below(6)])
        case 5 if attached:
            table.sync(peer)
        case 6:
            table.take(table.master.kick(peer, "said so", table.now_s))
        case _ if attached:
            said = _said(table, KINDS[source.below(len(KINDS))], source)
            if said is not None:
                table.say(peer, said)
        case _:
            pass


def _said(table: Table, kind: type[Any], source: Source) -> Any:
    """Return a message of this kind, or None if ``wire`` would have refused it."""
    numbers = [0, 1, 2, 3, 2**31, 2**63 - 1, *table.master.scheduler.rounds]
    try:
        message = _record(kind, source, numbers)
        assert wire.decode(wire.encode(message)) == message
    except _MisfitError:
        return None
    return message


def _record(kind: Any, source: Source, numbers: list[int]) -> Any:
    attrs.resolve_types(kind)
    fields: tuple[attrs.Attribute[Any], ...] = attrs.fields(kind)
    values = {field.alias or field.name: _value(field.type, source, numbers) for field in fields}
    try:
        return kind(**values)
    except (ValueError, TypeError) as error:
        raise _MisfitError from error


def _value(wanted: Any, source: Source, numbers: list[int]) -> Any:
    origin, arguments = typing.get_origin(wanted), typing.get_args(wanted)
    if origin is types.UnionType or origin is typing.Union:
        chosen = arguments[source.below(len(arguments))]
        return None if chosen is type(None) else _value(chosen, source, numbers)
    if origin is tuple:
        return tuple(
            _value(arguments[0], source, numbers) for _ in range(source.below(1 + ITEMS_MAX))
        )
    if origin is dict:
        return {
            _value(arguments[0], source, numbers): _value(arguments[1], source, numbers)
            for _ in range(source.below(1 + ITEMS_MAX))
        }
    if wanted is bool:
        return bool(source.below(2))
    if wanted is int:
        return numbers[source.below(len(numbers))]
    if wanted is float:
        return FLOATS[source.below(len(FLOATS))]
    if wanted is str:
        return WORDS[source.below(len(WORDS))]
    if wanted is bytes:
        return BLOBS[source.below(len(BLOBS))]
    if isinstance(wanted, type) and issubclass(wanted, enum.Enum):
        members = list(wanted)
        return members[source.below(len(members))]
    return _record(wanted, source, numbers)
