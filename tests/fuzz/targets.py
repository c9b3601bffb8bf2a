"""Fuzz targets: every parser of bytes from unidentified connections, members and disks.

A target takes any bytes and raises nothing: what its parser is documented to raise is caught here,
and everything else (another exception, a hang, a gigabyte for a short input) is a bug. Where what
was read can be written again, it must come out the same.

The same targets are run by libFuzzer, guided by coverage (``python -m tests.fuzz``), and by pytest
over the corpus in this folder and over what hypothesis makes of it.
"""

from __future__ import annotations

import base64
import hashlib
import io
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import BinaryIO

import msgpack
import numpy as np
from attrs import frozen
from blake3 import blake3

from holdfast.checkpoint.checkpoint_store import FolderStore
from holdfast.checkpoint.checkpoints import (
    DIGEST_KEY,
    MANIFEST_KEY,
    CheckpointError,
    open_checkpoint,
)
from holdfast.checkpoint.tensor_file import (
    TensorFileError,
    encode_header,
    find_array,
    read_bytes,
)
from holdfast.collectives.chunk_tracker import UnwantedFrameError
from holdfast.collectives.codecs.codecs import expand, parse_codec
from holdfast.collectives.result import pack_set, unpack_set
from holdfast.daemon.web.run_history import EventsQuery, HistoryQuery, QueryError, parse_query
from holdfast.membership.master.state.journal import RECORDS
from holdfast.membership.spec.spec import CODECS, RunSpec
from holdfast.membership.spec.spec_faults import find_faults
from holdfast.protocol import messages as m
from holdfast.protocol import wire
from holdfast.protocol.addresses import Address
from holdfast.protocol.connection_phases import (
    ADMITTING,
    CLAIM,
    GREETING,
    LINK,
    LINK_GREETING,
    MEMBER,
    NEWCOMER,
)
from holdfast.protocol.errors import RemoteProtocolError, UserError
from holdfast.protocol.network.lane import (
    HEADER_BYTES,
    OPEN,
    FrameHeader,
    FrameKind,
    LanePreamble,
    RecordOpener,
    RecordSealer,
)
from holdfast.protocol.trust.authority import Authority, Party, holder_of, load_certificate
from holdfast.protocol.trust.identity import Identity
from holdfast.protocol.trust.invite import CHECKSUM_BYTES, PREFIX, Invite, generate_token
from tests.collectives.test_chunk_tracker import CHUNK_BYTES, a_tracker
from tests.fuzz.conversation import talk
from tests.membership.table import DIGEST, RUN_ID, A, B, C, hello_of

VALUES = 300  # of a chunk: a whole block of every codec and a part of one
KEY = bytes(32)
RUN_TOML = (
    '[run]\nname = "a"\nrounds = 3\n[diloco]\nsync_every = 20\noverlap = "auto"\n[reduce]\ncodec_up'
    ' = "nf4"\n'
)


@frozen
class Target:
    """A function that reads bytes.

    Attributes:
      run: see the top of this file.
      seeds: a few valid inputs.
      bytes_max: longer inputs test nothing new.
    """

    run: Callable[[bytes], None]
    seeds: Callable[[], Sequence[bytes]]
    bytes_max: int = 2_048


# ---------------------------------------------------------------- from the network


def message(data: bytes) -> None:
    """Read a control stream's frame, in each phase of a connection."""
    read = _read(data)
    for phase in (NEWCOMER, ADMITTING, CLAIM, GREETING, MEMBER, LINK_GREETING, LINK):
        assert phase.types is not None
        with suppress(RemoteProtocolError):
            assert wire.decode(data, phase.types) == read
            assert type(read) in phase.types
            wire.check_head(data[: wire.HEAD_BYTES_MAX], len(data), phase.types)


def _read(data: bytes) -> m.Message | None:
    try:
        read, items = wire.decode_counted(data)
    except RemoteProtocolError:
        return None
    assert wire.decode(wire.encode(read)) == read
    assert items <= max(wire.LIMITS[type(read)].items + 2, len(data))
    return read


