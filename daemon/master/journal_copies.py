"""Copies of the master's journal at standbys: synchronous replication, as databases call it.

A standby (``standby_copy``) connects with a certificate of the run's authority, whose key it has, and says how far its
copy is. Rows are sent as they are written.

    JournalWanted --another history--> Refused
         |
      copying      nobody waits for it
         |  it has stored all that there was when its last part was sent
      in step      what is written must be on its disk, too, before anything follows from it
         |  it has not stored a part within ``STORED_S``
      dropped      the run goes on without it; it connects again and copies what it lacks

So a copy that is in step lacks nothing that this master has acknowledged. A master cannot tell a standby that ended
from a line that broke: it goes on without it, and says so.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from functools import partial

import msgpack
import trio
from attrs import define, field

from ...protocol.connection_phases import STANDBY
from ...protocol.errors import RemoteProtocolError
from ...protocol.messages import (
    CopiedRow,
    JournalPart,
    JournalStored,
    JournalWanted,
    RefusalCode,
    Refused,
)
from ...protocol.network.interface import Network
from ...protocol.network.stream import MessageStream
from ..status_records import StandbyRow
from .journal_base import Journal, JournalError, JournalPosition
from .journal_store import SCHEMA_VERSION

log = logging.getLogger("holdfast.master")

STANDBYS_MAX = 8
STORED_S = 3.0  # for a standby in step to store what is new; longer than a usual fsync, shorter than people wait
COPYING_S = 30.0  # for a standby that is not in step
BEAT_S = 1.0  # between two signs of life; also how late a new invite is copied
STREAM_ENDS = (trio.BrokenResourceError, trio.ClosedResourceError, trio.EndOfChannel)
PARTS_WAITING_MAX = 16  # parts that were sent and not stored yet


@define(eq=False)
class Standby:
    """A standby that is connected.

    Attributes:
      sent: of parts that are not stored yet: serial number, how far the copy is then, whether that was all.
      position: of what it has stored.
      stored: set, and replaced, when it has stored a part.
    """

    where: str
    position: JournalPosition
    in_step: bool = False
    sent: deque[tuple[int, JournalPosition, bool]] = field(factory=deque)
    stored: trio.Event = field(factory=trio.Event)
    scope: trio.CancelScope = field(factory=trio.CancelScope)


class JournalCopies:
    """The standbys of one master.

    Args:
      note: makes a sentence an event of the run.
    """

    def __init__(
        self, store: Journal, run_id: str, network: Network, note: Callable[[str], None]
    ) -> None:
        self._store = store
        self._run_id = run_id
        self._network = network
        self._note = note
        self._standbys: list[Standby] = []
        self._written = trio.Event()  # something new is in the journal
        self._moved = trio.Event()  # a standby has stored something, or is gone

    def rows(self) -> tuple[StandbyRow, ...]:
        """Return the standbys, for the status."""
        return tuple(
            StandbyRow(where=each.where, records=each.position.records, in_step=each.in_step)
            for each in self._standbys
        )

    async def replicated(self) -> None:
        """Return when all standbys in step have what is in the journal now.

        One that takes longer than ``STORED_S`` is dropped: it is not in step any more.
        """
        if not self._standbys:
            return
        wanted = self._store.position
        _renew(self, "_written")
        with trio.move_on_after(STORED_S):
            while self._behind(wanted):
                await self._moved.wait()
        for standby in self._behind(wanted):
            self._remove(standby, f"has stored nothing for {STORED_S:g} s")

    def _behind(self, wanted: JournalPosition) -> list[Standby]:
        return [
            each for each in self._standbys if each.in_step and not each.position.reaches(wanted)
        ]

    # ------------------------------------------------------------ one standby

    async def serve(self, stream: MessageStream, wanted: JournalWanted, where: str) -> None:
        """Copy the journal to a standby until its connection ends."""
        fault = await self._network.run_sync(partial(self._fault, wanted))
        if fault:
            log.warning("refused a standby at %s: %s", where, fault)
            await stream.send_final(Refused(RefusalCode.PROTOCOL, fault))
            return
        stream.phase = STANDBY
        standby = Standby(where, JournalPosition(wanted.count, 0))
        self._standbys.append(standby)
        log.info("a standby at %s copies the journal from record %d on", where, wanted.count + 1)
        why = "its connection ended"
        try:
            with standby.scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._hear, standby, stream, nursery.cancel_scope)
                    why = await self._send(standby, stream)
                    nursery.cancel_scope.cancel()
        finally:
            self._remove(standby, why)

    def _fault(self, wanted: JournalWanted) -> str:
        """Return why the standby cannot have this journal; empty if it can."""
        if self._store.is_shared:
            return (
                "the journal is in a database: start the other masters with --journal URL --standby"
            )
        if wanted.run_id != self._run_id:
            return "its copy is of another run"
        if wanted.schema != SCHEMA_VERSION:
            return f"its tables have version {wanted.schema}, the master's {SCHEMA_VERSION}"
        if len(self._standbys) >= STANDBYS_MAX:
            return f"the master has {STANDBYS_MAX} standbys, which is the limit"
        try:
            known = self._store.check_at(wanted.count) if wanted.count else b""
        except JournalError as error:
            return f"the master's journal cannot be read: {error}"
        if known != wanted.check:
            return "its copy has records that the master's journal has not: it continued by itself"
        return ""

    async def _send(self, standby: Standby, stream: MessageStream) -> str:
        """Send what is new; return why that ends."""
        position, serial = standby.position, 0
        while True:
            written = self._written
            try:
                rows, position = await self._network.run_sync(
                    partial(self._store.rows_since, position)
                )
            except JournalError as error:
                return f"the journal cannot be read: {error}"
            serial += 1
            copied = tuple(CopiedRow(table, msgpack.packb(row)) for table, row in rows)
            is_all = position.reaches(self._store.position)
            standby.sent.append((serial, position, is_all))
            try:
                part = JournalPart(serial, copied, is_all, standby.in_step)
                await stream.send(part)
            except (*STREAM_ENDS, OSError):
                return "its connection ended"
            with trio.move_on_after(COPYING_S) as in_time:
                while len(standby.sent) >= PARTS_WAITING_MAX:
                    await standby.stored.wait()
            if in_time.cancelled_caught:
                return f"it has stored nothing for {COPYING_S:g} s"
            if is_all and part.in_step == standby.in_step:  # else it is told at once
                with trio.move_on_after(BEAT_S):
                    await written.wait()

    async def _hear(self, standby: Standby, stream: MessageStream, scope: trio.CancelScope) -> None:
        reached = False
        try:
            while True:
                stored = await stream.receive_expected(JournalStored)
                while standby.sent and standby.sent[0][0] <= stored.serial:
                    _, standby.position, was_all = standby.sent.popleft()
                    reached |= was_all
                if reached and not standby.in_step:
                    standby.in_step = True
                    self._note(
                        f"the standby at {standby.where} has the whole journal: from now on nothing is "
                        "acknowledged before it is there, too"
                    )
                _renew(standby, "stored")
                _renew(self, "_moved")
        except (*STREAM_ENDS, OSError, RemoteProtocolError) as error:
            log.info("the standby at %s: %r", standby.where, error)
            scope.cancel()

    def _remove(self, standby: Standby, why: str) -> None:
        if standby not in self._standbys:
            return
        self._standbys.remove(standby)
        standby.scope.cancel()
        _renew(self, "_moved")
        log.info("the standby at %s is gone: %s", standby.where, why)
        if standby.in_step:
            self._note(
                f"the standby at {standby.where} {why}: its copy lacks what follows record "
                f"{standby.position.records} until it is back"
            )


def _renew(owner: object, name: str) -> None:
    """Set the event of this name, and put a new one into its place."""
    getattr(owner, name).set()
    setattr(owner, name, trio.Event())
