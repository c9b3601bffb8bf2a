"""Moments on their way from one peer's trainer to another's, whose optimizer knows nothing of the run.

    joiner                                  a contributor
    trainer > MomentsWanted
            > MomentsRequest(transfer)        > GiveMoments          > trainer, at its boundary
                                              < MomentsGiven         once for all who ask for a while
            < MomentsOffer(size, digest), or MomentsRefused(reason)
            > MomentsAccepted
            < BLOCK frames, as state goes
    trainer < TakeMoments
            > MomentsTaken

The joiner asks one contributor after the other, until it has them, its trainer has contributed, or
time is over; meanwhile its trainer trains on, at the rate of who has nothing. What is in the file is
the trainers' business: here it is bytes, with a digest. Nothing of it is the run's state.
"""

from __future__ import annotations

import logging
import os
import secrets
from collections import deque
from functools import partial
from pathlib import Path

import trio
from attrs import field, frozen
from blake3 import blake3

from ..collectives.courtesy import Rank
from ..collectives.outlet import Frame, Load
from ..membership.spec import INT8
from ..protocol.errors import HoldfastError, PeerLostError
from ..protocol.lane import FrameHeader, FrameKind
from ..protocol.messages import (
    MOMENTS_BYTES_MAX,
    GiveMoments,
    Message,
    MomentsAccepted,
    MomentsGiven,
    MomentsOffer,
    MomentsRefused,
    MomentsRequest,
    MomentsSettled,
    MomentsTaken,
    Role,
    TakeMoments,
)
from ..protocol.text import plain
from .keeper import StateKeeper
from .parts import Parts

log = logging.getLogger("holdfast.peer")

PIECE_BYTES = 2**20  # of a file in one frame, as a block of state
# An optimizer's three tensors of a parameter take about a byte a value each, small ones up to eight.
VALUE_BYTES_MAX = 4
TENSOR_BYTES_MAX = 2**17
SERVED_MAX = 4  # peers that one gives to at a time: more would each be slower
KEPT_S = 30.0  # a copy that was made for one joiner is others', too
COPY_S = 60.0  # for the trainer to come to a boundary and its thread to write
STALL_S = 20.0  # without a byte of a donor
LINK_WAIT_S = 15.0  # for the link to it to come up
DONORS_MAX = 8  # that one joiner asks
FETCH_S_MAX = 600.0  # for all of them; a ramp of the learning rate is long over by then


class NothingToGetError(HoldfastError):
    """This donor gives none; the text says why."""


@frozen(eq=False)
class _File:
    """An open one. Whoever holds this can read it, whatever becomes of its name."""

    descriptor: int

    def __del__(self) -> None:
        os.close(self.descriptor)


@frozen(eq=False)
class _Gift:
    """What the trainer wrote."""

    file: _File
    size_bytes: int
    digest: bytes


class _Pieces:
    """A gift as frames, read by lanes' threads; see ``collectives.outlet.FrameSource``."""

    def __init__(self, gift: _Gift, transfer: int) -> None:
        self._gift = gift
        self._transfer = transfer
        self._indices = deque(range(_piece_count(gift.size_bytes)))

    def next_frame(self) -> Load | None:
        return partial(self._frame, self._indices.popleft()) if self._indices else None

    def exhausted(self) -> bool:
        return not self._indices

    def _frame(self, index: int) -> Frame | None:
        wanted_bytes = _piece_bytes(index, self._gift.size_bytes)
        try:
            payload = os.pread(self._gift.file.descriptor, wanted_bytes, index * PIECE_BYTES)
        except OSError:
            payload = b""
        if len(payload) != wanted_bytes:
            return None  # the joiner sees that nothing comes
        return FrameHeader(FrameKind.BLOCK, 0, 0, index, self._transfer, len(payload)), payload