def long_message(data: bytes) -> None:
    """Repeat the input as a layout's tensors, so often that items are counted while they are
    built.
    """
    if not data:
        return
    count = min(wire.UNCOUNTED_BYTES_MAX // len(data) + 1, m.TENSORS_MAX)
    head = wire.encode(m.TrainerAttached(m.ModelLayout(())))[:-1]
    _read(head + b"\xdd" + count.to_bytes(4, "big") + count * data)


def _tensors() -> list[bytes]:
    tensor = m.TensorSpec("model.layers.0.weight", (4, 4), "float32", "parameter")
    return [msgpack.packb(wire.to_plain(tensor)), b"\x80", b"\xdd\x00\x01\x00\x00"]


def _messages() -> list[bytes]:
    head = m.FragmentHead(0, 1, DIGEST)
    said = [
        m.Heartbeat(7),
        hello_of(A, heads=[head]),
        m.Ready(1, 2, 1.5, DIGEST, 20),
        m.Reduced(1, 0, DIGEST),
        m.Index(head, DIGEST + DIGEST),
        m.BlocksRequest(0, 1, 2, (1, 2, 3)),
    ]
    return [wire.encode(each) for each in said]


def frame_header(data: bytes) -> None:
    """Read a frame header, and a lane's preamble."""
    with suppress(RemoteProtocolError):
        assert LanePreamble.unpack(data).pack() == data
    if len(data) >= HEADER_BYTES:
        with suppress(RemoteProtocolError):
            assert FrameHeader.unpack(data[:HEADER_BYTES]).pack() == data[:HEADER_BYTES]


def lane(data: bytes) -> None:
    """Read a lane's bytes from a sender without its key: no frame may come through."""
    opener = RecordOpener(KEY)
    source = io.BytesIO(data)
    try:
        while len(head := source.read(HEADER_BYTES)) == HEADER_BYTES:
            header = opener.header(head)
            target = memoryview(bytearray(header.payload_bytes))
            for sealed, into in opener.records(header, target):
                if source.readinto(sealed) < len(sealed):  # the stream ends
                    return
                opener.open(sealed, into)
                assert data.startswith(_sealed()), "a record that the key's holder did not make"
    except RemoteProtocolError:
        pass


@cache
def _sealed() -> bytes:
    return b"".join(map(bytes, RecordSealer(KEY).seal(OPEN, b"")))


@cache
def _frames() -> bytes:
    sealer, frames = RecordSealer(KEY), b""
    header = FrameHeader(FrameKind.BLOCK, 1, 0, 0, 0, 5)
    for each, payload in ((OPEN, b""), (header, b"block")):
        frames += b"".join(map(bytes, sealer.seal(each, payload)))
    return frames


def frames(data: bytes) -> None:
    """Give frames of a reduction from two members with keys to an owner's tracker: six bytes
    each.
    """
    tracker = a_tracker(A)
    for start in range(0, len(data) - 5, 6):
        who, kind, index, attempt, length, what = data[start : start + 6]
        peer = (B, C)[who % 2]
        header = FrameHeader(
            tuple(FrameKind)[kind % len(FrameKind)],
            5,
            attempt % 4,
            (index % 8) << (24 if index > 250 else 0),
            7 if who < 250 else who,
            CHUNK_BYTES if length < 200 else length,
        )
        view = tracker.place(peer, header)
        if view is None:
            continue
        assert len(view) == header.payload_bytes
        if what % 4 == 0:
            tracker.abandon(peer, header, view)
        else:
            with suppress(UnwantedFrameError):
                tracker.deliver(peer, header, view)
        if what % 16 == 15:
            tracker.shut_out([peer])
        assert len(tracker.held()) == 1


def codec(data: bytes) -> None:
    """Decode a chunk; the first byte chooses the codec."""
    if not data:
        return
    name = CODECS[data[0] % len(CODECS)]
    out = np.full(VALUES, np.nan, np.float32)
    decoder, compressed = parse_codec(name)
    try:
        plain = expand(data[1:], decoder.encoded_bytes(VALUES)) if compressed else data[1:]
        decoder.decode(plain, out)
    except ValueError:
        return
    assert not np.isnan(out).any() or name.startswith(("fp32", "bf16")), "a value not written"


def _chunks() -> list[bytes]:
    values = np.random.default_rng(0).standard_normal(VALUES).astype(np.float32)
    found = []
    for index, name in enumerate(CODECS):
        coder, _compressed = parse_codec(name)
        room = memoryview(bytearray(coder.encoded_bytes(VALUES)))
        found.append(bytes([index]) + bytes(room[: coder.encode(values, room)]))
    return found


def contributors(data: bytes) -> None:
    """Read the contributor set that follows a partial result."""
    if len(data) < 2:
        return
    count = 1 + data[0] % 40
    with suppress(ValueError):
        present = unpack_set(data[1 : 1 + (count + 7) // 8], count)
        assert unpack_set(pack_set(present), count) == present


def certificate(data: bytes) -> None:
    """Read a certificate request, and a certificate."""
    with suppress(RemoteProtocolError):
        holder_of(load_certificate(data))
    try:
        signed = _authority().issue(data, "newcomer", Party.PEER)
    except RemoteProtocolError:
        return
    assert holder_of(load_certificate(signed)).party is Party.PEER


@cache
def _authority() -> Authority:
    with tempfile.TemporaryDirectory() as folder:
        return Authority.load_or_create(Path(folder), RUN_ID)


def _certificates() -> list[bytes]:
    request = Identity.generate().request_pem("newcomer")
    return [request, _authority().issue(request, "newcomer", Party.PEER)]


def query(data: bytes) -> None:
    """Parse the part of an HTTP address behind the question mark."""
    text = data.decode("latin-1")
    with suppress(QueryError):
        assert parse_query({"limit": text}, EventsQuery).limit <= 1_000
    with suppress(QueryError):
        assert (parse_query({"before": text}, EventsQuery).before or 0) < 2**63
    with suppress(QueryError):
        assert (parse_query({"from": text}, HistoryQuery).from_at or 0.0) >= 0.0
    with suppress(QueryError):
        assert len(parse_query({"kind": text, "text": text}, EventsQuery).kinds) >= 0


# ---------------------------------------------------------------- from people and disks


def invite(data: bytes) -> None:
    """Decode an invite, and the same bytes with a correct checksum, which is not a secret."""
    checked = data + hashlib.sha256(data).digest()[:CHECKSUM_BYTES]
    packed = PREFIX + base64.urlsafe_b64encode(checked).decode().rstrip("=")
    for text in (data.decode("utf-8", "replace"), packed):
        with suppress(UserError):
            read = Invite.decode(text, 0.0)
            assert Invite.decode(read.encode(), 0.0) == read


def _invites() -> list[bytes]:
    made = Invite(
        RUN_ID, (Address("::1", 29700),), "ab" * 32, generate_token(), m.Role.SPARE, 2**40
    )
    text = made.encode()
    padded = text.removeprefix(PREFIX) + "==="
    packed = base64.urlsafe_b64decode(padded[: len(padded) // 4 * 4])[:-CHECKSUM_BYTES]
    assert msgpack.unpackb(packed)[0] == RUN_ID
    return [text.encode(), packed]


def address(data: bytes) -> None:
    """Parse HOST:PORT, from a member's ``Hello`` or a command line."""
    with suppress(UserError):
        read = Address.parse(data.decode("utf-8", "replace"))
        assert Address.parse(str(read)) == read


def spec(data: bytes) -> None:
    """Parse run.toml, from an operator, a journal, or a master."""
    text = data.decode("utf-8", "replace")
    errors, _warnings = find_faults(text)
    try:
        read = RunSpec.parse(text)
    except UserError:
        assert errors, "the check of a spec has not seen what is wrong with it"
        return
    assert not errors
    assert RunSpec.parse(read.toml_text) == read


def journal(data: bytes) -> None:
    """Read a row of the journal with a correct checksum."""
    for kind in RECORDS.values():
        with suppress(RemoteProtocolError, ValueError, TypeError):
            read = wire.from_plain(kind, msgpack.unpackb(data))
            assert wire.from_plain(kind, wire.to_plain(read)) == read


class _Shelf(FolderStore):
    """One file, in memory."""

    def __init__(self, data: bytes) -> None:
        super().__init__(Path("shelf"))
        self._data = data

    def size_bytes(self, name: str) -> int:
        return len(self._data)

    @contextmanager
    def reading(self, name: str) -> Iterator[BinaryIO]:
        yield io.BytesIO(self._data)


def checkpoint(data: bytes) -> None:
    """Read a checkpoint's file, and one whose manifest is these bytes, with the right digest."""
    text = data.decode("utf-8", "replace")
    digest = blake3(text.encode()).hexdigest()
    made = bytes(encode_header([], {MANIFEST_KEY: text, DIGEST_KEY: digest}))
    for each in (data, made):
        shelf = _Shelf(each)
        with suppress(CheckpointError):
            opened = open_checkpoint(shelf, "a")
            for name, entry in opened.header.entries.items():
                with suppress(TensorFileError), shelf.reading("a") as file:
                    found = find_array(opened.header, name, entry.dtype, sum(entry.shape))
                    read_bytes(file, opened.header, found, 0, found.stop - found.start)


def _checkpoints() -> list[bytes]:
    header = encode_header([("a", "F32", (2,))], {MANIFEST_KEY: "{}", DIGEST_KEY: ""})
    return [bytes(header) + bytes(8), b'{"format": 1, "run_id": "", "heads": []}']


def _of(*seeds: bytes) -> Callable[[], Sequence[bytes]]:
    return lambda: seeds


TARGETS: dict[str, Target] = {
    "message": Target(message, _messages),
    "long_message": Target(long_message, _tensors, 128),
    "frame_header": Target(
        frame_header, lambda: [_frames()[:HEADER_BYTES], LanePreamble(bytes(16), 3).pack()], 64
    ),
    "lane": Target(lane, lambda: [_frames()], 512),
    "frames": Target(
        frames,
        _of(bytes([0, 1, 0, 1, 0, 1]) + bytes([1, 1, 0, 1, 0, 1]) + bytes([1, 2, 2, 1, 0, 1])),
        300,
    ),
    "codec": Target(codec, _chunks),
    "contributors": Target(contributors, _of(b"\x09\x03\x00", b"\x02\x01"), 16),
    "certificate": Target(certificate, _certificates, 4_096),
    "query": Target(query, _of(b"7", b"1.5", b"join"), 64),
    "invite": Target(invite, _invites, 1_024),
    "address": Target(address, _of(b"[::1]:29700", b"a.example.org:1", b"10.0.0.1:65535"), 300),
    "spec": Target(spec, lambda: [RUN_TOML.encode()]),
    "journal": Target(
        journal, lambda: [msgpack.packb({"paused": True}), msgpack.packb({"fragment": 1})]
    ),
    "checkpoint": Target(checkpoint, _checkpoints),
    "conversation": Target(talk, _of(bytes(range(200)), bytes([2, 0, 7, 9] * 60)), 400),
}