class _Arrivals:
    """What came of a gift; the hub's sink for its frames.

    Attributes:
      news: a piece came, or the link is lost.
      pieces: that came and were not written yet.
      missing: indices of those that did not come yet.
    """

    def __init__(self, donor: str, size_bytes: int) -> None:
        self.news = trio.Event()
        self.pieces: deque[tuple[int, memoryview]] = deque()
        self.missing = set(range(_piece_count(size_bytes)))
        self._donor = donor
        self._size_bytes = size_bytes

    def place(self, peer: str, header: FrameHeader) -> memoryview | None:
        wanted = peer == self._donor and header.index in self.missing
        if not wanted or header.payload_bytes != _piece_bytes(header.index, self._size_bytes):
            return None
        return memoryview(bytearray(header.payload_bytes))

    def deliver(self, _peer: str, header: FrameHeader, payload: memoryview) -> None:
        if header.index in self.missing:
            self.missing.discard(header.index)
            self.pieces.append((header.index, payload))
            self.news.set()

    def abandon(self, _peer: str, _header: FrameHeader, _view: memoryview) -> None:
        """It comes again, or counts as missing."""


@frozen(eq=False)
class _Asked:
    """What was asked of a donor, and its answer once that is there."""

    donor: str
    transfer: int
    answer: list[MomentsOffer | MomentsRefused] = field(factory=list)
    news: trio.Event = field(factory=trio.Event)


class MomentsExchange:
    """Both sides, for one peer. Touched by its event loop only."""

    def __init__(self, parts: Parts, keeper: StateKeeper) -> None:
        self._parts = parts
        self._keeper = keeper
        # As a donor.
        self._gift: _Gift | None = None
        self._copying = trio.Lock()
        self._given: trio.Event | None = None  # set when the trainer has answered
        self._given_reason = ""
        self._offering: dict[str, trio.CancelScope] = {}  # by peer
        self._offers: dict[str, tuple[int, _Gift]] = {}  # that stand, with their transfers
        self._serving: dict[str, trio.CancelScope] = {}
        # As a joiner.
        self._fetching: trio.CancelScope | None = None
        self._asked: _Asked | None = None
        self._got: tuple[str, int] | None = None  # donor and bytes of what the trainer has to take

    @property
    def enabled(self) -> bool:
        spec = self._parts.known_spec
        return (
            bool(self._parts.config.moments)
            and spec is not None
            and (spec.diloco.inner_state == INT8)
        )

    # ------------------------------------------------------------ the trainer

    def wanted(self) -> None:
        """Our trainer's optimizer is empty, and its steps count."""
        self._stop()
        if self.enabled:
            self._fetching = trio.CancelScope()
            self._parts.start(self._fetch, self._fetching)

    def given(self, message: MomentsGiven) -> None:
        """It has written what was asked of it."""
        if self._given is not None:
            self._given_reason = message.reason
            self._given.set()

    def taken(self, message: MomentsTaken) -> None:
        if self._got is not None:
            (donor, size_bytes), self._got = self._got, None
            self._path("taken").unlink(missing_ok=True)
            if message.reason:
                self._settle("", size_bytes, f"those of {donor[:8]} do not do: {message.reason}")
            else:
                self._settle(donor, size_bytes, "")

    def contributed(self) -> None:
        """Its optimizer has been at work for a whole phase: it knows enough by itself."""
        if self._fetching is not None:
            self._stop()
            self._settle("", 0, "its first contribution was due before they came")

    def trainer_went(self) -> None:
        """Nobody is left who wants anything, or could give."""
        self._stop()
        self._got = None
        self.given(MomentsGiven("its trainer is gone"))

    def _stop(self) -> None:
        if self._fetching is not None:
            self._fetching.cancel()
            self._fetching = None

    def _path(self, what: str) -> Path:
        return Path(f"{self._parts.config.moments}.{what}")

    def _settle(self, donor: str, received_bytes: int, reason: str) -> None:
        if donor:
            text = f"the trainer's optimizer goes on from {donor[:8]}'s moments"
        else:
            text = f"the trainer's optimizer begins anew, its rate ramps: {reason}"
        log.info("%s", text)
        self._parts.report.told.append(text)
        self._parts.tell_master(MomentsSettled(donor, received_bytes, plain(reason)))

    # ------------------------------------------------------------ links

    def receive(self, peer: str, message: Message) -> None:
        """A member asks or answers; what nobody waits for is dropped."""
        match message:
            case MomentsRequest():
                if (before := self._offering.get(peer)) is not None:
                    before.cancel()  # it has forgotten what it asked before
                scope = self._offering[peer] = trio.CancelScope()
                self._parts.start(self._offer, peer, message.transfer, scope)
            case MomentsAccepted():
                transfer, gift = self._offers.pop(peer, (None, None))
                if gift is not None and transfer == message.transfer:
                    self._parts.start(self._give, peer, message.transfer, gift)
            case MomentsOffer() | MomentsRefused():
                asked = self._asked
                if asked is not None and (asked.donor, asked.transfer) == (peer, message.transfer):
                    asked.answer.append(message)
                    asked.news.set()

    # ------------------------------------------------------------ a donor

    async def _offer(self, peer: str, transfer: int, scope: trio.CancelScope) -> None:
        link = self._parts.hub.links.get(peer)
        try:
            with scope:
                if link is not None:
                    await link.send(await self._answer(peer, transfer))
                    await trio.sleep(STALL_S)  # who has not taken it up by then is gone
        except PeerLostError:
            pass
        finally:
            if self._offering.get(peer) is scope:
                del self._offering[peer]
                self._offers.pop(peer, None)

    async def _answer(self, peer: str, transfer: int) -> MomentsOffer | MomentsRefused:
        try:
            gift = await self._copy(peer)
        except NothingToGetError as error:
            return MomentsRefused(transfer, plain(str(error)))
        self._offers[peer] = transfer, gift
        return MomentsOffer(transfer, gift.size_bytes, gift.digest)

    async def _copy(self, peer: str) -> _Gift:
        """What our trainer has written of late, or writes now."""
        if not self.enabled:
            raise NothingToGetError("this peer gives none")
        if len((self._serving.keys() | self._offers.keys()) - {peer}) >= SERVED_MAX:
            raise NothingToGetError(f"it gives to {SERVED_MAX} others just now")
        async with self._copying:
            if self._gift is not None:
                return self._gift
            replica = self._parts.replica
            if not (replica.trainer_loaded and replica.training):
                raise NothingToGetError("its trainer does not train now")
            answered = self._given = trio.Event()
            self._given_reason = "its trainer does not answer"
            self._parts.trainer.tell(GiveMoments())
            with trio.move_on_after(COPY_S):
                await answered.wait()
            self._given = None
            if self._given_reason:
                raise NothingToGetError(self._given_reason)
            try:
                gift = await self._parts.network.run_sync(self._open)
            except OSError as error:
                raise NothingToGetError(f"it cannot be read: {error}") from error
            self._gift = gift
            self._parts.start(self._forget_later, gift)
            return gift

    def _open(self) -> _Gift:
        file = _File(os.open(self._path("given"), os.O_RDONLY | os.O_CLOEXEC))
        size_bytes = os.fstat(file.descriptor).st_size
        if not 0 < size_bytes <= MOMENTS_BYTES_MAX:
            raise OSError(f"{size_bytes} bytes, at most {MOMENTS_BYTES_MAX} are taken")
        digest = blake3()
        for index in range(_piece_count(size_bytes)):
            digest.update(os.pread(file.descriptor, PIECE_BYTES, index * PIECE_BYTES))
        return _Gift(file, size_bytes, digest.digest())

    async def _forget_later(self, gift: _Gift) -> None:
        await trio.sleep(KEPT_S)
        if self._gift is gift:
            self._gift = None
        if not self._copying.locked():
            self._path("given").unlink(missing_ok=True)

    async def _give(self, peer: str, transfer: int, gift: _Gift) -> None:
        if (before := self._serving.get(peer)) is not None:
            before.cancel()
        link = self._parts.hub.links.get(peer)
        if link is None:
            return
        with trio.move_on_after(FETCH_S_MAX) as scope:
            self._serving[peer] = scope
            try:
                await link.send_from(_Pieces(gift, transfer), Rank.COPY)
            except PeerLostError:
                pass
            finally:
                if self._serving.get(peer) is scope:
                    del self._serving[peer]

    # ------------------------------------------------------------ a joiner

    async def _fetch(self, scope: trio.CancelScope) -> None:
        reasons = []
        with scope:
            with trio.move_on_after(FETCH_S_MAX):
                for donor in self._donors():
                    try:
                        size_bytes = await self._fetch_from(donor)
                    except (NothingToGetError, PeerLostError) as error:
                        log.info("no moments of %s: %s", donor[:8], error)
                        reasons.append(f"{donor[:8]}: {error}")
                        continue
                    self._fetching, self._got = None, (donor, size_bytes)
                    self._parts.trainer.tell(TakeMoments())
                    return
                reasons = reasons or ["nobody else contributes"]
            self._fetching = None
            self._settle("", 0, "; ".join(reasons) or f"none came in {FETCH_S_MAX:.0f} s")

    def _donors(self) -> list[str]:
        """Contributors, beginning with another one than other joiners do."""
        replica, me = self._parts.replica, self._parts.config.me
        members = () if replica.view is None else replica.view.members
        others = [m for m in members if m.in_sync and m.role is Role.CONTRIBUTOR and m.peer != me]
        others.sort(key=lambda member: member.number)
        first = next((m.number for m in members if m.peer == me), 0) % max(1, len(others))
        return [member.peer for member in [*others[first:], *others[:first]]][:DONORS_MAX]

    async def _fetch_from(self, donor: str) -> int:
        """Bring one donor's into the file for our trainer; returns how many bytes it was.

        Raises:
          NothingToGetError: it gives none, or what it gives is of no use.
          PeerLostError: no link.
        """
        link = await self._parts.hub.link(donor, LINK_WAIT_S)
        self._asked = asked = _Asked(donor, secrets.randbits(32))
        await link.send(MomentsRequest(asked.transfer))
        with trio.move_on_after(COPY_S + STALL_S):
            await _either(asked.news, link.lost)
        self._asked = None
        if not asked.answer:
            raise NothingToGetError("it does not answer")
        offer = asked.answer[0]
        if isinstance(offer, MomentsRefused):
            raise NothingToGetError(offer.reason)
        if offer.size_bytes > self._bytes_max():
            raise NothingToGetError(f"{offer.size_bytes} bytes are more than this model's can be")
        part = self._path("taken.part")
        try:
            with part.open("wb") as file:
                os.chmod(file.fileno(), 0o600)
                arrivals = _Arrivals(donor, offer.size_bytes)
                key = (FrameKind.BLOCK, asked.transfer)
                with self._parts.hub.register(key, arrivals):
                    await link.send(MomentsAccepted(asked.transfer))
                    while arrivals.missing or arrivals.pieces:
                        await self._write(file.fileno(), arrivals, link.lost)
            digest = blake3()
            await self._parts.network.run_sync(lambda: digest.update_mmap(part))
            if digest.digest() != offer.digest:
                raise NothingToGetError("what it sent has another digest than it said")
            part.replace(self._path("taken"))
        except OSError as error:
            raise NothingToGetError(f"it cannot be written here: {error}") from error
        finally:
            part.unlink(missing_ok=True)
        return offer.size_bytes

    async def _write(self, descriptor: int, arrivals: _Arrivals, lost: trio.Event) -> None:
        """Write what has come, waiting for more if nothing has."""
        if not arrivals.pieces:
            if not lost.is_set():
                arrivals.news = trio.Event()
                with trio.move_on_after(STALL_S):
                    await _either(arrivals.news, lost)
            if not arrivals.pieces:
                why = "its link was lost" if lost.is_set() else f"nothing came for {STALL_S:.0f} s"
                raise NothingToGetError(why)
        pieces = [arrivals.pieces.popleft() for _ in range(len(arrivals.pieces))]

        def work() -> None:
            for index, payload in pieces:
                written = 0
                while written < len(payload):
                    offset = index * PIECE_BYTES + written
                    written += os.pwrite(descriptor, payload[written:], offset)

        await self._parts.network.run_sync(work)

    def _bytes_max(self) -> int:
        """Of what an honest donor can have, for the run's layout."""
        layout, sizes = self._keeper.layout, self._keeper.state.sizes
        assert layout is not None
        value_count = sum(size.value_count for size in sizes)
        by_layout = VALUE_BYTES_MAX * value_count + TENSOR_BYTES_MAX * (1 + len(layout.tensors))
        return min(MOMENTS_BYTES_MAX, by_layout)


async def _either(one: trio.Event, other: trio.Event) -> None:
    """Wait for whichever happens first."""

    async def wait(event: trio.Event) -> None:
        await event.wait()
        nursery.cancel_scope.cancel()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(wait, one)
        nursery.start_soon(wait, other)


def _piece_count(size_bytes: int) -> int:
    return -(-size_bytes // PIECE_BYTES)


def _piece_bytes(index: int, size_bytes: int) -> int:
    return min(PIECE_BYTES, size_bytes - index * PIECE_BYTES)
